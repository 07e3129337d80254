"""coda.attention by XLA: values and gradients against dense float64 attention, for all masks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coda_jax as coda
from coda_jax.attend import blocks
from coda_jax.attend.spec import AttentionSpec, MaskSpec
from coda_jax.jaxprs.walk import equations_of
from tests import tolerance

pytestmark = pytest.mark.usefixtures("quick_to_compile")
B, T, S, N, K, H, HV = 2, 37, 29, 4, 2, 16, 24


def dense(q, k, v, dy, dlse, *, bias=0.0, seen=True, scale=None, sinks=None, dropped=1.0):
    """y, lse, and the gradients of q, k, v, the bias (B, N, T, S), and of sinks if there are any, in float64.

    Args:
      dropped: what probabilities (B, N, T, S) are multiplied by.
    """
    q, k, v, dy, dlse, bias = (np.asarray(x, np.float64) for x in (q, k, v, dy, dlse, bias))
    groups, scale = q.shape[2] // k.shape[2], q.shape[-1] ** -0.5 if scale is None else scale
    keys, values = (np.repeat(x, groups, axis=2) for x in (k, v))
    s = scale * np.einsum("btnh,bsnh->bnts", q, keys) + bias
    s = np.where(np.broadcast_to(seen, s.shape), s, -np.inf)
    sinks = -np.inf if sinks is None else np.asarray(sinks, np.float64)[:, None, None]
    m = np.maximum(np.max(s, axis=-1, keepdims=True, initial=-np.inf), sinks)
    e, of_sink = (np.exp(x - np.where(m == -np.inf, 0, m)) for x in (s, sinks))
    total = e.sum(-1, keepdims=True) + of_sink
    p = e / np.where(total == 0, 1, total)
    with np.errstate(divide="ignore"):
        lse = (m + np.log(total))[..., 0].transpose(0, 2, 1)
    y = np.einsum("bnts,bsnh->btnh", p * dropped, values)
    dp = np.einsum("btnh,bsnh->bnts", dy, values) * dropped
    delta = np.sum(p * dp, axis=-1, keepdims=True) - dlse.transpose(0, 2, 1)[..., None]
    ds = p * (dp - delta)

    def of_kv_heads(x):
        return x.reshape(*x.shape[:2], k.shape[2], groups, x.shape[3]).sum(3)

    dq = scale * np.einsum("bnts,bsnh->btnh", ds, keys)
    dk = of_kv_heads(scale * np.einsum("bnts,btnh->bsnh", ds, q))
    of_sinks = () if np.isscalar(sinks) else (-np.sum(of_sink / np.where(total == 0, 1, total) * delta, (0, 2, 3)),)
    return y, lse, dq, dk, of_kv_heads(np.einsum("bnts,btnh->bsnh", p * dropped, dy)), ds, *of_sinks


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def arrays(queries=T, keys=S, heads=N, kv_heads=K, dtype=jnp.float32, batch=B):
    """q, k, v, dy and dlse."""
    return (
        normal(0, batch, queries, heads, H, dtype=dtype),
        normal(1, batch, keys, kv_heads, H, dtype=dtype),
        normal(2, batch, keys, kv_heads, HV, dtype=dtype),
        normal(3, batch, queries, heads, HV, dtype=dtype),
        normal(4, batch, queries, heads),
    )


def check(given, seen=True, *, bias=None, sinks=None, dropped=1.0, limit=2e-6, **options):
    """Values and gradients are those of dense attention over the pairs that see each other."""
    q, k, v, dy, dlse = given

    def attend(q, k, v, bias, sinks):
        return coda.attention(q, k, v, bias, sinks=sinks, return_residual=True, **options)

    def run(*given):
        *differentiated, dy, dlse = given
        results, pullback = jax.vjp(attend, *differentiated)
        return *results, pullback((dy, dlse))

    y, lse, gradients = jax.jit(run)(q, k, v, bias, sinks, dy, dlse)
    others = {"seen": seen, "scale": options.get("scale"), "sinks": sinks, "dropped": dropped}
    expected = dense(*given, bias=0.0 if bias is None else bias, **others)
    for name, got, exact in zip(("y", "lse", "dq", "dk", "dv"), (y, lse, *gradients[:3]), expected, strict=False):
        got, exact = np.asarray(got, np.float64), np.asarray(exact)
        assert got.shape == exact.shape, name
        assert np.array_equal(np.isneginf(got), np.isneginf(exact)), name
        size = np.max(np.abs(exact[np.isfinite(exact)]), initial=1.0)
        np.testing.assert_allclose(got, exact, rtol=limit, atol=limit * size, err_msg=name)
    if bias is not None:
        axes = tuple(i for i, size in enumerate((*(1,) * (4 - bias.ndim), *bias.shape)) if size == 1)
        dbias = np.sum(expected[5], axis=axes, keepdims=True)
        assert (gradients[3].dtype, gradients[3].shape) == (bias.dtype, bias.shape)
        np.testing.assert_allclose(
            gradients[3], dbias.reshape(bias.shape), rtol=limit, atol=limit * np.max(np.abs(dbias), initial=1)
        )
    if sinks is not None:
        assert gradients[4].dtype == sinks.dtype
        most = np.max(np.abs(expected[6]), initial=1)
        np.testing.assert_allclose(gradients[4], expected[6], rtol=limit, atol=limit * most)
    return y, lse


ROWS, KEYS = np.arange(T)[:, None], np.arange(S)


@pytest.mark.smoke
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_groups_of_heads(kv_heads):
    check(arrays(kv_heads=kv_heads))


OFFSETS = [None, 5, -6, 10**12, np.array([3, -40], np.int32), np.array([2**31 - 1, -(2**31)], np.int32)]


@pytest.mark.parametrize("offset", OFFSETS, ids=str)
@pytest.mark.parametrize("options", [{"is_causal": True}, {"local_window_size": (4, 2)}], ids=str)
def test_offsets(options, offset):
    """Queries are at their row and the offset; some see nothing."""
    position = ROWS + np.asarray(0 if offset is None else offset).reshape(-1, 1, 1)
    seen = position >= KEYS if "is_causal" in options else (position - 4 <= KEYS) & (position + 2 >= KEYS)
    check(arrays(), seen[:, None], query_offset=offset, **options)


IDS = np.array([[0] * 9 + [1] * 14 + [7] * 14, [3] * 5 + [1] * 32], np.int32)
UNSORTED = np.random.default_rng(5).integers(0, 4, (B, T)).astype(np.int32)
KEY_IDS = np.random.default_rng(6).integers(0, 5, (B, S)).astype(np.int32)


@pytest.fixture(params=["one block", "spans of blocks"])
def sizes(request, monkeypatch):
    """Spans of 9 queries, and blocks of 4, of which the last has less."""
    if request.param == "spans of blocks":
        in_small_blocks(monkeypatch)
    jax.clear_caches()  # sizes of blocks are no arguments of what is jitted
    yield request.param
    jax.clear_caches()


def in_small_blocks(monkeypatch):
    for name, value in (("_MOST_CPU_BYTES", 4), ("_LEAST_ROWS", 4), ("_LEAST_SPAN", 9), ("_WINDOW_ROWS", 8)):
        monkeypatch.setattr(blocks, name, value)


IN_BLOCKS = {
    "plain": ({}, True),
    "causal": ({"is_causal": True}, KEYS <= ROWS),
    "window": ({"local_window_size": (6, 1)}, (ROWS - 6 <= KEYS) & (KEYS <= ROWS + 1)),
    "keys before": ({"is_causal": True, "query_offset": -20}, KEYS <= ROWS - 20),
    "window behind": (
        {"is_causal": True, "local_window_size": 5, "query_offset": -7},
        (ROWS - 12 <= KEYS) & (KEYS <= ROWS - 7),
    ),
    "no keys": ({"local_window_size": 2, "query_offset": 60}, KEYS < 0),
    "ids": (
        {"segment_ids": UNSORTED, "key_value_segment_ids": KEY_IDS},
        UNSORTED[:, None, :, None] == KEY_IDS[:, None, None],
    ),
    "lengths": (
        {"query_seq_lengths": np.array([20, 0], np.int32), "key_value_seq_lengths": np.array([29, 3], np.int32)},
        (np.array([20, 0])[:, None, None, None] > ROWS) & (np.array([29, 3])[:, None, None, None] > KEYS),
    ),
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", IN_BLOCKS)
def test_masks_in_blocks(sizes, name):
    options, seen = IN_BLOCKS[name]
    check(arrays(), seen, **options)


def test_a_span_reads_the_keys_that_it_sees(monkeypatch):
    causal = blocks.spans(2, 4096, 4096, MaskSpec(right=0))
    assert [(span.start, span.first, span.count) for span in causal] == [(i * 512, 0, (i + 1) * 512) for i in range(8)]
    (window,) = blocks.spans(2, 4096, 4096, MaskSpec(left=200, right=0))
    assert (window.size, window.width) == (128, 328)
    assert {span.size for span in blocks.spans(2, 4096, 4096, MaskSpec(right=0), on_cpu=True)} == {128}
    assert sum(span.blocks * span.size for span in blocks.spans(64, 5000, 5000, MaskSpec())) < 5050


@pytest.mark.parametrize("seed", range(5))
def test_random_bands(monkeypatch, seed):
    """The forms of blocks, by themselves, for bands anywhere and sizes that divide nothing."""
    in_small_blocks(monkeypatch)
    random = np.random.default_rng(seed)
    queries, keys, left, right = (int(x) for x in random.integers((1, 1, -20, -20), (40, 40, 20, 20)))
    mask = MaskSpec(*(None if random.integers(3) == 0 else x for x in (left, right)))
    spec = AttentionSpec(mask, H**-0.5)
    q, k, v, dy, dlse = given = arrays(queries, keys)

    def run(*factors):
        y, lse = blocks.forward(*factors, spec=spec, on_cpu=True)
        return (
            y,
            lse.swapaxes(1, 2),
            *blocks.backward(*factors, y, lse, dy, dlse.swapaxes(1, 2), spec=spec, on_cpu=True),
        )

    expected = dense(*given, seen=blocks.seen(mask, (), queries, keys) if mask != MaskSpec() else True)
    for got, exact in zip(jax.jit(run)(q, k, v), expected, strict=False):
        np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", ["(B, N, T, S)", "(1, N, 1, S)", "(B, 1, T, 1)", "(T, S)", "(1, 1, 1, 1)"])
def test_bias(sizes, shape):
    named = {"B": B, "N": N, "T": T, "S": S, "1": 1}
    bias = normal(7, *(named[x] for x in shape.strip("()").split(", ")))
    check(arrays(), KEYS <= ROWS, bias=bias, is_causal=True)


def test_bias_in_blocks_that_move(monkeypatch):
    in_small_blocks(monkeypatch)
    jax.clear_caches()
    for shape in ((1, N, T, S), (B, 1, 1, S)):
        check(arrays(), IN_BLOCKS["window"][1], bias=normal(7, *shape, dtype=jnp.float32), **IN_BLOCKS["window"][0])
    jax.clear_caches()


def of_bias(batch, tokens, heads, shape, dtype=jnp.float32, width=8, **mask):
    """The bias's gradient for a CPU, and the types of its arguments."""
    spec = AttentionSpec(MaskSpec(has_bias=True, **mask), width**-0.5)
    rows, lse = ((batch, tokens, heads, width), (batch, heads, tokens))
    types = [jax.ShapeDtypeStruct(x, jnp.float32) for x in (rows, rows, rows, shape, rows, lse, rows, lse)]
    types[3] = types[3].update(dtype=dtype)
    return functools.partial(blocks.bias_cotangents, spec=spec, on_cpu=True), types


