"""Configurations of model families, and what their layers are: windows, rotary embeddings, factors."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flax_layers as layers
from flax_layers.checkpoints import config_from_hf, config_to_hf
from flax_layers.layer_stack import stack
from flax_layers.models import model_class
from flax_layers.rope_scaling import RotaryScaling, rotary_angles, turned_columns, with_amplitude
from tests.chain_cases import normal

pytestmark = pytest.mark.usefixtures("quick_to_compile")
FULL, SLIDING = "full_attention", "sliding_attention"
LINEAR = layers.LinearRopeScaling(factor=2.0)

SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
PLAIN = {
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "initializer_range": 0.1,
    "rms_norm_eps": 1e-4,
    "rope_theta": 100.0,
    "origin": None,
    "residual_multiplier": 1.0,
}
WINDOWS = {
    "rope_scaling": LINEAR,
    "tie_word_embeddings": True,
    "sliding_window": 3,
    "layer_types": [SLIDING, FULL],
    "no_rope_layers": None,
    "partial_rotary_factor": 1.0,
    "embedding_multiplier": 1.0,
    "attention_multiplier": None,
    "logits_scaling": 1.0,
}
FACTORS = {
    "partial_rotary_factor": 0.5,
    "embedding_multiplier": 2.0,
    "attention_multiplier": 0.5,
    "logits_scaling": 4.0,
}
COHERE = layers.CohereConfig(
    **SIZES,
    **PLAIN,
    **WINDOWS,
    hidden_act="gelu",
    attention_bias=True,
    qk_norm=False,
    attention_out_bias=True,
    logit_scale=0.5,
)
GEMMA = layers.GemmaConfig(
    **SIZES,
    **PLAIN,
    **WINDOWS,
    hidden_act="gelu_pytorch_tanh",
    attention_bias=False,
    qk_norm=True,
    attention_out_bias=False,
    sandwich_norms=True,
    query_pre_attn_scalar=16,
    attn_logit_softcapping=50.0,
    final_logit_softcapping=30.0,
    rope_local_base_freq=10.0,
)
OLMO2 = layers.Olmo2Config(
    **SIZES,
    **PLAIN,
    **FACTORS,
    rope_scaling=None,
    hidden_act="silu",
    attention_bias=False,
    qk_norm=True,
    tie_word_embeddings=False,
    sliding_window=None,
    attention_out_bias=None,
    layer_types=None,
    no_rope_layers=[1, 0],
)
EXPERTS = layers.MoEConfig(
    **SIZES,
    **FACTORS,
    num_experts=2,
    layer_types=[FULL, SLIDING],
    sliding_window=3,
    no_rope_layers=[0, 1],
    residual_multiplier=1.0,
)


def test_configs_give_layers_windows_rotary_and_factors():
    assert [GEMMA.layer_window(i) for i in (0, 1)] == [3, None]
    assert [GEMMA.layer_rotary(i) for i in (0, 1)] == [(10.0, None), (100.0, LINEAR)]
    assert (GEMMA.embedding_factor, GEMMA.score_scale, GEMMA.soft_cap, GEMMA.logits_factor) == (4.0, 0.25, 30.0, 1.0)
    assert [COHERE.layer_window(i) for i in (0, 1)] == [3, None]
    assert [COHERE.layer_rotary(i) for i in (0, 1)] == [(100.0, LINEAR), (None, None)]
    assert (COHERE.logits_factor, COHERE.soft_cap, COHERE.score_scale, COHERE.max_tokens) == (0.5, None, None, 32)
    assert [OLMO2.layer_rotary(i) for i in (0, 1)] == [(100.0, None), (None, None)]
    assert OLMO2.layer_window(0) is None
    assert (OLMO2.embedding_factor, OLMO2.score_scale, OLMO2.logits_factor) == (2.0, 0.5, 0.25)
    assert [EXPERTS.layer_window(i) for i in (0, 1)] == [None, 3]
    assert [EXPERTS.layer_rotary(i) for i in (0, 1)] == [(None, None), (10000.0, None)]
    plain = layers.LlamaConfig(
        num_hidden_layers=2,
        layer_types=None,
        no_rope_layers=None,
        partial_rotary_factor=1.0,
        embedding_multiplier=1.0,
        attention_multiplier=None,
        residual_multiplier=1.0,
        logits_scaling=1.0,
    )
    assert plain.is_plain and not EXPERTS.is_plain
    assert plain.layer_window(0) is None and plain.layer_rotary(1) == (10000.0, None)
    turned = dataclasses.replace(plain, no_rope_layers=[1, 1, 0])
    assert turned == plain and dataclasses.replace(plain, no_rope_layers=[1, 0]).no_rope_layers == (1, 0)


@pytest.mark.parametrize(
    "config, name",
    [
        (GEMMA, "embedding_multiplier"),
        (GEMMA, "residual_multiplier"),
        (COHERE, "logits_scaling"),
        (COHERE, "residual_multiplier"),
        (OLMO2, "residual_multiplier"),
    ],
)
def test_factors_that_a_family_does_not_have(config, name):
    with pytest.raises(ValueError, match=rf"{name}=0\.5; its models have none"):
        dataclasses.replace(config, **{name: 0.5})


def test_a_model_takes_its_own_configuration():
    for model, config in ((layers.Llama, GEMMA), (layers.Gemma, COHERE), (layers.Olmo2, EXPERTS)):
        with pytest.raises(TypeError, match=rf"{model.__name__} takes a .*not a {type(config).__name__}"):
            model(config, rngs=nnx.Rngs(0))

    class Own(layers.GemmaConfig):
        pass

    assert model_class(Own(**sizes_of(GEMMA))) is layers.Gemma


def sizes_of(config):
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}


def test_a_head_of_ones_own_is_capped():
    model = layers.Gemma(GEMMA, rngs=nnx.Rngs(0))
    model.head = nnx.data(lambda x, *, embedding: 100.0 * (x @ embedding.T))
    assert 29.0 < float(jnp.abs(model(jnp.arange(6)[None])).max()) <= 30.0


def test_models_of_configurations():
    tokens = jnp.arange(6)[None]
    models = [
        layers.Cohere(
            COHERE,
            scan_layers=False,
            separate_qkv=True,
            separate_gate_up=True,
            remat="save_qkv",
            remat_layers=1,
            rules=None,
            attention_implementation="xla",
            fp8=None,
            dtype=jnp.float32,
            param_dtype=jnp.float32,
            rngs=nnx.Rngs(0),
        ),
        layers.Gemma(
            GEMMA,
            scan_layers=False,
            separate_qkv=True,
            separate_gate_up=True,
            remat="save_qkv",
            remat_layers=1,
            rules=None,
            attention_implementation="xla",
            fp8=None,
            dtype=jnp.float32,
            param_dtype=jnp.float32,
            rngs=nnx.Rngs(0),
        ),
        layers.Olmo2(
            OLMO2,
            scan_layers=False,
            separate_qkv=True,
            separate_gate_up=True,
            remat="save_qkv",
            remat_layers=1,
            rules=None,
            attention_implementation="xla",
            fp8=None,
            dtype=jnp.float32,
            param_dtype=jnp.float32,
            rngs=nnx.Rngs(0),
        ),
        layers.Llama(EXPERTS, rngs=nnx.Rngs(0)),
    ]
    for model in models:
        assert type(model) is model_class(model.config)
        logits = model(tokens)
        assert logits.shape == (1, 6, 64) and bool(jnp.isfinite(logits).all())
    assert models[1].soft_cap == 30.0 and float(jnp.abs(models[1](tokens)).max()) < 30.0


def test_a_soft_cap_is_of_logits_losses_and_log_probabilities():
    model = layers.Gemma(GEMMA, rngs=nnx.Rngs(0))
    model.norm.scale[...] = model.norm.scale[...] + 200.0  # logits far beyond the cap
    tokens = jax.random.randint(jax.random.key(0), (1, 9), 0, 64)
    logits = model(tokens[:, :-1])
    assert float(jnp.abs(logits).max()) > 25.0
    wanted = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1)[..., 0]
    np.testing.assert_allclose(model.token_logprobs(tokens[:, :-1], tokens[:, 1:]), wanted, atol=1e-4)
    np.testing.assert_allclose(model.loss(tokens[:, :-1], tokens[:, 1:]), -wanted.mean(), rtol=1e-5)
    head = layers.LMHead(16, 64, rngs=nnx.Rngs(0))
    x = normal(0, 5, 16) * 100
    np.testing.assert_allclose(head(x, soft_cap=2.0), 2 * jnp.tanh(head(x) / 2), atol=1e-5)


def test_a_block_of_factors():
    options = {"num_kv_heads": 1, "rngs": nnx.Rngs(0)}
    block = layers.LlamaBlock(16, 24, 2, partial_rotary_factor=0.5, scale=0.3, residual_multiplier=0.25, **options)
    x = normal(1, 1, 5, 16)
    attended = x + 0.25 * block.attention(block.attention_norm(x))
    np.testing.assert_allclose(block(x), attended + 0.25 * block.mlp(block.mlp_norm(attended)), atol=1e-5)
    parts = block.attention_norm, block.attention, block.mlp_norm, block.mlp
    np.testing.assert_allclose(layers.TransformerBlock(*parts, residual_multiplier=0.25)(x), block(x), atol=1e-6)
    moe = layers.MoE(16, 24, 2, 1, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"residual_multiplier=0\.5: a MoE"):
        layers.TransformerBlock(*parts[:3], moe, residual_multiplier=0.5)


def test_frequencies():
    plain = layers.RopeScaling().frequencies(8, 100.0, None)
    np.testing.assert_allclose(LINEAR.frequencies(8, 100.0, None) * 2, 100.0 ** (-np.arange(4) / 4), rtol=1e-6)
    assert plain.shape == (4,)
    dynamic = layers.DynamicRopeScaling(factor=2.0, original_max_position_embeddings=8)
    base = 100.0 * (2 * 16 / 8 - 1) ** (8 / 6)
    np.testing.assert_allclose(dynamic.frequencies(8, 100.0, jnp.int32(16)), base ** (-np.arange(4) / 4), rtol=1e-5)
    np.testing.assert_allclose(dynamic.frequencies(8, 100.0, jnp.int32(5)), 100.0 ** (-np.arange(4) / 4), rtol=1e-6)
    yarn = layers.YarnRopeScaling(
        factor=4.0,
        original_max_position_embeddings=64,
        attention_factor=None,
        beta_fast=8.0,
        beta_slow=1.0,
        mscale=None,
        mscale_all_dim=None,
        truncate=True,
    )
    found = yarn.frequencies(16, 100.0, None)
    fast, slow = 100.0 ** (-np.arange(8) / 8), 100.0 ** (-np.arange(8) / 8) / 4
    np.testing.assert_allclose([found[0], found[-1]], [fast[0], slow[-1]], rtol=1e-6)
    assert ((found <= fast + 1e-7) & (found >= slow - 1e-7)).all()
    assert yarn.amplitude == pytest.approx(0.1 * np.log(4) + 1)
    long = layers.LongRopeScaling(
        short_factor=(1.0, 2.0),
        long_factor=(4.0, 8.0),
        original_max_position_embeddings=16,
        factor=4.0,
        attention_factor=None,
    )
    np.testing.assert_allclose(long.frequencies(4, 100.0, jnp.int32(16)), [1.0, 0.05], rtol=1e-6)
    np.testing.assert_allclose(long.frequencies(4, 100.0, jnp.int32(17)), [0.25, 0.0125], rtol=1e-6)
    assert long.amplitude == pytest.approx((1 + np.log(4) / np.log(16)) ** 0.5)
    with pytest.raises(ValueError, match="2 factors for 4 frequencies"):
        long.frequencies(8, 100.0, None)


def test_parts_of_heads_are_turned():
    cos, sin = rotary_angles(jnp.arange(3), 8, 100.0, partial_rotary_factor=0.5)
    assert turned_columns(8, 0.5) == 4
    np.testing.assert_array_equal(cos[:, 2:], 1.0)
    np.testing.assert_array_equal(sin[:, 2:], 0.0)
    np.testing.assert_allclose(cos[:, :2], rotary_angles(jnp.arange(3), 4, 100.0)[0])
    yarn = layers.YarnRopeScaling(factor=4.0, original_max_position_embeddings=64, attention_factor=2.0)
    q = normal(0, 3, 2, 8)
    same, scale = with_amplitude(q, None, yarn, 1.0)
    assert same is q and scale == pytest.approx(4 / 8**0.5)
    turned, scale = with_amplitude(q, 0.5, yarn, 0.5)
    assert scale == 0.5
    np.testing.assert_allclose(turned / q, np.tile([4.0, 4.0, 1.0, 1.0], 2) * np.ones_like(q), rtol=1e-6)


YARN = layers.YarnRopeScaling(factor=4.0, original_max_position_embeddings=1)
LONG = {"short_factor": (1.0, 2.0), "long_factor": (4.0, 8.0), "factor": 4.0, "original_max_position_embeddings": 16}


def attention(**options):
    return layers.Attention(16, 2, rngs=nnx.Rngs(0), **options)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: layers.LongRopeScaling(**LONG | {"long_factor": (1.0,)}), ValueError, "2 short factors and 1 long"),
        (lambda: layers.LongRopeScaling(**LONG | {"short_factor": ()}), ValueError, r"short_factor=\(\); it must be"),
        (
            lambda: layers.LongRopeScaling(**LONG | {"original_max_position_embeddings": 1}),
            ValueError,
            r"original_max_position_embeddings=1 beside factor=4\.0 .* must be above 1",
        ),
        (
            lambda: attention(rope_scaling=layers.LongRopeScaling(**LONG)),
            ValueError,
            "2 factors for 4 frequencies, those of 8 columns",
        ),
        (lambda: attention(rope_scaling=YARN, rope_theta=1.0), ValueError, r"theta=1\.0 .* must not be 1"),
        (lambda: YARN.frequencies(8, 1.0), ValueError, r"theta=1\.0 .* must not be 1"),
        (
            lambda: attention(rope_scaling={"rope_type": "yarn"}),
            TypeError,
            r"rope_scaling=\{'rope_type': 'yarn'\}; it must be None or one of RopeScaling, Linear",
        ),
        (lambda: attention(rope_theta=-2.0), ValueError, r"rope_theta=-2\.0; it must be a finite number above 0"),
        (lambda: attention(partial_rotary_factor="half"), TypeError, "partial_rotary_factor='half'; it must"),
        (RotaryScaling, TypeError, "base class.*construct one of RopeScaling, LinearRopeScaling, Dynamic"),
        (
            lambda: layers.LlamaConfig(partial_rotary_factor=1.5),
            ValueError,
            r"LlamaConfig: partial_rotary_factor=1\.5; .* above 0 and at most 1",
        ),
        (lambda: dataclasses.replace(GEMMA, partial_rotary_factor=2), ValueError, "GemmaConfig: partial_rotary_f"),
    ],
)
def test_bad_rotary_embeddings_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_original_length_one_is_allowed_without_a_logarithm():
    given = LONG | {"original_max_position_embeddings": 1}
    assert layers.LongRopeScaling(**given | {"attention_factor": 2.0}).amplitude == 2.0
    assert layers.LongRopeScaling(**given | {"factor": 1.0}).amplitude == 1.0
    assert bool(jnp.isfinite(YARN.frequencies(8, 100.0)).all()) and YARN.amplitude > 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0, -1.0, "a", True, jnp.float32(2.0), np.ones(2)])
@pytest.mark.parametrize("make", [layers.Attention, layers.CrossAttention])
@pytest.mark.parametrize("name", ["scale", "soft_cap"])
def test_factors_of_scores_are_finite_numbers_above_0(name, make, value):
    error = ValueError if type(value) in (int, float) else TypeError
    with pytest.raises(error, match=rf"^{name}={re.escape(repr(value))}; it must be a finite number above 0"):
        make(16, 2, **{name: value}, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("value", [float("nan"), 0, "a", True])
@pytest.mark.parametrize("name", ["attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"])
def test_caps_of_a_gemma_are_finite_numbers_above_0(name, value):
    with pytest.raises(ValueError, match=rf"GemmaConfig: {name}={value!r}; it must be positive, a number"):
        dataclasses.replace(GEMMA, **{name: value})


WINDOWS = dataclasses.replace(GEMMA, num_hidden_layers=4, layer_types=[SLIDING, FULL] * 2)


@pytest.mark.parametrize(
    "model, config, message",
    [
        (layers.Gemma, WINDOWS, r"sliding_window is 3 in layers 0, 2, None in layers 1, 3$"),
        (
            layers.Llama,
            layers.LlamaConfig(num_hidden_layers=3, num_attention_heads=4, no_rope_layers=[1, 0, 1]),
            r"rope_theta is 10000\.0 in layers 0, 2, None in layer 1$",
        ),
    ],
)
def test_layers_of_several_kinds_are_not_scanned(model, config, message):
    """It is told before there are parameters: that of these models' embeddings would fill a memory."""
    config = dataclasses.replace(config, vocab_size=10**12)
    with pytest.raises(ValueError, match=rf"^only equal .* scan_layers must be False for others: .*{message}"):
        model(config, scan_layers=True, rngs=nnx.Rngs(0))


