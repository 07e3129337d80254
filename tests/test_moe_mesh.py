"""Models with experts on a mesh: loss, counts and gradients are those of one device."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import flax_layers as layers
from flax_layers import sharding
from flax_layers.checkpoints import from_hf, to_hf

CONFIG = layers.MoEConfig(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=8,
    shared_expert_intermediate_size=16,
    shared_expert_gate=True,
    router_aux_loss_coef=0.1,
    router_z_loss_coef=0.1,
    initializer_range=0.3,
    use_balance_bias=True,
)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 64, (8, 8)))
MASK = jnp.arange(8) < jnp.arange(1, 9)[:, None]
PLANS = {
    "data": (sharding.DATA, {"data": 4}, {}),
    "fsdp": (sharding.FSDP, {"fsdp": 4}, {}),
    "tensor": (sharding.FSDP_TENSOR, {"fsdp": 2, "tensor": 2}, {}),
    "expert": (sharding.EXPERT, {"expert": 4}, {}),
    "expert and fsdp": (sharding.EXPERT, {"fsdp": 2, "expert": 2}, {}),
    "expert and tensor, scan": (sharding.EXPERT, {"expert": 2, "tensor": 2}, {"scan_layers": True, "remat": "full"}),
}


def run(model):
    @nnx.jit
    def step(model):
        def loss(model):
            return model.loss(TOKENS, jnp.roll(TOKENS, -1, axis=-1), token_mask=MASK, tokens_per_expert=True)

        (value, counts), gradient = nnx.value_and_grad(loss, has_aux=True)(model)
        layers.update_balance_bias(model, counts, 0.1)
        return value, counts, gradient

    return step(model)


@functools.cache
def on_one_device(scan_layers):
    model = layers.Llama(CONFIG, scan_layers=scan_layers, rngs=nnx.Rngs(0))
    value, counts, gradient = run(model)
    return value, counts, nnx.to_pure_dict(gradient), nnx.to_pure_dict(nnx.state(model, layers.BalanceBias))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize(
    "plan", [name if name in ("data", "expert") else pytest.param(name, marks=pytest.mark.slow) for name in PLANS]
)
def test_a_step(plan, kind):
    rules, sizes, options = PLANS[plan]
    devices = jax.devices()[:4]
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes), devices=devices)
    with jax.set_mesh(mesh):
        model = sharding.create(lambda: layers.Llama(CONFIG, rules=rules, **options, rngs=nnx.Rngs(0)))
        value, counts, gradient = run(model)
        bias = nnx.to_pure_dict(nnx.state(model, layers.BalanceBias))
    want, of_one, of_parameters, of_bias = on_one_device(options.get("scan_layers", False))
    np.testing.assert_allclose(value, want, rtol=1e-5)
    np.testing.assert_array_equal(counts, of_one)
    jax.tree.map(np.testing.assert_array_equal, bias, of_bias)
    for (path, got), want in zip(
        jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(gradient)), jax.tree.leaves(of_parameters), strict=True
    ):
        np.testing.assert_allclose(got, want, atol=2e-5 * np.abs(want).max(), err_msg=str(path))


def test_no_tokens():
    """Over mesh axes that cut none of them; and of a router that chooses groups of experts."""
    mesh = jax.make_mesh((4,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    with jax.set_mesh(mesh), sharding.axis_rules(sharding.EXPERT):
        module = sharding.create(lambda: layers.MoE(16, 8, 8, 2, groups=4, groups_kept=2, rngs=nnx.Rngs(0)))
        for shape in ((0, 16), (2, 0, 16)):
            y, gradient = nnx.value_and_grad(lambda m, x: jnp.sum(m(x)))(module, jnp.ones(shape))
            assert y == 0 and not any(g.any() for g in jax.tree.leaves(gradient))
            assert module(jnp.ones(shape)).shape == shape


def test_names_of_parameters():
    model = nnx.eval_shape(lambda: layers.Llama(CONFIG, scan_layers=True, rngs=nnx.Rngs(0)))
    mesh = jax.make_mesh((2, 2, 2), ("fsdp", "tensor", "expert"), axis_types=(AxisType.Auto,) * 3)
    specs = nnx.to_pure_dict(sharding.parameter_specs(model, sharding.EXPERT, mesh=mesh))["layers"]["mlp"]
    assert specs["experts"]["gate_up"] == P(None, "expert", "fsdp", None, "tensor")
    assert specs["experts"]["down"] == P(None, "expert", ("tensor", "fsdp"), None)
    assert specs["router"]["kernel"] == specs["shared_gate"]["kernel"] == P(None, "fsdp", None)
    assert specs["shared"]["gate_up"] == P(None, "fsdp", None, "tensor")
    assert specs["router"]["bias"] == P(None, None)
    one = dataclasses.replace(CONFIG, use_balance_bias=False)
    names = layers.Llama(one, rngs=nnx.Rngs(0)).layers[0].mlp.experts.gate_up.axis_names
    assert names == ("expert", "embed", None, "mlp")


@pytest.mark.parametrize(("scan", "sent"), [(False, 2 * 6), (True, 6 + 2)], ids=["list", "scan"])
@pytest.mark.slow
def test_step_sends_rows_weights_and_cotangents_alone(scan, sent):
    """Rows there and back, their weights there, and the cotangents of all; twice the same bits.

    A scan has one layer, and under remat its backward pass sends rows and weights again.
    """
    options = {"scan_layers": True, "remat": "full"} if scan else {}
    graph, params, rest = nnx.split(
        layers.Llama(CONFIG, rules=sharding.EXPERT, **options, rngs=nnx.Rngs(0)), nnx.Param, ...
    )

    def loss(params, tokens):
        return nnx.merge(graph, params, rest).loss(tokens, jnp.roll(TOKENS, -1, axis=-1), token_mask=MASK)

    mesh = jax.make_mesh((2, 4), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        placed = jax.tree.map(jax.device_put, params, sharding.parameter_shardings(params, mesh, sharding.EXPERT))
        tokens = jax.device_put(TOKENS, sharding.array_sharding(mesh, sharding.EXPERT, "batch", "length"))
        lowered = jax.jit(jax.value_and_grad(loss)).lower(placed, tokens)
        step = lowered.compile()
        found, again = step(placed, tokens), step(placed, tokens)
    assert lowered.as_text().count('"stablehlo.all_to_all"') == sent
    jax.tree.map(np.testing.assert_array_equal, found, again)
    np.testing.assert_allclose(found[0], on_one_device(scan)[0], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True], ids=["list", "scan"])
def test_a_capacity_factor_drops_and_counts(scan):
    """Over a mesh: with a place for half of the rows at most half are kept; with one for all, none is dropped."""
    mesh = jax.make_mesh((2, 4), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)
    choices = TOKENS.size * CONFIG.num_experts_per_tok
    found = {}
    for factor in (0.5, 4.0):
        config = dataclasses.replace(CONFIG, capacity_factor=factor)
        with jax.set_mesh(mesh):
            make = functools.partial(layers.Llama, config, rules=sharding.EXPERT, scan_layers=scan)
            model = sharding.create(lambda make=make: make(rngs=nnx.Rngs(0)))
            loss = nnx.jit(lambda model: model.loss(TOKENS, TOKENS, tokens_per_expert=True, dropped_choices=True))
            found[factor] = jax.device_get(loss(model))
    wanted, counts, none = found[4.0]
    assert none.shape == (CONFIG.num_hidden_layers,) and not none.any()
    value, _, dropped = found[0.5]
    assert (choices / 2 <= dropped).all() and (dropped < choices).all()
    assert abs(value - wanted) > 1e-4
    alone = layers.Llama(dataclasses.replace(CONFIG, capacity_factor=0.5), scan_layers=scan, rngs=nnx.Rngs(0))
    of_one, of_one_counts, none = alone.loss(TOKENS, TOKENS, tokens_per_expert=True, dropped_choices=True)
    np.testing.assert_allclose(wanted, of_one, rtol=1e-5)
    np.testing.assert_array_equal(counts, of_one_counts)
    assert not none.any()


def test_refusals_of_what_is_dropped():
    with pytest.raises(ValueError, match="capacity_factor"):
        layers.MoEConfig(capacity_factor=0.0)
    with pytest.raises(ValueError, match=r"capacity_factor=-1; it must be positive"):
        layers.MoE(16, 8, 4, 2, capacity_factor=-1, rngs=nnx.Rngs(0))
    dense = layers.Llama(layers.LlamaConfig(64, 16, 32, 1, 4), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="dropped_choices and token_mask want a model with experts"):
        dense.loss(TOKENS, TOKENS, dropped_choices=True)


@pytest.mark.parametrize("scan_layers", [True, False])
def test_checkpoints_from_and_to_a_mesh(scan_layers):
    """Each device reads its own experts; what is written is what one device has, its balance biases too."""
    model = layers.Llama(CONFIG, scan_layers=scan_layers, rngs=nnx.Rngs(0))
    layers.update_balance_bias(model, jnp.asarray(np.random.default_rng(0).integers(0, 9, (2, 8))), 0.5)
    arrays = to_hf(model, CONFIG)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    np.testing.assert_array_equal(arrays[name], model._layers()[1].mlp.router.bias[...])
    mesh = jax.make_mesh((2, 2), ("fsdp", "expert"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    abstract = nnx.eval_shape(lambda: model)
    shardings = sharding.parameter_shardings(abstract, mesh, sharding.EXPERT)
    loaded = from_hf(arrays, CONFIG, shardings=shardings, scan_layers=scan_layers)
    of_one = (loaded.layers if scan_layers else loaded.layers[0]).mlp.experts.gate_up[...]
    assert of_one.sharding.spec[int(scan_layers)] == "expert"
    for (path, want), got in zip(nnx.to_flat_state(nnx.state(model)), jax.tree.leaves(nnx.state(loaded)), strict=True):
        np.testing.assert_array_equal(got, want[...], err_msg=str(path))
    for name, array in to_hf(loaded, CONFIG).items():
        np.testing.assert_array_equal(array, arrays[name], err_msg=name)


@pytest.mark.slow
def test_a_balance_bias_that_a_checkpoint_lacks_begins_at_zero():
    plain = dataclasses.replace(CONFIG, use_balance_bias=False)
    arrays = to_hf(layers.Llama(plain, rngs=nnx.Rngs(0)), plain)
    model = from_hf(arrays, CONFIG)
    assert not np.any(model.layers[1].mlp.router.bias[...])
    gradient = nnx.grad(lambda m: m.loss(TOKENS, TOKENS))(model)
    assert to_hf(gradient, CONFIG).keys() == arrays.keys()
    del arrays["model.layers.1.mlp.gate.weight"]
    with pytest.raises(ValueError, match=r"the checkpoint lacks model\.layers\.1\.mlp\.gate\.weight"):
        from_hf(arrays, CONFIG)
