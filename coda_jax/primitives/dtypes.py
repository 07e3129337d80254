"""The dtypes that operators accept, and those in which a product is computed, kept and summed.

Operators accept the floats of `epilogue/dtypes.py`. float64, where jax_enable_x64 permits it, is refused: it would be
rounded silently. `coda.gemm` also accepts factors of 8 bits, if both have 8 bits: nothing is promoted to 8 bits.

A product has three more dtypes than its arrays. Both factors are multiplied in `compute_dtype`, into a float32
accumulator. Where the accumulator is kept for a backward pass, or goes through memory, it has `kept_dtype`. Where k is
sharded, the products of the devices are summed in `wire_dtype`. Only a dtype with float32's range is kept or summed as
it is, for an accumulator may overflow a narrower one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from coda_jax.epilogue.dtypes import FLOATS, FLOATS_OF_8_BITS, has_narrow_range, is_of_8_bits, listed
from coda_jax.primitives.mesh_types import with_same_sharding
from coda_jax.primitives.spec import GemmSpec


def check_dtype(operator: str, name: str, x: Any, allowed: Sequence[str] = FLOATS) -> None:
    """Raises TypeError where x is no array or has a dtype that is not among those allowed."""
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        raise TypeError(f"{operator}: {name} is {type(x).__name__}; it must be an array")
    dtype = x.dtype if jnp.issubdtype(x.dtype, jax.dtypes.extended) else np.dtype(x.dtype)
    if dtype.name not in allowed:
        raise TypeError(f"{operator}: {name} has dtype {dtype}; it must be {listed(allowed)}")


def check_factors(operator: str, **factors: Any) -> None:
    """Raises TypeError for named factors that cannot be multiplied; b may be several: b[0], b[1] and so on."""
    for name, x in factors.items():
        check_dtype(operator, name, x, (*FLOATS, *FLOATS_OF_8_BITS))
    dtypes = {name: np.dtype(x.dtype) for name, x in factors.items()}
    narrow = [name for name, dtype in dtypes.items() if is_of_8_bits(dtype)]
    others = [name for name in dtypes if name not in narrow]
    if narrow and others:
        raise TypeError(
            f"{operator}: {narrow[0]} has dtype {dtypes[narrow[0]]} and {others[0]} {dtypes[others[0]]}; a factor of 8 "
            f"bits is multiplied by one of 8 bits. Convert one of them: {narrow[0]}.astype(jnp.bfloat16) is exact"
        )
    b_dtypes = {name: dtype for name, dtype in dtypes.items() if name in narrow and name != "a"}
    if len(set(b_dtypes.values())) > 1:
        named = ", ".join(f"{name} {dtype}" for name, dtype in b_dtypes.items())
        raise TypeError(f"{operator}: several factors have dtypes {named}; of 8 bits they must have one dtype")


def check_gradient(product: str, name: str, factor: Any) -> None:
    """Raises TypeError for a factor of 8 bits: its cotangent would have 8 bits too."""
    if is_of_8_bits(factor.dtype):
        raise TypeError(
            f"{product}: {name} is {np.dtype(factor.dtype).name}, which has no gradient: that would have 8 bits too. "
            "Quantise inside a jax.custom_vjp function that has the gradient of what was quantised, as "
            f"coda.fp8.matmul does; where none is wanted, jax.lax.stop_gradient({name})"
        )


def check_floats(operator: str, **arrays: Any) -> None:
    """`check_dtype` for named floating arrays; None is skipped."""
    for name, x in arrays.items():
        if x is not None:
            check_dtype(operator, name, x)


def resolve_dtype(operator: str, dtype: Any, *factors: jax.Array) -> np.dtype:
    """The dtype of an operator's products: the one asked for, else the promotion of the factors."""
    chosen = np.dtype(dtype or jnp.result_type(*factors))
    if chosen.name not in FLOATS:
        raise TypeError(f"{operator}: dtype = {chosen}; it must be {listed(FLOATS)}")
    return chosen


def compute_dtype(a: Any, b: Any) -> np.dtype:
    """The dtype that both factors are converted to before they are multiplied; of 8 bits, bfloat16 has all values."""
    if is_of_8_bits(a.dtype):
        return np.dtype(jnp.bfloat16)
    return np.dtype(jnp.promote_types(a.dtype, b.dtype))


def result_dtype(a: Any) -> np.dtype:
    """The dtype of a product's tiles where none is asked for: a's, or bfloat16 for factors of 8 bits."""
    return np.dtype(jnp.bfloat16 if is_of_8_bits(a.dtype) else a.dtype)


def kept_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype in which the accumulator of a product in `dtype` is kept: float16 would overflow at 65504.

    bfloat16 has float32's range and is kept. In float16's place it would lose three bits, and computing the product
    again takes longer than storing two more bytes.
    """
    return np.dtype(np.float32 if has_narrow_range(dtype) else dtype)


def wire_dtype(spec: GemmSpec, dtype: np.dtype) -> np.dtype:
    """The dtype in which products are summed over devices, as Megatron does: bfloat16 where all results are.

    It is float32 where a result is, as a gradient of float32 parameters; where the product has no tiles; and in the
    place of float16, which a partial sum may overflow though the sum does not.
    """
    is_of_results = spec.store_dtypes and all(x == dtype for x in spec.store_dtypes)
    return np.dtype(dtype if is_of_results and not has_narrow_range(dtype) else np.float32)


def joined_halves(function: str, name: str, x: Any, axis: int = 1) -> jax.Array:
    """x as one array: a pair is stacked along this axis, as two (K, N / 2) become (K, 2, N / 2).

    Args:
      function, name: the operator and its argument, for messages.
      x: an array; or two, of axis + 1 axes, of which the last is N / 2.
      axis: of the result.
    """
    if not isinstance(x, tuple | list):
        return x  # the caller checks what it is
    check_floats(function, **{f"{name}[{i}]": half for i, half in enumerate(x)})
    shapes = [np.shape(half) for half in x]
    if len(x) != 2 or shapes[0] != shapes[1] or len(shapes[0]) != axis + 1:
        kind = "matrices" if axis == 1 else f"arrays of {axis + 1} axes"
        raise ValueError(
            f"{function}: {name} are arrays of shapes {', '.join(map(str, shapes))}; several must be two {kind} of "
            "one shape, the halves of N"
        )
    return jnp.stack(with_same_sharding(x, None), axis=axis)
