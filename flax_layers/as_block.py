"""Layers on arrays as blocks: what they compute is one `coda.block`, of which both passes are planned together."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import numpy as np
from flax import nnx
from flax.core import spmd

import coda_jax as coda
from coda_jax import DeferredNorm, Stream
from coda_jax.extend import array, norm_value, store_as
from flax_layers.sharding import normalized


def in_block(
    name: str, lines: Callable[..., Any], module: nnx.Module, x: Any, *arrays: Any, dtype: Any, **static: Any
) -> Any:
    """lines(module, x, *arrays, **static) as a block, on values.

    It is traced once for all modules of one structure, for shapes, dtypes and the rules in force, by which its values
    lie. What the lines write into variables of the module is lost.

    Args:
      name: of the block, in messages and in the kernels' names.
      lines: a function of a module of values, of a value or what holds one, and of trees of values; that of a Python
        module, for what it is traced to is kept with it.
      module: whose parameters are arguments of the block.
      x: an array (..., D), or what holds one, whose rows the block has.
      arrays: trees of arrays.
      dtype: of the products.
      static: hashable.
    """
    return _block(name, lines, np.dtype(dtype))(*_arguments(module, x, arrays, static))


def _arguments(module: nnx.Module, x: Any, arrays: tuple[Any, ...], static: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments of a `_block`."""
    rules = normalized(spmd.get_logical_axis_rules())
    return x, *nnx.split(module), arrays, tuple(sorted(static.items())), rules


@functools.lru_cache(maxsize=256)
def _block(name: str, lines: Callable[..., Any], dtype: np.dtype[Any]) -> Callable[..., Any]:
    def on_values(x: Any, graphdef: Any, state: Any, arrays: Any, static: Any, rules: Any) -> Any:
        return lines(nnx.merge(graphdef, state), x, *arrays, **dict(static))

    return coda.block(dtype=dtype, name=name)(on_values)


def call_as_block(layer: nnx.Module, lines: Callable[..., Any], x: Any, residual: Any, *arrays: Any, dtype: Any) -> Any:
    """lines(layer, h, *arrays) [+ residual] as a block, h the value of x.

    Args:
      layer: the module.
      lines: as of `in_block`; they return values, or beside a residual one, or a pair of it and of what stays beside.
      x: an array (..., D), a Stream, or a norm that is not applied yet.
      residual: a `flax_layers.residual.Sum`, or None.
      arrays: trees of arrays.
      dtype: of the products.
    """
    other = None if residual is None or residual.is_normalised else residual.array
    options: dict[str, Any] = {"of": lines}
    if residual is not None:
        options |= {"out_dtype": np.dtype(residual.array.dtype), "adds_x": residual.is_normalised}
        options |= {"is_stream": residual.is_stream, "has_sums": residual.has_sums}
    block = _block(type(layer).__name__, _added, np.dtype(dtype))
    return block(*_arguments(layer, x, (other, arrays), options))


def check_residual(given: tuple[Any, ...], wanted: tuple[Any, ...]) -> None:
    """Raises ValueError for a residual of another shape than the result that it is added to."""
    if given != wanted:
        raise ValueError(f"a residual of shape {given} is added to an output of shape {wanted}")


def _added(
    layer: Any,
    x: Any,
    other: Any,
    arrays: Any,
    *,
    of: Callable[..., Any],
    out_dtype: Any = None,
    adds_x: bool = False,
    is_stream: bool = False,
    has_sums: bool = False,
) -> Any:
    """The result of the lines, or its first value added to x or to another array, in this dtype."""
    h: Any = norm_value(x) if isinstance(x, DeferredNorm) else array(x)
    made, residual = of(layer, h, *arrays), h.x if adds_x else other
    if residual is None:
        return made
    y, *beside = made if isinstance(made, tuple) else (made,)
    check_residual(residual.shape, y.shape)
    y = store_as(residual + y, out_dtype)
    if is_stream:
        stream = Stream(cast(Any, y))
        y = stream.with_statistic() if has_sums else stream
    return (y, *beside) if beside else y
