"""How attention is lowered for a GPU: the kernels or XLA's form, what is said of it, export, and its expected time."""

import re
import types
import warnings

import jax
import jax.export
import jax.numpy as jnp
import pytest

import coda_jax as coda
from coda_jax.attend import costs
from coda_jax.attend.spec import MaskSpec
from coda_jax.lowering import select
from tests.attention_on_cpus import stand_in

pytestmark = pytest.mark.usefixtures("nothing_said_yet")
B, T, H, K, D = 2, 64, 4, 2, 16
Q, KV = jax.ShapeDtypeStruct((B, T, H, D), jnp.bfloat16), jax.ShapeDtypeStruct((B, T, K, D), jnp.bfloat16)
IN_FLOAT32 = [x.update(dtype=jnp.float32) for x in (Q, KV, KV)]


@pytest.fixture(autouse=True)
def launches(monkeypatch):
    return stand_in(monkeypatch)


def causal(q, k, v, **options):
    return coda.attention(q, k, v, is_causal=True, **options)


def gradients(q, k, v, **options):
    return jax.grad(lambda *x: jnp.sum(causal(*x, **options).astype(jnp.float32)), (0, 1, 2))(q, k, v)


def lowered(function, *arguments):
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def calls(text):
    return re.findall(r'@coda_launch\(.*name = "(\w+)"', text)


@pytest.mark.smoke
def test_both_passes_are_the_kernels(launches):
    text = lowered(gradients, Q, KV, KV)
    assert calls(text) == ["attention", "attention_backward"]
    assert launches == [False, False]  # one device: nothing runs beside them


def test_the_xla_form_is_no_fallback():
    with coda.strict():
        assert not calls(lowered(lambda *x: gradients(*x, implementation="xla"), Q, KV, KV))


@pytest.mark.smoke
def test_a_fallback_is_told_once_at_the_users_line():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert not calls(lowered(gradients, *IN_FLOAT32))
    assert [warning.lineno for warning in caught] == [causal.__code__.co_firstlineno + 1]
    assert str(caught[0].message) == (
        "attention, query float32[2, 64, 4, 16], key float32[2, 64, 2, 16], value float32[2, 64, 2, 16], takes its XLA "
        "form: query is float32; coda.explain lists all, with what to change"
    )
    assert caught[0].category is coda.FallbackWarning and caught[0].filename == __file__


def test_a_fallback_raises_in_strict_mode():
    with coda.strict(), pytest.raises(coda.FallbackError, match="takes its XLA form: query is float32"):
        lowered(causal, *IN_FLOAT32)


def test_a_fallback_raises_where_the_kernels_are_asked_for():
    with pytest.raises(
        NotImplementedError, match="attention: implementation='cuda' was asked for, but query is float32"
    ):
        lowered(lambda *x: causal(*x, implementation="cuda"), *IN_FLOAT32)
    assert calls(lowered(lambda *x: causal(*x, implementation="cuda"), Q, KV, KV)) == ["attention"]


def test_another_gpu_takes_the_xla_form(monkeypatch):
    ampere = types.SimpleNamespace(compute_capability="8.0", platform="gpu", device_kind="NVIDIA A100")
    monkeypatch.setattr(select.jax, "devices", lambda platform=None: [ampere])
    with pytest.warns(coda.FallbackWarning, match="the GPU has compute capability 8.0; the kernel needs 9.0"):
        assert not calls(lowered(causal, Q, KV, KV))


def test_masks_reach_the_kernels_in_their_order(launches):
    ids, dense = jax.ShapeDtypeStruct((B, T), jnp.int32), jax.ShapeDtypeStruct((1, 1, T, T), jnp.bool_)
    lengths, bias = jax.ShapeDtypeStruct((B,), jnp.int32), jax.ShapeDtypeStruct((1, H, T, T), jnp.bfloat16)

    def attend(q, k, v, ids, dense, lengths, bias):
        return causal(q, k, v, bias=bias, mask=dense, segment_ids=ids, key_value_seq_lengths=lengths)

    text = lowered(attend, Q, KV, KV, ids, dense, lengths, bias)
    (call,) = re.findall(r"@coda_launch\(.*: \((.*)\) -> ", text)
    shapes = [f"{B}x2x{T}xi32", f"{B}x{T}xi32", f"{B}x{T}xi32", f"1x1x{T}x{T}xi1", f"1x{H}x{T}x{T}xbf16"]
    assert re.findall(r"tensor<(.*?)>", call)[3:] == shapes


def test_export_of_both_platforms():
    pytest.importorskip("flatbuffers", reason="jax.export serialises with flatbuffers")
    checks = [jax.export.DisabledSafetyCheck.custom_call("coda_launch")]
    exported = jax.export.export(jax.jit(causal), platforms=("cpu", "cuda"), disabled_checks=checks)(Q, KV, KV)
    assert exported.mlir_module().count("@coda_launch(") == 1
    again = jax.export.deserialize(exported.serialize())
    arrays = [jax.random.normal(jax.random.key(i), x.shape, x.dtype) for i, x in enumerate((Q, KV, KV))]
    assert jnp.array_equal(again.call(*arrays), jax.jit(causal)(*arrays))