@pytest.mark.parametrize("shape", [(1, 4, 64, 64), (1024, 1, 1, 64)], ids=str)
def test_a_bias_gradient_of_many_sequences_takes_some_at_a_time(shape):
    """AlphaFold's pair bias, that many short rows share: a block of 16 rows of all is 16 MiB, and there are five."""
    function, types = of_bias(1024, 64, 4, shape)
    memory = jax.jit(function).lower(*types).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 6 * blocks._MOST_CPU_BYTES + 5 * types[0].size * 4 // 4


def test_a_bias_gradient_is_written_once():
    """Its rows are put where they belong, in its own dtype, and no second array of all pairs is there."""
    function, types = of_bias(1, 2048, 4, (1, 4, 2048, 2048), jnp.bfloat16)
    largest = [v.aval for e, _ in equations_of(function, *types)[0] for v in e.outvars if v.aval.size == 4 * 2048**2]
    assert {x.dtype for x in largest} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize("mask, share", [({}, 1), ({"right": 0}, 1 / 2 + 1 / 16)], ids=str)
def test_a_bias_gradient_is_two_products(mask, share):
    """Scores and dy v^T, of the pairs that a band lets see each other; nothing else is computed again."""
    function, types = of_bias(2, 4096, 4, (1, 4, 4096, 4096), **mask)
    flops = sum(
        2 * count * e.outvars[0].aval.size * e.invars[0].aval.shape[-1]
        for e, count in equations_of(function, *types)[0]
        if e.primitive.name == "dot_general"
    )
    assert flops == 2 * 2 * 4 * 4096**2 * (8 + 8) * share


