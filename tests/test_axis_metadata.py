"""Names of axes as metadata: on every parameter, of linen's variables, of stacked layers; nothing else changes."""

import contextlib
import operator
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx, serialization
from jax.sharding import AxisType

import flax_layers as layers
from flax_layers import linen, sharding
from flax_layers.axis_metadata import NamedAxes, name_parameters
from flax_layers.axis_names import first_name
from tests.test_sharding import MODELS, by_path, mesh_of

P = jax.P
SIZES = {"in_features": 16, "hidden_features": 24, "num_heads": 2}
BLOCK = linen.LlamaBlock(**SIZES)
X = jax.random.normal(jax.random.key(0), (2, 4, 16))
KEY = jax.random.key(1)


def names_by_path(model):
    return {".".join(map(str, path)): x for path, x in nnx.to_flat_state(nnx.state(model, nnx.Param))}


def without_names(model):
    """The model as it was before its parameters had names."""
    for _, param in nnx.iter_graph(model):
        if isinstance(param, nnx.Param):
            param.del_metadata("axis_names")
            param.del_metadata("linen_meta_type")
    return model


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_has_names(name):
    """Also with adapters, and without them again; names lay a parameter as its path does."""
    model = MODELS[name]()

    def check():
        named = names_by_path(model)
        for path, param in named.items():
            assert len(param.axis_names) == param.ndim, path
            stacked = name == "scanned" and path.startswith("layers.")
            assert (param.axis_names[0] == "layers") == stacked, path
        mesh, pure = mesh_of(fsdp=2, tensor=2), nnx.as_pure(nnx.state(model))
        specs = by_path(sharding.parameter_specs(model, sharding.FSDP_TENSOR, mesh=mesh))
        assert specs == by_path(sharding.parameter_specs(pure, sharding.FSDP_TENSOR, mesh=mesh))
        return {path: param.axis_names for path, param in named.items()}

    expected = check()
    layers.add_lora(model, 4, rngs=nnx.Rngs(0))
    assert len(check()) > len(expected)
    layers.merge_lora(model)
    assert check() == expected


@pytest.mark.parametrize(
    "name, options, x",
    [
        ("RMSNorm", {"num_features": 16}, X),
        ("GatedMLP", {"in_features": 16, "hidden_features": 24, "separate_gate_up": True}, X),
        ("Attention", {"in_features": 16, "num_heads": 2, "use_bias": True, "separate_qkv": True, "qk_norm": True}, X),
        ("LlamaBlock", SIZES, X),
        ("LMHead", {"in_features": 16, "vocab_size": 24}, X),
        (
            "Llama",
            {"config": layers.LlamaConfig(24, 16, 24, num_hidden_layers=2, num_attention_heads=2)},
            jnp.zeros((2, 4), jnp.int32),
        ),
    ],
)
def test_linen_s_variables_have_the_names_of_the_nnx_module(name, options, x):
    abstract = jax.eval_shape(getattr(linen, name)(**options).init, KEY, x)
    specs = nn.get_partition_spec(abstract)["params"]
    module = nnx.eval_shape(lambda: getattr(layers, name)(**options, rngs=nnx.Rngs(5)))
    expected = {path: P(*map(first_name, x.axis_names)) for path, x in names_by_path(module).items()}
    assert by_path(specs) == expected and all(any(spec) for spec in expected.values())


