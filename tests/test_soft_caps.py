"""Attention with capped scores: values and gradients in 16 bits, over caches, on meshes, under policies of remat."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import coda_jax as coda
import flax_layers as layers
from flax_layers import sharding
from flax_layers.attend import attend
from flax_layers.decoding.kv_cache import KVCache
from tests.chain_cases import normal

pytestmark = pytest.mark.usefixtures("quick_to_compile")
B, T, H, KV, DH = 2, 77, 4, 2, 16
Q, K, V, DY = normal(0, B, T, H, DH), normal(1, B, T, KV, DH), normal(2, B, T, KV, DH), normal(3, B, T, H, DH)
CONTEXT = normal(4, B, 30, KV, DH), normal(5, B, 30, KV, DH)
IDS = jnp.array([[0] * 20 + [1] * 30 + [7] * 27, [3] * 5 + [1] * 72])
CAP, SCALE = 5.0, 0.3


def of_dtype(f, dtype, *arrays):
    """The value of f and the gradients of all arrays, as float32."""
    y, pullback = jax.vjp(f, *(x.astype(dtype) for x in arrays))
    return [np.asarray(x, np.float32) for x in (y, *pullback(DY.astype(dtype)))]


def errors(got, exact):
    return np.array([np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(got, exact, strict=True)])


def test_no_sequences():
    y, back = jax.vjp(
        lambda *x: attend(*x, soft_cap=CAP, scale=SCALE)[0], *(x[:0].astype(jnp.bfloat16) for x in (Q, K, V))
    )
    assert [x.shape for x in (y, *back(y))] == [x[:0].shape for x in (Q, Q, K, V)]


@pytest.mark.parametrize("cap", [0.5, 64.0])
def test_scores_at_the_cap(cap):
    """Nothing overflows where every score is at plus or minus the cap, and rows of the least scores have their sums."""
    q = jnp.where(jnp.arange(T)[None, :, None, None] % 2 == 0, 100.0, -100.0) * jnp.ones_like(Q)
    k = jnp.ones_like(K)
    options = {"soft_cap": cap, "scale": 1.0}
    got = of_dtype(lambda *x: attend(*x, **options)[0], jnp.bfloat16, q, k, V)
    exact = of_dtype(lambda *x: attend(*x, **options)[0], jnp.float32, q, k, V)
    assert all(np.all(np.isfinite(x)) for x in got)
    np.testing.assert_allclose(got[0], exact[0], atol=0.03)
    np.testing.assert_allclose(got[3], exact[3], atol=0.05)


def textbook(q, k, v, cap, scale):
    """Causal attention with capped scores, in the arrays' dtype."""
    k, v = (jnp.repeat(x, H // KV, axis=2) for x in (k, v))
    scores = cap * jnp.tanh(jnp.einsum("bthd,bshd->bhts", q, k) * (scale / cap))
    scores = jnp.where(jnp.tri(T, dtype=bool), scores, -jnp.inf)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, axis=-1), v)


@pytest.mark.parametrize("cap, scale", [(0.5, 0.3), (0.5, 1.0), (0.5, 2.0)])
def test_gradients_far_beyond_the_cap(cap, scale):
    """Scores are 2 to 16 times the cap, and its derivative is as exact as plain JAX's, against float64."""
    arrays = [x.astype(jnp.bfloat16) for x in (Q, K, V)]
    dy = DY.astype(jnp.bfloat16)
    with jax.enable_x64(True):
        _, pullback = jax.vjp(lambda *x: textbook(*x, cap, scale), *(x.astype(jnp.float64) for x in arrays))
        exact = [np.asarray(x) for x in pullback(dy.astype(jnp.float64))]
    rough, got = (
        of_dtype(f, jnp.bfloat16, *arrays)[1:]
        for f in (lambda *x: textbook(*x, cap, scale), lambda *x: attend(*x, soft_cap=cap, scale=scale)[0])
    )
    assert np.all(errors(got, exact) <= 1.5 * errors(rough, exact) + 1e-3)


@pytest.mark.parametrize("window", [None, 20])
def test_no_rows_of_nan(window):
    """Rows that fill up the last block are of numbers too."""
    options = {"soft_cap": CAP, "sliding_window": window, "segment_ids": IDS}

    @jax.jit
    def value_and_gradients(dy, *arrays):
        y, pullback = jax.vjp(lambda *x: attend(*x, **options)[0], *arrays)
        return y, pullback(dy)

    with jax.debug_nans(True):
        value_and_gradients(*(x.astype(jnp.bfloat16) for x in (DY, Q, K, V)))


def test_without_a_batch():
    got = attend(*(x[0].astype(jnp.bfloat16) for x in (Q, K, V)), soft_cap=CAP, segment_ids=IDS[0])[0]
    wanted = attend(*(x.astype(jnp.bfloat16) for x in (Q, K, V)), soft_cap=CAP, segment_ids=IDS)[0]
    np.testing.assert_array_equal(got, wanted[0])


