"""coda.explain of coda.attention: what its masks need, its costs, why it takes XLA's form, and its surroundings."""

import json
import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import coda_jax as coda
from coda_jax import ffi
from coda_jax.attend import costs
from coda_jax.attend.spec import MaskSpec
from coda_jax.tools.attention import in_words
from tests.nvrtc import needs_nvrtc

B, T, H, K, D = 2, 1024, 8, 2, 64
PAIRS = T * (T + 1) // 2
SIZES = {"q": 2 * B * T * H * D, "k": 2 * B * T * K * D, "lse": 4 * B * H * T}


def array(heads, dtype=jnp.bfloat16, **options):
    return jax.ShapeDtypeStruct((B, T, heads, D), dtype, **options)


def loss(q, k, v, **options):
    y = coda.attention(jnp.sin(q), k, v, **options)
    return jnp.sum(jnp.cos(y).astype(jnp.float32))


def gradient(**options):
    return jax.grad(lambda *x: loss(*x, **options), (0, 1, 2))


def explained(function, *arrays, **options):
    found = coda.explain(function, *arrays, platform="cuda", **options)
    return found, sorted(found.attention_calls, key=lambda one: one.is_backward)


@needs_nvrtc
@pytest.mark.smoke
def test_costs_of_a_causal_mask():
    found, (forward, backward) = explained(gradient(is_causal=True), array(H), array(K), array(K))
    assert set(found.attention_calls.values()) == {1} and not found.attention and not found.others
    assert (forward.is_backward, backward.is_backward) == (False, True)
    for one, products, tflops in ((forward, 4, 500), (backward, 10, 430)):
        assert one.reason is None and one.mask == "causal" and one.query == f"bfloat16[{B},{T},{H},{D}]"
        assert one.flops == B * H * PAIRS * products * D
        assert one.pairs == pytest.approx(PAIRS / T**2) and one.skipped == 28 / 64
        assert one.tflops == pytest.approx(tflops, rel=1e-3)
    of_keys = 2 * SIZES["k"]
    assert (forward.bytes_read, forward.bytes_written) == (SIZES["q"] + of_keys, SIZES["q"] + SIZES["lse"])
    assert backward.bytes_read == 3 * SIZES["q"] + of_keys + 2 * SIZES["lse"]
    assert backward.bytes_written == SIZES["q"] + of_keys
    assert found.totals.attention_flops == forward.flops + backward.flops
    assert found.totals.attention_ms == pytest.approx((forward.us + backward.us) / 1e3)


@needs_nvrtc
def test_attention_keeps_its_results_and_ends_passes():
    """y and the log-sum-exp are kept; passes end at it, and it is none."""
    found, _ = explained(gradient(is_causal=True), array(H), array(K), array(K))
    kept = {(one.name, one.array, one.maker) for one in found.kept if one.maker == "attention"}
    y, lse = f"bfloat16[{B},{T},{H},{D}]", f"float32[{B},{H},{T}]"
    assert kept == {("context", y, "attention"), ("context", lse, "attention")}
    between = {(one.operation, one.after, one.before) for one in found.passes if one.bytes > SIZES["q"]}
    assert ("sin", ("input",), ("attention",)) in between and not any("coda" in one[0] for one in between)
    text = str(found)
    assert "Hopper kernels" in text and "causal" in text and "44%" in text and "attention, by rates of Hopper" in text
    (row, _) = json.loads(json.dumps(found.as_dict()))["attention_calls"]
    assert row["count"] == 1 and row["tflops"] == pytest.approx(500, rel=1e-3)


@needs_nvrtc
def test_ids_are_half_of_the_pairs():
    ids = jax.ShapeDtypeStruct((B, T), jnp.int32)

    def packed(q, k, v, ids):
        return loss(q, k, v, is_causal=True, segment_ids=ids)

    _, (one,) = explained(packed, array(H), array(K), array(K), ids)
    assert one.mask == "causal, ids" and one.skipped is None and one.pairs == pytest.approx(PAIRS / 2 / T**2, rel=1e-5)
    assert one.bytes_read == SIZES["q"] + 2 * SIZES["k"] + 2 * 4 * B * T


