"""The grouped products for Hopper among the Pallas kernels that jax ships, in Mosaic GPU; in two sizes of blocks."""

from __future__ import annotations

import jax

from benchmarks.grouped_forms import Form, with_gradient
from benchmarks.peers import Absent

BLOCKS = ((128, 128, 5), (128, 192, 4))  # block_m, block_n, steps in flight: what fits into shared memory
BLOCK_K = 64


def _across(n: int, block_n: int) -> int:
    """How many blocks beside each other are computed before the next rows."""
    return next(count for count in (8, 4, 2, 1) if -(-n // block_n) % count == 0)


def form(block_m: int, block_n: int, steps: int) -> Form:
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot
    from jax.experimental.pallas.ops.gpu.transposed_ragged_dot_mgpu import transposed_ragged_dot

    blocks = {"block_k": BLOCK_K, "max_concurrent_steps": steps}

    def multiply(a: jax.Array, b: jax.Array, sizes: jax.Array, transpose_b: bool = False) -> jax.Array:
        across = _across(b.shape[1] if transpose_b else b.shape[2], block_n)
        sizes_of_blocks = {"block_m": block_m, "block_n": block_n, "grid_block_n": across, **blocks}
        return ragged_dot(a, b, group_sizes=sizes, transpose_rhs=transpose_b, **sizes_of_blocks)

    def contract(a: jax.Array, b: jax.Array, sizes: jax.Array) -> jax.Array:
        n = block_n if b.shape[1] % block_n == 0 else 128
        sizes_of_blocks = {"block_m": block_m, "block_n": n, "grid_block_n": _across(b.shape[1], n), **blocks}
        return transposed_ragged_dot(a, b, group_sizes=sizes, **sizes_of_blocks)

    return Form(
        f"pallas_{block_m}x{block_n}",
        with_gradient(multiply, contract),
        contract,
        version=f"jax {jax.__version__}'s Pallas kernels",
        includes="jax.experimental.pallas.ops.gpu's kernels in these blocks, not tuned; the gate is XLA's pass",
    )


def load_grouped() -> list[Form]:
    if jax.default_backend() != "gpu":
        raise Absent("there is no GPU")
    try:
        return [form(*blocks) for blocks in BLOCKS]
    except ImportError as error:
        raise Absent(f"this jax does not have it ({error})") from error
