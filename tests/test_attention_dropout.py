"""Dropout of coda.attention: the bits of coda.dropout wherever it runs, values and gradients, arrays that are made."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import coda_jax as coda
from coda_jax.attend import dropout
from coda_jax.extend import CONTEXT_NAME
from coda_jax.jaxprs.walk import equations_of
from tests.test_attention import IDS, IN_BLOCKS, KEYS, ROWS, B, H, K, N, S, T, arrays, check, normal
from tests.test_attention import sizes as sizes
from tests.test_attention_sharding import KINDS, SCHEMES, P, compare
from tests.test_attention_sharding import arrays as mesh_arrays
from tests.test_attention_sinks import assert_equal

pytestmark = pytest.mark.usefixtures("quick_to_compile")
KEY, RATE = jax.random.key(3), 0.3
DROPS = {"dropout_key": KEY, "dropout_rate": RATE}


def factors(keys=S, key=KEY, rate=RATE, batch=B, queries=T):
    """By what coda.dropout multiplies probabilities."""
    return np.asarray(coda.dropout(key, jnp.ones((batch, N, queries, keys)), rate), np.float64)


@pytest.mark.smoke
@pytest.mark.parametrize("name", IN_BLOCKS)
def test_values_and_gradients(sizes, name):
    """The bits are the same in both passes, in whatever blocks."""
    options, seen = IN_BLOCKS[name]
    check(arrays(), seen, dropped=factors(), limit=4e-6, **options, **DROPS)


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_beside_all_else(sizes, kv_heads):
    seen = (IDS[:, None, :, None] == IDS[:, None, None]) & (np.arange(T) <= ROWS)
    others = {"sinks": normal(5, N), "bias": normal(7, 1, N, T, 1), "dropped": factors(T)}
    check(arrays(keys=T, kv_heads=kv_heads), seen, segment_ids=IDS, is_causal=True, limit=4e-6, **others, **DROPS)


def test_kinds_of_keys():
    """A key of uint32, too, and no batch."""
    q, k, v, *_ = arrays()
    np.testing.assert_array_equal(
        coda.attention(q, k, v, dropout_key=jax.random.PRNGKey(3), dropout_rate=np.float32(RATE)),
        coda.attention(q, k, v, dropout_key=KEY, dropout_rate=float(np.float32(RATE))),
    )
    alone = coda.attention(q[0], k[0], v[0], **DROPS)
    np.testing.assert_array_equal(alone, coda.attention(q[:1], k[:1], v[:1], **DROPS)[0])


@pytest.mark.parametrize("rate", [0.05, 0.5, 0.95])
def test_the_part_that_is_dropped(rate):
    """Probabilities are all 1 / S, and values the unit vectors."""
    count = 128
    q, k = jnp.zeros((1, 64, 2, 8)), jnp.zeros((1, count, 1, 8))
    v = jnp.eye(count)[None, :, None]
    y = coda.attention(q, k, v, dropout_key=KEY, dropout_rate=rate)
    kept = np.asarray(y) != 0
    assert abs(kept.mean() - (1 - rate)) < 4 * math.sqrt(rate * (1 - rate) / kept.size)
    np.testing.assert_allclose(np.asarray(y)[kept], 1 / count / (1 - rate), rtol=1e-6)


def test_no_rate_is_no_dropout():
    q, k, v, *_ = arrays()
    jaxpr = jax.make_jaxpr(lambda q: coda.attention(q, k, v, dropout_key=KEY, dropout_rate=0))(q)
    assert str(jaxpr) == str(jax.make_jaxpr(lambda q: coda.attention(q, k, v))(q))


def test_the_log_sum_exp_is_not_dropped():
    q, k, v, *_ = arrays()
    for x in (DROPS, {}):
        _, lse = coda.attention(q, k, v, return_residual=True, **x)
        np.testing.assert_array_equal(lse, coda.attention(q, k, v, return_residual=True)[1])


def test_halves():
    """As exact as plain JAX's attention with `coda.dropout`."""
    q, k, v, dy, _ = arrays(keys=T, dtype=jnp.bfloat16)

    def plain(q, k, v):
        s = jnp.einsum("btnh,bsnh->bnts", q, jnp.repeat(k, N // K, axis=2), preferred_element_type=jnp.float32)
        p = coda.dropout(KEY, jax.nn.softmax(s * H**-0.5), RATE)
        return jnp.einsum("bnts,bsnh->btnh", p.astype(v.dtype), jnp.repeat(v, N // K, axis=2))

    def all_of(f, *x):
        y, pullback = jax.vjp(f, *x)
        return y, *pullback(dy.astype(y.dtype))

    got = jax.jit(lambda: all_of(lambda *x: coda.attention(*x, **DROPS), q, k, v))()
    exact = jax.jit(lambda: all_of(plain, *(x.astype(jnp.float32) for x in (q, k, v))))()
    rough = jax.jit(lambda: all_of(plain, q, k, v))()
    for a, b, c in zip(got, exact, rough, strict=True):
        a, b, c = (np.asarray(x, np.float32) for x in (a, b, c))
        assert np.linalg.norm(a - b) < 2 * np.linalg.norm(c - b) + 1e-3 * np.linalg.norm(b)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_nan_reaches_its_whole_document_dropped_or_not(name):
    """Dropped or not, as in the kernels; and no other document."""
    q, k, v, dy, _ = arrays(keys=T)
    given, bad = {"q": q, "k": k, "v": v}, 10
    spoiled = given | {name: given[name].at[0, bad].set(jnp.nan)}

    @jax.jit
    def run(q, k, v):
        attend = functools.partial(coda.attention, segment_ids=IDS, dropout_key=KEY, dropout_rate=0.9)
        y, pullback = jax.vjp(attend, q, k, v)
        return y, *pullback(dy)

    others = IDS[0] != IDS[0, bad]
    for i, (a, b) in enumerate(zip(run(**spoiled), run(**given), strict=True)):
        np.testing.assert_array_equal(np.asarray(a)[0, others], np.asarray(b)[0, others])
        if i == 3 and name != "v":  # dv of all keys that the row sees, or of the one that is seen by all
            assert np.isnan(np.asarray(a)[0, bad]).all()
    y = np.asarray(run(**spoiled)[0])
    assert np.isnan(y[0, bad] if name == "q" else y[0, ~others]).all()


# ---- JAX's transformations


def loss(q, k, v, key=KEY, **options):
    return jnp.sum(jnp.sin(coda.attention(q, k, v, is_causal=True, dropout_key=key, dropout_rate=RATE, **options)))


def plain_loss(q, k, v, key=KEY):
    s = jnp.einsum("btnh,bsnh->bnts", q, jnp.repeat(k, N // K, axis=2)) * H**-0.5
    p = jax.nn.softmax(jnp.where(np.tri(q.shape[1], dtype=bool), s, -jnp.inf))
    p = coda.dropout(key, p, RATE)
    return jnp.sum(jnp.sin(jnp.einsum("bnts,bsnh->btnh", p, jnp.repeat(v, N // K, axis=2))))


GIVEN = arrays(keys=T)[:3]


def of_gradients(f):
    return jax.jit(jax.value_and_grad(f, (0, 1, 2)))


def test_a_key_that_is_traced():
    assert_equal(of_gradients(loss)(*GIVEN, jax.random.key(8)), of_gradients(plain_loss)(*GIVEN, jax.random.key(8)))


@pytest.mark.parametrize(
    "axes", [(0, None, None, None), (None, None, None, 0), (1, 2, 0, 0), (None, 0, None, None)], ids=str
)
def test_batches(axes):
    """Elements of a batch with one key have the same bits, as `coda.dropout` has it."""
    keys = KEY if axes[3] is None else jax.random.split(KEY, 3)
    batch = [
        x if axis is None else normal(10 + i, *x.shape[:axis], 3, *x.shape[axis:])
        for i, (x, axis) in enumerate(zip(GIVEN, axes[:3], strict=True))
    ]
    ours, plain = (of_gradients(lambda *x, f=f: jnp.sum(jax.vmap(f, axes)(*x, keys))) for f in (loss, plain_loss))
    assert_equal(ours(*batch), plain(*batch))


def test_a_loop_with_a_key_for_each_step():
    def in_loop(f):
        def total(q, k, v):
            def step(total, key):
                return total + f(q, k, v, key), None

            return jax.lax.scan(step, 0.0, jax.random.split(KEY, 3))[0]

        return total

    assert_equal(of_gradients(in_loop(loss))(*GIVEN), of_gradients(in_loop(plain_loss))(*GIVEN))


@pytest.mark.parametrize("policy", [None, CONTEXT_NAME])
def test_a_checkpoint_makes_the_same_bits(policy):
    policy = policy and jax.checkpoint_policies.save_only_these_names(policy)
    assert_equal(of_gradients(jax.checkpoint(loss, policy=policy))(*GIVEN), of_gradients(plain_loss)(*GIVEN))


def test_second_derivatives():
    given = [x[:, :9] for x in GIVEN]
    ours, plain = (
        jax.jit(jax.grad(lambda *x, f=f: sum(jnp.sum(jnp.sin(g)) for g in jax.grad(f, (0, 1, 2))(*x)), (0, 1, 2)))
        for f in (loss, plain_loss)
    )
    assert_equal(ours(*given), plain(*given), 1e-4)


def test_export():
    pytest.importorskip("flatbuffers", reason="jax.export serialises with flatbuffers")
    again = jax.export.deserialize(jax.export.export(of_gradients(loss))(*GIVEN).serialize())
    assert_equal(again.call(*GIVEN), of_gradients(plain_loss)(*GIVEN))


def test_symbolic_sizes():
    batch, length = jax.export.symbolic_shape("batch, length")
    types = [jax.ShapeDtypeStruct((batch, length, *x.shape[2:]), x.dtype) for x in GIVEN]
    exported = jax.export.export(jax.jit(lambda *x: coda.attention(*x, **DROPS)))(*types)
    assert_equal(exported.call(*GIVEN), coda.attention(*GIVEN, **DROPS))


def test_no_array_of_all_pairs_is_made():
    """Neither by the program around the two passes nor by them: nothing larger than a block of scores."""
    q, k, v = (jax.ShapeDtypeStruct((1, 2048, heads, 64), jnp.float32) for heads in (2, 1, 1))
    program = jax.grad(lambda *x: jnp.sum(coda.attention(*x, is_causal=True, **DROPS)), (0, 1, 2))
    sizes = [v.aval.size for e, _ in equations_of(program, q, k, v)[0] for v in e.outvars if hasattr(v.aval, "size")]
    assert max(sizes) <= 2 * 2048 * 64
    memory = [
        jax.jit(jax.grad(lambda *x, o=o: jnp.sum(coda.attention(*x, is_causal=True, **o)))).lower(q, k, v).compile()
        for o in (DROPS, {})
    ]
    with_bits, without = (x.memory_analysis().temp_size_in_bytes for x in memory)
    assert with_bits < without + (9 << 20) < 2 * 2048**2 * 4  # a block's bits, and those of rows


# ---- meshes


def passes(q, k, v, dy, ids, key):
    def attend(q, k, v):
        return coda.attention(
            q, k, v, is_causal=True, segment_ids=ids, dropout_key=key, dropout_rate=0.4, return_residual=True
        )

    (y, lse), pullback = jax.vjp(attend, q, k, v)
    return y, lse, *pullback((dy, jnp.cos(lse)))


@KINDS
@pytest.mark.parametrize("name", SCHEMES)
def test_meshes(kind, name):
    """The bits are those of elements' places in the whole, however sequences, heads and rows are sharded."""
    scheme = SCHEMES[name]
    _, moved, _ = compare(passes, [*mesh_arrays(), jax.random.PRNGKey(5)], [*scheme.arguments, P()], kind)
    if name in ("data", "tensor", "both") and kind is AxisType.Explicit:
        assert not moved


# ---- the kernels' text


def test_the_text_is_that_of_the_epilogue_of_dropout():
    """Equal rates are one text; another rate changes its bound alone."""
    text = dropout.text(0.25)
    assert text == dropout.text(0.25) and "846ca68b" not in text
    bound, other = (f"< {round((0.5 - rate) * 2**32)}" for rate in (0.25, 0.125))
    assert text.count(bound) == 1 and text.replace(bound, other) == dropout.text(0.125)


# ---- bad input


@pytest.mark.parametrize("rate", [1, -0.1, float("nan"), "0.5", None, True])
def test_bad_rates(rate):
    with pytest.raises(ValueError, match=r"dropout_rate = .*; it must be a number of at least 0 and less than 1"):
        coda.attention(*GIVEN, dropout_key=KEY, dropout_rate=rate)


def test_a_rate_that_is_traced():
    with pytest.raises(ValueError, match=r"dropout_rate = .*; it must be a number"):
        jax.jit(lambda rate: coda.attention(*GIVEN, dropout_key=KEY, dropout_rate=rate))(0.5)


def test_no_key():
    with pytest.raises(ValueError, match=r"dropout_rate = 0.5 without dropout_key"):
        coda.attention(*GIVEN, dropout_rate=0.5)


def test_cudnn_has_other_bits():
    with pytest.raises(ValueError, match="implementation = 'cudnn' with sinks or dropout"):
        coda.attention(*GIVEN, implementation="cudnn", **DROPS)


def test_keys_beside_no_keys():
    """No queries and no keys: nothing is drawn of elements that there are not."""
    for queries, keys in ((0, 5), (5, 0)):
        check(arrays(queries, keys), KEYS[:keys] >= 0, dropped=factors(keys, queries=queries), **DROPS)
