"""Llama's parameters from and to Hugging Face's names and shapes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_layers import GPT2Config, Llama, LlamaConfig
from flax_layers.checkpoints import config_from_hf, config_to_hf, from_hf, to_hf
from flax_layers.checkpoints.hf_names import entries
from flax_layers.layer_stack import stack

CONFIG = LlamaConfig(
    vocab_size=40,
    hidden_size=24,
    intermediate_size=56,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
)
TIED = dataclasses.replace(CONFIG, tie_word_embeddings=True)
TOKENS = jax.random.randint(jax.random.key(0), (2, 11), 0, 40)


def checkpoint(config):
    """Random arrays under the names and in the shapes that transformers' LlamaForCausalLM has."""
    d, f, v, q, kv = 24, 56, 40, 32, 16
    shapes = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,), "lm_head.weight": (v, d)}
    for i in range(config.num_hidden_layers):
        sizes = {"self_attn.q": (q, d), "self_attn.k": (kv, d), "self_attn.v": (kv, d), "self_attn.o": (d, q)}
        sizes |= {"mlp.gate": (f, d), "mlp.up": (f, d), "mlp.down": (d, f)}
        shapes |= {f"model.layers.{i}.{name}_proj.weight": shape for name, shape in sizes.items()}
        shapes |= {f"model.layers.{i}.{name}_layernorm.weight": (d,) for name in ("input", "post_attention")}
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype(np.float32) / 4 for name, shape in shapes.items()}


def reference(arrays, tokens, config):
    """A Llama as transformers computes it, straight from the checkpoint's arrays, in float64 numpy."""
    w = {name: array.astype(np.float64) for name, array in arrays.items()}
    batch, length = tokens.shape
    angle = np.arange(length)[:, None] * 10000.0 ** (-np.arange(0, 8, 2) / 8)
    cos, sin = (np.concatenate([y, y], axis=-1) for y in (np.cos(angle), np.sin(angle)))

    def norm(x, name):
        return w[name] * x / np.sqrt((x * x).mean(-1, keepdims=True) + config.rms_norm_eps)

    def heads(x, name):
        return (x @ w[name].T).reshape(batch, length, -1, 8).swapaxes(1, 2)

    def rotate(y):
        return y * cos + np.concatenate([-y[..., 4:], y[..., :4]], axis=-1) * sin

    x = w["model.embed_tokens.weight"][tokens]
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}."
        y = norm(x, layer + "input_layernorm.weight")
        q, k, v = (heads(y, f"{layer}self_attn.{name}_proj.weight") for name in "qkv")
        q, k, v = rotate(q), rotate(k).repeat(2, axis=1), v.repeat(2, axis=1)
        scores = np.where(np.tri(length, dtype=bool), q @ k.swapaxes(-1, -2) / 8**0.5, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        y = (weights / weights.sum(-1, keepdims=True) @ v).swapaxes(1, 2).reshape(batch, length, -1)
        x = x + y @ w[f"{layer}self_attn.o_proj.weight"].T
        y = norm(x, layer + "post_attention_layernorm.weight")
        gate, up = (y @ w[f"{layer}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"{layer}mlp.down_proj.weight"].T
    return norm(x, "model.norm.weight") @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T


@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["untied", "tied"])
def test_logits_of_a_checkpoint(config):
    arrays = checkpoint(config)
    want = reference(arrays, np.asarray(TOKENS), config)
    got = nnx.jit(lambda model: model(TOKENS))(from_hf(arrays, config))
    np.testing.assert_allclose(got, want, atol=2e-5 * np.abs(want).max())


@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["untied", "tied"])
def test_there_and_back(config):
    arrays = checkpoint(config)
    back = to_hf(from_hf(arrays, config), config)
    assert back.keys() == arrays.keys()
    for name, array in arrays.items():
        assert back[name].flags.c_contiguous
        np.testing.assert_array_equal(back[name], array)


@pytest.mark.parametrize(
    "config",
    [
        dataclasses.replace(TIED, qk_norm=True, attention_bias=True),
        dataclasses.replace(TIED, attention_bias=True, attention_out_bias=False),
        GPT2Config(vocab_size=40, n_positions=16, n_embd=24, n_layer=2, n_head=4, n_inner=56),
    ],
    ids=["qwen3_bias", "qwen2", "gpt2"],
)
def test_other_models_there_and_back(config):
    rng = np.random.default_rng(0)
    arrays = {p.name: rng.standard_normal(p.shape).astype(np.float32) for e in entries(config) for p in e.parts}
    back = to_hf(from_hf(arrays, config), config)
    assert back.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(back[name], array, err_msg=name)


def test_stacked_layers():
    """They are loaded and written as they are: no layer of its own is made."""
    arrays = checkpoint(CONFIG)
    model = from_hf(arrays, CONFIG, scan_layers=True, remat="full")
    back = to_hf(model, CONFIG)
    assert model.remat == "full" and back.keys() == arrays.keys()
    for name, array in back.items():
        np.testing.assert_array_equal(array, arrays[name], err_msg=name)
    want = stack(list(from_hf(arrays, CONFIG).layers))
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model.layers), nnx.state(want))
    logits = nnx.jit(lambda model: model(TOKENS))
    np.testing.assert_allclose(logits(model), logits(from_hf(arrays, CONFIG)), rtol=1e-5, atol=1e-5)


