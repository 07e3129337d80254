"""Model families against plain jnp of the same parameters, and what their configurations say and refuse."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import coda_jax as coda
import flax_layers as layers
from benchmarks import plain_families
from flax_layers.models import model_class
from tests.gemm_cases import assert_close

pytestmark = pytest.mark.usefixtures("quick_to_compile")
FULL, SLIDING = "full_attention", "sliding_attention"
TOKENS = jax.random.randint(jax.random.key(0), (2, 13), 0, 61)
YARN = layers.YarnRopeScaling(factor=4.0, original_max_position_embeddings=4)
LONG = layers.LongRopeScaling(
    short_factor=[1.0, 1.1], long_factor=[1.5, 2.0], original_max_position_embeddings=8, factor=4.0
)


def sizes(**options):
    common = {"vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
    common |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 32}
    return common | {"initializer_range": 0.3, "rope_theta": 100.0} | options


def gemma(**options):
    return layers.GemmaConfig(
        **sizes(query_pre_attn_scalar=11.0, layer_types=[SLIDING, FULL], sliding_window=5) | options
    )


CONFIGS = {
    "gemma": gemma(sandwich_norms=False, query_pre_attn_scalar=None, layer_types=None, sliding_window=None),
    "gemma2": gemma(attn_logit_softcapping=2.0, final_logit_softcapping=3.0, attention_bias=True),
    "gemma3": gemma(qk_norm=True, rope_local_base_freq=10.0, rope_scaling=layers.LinearRopeScaling(factor=8.0)),
    "olmo2": layers.Olmo2Config(**sizes(rms_norm_eps=1e-3)),
    "cohere": layers.CohereConfig(**sizes(logit_scale=0.3)),
    "cohere2": layers.CohereConfig(**sizes(layer_types=[SLIDING, FULL], sliding_window=5)),
    "granite": layers.LlamaConfig(
        **sizes(embedding_multiplier=3.0, attention_multiplier=0.1, residual_multiplier=0.4, logits_scaling=5.0)
    ),
    "smollm3": layers.LlamaConfig(
        **sizes(no_rope_layers=[1, 0], layer_types=(FULL, SLIDING), sliding_window=5, tie_word_embeddings=True)
    ),
    "phi3": layers.LlamaConfig(**sizes(partial_rotary_factor=0.5, rope_scaling=LONG, sliding_window=5)),
    "yarn": layers.LlamaConfig(**sizes(rope_scaling=YARN)),
    "dynamic": layers.LlamaConfig(
        **sizes(rope_scaling=layers.DynamicRopeScaling(factor=2.0, original_max_position_embeddings=8))
    ),
}


def model_of(name, **options):
    """A model whose scales and biases are no ones and zeros."""
    model = model_class(CONFIGS[name])(CONFIGS[name], rngs=nnx.Rngs(0), **options)
    leaves, tree = jax.tree.flatten(nnx.state(model, nnx.Param))
    moved = (x + 0.3 * jax.random.normal(jax.random.key(i), x.shape) * (x.ndim == 1) for i, x in enumerate(leaves))
    nnx.update(model, jax.tree.unflatten(tree, list(moved)))
    return model


def with_gradient(model):
    graphdef, state = nnx.split(model)
    return jax.jit(jax.value_and_grad(lambda state: nnx.merge(graphdef, state).loss(TOKENS[:, :-1], TOKENS[:, 1:])))(
        state
    )


@pytest.mark.smoke
@pytest.mark.parametrize("name", CONFIGS)
def test_loss_and_gradients_are_those_of_plain_jax(name):
    model = model_of(name)
    value, gradient = with_gradient(model)

    def plain(params):
        return plain_families.loss(params, CONFIGS[name], TOKENS[:, :-1], TOKENS[:, 1:], jnp.float32)

    wanted, gradients = jax.jit(jax.value_and_grad(plain))(plain_families.parameters(model))
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    got = nnx.to_pure_dict(gradient)
    largest = max(np.abs(x).max() for x in jax.tree.leaves(gradients))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=max(2e-5 * np.abs(b).max(), 1e-7 * largest)), got, gradients
    )


@pytest.mark.parametrize("name", ["gemma2", "olmo2", "cohere2", "phi3"])
def test_in_other_forms_the_gradients_are_the_same(name):
    """Under remat, and with query, key and value, gate and up apart."""
    wanted = with_gradient(model_of(name))
    for options in ({"remat": "full"}, {"remat": "save_attention", "remat_layers": 1}):
        assert_close(with_gradient(model_of(name, **options)), wanted, 1e-5)
    apart = model_of(name, separate_qkv=True, separate_gate_up=True)
    value, gradient = with_gradient(apart)
    assert np.isfinite(value) and all(np.isfinite(x).all() for x in jax.tree.leaves(gradient))


def test_layers_of_several_kinds_are_not_scanned():
    with pytest.raises(ValueError, match="only equal layers can be scanned"):
        layers.Gemma(CONFIGS["gemma2"], scan_layers=True, rngs=nnx.Rngs(0))
    layers.Olmo2(CONFIGS["olmo2"], scan_layers=True, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_is_fused(name):
    """Every product but attention's is a kernel."""
    model = model_of(name, dtype=jnp.bfloat16)
    graphdef, state = nnx.split(model)

    def loss(state, tokens):
        return nnx.merge(graphdef, state).loss(tokens[:, :-1], tokens[:, 1:])

    found = coda.explain(jax.grad(loss), state, TOKENS, platform="cuda", device="H100")
    # Of the head there are the logits of few tokens, in float32; XLA computes attention whose scores are capped.
    others = [one for one in found.other_products if not one.a.startswith("float32")]
    assert not others or getattr(CONFIGS[name], "attn_logit_softcapping", None) is not None, others
    assert sum(found.products.values()) >= 12 * 2 + 3


