"""Models in fp8 on several devices by plain jit: values, gradients and histories are those of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

import coda_jax as coda
from flax_layers import Llama, LlamaConfig, fp8, sharding

pytestmark = pytest.mark.usefixtures("quick_to_compile")
CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=16,
)
TOKENS = np.random.default_rng(0).integers(0, 64, (4, 16))
SCHEMES = {
    "fsdp": (sharding.FSDP, {"fsdp": 4}),
    "data": (sharding.DATA, {"data": 4}),
    "tensor": (sharding.TENSOR, {"tensor": 2}),
    "sequence": (sharding.SEQUENCE, {"tensor": 2}),
    "fsdp and tensor": (sharding.FSDP_TENSOR, {"fsdp": 2, "tensor": 2}),
}


def llama(scaling, rules=None, **options):
    recipe = coda.fp8.Recipe(scaling=scaling, history=2)
    return Llama(CONFIG, fp8=recipe, rules=rules, **options, rngs=nnx.Rngs(0))


def loss(model, tokens):
    return model.loss(tokens[:, :-1], tokens[:, 1:])


def step(model, tokens):
    differentiated = nnx.DiffState(0, fp8.DIFFERENTIATED)
    return nnx.jit(nnx.value_and_grad(loss, argnums=differentiated))(model, tokens)


def flat(state):
    return {".".join(map(str, path)): np.asarray(x[...]) for path, x in nnx.to_flat_state(state)}


def calibrated(model, tokens):
    fp8.calibrate(model, lambda model: loss(model, tokens))
    return model


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("scaling", ["current", "delayed"])
@pytest.mark.parametrize("name", SCHEMES)
def test_a_step_on_several_devices_is_that_of_one(name, scaling, kind):
    """Sums in another order may round to the next of few values."""
    rules, sizes = SCHEMES[name]
    options = {"separate_qkv": "tensor" in sizes}
    alone = calibrated(llama(scaling, **options), TOKENS) if scaling == "delayed" else llama(scaling, **options)
    value, gradients = step(alone, TOKENS)
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), (kind,) * len(sizes))
    with jax.set_mesh(mesh):
        model = sharding.create(lambda: llama(scaling, rules, **options), rules, mesh=mesh)
        nnx.update(model, nnx.state(alone, fp8.History))
        tokens = jax.device_put(TOKENS, sharding.array_sharding(mesh, rules, "batch", None))
        found, sharded = step(model, tokens)
        sharded = flat(sharded)
    assert float(found) == pytest.approx(float(value), rel=1e-3)
    for path, exact in flat(gradients).items():
        assert np.linalg.norm(sharded[path] - exact) <= 0.03 * np.linalg.norm(exact), path


def test_training_under_fsdp_follows_one_device():
    """Also the optimiser's steps and the histories, which all devices have alike."""

    def trained(model, tokens):
        optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
        values = []
        for _ in range(4):
            value, gradients = step(model, tokens)
            optimizer.update(model, fp8.update(model, gradients))
            values.append(float(value))
        return values, flat(nnx.state(model, fp8.History))

    values, histories = trained(calibrated(llama("delayed"), TOKENS), TOKENS)
    mesh = jax.make_mesh((2,), ("fsdp",), (AxisType.Auto,))
    with jax.set_mesh(mesh):
        model = sharding.create(lambda: llama("delayed", sharding.FSDP), sharding.FSDP, mesh=mesh)
        tokens = jax.device_put(TOKENS, sharding.array_sharding(mesh, sharding.FSDP, "batch", None))
        found, sharded = trained(calibrated(model, tokens), tokens)
    assert values[-1] < values[0] - 0.1
    np.testing.assert_allclose(found, values, rtol=2e-3)
    for path, exact in histories.items():
        np.testing.assert_allclose(sharded[path], exact, rtol=0.1, err_msg=path)


def test_maxima_are_of_all_devices_under_shard_map():
    """The author, whose own code cuts the batch, takes pmax of the histories' gradients."""
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,))
    x = jax.random.normal(jax.random.key(0), (32, 64)) * jnp.linspace(1, 8, 32)[:, None]
    w, history = jax.random.normal(jax.random.key(1), (64, 32)) / 8, jnp.ones((2, 4))
    block = coda.block(lambda x, w, h: x.matmul(w, history=h), fp8=coda.fp8.Recipe(scaling="delayed"))

    def maxima(x, w, history):
        return jax.grad(lambda *args: jnp.sum(jnp.sin(block(*args))), 2)(x, w, history)

    def of_part(x, w, history):
        return jax.lax.pmax(maxima(x, w, jax.lax.pcast(history, ("data",), to="varying")), "data")

    specs = (jax.P("data"), jax.P(), jax.P())
    found = jax.jit(jax.shard_map(of_part, mesh=mesh, in_specs=specs, out_specs=jax.P()))(x, w, history)
    np.testing.assert_array_equal(found[0], maxima(x, w, history)[0])
    assert float(found[0, 0]) == float(jnp.max(jnp.abs(x)))
