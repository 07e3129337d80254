"""Tables in score functions of coda.attention, as T5's buckets, by XLA: values and gradients against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_scores import B, H, K, N, S, T, arrays, dense, exactly, ids, normal, of_ids, t5_bias, t5_buckets
from flax import nnx
from jax.interpreters import partial_eval
from test_attention_score import AGE, check, refused, sizes, with_gradients  # noqa: F401

import coda_jax as coda
from coda_jax.attend.primitive import backward_primitives
from coda_jax.attend.score import trace
from coda_jax.attend.score.distances import at_first_distances, entries_of_distances
from coda_jax.epilogue.program import needed_nodes
from coda_jax.jaxprs.walk import equations

pytestmark = pytest.mark.usefixtures("quick_to_compile")
TABLE = normal(20, 32, N)
OF_IDS = (normal(21, N, 14), ids(22, B, T), ids(23, B, S))


def buckets(s):
    return t5_buckets(jnp.arange(s.shape[3])[None] - jnp.arange(s.shape[2])[:, None])


def of_flax(distance):
    """Buckets as transformers' FlaxT5 computes them: in floats, and cast last."""
    near = jnp.abs(distance)
    large = 8 + jnp.log(near / 8) / jnp.log(128 / 8) * 8
    return ((distance > 0) * 16 + jnp.where(near < 8, near, jnp.clip(large, max=15))).astype("i4")


def of_an_embedding(s, table):
    embed = nnx.eval_shape(lambda: nnx.Embed(32, N, rngs=nnx.Rngs(0)))
    embed.embedding = nnx.Param(table)
    values = embed(of_flax(jnp.arange(s.shape[3])[None] - jnp.arange(s.shape[2])[:, None]))
    return s + values.transpose(2, 0, 1)[None]


def by_head(s, table):
    return s + table[buckets(s)[None], jnp.arange(s.shape[1])[:, None, None]]


def by_take(s, table):
    return s + jnp.take(table.T, buckets(s), axis=1)


def by_clip(s, table):
    """Beyond both ends, and below 0, where jnp's indexing counts from the end."""
    row, key = jnp.arange(s.shape[2])[:, None], jnp.arange(s.shape[3])
    clipped = table.at[row - key + 14].get(mode="clip", wrap_negative_indices=False)
    return s + (clipped * table[jnp.maximum(row - key, -32) % 40 - 20]).transpose(2, 0, 1)


def shared(s, table):
    return s * table[:, 1][buckets(s)]


def scaled(s, table):
    """A table that is made of the operand, and causal buckets."""
    return t5_bias(s, jnp.tanh(table) * 2, bidirectional=False)


