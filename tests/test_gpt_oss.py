"""gpt-oss: sinks, experts with biases, a gate of both halves; meshes, decoding, checkpoints, without transformers."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import coda_jax as coda
import flax_layers as layers
from flax_layers import sharding
from flax_layers.activation import ClippedSwiGLU
from flax_layers.checkpoints import config_from_hf, config_to_hf, from_hf, load_hf_folder, save_hf_folder, to_hf
from flax_layers.models import model_class

CONFIG = layers.GptOssConfig(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=8,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    rope_scaling=layers.YarnRopeScaling(factor=4.0, original_max_position_embeddings=16, truncate=False),
    sliding_window=4,
    num_experts=8,
    num_experts_per_tok=2,
    router_aux_loss_coef=0.1,
    initializer_range=0.3,
    swiglu_limit=0.3,
)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 64, (8, 8)))


def moved(model):
    """The model with sinks and biases that are no zeros."""
    leaves, tree = jax.tree.flatten(nnx.state(model, nnx.Param))
    random = (0.5 * jax.random.normal(jax.random.key(i), x.shape, x.dtype) for i, x in enumerate(leaves))
    zeros = (jnp.where(jnp.all(x == 0), y, x) for x, y in zip(leaves, random, strict=True))
    nnx.update(model, jax.tree.unflatten(tree, list(zeros)))
    return model


@functools.cache
def gpt_oss(config=CONFIG):
    return moved(layers.GptOss(config, rngs=nnx.Rngs(0)))


def textbook(q, k, v, sinks, window):
    """Softmax over keys and a sink, whose part is dropped; (B, T, H, Dh)."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
    distance = jnp.arange(q.shape[1])[:, None] - jnp.arange(k.shape[1])
    seen = (distance >= 0) & (distance < (window or q.shape[1]))
    scores = jnp.where(seen, scores, -jnp.inf)
    with_sink = jnp.concatenate([scores, jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1))], axis=-1)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(with_sink, axis=-1)[..., :-1], v)


@pytest.mark.smoke
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("implementation", [None, "xla"])
def test_attention_with_sinks(window, implementation):
    """Values and gradients of a layer, beside the textbook's softmax."""
    options = {"rope_theta": None, "sliding_window": window, "use_bias": True, "num_kv_heads": 2}
    layer = layers.Attention(16, 4, use_sinks=True, implementation=implementation, **options, rngs=nnx.Rngs(0))
    layer.sinks[...] = jnp.array([0.5, -1.0, 2.0, 0.1])
    x = jax.random.normal(jax.random.key(1), (2, 7, 16))

    def plain(state, x):
        m = nnx.merge(nnx.graphdef(layer), state)
        columns = jnp.split(x @ m.qkv.kernel[...] + m.qkv.bias[...], [16, 24], axis=-1)
        q, k, v = (y.reshape(2, 7, -1, 4) for y in columns)
        y = textbook(q, k, v, m.sinks[...], window).reshape(2, 7, 16)
        return y @ m.out.kernel[...] + m.out.bias[...]

    def ours(state, x):
        return nnx.merge(nnx.graphdef(layer), state)(x)

    state = nnx.state(layer)
    (got, back), (want, expected) = (jax.vjp(jax.jit(f), state, x) for f in (ours, plain))
    np.testing.assert_allclose(got, want, atol=2e-6)
    for one, other in zip(jax.tree.leaves(back(got)), jax.tree.leaves(expected(got)), strict=True):
        np.testing.assert_allclose(one, other, atol=5e-6 * max(1, np.abs(other).max()))


def test_a_function_gets_the_sinks():
    def own(q, k, v, *, mask, is_causal, local_window_size, sinks):
        assert mask is None and is_causal and local_window_size == (2, 0) and sinks.shape == (2,)
        return textbook(q, k, v, sinks, 3).astype(q.dtype)

    found = [
        layers.Attention(8, 2, sliding_window=3, use_sinks=True, implementation=f, rngs=nnx.Rngs(0))(
            jnp.linspace(-1, 1, 40).reshape(1, 5, 8)
        )
        for f in (own, None)
    ]
    np.testing.assert_allclose(*found, atol=1e-6)


@pytest.mark.parametrize("options", [{"soft_cap": 5.0}, {"implementation": "cudnn"}])
def test_sinks_refuse_soft_caps_and_cudnn(options):
    with pytest.raises(ValueError, match=r"sinks beside soft_cap=.*implementation=.*must be no soft cap"):
        layers.Attention(8, 2, use_sinks=True, **options, rngs=nnx.Rngs(0))