@pytest.mark.parametrize("shape", [(1, N, T, S), (6, 1, T, 1), (1, 1, 1, S), (6, N, 1, 1)], ids=str)
def test_bias_gradients_of_sequences_in_groups(monkeypatch, shape):
    """Six sequences, two at a time."""
    in_small_blocks(monkeypatch)
    monkeypatch.setattr(blocks, "_MOST_CPU_BYTES", 2 * 4 * N * S * 4)
    jax.clear_caches()
    check(arrays(batch=6), KEYS <= ROWS, bias=normal(7, *shape), is_causal=True)
    jax.clear_caches()


def test_a_bias_of_minus_infinity_hides_keys():
    bias = jnp.where((np.arange(T)[:, None] > 3) & (KEYS < 20), 0.0, -jnp.inf)
    check(arrays(), bias=bias[None, None])


@pytest.mark.parametrize("ids", [IDS, UNSORTED, UNSORTED[0]], ids=["sorted", "unsorted", "of all"])
def test_segments(ids):
    pairs = np.atleast_2d(ids)
    check(arrays(keys=T), pairs[:, None, :, None] == pairs[:, None, None], segment_ids=ids)
    seen = (pairs[:, None, :, None] == pairs[:, None, None]) & (np.arange(T) <= ROWS)
    check(arrays(keys=T, kv_heads=1), seen, segment_ids=ids, is_causal=True)


