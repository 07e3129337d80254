"""Products for operators that are no blocks: operands may be absent, and the results' dtypes are stated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from coda_jax.graph.lines import with_absent
from coda_jax.primitives.derivative import Options, Parts, product
from coda_jax.primitives.mesh_types import explicit_sharding


def multiply(
    a: Parts,
    b: Parts,
    *operands: Parts | None,
    epilogue: Callable[..., Any] | None = None,
    out_dtypes: Sequence[Any],
    implementation: str,
    transpose_a: bool = False,
    transpose_b: bool = False,
    k_axes: int = 1,
    input_output_aliases: tuple[tuple[int, int], ...] = (),
    like: jax.Array | None = None,
) -> list[jax.Array]:
    """The flat outputs of epilogue(a @ b, *operands) in these dtypes, sharded as `like` over explicit mesh axes.

    The epilogue gets the operands that are None as None. Arrays may have any number of axes, and a, b and tiles be
    several arrays, as in `product`.
    """
    function = epilogue
    if epilogue is not None and any(x is None for x in operands):
        function = with_absent(epilogue, [x is not None for x in operands])
        function.__name__ = epilogue.__name__
    options = Options(
        transpose_a,
        transpose_b,
        implementation=implementation,
        k_axes=k_axes,
        input_output_aliases=input_output_aliases,
        out_sharding=None if like is None else explicit_sharding(like),
    )
    dtypes = [np.dtype(dtype) for dtype in out_dtypes]
    return product(a, b, [x for x in operands if x is not None], function, lambda _: dtypes, options)[0]


def scale_rows(acc: jax.Array, factor: jax.Array) -> jax.Array:
    return acc * factor


def accumulate(acc: jax.Array, total: jax.Array) -> jax.Array:
    return acc + total
