"""Names of axes, rules, and where they lay parameters; `tests/test_sharding_plans.py` has what devices exchange."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import flax_layers as layers
from flax_layers import sharding

P = PartitionSpec
LLAMA = layers.LlamaConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    attention_bias=True,
    qk_norm=True,
)
GPT2 = layers.GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=2, n_head=2)
MODELS = {
    "llama": lambda **options: layers.Llama(LLAMA, rngs=nnx.Rngs(0), **options),
    "separate": lambda **options: layers.Llama(LLAMA, separate_qkv=True, rngs=nnx.Rngs(0), **options),
    "scanned": lambda **options: layers.Llama(LLAMA, scan_layers=True, rngs=nnx.Rngs(0), **options),
    "gpt2": lambda **options: layers.GPT2(GPT2, rngs=nnx.Rngs(0), **options),
}
TOKENS = jax.random.randint(jax.random.key(0), (4, 8), 0, 32)
BOTH = {"fsdp": 2, "tensor": 2}
# The public methods of models, and what each is called with.
CALLS = {
    "__call__": lambda model: model(TOKENS),
    "loss": lambda model: model.loss(TOKENS, TOKENS),
    "token_logprobs": lambda model: model.token_logprobs(TOKENS, TOKENS),
    "init_cache": lambda model: model.init_cache(4, 8),
    "decode": lambda model: model.decode(TOKENS, model.init_cache(4, 8)),
}


def mesh_of(kind=AxisType.Auto, **sizes):
    devices = jax.devices("cpu")[: int(np.prod([*sizes.values()]))]
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes), devices=devices)


def by_path(tree):
    """Leaves by their dotted path."""
    return {sharding._dotted([*map(sharding._key, path)]): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


@pytest.mark.parametrize(
    ("axes", "rules", "sizes", "shape", "expected"),
    [
        (("batch", "length", "embed"), sharding.FSDP, {"data": 2, "fsdp": 2}, None, P(("data", "fsdp"), None, None)),
        (("batch", "length", "embed"), sharding.FSDP, {"fsdp": 4}, None, P("fsdp", None, None)),
        (("embed", None, "mlp"), sharding.FSDP_TENSOR, {"fsdp": 2, "tensor": 2}, None, P("fsdp", None, "tensor")),
        (("batch", None, "mlp"), sharding.SEQUENCE, {"data": 2, "tensor": 2}, None, P("data", None, "tensor")),
        (("batch", "length", "embed"), sharding.SEQUENCE, {"tensor": 4}, None, P(None, "tensor", None)),
        # What comes first in the rules has the mesh axis.
        (("batch", "length", "mlp"), sharding.SEQUENCE, {"tensor": 4}, None, P(None, None, "tensor")),
        (("length", "mlp"), {"length": "tensor", "mlp": "tensor"}, {"tensor": 4}, None, P("tensor", None)),
        # Pairs, as flax has them, of which the first that fits counts; None cuts nothing.
        (("vocab",), [("vocab", "expert"), ("vocab", "tensor")], {"tensor": 4}, None, P("tensor")),
        (("vocab",), {"vocab": None}, {"tensor": 4}, None, P(None)),
        # An axis that is not divided evenly: of an activation no name further on has what it could not take.
        (("batch", "embed"), sharding.FSDP, {"data": 2, "fsdp": 2}, (2, 16), P("data", None)),
        (sharding.STREAM, sharding.FSDP, {"fsdp": 4}, (1, 8, 16), P(None, None, None)),
        (sharding.STREAM, sharding.FSDP, {"data": 2, "fsdp": 2}, (3, 8, 16), P(None, None, None)),
        (sharding.STREAM, sharding.FSDP_SEQUENCE, BOTH, (1, 8, 16), P(None, "tensor", None)),
        (("batch", None, "mlp"), {"batch": "x", "mlp": ("x", "y")}, {"x": 2, "y": 2}, (3, 8, 16), P(None, None, "y")),
        (("batch", "vocab"), [("batch", ("x", "y")), ("batch", "y")], {"x": 4, "y": 2}, (2, 8), P("y", None)),
        (("embed", "mlp"), {"embed": "fsdp", "mlp": "fsdp"}, {"fsdp": 4}, (6, 8), P(None, "fsdp")),
        (("batch", "heads"), sharding.TENSOR, {"tensor": 4}, (8, 6), P(None, None)),
        # An axis of two names; where they do not divide it together, the second one's mesh axis goes further on.
        ((("mlp", "fan_in"), "embed"), sharding.FSDP_TENSOR, BOTH, (8, 6), P(("tensor", "fsdp"), None)),
        ((("mlp", "fan_in"), "embed"), sharding.FSDP_TENSOR, BOTH, (6, 8), P("tensor", "fsdp")),
        ((("mlp", "fan_in"), "embed"), {"embed": "fsdp"}, BOTH, (8, 8), P(None, "fsdp")),
        # In the order of the axis's names, whatever that of the rules.
        ((("mlp", "fan_in"), None), {"fan_in": "fsdp", "mlp": "tensor"}, BOTH, None, P(("tensor", "fsdp"), None)),
    ],
)
def test_rules(axes, rules, sizes, shape, expected):
    assert sharding.spec_of(axes, rules, mesh=mesh_of(**sizes), shape=shape) == expected


def test_flax_axis_rules_context_sets_the_specs():
    with nnx.logical_axis_rules(sharding.normalized(sharding.FSDP)):
        assert sharding.spec_of(("embed", "mlp")) == P("fsdp", None)
        specs = by_path(sharding.parameter_specs(MODELS["llama"]()))
    assert specs["layers.1.mlp.gate_up"] == P("fsdp", None, None)


@pytest.mark.parametrize("name", MODELS)
def test_parameters(name):
    """Every kernel is cut by fsdp and by tensor; so are its gradient and what optimizers keep of it."""
    model = nnx.eval_shape(MODELS[name])
    mesh = mesh_of(fsdp=2, tensor=2)
    specs = by_path(sharding.parameter_specs(model, sharding.FSDP_TENSOR, mesh=mesh))
    assert specs.keys() == by_path(nnx.state(model)).keys()
    for path, spec in specs.items():
        axes = sharding.mesh_axes(spec)
        expected = ["fsdp"] if path.startswith("position_embed") else ["fsdp", "tensor"]
        assert path.endswith(("scale", "bias")) or sorted(axes) == expected, path
    muon = optax.contrib.muon(1e-3, muon_weight_dimension_numbers=layers.muon_dimension_numbers)
    for optimizer in (optax.adamw(1e-3), muon):
        state = nnx.eval_shape(lambda optimizer=optimizer: nnx.Optimizer(MODELS[name](), optimizer, wrt=nnx.Param))
        kept = by_path(sharding.parameter_specs(state, sharding.FSDP_TENSOR, mesh=mesh))
        for path, spec in specs.items():
            found = [of_state for key, of_state in kept.items() if key.endswith(f".{path}")]
            assert found and set(found) == {spec}, path


def test_adapters_lie_as_what_they_adapt():
    model = MODELS["separate"]()
    layers.add_lora(model, 4, rngs=nnx.Rngs(0))
    specs = by_path(sharding.parameter_specs(model, sharding.FSDP_TENSOR, mesh=mesh_of(fsdp=2, tensor=2)))
    place = "layers.0.attention.out"
    assert specs[f"{place}.base_module.kernel"] == P(("tensor", "fsdp"), None)
    assert (specs[f"{place}.lora_a"], specs[f"{place}.lora_b"]) == (P("tensor", None), P(None, "fsdp"))


@pytest.mark.smoke
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_create(name, kind):
    """The values of a model made on one device, each device with its part."""
    mesh = mesh_of(kind, fsdp=2, tensor=2)
    with jax.set_mesh(mesh):
        model = sharding.create(lambda: MODELS[name](rules=sharding.FSDP_TENSOR))
    shardings = by_path(sharding.parameter_shardings(model, mesh))
    expected = by_path(nnx.state(MODELS[name]()))
    for path, x in by_path(nnx.state(model)).items():
        assert x.sharding == shardings[path], path
        np.testing.assert_allclose(x, expected[path], rtol=1e-6, atol=1e-6, err_msg=path)
    kernel = model.layers.mlp.down.kernel if name == "scanned" else model.layers[0].mlp.down.kernel
    assert kernel[...].addressable_shards[0].data.size == kernel.size // 4


def test_nothing_without_rules_or_mesh():
    def constraints(model):
        graphdef, state = nnx.split(model)
        text = str(jax.make_jaxpr(lambda state: nnx.merge(graphdef, state).loss(TOKENS, TOKENS))(state))
        return text.count("sharding_constraint")

    with jax.set_mesh(mesh_of(fsdp=4)):
        assert constraints(MODELS["llama"]()) == 0
        assert constraints(MODELS["llama"](rules=sharding.FSDP)) > 10
    assert constraints(MODELS["llama"](rules=sharding.FSDP)) == 0


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.slow
def test_every_method_runs_under_the_model_s_rules(name):
    """As it does under the same rules around it."""
    model = type(MODELS[name]())
    classes = model.__mro__[: model.__mro__.index(nnx.Module)]
    defined = {key for cls in classes for key, value in vars(cls).items() if callable(value)}
    assert {key for key in defined if key == "__call__" or not key.startswith("_")} == CALLS.keys()

    def traced(call, **options):
        graphdef, state = nnx.split(MODELS[name](**options))
        return str(jax.make_jaxpr(lambda state: call(nnx.merge(graphdef, state)))(state))

    with jax.set_mesh(mesh_of(**BOTH)):
        for key, call in CALLS.items():
            own = traced(call, rules=sharding.FSDP_TENSOR)
            with nnx.logical_axis_rules(sharding.normalized(sharding.FSDP_TENSOR)):
                assert traced(call) == own, key
            assert key == "init_cache" or own.count("sharding_constraint") > 10, key


def test_rules_are_part_of_the_model_s_structure():
    """So that a jitted function that is given another plan is traced anew."""
    graphdefs = [nnx.split(MODELS["llama"](rules=rules))[0] for rules in (None, sharding.FSDP, dict(sharding.FSDP))]
    assert graphdefs[0] != graphdefs[1] and graphdefs[1] == graphdefs[2]
    assert hash(graphdefs[1]) == hash(graphdefs[2])


def test_names_of_one_s_own():
    class Router(nnx.Module):
        def __init__(self):
            self.gates = nnx.Param(jnp.ones((16, 4)))

    mesh = mesh_of(fsdp=2, tensor=2)
    with pytest.raises(ValueError, match=r"gates of shape \(16, 4\) has no names of axes: give axes=\{'gates'"):
        sharding.parameter_specs(Router(), sharding.FSDP, mesh=mesh)
    made = sharding.create(Router, sharding.FSDP, mesh=mesh, axes={"gates": ("embed", None)})
    assert made.gates[...].sharding == NamedSharding(mesh, P("fsdp", None))
    axes = {"gates": (("experts", "fan_in"), None)}
    made = sharding.create(Router, {"experts": "tensor"} | sharding.FSDP, mesh=mesh, axes=axes)
    assert made.gates[...].sharding == NamedSharding(mesh, P(("tensor", "fsdp"), None))


def test_a_kernel_whose_rows_are_not_divided_is_cut_by_columns():
    """A kernel's 12 rows are sharded by one mesh axis, not by both, which do not divide them; 13 rows are an error."""
    narrow = dataclasses.replace(LLAMA, intermediate_size=12)
    model = nnx.eval_shape(lambda: layers.Llama(narrow, separate_qkv=True, rngs=nnx.Rngs(0)))
    specs = by_path(sharding.parameter_specs(model, sharding.FSDP_TENSOR, mesh=mesh_of(fsdp=4, tensor=2)))
    assert specs["layers.0.mlp.down.kernel"] == P("tensor", "fsdp")
    assert specs["layers.0.attention.out.kernel"] == P(("tensor", "fsdp"), None)
    adapted = layers.Llama(narrow, separate_qkv=True, rngs=nnx.Rngs(0))
    layers.add_lora(adapted, 4, targets=("down",), rngs=nnx.Rngs(0))
    specs = by_path(sharding.parameter_specs(adapted, sharding.FSDP_TENSOR, mesh=mesh_of(fsdp=4, tensor=2)))
    assert specs["layers.0.mlp.down.lora_a"] == P("tensor", None)
    odd = dataclasses.replace(LLAMA, intermediate_size=13)
    model = nnx.eval_shape(lambda: layers.Llama(odd, separate_qkv=True, rngs=nnx.Rngs(0)))
    refused = r"mlp\.down.* \(13, 16\), whose axis 'mlp' and 'fan_in' of 13 .* tensor=2 x fsdp=4"
    with pytest.raises(ValueError, match=refused):
        sharding.parameter_specs(model, sharding.FSDP_TENSOR, mesh=mesh_of(fsdp=4, tensor=2))


def test_refusals():
    uneven = dataclasses.replace(LLAMA, vocab_size=33)
    mesh = mesh_of(tensor=2)
    with pytest.raises(ValueError, match=r"embed.embedding has shape \(33, 16\), whose axis 'vocab' of 33 .* tensor=2"):
        sharding.create(lambda: layers.Llama(uneven, rules=sharding.TENSOR, rngs=nnx.Rngs(0)), mesh=mesh)
    with (
        jax.set_mesh(mesh_of(AxisType.Explicit, tensor=2)),
        pytest.raises(ValueError, match="'length' by tensor, an exp"),
    ):
        MODELS["llama"](rules=sharding.SEQUENCE).loss(TOKENS, TOKENS)
    with pytest.raises(ValueError, match="create wants a mesh"):
        sharding.create(MODELS["llama"])
    with pytest.raises(ValueError, match="rules give names of axes the names of mesh axes; got 'batch': 1"):
        MODELS["llama"](rules={"batch": 1})