class Scanned(nn.Module):
    """Two blocks, stacked along an axis of choice."""

    axis: int
    options: dict

    @nn.compact
    def __call__(self, x):
        class Body(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return linen.LlamaBlock(**SIZES, name="block")(x), None

        scan = nn.scan(Body, variable_axes={"params": self.axis}, split_rngs={"params": True}, length=2, **self.options)
        return scan(name="layers")(x, None)[0]


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", ["layers", "blocks", None])
def test_the_axis_of_a_scan(axis, name):
    """It is never fsdp's, whatever it is called; without `metadata_params` it is called "layers"."""
    model = Scanned(axis, {} if name is None else {"metadata_params": {nn.PARTITION_NAME: name}})
    abstract = jax.eval_shape(model.init, KEY, X)
    specs = nn.get_partition_spec(abstract)["params"]["layers"]["block"]
    for spec, own in (
        (specs["attention"]["qkv"]["kernel"], ["embed", "heads"]),
        (specs["mlp"]["gate_up"], ["embed", None, "mlp"]),
        (specs["mlp"]["down"]["kernel"], ["mlp", "embed"]),
        (specs["mlp_norm"]["scale"], ["norm"]),
    ):
        own.insert(axis, name or "layers")
        assert spec == P(*own)
    mesh = mesh_of(fsdp=4)
    params = sharding.parameter_specs(abstract, sharding.FSDP, mesh=mesh)["params"]["layers"]["block"]
    found = params["attention"]["qkv"]["kernel"].value, params["mlp"]["down"]["kernel"].value
    assert found == ((P("fsdp", None, None),) * 2 if axis else (P(None, "fsdp", None),) * 2)
    dims = layers.muon_dimension_numbers(abstract["params"])["layers"]["block"]
    kernel, gate_up = dims["attention"]["qkv"]["kernel"].value, dims["mlp"]["gate_up"].value
    assert (kernel.reduction_axis, kernel.output_axis) == ((0, 2) if axis else (1, 2))
    assert (gate_up.reduction_axis, gate_up.output_axis) == ((0, 3) if axis else (1, 3))


@pytest.mark.slow
def test_a_scan_of_variables_with_and_without_names():
    """Equal values, and equal gradients, which have the names of what they are gradients of."""
    model = Scanned(1, {"metadata_params": {nn.PARTITION_NAME: "layers"}})
    variables = jax.jit(model.init)(KEY, X)
    gradient = jax.jit(jax.grad(lambda variables: jnp.sum(model.apply(variables, X) ** 2)))
    got, expected = gradient(variables), gradient(nn.unbox(variables))
    assert nn.get_partition_spec(got) == nn.get_partition_spec(variables)
    jax.tree.map(np.testing.assert_array_equal, nn.unbox(got), expected)


def test_stacks_along_another_axis_are_refused_without_axes():
    model = Scanned(1, {})
    abstract, mesh = nn.unbox(jax.eval_shape(model.init, KEY, X)), mesh_of(fsdp=2)
    refused = r"kernel of shape \(16, 2, 48\) and \S*kernel of shape \(16, 2, 16\) .* sizes of 'layers' or of 'embed'"
    with pytest.raises(ValueError, match=refused):
        sharding.parameter_specs(abstract, sharding.FSDP, mesh=mesh)
    axes = {
        "qkv.kernel": ("embed", "layers", "heads"),
        "out.kernel": ("heads", "layers", "embed"),
        "gate_up": ("embed", "layers", None, "mlp"),
        "down.kernel": ("mlp", "layers", "embed"),
        "scale": ("norm", "layers"),
    }
    specs = by_path(sharding.parameter_specs(abstract, sharding.FSDP, mesh=mesh, axes=axes))
    assert specs["params.layers.block.mlp.gate_up"] == P("fsdp", None, None, None)

    @nnx.vmap(in_axes=0, out_axes=1)
    def stacked(key):
        return layers.LlamaBlock(16, 24, num_heads=2, rngs=nnx.Rngs(key))

    with pytest.raises(ValueError, match="sizes of 'layers' or of 'embed' differ"):
        sharding.parameter_specs(stacked(jax.random.split(KEY, 2)), sharding.FSDP, mesh=mesh)


def test_the_axis_of_an_nnx_transformation():
    named = {nnx.PARTITION_NAME: "layers", "axis_names": "layers"}
    keys = jax.random.split(KEY, 2)
    for axis, expected in ((0, ("layers", "embed", "heads")), (1, ("embed", "layers", "heads"))):

        @nnx.vmap(in_axes=0, out_axes=axis, transform_metadata=named)
        def stacked(key):
            return layers.LlamaBlock(16, 24, num_heads=2, rngs=nnx.Rngs(key))

        block = stacked(keys)
        assert block.attention.qkv.kernel.axis_names == expected
        specs = by_path(sharding.parameter_specs(block, sharding.FSDP, mesh=mesh_of(fsdp=2)))
        assert specs["mlp.gate_up"] == (P("fsdp", None, None, None) if axis else P(None, "fsdp", None, None))


# Of MaxText's configs/base.yml; its meshes have all of these axes, most of size 1.
MAXTEXT_RULES = (
    ["activation_vocab", ["tensor", "tensor_sequence"]],
    ["vocab", ["tensor", "tensor_sequence", "autoregressive"]],
    ["activation_heads", ["tensor", "tensor_sequence", "autoregressive"]],
    ["heads", ["tensor", "tensor_sequence", "autoregressive"]],
    ["q_heads", ["tensor", "tensor_sequence", "autoregressive"]],
    ["kv_heads", ["tensor", "tensor_sequence", "autoregressive"]],
    ["kv", []],
    ["activation_mlp", ["tensor", "tensor_sequence"]],
    ["activation_batch", ["data", "fsdp", "fsdp_transpose", "expert"]],
    ["activation_norm_length", ["tensor_sequence", "context"]],
    ["activation_embed", ["tensor"]],
    ["mlp", ["fsdp_transpose", "tensor", "tensor_sequence", "autoregressive"]],
    ["embed", ["fsdp", "fsdp_transpose", "context", "expert"]],
    ["embed", ["fsdp", "context", "expert"]],
    ["norm", ["tensor"]],
    ["layers", "stage"],
)
MAXTEXT_RULES = tuple((name, axes if isinstance(axes, str) else tuple(axes)) for name, axes in MAXTEXT_RULES)
MAXTEXT_AXES = {
    "data": 1,
    "stage": 1,
    "fsdp": 4,
    "fsdp_transpose": 1,
    "context": 1,
    "tensor": 2,
    "tensor_sequence": 1,
    "expert": 1,
    "autoregressive": 1,
}


class Decoder(nn.Module):
    """MaxText's: scanned along axis 1 under remat, its embedding its own, the block of these layers."""

    @nn.compact
    def __call__(self, tokens):
        init = nn.with_logical_partitioning(nn.initializers.normal(1.0), ("vocab", "embed"))
        x = nn.Embed(64, 32, embedding_init=init, name="token_embedder")(tokens)
        x = nn.with_logical_constraint(x, ("activation_batch", "activation_norm_length", "activation_embed"))

        class DecoderLayer(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                options = {"in_features": 32, "hidden_features": 64, "num_heads": 4, "num_kv_heads": 2}
                return linen.LlamaBlock(**options, name="block")(x), None

        scan = nn.scan(
            nn.remat(DecoderLayer),
            variable_axes={"params": 1},
            split_rngs={"params": True},
            length=3,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        x, _ = scan(name="layers")(x, None)
        x = linen.RMSNorm(num_features=32, name="decoder_norm")(x)
        return linen.LMHead(in_features=32, vocab_size=64, name="logits_dense")(x)


def bytes_a_device(tree):
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


@pytest.mark.slow
def test_a_maxtext_decoder_on_eight_devices():
    """Parameters and Adam's moments are made an eighth on each device, by MaxText's own steps, and a step is right."""
    mesh = mesh_of(**MAXTEXT_AXES)
    model, optimizer = Decoder(), optax.adam(1e-2)
    tokens = jax.random.randint(KEY, (8, 9), 0, 64)

    def init(key):
        params = model.init(key, tokens[:, :-1])["params"]
        return params, optimizer.init(params)

    def step(params, state):
        def loss(params):
            logits = model.apply({"params": params}, tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        value, gradient = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    expected = jax.jit(step)(*jax.jit(init)(KEY))
    with jax.set_mesh(mesh), nn.logical_axis_rules(MAXTEXT_RULES):
        abstract = jax.eval_shape(init, KEY)
        logical = nn.get_partition_spec(abstract)
        shardings = nn.logical_to_mesh_sharding(logical, mesh, MAXTEXT_RULES)
        # The other way to the same places.
        ours = sharding.parameter_shardings(abstract, mesh, MAXTEXT_RULES)
        for one, other, x in zip(*map(jax.tree.leaves, (ours, shardings, abstract)), strict=True):
            assert one.is_equivalent_to(other, x.ndim)
        made = nn.unbox(jax.jit(init, out_shardings=shardings)(KEY))  # MaxText unboxes its state
        stepped = jax.jit(step, out_shardings=(*shardings, None))(*made)
        stream = sharding.activation_spec((8, 8, 32), *sharding.STREAM)
        hidden = sharding.activation_spec((8, 8, 64), "batch", None, "mlp")
    assert sharding.mesh_axes(stream) == (*MAXTEXT_RULES[8][1], *MAXTEXT_RULES[9][1])
    assert "fsdp" in hidden[0] and "tensor" in hidden[2]
    with jax.set_mesh(mesh_of(AxisType.Explicit, **MAXTEXT_AXES)), nn.logical_axis_rules(MAXTEXT_RULES):
        assert sharding.activation_spec((8, 8, 32), *sharding.STREAM) == stream  # no axis of size 1 cuts the length
    total, device = sum(x.nbytes for x in jax.tree.leaves(made)), bytes_a_device(made)
    scales = 7 * 32 * 4 * 3  # two a layer and the last one's, of parameters and moments, cut by tensor alone
    assert device == (total - scales - 4) // 8 + scales // 2 + 4
    for got, want in zip(jax.tree.leaves(stepped), jax.tree.leaves(nn.unbox(expected)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    assert bytes_a_device(stepped[:2]) == device


@pytest.mark.slow
def test_linen_s_variables_are_used_as_arrays():
    variables = BLOCK.init(KEY, X)
    plain = linen.LlamaBlock(**SIZES, metadata_fn=nnx.Variable.get_value).init(KEY, X)
    jax.tree.map(np.testing.assert_array_equal, nn.unbox(variables), plain)
    box, array = variables["params"]["mlp"]["down"]["kernel"], plain["params"]["mlp"]["down"]["kernel"]
    assert isinstance(box, NamedAxes) and not isinstance(array, NamedAxes) and isinstance(array, jax.Array)
    assert (box.shape, box.dtype, box.ndim, box.sharding, len(box)) == ((24, 16), array.dtype, 2, array.sharding, 24)
    for function in (operator.add, operator.sub, operator.mul, operator.truediv, operator.lt):
        for other in (2.0, array, np.asarray(array), box):
            np.testing.assert_array_equal(function(box, other), function(array, nn.unbox(other)))
            np.testing.assert_array_equal(function(other, box), function(nn.unbox(other), array))
    of_arrays = (jnp.sum, np.asarray, jnp.asarray, operator.neg, list)
    for function in (*of_arrays, lambda x: x[1:, 0], lambda x: x @ x.T, lambda x: x**2):
        np.testing.assert_array_equal(function(box), function(array))
    assert (box == array).all() and not (box != array).any() and float(box[0, 0]) == float(array[0, 0])
    again = pickle.loads(pickle.dumps(box))
    assert again.names == box.names == (("mlp", "fan_in"), "embed")
    np.testing.assert_array_equal(again, array)
    assert nn.get_sharding(variables, mesh_of(fsdp=2))["params"]["mlp"]["gate_up"].spec == P(None, None, None)
    assert "Total Parameters: 2,208" in BLOCK.tabulate(KEY, X, console_kwargs={"width": 200})


def test_old_variables_of_linen():
    """Arrays without names, from a file or from memory, and files with what has names: flax's bytes are the same."""
    variables = BLOCK.init(KEY, X)
    plain = nn.unbox(variables)
    assert serialization.to_bytes(variables) == serialization.to_bytes(plain)
    zeros = jax.tree.map(jnp.zeros_like, variables)
    restored = jax.tree.map(jnp.asarray, serialization.from_bytes(zeros, serialization.to_bytes(plain)))
    assert nn.get_partition_spec(restored) == nn.get_partition_spec(variables)
    for given in (restored, plain):
        np.testing.assert_array_equal(BLOCK.apply(given, X), BLOCK.apply(variables, X))
    for given in (restored, plain):
        block = layers.LlamaBlock(**SIZES, rngs=nnx.Rngs(7))
        nnx.update(block, given["params"])
        np.testing.assert_allclose(block(X), BLOCK.apply(variables, X), rtol=1e-5, atol=1e-6)
        if given is restored:
            with pytest.raises(TypeError, match=r"nnx\.update\(module, nn\.meta\.unbox"):
                block.mlp_norm.scale[...] = jnp.ones(16)
        layers.add_lora(block, 4, rngs=nnx.Rngs(0))
        layers.merge_lora(block)
        block.mlp_norm.scale[...] = jnp.ones(16)


def test_other_bridges():
    """A linen module in nnx and back, and flax's own wrapper: names go along."""
    module = nnx.bridge.ToNNX(BLOCK, rngs=nnx.Rngs(0)).lazy_init(X)
    assert module.mlp["gate_up"].axis_names == ("embed", None, "mlp")
    assert module(X).shape == X.shape
    wrapped = nnx.bridge.to_linen(layers.LlamaBlock, **SIZES)
    variables = wrapped.init(KEY, X)
    assert nn.get_partition_spec(variables) == nn.get_partition_spec(BLOCK.init(KEY, X))
    np.testing.assert_array_equal(wrapped.apply(variables, X), BLOCK.apply(variables, X))


def trained(model):
    """Parameters and moments after a step of nnx.Optimizer."""
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    tokens = jax.random.randint(KEY, (4, 8), 0, 32)

    @nnx.jit
    def step(model, optimizer):
        optimizer.update(model, nnx.grad(lambda model: model.loss(tokens, tokens))(model))

    step(model, optimizer)
    return [*jax.tree.leaves(nnx.state(model)), *jax.tree.leaves(nnx.state(optimizer))]


@pytest.mark.parametrize("kind", [None, AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "scanned"])
def test_nothing_else_changes(name, kind):
    """Without a mesh, and under one whose axes no rule names: made, traced and trained bit for bit as without names."""
    with contextlib.nullcontext() if kind is None else jax.set_mesh(mesh_of(kind, x=2, y=2)):
        expected = trained(without_names(MODELS[name]()))
        got = trained(MODELS[name]())
        abstract = nnx.eval_shape(MODELS[name])
        sharded = nnx.get_partition_spec(nnx.state(abstract))
        assert all(spec == P() for spec in jax.tree.leaves(sharded))
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_states_from_before():
    """A state without names, as an old pickle, goes into a model; it lies as its paths say, and so do its moments."""
    model = MODELS["separate"]()
    nnx.update(model, nnx.state(without_names(MODELS["separate"]())))
    mesh = mesh_of(fsdp=2, tensor=2)
    specs = by_path(sharding.parameter_specs(model, sharding.FSDP_TENSOR, mesh=mesh))
    assert specs == by_path(sharding.parameter_specs(MODELS["separate"](), sharding.FSDP_TENSOR, mesh=mesh))
    layers.add_lora(model, 4, rngs=nnx.Rngs(0))
    trained(model)


def test_names_of_one_s_own():
    class Router(nnx.Module):
        def __init__(self):
            self.router = layers.Linear(16, 4, rngs=nnx.Rngs(0))
            self.out = layers.Linear(16, 16, rngs=nnx.Rngs(0))
            name_parameters(self, {"router.kernel": ("embed", "experts"), "out.kernel": ("experts", "embed")})

    router = Router()
    layers.add_lora(router, 2, targets=("out",), rngs=nnx.Rngs(0))
    rules = {"experts": "tensor", **sharding.FSDP}
    specs = by_path(sharding.parameter_specs(router, rules, mesh=mesh_of(fsdp=2, tensor=2)))
    assert specs["router.kernel"] == P("fsdp", "tensor") and specs["out.base_module.kernel"] == P("tensor", "fsdp")


@pytest.mark.slow
def test_an_initialiser_s_own_sharding_stays():
    init = nnx.with_partitioning(nnx.initializers.ones, ("x", None))
    with jax.set_mesh(mesh_of(x=2, y=2)):
        block = layers.LlamaBlock(16, 24, num_heads=2, kernel_init=init, rngs=nnx.Rngs(0))
        assert block.mlp.gate_up[...].sharding.spec == P("x", None, None)
        assert block.mlp.gate_up.axis_names == ("embed", None, "mlp")
        variables = linen.LlamaBlock(**SIZES, kernel_init=init).init(KEY, X)
        assert nn.get_partition_spec(variables)["params"]["attention"]["out"]["kernel"] == P("x", None)