def random_intervals(seed, shape):
    first, last = np.random.default_rng(seed).integers(-3, S + 3, (2, *shape)).astype(np.int32)
    return first, last


def of_intervals(first, last):
    return (first[..., None] <= KEYS) & (last[..., None] >= KEYS)


@pytest.mark.parametrize("shape", [(B, T), (T,)], ids=str)
@pytest.mark.parametrize("has_second", [False, True])
def test_intervals(shape, has_second):
    one, two = random_intervals(8, shape), random_intervals(9, shape)
    seen = of_intervals(*one) | of_intervals(*two) if has_second else of_intervals(*one)
    seen = seen if len(shape) == 1 else seen[:, None]
    assert not np.all(np.any(seen, axis=-1))  # some rows see nothing
    first, last = two if has_second else (None, None)
    check(arrays(), seen, mask=coda.Intervals(*one, second_first=first, second_last=last))


def test_all_masks_together():
    one, two = random_intervals(8, (B, T)), random_intervals(9, (B, T))
    offset, lengths = np.array([2, 9], np.int32), np.array([30, 35], np.int32)
    position = ROWS + offset[:, None, None]
    seen = of_intervals(*one) | of_intervals(*two)
    seen &= (position - 20 <= KEYS) & (position >= KEYS) & (lengths[:, None, None] > ROWS)
    seen &= np.array([25, 29])[:, None, None] > KEYS
    seen &= UNSORTED[:, :, None] % 2 == KEY_IDS[:, None] % 2
    check(
        arrays(kv_heads=1),
        seen[:, None],
        bias=normal(7, 1, N, 1, S),
        mask=coda.Intervals(*one, *two),
        is_causal=True,
        local_window_size=20,
        query_offset=offset,
        segment_ids=UNSORTED % 2,
        key_value_segment_ids=KEY_IDS % 2,
        query_seq_lengths=lengths,
        key_value_seq_lengths=np.array([25, 29], np.int32),
    )


@pytest.mark.parametrize("shape", [(B, N, T, S), (B, 1, 1, S), (N, T, 1), (T, S)], ids=str)
def test_dense_masks(sizes, shape):
    mask = np.random.default_rng(10).integers(0, 2, shape).astype(bool)
    check(arrays(), mask & (KEYS <= ROWS), mask=mask, is_causal=True)


@pytest.mark.parametrize("scale", [2, 0.1, -0.3, 0.0, np.float32(0.5), jnp.float32(0.5)], ids=repr)
def test_scale(scale):
    check(arrays(), scale=scale)


