"""Mixtures of experts as layers and in models: values, gradients, statistics, balancing, scans, remat, generation."""

import dataclasses
import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from layer_checks import check_module

import coda_jax as coda
import flax_layers as layers
from flax_layers import moe
from flax_layers.checkpoints import from_maxtext, from_peft, to_maxtext, to_peft
from flax_layers.layer_stack import run_layers
from flax_layers.models import MoEConfig
from flax_layers.moe.balancing import auxiliary_loss

TINY = MoEConfig(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=8,
    initializer_range=0.3,
)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 12)))
LABELS = jnp.roll(TOKENS, -1, axis=-1)


def made(experts=6, k=2, **options):
    return layers.MoE(16, 8, experts, k, **options, rngs=nnx.Rngs(0))


def textbook(params, x, *, k, scoring="softmax", normalized=True, activation=jax.nn.silu):
    """Every expert of every token, times weights that are 0 for all but k; x (T, D)."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    logits = jnp.dot(x.astype(wide), params["router"]["kernel"].astype(wide), precision="highest")
    scores = jax.nn.softmax(logits) if scoring == "softmax" else jax.nn.sigmoid(logits)
    best = jax.lax.top_k(scores, k)[1]
    weights = scores * jnp.any(best[..., None] == jnp.arange(scores.shape[-1]), axis=-2)
    weights = weights / weights.sum(-1, keepdims=True) if normalized else weights
    z = jnp.einsum("td,edhf->tehf", x, params["experts"]["gate_up"].astype(x.dtype))
    hidden = activation(z[:, :, 0]) * z[:, :, 1]
    y = jnp.einsum("tef,efd,te->td", hidden, params["experts"]["down"].astype(x.dtype), weights.astype(x.dtype))
    if "shared" in params:
        gate, up = jnp.moveaxis(jnp.einsum("td,dhf->thf", x, params["shared"]["gate_up"].astype(x.dtype)), 1, 0)
        shared = (activation(gate) * up) @ params["shared"]["down"]["kernel"].astype(x.dtype)
        if "shared_gate" in params:
            shared = shared * jax.nn.sigmoid(x @ params["shared_gate"]["kernel"].astype(x.dtype))
        y = y + shared
    return y


CASES = {
    "mixtral": ({"k": 2}, {}),
    "one of eight": ({"experts": 8, "k": 1, "normalized": False}, {"k": 1, "normalized": False}),
    "all": ({"experts": 4, "k": 4}, {"k": 4}),
    "not normalized": ({"k": 3, "normalized": False}, {"k": 3, "normalized": False}),
    "sigmoid": ({"scoring": "sigmoid"}, {"scoring": "sigmoid"}),
    "shared": ({"shared_features": 24}, {}),
    "shared gate": ({"shared_features": 24, "use_shared_gate": True}, {}),
    "gelu": ({"activation": "gelu_pytorch_tanh"}, {"activation": functools.partial(jax.nn.gelu, approximate=True)}),
}


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case, dtype):
    options, plain = CASES[case]
    module = made(**options, param_dtype=dtype)
    x = jax.random.normal(jax.random.key(1), (29, 16)).astype(dtype)
    check_module(module, lambda m, x: m(x), functools.partial(textbook, **{"k": 2, **plain}), x)


@pytest.mark.slow
def test_experts_without_rows():
    """Their gradients are 0, and nothing else changes."""
    module = made(experts=8, k=2)
    x = jnp.abs(jax.random.normal(jax.random.key(1), (13, 16)))
    module.router.kernel[...] = jnp.where(jnp.arange(8) < 2, 1.0, -1.0) * jnp.ones((16, 1))
    gradient = nnx.grad(lambda m: jnp.sum(jnp.square(m(x))))(module)
    assert not np.any(gradient["experts"]["down"][...][2:]) and not np.any(gradient["experts"]["gate_up"][...][2:])
    assert np.all(np.any(gradient["experts"]["down"][...][:2], axis=(1, 2)))
    check_module(module, lambda m, x: m(x), functools.partial(textbook, k=2), x)


def test_weights_of_experts_without_rows_are_not_read():
    module = made(experts=8, k=2)
    x = jnp.abs(jax.random.normal(jax.random.key(1), (13, 16)))
    module.router.kernel[...] = jnp.where(jnp.arange(8) < 2, 1.0, -1.0) * jnp.ones((16, 1))
    expected = nnx.value_and_grad(lambda m: jnp.sum(jnp.square(m(x))))(module)
    for name, value in (("gate_up", jnp.inf), ("down", jnp.nan)):
        kernel = getattr(module.experts, name)
        kernel[...] = kernel[...].at[2:].set(value)
    found = nnx.value_and_grad(lambda m: jnp.sum(jnp.square(m(x))))(module)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("shape", [(16,), (5, 16), (2, 3, 16)])
def test_shapes(shape):
    module, x = made(), jax.random.normal(jax.random.key(1), shape)
    want = textbook(nnx.to_pure_dict(nnx.state(module, nnx.Param)), x.reshape(-1, 16), k=2).reshape(shape)
    np.testing.assert_allclose(module(x), want, atol=1e-5)


@pytest.mark.slow
def test_in_the_place_of_a_feed_forward_layer():
    """x1 + moe(norm(x1)), and its statistics beside that; None of another layer."""
    module = made()
    x = jax.random.normal(jax.random.key(1), (2, 5, 16))
    block = layers.LlamaBlock(16, 24, 4, mlp=module, rngs=nnx.Rngs(2))
    x1 = x + block.attention(block.attention_norm(x))
    want, whole = module(block.mlp_norm(x1), statistics=True)
    np.testing.assert_allclose(block(x), x1 + want, atol=1e-5)
    assert whole.counts.sum() == 20
    assert block.mlp is module
    y, counted = block(x, statistics=True, token_mask=jnp.arange(5) < jnp.array([[2], [3]]))
    np.testing.assert_array_equal(y, block(x))
    assert counted.tokens == 5
    _, counted = layers.LlamaBlock(16, 24, 4, rngs=nnx.Rngs(2))(x, statistics=True)
    assert counted is None


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_one_rounding(dtype):
    """The sum of k is returned in float32, if a block asks for it, whose sum with the stream is rounded once."""
    module = made(param_dtype=dtype)
    x = jax.random.normal(jax.random.key(1), (64, 16)).astype(dtype)
    rows = module.router(x)
    wide = moe.sorted_experts(module.experts, x, rows.ids, rows.weights, 6, dtype=jnp.float32)
    np.testing.assert_array_equal(module(x), wide.astype(dtype))
    found = module(x, dtype=jnp.float32)
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, wide)
    block = layers.LlamaBlock(16, 24, 4, mlp=module, param_dtype=dtype, rngs=nnx.Rngs(2))
    x1 = x + block.attention(block.attention_norm(x))
    of_experts = module(block.mlp_norm(x1), dtype=jnp.float32)
    parts = (of_experts + x1.astype(jnp.float32)).astype(dtype)  # x1 is a sum of what attention rounds
    exact = block(x.astype(jnp.float32))
    np.testing.assert_array_less(np.linalg.norm(block(x) - exact), 1e-6 + np.linalg.norm(parts - exact))


def loop_statistics(found, mask):
    experts = found.logits.shape[-1]
    counts, probabilities, squared = np.zeros(experts), np.zeros(experts), 0.0
    for t in np.flatnonzero(mask):
        np.add.at(counts, np.asarray(found.ids[t]), 1)
        probabilities += np.asarray(found.probabilities[t], np.float64)
        squared += np.log(np.exp(np.asarray(found.logits[t], np.float64)).sum()) ** 2
    return counts, probabilities, squared, mask.sum()


@pytest.mark.smoke
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("masked", [True, False])
def test_statistics_and_auxiliary_losses(scoring, masked):
    module, x = made(scoring=scoring), jax.random.normal(jax.random.key(1), (31, 16))
    mask = np.random.default_rng(0).random(31) < 0.6 if masked else np.ones(31, bool)
    _, counted = module(x, statistics=True, token_mask=jnp.asarray(mask) if masked else None)
    counts, probabilities, squared, tokens = loop_statistics(module.router(x), mask)
    np.testing.assert_array_equal(counted.counts, counts)
    np.testing.assert_allclose(counted.probabilities, probabilities, rtol=1e-5)
    np.testing.assert_allclose(counted.squared_lse, squared, rtol=1e-5)
    assert counted.tokens == tokens and counted.counts.dtype == counted.tokens.dtype == jnp.int32
    want = 6 * (counts / tokens * probabilities / tokens).sum()
    np.testing.assert_allclose(layers.load_balancing_loss(counted), want, rtol=1e-5)
    np.testing.assert_allclose(layers.router_z_loss(counted), squared / tokens, rtol=1e-5)
    twice = jax.tree.map(lambda x: jnp.stack([x, x]), counted)
    np.testing.assert_allclose(layers.load_balancing_loss(twice), want, rtol=1e-5)
    np.testing.assert_allclose(layers.router_z_loss(twice), squared / tokens, rtol=1e-5)


def test_statistics_of_padded_tokens():
    """They are those of the other tokens; what padding has may be infinite."""
    rng = np.random.default_rng(0)
    mask = np.array([[True, True, False], [True, False, False]])
    logits = np.where(mask[..., None], rng.integers(0, 3, (2, 3, 4)), np.inf).astype(np.float32)
    probabilities = np.where(mask[..., None], rng.random((2, 3, 4)), np.nan).astype(np.float32)
    ids = np.argsort(rng.random((2, 3, 4)), axis=-1)[..., :2].astype(np.int32)
    routing = moe.Routing(ids, np.ones(ids.shape, np.float32), logits, probabilities)
    counted = jax.jit(moe.router_statistics)(routing, mask, 7)
    np.testing.assert_array_equal(counted.counts, np.bincount(ids[mask].ravel(), minlength=4))
    np.testing.assert_allclose(counted.probabilities, probabilities[mask].sum(axis=0), rtol=1e-6)
    squared = np.log(np.exp(logits[mask], dtype=np.float64).sum(axis=-1)) ** 2
    np.testing.assert_allclose(counted.squared_lse, squared.sum(), rtol=1e-6)
    assert counted.tokens == 3 and counted.dropped == 7


def test_losses_of_layers_with_other_numbers_of_tokens():
    """They are means over the tokens of all layers."""
    layers_ = moe.RouterStatistics(
        counts=jnp.array([[6, 0, 2], [1, 1, 0]]),
        probabilities=jnp.array([[2.5, 0.5, 1.0], [0.25, 0.5, 0.25]]),
        squared_lse=jnp.array([20.0, 1.0]),
        tokens=jnp.array([4, 1]),
    )
    balance = 3 * (np.array([7, 1, 2]) / 5 * np.array([2.75, 1.0, 1.25]) / 5).sum()

    @jax.jit
    def losses(layers_):
        return moe.load_balancing_loss(layers_), moe.router_z_loss(layers_), auxiliary_loss(layers_, 0.5, 0.25)

    want = balance, 21 / 5, 0.5 * balance + 0.25 * 21 / 5
    np.testing.assert_allclose(losses(layers_), want, rtol=1e-6)


def test_no_token_that_counts():
    _, counted = made()(jnp.ones((3, 16)), statistics=True, token_mask=jnp.zeros(3, bool))
    assert layers.load_balancing_loss(counted) == layers.router_z_loss(counted) == 0
    zeros = layers.RouterStatistics(counts=np.zeros(6), probabilities=np.zeros(6), squared_lse=0, tokens=0, dropped=0)
    jax.tree.map(np.testing.assert_array_equal, counted, zeros)


def loss_of(model, *, auxiliary=True, token_mask=None, tokens_per_expert=False, **options):
    return model.loss(
        TOKENS,
        LABELS,
        auxiliary=auxiliary,
        token_mask=token_mask,
        tokens_per_expert=tokens_per_expert,
        **options,
    )


@pytest.mark.slow
def test_loss_adds_what_the_config_says():
    model = layers.Llama(dataclasses.replace(TINY, router_aux_loss_coef=0.25, router_z_loss_coef=0.5), rngs=nnx.Rngs(0))
    plain, total = loss_of(model, auxiliary=False, weight_sum=True)
    _, counted = run_layers(model.layers, model.embed(TOKENS), statistics=True)
    balance, z = layers.load_balancing_loss(counted), layers.router_z_loss(counted)
    assert counted.counts.shape == (3, 6) and balance > 1.9 and z > 0.1
    np.testing.assert_allclose(loss_of(model), plain + 0.25 * balance + 0.5 * z, rtol=1e-6)
    summed, weights, counts = loss_of(model, reduction="sum", weight_sum=True, tokens_per_expert=True)
    np.testing.assert_allclose(summed / weights, loss_of(model), rtol=1e-6)
    np.testing.assert_array_equal(counts, counted.counts)
    assert weights == total
    with pytest.raises(ValueError, match="auxiliary=False"):
        loss_of(model, reduction="none")
    assert loss_of(model, reduction="none", auxiliary=False).shape == TOKENS.shape


@pytest.mark.slow
def test_padding_does_not_count():
    """The counts of a padded batch are those of the tokens before the padding."""
    model = layers.Llama(TINY, rngs=nnx.Rngs(0))
    mask = jnp.arange(12) < jnp.array([[12], [7]])
    _, counts = loss_of(model, tokens_per_expert=True, token_mask=mask)
    _, first = model.loss(TOKENS[:1], LABELS[:1], tokens_per_expert=True)
    _, second = model.loss(TOKENS[1:, :7], LABELS[1:, :7], tokens_per_expert=True)
    np.testing.assert_array_equal(counts, first + second)
    assert counts.shape == (3, 6) and counts.dtype == jnp.int32 and np.all(counts.sum(1) == 2 * 19)


WAYS = {
    "remat": {"remat": "full"},
    "some layers": {"remat": "save_attention", "remat_layers": 1},
    "scan": {"scan_layers": True},
    "scan and remat": {"scan_layers": True, "remat": ("query_proj", "out_proj")},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.slow
def test_ways_to_run_the_layers(way):
    @nnx.jit
    def run(model):
        return nnx.value_and_grad(lambda m: loss_of(m, tokens_per_expert=True), has_aux=True)(model)

    (loss, counts), gradient = run(layers.Llama(TINY, rngs=nnx.Rngs(0)))
    (other, found), of_other = run(layers.Llama(TINY, **WAYS[way], rngs=nnx.Rngs(0)))
    np.testing.assert_allclose(other, loss, rtol=1e-6)
    np.testing.assert_array_equal(found, counts)
    gradient, of_other = nnx.to_pure_dict(gradient), nnx.to_pure_dict(of_other)
    if "scan_layers" in WAYS[way]:
        gradient["layers"] = jax.tree.map(lambda *x: jnp.stack(x), *gradient["layers"].values())
    assert jax.tree.structure(gradient) == jax.tree.structure(of_other)
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(of_other), strict=True):
        np.testing.assert_allclose(b, a, atol=1e-5 * np.abs(a).max())


def test_remat_keeps_what_was_chosen():
    """A block's choice and order are kept under every policy: neither is made again."""
    block = layers.LlamaBlock(16, 24, 4, mlp=made(), rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(block)

    def sorts(remat):
        def loss(state, x):
            return jnp.sum(run_layers(nnx.List([nnx.merge(graphdef, state)]), x, remat=remat))

        return str(jax.make_jaxpr(jax.grad(loss))(state, jnp.ones((1, 4, 16)))).count(" top_k")

    assert sorts(None) == sorts("full") == 1
    assert sorts(jax.checkpoint_policies.nothing_saveable) == 2


def test_products_that_remat_runs_again():
    """Kept by their names, rows apart, none of a block's products is made twice: four, and two of each going back."""
    block = layers.LlamaBlock(16, 24, 4, mlp=made(), rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(block)

    def products(remat):
        def loss(state, x):
            return jnp.sum(run_layers(nnx.List([nnx.merge(graphdef, state)]), x, remat=remat))

        step = jax.value_and_grad(loss, (0, 1))
        return sum(coda.explain(step, state, jnp.ones((1, 4, 16))).products.values())

    names = ("query_proj", "key_proj", "value_proj", "context", "out_proj", "mlpwi")
    assert products(None) == products(names) == products((*names, "expert_rows")) == 12
    assert products("save_attention") == 13 and products("full") == 15


@pytest.mark.slow
def test_layers_of_both_kinds():
    """mlp_only_layers and decoder_sparse_step say which layers have experts; counts are of those."""
    config = dataclasses.replace(TINY, num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=(3,))
    assert [config.has_experts(i) for i in range(4)] == [False, True, False, False]
    model = layers.Llama(config, rngs=nnx.Rngs(0))
    kinds = [type(layer.mlp) for layer in model.layers]
    assert kinds == [layers.GatedMLP, layers.MoE, layers.GatedMLP, layers.GatedMLP]
    _, counts = loss_of(model, tokens_per_expert=True)
    assert counts.shape == (1, 6)
    with pytest.raises(ValueError, match="only equal layers can be scanned"):
        layers.Llama(config, scan_layers=True, rngs=nnx.Rngs(0))


@pytest.mark.slow
def test_generation():
    """Decoding says of each token what the whole sequence says."""
    model = layers.Llama(TINY, rngs=nnx.Rngs(0))
    generated = layers.generate(model, TOKENS[:, :5], max_new_tokens=4).tokens
    for i in range(4):
        want = jnp.argmax(model(jnp.concatenate([TOKENS[:, :5], generated[:, :i]], axis=1))[:, -1], axis=-1)
        np.testing.assert_array_equal(generated[:, i], want)


@pytest.mark.parametrize("scan_layers", [True, False])
@pytest.mark.slow
def test_balance_bias_moves_the_load(scan_layers):
    """Counts of a router that prefers two experts even out, with no auxiliary loss and no other change."""
    config = dataclasses.replace(
        TINY, num_hidden_layers=2, use_balance_bias=True, scoring_func="sigmoid", router_aux_loss_coef=0.0
    )
    model = layers.Llama(config, scan_layers=scan_layers, rngs=nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(0), (4, 12), 0, 64)

    @nnx.jit
    def count(model):
        return model.loss(tokens, tokens, tokens_per_expert=True)[1]

    def spread(counts):
        return np.asarray(counts).max(axis=1) / np.asarray(counts).mean(axis=1)

    before = count(model)
    for _ in range(40):
        assert layers.update_balance_bias(model, count(model), 0.02) is model
    after = count(model)
    assert np.all(after.sum(1) == before.sum(1)) and spread(before).mean() > 1.5
    assert spread(after).mean() < 1.2, (spread(before), spread(after))


@pytest.mark.slow
@pytest.mark.parametrize("scan_layers", [True, False])
@pytest.mark.parametrize("of_state", [True, False])
def test_each_bias_follows_its_own_counts(scan_layers, of_state):
    """DeepSeek-V3's rule, of 12 layers in order."""
    config = dataclasses.replace(TINY, num_hidden_layers=12, use_balance_bias=True)
    model = layers.Llama(config, scan_layers=scan_layers, rngs=nnx.Rngs(0))
    counts = np.random.default_rng(0).integers(0, 5, (12, 6))
    target = nnx.state(model) if of_state else model
    layers.update_balance_bias(target, jnp.asarray(counts), 0.5)
    layers.update_balance_bias(target, jnp.asarray(counts), 0.25)
    if of_state:
        nnx.update(model, target)
    got = [layer.mlp.router.bias[...] for layer in model._layers()]
    np.testing.assert_allclose(got, 0.75 * np.sign(counts.mean(1, keepdims=True) - counts))
    gradient = nnx.grad(lambda m: loss_of(m))(model)
    assert all("bias" not in path for path, _ in nnx.to_flat_state(gradient))


def test_a_bias_changes_the_choice_alone():
    module, x = made(use_balance_bias=True), jax.random.normal(jax.random.key(1), (20, 16))
    before = module.router(x)
    layers.update_balance_bias(module, jnp.array([9, 0, 9, 9, 9, 9]), 1.0)
    after = module.router(x)
    assert np.all(np.any(after.ids == 1, axis=1)) and not np.all(np.any(before.ids == 1, axis=1))
    np.testing.assert_array_equal(after.probabilities, before.probabilities)
    scores = np.take_along_axis(np.asarray(after.probabilities), np.asarray(after.ids), axis=-1)
    np.testing.assert_allclose(after.weights, scores / scores.sum(-1, keepdims=True), rtol=1e-6)


def test_updates_that_are_refused():
    with pytest.raises(ValueError, match="there is no BalanceBias"):
        layers.update_balance_bias(made(), jnp.ones(6), 0.1)
    with pytest.raises(ValueError, match=r"counts have shape \(2, 6\); 1 layers of 6 experts .* want \(1, 6\)"):
        layers.update_balance_bias(made(use_balance_bias=True), jnp.ones((2, 6)), 0.1)


def test_calls_that_are_refused():
    module, dense = made(), layers.Llama(layers.LlamaConfig(**SMALL), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"MoE: x has shape \(3, 8\); it must be \(..., 16\)"):
        module(jnp.ones((3, 8)))
    with pytest.raises(ValueError, match=r"token_mask has shape \(4,\); of x \(3, 16\) it must be \(3,\)"):
        module(jnp.ones((3, 16)), token_mask=jnp.ones(4, bool))
    with pytest.raises(ValueError, match="wants a shared expert"):
        made(use_shared_gate=True)
    boxed = nnx.with_partitioning(nnx.initializers.zeros, (None, None))
    with pytest.raises(TypeError, match="kernel_init has metadata"):
        moe.Experts(16, 8, 6, kernel_init=boxed, rngs=nnx.Rngs(0))
    for options in ({"tokens_per_expert": True}, {"dropped_choices": True}, {"token_mask": TOKENS > 0}):
        with pytest.raises(ValueError, match="want a model with experts: a Llama of a MoEConfig"):
            loss_of(dense, **options)
    with pytest.raises(ValueError, match=r"token_mask has shape \(2, 11\)"):
        loss_of(layers.Llama(TINY, rngs=nnx.Rngs(0)), token_mask=TOKENS[:, 1:] > 0)


@pytest.mark.slow
def test_every_option():
    """A model of a config with all of it, and its layer made by hand: both add up what their parts say."""
    config = MoEConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=32,
        initializer_range=0.3,
        rms_norm_eps=1e-5,
        rope_theta=1e5,
        rope_scaling=None,
        hidden_act="gelu",
        attention_bias=True,
        qk_norm=True,
        tie_word_embeddings=True,
        sliding_window=6,
        origin=None,
        attention_out_bias=False,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=12,
        norm_topk_prob=False,
        router_aux_loss_coef=0.0,
        router_z_loss_coef=0.5,
        decoder_sparse_step=1,
        mlp_only_layers=(),
        scoring_func="sigmoid",
        routed_scaling_factor=2.5,
        n_group=4,
        topk_group=2,
        use_balance_bias=True,
        shared_expert_intermediate_size=20,
        shared_expert_gate=True,
    )
    by_hand = layers.MoE(
        16,
        12,
        8,
        3,
        activation="gelu",
        scoring="sigmoid",
        normalized=False,
        scaling=2.5,
        groups=4,
        groups_kept=2,
        use_balance_bias=True,
        shared_features=20,
        use_shared_gate=True,
        dtype=jnp.float32,
        param_dtype=jnp.bfloat16,
        kernel_init=nnx.initializers.normal(0.3),
        rngs=nnx.Rngs(3),
    )
    model = layers.Llama(config, rngs=nnx.Rngs(0))
    of_model = model.layers[0].mlp
    assert nnx.graphdef(of_model.router) == nnx.graphdef(by_hand.router)
    x = jax.random.normal(jax.random.key(1), (9, 16))
    for module in (of_model, by_hand):
        layers.update_balance_bias(module, jnp.arange(8), 0.2)
        found = module.router(x)
        want = moe.route(
            found.logits, 3, bias=module.router.bias[...], scoring="sigmoid", normalized=False, scaling=2.5, groups=4,
            groups_kept=2,
        )  # fmt: skip
        np.testing.assert_array_equal(found.ids, want.ids)
        np.testing.assert_array_equal(found.weights, want.weights)
        routed = moe.sorted_experts(module.experts, x, found.ids, found.weights, 8)
        shared = module.shared(x) * jax.nn.sigmoid(module.shared_gate(x))
        np.testing.assert_allclose(module(x), routed + shared, atol=1e-5)
        assert module.shared.down.kernel.shape == (20, 16) and module.experts.down.shape == (8, 12, 16)
    assert by_hand(x).dtype == jnp.float32 and by_hand.experts.down.dtype == jnp.bfloat16
    assert np.isfinite(loss_of(model))


SMALL = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}
BAD_CONFIGS = {
    "num_experts=0": {"num_experts": 0},
    "num_experts_per_tok=2.5": {"num_experts_per_tok": 2.5},
    "num_experts_per_tok.* is 7, of num_experts=6": {"num_experts_per_tok": 7},
    "moe_intermediate_size=0": {"moe_intermediate_size": 0},
    "decoder_sparse_step=0": {"decoder_sparse_step": 0},
    "mlp_only_layers=3; it must be numbers": {"mlp_only_layers": 3},
    "router_aux_loss_coef=-1": {"router_aux_loss_coef": -1},
    "router_z_loss_coef=nan": {"router_z_loss_coef": float("nan")},
    "routed_scaling_factor=0": {"routed_scaling_factor": 0},
    "norm_topk_prob=1": {"norm_topk_prob": 1},
    "scoring='tanh'": {"scoring_func": "tanh"},
    "2 groups of experts of which None are kept.*n_group and topk_group": {"n_group": 2},
    "shared_expert_gate=True wants": {"shared_expert_gate": True},
}