def test_vmap():
    several = [jnp.stack([x, 2 * x]).astype(jnp.bfloat16) for x in (Q, K, V)]
    got = jax.vmap(lambda *x: attend(*x, soft_cap=CAP)[0])(*several)
    wanted = [attend(*(x[i] for x in several), soft_cap=CAP)[0] for i in (0, 1)]
    np.testing.assert_allclose(got.astype(jnp.float32), jnp.stack(wanted).astype(jnp.float32), atol=0.03)


@pytest.mark.parametrize("has_segments", [False, True])
def test_attention_is_a_kernel(has_segments):
    """Forward and backward, for a GPU; kept are q, k, v and y, a sum a row, and which keys a query sees."""
    types = [jax.ShapeDtypeStruct((1, 4096, heads, 64), jnp.bfloat16) for heads in (8, 4, 4)]
    ids = jnp.repeat(jnp.arange(4), 1024)[None] if has_segments else None

    def loss(*x):
        y, _ = attend(*x, soft_cap=CAP, sliding_window=1000, segment_ids=ids)
        return jnp.sum(y.astype(jnp.float32))

    found = coda.explain(jax.grad(loss, (0, 1, 2)), *types, platform="cuda", device="H100")
    assert not found.products and sum(found.attention_calls.values()) == 2
    assert all(not one.reason for one in found.attention_calls)
    of_rows = 2 * 64 * (8 + 4 + 4 + 8) + 4 * 8 + 3 * 4
    assert found.totals.kept_bytes <= 4096 * of_rows


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("step", [1, 3])
def test_over_a_cache(step, window):
    """A token or several after those of a cache have what they have in the whole text."""
    options = {"soft_cap": CAP, "scale": SCALE, "sliding_window": window}
    wanted = attend(Q, K, V, **options)[0]
    cache = KVCache.empty(B, T, KV, DH, jnp.float32)
    found = []
    for start in (0, 60, 60 + step):
        end = {0: 60, 60: 60 + step}.get(start, 60 + 2 * step)
        y, cache = attend(*(x[:, start:end] for x in (Q, K, V)), **options, cache=cache)
        found.append(y)
    np.testing.assert_allclose(jnp.concatenate(found, axis=1), wanted[:, : 60 + 2 * step], atol=3e-5)


CONFIG = layers.GemmaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    attn_logit_softcapping=5.0,
    final_logit_softcapping=8.0,
    sliding_window=8,
    layer_types=("sliding_attention", "full_attention"),
)
TOKENS = jax.random.randint(jax.random.key(1), (8, 33), 0, 64)


def loss(model, tokens):
    return model.loss(tokens[:, :-1], tokens[:, 1:])


def made(rules=None, **options):
    return layers.Gemma(CONFIG, dtype=jnp.bfloat16, rules=rules, rngs=nnx.Rngs(0), **options)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("plan", ["FSDP", "FSDP_TENSOR"])
def test_on_a_mesh(plan, kind):
    """Each device computes its own rows and heads; what there is is that of one device."""
    rules = getattr(sharding, plan)
    shape, names = ((8,), ("fsdp",)) if plan == "FSDP" else ((4, 2), ("data", "tensor"))
    mesh = jax.make_mesh(shape, names, axis_types=(kind,) * len(shape))
    wanted = nnx.jit(nnx.value_and_grad(loss))(made(), TOKENS)
    with jax.set_mesh(mesh):
        model = sharding.create(lambda: made(rules), rules)
        tokens = jax.device_put(TOKENS, sharding.array_sharding(mesh, rules, "batch", None))
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        step = jax.jit(jax.value_and_grad(lambda params, tokens: loss(nnx.merge(graph, params, rest), tokens)))
        got = step(params, tokens)
        text = step.lower(params, tokens).compile().as_text()
    np.testing.assert_allclose(got[0], wanted[0], rtol=1e-4)
    leaves = zip(jax.tree.leaves(got[1]), jax.tree.leaves(wanted[1]), strict=True)
    assert max(np.linalg.norm(np.subtract(a, b)) / np.linalg.norm(b) for a, b in leaves) < 0.02
    # Heads (..., T, 16) of a part of the batch, gathered along what cuts them.
    assert not re.findall(r"all-gather\S* = \S*\[[\d,]*32,16\]", text)


@pytest.mark.parametrize("remat, again", [("save_attention", 0), ("full", 2)])
def test_remat_reruns_attention_only_without_its_result(remat, again):
    """The policy that keeps attention's result keeps its sums too: attention runs forward once."""
    graph, state = nnx.split(made(remat=remat), nnx.Param)
    step = jax.grad(lambda state, tokens: loss(nnx.merge(graph, state), tokens))
    text = str(jax.make_jaxpr(step)(state, TOKENS))
    assert len(re.findall(r"coda_attention\[", text)) == 2 + again
    assert len(re.findall(r"coda_attention_backward\[", text)) == 2