def test_decoding_is_the_forward_pass():
    """Token by token over a cache, by sinks and windows; several tokens at once too."""
    model, tokens = gpt_oss(), TOKENS[:2]
    want = np.asarray(model(tokens))
    logits, cache = model.decode(tokens[:, :3], model.init_cache(2, 8))
    np.testing.assert_allclose(logits, want[:, 2], atol=2e-5 * np.abs(want).max())
    for last in (4, 5, 8):
        logits, cache = model.decode(tokens[:, cache[0].length[0] : last], cache)
        np.testing.assert_allclose(logits, want[:, last - 1], atol=2e-5 * np.abs(want).max())


def test_generation_is_the_rollout_by_whole_forward_passes():
    model, tokens = gpt_oss(), TOKENS[:2, :4]
    found = layers.generate(model, tokens, max_new_tokens=5).tokens
    for _ in range(5):
        tokens = jnp.concatenate([tokens, jnp.argmax(model(tokens)[:, -1:], axis=-1)], axis=1)
    np.testing.assert_array_equal(found, tokens[:, 4:])


def test_a_mixture_is_a_loop_over_tokens():
    """The router's bias changes choice and weights; experts have biases and a gate of both halves."""
    gate = coda.gated(ClippedSwiGLU(limit=0.3), of_both=True)
    options = {"activation": gate, "kernel_init": nnx.initializers.normal(0.3)}
    layer = moved(layers.MoE(16, 8, 8, 2, use_logit_bias=True, use_bias=True, **options, rngs=nnx.Rngs(0)))
    x = jax.random.normal(jax.random.key(3), (6, 16))
    y, router, experts = layer(x), layer.router, layer.experts
    logits = x @ router.kernel[...] + router.logit_bias[...]
    assert (jnp.argmax(logits, axis=1) != jnp.argmax(x @ router.kernel[...], axis=1)).any()
    for t in range(6):
        chosen = np.argsort(-np.asarray(logits[t]))[:2]
        total = jnp.zeros(16)
        for weight, e in zip(jax.nn.softmax(logits[t, chosen]), chosen, strict=True):
            gate, up = jnp.einsum("d,dhf->hf", x[t], experts.gate_up[e]) + experts.gate_up_bias[e]
            gate, up = jnp.minimum(gate, 0.3), jnp.clip(up, -0.3, 0.3)
            hidden = (up + 1) * gate / (1 + jnp.exp(-1.702 * gate))
            total += weight * (hidden @ experts.down[e] + experts.down_bias[e])
        np.testing.assert_allclose(y[t], total, atol=1e-5)


PLANS = {
    "expert": (sharding.EXPERT, {"expert": 8}),
    "expert and fsdp": (sharding.EXPERT, {"fsdp": 2, "expert": 4}),
    "expert, fsdp and tensor": (sharding.EXPERT, {"fsdp": 2, "expert": 2, "tensor": 2}),
    "fsdp and tensor": (sharding.FSDP_TENSOR, {"fsdp": 4, "tensor": 2}),
}


def step(model):
    return nnx.jit(nnx.value_and_grad(lambda model: model.loss(TOKENS, jnp.roll(TOKENS, -1, axis=-1))))(model)


@functools.cache
def on_one_device():
    value, gradient = step(gpt_oss())
    return value, nnx.to_pure_dict(gradient)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize(
    "plan", [name if name.endswith("and tensor") else pytest.param(name, marks=pytest.mark.slow) for name in PLANS]
)
def test_a_step_on_eight_devices(plan, kind):
    """Biases and sinks too: the second bias is added once where devices share the hidden features."""
    rules, sizes = PLANS[plan]
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes))
    options = {"separate_qkv": "tensor" in sizes}
    with jax.set_mesh(mesh):
        model = sharding.create(lambda: moved(layers.GptOss(CONFIG, rules=rules, **options, rngs=nnx.Rngs(0))))
        value, gradient = step(model)
    if options["separate_qkv"]:
        want, of_one = step(moved(layers.GptOss(CONFIG, **options, rngs=nnx.Rngs(0))))
        of_one = nnx.to_pure_dict(of_one)
    else:
        want, of_one = on_one_device()
    np.testing.assert_allclose(value, want, rtol=1e-5)
    leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(gradient))
    for (path, got), wanted in zip(leaves, jax.tree.leaves(of_one), strict=True):
        np.testing.assert_allclose(got, wanted, atol=3e-5 * np.abs(wanted).max(), err_msg=str(path))