def in_an_image(s, table):
    """Patches of an image of rows of 6: an index of no distance."""
    row, key = jnp.arange(s.shape[2])[:, None], jnp.arange(s.shape[3])
    return s + jnp.take(table.T, 5 * (row // 6 - key // 6) + row % 6 - key % 6 + 16, axis=1, mode="clip")


def twice(s, table):
    """One table at two indices."""
    row, key = jnp.arange(s.shape[2])[:, None], jnp.arange(s.shape[3])
    one, other = table[jnp.minimum(row + key, 31)], table[jnp.abs(row - key) % 32]
    return s + (one - 2 * other).transpose(2, 0, 1)


def hides(s, table):
    """Entries of a table of conditions hide keys, beside the order of rows and keys."""
    allowed = jnp.asarray([True, True, False, True])
    row, key = jnp.arange(s.shape[2])[:, None], jnp.arange(s.shape[3])
    return jnp.where(allowed[(row + key) % 4] & (row >= key), by_take(s, table), -jnp.inf)


SPELLINGS = {
    "T5X": (t5_bias, (TABLE,)),
    "FlaxT5": (of_an_embedding, (TABLE,)),
    "by head": (by_head, (TABLE,)),
    "take": (by_take, (TABLE,)),
    "clip": (by_clip, (TABLE,)),
    "shared by heads": (shared, (TABLE,)),
    "made of the operand": (scaled, (TABLE,)),
    "in an image": (in_an_image, (TABLE,)),
    "ids, filled": (of_ids, OF_IDS),
    "twice": (twice, (TABLE,)),
    "hides": (hides, (TABLE,)),
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(sizes, name):  # noqa: F811
    check(*SPELLINGS[name], limit=1e-5)


@pytest.mark.parametrize("name", ["T5X", "ids, filled"])
def test_beside_a_window_in_blocks(sizes, name):  # noqa: F811
    """Keys of a block begin with its queries."""
    check(*SPELLINGS[name], (AGE <= 7) & (AGE >= -3), local_window_size=(7, 3), limit=1e-5)


def traced(name):
    score, operands = SPELLINGS[name]
    return trace(score, [jnp.asarray(x) for x in operands], (B, N, T, S))


@pytest.mark.parametrize("name", SPELLINGS)
def test_an_index_of_distances_is_known_before_the_call(name):
    """Such a table is one by distance; another keeps its entries."""
    score, read = traced(name)
    of = [read[x.array].shape[3] for x in score.tables]
    by_distance = [x.is_by_distance for x in score.tables]
    if name in ("in an image", "ids, filled"):
        assert by_distance == [False] and of == [{"in an image": 32, "ids, filled": 14}[name]]
    elif name in ("twice", "hides"):
        assert sorted(by_distance) == [False, True]
    else:
        assert all(by_distance) and by_distance and set(of) == {1024}
        needed = needed_nodes(score.nodes, score.roots)
        assert not {"log", "div", "select_n"} & {score.nodes[i].op for i in needed}


@pytest.mark.parametrize("at", [None, jnp.nan, 0.0])
@pytest.mark.parametrize("is_by_distance", [True, False])
def test_out_of_range_is_what_jax_fills(at, is_by_distance):
    """NaN without a value; keys that are hidden have none of it."""

    def score(s, table):
        row, key = jnp.arange(s.shape[2])[:, None], jnp.arange(s.shape[3])
        index = row - key if is_by_distance else 2 * row - 2 * key
        index = index // (1 if is_by_distance else 2)
        found = table.at[index].get(mode="fill", wrap_negative_indices=False, fill_value=at)
        return s + jnp.where(row < 30, jnp.where(row >= key, found, 0), found)

    table = jnp.asarray(normal(24, 33))
    got = coda.attention(*arrays()[:3], score=score, operands=(table,))
    exact = dense(*arrays()[:3], score, (table,))
    is_filled = np.arange(T) >= 33
    if at is None or np.isnan(at):
        assert np.isnan(got[:, is_filled]).all() and not np.isnan(got[:, ~is_filled]).any()
        got, exact = got[:, ~is_filled], exact[:, ~is_filled]
    np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-6)


def test_integers_and_conditions_in_tables():
    of, seen = np.array([3, 1, 2, 0], np.int32), np.array([True, True, False, True])

    def score(s):
        row, key = jnp.arange(s.shape[2])[:, None], jnp.arange(s.shape[3])
        near = jnp.asarray(of)[jnp.abs(row - key) % 4]
        return jnp.where(jnp.asarray(seen)[(row - key) % 4] & (row >= key), s + near, -jnp.inf)

    check(score, ())


def test_a_table_in_16_bits_that_it_closes_over():
    table = jnp.asarray(TABLE, jnp.bfloat16)
    q, k, v, dy = arrays()

    def loss(table):
        return jnp.vdot(coda.attention(q, k, v, score=lambda s: t5_bias(s, table)), dy)

    exact = exactly(q, k, v, dy, t5_bias, (np.asarray(table, np.float32),))[-1]
    got = jax.jit(jax.grad(loss))(table)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(got, np.float32), exact, rtol=1e-2, atol=1e-3)


# ---- gradients


def test_gradients_have_one_order():
    score, operands = SPELLINGS["T5X"]
    first = with_gradients(score, operands)[-1]
    text = jax.jit(lambda x: with_gradients(score, (x,))[-1]).lower(TABLE).as_text()
    assert "scatter" not in text and "dynamic_update_slice" in text
    np.testing.assert_array_equal(first, with_gradients(score, operands)[-1])


def test_who_does_not_ask_for_the_tables_gradient_pays_nothing():
    """A table by distance is the backward pass's."""
    q, k, v, dy = arrays()

    def made(number, name):
        def loss(q, table):
            score, operands = SPELLINGS[name]
            return jnp.sum(coda.attention(q, k, v, score=score, operands=(table, *operands[1:])) * dy)

        closed = jax.make_jaxpr(jax.grad(loss, number))(q, SPELLINGS[name][1][0])
        jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.out_avals))
        every = [x for x, _ in equations(jaxpr)]
        by_xla = any(x.primitive.name in ("dot_general", "scan", "while") for x in every)
        return by_xla, sum(len(x.params["spec"].score_gradients) for x in every if x.primitive in backward_primitives)

    assert made(0, "T5X") == (False, 0) and made(1, "T5X") == (False, 1)
    assert made(0, "ids, filled") == (False, 0) and made(1, "ids, filled") == (True, 0)


