"""`coda.fuse`: the row sums that a loop's step, or a checkpoint, begins with come from what makes the array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coda_jax as coda
from coda_jax.jaxprs.walk import equations, num_carried
from tests.test_fuse import largest_error

pytestmark = pytest.mark.filterwarnings("ignore:gemm:coda_jax.FallbackWarning")
LAYERS, B, T, D, F = 3, 2, 40, 72, 88


def rms_norm(x, scale):
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    rstd = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
    return (wide * rstd * scale).astype(x.dtype)


def fast_layer_norm(x, scale):
    """With its variance as the mean of squares less the square of the mean, as flax has it."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    mean, square = (jnp.mean(y, axis=-1, keepdims=True) for y in (wide, wide * wide))
    return ((wide - mean) * jax.lax.rsqrt(square - mean * mean + 1e-6) * scale).astype(x.dtype)


def layer_norm(x, scale):
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    return (centred * jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + 1e-6) * scale).astype(x.dtype)


def layer_of(norm):
    def layer(x, w):
        h = norm(x, w["scale"])
        return x + jax.nn.silu(h @ w["up"].astype(x.dtype)) @ w["down"].astype(x.dtype)

    return layer


def scanned(layer, **options):
    return lambda x, w: jax.lax.scan(lambda x, w: (layer(x, w), jnp.sum(x)), x, w, **options)[0]


def in_turn(layer):
    def layers(x, w):
        for i in range(LAYERS):
            x = layer(x, jax.tree.map(lambda y, i=i: y[i], w))
        return x

    return layers


def in_loops(layer):
    def outer(x, w):
        return scanned(layer)(x, jax.tree.map(lambda y: y[None], w)), None

    return lambda x, w: jax.lax.scan(outer, x, w)[0]


FORMS = {
    "loop": scanned,
    "backwards": lambda layer: scanned(layer, reverse=True),
    "checkpoints": lambda layer: in_turn(jax.checkpoint(layer)),
    "checkpoints with flags": lambda layer: in_turn(jax.checkpoint(layer, prevent_cse=(True, False))),
    "loop of checkpoints": lambda layer: scanned(jax.checkpoint(layer)),
    "loop of a policy": lambda layer: scanned(
        jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
    ),
    "loop of fused layers": lambda layer: scanned(coda.fuse(layer)),
    "fused layers": lambda layer: in_turn(coda.fuse(layer)),
    "loops": in_loops,
}
DOORS = {
    "grad(fuse)": lambda f: jax.value_and_grad(coda.fuse(f), (0, 1)),
    "fuse(grad)": lambda f: coda.fuse(jax.value_and_grad(f, (0, 1))),
}


def loss_of(layers):
    """The norm behind the last layer reads the same sums."""

    def loss(x, w):
        return jnp.sum(jnp.sin(rms_norm(layers(x, w), jnp.linspace(0.5, 1.5, D).astype(x.dtype)).astype(w["up"].dtype)))

    return loss


def arguments(dtype=jnp.float32):
    generator = np.random.default_rng()

    def normal(*shape, mean=0.0):
        return jnp.asarray(mean + generator.standard_normal(shape) / shape[-2] ** 0.5, jnp.float32)

    w = {"scale": normal(LAYERS, D, mean=1.0), "up": normal(LAYERS, D, F), "down": normal(LAYERS, F, D)}
    return (3 * normal(B, T, D) + 0.2).astype(dtype), w


def passes_over_rows(f, *types):
    """The sums over the columns of the stream in passes of XLA's, forward, with how often each is executed."""
    every = coda.explain(f, *types, platform="cuda").passes.items()
    stream = f"bfloat16[{B},{T},{D}]"
    return sum(n for one, n in every if one.operation == "mul+reduce_sum" and one.array == stream)


OTHERS = [(norm, form) for norm in (fast_layer_norm, layer_norm) for form in ("loop", "loop of checkpoints")]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(("norm", "form"), [*((rms_norm, form) for form in FORMS), *OTHERS])
def test_values_and_gradients(norm, form, door):
    loss, (x, w) = loss_of(FORMS[form](layer_of(norm))), arguments()
    found = jax.jit(DOORS[door](loss))(x, w)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda y: jnp.asarray(np.asarray(y), jnp.float64), (x, w))
        exact = jax.jit(jax.value_and_grad(loss_of(in_turn_as(form)(layer_of(norm))), (0, 1)))(*wide)
        exact = jax.tree.map(np.float32, exact)
    assert largest_error(found, exact) < 1e-5


def in_turn_as(form):
    """The layers one after the other, in the order of a form."""
    if form != "backwards":
        return in_turn
    return lambda layer: lambda x, w: in_turn(layer)(x, jax.tree.map(lambda y: y[::-1], w))


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("form", FORMS)
def test_one_pass_sums_the_first_stream_and_epilogues_the_others(form, door):
    types = jax.tree.map(lambda y: jax.ShapeDtypeStruct(y.shape, y.dtype), arguments(jnp.bfloat16))
    assert passes_over_rows(DOORS[door](loss_of(FORMS[form](layer_of(rms_norm)))), *types) == 1


def carried(f, *args):
    """How many arrays the loops of a function carry."""
    every = [e for e, _ in equations(jax.make_jaxpr(f)(*args).jaxpr) if e.primitive.name == "scan"]
    return list(map(num_carried, every))


def ends_in_products(x, w):
    return rms_norm(x, w["scale"]) @ w["up"] @ w["down"]


@pytest.mark.parametrize(
    ("step", "is_normed", "count"),
    [
        (lambda x, w: jnp.flip(x, 0), True, 1),  # no product makes what is carried
        (lambda x, w: x + x @ w["up"] @ w["down"], False, 1),  # nothing needs sums
        (ends_in_products, False, 2),
        (ends_in_products, True, 2),
    ],
)
def test_what_a_loop_carries(step, is_normed, count):
    def f(x, w):
        def body(x, w):
            return step(x, w), jnp.sum((rms_norm(x, w["scale"]) if is_normed else x) @ w["up"])

        return jax.lax.scan(body, x, w)

    assert carried(coda.fuse(f), *arguments()) == [count]


@pytest.mark.parametrize("door", [lambda f: jax.grad(coda.fuse(f)), lambda f: coda.fuse(jax.grad(f))])
@pytest.mark.parametrize("form", ["loop", "checkpoints"])
def test_a_gradient_of_a_gradient(form, door):
    loss, (x, w) = loss_of(FORMS[form](layer_of(rms_norm))), arguments()

    def second(first):
        return jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(first(x, w)))))(x)

    assert largest_error(second(door(loss)), second(jax.grad(loss))) < 1e-5
