"""Grouped products of mixtures of experts: whose sizes, how the rows are divided, and how many tiles that takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from coda_jax.jaxprs.walk import equations_of
from coda_jax.lowering.select import select
from coda_jax.primitives.gemm_primitive import PRIMITIVES
from coda_jax.tiles.config import tile_k

DTYPE = jnp.bfloat16


class Case(NamedTuple):
    """The experts of one device and the rows that are routed to them.

    Attributes:
      name: for tables.
      rows: R, the tokens' rows together, each token's `top_k` times.
      top_k: experts of a token.
      experts, hidden, intermediate: G, H and I; gate and up are one weight (G, H, 2, I), down is (G, I, H).
    """

    name: str
    rows: int
    top_k: int
    experts: int
    hidden: int
    intermediate: int

    def __str__(self) -> str:
        return f"{self.name}: {self.rows} rows, {self.experts} experts, {self.hidden} x {self.intermediate}"

    @property
    def tokens(self) -> int:
        return self.rows // self.top_k

    @property
    def flops(self) -> int:
        """The floating-point operations of the two products of a forward pass."""
        return 6 * self.rows * self.hidden * self.intermediate


CASES = {
    "sonic": Case("SonicMoE", 16384, 2, 8, 2048, 3072),
    "qwen3": Case("Qwen3-30B-A3B", 131072, 8, 128, 2048, 768),
    "qwen3_short": Case("Qwen3-30B-A3B, 2048 tokens", 16384, 8, 128, 2048, 768),
    "mixtral": Case("Mixtral-8x7B", 16384, 2, 8, 4096, 14336),
    "deepseek": Case("DeepSeek-V3, 32 experts", 16384, 8, 32, 7168, 2048),
}
TINY = {"tiny": Case("tiny", 64, 2, 4, 32, 48)}


def _equal(rows: int, groups: int, chance: np.random.Generator) -> np.ndarray:
    return np.full(groups, rows // groups)


def _random(rows: int, groups: int, chance: np.random.Generator) -> np.ndarray:
    return chance.multinomial(rows, [1 / groups] * groups)


def _half(rows: int, groups: int, chance: np.random.Generator) -> np.ndarray:
    others = chance.multinomial(rows - rows // 2, [1 / (groups - 1)] * (groups - 1))
    return np.insert(others, groups // 2, rows // 2)


# What sizes the groups have: all the same; each row's group drawn at random; one group with half of the rows, the rest
# drawn at random.
KINDS: dict[str, Callable[[int, int, np.random.Generator], np.ndarray]] = {
    "equal": _equal,
    "random": _random,
    "half": _half,
}


def sizes_of(kind: str, case: Case, seed: int = 0) -> np.ndarray:
    """The number of rows of each group, (G,) int32, together `case.rows`."""
    if case.rows % case.experts:
        raise ValueError(f"{case}: rows must be a multiple of experts, for the kind 'equal'")
    return KINDS[kind](case.rows, case.experts, np.random.default_rng(seed)).astype(np.int32)


def routed(sizes: np.ndarray, case: Case, seed: int = 0) -> np.ndarray:
    """Ids of experts, (T, top_k) int32, that give each expert so many rows, in random order."""
    ids = np.repeat(np.arange(case.experts, dtype=np.int32), sizes)
    return np.random.default_rng(seed).permutation(ids).reshape(case.tokens, case.top_k)


class Product(NamedTuple):
    """One grouped product: rows (R, K) by a weight for each group to (R, N), or the gradient of such weights.

    Attributes:
      n, k: columns of the result, and length of the sums. For a contraction over the rows of each group: a (R, K) and
        b (R, N) give (G, K, N).
      transpose_b: b is (G, N, K), not (G, K, N).
      contraction: whether it is such a contraction.
      gated: whether SwiGLU of the two halves of N follows, with a result (R, N / 2).
    """

    n: int
    k: int
    transpose_b: bool = False
    contraction: bool = False
    gated: bool = False

    def shapes(self, case: Case) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of a and b."""
        if self.contraction:
            return (case.rows, self.k), (case.rows, self.n)
        weight = (self.n, self.k) if self.transpose_b else (self.k, self.n)
        return (case.rows, self.k), (case.experts, *weight)

    def flops(self, case: Case) -> int:
        return 2 * case.rows * self.n * self.k


