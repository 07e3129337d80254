"""Layers that train in 8 bits by a recipe: values, what is rounded, and the state of delayed scaling."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as orbax
import pytest
from flax import linen as nn
from flax import nnx

import coda_jax as coda
import flax_layers as layers
from coda_jax.jaxprs.walk import equations_of
from coda_jax.primitives.gemm_primitive import PRIMITIVES
from flax_layers import fp8, linen, sharding
from flax_layers.checkpoints import load_hf_folder, save_hf_folder
from tests.test_block_fp8 import distance

pytestmark = pytest.mark.usefixtures("quick_to_compile")
CURRENT, DELAYED = coda.fp8.Recipe(), coda.fp8.Recipe(scaling="delayed", history=3)
WIDTH, LAYERS = 64, 2
CONFIG = layers.LlamaConfig(
    vocab_size=96,
    hidden_size=WIDTH,
    intermediate_size=96,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
)
TOKENS = np.random.default_rng(0).integers(0, 96, (2, 17))


def llama(recipe=None, seed=0, **options):
    return layers.Llama(CONFIG, fp8=recipe, rngs=nnx.Rngs(seed), **options)


def gpt2(recipe=None, **options):
    config = layers.GPT2Config(vocab_size=96, n_positions=32, n_embd=WIDTH, n_layer=LAYERS, n_head=4)
    return layers.GPT2(config, fp8=recipe, rngs=nnx.Rngs(0), **options)


def loss(model):
    return model.loss(TOKENS[:, :-1], TOKENS[:, 1:])


def step(model):
    return nnx.jit(nnx.value_and_grad(loss, argnums=nnx.DiffState(0, fp8.DIFFERENTIATED)))(model)


def flat(gradients):
    leaves = jax.tree.leaves(nnx.filter_state(gradients, nnx.Param))
    return np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in leaves])


@functools.cache
def of_float32(make):
    value, gradients = step(make())
    return float(value), flat(gradients)


MODELS = {
    "llama": llama,
    "scanned": functools.partial(llama, scan_layers=True),
    "recomputed": functools.partial(llama, remat="full"),
    "separate": functools.partial(llama, separate_qkv=True, separate_gate_up=True),
    "gpt2": gpt2,
}


@pytest.mark.parametrize("recipe", [CURRENT, DELAYED], ids=["current", "delayed"])
@pytest.mark.parametrize("name", MODELS)
def test_models(name, recipe):
    """Losses and gradients as of float32, up to what three bits lose; every product of the layers has 8 bits."""
    model = MODELS[name](recipe)
    if recipe is DELAYED:
        fp8.calibrate(model, loss)
    value, gradients = step(model)
    exact, exact_gradients = of_float32(MODELS[name])
    assert value == pytest.approx(exact, rel=2e-3)
    assert 0.01 < distance(flat(gradients), exact_gradients) < 0.2


@pytest.mark.parametrize("make, count", [(llama, 4), (gpt2, 4)])
def test_all_products_but_the_head_s_have_factors_of_8_bits(make, count):
    graphdef, params = nnx.split(make(CURRENT))
    equations, _ = equations_of(jax.grad(lambda params: loss(nnx.merge(graphdef, params))), params)
    factors = [one.invars[0].aval.dtype for one, _ in equations if one.primitive in PRIMITIVES]
    of_8_bits = [dtype for dtype in factors if dtype == jnp.float8_e4m3fn]
    assert len(of_8_bits) == 3 * count * LAYERS
    assert len(factors) > len(of_8_bits)  # the head's


def test_a_linear_is_the_product_of_rounded_factors():
    x = jax.random.normal(jax.random.key(0), (2, 16, WIDTH))
    layer = layers.Linear(WIDTH, 32, use_bias=True, fp8=CURRENT, rngs=nnx.Rngs(0))
    layer.bias[...] = jnp.arange(32.0)
    plain = coda.block(lambda x, w: x @ w, fp8=CURRENT, implementation="xla")(x, layer.kernel[...]) + layer.bias[...]
    np.testing.assert_allclose(layer(x), plain, rtol=1e-5, atol=1e-5)


def test_histories_are_neither_parameters_nor_part_of_a_checkpoint():
    model, plain = llama(DELAYED), llama()
    parameters = [jax.tree.structure(nnx.to_pure_dict(nnx.state(x, nnx.Param))) for x in (model, plain)]
    assert parameters[0] == parameters[1]
    for a, b in zip(*(jax.tree.leaves(nnx.state(x, nnx.Param)) for x in (model, plain)), strict=True):
        np.testing.assert_array_equal(a, b)
    assert len(jax.tree.leaves(nnx.state(model, fp8.History))) == 4 * LAYERS
    assert not jax.tree.leaves(nnx.state(llama(CURRENT), fp8.History))


def test_training_by_delayed_scales_follows_that_in_float32():
    def trained(recipe, steps=8):
        model = llama(recipe)
        optimizer = nnx.Optimizer(model, optax.adamw(3e-3, weight_decay=0.1), wrt=nnx.Param)
        if recipe is DELAYED:
            fp8.calibrate(model, loss)
        values = []
        for _ in range(steps):
            value, gradients = step(model)
            optimizer.update(model, fp8.update(model, gradients))
            values.append(float(value))
        return np.array(values), model

    values, model = trained(DELAYED)
    exact, _ = trained(None)
    assert exact[-1] < exact[0] - 0.5
    np.testing.assert_allclose(values, exact, rtol=0.03)
    for history in jax.tree.leaves(nnx.state(model, fp8.History)):
        assert bool((history > 0).all())  # filled, and not decayed by the optimiser
        assert float(history[0, 0]) != float(history[0, 1])


def test_training_goes_on_from_a_checkpoint(tmp_path):
    """The same steps as without one; from one of the parameters alone after a calibration."""

    def made(seed):
        model = llama(DELAYED, seed)
        return model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)

    def trained(model, optimizer, steps):
        values = []
        for _ in range(steps):
            value, gradients = step(model)
            optimizer.update(model, fp8.update(model, gradients))
            values.append(float(value))
        return values

    first = made(0)
    fp8.calibrate(first[0], loss)
    trained(*first, 2)
    with orbax.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "whole", nnx.to_pure_dict(nnx.state(first)))
        checkpointer.save(tmp_path / "parameters", nnx.to_pure_dict(nnx.state(first[0], nnx.Param)))
    expected = trained(*first, 3)

    resumed, of_parameters = made(1), made(2)
    with orbax.StandardCheckpointer() as checkpointer:
        for name, of, state in (
            ("whole", resumed, nnx.state(resumed)),
            ("parameters", of_parameters[0], nnx.state(of_parameters[0], nnx.Param)),
        ):
            nnx.replace_by_pure_dict(state, checkpointer.restore(tmp_path / name, nnx.to_pure_dict(state)))
            nnx.update(of, state)
    assert trained(*resumed, 3) == expected
    fp8.calibrate(of_parameters[0], loss)
    (value,) = trained(*of_parameters, 1)  # its optimizer begins anew
    assert value == pytest.approx(expected[0], rel=0.01)


def test_a_forward_pass_changes_no_history():
    model = llama(DELAYED)
    fp8.calibrate(model, loss)
    before = nnx.to_pure_dict(nnx.state(model, fp8.History))
    nnx.jit(loss)(model)
    layers.generate(model, jnp.asarray(TOKENS[:, :5]), max_new_tokens=3)
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(model, fp8.History)), before)


def test_calibrated_scales_are_those_of_the_tensors():
    model = llama(DELAYED)
    fp8.calibrate(model, loss)
    assert model.layers[0].mlp.fp8 is DELAYED
    _, gradients = step(model)
    of_step = nnx.filter_state(gradients, fp8.History)
    for found, seen in zip(*(jax.tree.leaves(x) for x in (nnx.state(model, fp8.History), of_step)), strict=True):
        np.testing.assert_allclose(found[:, 0], seen[:, 0], rtol=0.3)


@pytest.mark.smoke
def test_saturated_names_the_history_that_clipped():
    model = llama(DELAYED)
    fp8.calibrate(model, loss)
    of_first = model.layers[0].mlp.gate_up_history
    of_first[...] = of_first[...].at[0].multiply(1e-3)
    _, gradients = step(model)
    found = fp8.saturated(model, gradients)
    assert len(found) == 4 * LAYERS
    clipped = {path: x.tolist() for path, x in found.items() if x.any()}
    assert clipped == {"layers.0.mlp.gate_up_history": [True, False]}


def test_a_cotangent_is_clipped_by_the_scale_of_its_own_dtype():
    """float8_e5m2 reaches 57344: with histories of ones, and headroom for 8 times that, scales are 32 and 4096."""
    recipe = dataclasses.replace(DELAYED, gradient_dtype=jnp.float8_e5m2)
    layer = layers.Linear(16, 16, fp8=recipe, rngs=nnx.Rngs(0))
    layer.fp8_history[...] = jnp.ones((2, 3))
    for cotangent, of_input, expected in (
        (13.0, 13.0, [False, False]),
        (15.0, 13.0, [False, True]),
        (13.0, 15.0, [True, False]),
    ):
        x = jnp.full((16, 16), of_input)
        of = lambda m: jnp.sum(m(x)) * cotangent  # noqa: B023, E731
        gradients = nnx.grad(of, argnums=nnx.DiffState(0, fp8.DIFFERENTIATED))(layer)
        assert fp8.saturated(layer, gradients)["fp8_history"].tolist() == expected


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("size, is_clipped", [(4.0, False), (100.0, True)])
def test_saturated_sees_clipping_in_microbatches(size, is_clipped, steps):
    """Their maxima add up to 16, beyond the range of 14; none of them is beyond it, but where one is 100."""
    layer = layers.Linear(16, 16, fp8=dataclasses.replace(DELAYED, history=steps), rngs=nnx.Rngs(0))
    layer.fp8_history[...] = jnp.ones((2, steps))
    gradient = nnx.grad(lambda m, x: 0.01 * jnp.sum(m(x)), argnums=nnx.DiffState(0, fp8.DIFFERENTIATED))
    of_steps = [gradient(layer, x * jnp.ones((16, 16))) for x in (size, *[4.0] * 3)]
    total = jax.tree.map(lambda *x: sum(x), *of_steps)
    of_total = True if steps == 1 else is_clipped  # with one number there is but the bound
    for gradients, expected in ((total, of_total), (of_steps[0], is_clipped)):
        assert fp8.saturated(layer, gradients)["fp8_history"].tolist() == [expected, False]


def test_a_layer_that_has_no_part_in_the_loss_keeps_its_history():
    used, unused = (layers.Linear(16, 16, fp8=DELAYED, rngs=nnx.Rngs(0)) for _ in range(2))
    model = nnx.List([used, unused])
    for layer in model:
        layer.fp8_history[...] = jnp.full((2, 3), 2.0)
    gradients = nnx.grad(lambda m: jnp.sum(m[0](jnp.ones((16, 16)))), argnums=nnx.DiffState(0, fp8.DIFFERENTIATED))(
        model
    )
    rest = fp8.update(model, gradients)
    assert jax.tree.leaves(rest) and not jax.tree.leaves(nnx.filter_state(rest, fp8.History))
    assert float(used.fp8_history[0, 0]) == 1.0 and float(unused.fp8_history[0, 0]) == 2.0


def test_a_layer_that_is_called_twice_has_a_bound_of_both_maxima():
    layer = layers.Linear(16, 16, fp8=DELAYED, rngs=nnx.Rngs(0))
    layer.fp8_history[...] = jnp.ones((2, 3))
    x = jnp.ones((16, 16))
    of = lambda m: jnp.sum(m(x)) + jnp.sum(m(3 * x))  # noqa: E731
    fp8.update(layer, nnx.grad(of, argnums=nnx.DiffState(0, fp8.DIFFERENTIATED))(layer))
    np.testing.assert_array_equal(layer.fp8_history[...], [[4.0, 1.0, 1.0], [2.0, 1.0, 1.0]])


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_checkpoint_is_read_into_a_model_with_histories(tmp_path, is_cut):
    """They are empty, on all devices of the mesh that has the parameters, and are filled by calibration."""
    load = functools.partial(load_hf_folder, tmp_path / "model", fp8=DELAYED)
    model = llama()
    save_hf_folder(model, tmp_path / "model")
    if is_cut:
        mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
        where = sharding.parameter_shardings(model, mesh, sharding.FSDP)
        for shardings in (where, lambda path, leaf: jax.NamedSharding(mesh, jax.P())):
            found = load(shardings=shardings)
            history = found.layers[1].mlp.gate_up_history[...]
            assert history.sharding.is_fully_replicated and len(history.sharding.device_set) == 4
    else:
        found = load()
    assert not any(jnp.any(x) for x in jax.tree.leaves(nnx.state(found, fp8.History)))
    fp8.calibrate(found, loss)
    assert all(jnp.any(x) for x in jax.tree.leaves(nnx.state(found, fp8.History)))
    assert float(loss(found)) == pytest.approx(float(loss(model)), rel=2e-3)
    save_hf_folder(found, tmp_path / "again")
    assert float(loss(load_hf_folder(tmp_path / "again"))) == pytest.approx(float(loss(model)), rel=1e-6)


def test_a_frozen_base_under_adapters_has_no_weight_gradient():
    model = llama(CURRENT)
    layers.add_lora(model, 4, rngs=nnx.Rngs(1))
    graphdef, lora, rest = nnx.split(model, nnx.LoRAParam, ...)
    equations, _ = equations_of(jax.grad(lambda lora: loss(nnx.merge(graphdef, lora, rest))), lora)
    shapes = [one.outvars[0].aval.shape for one, _ in equations if one.primitive in PRIMITIVES]
    factors = [one.invars[0].aval.dtype for one, _ in equations if one.primitive in PRIMITIVES]
    assert factors.count(np.dtype(jnp.float8_e4m3fn)) <= 2 * 4 * LAYERS
    assert (WIDTH, 2 * 96) not in shapes


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: llama("e4m3"), TypeError, "fp8='e4m3' must be a coda.fp8.Recipe or None, or a seq"),
        (lambda: fp8.update(llama(DELAYED), nnx.grad(_of_norm)(llama(DELAYED))), ValueError, "no gradients of the"),
    ],
)
def test_errors(make, error, message):
    with pytest.raises(error, match=message):
        make()


def _of_norm(model):
    return jnp.sum(model.norm.scale[...])


def test_layers_that_read_one_array_may_have_recipes_of_their_own():
    """Keys in the compute dtype, beside queries and values in 8 bits."""
    attention = layers.Attention(WIDTH, 4, separate_qkv=True, fp8=CURRENT, rngs=nnx.Rngs(0))
    plain = layers.Attention(WIDTH, 4, separate_qkv=True, rngs=nnx.Rngs(0))
    attention.key.fp8 = None
    x = jax.random.normal(jax.random.key(0), (2, 16, WIDTH))
    graphdef, params = nnx.split(attention)
    equations, _ = equations_of(lambda params, x: nnx.merge(graphdef, params)(x), params, x)
    factors = [one.invars[0].aval.dtype for one, _ in equations if one.primitive in PRIMITIVES]
    assert sorted(map(str, factors)) == ["float32", *["float8_e4m3fn"] * 3]
    assert 0.01 < distance(attention(x), plain(x)) < 0.2


@pytest.mark.smoke
def test_recipes_of_single_layers():
    """One layer of a model of one's own takes a recipe as its keyword: its products' factors are of 8 bits."""
    x = jnp.ones((2, 16, WIDTH))
    rngs = nnx.Rngs(0)
    made = (
        layers.GatedMLP(WIDTH, 96, fp8=CURRENT, rngs=rngs),
        layers.MLP(WIDTH, 96, fp8=CURRENT, rngs=rngs),
        layers.Attention(WIDTH, 4, fp8=CURRENT, rngs=rngs),
        layers.LlamaBlock(WIDTH, 96, 4, fp8=CURRENT, rngs=rngs),
        layers.models.gpt2_block(layers.GPT2Config(n_embd=WIDTH, n_head=4), fp8=CURRENT, rngs=rngs),
    )
    for layer in made:
        graphdef, params = nnx.split(layer)
        equations, _ = equations_of(lambda params, x, graphdef=graphdef: nnx.merge(graphdef, params)(x), params, x)
        factors = [one.invars[0].aval.dtype for one, _ in equations if one.primitive in PRIMITIVES]
        assert factors and set(factors) == {np.dtype(jnp.float8_e4m3fn)}


@pytest.mark.parametrize("make", [llama, gpt2])
def test_recipes_of_some_layers(make):
    """The last layer in float32: its products have no factors of 8 bits, and no history."""
    model = make([DELAYED, None])
    graphdef, params = nnx.split(model)
    equations, _ = equations_of(lambda params: loss(nnx.merge(graphdef, params)), params)
    factors = [one.invars[0].aval.dtype for one, _ in equations if one.primitive in PRIMITIVES]
    assert factors.count(np.dtype(jnp.float8_e4m3fn)) == 4
    assert {path[1] for path, _ in nnx.to_flat_state(nnx.state(model, fp8.History))} == {0}
    with pytest.raises(ValueError, match="1 recipes for 2 layers"):
        make([DELAYED])
    with pytest.raises(
        ValueError, match=r"scan_layers must be False for others: fp8 is Recipe\(.*\) in layer 0, None in layer 1"
    ):
        llama([DELAYED, None], scan_layers=True)


def test_linen_trains_by_histories():
    """Three steps have the losses of the nnx module, whose histories the last ones are."""
    module, learning_rate = linen.Llama(config=CONFIG, fp8=DELAYED), 0.1
    variables = jax.jit(module.init)(jax.random.key(0), TOKENS)
    params, histories = nn.meta.unbox(variables["params"]), variables[fp8.COLLECTION]
    model = llama(DELAYED)
    nnx.update(model, nn.meta.unbox(variables["params"]))

    @jax.jit
    def linen_step(params, histories):
        def of_both(params, histories):
            variables = {"params": params, fp8.COLLECTION: histories}
            return module.apply(variables, TOKENS[:, :-1], TOKENS[:, 1:], nnx_method="loss")

        value, (grads, maxima) = jax.value_and_grad(of_both, argnums=(0, 1))(params, histories)
        return value, optax.apply_updates(params, descent(grads)), fp8.next_histories(histories, maxima)

    def descent(grads):
        return jax.tree.map(lambda x: -learning_rate * x, grads)

    for _ in range(3):
        value, params, histories = linen_step(params, histories)
        expected, gradients = step(model)
        nnx.update(model, optax.apply_updates(nnx.state(model, nnx.Param), descent(fp8.update(model, gradients))))
        assert value == pytest.approx(float(expected), rel=1e-5)
    assert jnp.all(histories["layers"][1]["mlp"]["gate_up_history"] > 0)
    np.testing.assert_allclose(
        histories["layers"][1]["mlp"]["gate_up_history"], model.layers[1].mlp.gate_up_history[...], rtol=1e-4
    )


def test_one_product_of_a_block_has_a_recipe():
    x, w = jax.random.normal(jax.random.key(0), (16, 32)), jax.random.normal(jax.random.key(1), (32, 32))
    found = coda.block(lambda x, w: x.matmul(w, fp8=CURRENT))(x, w)
    np.testing.assert_allclose(found, coda.block(lambda x, w: x @ w, fp8=CURRENT)(x, w), rtol=1e-6)
