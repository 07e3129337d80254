"""Mixtral, Qwen2-MoE, Qwen3-MoE and gpt-oss against transformers: logits, loss, auxiliary loss, gradients, files."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flax_layers as layers
from flax_layers import moe
from flax_layers.checkpoints import config_from_hf, config_to_hf, from_hf, load_hf_folder, save_hf_folder, to_hf
from flax_layers.checkpoints.hf_experts import as_in_files

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 72,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "router_aux_loss_coef": 0.05,
    "output_router_logits": True,
}
QWEN = {**SIZES, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
GPT_OSS = {**SIZES, "num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 16, "sliding_window": 5}
GPT_OSS |= {"swiglu_limit": 0.5, "swiglu_alpha": 1.4}  # a limit that many elements reach
CASES = {
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=5, num_experts_per_tok=2),
    "mixtral_window": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4, head_dim=16, sliding_window=5),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**QWEN, norm_topk_prob=True, head_dim=16),
    "qwen3_moe_some_dense": lambda: transformers.Qwen3MoeConfig(
        **{**QWEN, "num_hidden_layers": 4}, decoder_sparse_step=2, mlp_only_layers=[3], attention_bias=True
    ),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(**QWEN, shared_expert_intermediate_size=56),
    "gpt_oss": lambda: transformers.GptOssConfig(**GPT_OSS),
    "gpt_oss_other": lambda: transformers.GptOssConfig(
        **GPT_OSS | {"layer_types": ["full_attention", "sliding_attention"], "attention_bias": False},
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
    ),
}
TOKENS = np.random.default_rng(0).integers(0, 72, (2, 16))
KEPT = np.arange(16) < np.array([[16], [11]])  # the second row ends in padding


def theirs(case):
    """A random model of transformers, biases and scales random too."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CASES[case](), attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn(parameter.shape)
            if "mlp.gate" in name or "experts" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape))
    return model


def ours(model, **options):
    arrays = {name: x.detach().numpy() for name, x in model.state_dict().items()}
    return from_hf(arrays, config_from_hf(model.config.to_dict()), **options)


def in_files(arrays, config):
    """Arrays of their model in memory by the names of files."""
    everything = as_in_files(arrays, config)
    return {name: x[tuple(slice(0, n) for n in x.shape)] for name, x in everything.items()}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_logits_losses_and_gradients(case, padded):
    reference = theirs(case)
    tokens = torch.from_numpy(TOKENS)
    labels = np.where(KEPT, TOKENS, -100) if padded else TOKENS
    seen = {"attention_mask": torch.from_numpy(KEPT.astype(np.int64))} if padded else {}
    out = reference(tokens, labels=torch.from_numpy(labels), **seen)
    out.loss.backward()
    gradients = {name: x.grad.numpy() for name, x in reference.named_parameters()}

    model = ours(reference)
    graphdef, state = nnx.split(model)
    following = jnp.asarray(np.concatenate([labels[:, 1:], np.full((2, 1), -100)], axis=1))

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def loss_and_gradient(state):
        def loss(state):
            module = nnx.merge(graphdef, state)
            mask = jnp.asarray(KEPT) if padded else None
            with_padding = module.loss(jnp.asarray(TOKENS), following, token_mask=mask)
            return with_padding, module(jnp.asarray(TOKENS))

        return jax.value_and_grad(loss, has_aux=True)(state)

    (loss, logits), gradient = loss_and_gradient(state)
    np.testing.assert_allclose(loss, out.loss.item(), rtol=1e-5)
    assert out.aux_loss.item() > 1
    want = out.logits.detach().numpy()
    kept = KEPT if padded else np.ones_like(KEPT)
    np.testing.assert_allclose(np.asarray(logits)[kept], want[kept], atol=2e-5 * np.abs(want).max())
    got, wanted = to_hf(gradient, model.config), in_files(gradients, model.config)
    assert got.keys() == wanted.keys()
    for name, want in wanted.items():
        np.testing.assert_allclose(got[name], want, atol=3e-5 * np.abs(want).max(), err_msg=name)