@pytest.mark.parametrize("fill", [None, 0.0])
def test_entries_of_distances_and_of_windows(fill):
    def score(s, table):
        row, key = jnp.arange(s.shape[2])[:, None], jnp.arange(s.shape[3])
        mode = {"mode": "clip"} if fill is None else {"mode": "fill", "fill_value": fill}
        return s + table.at[(row - key) // 20].get(wrap_negative_indices=False, **mode)

    table = jnp.asarray(normal(30, 4))
    traced, read = trace(score, [table], (B, N, T, S))
    (of,), middle, window = traced.tables, read[0].shape[3] // 2, 30
    entries, windows = np.split(np.asarray(entries_of_distances(traced, of, middle, window)), [2 * middle])
    index = np.arange(-middle, middle) // 20
    within = np.clip(index, 0, 3)
    np.testing.assert_array_equal(entries, within if fill is None else np.where(index == within, within, -2))
    for i, got in enumerate(windows[:-2]):
        each = set(entries[16 * i : 16 * i + window])
        assert got == (each.pop() if len(each) == 1 else -1)
    # Sums by entry, as an array by distance, are pulled back to the table as they are.
    sums = normal(31, 1, N, 1, 4)
    _, pullback = jax.vjp(lambda x: trace(score, [x], (B, N, T, S))[1][0], table)
    by_distance = at_first_distances(jnp.asarray(sums), jnp.asarray(entries)).sum(1, keepdims=True)
    np.testing.assert_allclose(pullback(by_distance)[0], sums.sum((0, 1, 2)), rtol=1e-6)


def test_second_derivatives():
    q, k, v, dy = arrays()

    def of(attend, name):
        score, operands = SPELLINGS[name]

        def loss(q, table):
            return jnp.vdot(attend(q, k, v, score, (table, *operands[1:])), dy)

        def first(q, table):
            return sum(jnp.vdot(one, jnp.cos(one)) for one in jax.grad(loss, (0, 1))(q, table))

        return jax.jit(jax.grad(first, (0, 1)))(q, jnp.asarray(operands[0]))

    for name in ("T5X", "ids, filled"):
        ours = of(lambda q, k, v, score, x: coda.attention(q, k, v, score=score, operands=x), name)
        for got, exact in zip(ours, of(dense, name), strict=True):
            np.testing.assert_allclose(got, exact, rtol=1e-3, atol=1e-4)


# ---- transforms


@pytest.mark.parametrize("name", ["T5X", "ids, filled"])
@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)])
def test_vmap(axes, name):
    (score, (table, *others)), (q, k, v, dy) = SPELLINGS[name], arrays()

    def run(q, table):
        attend = lambda q, x: jnp.vdot(coda.attention(q, k, v, score=score, operands=(x, *others)), dy)  # noqa: E731
        return jax.grad(attend, (0, 1))(q, table)

    given = [jnp.stack([x, 2 * x, -x]) if axis == 0 else x for x, axis in zip((q, table), axes, strict=True)]
    got = jax.jit(jax.vmap(run, in_axes=axes))(*given)
    for i in range(3):
        one = run(*(x if axis is None else x[i] for x, axis in zip(given, axes, strict=True)))
        for x, of in zip(got, one, strict=True):
            np.testing.assert_allclose(x[i], of, rtol=2e-4, atol=1e-5)