@pytest.mark.parametrize("message", BAD_CONFIGS)
def test_configs_that_are_refused(message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **BAD_CONFIGS[message])


def test_published_sizes():
    """The parameters of Mixtral 8x7B, 46.7 billion, and of Qwen3 30B-A3B, 30.5 billion."""
    for config, billions in ((MoEConfig.mixtral_8x7b(), 46.7), (MoEConfig.qwen3_30b_a3b(), 30.5)):
        model = nnx.eval_shape(lambda config=config: layers.Llama(config, scan_layers=True, rngs=nnx.Rngs(0)))
        count = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
        assert round(count / 1e9, 1) == billions


def test_adapters_of_experts_are_refused_by_name():
    """Attention takes adapters, also from PEFT's files; neither experts nor a router do."""
    model = layers.Llama(dataclasses.replace(TINY, qk_norm=True), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="target 'gate_up': the model has experts, for which there are no adapters"):
        layers.add_lora(model, 2, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="target 'down': the model has experts"):
        layers.add_lora(model, 2, targets=("qkv", "down"), rngs=nnx.Rngs(0))
    expected = model(TOKENS)
    layers.add_lora(model, 2, targets=("qkv", "out"), rngs=nnx.Rngs(0))
    np.testing.assert_allclose(model(TOKENS), expected, atol=1e-5)
    settings, arrays = to_peft(model)
    assert len(arrays) == 3 * 4 * 2 and not any("mlp" in name for name in arrays)
    layers.remove_lora(model)
    of_expert = {
        f"base_model.model.model.layers.0.mlp.experts.1.gate_proj.lora_{x}.weight": np.zeros(shape, np.float32)
        for x, shape in (("A", (2, 16)), ("B", (8, 2)))
    }
    with pytest.raises(ValueError, match=r"takes no base_model\.model\.model\.layers\.0\.mlp\.experts\.1\.gate_proj"):
        from_peft(model, settings, arrays | of_expert)