@pytest.mark.parametrize("case", ["mixtral", "qwen3_moe", "qwen2_moe"])
@pytest.mark.parametrize("masked", [False, True])
def test_load_balancing_loss(case, masked):
    """theirs of the logits of all layers, ours of what each layer counts."""
    module = __import__(f"transformers.models.{case}.modeling_{case}", fromlist=["x"])
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(3, 32, 7)).astype(np.float32)
    mask = KEPT.reshape(-1)
    want = module.load_balancing_loss_func(
        tuple(map(torch.from_numpy, logits)), 7, 2, torch.from_numpy(KEPT.astype(np.int64)) if masked else None
    )
    counted = [
        moe.router_statistics(moe.route(jnp.asarray(x), 2), jnp.asarray(mask) if masked else None) for x in logits
    ]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *counted)
    np.testing.assert_allclose(layers.load_balancing_loss(stacked), want.item(), rtol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_folders(case, tmp_path):
    """We load what transformers saves, in one file or several, and transformers loads what we save."""
    reference = theirs(case)
    tokens = torch.from_numpy(TOKENS)
    want = reference(tokens).logits.detach().numpy()
    arrays = {name: x.detach().numpy() for name, x in reference.state_dict().items()}
    for name, size in (("one", "5GB"), ("several", "20KB")):
        reference.save_pretrained(tmp_path / name, max_shard_size=size)
        model = load_hf_folder(tmp_path / name)
        wanted = in_files(arrays, model.config)
        got = to_hf(model, model.config)
        assert got.keys() == wanted.keys()
        for parameter, array in got.items():
            np.testing.assert_array_equal(array, wanted[parameter], err_msg=parameter)
    save_hf_folder(model, tmp_path / "back")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", attn_implementation="eager").eval()
    np.testing.assert_array_equal(back(tokens).logits.detach().numpy(), want)
    assert type(back) is type(reference)
    says = [model.config.to_dict() for model in (reference, back)]
    for settings in says:
        for name in ("dtype", "_name_or_path", "head_dim"):  # the last one is written out
            settings.pop(name, None)
    assert says[0] == says[1]


@pytest.mark.parametrize("case", ["mixtral", "qwen3_moe"])
def test_stacked_layers(case):
    """Filled directly, and written again."""
    reference = theirs(case)
    model = ours(reference, scan_layers=True)
    want = reference(torch.from_numpy(TOKENS)).logits.detach().numpy()
    np.testing.assert_allclose(model(jnp.asarray(TOKENS)), want, atol=2e-5 * np.abs(want).max())
    apart = to_hf(ours(reference), model.config)
    for name, array in to_hf(model, model.config).items():
        np.testing.assert_array_equal(array, apart[name], err_msg=name)


@pytest.mark.parametrize("case", ["gpt_oss", "gpt_oss_other"])
def test_decoding(case):
    """Over a cache, token by token: by their logits for all tokens at once."""
    reference = theirs(case)
    want = reference(torch.from_numpy(TOKENS)).logits.detach().numpy()
    model, tokens = ours(reference), jnp.asarray(TOKENS)
    logits, cache = model.decode(tokens[:, :7], model.init_cache(2, 16))
    np.testing.assert_allclose(logits, want[:, 6], atol=2e-5 * np.abs(want).max())
    for last in (8, 9, 12):
        logits, cache = model.decode(tokens[:, int(cache[0].length[0]) : last], cache)
        np.testing.assert_allclose(logits, want[:, last - 1], atol=2e-5 * np.abs(want).max())


def test_deepseek_v3_routing():
    """Sigmoids, groups, a bias for the choice alone, scaling: their router beside ours, with its gradient."""
    config = transformers.DeepseekV3Config(
        hidden_size=16, n_routed_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2, routed_scaling_factor=2.5
    )
    module = __import__("transformers.models.deepseek_v3.modeling_deepseek_v3", fromlist=["x"])
    torch.manual_seed(0)
    reference = module.DeepseekV3TopkRouter(config)
    with torch.no_grad():
        reference.weight.copy_(torch.randn(8, 16))
        reference.e_score_correction_bias.copy_(0.3 * torch.randn(8))
    x = np.random.default_rng(0).normal(size=(40, 16)).astype(np.float32)
    logits, weights, ids = reference(torch.from_numpy(x))
    router = moe.Router(
        16, 8, 3, scoring="sigmoid", scaling=2.5, groups=4, groups_kept=2, use_bias=True, rngs=nnx.Rngs(0)
    )
    router.kernel[...] = jnp.asarray(reference.weight.detach().numpy().T)
    router.bias[...] = jnp.asarray(reference.e_score_correction_bias.numpy())
    found = router(jnp.asarray(x))
    np.testing.assert_allclose(found.logits, logits.detach(), atol=1e-5)
    order, own = np.argsort(ids.numpy(), axis=-1), np.argsort(found.ids, axis=-1)
    np.testing.assert_array_equal(np.take_along_axis(np.asarray(found.ids), own, -1), np.sort(ids.numpy(), axis=-1))
    np.testing.assert_allclose(
        np.take_along_axis(np.asarray(found.weights), own, -1),
        np.take_along_axis(weights.detach().numpy(), order, -1),
        rtol=1e-5,
    )
    torch.square(weights).sum().backward()
    gradient = nnx.grad(lambda router: jnp.sum(jnp.square(router(jnp.asarray(x)).weights)))(router)
    np.testing.assert_allclose(gradient["kernel"][...].T, reference.weight.grad.numpy(), atol=1e-4)


def test_published_configs():
    """The settings of Mixtral 8x7B and Qwen3 30B-A3B, from and to Hugging Face's names."""
    published = {"mixtral": layers.MoEConfig.mixtral_8x7b(), "qwen3_moe": layers.MoEConfig.qwen3_30b_a3b()}
    for kind, config in published.items():
        config, settings = dataclasses.replace(config, head_dim=128), config_to_hf(config)
        assert settings["model_type"] == kind and config_from_hf(settings) == config
        cls = {"mixtral": transformers.MixtralConfig, "qwen3_moe": transformers.Qwen3MoeConfig}[kind]
        assert config_from_hf(cls.from_dict(settings).to_dict()) == config
    defaults = {
        "mixtral": transformers.MixtralConfig(),
        "qwen2_moe": transformers.Qwen2MoeConfig(),
        "qwen3_moe": transformers.Qwen3MoeConfig(),
    }
    for kind, theirs_says in defaults.items():
        assert config_from_hf({"model_type": kind}) == config_from_hf(theirs_says.to_dict()), kind


def test_a_model_with_deepseek_v3_s_experts():
    """dots.llm1: a dense first layer, sigmoids, groups, a balance bias, scaling, a shared expert; logits, gradients."""
    sizes = {name: SIZES[name] for name in list(SIZES)[:7]}
    experts = {"num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 24}
    torch.manual_seed(0)
    reference = transformers.AutoModelForCausalLM.from_config(
        transformers.Dots1Config(
            **sizes,
            **experts,
            n_routed_experts=8,
            n_shared_experts=2,
            first_k_dense_replace=1,
            norm_topk_prob=True,
            routed_scaling_factor=2.5,
            head_dim=8,
            sliding_window=None,
        ),
        attn_implementation="eager",
    ).eval()
    with torch.no_grad():
        for name, x in reference.state_dict().items():
            if "experts" in name or "mlp.gate" in name:
                x.copy_(0.3 * torch.randn(x.shape))
    config = layers.MoEConfig(
        **sizes,
        **experts,
        num_experts=8,
        shared_expert_intermediate_size=48,
        mlp_only_layers=(0,),
        scoring_func="sigmoid",
        routed_scaling_factor=2.5,
        use_balance_bias=True,
        router_aux_loss_coef=0.0,
        qk_norm=True,
    )

    def ours_of(arrays):
        return {name.replace("shared_experts", "shared_expert"): x for name, x in arrays.items()}

    tokens = torch.from_numpy(TOKENS)
    out = reference(tokens, labels=tokens)
    out.loss.backward()
    model = from_hf(ours_of({name: x.detach().numpy() for name, x in reference.state_dict().items()}), config)
    assert np.any(model.layers[1].mlp.router.bias[...])
    labels = jnp.asarray(np.concatenate([TOKENS[:, 1:], np.full((2, 1), -100)], axis=1))
    loss, gradient = nnx.jit(nnx.value_and_grad(lambda model: model.loss(jnp.asarray(TOKENS), labels)))(model)
    np.testing.assert_allclose(loss, out.loss.item(), rtol=1e-5)
    wanted = in_files(ours_of({name: x.grad.numpy() for name, x in reference.named_parameters()}), config)
    got = to_hf(gradient, config)
    assert got.keys() | {"model.layers.1.mlp.gate.e_score_correction_bias"} == wanted.keys()
    for name, array in got.items():
        np.testing.assert_allclose(array, wanted[name], atol=3e-5 * np.abs(wanted[name]).max(), err_msg=name)