def test_negative_scales_of_halves():
    """The product of the scale and q is not rounded, whatever the sign."""
    q, k, v, *_ = arrays(dtype=jnp.bfloat16)
    by = [np.asarray(coda.attention(sign * q, k, v, scale=sign * 0.3)) for sign in (1, -1)]
    np.testing.assert_array_equal(*by)


def test_without_a_batch():
    q, k, v, dy, dlse = (x[:1] for x in arrays())
    bias, ids = normal(7, N, T, S), np.arange(T) % 3
    y, lse = jax.jit(
        lambda *x: coda.attention(
            *x,
            return_residual=True,
            segment_ids=ids,
            key_value_segment_ids=ids[:S],
            key_value_seq_lengths=np.array([20], np.int32),
            query_offset=np.int32(3),
            is_causal=True,
        )
    )(q[0], k[0], v[0], bias)
    seen = (ids[:, None] == ids[:S]) & (KEYS < 20) & (KEYS <= ROWS + 3)
    expected = dense(q, k, v, dy, dlse, bias=bias, seen=seen)
    for got, exact in zip((y, lse), expected, strict=False):
        assert got.shape == exact.shape[1:]
        np.testing.assert_allclose(got, exact[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("queries,keys", [(0, 5), (5, 0), (1, 1), (0, 0), (1, 7), (7, 1)])
@pytest.mark.parametrize("batch", [0, 2])
def test_sizes_of_0_and_1(batch, queries, keys):
    given = arrays(queries, keys, batch=batch)
    rows, columns = np.arange(queries)[:, None], np.arange(keys)
    lengths = np.full(batch, 3, np.int32)
    check(given, columns <= rows, is_causal=True)
    check(given, (columns <= rows) & (columns < 3), is_causal=True, key_value_seq_lengths=lengths)
    check(given, np.ones((1, 1, queries, keys), bool), bias=normal(7, 1, N, queries, keys))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=lambda x: x.__name__)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}], ids=str)
def test_half_precision(dtype, options):
    """As exact as plain JAX's attention, whose arguments are rounded before."""
    given = arrays(keys=T, dtype=dtype)
    q, k, v, dy, _ = given

    def all_of(attend):
        y, pullback = jax.vjp(lambda *x: attend(*x, **options), q, k, v)
        return y, *pullback(dy)

    got = jax.jit(lambda: all_of(coda.attention))()
    plain = jax.jit(lambda: all_of(plain_attention))()
    seen = np.arange(T) <= ROWS if options else True
    y, _, *gradients, _ = dense(*(np.asarray(x, np.float32) for x in given[:4]), np.zeros((B, T, N)), seen=seen)
    for name, a, exact, b in zip(("y", "dq", "dk", "dv"), got, (y, *gradients), plain, strict=True):
        tolerance.check(a, exact, b, name=name)


def plain_attention(q, k, v, is_causal=False):
    groups = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, groups, axis=2) for x in (k, v))
    s = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    s = jnp.where(np.tri(q.shape[1], k.shape[1], dtype=bool), s, -jnp.inf) if is_causal else s
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s).astype(v.dtype), v)