def test_dtypes_and_gradients():
    model = from_hf({n: jnp.asarray(a, jnp.bfloat16) for n, a in checkpoint(CONFIG).items()}, CONFIG, dtype="bfloat16")
    assert {x.dtype for x in jax.tree.leaves(nnx.state(model, nnx.Param))} == {jnp.dtype(jnp.float32)}
    assert nnx.eval_shape(lambda: model(TOKENS)).dtype == jnp.bfloat16
    gradient = nnx.jit(nnx.grad(lambda model: jnp.sum(model(TOKENS).astype(jnp.float32) ** 2)))(model)
    shapes = {name: array.shape for name, array in checkpoint(CONFIG).items()}
    assert {name: array.shape for name, array in to_hf(gradient, CONFIG).items()} == shapes


def test_a_fresh_model_has_the_checkpoint_s_names():
    assert to_hf(nnx.jit(lambda: Llama(CONFIG, rngs=nnx.Rngs(0)))(), CONFIG).keys() == checkpoint(CONFIG).keys()


def test_errors_name_the_array():
    arrays = checkpoint(CONFIG)
    ignored = {"model.layers.0.self_attn.rotary_emb.inv_freq": 10000.0 ** (-np.arange(0, 8, 2) / 8)}
    from_hf(arrays | ignored, CONFIG)
    with pytest.raises(ValueError, match=r"lacks lm_head\.weight"):
        from_hf({n: a for n, a in arrays.items() if n != "lm_head.weight"}, CONFIG)
    with pytest.raises(ValueError, match=r"no model\.layers\.0\.self_attn\.q_norm\.weight; .*QK-norms"):
        from_hf(arrays | {"model.layers.0.self_attn.q_norm.weight": np.ones(8)}, CONFIG)
    with pytest.raises(ValueError, match=r"down_proj\.weight has shape \(24, 55\); the config makes it \(24, 56\)"):
        from_hf(arrays | {"model.layers.1.mlp.down_proj.weight": np.ones((24, 55))}, CONFIG)


def test_a_window_that_hugging_face_does_not_apply():
    """Qwen3's default is a width without use_sliding_window, and a Llama has none."""
    for model_type in ("qwen3", "llama"):
        settings = {"model_type": model_type, "use_sliding_window": False, "sliding_window": 4096}
        settings["partial_rotary_factor"] = 1.0  # as much as none
        assert config_from_hf(settings).sliding_window is None


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: config_to_hf(dataclasses.replace(CONFIG, sliding_window=4, attention_out_bias=True)),
            "attention_out_bias=True, .* sliding_window=4 has no place",
        ),
        (
            lambda: config_to_hf(dataclasses.replace(CONFIG, attention_out_bias=True)),
            "attention_out_bias=True, .* has no",
        ),
        (lambda: config_to_hf(dataclasses.replace(CONFIG, rope_theta=None)), "rope_theta=None, .* has no place"),
        (
            lambda: config_from_hf({"model_type": "llama", "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}),
            "rope_type 'llama3' lacks low_freq_factor, high_freq_factor",
        ),
        (
            lambda: config_from_hf({"model_type": "llama", "partial_rotary_factor": 0.5}),
            "partial_rotary_factor=0.5 is not supported: heads are turned whole",
        ),
        (
            lambda: config_from_hf({"model_type": "qwen3", "rope_parameters": {"partial_rotary_factor": 0.25}}),
            "partial_rotary_factor=0.25 is not supported",
        ),
        (lambda: config_from_hf({"model_type": "llama", "use_sliding_window": True}), "use_sliding_window=True is not"),
    ],
)
def test_settings_that_one_side_does_not_have(call, message):
    with pytest.raises(ValueError, match=message):
        call()
