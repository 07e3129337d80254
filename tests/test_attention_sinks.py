"""Sinks of coda.attention: values and gradients against dense float64 attention, transformations, meshes, bad input."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import coda_jax as coda
from coda_jax.jaxprs.walk import equations_of
from tests.test_attention import IDS, IN_BLOCKS, KEYS, ROWS, B, H, N, T, arrays, check, normal, plain_attention
from tests.test_attention import sizes as sizes
from tests.test_attention_sharding import KINDS, SCHEMES, P, compare
from tests.test_attention_sharding import arrays as mesh_arrays

pytestmark = pytest.mark.usefixtures("quick_to_compile")
SINKS = jnp.asarray([0.3, -2.0, 3.0, -jnp.inf], jnp.float32)


@pytest.mark.smoke
@pytest.mark.parametrize("name", IN_BLOCKS)
def test_values_and_gradients(sizes, name):
    """Rows that see nothing have their sink as log-sum-exp, whose gradient is its own."""
    options, seen = IN_BLOCKS[name]
    check(arrays(), seen, sinks=SINKS, limit=4e-6, **options)


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_documents_in_windows(kv_heads):
    seen = (IDS[:, None, :, None] == IDS[:, None, None]) & (np.arange(T) <= ROWS) & (np.arange(T) >= ROWS - 6)
    options = {"segment_ids": IDS, "is_causal": True, "local_window_size": 6}
    check(arrays(keys=T, kv_heads=kv_heads), seen, sinks=SINKS, limit=4e-6, **options)


def test_a_bias_beside_them():
    check(arrays(), KEYS <= ROWS, sinks=SINKS, bias=normal(7, B, 1, T, 1), is_causal=True, limit=4e-6)


@pytest.mark.parametrize("sink", [90.0, -90.0, 1e4])
def test_sinks_of_nearly_all_and_nearly_no_weight(sink):
    check(arrays(), sinks=jnp.full(N, sink, jnp.float32), limit=4e-6)


@pytest.mark.parametrize("queries,keys", [(0, 5), (5, 0), (1, 1)])
def test_sizes_of_0_and_1(queries, keys):
    check(arrays(queries, keys), sinks=jnp.asarray(SINKS), limit=4e-6)


def test_halves():
    """The gradient of sinks has their dtype, and lse is in float32."""
    q, k, v, dy, _ = arrays(keys=T, dtype=jnp.bfloat16)
    sinks = SINKS.astype(jnp.bfloat16)
    (y, lse), pullback = jax.vjp(lambda s: coda.attention(q, k, v, sinks=s, return_residual=True), sinks)
    wide = [x.astype(jnp.float32) for x in (q, k, v, dy)]
    (exact, _), exact_pullback = jax.vjp(
        lambda s: coda.attention(*wide[:3], sinks=s, return_residual=True), sinks.astype(jnp.float32)
    )
    (got,), (expected,) = pullback((dy, lse * 0)), exact_pullback((wide[3], lse * 0))
    assert got.dtype == jnp.bfloat16 and lse.dtype == jnp.float32
    np.testing.assert_allclose(got.astype(jnp.float32), expected, rtol=0.02, atol=0.02)
    np.testing.assert_allclose(y.astype(jnp.float32), exact, atol=0.02)


def test_they_are_what_a_key_without_a_value_is():
    """gpt-oss writes a sink as one more column of scores, whose probability is dropped."""
    q, k, v, *_ = arrays(keys=T)

    def plain(q, k, v, sinks):
        s = jnp.einsum("btnh,bsnh->bnts", q, jnp.repeat(k, 2, axis=2)) * H**-0.5
        s = jnp.where(np.tri(T, dtype=bool), s, -jnp.inf)
        s = jnp.concatenate([s, jnp.broadcast_to(sinks[:, None, None], (B, N, T, 1))], axis=-1)
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s)[..., :-1], jnp.repeat(v, 2, axis=2))

    def total(f, *x):
        return jax.value_and_grad(lambda *x: jnp.sum(jnp.sin(f(*x))), (0, 1, 2, 3))(*x)

    got = total(lambda q, k, v, sinks: coda.attention(q, k, v, is_causal=True, sinks=sinks), q, k, v, SINKS)
    assert_equal(got, total(plain, q, k, v, SINKS))


def assert_equal(got, expected, limit=2e-5):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=limit, atol=limit * np.max(np.abs(b), initial=1))


@pytest.mark.parametrize("name", ["k", "v", "q"])
def test_nan_stays_in_its_document_beside_sinks(name):
    """All results but the gradient of sinks, which is a sum over all rows."""
    q, k, v, dy, dlse = arrays(keys=T)
    given = {"q": q, "k": k, "v": v}
    bad = 10  # of document 1 in the first row
    assert IDS[0, bad] == 1
    spoiled = given | {name: given[name].at[0, bad].set(jnp.nan)}

    @jax.jit
    def run(q, k, v):
        attend = functools.partial(coda.attention, is_causal=True, segment_ids=IDS, return_residual=True)
        results, pullback = jax.vjp(lambda q, k, v, s: attend(q, k, v, sinks=s), q, k, v, SINKS)
        return *results, *pullback((dy, dlse))

    got, clean = run(**spoiled), run(**given)
    others = IDS != 1
    others[1] = True
    for a, b in zip(got[:5], clean[:5], strict=True):
        np.testing.assert_array_equal(np.asarray(a)[others], np.asarray(b)[others])
    assert np.isnan(got[0][0, bad]).any() and np.isnan(got[5][0])


def test_joined_parts():
    """The sink counts in one of the parts."""
    q, k, v, *_ = arrays(keys=T)

    def joined(q, k, v, sinks):
        y1, lse1 = coda.attention(q, k[:, :17], v[:, :17], is_causal=True, sinks=sinks, return_residual=True)
        y2, lse2 = coda.attention(q, k[:, 17:], v[:, 17:], is_causal=True, query_offset=-17, return_residual=True)
        lse = jnp.logaddexp(lse1, lse2)
        return sum(y * jnp.exp(part - lse)[..., None] for y, part in ((y1, lse1), (y2, lse2)))

    def whole(q, k, v, sinks):
        return coda.attention(q, k, v, is_causal=True, sinks=sinks)

    for f in (joined, whole):
        assert_equal(f(q, k, v, SINKS), whole(q, k, v, SINKS))
    got, expected = (
        jax.grad(lambda *x, f=f: jnp.sum(jnp.sin(f(*x))), (0, 1, 2, 3))(q, k, v, SINKS[:3].sum() + normal(3, N))
        for f in (joined, whole)
    )
    assert_equal(got, expected)


# ---- JAX's transformations


def loss(q, k, v, sinks, ids=IDS):
    y, lse = coda.attention(q, k, v, is_causal=True, segment_ids=ids, sinks=sinks, return_residual=True)
    return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.cos(lse))


FINITE = jnp.asarray([0.3, -2.0, 3.0, 1.0], jnp.float32)


@pytest.mark.parametrize(
    "axes", [(0, 0, 0, 0), (None, None, None, 0), (1, None, None, None), (None, 2, None, 1)], ids=str
)
def test_batches(axes):
    given = (*arrays(keys=T)[:3], FINITE)
    batch = [
        x if axis is None else normal(10 + i, *x.shape[:axis], 3, *x.shape[axis:])
        for i, (x, axis) in enumerate(zip(given, axes, strict=True))
    ]

    def one_by_one(*x):
        each = (
            [a if axis is None else jnp.take(a, n, axis) for a, axis in zip(x, axes, strict=True)] for n in range(3)
        )
        return jnp.stack([loss(*one) for one in each])

    def total(f):
        return jax.jit(jax.value_and_grad(lambda *x: jnp.sum(f(*x)), (0, 1, 2, 3)))(*batch)

    assert_equal(total(jax.vmap(loss, axes)), total(one_by_one))
    of_each = jax.jit(jax.vmap(jax.grad(loss, (0, 3)), axes))(*batch)
    for n in range(3):
        one = [a if axis is None else jnp.take(a, n, axis) for a, axis in zip(batch, axes, strict=True)]
        assert_equal([x[n] for x in of_each], jax.grad(loss, (0, 3))(*one))


def test_a_batch_shares_its_sinks():
    q, k, v, *_ = arrays(keys=T)
    f = jax.vmap(lambda q: coda.attention(q, k, v, sinks=FINITE))
    (attention,) = (x for x, _ in equations_of(f, normal(1, 3, *q.shape))[0] if x.primitive.name == "coda_attention")
    assert attention.invars[3].aval.shape == (1, N)


def test_second_derivatives():
    """Against those of plain JAX."""
    q, k, v, *_ = (x[:, :9] for x in arrays(keys=T))

    def plain(q, k, v, sinks):
        s = jnp.einsum("btnh,bsnh->bnts", q, jnp.repeat(k, 2, axis=2)) * H**-0.5
        s = jnp.where(np.tri(9, dtype=bool), s, -jnp.inf)
        lse = jnp.logaddexp(jax.nn.logsumexp(s, axis=-1), sinks[:, None])
        return jnp.einsum("bnts,bsnh->btnh", jnp.exp(s - lse[..., None]), jnp.repeat(v, 2, axis=2)), lse.swapaxes(1, 2)

    def ours(q, k, v, sinks):
        return coda.attention(q, k, v, is_causal=True, sinks=sinks, return_residual=True)

    def of_gradients(f):
        def total(*x):
            y, lse = f(*x)
            return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.cos(lse))

        def again(*x):
            return sum(jnp.sum(jnp.sin(g * 1.3)) for g in jax.grad(total, (0, 1, 2, 3))(*x))

        return jax.jit(jax.grad(again, (0, 1, 2, 3)))(q, k, v, FINITE)

    assert_equal(of_gradients(ours), of_gradients(plain), 1e-4)


def test_a_checkpoint_runs_it_again():
    given = (*arrays(keys=T)[:3], FINITE)
    got = jax.jit(jax.grad(jax.checkpoint(loss), (0, 1, 2, 3)))(*given)
    assert_equal(got, jax.jit(jax.grad(loss, (0, 1, 2, 3)))(*given))


def test_export():
    pytest.importorskip("flatbuffers", reason="jax.export serialises with flatbuffers")
    given = (*arrays(keys=T)[:3], FINITE)
    function = jax.jit(jax.grad(loss, (0, 3)))
    again = jax.export.deserialize(jax.export.export(function)(*given).serialize())
    assert_equal(again.call(*given), function(*given))


def test_symbolic_sizes():
    batch, length = jax.export.symbolic_shape("batch, length")
    types = [jax.ShapeDtypeStruct((batch, length, heads, H), jnp.float32) for heads in (N, 2, 2)]
    function = jax.jit(jax.grad(lambda q, k, v, s: jnp.sum(coda.attention(q, k, v, sinks=s)), (0, 3)))
    exported = jax.export.export(function)(*types, jax.ShapeDtypeStruct((N,), jnp.float32))
    q, k, v, *_ = arrays(keys=T)
    v = normal(3, *k.shape)
    assert_equal(exported.call(q, k, v, FINITE), function(q, k, v, FINITE))


# ---- meshes


def passes(q, k, v, dy, ids, sinks):
    """y, lse, dq, dk, dv and dsinks."""

    def attend(q, k, v, sinks):
        return coda.attention(q, k, v, is_causal=True, segment_ids=ids, sinks=sinks, return_residual=True)

    (y, lse), pullback = jax.vjp(attend, q, k, v, sinks)
    return y, lse, *pullback((dy, jnp.cos(lse)))


@KINDS
@pytest.mark.parametrize("name", SCHEMES)
def test_meshes(kind, name):
    """Each device has the sinks of its heads, and their gradient is summed over sequences and rows."""
    scheme = SCHEMES[name]
    of_sinks = P(scheme.of_rows[1])
    if kind is AxisType.Explicit and name == "both":
        of_sinks = P(None)  # replicated sinks, of sharded heads
    arguments = [*mesh_arrays(), normal(5, 8)]
    compare(passes, arguments, [*scheme.arguments, of_sinks], kind)


# ---- bad input


@pytest.mark.parametrize(
    "sinks, message",
    [
        (jnp.zeros(N + 1), rf"sinks has shape \({N + 1},\); it must be \({N},\), one for each head"),
        (jnp.zeros((B, N)), r"sinks has shape \(2, 4\); it must be \(4,\)"),
        (jnp.zeros(N, jnp.int32), "sinks is int32; it must be of a floating dtype"),
    ],
)
def test_bad_sinks(sinks, message):
    q, k, v, *_ = arrays()
    with pytest.raises(ValueError, match=message):
        coda.attention(q, k, v, sinks=sinks)


def test_cudnn_has_no_sinks():
    q, k, v, *_ = arrays()
    with pytest.raises(ValueError, match="implementation = 'cudnn' with sinks or dropout"):
        coda.attention(q, k, v, sinks=FINITE, implementation="cudnn")


def test_without_sinks_nothing_changes():
    q, k, v, *_ = arrays(keys=T, dtype=jnp.float32)
    v = normal(3, *k.shape)
    hidden = jnp.full(N, -jnp.inf)
    assert_equal(coda.attention(q, k, v, sinks=hidden), plain_attention(q, k, v))