def test_float64():
    with jax.enable_x64(True):
        given = [jnp.asarray(x, jnp.float64) for x in arrays()]
        y, lse = check(given, KEYS <= ROWS, is_causal=True, limit=1e-13)
        assert y.dtype == lse.dtype == jnp.float64


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True, "scale": 0.3},
        {"local_window_size": (30, 2)},
        {"local_window_size": 40, "key_value_seq_lengths": np.array([29, 7], np.int32)},
        {"mask": np.eye(T, S, 5, dtype=bool) | (KEYS < 2), "bias": np.ones((N, 1, S), np.float32)},
        {"query_seq_lengths": np.array([30, 2], np.int32)},
    ],
    ids=str,
)
def test_it_takes_the_place_of_jax_own(options):
    q, k, v, dy, _ = arrays()
    v, dy = k + 1, dy[..., :H]

    def all_of(attend):
        results, pullback = jax.vjp(lambda *x: attend(*x, return_residual=True, **options), q, k, v)
        return *results, *pullback((dy, jnp.zeros_like(results[1])))

    got, expected = (
        jax.jit(lambda attend=attend: all_of(attend))() for attend in (coda.attention, jax.nn.dot_product_attention)
    )
    for name, a, b in zip(("y", "lse", "dq", "dk", "dv"), got, expected, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        is_row = True
        if "query_seq_lengths" in options and name == "lse":  # JAX's is that of S masked scores
            is_row = np.asarray(got[0])[..., 0] != 0
        np.testing.assert_allclose(np.where(is_row, a, 0), np.where(is_row, b, 0), rtol=1e-5, atol=1e-5, err_msg=name)


def joined(q, k, v, parts, **options):
    """Attention to parts of the keys, joined by their log-sum-exps."""
    each = [coda.attention(q, k[:, part], v[:, part], return_residual=True, **options) for part in parts]
    lse = functools.reduce(jnp.logaddexp, [lse for _, lse in each])
    return sum(y * jnp.exp(part - lse)[..., None] for y, part in each), lse


def test_parts_of_the_keys_are_joined():
    q, k, v, dy, dlse = arrays()

    def all_of(attend):
        results, pullback = jax.vjp(attend, q, k, v)
        return *results, *pullback((dy, dlse))

    whole = jax.jit(lambda: all_of(lambda *x: coda.attention(*x, return_residual=True)))()
    parts = jax.jit(lambda: all_of(lambda *x: joined(*x, (slice(0, 11), slice(11, S)))))()
    for a, b in zip(parts, whole, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("what", [np.nan, np.inf], ids=str)
@pytest.mark.parametrize("place", ["query", "key", "value", "cotangent"])
def test_nan_and_infinity_stay_in_their_segment(sizes, place, what):
    """Segment 1 has a NaN; all of segment 0 is as without it, in values and gradients."""
    ids = np.stack([np.arange(T) % 3 == 1, np.arange(T) >= 30]).astype(np.int32)
    given = list(arrays(keys=T)[:4])
    names = ("query", "key", "value", "cotangent")

    def run(q, k, v, dy):
        y, pullback = jax.vjp(lambda *x: coda.attention(*x, segment_ids=ids), q, k, v)
        return y, *pullback(dy)

    expected = jax.jit(run)(*given)
    index = names.index(place)
    given[index] = given[index].at[0, 4, 0, 3].set(what).at[1, 33, 0, 0].set(what)
    got = jax.jit(run)(*given)
    others = ids == 0
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(np.asarray(a)[others], np.asarray(b)[others], rtol=1e-6, atol=1e-6)
    if place != "cotangent":
        assert np.isnan(np.asarray(got[0])[0, 4, 0]).all()  # it sees itself


def test_a_row_that_sees_nothing_has_no_gradient():
    """Its log-sum-exp is -inf, and no derivative of that comes back."""
    q, k, v, *_ = arrays()

    def loss(q, k, v):
        y, lse = coda.attention(q, k, v, is_causal=True, query_offset=-5, return_residual=True)
        return jnp.sum(y * y) + jnp.sum(lse)

    dq, dk, dv = jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v)
    assert not np.any(dq[:, :5]) and np.all(np.any(np.asarray(dq[:, 6:]), axis=-1))
    assert all(np.isfinite(x).all() for x in (dq, dk, dv))


def test_cudnn_is_called_as_jax_does(monkeypatch):
    calls = []

    def by_xla(*arguments, implementation, **options):
        calls.append(options)
        assert implementation == "cudnn"
        return plain(*arguments, implementation="xla", **options)

    plain = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", by_xla)
    q, k, *_ = arrays()
    lengths = np.array([20, 25], np.int32)
    y, lse = coda.attention(
        q,
        k,
        k,
        is_causal=True,
        local_window_size=4,
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
        return_residual=True,
        implementation="cudnn",
    )
    assert calls[0]["is_causal"] and calls[0]["local_window_size"] == (4, 4)
    assert calls[0]["query_seq_lengths"].shape == (B,) and calls[0]["scale"] == 0.25
    assert (y.shape, lse.shape) == ((B, T, N, H), (B, T, N))
    options = {"segment_ids": UNSORTED, "key_value_segment_ids": KEY_IDS, "is_causal": True, "query_offset": -2}
    by_cudnn, own = (
        coda.attention(q, k, k, return_residual=True, implementation=name, **options) for name in ("cudnn", "xla")
    )
    assert "is_causal" not in calls[1]
    for a, b in zip(by_cudnn, own, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


ERRORS = [
    ({"query": (T, H)}, "query has shape .*it must be"),
    ({"key": (S, K, H)}, "both must have a batch, or neither"),
    ({"query": (B + 1, T, N, H)}, "query has a batch of 3, key of 2"),
    ({"query": (B, T, N, H + 1)}, "query has heads of width 17, key of 16"),
    ({"query": (B, T, 3, H)}, "query has 3 heads, key 2"),
    ({"value": (B, S + 1, K, H)}, "only the last axis may differ"),
    ({"value": jnp.zeros((B, S, K, H), jnp.bfloat16)}, "value bfloat16; all must be of one dtype"),
    ({"bias": np.zeros((B, N, T, S), np.int32)}, "bias is int32"),
    ({"bias": np.zeros((2, T, S), np.float32)}, r"bias has shape \(2, 37, 29\); it must broadcast"),
    ({"mask": np.zeros((T, S), np.float32)}, "mask is float32; it must be bool"),
    ({"mask": np.zeros((T, S + 1), bool)}, r"mask has shape \(37, 30\)"),
    ({"mask": coda.Intervals(np.zeros(T, np.int32), np.zeros((T, 1), np.int32))}, r"mask.last has shape \(37, 1\)"),
    ({"mask": coda.Intervals(*[np.zeros(T, np.int32)] * 3)}, "a second interval needs both"),
    ({"segment_ids": np.zeros((B, T), np.int32)}, "as many of them"),
    ({"key_value_segment_ids": np.zeros((B, S), np.int32)}, "queries need ids too"),
    (
        {"segment_ids": np.zeros((B, T)), "key_value_segment_ids": np.zeros(S, int)},
        "segment_ids is float64; it must be",
    ),
    ({"query_seq_lengths": np.zeros(B + 1, np.int32)}, "query_seq_lengths has shape"),
    ({"key_value_seq_lengths": np.zeros(B)}, "key_value_seq_lengths is float64; it must be int32"),
    ({"query_offset": 1.0}, "query_offset is float"),
    ({"query_offset": np.zeros((B, 1), np.int32)}, "query_offset has shape"),
    ({"local_window_size": (3, -1)}, r"local_window_size = \(3, -1\)"),
    ({"local_window_size": (3, 1, 2)}, "local_window_size"),
    ({"is_causal": 1}, "is_causal = 1"),
    ({"return_residual": None}, "return_residual = None"),
    ({"scale": np.inf}, "scale = inf; it must be a finite number"),
    ({"scale": "one"}, "scale = one"),
    ({"scale": np.ones(2)}, "scale = "),
    ({"implementation": "auto"}, "implementation = 'auto'; it must be one of None, 'cuda'"),
    ({"config": coda.GemmConfig()}, "config is GemmConfig"),
]


@pytest.mark.parametrize("changed,message", ERRORS, ids=[message for _, message in ERRORS])
def test_errors(changed, message):
    arguments = {"query": (B, T, N, H), "key": (B, S, K, H), "value": (B, S, K, H), **changed}
    for name in ("query", "key", "value"):
        if isinstance(arguments[name], tuple):
            arguments[name] = jnp.zeros(arguments[name])
    with pytest.raises(ValueError, match=f"attention: .*{message}"):
        coda.attention(**arguments)


def test_a_traced_scale_is_refused():
    q, k, v, *_ = arrays()
    with pytest.raises(ValueError, match="no array that is traced"):
        jax.jit(lambda scale: coda.attention(q, k, v, scale=scale))(0.5)


def test_padding_of_blocks_sees_nothing(monkeypatch):
    """Keys that no query sees have no gradient, one that is NaN among them, where the last block is not whole."""
    in_small_blocks(monkeypatch)
    jax.clear_caches()
    q, k, v, dy, _ = arrays()
    ids = np.where(KEYS < 9, 0, 1).astype(np.int32)
    k = k.at[:, 4].set(np.nan)
    options = {"segment_ids": np.ones(T, np.int32), "key_value_segment_ids": ids}
    dk, dv = jax.jit(jax.grad(lambda *x: jnp.sum(coda.attention(*x, **options) * dy), (1, 2)))(q, k, v)
    assert not np.any(dk[:, :9]) and not np.any(dv[:, :9]) and np.all(np.isfinite(dk))
    jax.clear_caches()