def test_names_of_parameters():
    mesh = jax.make_mesh((2, 2, 2), ("fsdp", "tensor", "expert"), axis_types=(AxisType.Auto,) * 3)
    model = nnx.eval_shape(lambda: layers.GptOss(CONFIG, rngs=nnx.Rngs(0)))
    layer = nnx.to_pure_dict(sharding.parameter_specs(model, sharding.EXPERT, mesh=mesh))["layers"][0]
    assert layer["mlp"]["experts"]["gate_up_bias"] == P("expert", None, "tensor")
    assert layer["mlp"]["experts"]["down_bias"] == P("expert", "fsdp")
    assert layer["mlp"]["router"]["logit_bias"] == P(None)
    assert layer["attention"]["sinks"] == P("tensor")
    names = {path[-1]: x.axis_names for path, x in nnx.to_flat_state(nnx.state(model.layers[0], nnx.Param))}
    assert names["gate_up_bias"] == ("expert", None, "mlp") and names["down_bias"] == ("expert", "embed")
    assert names["sinks"] == ("heads",) and names["logit_bias"] == (None,)


def test_a_step_is_fused():
    """Every product is a kernel but the router's: of a layer four dense ones and eight of experts at least."""
    model = layers.GptOss(dataclasses.replace(CONFIG, head_dim=16), dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(model)

    def loss(state, tokens):
        return nnx.merge(graphdef, state).loss(tokens[:, :-1], tokens[:, 1:])

    found = coda.explain(jax.grad(loss), state, TOKENS, platform="cuda", device="H100")
    # Of the head there are the logits of few tokens, in float32.
    others = [x for x in found.other_products if not x.a.startswith("float32") and "router" not in x.source]
    assert not others, others
    assert sum(found.products.values()) >= (4 + 8) * 2


def test_a_checkpoint_has_the_columns_of_gate_and_up_in_turn(tmp_path):
    model = gpt_oss()
    arrays = to_hf(model, CONFIG)
    experts = model.layers[1].mlp.experts
    prefix = "model.layers.1.mlp.experts"
    for name, (array, shape) in {
        "gate_up_proj": (experts.gate_up, (8, 16, 16)),
        "gate_up_proj_bias": (experts.gate_up_bias, (8, 16)),
    }.items():
        found = arrays[f"{prefix}.{name}"]
        assert found.shape == shape
        np.testing.assert_array_equal(found[..., ::2], array[..., 0, :])
        np.testing.assert_array_equal(found[..., 1::2], array[..., 1, :])
    np.testing.assert_array_equal(arrays[f"{prefix}.down_proj"], experts.down[...])
    np.testing.assert_array_equal(arrays["model.layers.1.mlp.router.bias"], model.layers[1].mlp.router.logit_bias[...])
    np.testing.assert_array_equal(arrays["model.layers.0.self_attn.sinks"], model.layers[0].attention.sinks[...])
    save_hf_folder(model, tmp_path / "model")
    for again in (from_hf(arrays, CONFIG), load_hf_folder(tmp_path / "model")):
        assert type(again) is layers.GptOss and again.config == CONFIG
        jax.tree.map(np.testing.assert_array_equal, nnx.state(again), nnx.state(model))


def test_shards_of_a_checkpoint():
    """Each device reads its own experts, columns and heads."""
    model = gpt_oss()
    mesh = jax.make_mesh((2, 2, 2), ("fsdp", "tensor", "expert"), axis_types=(AxisType.Auto,) * 3)
    abstract = nnx.eval_shape(lambda: layers.GptOss(CONFIG, rngs=nnx.Rngs(0)))
    shardings = sharding.parameter_shardings(nnx.state(abstract), mesh, sharding.EXPERT)
    again = from_hf(to_hf(model, CONFIG), CONFIG, shardings=shardings)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(again), nnx.state(model))


def test_every_field_and_option():
    """A configuration that says all fields, and a model with all options: its first loss and gradients are finite."""
    config = layers.GptOssConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        initializer_range=0.3,
        rms_norm_eps=1e-4,
        rope_theta=100.0,
        rope_scaling=None,
        hidden_act="silu",
        attention_bias=True,
        qk_norm=True,
        tie_word_embeddings=True,
        sliding_window=4,
        origin=None,
        attention_out_bias=False,
        layer_types=["sliding_attention"] * 2,
        no_rope_layers=None,
        partial_rotary_factor=0.5,
        embedding_multiplier=2.0,
        attention_multiplier=0.5,
        residual_multiplier=1.0,
        logits_scaling=2.0,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        norm_topk_prob=False,
        router_aux_loss_coef=0.1,
        router_z_loss_coef=0.1,
        decoder_sparse_step=1,
        mlp_only_layers=(),
        scoring_func="sigmoid",
        routed_scaling_factor=1.5,
        n_group=2,
        topk_group=1,
        use_balance_bias=True,
        shared_expert_intermediate_size=None,
        shared_expert_gate=False,
        capacity_factor=None,
        swiglu_limit=0.5,
        swiglu_alpha=1.3,
    )
    model = layers.GptOss(
        config,
        scan_layers=True,
        separate_qkv=True,
        separate_gate_up=True,
        remat="save_qkv",
        remat_layers=None,
        rules=None,
        attention_implementation="xla",
        fp8=None,
        dtype=jnp.bfloat16,
        param_dtype=jnp.float32,
        rngs=nnx.Rngs(0),
    )
    assert model.layers.attention.sinks.shape == (2, 4) and model.layers.mlp.experts.down_bias.shape == (2, 4, 16)
    loss, gradient = nnx.value_and_grad(lambda model: model.loss(TOKENS[:, :-1], TOKENS[:, 1:]))(moved(model))
    assert np.isfinite(loss) and all(np.isfinite(x).all() and x.any() for x in jax.tree.leaves(gradient))


