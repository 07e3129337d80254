"""`python -m benchmarks.lab.dropout`: what dropout costs beside a product, by a mask in memory or by bits of a counter.

    y = x + where(bits < p 2^32, acc / p, 0),   bits of the element's row and column

"none" has no dropout. "mask" reads one of a byte each, which XLA drew before; "threefry2x32" and "rbg" are what drawing
it costs, with the generators of JAX. "hash_N" makes the bits in the epilogue by N operations on integers, by turns a
multiplication and an exclusive or: good bits of 32 take some 8 (lowbias32: two multiplications, three shifts, three
exclusive ors), Philox 4x32 with ten rounds some 20 an element. Times are all kernels' of a call; everything is compared
with XLA's form first. Writes benchmarks/results/<device>_dropout.csv.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import coda_jax as coda
from benchmarks import results, timing

SHAPES = ((16384, 2048, 2048), (16384, 2048, 8192))  # a block's last products: of attention, of the feed-forward
OPERATIONS = (4, 8, 16, 32)
KEPT = 0.9
MULTIPLIERS = tuple(int(x) for x in np.random.default_rng(0).integers(1, 2**30, 32) * 2 + 1)


def hashed(shape: tuple[int, int], operations: int) -> jax.Array:
    """Bits of each element's row and column, (M, N) int32."""
    row, column = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    bits = row * jnp.int32(shape[1]) + column
    for i in range(operations):
        bits = bits * jnp.int32(MULTIPLIERS[i]) if i % 2 == 0 else bits ^ jnp.int32(MULTIPLIERS[i])
    return bits


def with_residual(acc: jax.Array, x: jax.Array) -> jax.Array:
    return acc + x


def with_mask(acc: jax.Array, x: jax.Array, mask: jax.Array) -> jax.Array:
    return x + jnp.where(mask != 0, acc * (1 / KEPT), 0)


def with_hash(operations: int) -> Callable[..., jax.Array]:
    limit = round((KEPT - 0.5) * 2**32)  # of signed bits

    def epilogue(acc: jax.Array, x: jax.Array) -> jax.Array:
        return x + jnp.where(hashed(acc.shape, operations) < limit, acc * (1 / KEPT), 0)

    return epilogue


EPILOGUES = {"none": with_residual, "mask": with_mask} | {f"hash_{count}": with_hash(count) for count in OPERATIONS}


def calls(m: int, n: int, k: int) -> dict[str, Callable[[], Any]]:
    """A call of each variant, checked."""
    keys = jax.random.split(jax.random.key(0, impl="rbg"), 4)
    a, x = (jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, ((m, k), (m, n)), strict=False))
    w = jax.random.normal(keys[2], (k, n), jnp.bfloat16) * k**-0.5
    mask = jax.random.bernoulli(keys[3], KEPT, (m, n)).astype(jnp.float8_e4m3fn)
    found: dict[str, Callable[[], Any]] = {}
    for name, epilogue in EPILOGUES.items():
        operands = (x, mask) if name == "mask" else (x,)

        def product(*arrays: jax.Array, epilogue: Any = epilogue, implementation: str = "auto") -> Any:
            return coda.gemm(*arrays, epilogue=epilogue, out_dtype=jnp.bfloat16, implementation=implementation)

        product.__name__ = name
        given = (a, w, *operands)
        y, plain = jax.jit(product)(*given), jax.jit(functools.partial(product, implementation="xla"))(*given)
        difference = jnp.abs(y.astype(jnp.float32) - plain.astype(jnp.float32)).max()
        if difference > 0.1:  # two units in the last place of the largest; a wrong bit is worth more
            raise AssertionError(f"{name} at {m} x {n} x {k}: differs from XLA's form by {difference}")
        found[name] = functools.partial(jax.jit(product), *given)
    for kind in ("threefry2x32", "rbg"):

        def draw(key: jax.Array) -> jax.Array:
            return jax.random.bernoulli(key, KEPT, (m, n)).astype(jnp.float8_e4m3fn)

        draw.__name__ = kind
        found[kind] = functools.partial(jax.jit(draw), jax.random.key(0, impl=kind))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = results.parser("benchmarks.lab.dropout", __doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="of measured execution for each product")
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU runs in seconds, by XLA")
    options = parser.parse_args(arguments)
    rows = []
    for m, n, k in ((64, 128, 32),) if options.tiny else SHAPES:
        times = timing.interleaved(calls(m, n, k), seconds=options.seconds)
        bare = times["none"].total
        for name, of in times.items():
            rows.append({"m": m, "n": n, "k": k, "variant": name, "us": of.total, "price": of.total / bare - 1})
            price = f"{of.total / bare - 1:+9.1%}" if name in EPILOGUES else f"{of.total / bare:9.1%}"
            print(f"{m:7}{n:7}{k:7}  {name:14}{of.total:9.1f} us{price}", flush=True)
    results.write(
        "_dropout", ["m", "n", "k", "variant", "us", "price"], rows, folder=options.out, commit=options.commit
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
