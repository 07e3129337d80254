"""Random score functions: values and gradients against float64, and their bounds in tiles against all their entries."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_scores import positions
from hypothesis import HealthCheck, Phase, given, settings

import coda_jax as coda
from coda_jax.attend.score import HIDDEN, trace
from coda_jax.attend.score.evaluate import evaluate
from coda_jax.attend.score.hiding import band, tiles_hidden
from tests.attention_scores import dense

pytestmark = pytest.mark.usefixtures("quick_to_compile")
B, N, K, T, S, H = 2, 2, 1, 13, 11, 4
SETTINGS = settings(
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
# Which axes of (B, N, T, S) each operand has.
SHAPES = [(1, N, 1, 1), (B, 1, T, 1), (1, 1, 1, S), (1, N, T, 1), (T, S), (B, 1, 1, S), ()]


def numbers(seed):
    """Operands, and ids of queries and of keys."""
    random = np.random.default_rng(seed)
    operands = [random.standard_normal(shape).astype(np.float32) for shape in SHAPES]
    ids = [np.sort(random.integers(0, 3, (B, size))).astype(np.int32) for size in (T, S)]
    return operands, ids


def conditions():
    """A predicate of row, key and ids."""
    offsets = st.integers(-6, 6)
    leaves = st.one_of(
        offsets.map(lambda n: lambda row, key, ids: row - key >= n),
        offsets.map(lambda n: lambda row, key, ids: row + n < 2 * key),
        st.integers(1, 6).map(lambda n: lambda row, key, ids: row // n == key // n),
        st.integers(2, 5).map(lambda n: lambda row, key, ids: (row + key) % n != 0),
        st.integers(0, 12).map(lambda n: lambda row, key, ids: jnp.abs(row - n) <= key),
        st.just(lambda row, key, ids: ids[0][:, None, :, None] == ids[1][:, None, None]),
        st.floats(0.25, 4).map(lambda f: lambda row, key, ids: row.astype(jnp.float32) * f > key.astype(jnp.float32)),
    )

    def combined(inner):
        pairs = st.tuples(inner, inner)
        return st.one_of(
            pairs.map(lambda p: lambda *x: p[0](*x) & p[1](*x)),
            pairs.map(lambda p: lambda *x: p[0](*x) | p[1](*x)),
            inner.map(lambda one: lambda *x: ~one(*x)),
        )

    return st.recursive(leaves, combined, max_leaves=4)


def expressions():
    """A function of s, row, key, operands and ids."""
    leaves = st.one_of(
        st.just(lambda s, *_: s),
        st.sampled_from(range(len(SHAPES))).map(lambda i: lambda s, row, key, operands, ids: operands[i]),
        st.just(lambda s, row, key, *_: 0.1 * jnp.abs(row - key)),
        st.floats(-2, 2, width=16).map(lambda x: lambda *_: jnp.float32(x)),
    )

    def combined(inner):
        pairs = st.tuples(inner, inner)
        return st.one_of(
            pairs.map(lambda p: lambda *x: p[0](*x) + p[1](*x)),
            pairs.map(lambda p: lambda *x: p[0](*x) - p[1](*x)),
            pairs.map(lambda p: lambda *x: p[0](*x) * jnp.tanh(p[1](*x))),
            pairs.map(lambda p: lambda *x: p[0](*x) / (2 + jnp.square(p[1](*x)))),
            inner.map(lambda one: lambda *x: 3 * jnp.tanh(one(*x) / 3)),
            inner.map(lambda one: lambda *x: jnp.exp(-jnp.abs(one(*x)) - 0.25)),
            inner.map(lambda one: lambda *x: jax.nn.softplus(one(*x))),
            st.tuples(conditions(), inner, inner).map(
                lambda c: (
                    lambda s, row, key, operands, ids: jnp.where(
                        c[0](row, key, ids), c[1](s, row, key, operands, ids), c[2](s, row, key, operands, ids)
                    )
                )
            ),
        )

    return st.recursive(leaves, combined, max_leaves=6)


def scores():
    """score(ids)(s, *operands): an expression of s, some of which a condition hides."""

    def made(expression, condition, hides):
        def of(ids):
            def score(s, *operands):
                row, key = positions(s)
                value = jnp.broadcast_to(s + expression(s, row, key, operands, ids), s.shape)
                seen = jnp.broadcast_to(condition(row, key, ids), s.shape)
                return jnp.where(seen, value, hides) if hides is not None else value

            return score

        return of

    return st.builds(made, expressions(), conditions(), st.sampled_from([None, -jnp.inf, -1e30]))


@settings(SETTINGS, max_examples=12)
@given(scores(), st.integers(0, 100))
def test_values_and_gradients(of, seed):
    operands, ids = numbers(seed)
    random = np.random.default_rng(seed + 1)
    q, k, v, dy = (random.standard_normal((B, n, heads, H)) for n, heads in ((T, N), (S, K), (S, K), (T, N)))
    score = of(ids)

    def with_gradients(attend, dtype):
        arrays = [jnp.asarray(x, dtype) for x in (q, k, v, *operands)]
        y, pullback = jax.vjp(lambda *x: attend(*x[:3], score, x[3:]), *arrays)
        return [np.asarray(x, np.float64) for x in (y, *pullback(jnp.asarray(dy, dtype)))]

    got = with_gradients(lambda q, k, v, score, x: coda.attention(q, k, v, score=score, operands=x), jnp.float32)
    with jax.enable_x64(True):
        exact = with_gradients(dense, jnp.float64)
    for i, (x, one) in enumerate(zip(got, exact, strict=True)):
        np.testing.assert_allclose(
            x, one, rtol=2e-4, atol=2e-5 * max(np.max(np.abs(one), initial=1), 1), err_msg=str(i)
        )


@settings(SETTINGS, max_examples=40)
@given(scores(), st.integers(0, 100), st.sampled_from([(4, 4), (3, 5), (13, 2)]))
def test_bounds_in_tiles(of, seed, tile):
    """Nothing that is seen is hidden by a band or in a tile; nothing is hidden where all is said to be seen."""
    operands, ids = numbers(seed)
    score, arrays = trace(of(ids), operands, (B, N, T, S))
    s = jnp.asarray(np.random.default_rng(seed).standard_normal((B, N, T, S)) * 10, jnp.float32)
    (value,) = evaluate(score, [score.value], s, jnp.arange(T)[:, None], jnp.arange(S), arrays)
    is_hidden = np.broadcast_to(np.asarray(value) <= HIDDEN, (B, N, T, S))
    age = np.arange(T)[:, None] - np.arange(S)
    left, right, is_all, _ = band(score, [x.shape for x in arrays], T, S)
    inside = (age <= (T if left is None else left)) & (-age <= (S if right is None else right))
    assert is_hidden[:, :, ~inside].all()
    assert not (is_all and is_hidden[:, :, inside].any())
    all_hidden, none_hidden = (
        np.repeat(np.repeat(np.broadcast_to(x, (B, -(-T // tile[0]), -(-S // tile[1]))), tile[0], 1), tile[1], 2)
        for x in tiles_hidden(score, arrays, T, S, *tile)
    )
    assert not (all_hidden[:, None, :T, :S] & ~is_hidden).any()
    assert not (none_hidden[:, None, :T, :S] & is_hidden).any()