def test_layers_that_share_a_table():
    """As T5's: of a scan, whose derivative is the sum of all layers."""
    q, k, v, dy = arrays()

    def loss(table, attend):
        def layer(x, scale):
            return x + scale * attend(x, k, v, table), None

        return jnp.vdot(jax.lax.scan(layer, q, jnp.array([1.0, 0.5, -1.0]))[0], dy)

    ours = lambda q, k, v, table: coda.attention(q, k, v, score=t5_bias, operands=(table,))  # noqa: E731
    plain = lambda q, k, v, table: dense(q, k, v, t5_bias, (table,))  # noqa: E731
    got, exact = (jax.jit(jax.grad(functools.partial(loss, attend=f)))(TABLE) for f in (ours, plain))
    np.testing.assert_allclose(got, exact, rtol=1e-4, atol=1e-4)


def test_export_of_symbolic_sizes():
    """Distances are not known then: the index is computed for each pair."""
    length = jax.export.symbolic_shape("length")[0]
    types = [jax.ShapeDtypeStruct((B, length, heads, H), jnp.float32) for heads in (N, K, K)]
    attend = jax.jit(lambda q, k, v, x: coda.attention(q, k, v, score=t5_bias, operands=(x,)))
    exported = jax.export.export(attend, platforms=("cpu",))(*types, jax.ShapeDtypeStruct(TABLE.shape, jnp.float32))
    q, k, v, _ = arrays()
    want = attend(q[:, :S], k, v, TABLE)
    np.testing.assert_allclose(exported.call(q[:, :S], k, v, TABLE), want, rtol=1e-5, atol=1e-6)


def test_in_float64():
    with jax.enable_x64(True):
        given = [jnp.asarray(np.asarray(x, np.float64)) for x in (*arrays()[:3], TABLE)]
        attend = lambda q, k, v, table: coda.attention(q, k, v, score=t5_bias, operands=(table,))  # noqa: E731
        got = jax.grad(lambda *x: jnp.sum(jnp.sin(attend(*x))), 3)(*given)
        want = jax.grad(lambda q, k, v, x: jnp.sum(jnp.sin(dense(q, k, v, t5_bias, (x,)))), 3)(*given)
        assert got.dtype == jnp.float64
        np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-12)


# ---- what is refused


def test_unsupported_table_indices_are_refused():
    def by_scores(s, table):
        return s + jnp.take(table[:, 0], jnp.clip(s, 0, 31).astype(jnp.int32))

    def too_large(s, table):
        row, key = jnp.arange(s.shape[2])[:, None], jnp.arange(s.shape[3])
        return s + table[row * key]

    def of_rows(s, table):
        row, key = jnp.arange(s.shape[2])[:, None], jnp.arange(s.shape[3])
        return s + table[row, (row - key) % 8]

    def of_slices(s, table):
        row, key = jnp.arange(s.shape[2])[:, None], jnp.arange(s.shape[3])
        return s + jax.vmap(jax.vmap(lambda i: jax.lax.dynamic_slice(table, (i,), (2,))))(row - key)[..., 0]

    refused(by_scores, "reads a table at an index that depends on the scores", (TABLE,))
    assert "256 is the most. Compute it before" in refused(too_large, "a table of 257 entries", (normal(0, 257),))
    refused(of_rows, "reads an array (40, 8) at two computed indices", (normal(0, 40, 8),))
    refused(of_slices, "reads an array of all queries and keys", (normal(0, 40),))
    accepted = functools.partial(coda.attention, *arrays()[:3], score=too_large)
    assert accepted(operands=(normal(0, 256),)).shape == (B, T, N, H)


def test_a_table_of_integers_has_no_gradient():
    q, k, v, dy = arrays()

    def loss(q, table):
        return jnp.vdot(coda.attention(q, k, v, score=t5_bias, operands=(table,)), dy)

    table = np.round(TABLE * 4).astype(np.int32)
    got = jax.grad(loss)(q, table)
    np.testing.assert_allclose(got, exactly(q, k, v, dy, t5_bias, (table,))[1], rtol=1e-4, atol=1e-5)
    with pytest.raises(TypeError, match="int32"):
        jax.grad(loss, 1)(q, table)