def test_layers_that_differ_are_not_stacked():
    def block(width=24, **options):
        return layers.LlamaBlock(16, width, 2, rngs=nnx.Rngs(0), **options)

    with pytest.raises(ValueError, match=r"others: attention\.sliding_window is None in layers 0, 2, 3 in layer 1$"):
        stack([block(), block(sliding_window=3), block()])
    with pytest.raises(ValueError, match=r"mlp\.down\.kernel\.shape is \(24, 16\) in layer 0, \(32, 16\) in layer 1"):
        stack([block(), block(32)])
    experts = layers.TransformerBlock(
        *(getattr(block(), name) for name in ("attention_norm", "attention", "mlp_norm")),
        layers.MoE(16, 24, 2, 1, rngs=nnx.Rngs(0)),
    )
    with pytest.raises(ValueError, match=r"the class is LlamaBlock in layer 0, TransformerBlock in layer 1$"):
        stack([block(), experts])


def test_windows_without_a_size_are_refused():
    with pytest.raises(ValueError, match=r"sliding_window=None beside layer_types=\('sliding_attention',\)"):
        layers.LlamaConfig(num_hidden_layers=1, layer_types=["sliding_attention"])


def test_heads_that_do_not_divide_the_width_are_refused_by_their_names():
    with pytest.raises(ValueError, match="hidden_size=64 must be a multiple of num_attention_heads=5"):
        layers.LlamaConfig(hidden_size=64, num_attention_heads=5)


def test_a_gemma_3_has_no_cap_of_scores():
    """A cap in a config.json is passed over, as transformers does; a model that has one is not written."""
    settings = {"model_type": "gemma3_text", "sliding_window": 8, "layer_types": ["sliding_attention"] * 26}
    for cap in (None, 50.0):
        assert config_from_hf(settings | {"attn_logit_softcapping": cap}).attn_logit_softcapping is None
    options = {"num_hidden_layers": 1, "qk_norm": True, "rope_local_base_freq": 1e4}
    with pytest.raises(ValueError, match=r"attn_logit_softcapping=50\.0 must be None"):
        config_to_hf(layers.GemmaConfig(**options, attn_logit_softcapping=50.0))