RELEASED = {  # as the config.json of gpt-oss-20b, but for its sizes
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 201088,
}


def test_configurations():
    config = config_from_hf(RELEASED)
    assert config == layers.GptOssConfig.gpt_oss_20b() and model_class(config) is layers.GptOss
    assert [config.layer_window(i) for i in (0, 1, 22, 23)] == [128, None, 128, None]
    for one in (config, CONFIG, dataclasses.replace(CONFIG, rope_scaling=None, attention_bias=False)):
        written = json.loads(json.dumps(config_to_hf(one)))
        assert written["model_type"] == "gpt_oss" and config_from_hf(written) == one
    # transformers' defaults stand for what a file does not say
    bare = {"model_type": "gpt_oss", "num_hidden_layers": 36}
    assert config_from_hf(bare) == layers.GptOssConfig(router_aux_loss_coef=0.001)
    fewer = dataclasses.replace(config, num_experts_per_tok=2)
    assert config_to_hf(fewer)["experts_per_token"] == 2
    with pytest.raises(ValueError, match=r"experts_per_token=2 is not supported: num_experts_per_tok is 4"):
        config_from_hf(RELEASED | {"experts_per_token": 2})


@pytest.mark.parametrize(
    "billions, config",
    [(20.9, layers.GptOssConfig.gpt_oss_20b()), (116.8, layers.GptOssConfig.gpt_oss_120b())],
    ids=["20b", "120b"],
)
def test_numbers_of_parameters(billions, config):
    """The sizes are those that OpenAI states."""
    model = nnx.eval_shape(lambda: layers.GptOss(config, rngs=nnx.Rngs(0)))
    count = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert round(count / 1e9, 1) == billions


@pytest.mark.parametrize(
    "change, message",
    [
        ({"hidden_act": "gelu"}, r"hidden_act='gelu'; its experts' gate is that of swiglu_limit"),
        ({"swiglu_limit": 0.0}, r"swiglu_limit=0\.0; it must be positive"),
        ({"swiglu_alpha": None}, "swiglu_alpha=None; it must be positive"),
        ({"mlp_only_layers": (1,)}, r"mlp_only_layers=\(1,\), .*all its layers have experts"),
        ({"residual_multiplier": 0.5}, r"residual_multiplier=0\.5; its models have none"),
    ],
)
def test_bad_configurations_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)


@pytest.mark.parametrize("change", [{"use_balance_bias": True}, {"norm_topk_prob": False}, {"qk_norm": True}])
def test_fields_without_a_place_in_config_json_are_refused(change):
    (name,) = change
    with pytest.raises(ValueError, match=rf"GptOssConfig has no place in a config.json of gpt_oss.*{name}="):
        config_to_hf(dataclasses.replace(CONFIG, **change))


def test_blocks_of_four_bits_are_refused_with_the_remedy():
    quantised = RELEASED | {"quantization_config": {"quant_method": "mxfp4"}}
    remedy = r"Mxfp4Config\(dequantize=True\).*save_pretrained\(folder\)"
    with pytest.raises(ValueError, match=f"quantization_config says that experts are in MXFP4.*{remedy}"):
        config_from_hf(quantised)
    arrays = to_hf(gpt_oss(), CONFIG)
    prefix = "model.layers.0.mlp.experts"
    del arrays[f"{prefix}.gate_up_proj"]
    arrays[f"{prefix}.gate_up_proj_blocks"] = np.zeros((8, 16, 1, 8), np.uint8)
    with pytest.raises(ValueError, match=f"gate_up_proj_blocks is of experts in MXFP4.*{remedy}"):
        from_hf(arrays, CONFIG)


def test_a_gate_of_both_is_for_experts():
    gate = coda.gated(ClippedSwiGLU(), of_both=True)
    with pytest.raises(TypeError, match=r"GatedMLP: activation=gated.*must be a function of the gate"):
        layers.GatedMLP(8, 8, activation=gate, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="GatedMLP: activation=gated"):
        layers.MoE(8, 8, 4, 2, activation=gate, shared_features=8, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"Llama takes a LlamaConfig, not a GptOssConfig"):
        layers.Llama(CONFIG, rngs=nnx.Rngs(0))