def test_export_of_symbolic_sizes():
    batch, length = jax.export.symbolic_shape("batch, length")
    types = [jax.ShapeDtypeStruct((batch, length, heads, D), jnp.bfloat16) for heads in (H, K, K)]
    checks = [jax.export.DisabledSafetyCheck.custom_call("coda_launch")]
    exported = jax.export.export(jax.jit(causal), platforms=("cuda",), disabled_checks=checks)(*types)
    assert exported.mlir_module().count("@coda_launch(") == 1


def test_the_scheduler_is_told_the_time():
    """All operations of a pass together are said to take the time of its FLOPs."""
    q, kv = (jax.ShapeDtypeStruct((2, 8192, heads, 64), jnp.bfloat16) for heads in (32, 8))
    text = lowered(gradients, q, kv, kv)
    seen = 8192 * 8193 // 2
    for name, results, products, tflops in (("attention", 2, 4, 500), ("attention_backward", 3, 10, 430)):
        (call,) = (line for line in text.splitlines() if f'name = "{name}"' in line)
        told = int(re.search(r'latency_metadata = "(\d+)"', call)[1])
        assert told * (1 + results) == pytest.approx(2 * 32 * seen * products * 64 / tflops / 1e3, rel=1e-5)


@pytest.mark.parametrize(
    "left, right", [(None, None), (None, 0), (3, 0), (2, 5), (-2, 4), (None, -9), (50, -40), (0, 99)]
)
@pytest.mark.parametrize("queries, keys", [(7, 7), (5, 12), (12, 5)])
def test_pairs_of_a_band(left, right, queries, keys):
    seen = sum(
        (left is None or i - left <= j) and (right is None or j <= i + right)
        for i in range(queries)
        for j in range(keys)
    )
    assert costs.pairs(MaskSpec(left, right), queries, keys) == seen
    assert costs.pairs(MaskSpec(left, right, has_ids=True), queries, keys) == seen // 2
    assert costs.pairs(MaskSpec(left, right, has_mask=True, has_bias=True), queries, keys) == seen


def scored(q, k, v, slopes):
    def alibi(s):
        return s - slopes[:, None, None] * jnp.abs(jnp.arange(T)[:, None] - jnp.arange(T))

    return causal(q, k, v, score=alibi)


def test_arrays_of_a_score_reach_the_kernels_behind_those_of_masks():
    text = lowered(scored, Q, KV, KV, jax.ShapeDtypeStruct((H,), jnp.bfloat16))
    (call,) = re.findall(r"@coda_launch\(.*: \((.*)\) -> ", text)
    assert re.findall(r"tensor<(.*?)>", call)[3:] == [f"1x{H}x1x1xbf16"]
    assert calls(
        lowered(
            lambda *x: jax.grad(lambda q: jnp.sum(scored(q, *x[1:])).astype(jnp.float32))(x[0]),
            Q,
            KV,
            KV,
            jax.ShapeDtypeStruct((H,), jnp.bfloat16),
        )
    ) == ["attention", "attention_backward"]


def test_gradients_of_a_scores_arrays_are_the_kernels():
    """XLA computes no scores for them; a fallback has them too."""
    of = Q, KV, KV, jax.ShapeDtypeStruct((H,), jnp.bfloat16)

    def gradients(*x):
        return jax.grad(lambda *x: jnp.sum(scored(*x)).astype(jnp.float32), (0, 3))(*x)

    text = lowered(gradients, *of)
    assert calls(text) == ["attention", "attention_backward"] and "dot_general" not in text
    assert f"tensor<1x{H}x1x1xbf16>" in re.search(r'name = "attention_backward".*-> (.*)', text)[1]
    with pytest.warns(coda.FallbackWarning):
        text = lowered(gradients, *(x.update(dtype=jnp.float32) for x in of))
    assert "dot_general" in text


def where(s):
    row, key = (jax.lax.broadcasted_iota(jnp.int32, s.shape, axis) for axis in (2, 3))
    return jnp.where((row >= key) & (row - key < 9), s, -jnp.inf)


def test_a_score_that_is_a_band_is_one():
    """The program is that of a window, by its arguments."""
    by_score = lowered(lambda *x: coda.attention(*x, score=where), Q, KV, KV)
    assert by_score == lowered(lambda *x: causal(*x, local_window_size=8), Q, KV, KV)


def test_a_score_of_a_dtype_that_kernels_do_not_have(monkeypatch):
    with jax.enable_x64(True), pytest.warns(coda.FallbackWarning, match="its score reads an array of float64"):
        monkeypatch.undo()
        lowered(
            lambda *x: coda.attention(*x[:3], score=lambda s, x: s + x, operands=x[3:]),
            Q,
            KV,
            KV,
            jax.ShapeDtypeStruct((T,), jnp.float64),
        )
