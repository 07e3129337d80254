"""Models of flax_layers on the device: every product a kernel, losses and gradients as good as XLA's, the same bits."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import coda_jax as coda
import flax_layers as layers
from coda_jax.primitives.fallbacks import FallbackWarning

REPEATS = 20
ORDERS = "PostNormBlock", "NormBeforeSumBlock", "SandwichNormBlock", "ParallelBlock"
SIZES = {
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
LLAMA = layers.LlamaConfig(**SIZES)
GPT2 = layers.GPT2Config(vocab_size=320, n_positions=128, n_embd=256, n_layer=2, n_head=4)


def ordered(order, **options):
    """A Llama whose blocks have another order of norms."""
    model = layers.Llama(LLAMA, rngs=nnx.Rngs(0), **options)
    for i, block in enumerate(model.layers):
        norms = [layers.RMSNorm(256, rngs=nnx.Rngs(10 * i + j), dtype=options["dtype"]) for j in range(4)]
        parts = {"attention": block.attention, "mlp": block.mlp}
        if order == "ParallelBlock":
            model.layers[i] = layers.ParallelBlock(norm=norms[0], **parts)
        elif order == "SandwichNormBlock":
            names = "attention_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm"
            model.layers[i] = layers.SandwichNormBlock(**dict(zip(names, norms, strict=True)), **parts)
        else:
            model.layers[i] = getattr(layers, order)(attention_norm=norms[0], mlp_norm=norms[1], **parts)
    return model


def adapted(**options):
    model = layers.Llama(LLAMA, rngs=nnx.Rngs(0), **options)
    layers.add_lora(model, 8, rngs=nnx.Rngs(1))
    return model


def of_family(build, **settings):
    return lambda **options: build(rngs=nnx.Rngs(0), **settings, **options)


def gemma(**settings):
    windows = {"sliding_window": 24, "layer_types": ("sliding_attention", "full_attention")}
    return of_family(layers.Gemma, config=layers.GemmaConfig(**{**SIZES, **windows, **settings}))


MODELS = {
    "llama": lambda **options: layers.Llama(LLAMA, rngs=nnx.Rngs(0), **options),
    "llama, scanned": lambda **options: layers.Llama(LLAMA, scan_layers=True, rngs=nnx.Rngs(0), **options),
    "llama, recomputed": lambda **options: layers.Llama(LLAMA, remat="full", rngs=nnx.Rngs(0), **options),
    "llama, separate weights": lambda **options: layers.Llama(
        LLAMA, separate_qkv=True, separate_gate_up=True, rngs=nnx.Rngs(0), **options
    ),
    "qwen3": lambda **options: layers.Llama(layers.LlamaConfig(**SIZES, qk_norm=True), rngs=nnx.Rngs(0), **options),
    "llama, fp8": lambda **options: layers.Llama(LLAMA, fp8=coda.fp8.Recipe(), rngs=nnx.Rngs(0), **options),
    "llama, fp8 by histories": lambda **options: layers.Llama(
        LLAMA, fp8=coda.fp8.Recipe(scaling="delayed"), rngs=nnx.Rngs(0), **options
    ),
    "gpt2, fp8": lambda **options: layers.GPT2(GPT2, fp8=coda.fp8.Recipe(), rngs=nnx.Rngs(0), **options),
    "gpt2": lambda **options: layers.GPT2(GPT2, rngs=nnx.Rngs(0), **options),
    "lora": adapted,
    "qwen2": of_family(layers.Llama, config=layers.LlamaConfig(**SIZES, attention_bias=True, attention_out_bias=False)),
    "gemma 2": gemma(attn_logit_softcapping=5.0, final_logit_softcapping=8.0, query_pre_attn_scalar=100),
    "gemma 3, heads of 256": gemma(head_dim=256, qk_norm=True, rope_local_base_freq=1e3),
    "olmo 2": of_family(layers.Olmo2, config=layers.Olmo2Config(**SIZES)),
    "command r": of_family(layers.Cohere, config=layers.CohereConfig(**SIZES)),
} | {order: functools.partial(ordered, order) for order in ORDERS}
TOKENS = np.random.default_rng(0).integers(0, 320, (3, 81))


@functools.cache
def step_of(name, dtype, attention):
    """The jitted loss and gradients of a model, and its parameters."""
    model = MODELS[name](dtype=dtype, attention_implementation=attention)
    # Biases of zeros, scales of ones and adapters of zeros hide what they do.
    leaves, tree = jax.tree.flatten(nnx.state(model, nnx.Param))
    keys = jax.random.split(jax.random.key(5), len(leaves))
    each = zip(keys, leaves, strict=True)
    moved = [x + (0.1 if x.ndim == 1 else 0.02) * jax.random.normal(key, x.shape, x.dtype) for key, x in each]
    nnx.update(model, jax.tree.unflatten(tree, moved))
    if jax.tree.leaves(nnx.state(model, layers.fp8.History)):
        with warnings.catch_warnings(action="ignore", category=FallbackWarning):  # of the reference in float32
            layers.fp8.calibrate(model, lambda model: model.loss(TOKENS[:, :-1], TOKENS[:, 1:]))
    graphdef, state, rest = nnx.split(model, layers.fp8.DIFFERENTIATED, ...)

    def loss(state, tokens):
        return nnx.merge(graphdef, state, rest).loss(tokens[:, :-1], tokens[:, 1:])

    return jax.jit(jax.value_and_grad(loss)), state


def run(name, dtype, device):
    step, state = step_of(name, dtype, "xla" if device.platform == "cpu" else None)
    tokens = TOKENS if "fp8" in name else TOKENS[:, :-3]  # of 8 bits rows are multiples of 16
    return jax.tree.map(np.asarray, step(*jax.device_put((state, tokens), device)))


@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    host, device = jax.devices("cpu")[0], jax.devices()[0]
    exact, plain = run(name, jnp.float32, host), run(name, jnp.bfloat16, host)
    with coda.strict():
        found = run(name, jnp.bfloat16, device)
        assert all(_same(found, run(name, jnp.bfloat16, device)) for _ in range(REPEATS))
    rough = _errors(plain, exact)
    assert np.all(_errors(found, exact) <= 1.5 * rough + 0.2 * rough.max() + 1e-6)


B, T, D = 2, 77, 256
ATTENTIONS = {
    "bias": layers.Attention(D, 4, num_kv_heads=2, scale=0.2, rngs=nnx.Rngs(0)),
    "bias, heads of 256": layers.Attention(D, 2, num_kv_heads=1, head_dim=256, is_causal=False, rngs=nnx.Rngs(0)),
    "soft cap": layers.Attention(D, 4, soft_cap=1.0, sliding_window=20, rngs=nnx.Rngs(0)),
    "cross": layers.CrossAttention(D, 4, context_features=128, num_kv_heads=2, rngs=nnx.Rngs(0)),
}


@functools.cache
def attention_step(name, dtype, implementation):
    """The jitted gradients of the weights and inputs of a layer, and these."""
    layer = nnx.clone(ATTENTIONS[name])
    layer.implementation = implementation
    graphdef, state = nnx.split(layer, nnx.Param)
    keys = jax.random.split(jax.random.key(7), 4)
    x, context = (
        2 * jax.random.normal(key, (B, length, d)) for key, length, d in zip(keys, (T, 50), (D, 128), strict=False)
    )
    bias = jax.random.normal(keys[2], (layer.num_heads, T, T))
    arrays = (context,) if name == "cross" else (bias,)
    dy = jax.random.normal(keys[3], (B, T, D))

    def loss(state, x, array):
        given = {"bias": array} if name != "cross" else {}
        inputs = (x, array) if name == "cross" else (x,)
        return jnp.vdot(dy, nnx.merge(graphdef, state)(*inputs, **given).astype(jnp.float32))

    arguments = jax.tree.map(lambda y: y.astype(dtype), (state, x, *arrays))
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2))), arguments


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attentions(name):
    """A bias and its gradient, capped scores in a window, and attention to another text, beside XLA's on the host."""

    def run(dtype, device):
        step, arguments = attention_step(name, dtype, "xla" if device.platform == "cpu" else None)
        return jax.tree.map(np.asarray, step(*jax.device_put(arguments, device)))

    host, device = jax.devices("cpu")[0], jax.devices()[0]
    exact, plain = run(jnp.float32, host), run(jnp.bfloat16, host)
    with coda.strict():
        found = run(jnp.bfloat16, device)
    rough = _errors(plain[1], exact[1])
    assert np.all(_errors(found[1], exact[1]) <= 1.5 * rough + 0.2 * rough.max() + 1e-6)


def _same(a, b):
    """Whether all bits are, but for the embedding's gradient: XLA's scatter adds rows in any order."""
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(a)]
    each = zip(paths, jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(x, y) for path, x, y in each if "embedding" not in path)


def _errors(found, exact):
    each = zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True)
    each = ((a.astype(np.float32), b) for a, b in each)
    return np.array([float(np.linalg.norm(a - b)) / (float(np.linalg.norm(b)) or 1) for a, b in each])