def test_bad_configurations_are_refused():
    for options, message in (
        ({"layer_types": ["local", FULL]}, "layer_types=.* it must be 'full_attention' or 'sliding_attention'"),
        ({"layer_types": [FULL]}, "for each of 2 layers"),
        ({"residual_multiplier": 0.0}, r"residual_multiplier=0\.0"),
        ({"rope_scaling": {"factor": 2.0}}, "it must be a RopeScaling"),
    ):
        with pytest.raises(ValueError, match=message):
            layers.LlamaConfig(**sizes(**options))
    with pytest.raises(ValueError, match="final_logit_softcapping=-1"):
        gemma(final_logit_softcapping=-1)
    with pytest.raises(ValueError, match="logit_scale=0"):
        layers.CohereConfig(**sizes(logit_scale=0))
    with pytest.raises(ValueError, match=r"factor=0\.5; it must be 1 or more"):
        layers.DynamicRopeScaling(factor=0.5, original_max_position_embeddings=8)
    with pytest.raises(ValueError, match=r"beta_fast=1\.0; it must be above"):
        dataclasses.replace(YARN, beta_fast=1.0, beta_slow=1.0)
    with pytest.raises(ValueError, match="2 short factors and 1 long"):
        dataclasses.replace(LONG, long_factor=(1.0,))
    with pytest.raises(ValueError, match="it must turn pairs"):
        layers.Attention(24, 4, head_dim=8, partial_rotary_factor=0.4, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="qk_norm='all' must be"):
        layers.Attention(24, 4, qk_norm="all", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="soft_cap=0; it must be a finite number above 0"):
        layers.Attention(24, 4, soft_cap=0, rngs=nnx.Rngs(0))


def test_a_text_longer_than_dynamic_scaling_stretches():
    model = model_of("dynamic")
    assert CONFIGS["dynamic"].max_tokens == 64
    with pytest.raises(ValueError, match=r"65 tokens exceed config\.max_position_embeddings=64"):
        model(jnp.zeros((1, 65), jnp.int32))