def test_maxtext_checkpoints_with_experts_are_refused():
    model = layers.Llama(TINY, rngs=nnx.Rngs(0))
    for door in (to_maxtext, from_maxtext):
        with pytest.raises(ValueError, match="a config with experts: MaxText's checkpoints are read and written of"):
            door({f"layers_{i}": np.zeros(1) for i in range(9)} if door is from_maxtext else model, TINY)


@pytest.mark.parametrize("scan_layers", [True, False])
def test_muon_takes_each_expert_by_itself(scan_layers):
    contrib = pytest.importorskip("optax.contrib")
    config = dataclasses.replace(TINY, shared_expert_intermediate_size=8, shared_expert_gate=True)
    model = nnx.eval_shape(lambda: layers.Llama(config, scan_layers=scan_layers, rngs=nnx.Rngs(0)))
    found = nnx.to_pure_dict(layers.muon_dimension_numbers(nnx.state(model, nnx.Param)))["layers"]
    of_mlp, first = (found if scan_layers else found[0])["mlp"], int(scan_layers)
    numbers = contrib.MuonDimensionNumbers
    assert of_mlp["experts"]["gate_up"] == numbers(first + 1, first + 3)
    assert of_mlp["experts"]["down"] == numbers(first + 1, first + 2)
    assert of_mlp["router"]["kernel"] == numbers(first, first + 1)
    assert of_mlp["shared"]["gate_up"] == numbers(first, first + 2) and of_mlp["shared_gate"]["kernel"] is None


