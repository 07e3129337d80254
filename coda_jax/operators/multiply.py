"""Products of operators that are no blocks: operands that may be absent, results in dtypes that are said."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from coda_jax.epilogue.groups import GroupOffsets
from coda_jax.primitives.axes import Dimension
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
    halves: bool = False,
    input_output_aliases: tuple[tuple[int, int], ...] = (),
    like: jax.Array | None = None,
    group_sizes: jax.Array | GroupOffsets | None = None,
) -> list[jax.Array]:
    """The flat outputs of epilogue(a @ b, *operands) in these dtypes, sharded as `like` over explicit mesh axes.

    The epilogue gets the operands that are None as None. Arrays may have any number of axes, and a, b and tiles be
    several arrays, as `product` says. With group_sizes (G,) int32, or their offsets, the rows of a are of groups: each
    has its own matrix of b, and with transpose_a, where rows are summed over, its own result.
    """
    given = epilogue
    if epilogue is not None and any(x is None for x in operands):
        present = [x is not None for x in operands]

        def given(acc: jax.Array, *arrays: jax.Array) -> Any:
            remaining = iter(arrays)
            return epilogue(acc, *(next(remaining) if is_present else None for is_present in present))

        given.__name__ = epilogue.__name__
    options = Options(
        transpose_a,
        transpose_b,
        implementation=implementation,
        k_axes=k_axes,
        halves=halves,
        input_output_aliases=input_output_aliases,
        out_sharding=None if like is None else explicit_sharding(like),
        ragged=None if group_sizes is None else Dimension.K if transpose_a else Dimension.M,
    )
    dtypes = [np.dtype(dtype) for dtype in out_dtypes]
    return product(a, b, [x for x in operands if x is not None], given, lambda _: dtypes, options, group_sizes)[0]