def test_the_xla_form_has_its_reason():
    asked, (one,) = explained(lambda *x: loss(*x, implementation="xla"), array(H), array(K), array(K))
    assert one.reason == "implementation='xla'" and one.us is None and one.flops == B * H * T * T * 4 * D
    assert "XLA: implementation='xla'" in str(asked) and asked.totals.attention_ms == 0
    (one,) = coda.explain(loss, array(H), array(K), array(K), platform="cpu").attention_calls
    assert one.reason == "the platform is cpu" and one.flops and one.us is None


@needs_nvrtc
def test_other_dtypes_have_their_reason():
    _, (one,) = explained(loss, *(array(n, jnp.float32) for n in (H, K, K)))
    assert "float32" in one.reason and one.us is None


@needs_nvrtc
def test_a_scan_counts_its_steps():
    def layers(q, k, v):
        return jax.lax.scan(lambda y, _: (coda.attention(y, k, v, is_causal=True), None), q, length=3)[0]

    found, (one,) = explained(layers, array(H), array(K), array(K))
    assert found.attention_calls == {one: 3}
    assert found.totals.attention_ms == pytest.approx(3 * one.us / 1e3)


@needs_nvrtc
@pytest.mark.parametrize("rows", [None, "model"])
def test_of_a_device_over_explicit_axes(rows):
    devices = jax.devices("cpu")[:4]
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2, devices=devices)
    heads = None if rows else "model"
    of_queries, of_keys = (NamedSharding(mesh, P("data", x, heads)) for x in (rows, None))
    types = array(H, sharding=of_queries), array(K, sharding=of_keys), array(K, sharding=of_keys)
    with jax.set_mesh(mesh):
        _, calls = explained(gradient(is_causal=True), *types)
    for one, products in zip(calls, (4, 10), strict=True):
        assert one.over == ("data", "model") and one.reason is None
        assert one.flops == B * H * PAIRS * products * D // 4
    of_keys_bytes = 2 * SIZES["k"] // (2 if rows else 4)
    assert calls[0].bytes_read == SIZES["q"] // 4 + of_keys_bytes


@needs_nvrtc
def test_over_automatic_axes_costs_are_not_known():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:2])
    types = [array(n, sharding=NamedSharding(mesh, P("data"))) for n in (H, K, K)]
    with jax.set_mesh(mesh):
        found, (one,) = explained(loss, *types)
    assert one.over == ("data",) and one.flops is None and one.us is None and one.reason is None
    assert "on each device's part over data" in str(found)


@needs_nvrtc
def test_over_automatic_axes_costs_are_known_once_xla_has_partitioned(monkeypatch):
    monkeypatch.setattr(ffi, "compile_async", lambda source, name, arch: None)
    devices = jax.devices("cpu")[:4]
    mesh = jax.make_mesh((2, 2), ("batch", "rows"), axis_types=(AxisType.Auto,) * 2, devices=devices)
    of_queries, of_keys = (NamedSharding(mesh, P("batch", x)) for x in ("rows", None))
    types = array(H, sharding=of_queries), array(K, sharding=of_keys), array(K, sharding=of_keys)
    function = gradient(is_causal=True)
    with jax.set_mesh(mesh):
        lowered = jax.jit(function).trace(*types).lower(lowering_platforms=("cuda",))
        with pytest.raises(jax.errors.JaxRuntimeError, match="No FFI handler registered for coda_launch"):  # on CPUs
            lowered.compile()
        _, (forward, backward) = explained(function, *types)
    for one, products in ((forward, 4), (backward, 10)):
        assert one.over == ("batch", "rows") and one.reason is None
        assert one.flops == B * H * PAIRS * products * D // 4
    assert forward.bytes_written == (SIZES["q"] + SIZES["lse"]) // 4
    assert backward.bytes_written == SIZES["q"] // 4 + SIZES["k"]


@needs_nvrtc
def test_compare_has_its_time():
    def plain(q, k, v):
        return jnp.sum(jax.nn.dot_product_attention(q, k, v, is_causal=True).astype(jnp.float32))

    found = coda.compare(plain, lambda *x: loss(*x, is_causal=True), array(H), array(K), array(K))
    before, ours = found.columns
    assert (before.attention, before.untimed_attention, before.attention_ms) == (1, 1, 0)
    assert (ours.attention, ours.untimed_attention) == (1, 0) and ours.attention_ms == found.ours.totals.attention_ms
    assert ours.ms[0] == pytest.approx(ours.attention_ms + ours.passes_ms[0])