def test_checkpoint_of_the_state():
    """orbax's or any other of nnx.state has the balance biases; what came back goes on in the same way."""
    config = dataclasses.replace(TINY, use_balance_bias=True)
    model = layers.Llama(config, scan_layers=True, rngs=nnx.Rngs(0))
    layers.update_balance_bias(model, jnp.asarray(np.random.default_rng(0).integers(0, 9, (3, 6))), 0.5)
    state = nnx.to_pure_dict(nnx.state(model))
    assert state["layers"]["mlp"]["router"]["bias"].shape == (3, 6) and np.any(state["layers"]["mlp"]["router"]["bias"])
    other = layers.Llama(config, scan_layers=True, rngs=nnx.Rngs(1))
    restored = nnx.state(other)
    nnx.replace_by_pure_dict(restored, jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), state))
    nnx.update(other, restored)
    np.testing.assert_array_equal(loss_of(other), loss_of(model))


@pytest.mark.slow
def test_any_number_of_tokens():
    """Exported with a symbolic number, and under vmap."""
    module = made()
    graphdef, state = nnx.split(module)
    call = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x))
    (tokens,) = jax.export.symbolic_shape("tokens")
    exported = jax.export.export(call)(state, jax.ShapeDtypeStruct((tokens, 16), jnp.float32))
    x = jax.random.normal(jax.random.key(0), (13, 16))
    np.testing.assert_array_equal(exported.call(state, x), call(state, x))
    for got, one in zip(jax.vmap(module)(jnp.stack([x, 2 * x])), (x, 2 * x), strict=True):
        np.testing.assert_allclose(got, module(one), atol=1e-6)
