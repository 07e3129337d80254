"""Products of groups beside a loop over the groups: epilogues, random sizes, arguments with poison, the reference."""

from typing import NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np

import coda_jax as coda
from tests import tolerance

K, N = 8, 16
F32 = jnp.float32
SETTINGS = hypothesis.settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
    suppress_health_check=list(hypothesis.HealthCheck),
)
# Operands: of each row, tile and column; of each group, vector and scalar; of all, row and one.
SHAPES = {
    "tile": lambda m, g: (m, N),
    "column": lambda m, g: (m, 1),
    "vector": lambda m, g: (g, N),
    "half": lambda m, g: (g, N // 2),
    "scalar": lambda m, g: (g,),
    "row": lambda m, g: (N,),
    "one": lambda m, g: (),
}
OF_ROWS, OF_GROUPS = ("tile", "column"), ("vector", "half", "scalar")


def bias(xp, acc, x):
    return xp.tanh(acc + x)


def every_kind(xp, acc, tile, column, vector, scalar, row, one):
    y = xp.tanh(acc * scalar + vector) * column + tile * row
    return y * one, xp.sum(y * y, axis=1), xp.max(acc, axis=1, keepdims=True) * column


def swiglu(xp, acc, x):
    gate, up = (acc + x)[:, : N // 2], (acc + x)[:, N // 2 :]
    return gate / (1 + xp.exp(-gate)) * up


def half_vectors(xp, acc, x):
    return acc[:, : N // 2] * x + acc[:, N // 2 :]


def of_each_group(xp, acc, vector, row):
    y = acc * vector + row
    return {
        "tile": y,
        "sum": xp.sum(y * y, axis=0),
        "kept": xp.sum(y, axis=0, keepdims=True),
        "max": xp.max(y, axis=0),
        "min": xp.min(acc, axis=0),
        "all": xp.sum(y),
        "sum of rows": xp.sum(1 / (1 + xp.sum(y * y, axis=1))),
        "row": xp.sum(y, axis=1),
    }


def fragile(xp, acc, column, vector, one):
    """Not finite where acc, a row or a group is zero."""
    return 1 / acc + xp.sqrt(xp.abs(column)) / column + xp.log(xp.abs(vector)), one / xp.sum(acc * acc, axis=1)


class Case(NamedTuple):
    function: object
    kinds: tuple = ()


CASES = {
    "bare": Case(None),
    "bias": Case(bias, ("vector",)),
    "every kind": Case(every_kind, ("tile", "column", "vector", "scalar", "row", "one")),
    "swiglu": Case(swiglu, ("vector",)),
    "half vectors": Case(half_vectors, ("half",)),
    "of each group": Case(of_each_group, ("vector", "row")),
    "fragile": Case(fragile, ("column", "vector", "one")),
}


def random(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def arguments(case, m, groups, dtype, seed=0):
    """a, b (G, K, N) and the operands of a case."""
    shapes = [(m, K), (groups, K, N), *(SHAPES[kind](m, groups) for kind in CASES[case].kinds)]
    arrays = [random(seed + i, *shape) for i, shape in enumerate(shapes)]
    if case == "fragile":  # far from zero
        arrays = [0.5 + jnp.abs(x) for x in arrays]
    return [x.astype(dtype if i < 2 else F32) for i, x in enumerate(arrays)]


def sizes_of(m, groups):
    """A strategy: sizes of groups, many of them zero where there are few rows, that may leave rows in none."""
    cuts = st.lists(st.integers(0, m), min_size=groups, max_size=groups)
    return cuts.map(lambda ends: np.diff([0, *sorted(ends)]).astype(np.int32))


def poisoned(case, arrays, sizes, first=0):
    """The arguments with NaN and infinity in rows that are in no group; all groups before `first` count as none."""
    a, b, *operands = arrays
    begin, end = int(sizes[:first].sum()), int(sizes[: first + b.shape[0]].sum())

    def poison(x, value):
        return x.at[:begin].set(value).at[end:].set(value)

    each = zip(CASES[case].kinds, operands, strict=True)
    operands = [poison(x, jnp.inf) if kind in OF_ROWS else x for kind, x in each]
    return [poison(a, jnp.nan), b, *operands]


def grouped(case, a, b, sizes, *operands, **options):
    """`coda.ragged_gemm` of a case; flat."""
    function, kinds = CASES[case]
    marked = [coda.ByGroup(x) if kind in OF_GROUPS else x for kind, x in zip(kinds, operands, strict=True)]
    epilogue = None if function is None else lambda acc, *operands: function(jnp, acc, *operands)
    return jax.tree.leaves(coda.ragged_gemm(a, b, sizes, *marked, epilogue=epilogue, **options))


def loop(case, arrays, sizes, dtype, first=0):
    """By the definition, group by group, in numpy; flat."""
    function, kinds = CASES[case]
    a, b, *operands = (np.asarray(x).astype(dtype) for x in arrays)
    ends = np.cumsum(sizes)
    results = []
    for g in range(b.shape[0]):
        rows = slice(ends[first + g] - sizes[first + g], ends[first + g])
        own = [x[rows] if kind in OF_ROWS else x for kind, x in zip(kinds, operands, strict=True)]
        own = [x[g : g + 1].reshape(1, -1) if kind in OF_GROUPS else x for kind, x in zip(kinds, own, strict=True)]
        acc = a[rows] @ b[g]
        results.append((rows, acc if function is None else _of_no_rows(function, acc, own)))
    names = [str(path) for path, _ in jax.tree.leaves_with_path(results[0][1])]
    each = [(rows, jax.tree.leaves(result)) for rows, result in results]
    outputs = []
    for i, name in enumerate(names):
        values = [(rows, result[i]) for rows, result in each]
        if any(word in name for word in ("sum", "kept", "max", "min", "all")):
            outputs.append(np.stack([x for _, x in values]).reshape(len(values), *values[0][1].shape[-1:]))
            continue
        out = np.zeros((a.shape[0], *values[0][1].shape[1:]), dtype)
        for rows, x in values:
            out[rows] = x
        outputs.append(out)
    return outputs


class _Extremes:
    """numpy, with maxima and minima of no rows."""

    def __getattr__(self, name):
        return getattr(np, name)

    def max(self, x, axis, **options):
        return np.max(x, axis=axis, initial=-np.inf, **options)

    def min(self, x, axis, **options):
        return np.min(x, axis=axis, initial=np.inf, **options)


def _of_no_rows(function, acc, operands):
    return function(_Extremes(), acc, *operands)


def check(outputs, exact, plain):
    """By the tolerance rule; infinities, of groups without rows, are equal."""
    assert len(outputs) == len(exact)
    for i, (out, one, other) in enumerate(zip(outputs, exact, plain, strict=True)):
        finite = np.isfinite(one)
        got = np.asarray(out)
        np.testing.assert_array_equal(got[~finite].astype(np.float64), one[~finite])
        got, one, other = (np.where(finite, x, 0) for x in (got, one, other))
        rough = other.astype(out.dtype).astype(np.float64) + 4e-7 * np.abs(one).max(initial=0)
        tolerance.check(got.astype(out.dtype), one, rough, dtype=out.dtype, name=str(i))
