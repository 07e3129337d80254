"""Loops that JAX has differentiated, under `coda.fuse`: the backward loop computes residuals again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coda_jax as coda
from coda_jax.fusion.residuals import cut
from coda_jax.jaxprs.walk import equations, num_carried
from tests import plain_models
from tests.test_fuse import largest_error

pytestmark = pytest.mark.filterwarnings("ignore:gemm:coda_jax.FallbackWarning")
D, F, STEPS = 8, 16, 3


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape) / shape[-2] ** 0.5, jnp.float32)


W = {"gate": normal(STEPS, D, F), "up": normal(STEPS, D, F, seed=1), "down": normal(STEPS, F, D, seed=2)}
X = normal(4, D, seed=3)


def layer(x, w):
    return x + (jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"]


def scan(w, x, **options):
    return jax.lax.scan(lambda x, w: (layer(x, w), None), x, w, **options)[0]


def square(f):
    return lambda *args: sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(f(*args)))


def bytes_stacked(f, *args):
    """The bytes that the forward loops of f stack."""
    every = [e for e, _ in equations(jax.make_jaxpr(f)(*args).jaxpr) if e.primitive.name == "scan"]
    return sum(x.aval.size * x.aval.dtype.itemsize for e in every[:1] for x in e.outvars[num_carried(e) :])


def checked(f, *args):
    """The bytes that gradients of f stack as JAX derives them, and fused, after both are compared."""
    plain = jax.value_and_grad(f, argnums=tuple(range(len(args))))
    fused = coda.fuse(plain)
    assert largest_error(jax.jit(fused)(*args), jax.jit(plain)(*args)) < 1e-5
    return bytes_stacked(plain, *args), bytes_stacked(fused, *args)


@pytest.mark.parametrize("options", [{}, {"reverse": True}, {"unroll": 2}], ids=["", "reverse", "unroll"])
def test_a_gated_layer_stacks_its_input_and_both_factors(options):
    before, after = checked(square(lambda w, x: scan(w, x, **options)), W, X)
    assert after == STEPS * 4 * 4 * (D + 2 * F) < before


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma", "bert"])
def test_models(name):
    block = plain_models.PLAIN[name]
    w = jax.tree.map(lambda x: jnp.stack([x, x]), plain_models.weights())
    loss = plain_models.loss_of(lambda w, x: jax.lax.scan(lambda x, w: (block(w, x), None), x, w)[0])
    before, after = checked(loss, w, plain_models.inputs())
    assert after < 0.75 * before


def test_a_derivative_of_a_derivative():
    def f(w, x):
        slopes = jax.grad(square(scan))(w, x)
        return square(lambda: slopes)()

    checked(lambda w, x: f(w, x) * 1e-3, W, X)
    checked(lambda x: jax.grad(lambda x: jax.grad(lambda x: jnp.sum(scan(W, x)))(x).sum())(x).sum(), X)


def test_stacked_arguments_are_read_where_they_lie():
    def f(w, xs):
        return jax.lax.scan(lambda c, x: ((c @ w) * jnp.sin(x), None), jnp.ones((4, D)), xs)[0]

    before, after = checked(square(f), normal(D, D), normal(5, 4, D))
    assert after == 5 * 4 * 4 * D * 2 < before  # what is carried, and the product


def test_residuals_with_other_readers_stay():
    def f(w, x):
        def step(x, w):
            gate, up = jax.nn.silu(x @ w["gate"]), jnp.tanh(x @ w["up"])
            return x + (gate * up) @ w["down"], (gate, jnp.exp(x))

        x, (gates, exps) = jax.lax.scan(step, x, w)
        return x, jnp.sin(gates), exps

    checked(square(f), W, X)


def test_consts_integers_and_masks():
    w = jax.tree.map(lambda x: x[0], W)

    def f(w, x, scale):
        def step(carry, number):
            x, count = carry
            key = jax.random.fold_in(jax.random.key(0), number)
            kept = jax.random.bernoulli(key, 0.5, x.shape)
            y = jnp.where(kept, layer(jax.nn.relu(x) * scale, w), x * (count % 2))
            return (y, count + number), jnp.sum(y, axis=1)

        (x, _), sums = jax.lax.scan(step, (x, 1), jnp.arange(5))
        return x, sums

    before, after = checked(square(f), w, X, normal(1, D, seed=5))
    assert after < before


def test_loops_one_after_the_other_and_inside_of_each_other():
    def f(w, x):
        def step(x, w):
            return jax.lax.scan(lambda x, _: (jnp.tanh(layer(x, w)), None), x, jnp.arange(2))[0], None

        return jax.lax.scan(step, scan(w, x), w)[0]

    checked(square(f), W, X)


def test_a_batch_and_a_checkpoint():
    batched = jax.vmap(scan, in_axes=(None, 0))
    checked(square(batched), W, jnp.stack([X, X + 1]))
    checkpointed = jax.checkpoint(layer)
    before, after = checked(square(lambda w, x: jax.lax.scan(lambda x, w: (checkpointed(x, w), None), x, w)[0]), W, X)
    assert after == before


def test_in_a_body_of_shard_map():
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jnp.tile(X, (jax.device_count(), 1))
    plain = jax.value_and_grad(square(scan), argnums=(0, 1))

    def step(w, x):
        value, (dw, dx) = plain(jax.lax.pcast(w, "data", to="varying") if hasattr(jax.lax, "pcast") else w, x)
        return jax.lax.psum(value, "data"), jax.tree.map(lambda x: jax.lax.psum(x, "data"), dw), dx

    specs = {"in_specs": (jax.P(), jax.P("data")), "out_specs": (jax.P(), jax.P(), jax.P("data"))}
    whole = jax.shard_map(step, mesh=mesh, **specs)
    assert largest_error(jax.jit(coda.fuse(whole))(W, x), jax.jit(whole)(W, x)) < 1e-5


def test_a_mesh_with_explicit_axes():
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    plain = jax.value_and_grad(square(scan), argnums=(0, 1))
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.tile(X, (jax.device_count(), 1)), jax.P("data"))
        w = jax.device_put(W, jax.P())
        found, expected = jax.jit(coda.fuse(plain))(w, x), jax.jit(plain)(w, x)
        assert largest_error(found, expected) < 1e-5
        assert jax.tree.map(lambda x: x.sharding.spec, found) == jax.tree.map(lambda x: x.sharding.spec, expected)


def test_sizes_that_are_symbols():
    (rows,) = jax.export.symbolic_shape("rows")
    fused = jax.jit(coda.fuse(jax.value_and_grad(square(scan))))
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), W)
    exported = jax.export.export(fused)(types, jax.ShapeDtypeStruct((rows, D), jnp.float32))
    assert largest_error(exported.call(W, X), jax.value_and_grad(square(scan))(W, X)) < 1e-5


def test_the_cut_is_the_least():
    """From the middle of an hourglass, and at the end where that is no more."""

    def body(a, b):
        wide = jnp.concatenate([a, b, a, b])  # 4 n
        thin = wide[:2]
        return thin * 2, jnp.tile(thin, 50), a @ b, jnp.sin(a @ b)

    jaxpr = jax.make_jaxpr(body)(jnp.zeros(10), jnp.zeros(10)).jaxpr
    flat = [e for e in jaxpr.eqns if e.primitive.name not in ("jit", "pjit")]
    makers = {x: e for e in flat if e.primitive.name != "dot_general" for x in e.outvars}
    sizes = {x.aval.shape for x in cut([v for v in jaxpr.outvars if v in makers], makers, [])}
    assert sizes == {(2,), ()}
    assert cut(jaxpr.outvars[:1], makers, jaxpr.invars) == []


def test_a_cut_through_a_long_chain_takes_no_time():
    def body(x, w):
        for _ in range(200):
            x, w = x * x + x, jnp.sin(w) * w
        return x, w

    jaxpr = jax.make_jaxpr(body)(1.0, 1.0).jaxpr
    makers = {v: e for e in jaxpr.eqns for v in e.outvars}
    assert cut(jaxpr.outvars, makers, jaxpr.invars[1:]) == [jaxpr.outvars[0]]
    assert cut(jaxpr.outvars, makers, jaxpr.invars) == []


def test_the_program_is_the_same_each_time():
    f = square(scan)
    texts = {str(jax.make_jaxpr(coda.fuse(jax.grad(f, argnums=(0, 1))))(W, X)) for _ in range(3)}
    assert len(texts) == 1
