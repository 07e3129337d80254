"""The checks of arguments that are the same in all products that a user calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from coda_jax.epilogue import Epilogue
from coda_jax.epilogue.dtypes import OPERANDS, RESULTS, is_of_8_bits, listed
from coda_jax.primitives.dtypes import check_dtype
from coda_jax.tiles.config import GemmConfig


def as_operand(function: str, index: int, x: Any) -> jax.Array:
    """An operand as an array; Python's numbers are scalars."""
    if isinstance(x, bool):
        return jnp.asarray(x)
    if isinstance(x, int):
        if not -(2**31) <= x < 2**31:
            raise ValueError(f"{function}: operand {index} = {x}; an integer must fit int32")
        return jnp.asarray(x, jnp.int32)
    if isinstance(x, float):
        return jnp.asarray(x, jnp.float32)
    if callable(x):
        raise TypeError(
            f"{function}: operand {index} is a function; a function of (acc, *operands) is given as epilogue="
        )
    check_dtype(function, f"operand {index}", x, OPERANDS)
    return jnp.asarray(x)


def check_options(function: str, residuals: str, implementation: str, config: Any) -> None:
    """Raises if one of these options is not allowed."""
    _check_choice(function, "residuals", residuals, ("preactivation", "recompute"))
    check_implementation(function, implementation)
    if config is not None and not isinstance(config, GemmConfig):
        raise TypeError(f"{function}: config is {type(config).__name__}; it must be a GemmConfig or None")


def check_implementation(function: str, implementation: str) -> None:
    _check_choice(function, "implementation", implementation, ("auto", "cuda", "xla"))


def check_epilogue(function: str, epilogue: Any, operands: Sequence[Any]) -> None:
    """Raises if the epilogue is no function, or operands are given without one."""
    if epilogue is not None and not callable(epilogue):
        raise TypeError(
            f"{function}: epilogue is {type(epilogue).__name__}; it must be a function of (acc, *operands) or None"
        )
    if epilogue is None and operands:
        raise TypeError(
            f"{function}: {len(operands)} operands without an epilogue; epilogue=lambda acc, x: acc + x adds one"
        )


def check_out_sharding(function: str, spec: Any, shape: tuple[Any, ...]) -> None:
    """Raises if `spec` is no sharding of a product of this shape."""
    if spec is None:
        return
    if not isinstance(spec, jax.P):
        raise TypeError(f"{function}: out_sharding is {type(spec).__name__}; it must be a jax.P or None")
    if len(spec) > len(shape):
        raise ValueError(f"{function}: out_sharding = {spec} is of {len(spec)} axes; the product has shape {shape}")
    mesh = jax.sharding.get_abstract_mesh()
    names = (name for entry in spec for name in (entry if isinstance(entry, tuple) else (entry,)))
    unknown = sorted({name for name in names if isinstance(name, str)} - set(mesh.axis_names))
    if unknown and not mesh.empty:
        raise ValueError(f"{function}: out_sharding = {spec}; the mesh has axes {mesh.axis_names}, and no {unknown}")


def _check_choice(function: str, name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{function}: {name} = {value!r}; it must be one of {', '.join(map(repr, allowed))}")


def tile_dtypes(function: str, traced: Epilogue, out_dtype: Any, default: np.dtype, one_row: bool) -> list[np.dtype]:
    """One dtype for each flat output: a tile has the one asked for, else the default; others have the epilogue's.

    Tiles that the epilogue converts to a float of 8 bits have the epilogue's dtype too, where none is asked for.
    """

    def is_none(x: Any) -> bool:
        return x is None

    unset = object()  # in the place of None, which is a tree without leaves
    try:
        template = jax.tree.unflatten(traced.out_tree, list(traced.out_avals))
        asked_tree = jax.tree.map(lambda x: unset if x is None else x, out_dtype, is_leaf=is_none)
        asked = jax.tree.leaves(jax.tree.broadcast(asked_tree, template))
    except ValueError as error:
        dtypes_given, returned = len(jax.tree.leaves(asked_tree)), len(traced.out_avals)
        counts = f": {dtypes_given} dtypes for {returned} outputs" if dtypes_given != returned else f": {error}"
        raise ValueError(
            f"{function}: out_dtype = {out_dtype} does not fit what epilogue '{traced.name}' returns, "
            f"{traced.out_tree}{counts}"
        ) from None
    one_for_all = jax.tree.leaves(out_dtype, is_leaf=is_none) == [out_dtype]
    tiles = {store.output for store in traced.program.stores}
    # Beside one row, a function of row vectors is a tile too: its dtype must not depend on the number of rows.
    if one_row:
        tiles |= {i for i in traced.program.unreduced if len(shape := traced.out_avals[i].shape) == 2 and shape[1] != 1}
    dtypes = []
    for i, (dtype, aval) in enumerate(zip(asked, traced.out_avals, strict=True)):
        chosen = None if dtype is unset else _as_dtype(function, dtype)
        if i not in tiles:
            if chosen is not None and not one_for_all and chosen != aval.dtype:
                raise TypeError(
                    f"{function}: out_dtype of output {i} of epilogue '{traced.name}' is {chosen}; what is "
                    f"not a tile keeps the epilogue's dtype, {aval.dtype}"
                )
            dtypes.append(aval.dtype)
        elif chosen is not None and chosen.name not in RESULTS:
            raise TypeError(f"{function}: out_dtype of output {i} is {chosen}; a tile is {listed(RESULTS)}")
        else:
            dtypes.append(chosen or (aval.dtype if is_of_8_bits(aval.dtype) else default))
    return dtypes


def _as_dtype(function: str, dtype: Any) -> np.dtype:
    try:
        return jnp.dtype(dtype)
    except TypeError:
        raise TypeError(f"{function}: out_dtype = {dtype!r} is not a dtype") from None