def products(case: Case) -> dict[str, Product]:
    """The products of an expert layer, forward and backward, each alone."""
    width, hidden = case.hidden, case.intermediate
    return {
        "up": Product(2 * hidden, width),
        "up, SwiGLU": Product(2 * hidden, width, gated=True),
        "down": Product(width, hidden),
        "down, dgrad": Product(hidden, width, transpose_b=True),
        "up, dgrad": Product(width, 2 * hidden, transpose_b=True),
        "down, wgrad": Product(width, hidden, contraction=True),
        "up, wgrad": Product(2 * hidden, width, contraction=True),
    }


def normal(seed: int, shape: Sequence[int], scale: float = 1.0) -> jax.Array:
    """Random-normal numbers in `DTYPE`, by the generator that XLA compiles in no time."""
    key = jax.random.key(seed, impl="rbg")
    return jax.jit(lambda: (scale * jax.random.normal(key, tuple(shape), jnp.float32)).astype(DTYPE))()


def product_arrays(product: Product, case: Case) -> tuple[jax.Array, jax.Array]:
    a, b = product.shapes(case)
    length = case.rows / case.experts if product.contraction else product.k
    return normal(1, a), normal(2, b, 1 / math.sqrt(length))


def expert_arrays(case: Case) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Rows x (R, H), the weights (G, H, 2, I) and (G, I, H), and the cotangent of the result, (R, H)."""
    width, hidden = case.hidden, case.intermediate
    return (
        normal(1, (case.rows, width)),
        normal(2, (case.experts, width, 2, hidden), width**-0.5),
        normal(3, (case.experts, hidden, width), hidden**-0.5),
        normal(4, (case.rows, width)),
    )


class Work(NamedTuple):
    """The work that one kernel does for each row of a group, and the number of rows that it takes at a time.

    Attributes:
      flops_per_row: of one row of a group.
      rows_at_once: rows of a tile; of a contraction, of a k block.
      columns: of tiles beside each other.
      groups: where they are equal, as a batch has them: how many. Else None.
    """

    flops_per_row: int
    rows_at_once: int
    columns: int
    groups: int | None = None

    def units(self, sizes: np.ndarray) -> int:
        """Tiles along the rows: the sum over the groups of ceil(n / tile rows); of a contraction, k blocks."""
        if self.groups is not None:
            sizes = np.full(self.groups, sizes.sum() // self.groups)
        return int(np.sum(-(-sizes // self.rows_at_once)))

    def flops(self, sizes: np.ndarray) -> int:
        """The work of the multiprocessors, which multiply whole tiles."""
        return self.units(sizes) * self.rows_at_once * self.flops_per_row


def work_of(function: Callable[..., Any], *types: Any) -> list[Work] | None:
    """The work of each of a function's kernels; None if one of its products takes XLA's form.

    The tile is that of the attached GPU, or of any Hopper GPU if there is none.
    """
    equations, _ = equations_of(function, *types)
    found = []
    for equation, _ in equations:
        if equation.primitive not in PRIMITIVES:
            continue
        avals, spec = [v.aval for v in equation.invars], equation.params["spec"]
        config = select(avals, spec).config
        if config is None:
            return None
        found.append(_work(avals, spec, config))
    return found


def _work(avals: Sequence[Any], spec: Any, config: Any) -> Work:
    a, b = (x.shape for x in spec.matrices.flat_types(avals)[:2])
    groups = a[0] if len(a) == 3 else None
    n = b[-2] if spec.transpose_b else b[-1]
    if spec.transpose_a:  # rows are summed over: each gives all of the result's elements something
        m = a[-1]
        return Work(2 * m * n, tile_k(avals[0].dtype), -(-m // config.tile_m) * -(-n // config.tile_n), groups)
    return Work(2 * n * a[-1], config.tile_m, -(-n // config.tile_n), groups)