@pytest.mark.parametrize(
    "mask, words",
    [
        (MaskSpec(), "none"),
        (MaskSpec(right=0), "causal"),
        (MaskSpec(left=3, right=0), "from i - 3 to i + 0"),
        (MaskSpec(left=-3), "from i + 3"),
        (MaskSpec(right=-2, has_mask=True), "to i - 2, a dense mask"),
        (MaskSpec(intervals=2, has_ids=True, has_bias=True), "two intervals, ids, a bias"),
        (MaskSpec(intervals=1), "an interval"),
        (MaskSpec(right=0, has_sinks=True, dropout_rate=0.1), "causal, sinks, dropout of 0.1"),
    ],
)
def test_masks_in_words(mask, words):
    assert in_words(mask) == words


@pytest.mark.parametrize("left, right", [(None, 0), (5, 2), (-3, 9), (None, None), (None, -40), (0, 0)])
@pytest.mark.parametrize("queries, keys", [(16, 16), (18, 33), (33, 5)])
def test_skipped_tiles(left, right, queries, keys):
    tile, tiles = 4, set()
    for i in range(queries):
        for j in range(keys):
            if (left is None or i - left <= j) and (right is None or j <= i + right):
                tiles.add((i // tile, j // tile))
    everything = math.ceil(queries / tile) * math.ceil(keys / tile)
    assert costs.skipped(MaskSpec(left, right), queries, keys, tile) == pytest.approx(1 - len(tiles) / everything)


def soft_cap(s):
    return 20 * jnp.tanh(s / 20)


def in_chunks(s):
    row, key = (jax.lax.broadcasted_iota(jnp.int32, s.shape, axis) for axis in (2, 3))
    return jnp.where(row // 256 == key // 256, s, -jnp.inf)


@needs_nvrtc
def test_scores_are_named():
    (forward,) = explained(lambda *x: loss(*x, is_causal=True, score=soft_cap), array(H), array(K), array(K))[1]
    assert forward.mask == "causal; score soft_cap" and forward.skipped == 28 / 64 and forward.reason is None


@needs_nvrtc
def test_gradients_that_are_left_to_xla_are_named():
    table = jax.ShapeDtypeStruct((32,), jnp.float32)

    def words(index, factor):
        def score(s, table):
            row, key = (jax.lax.broadcasted_iota(jnp.int32, s.shape, axis) for axis in (2, 3))
            found = table[index(row, key) % 32]
            return s * found * table[0] if factor else s + found

        def of_table(q, k, v, table):
            return loss(q, k, v, score=score, operands=(table,))

        *_, backward = explained(jax.grad(of_table, (0, 3)), array(H), array(K), array(K), table)[1]
        assert backward.is_backward
        return backward.mask.partition("; gradients by XLA where asked for: ")[2]

    assert words(lambda row, key: row - key, False) == ""
    assert words(lambda row, key: row + key, False) == "a table's index is no distance of query and key"
    assert words(lambda row, key: row - key, True) == "more than 1 derivative depends on the scores"


def test_tiles_that_a_score_hides_are_counted():
    (forward,) = explained(lambda *x: loss(*x, score=in_chunks), array(H), array(K), array(K))[1]
    assert forward.mask == "from i - 511 to i + 511; score in_chunks, which hides keys"
    assert forward.skipped == 1 - 16 / 64


@needs_nvrtc
def test_tiles_that_a_scores_arrays_hide_are_not_known():
    ids = jax.ShapeDtypeStruct((B, T), jnp.int32)

    def documents(s, ids):
        return jnp.where(ids[:, None, :, None] == ids[:, None, None], s, -jnp.inf)

    def attend(q, k, v, ids):
        return loss(q, k, v, score=documents, operands=(ids,))

    (forward,) = explained(attend, array(H), array(K), array(K), ids)[1]
    assert forward.mask == "none; score documents, which hides keys in tiles by its arrays" and forward.skipped is None
