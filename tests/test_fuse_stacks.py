"""Loops over layers that are stacked along another axis than the first, under `coda.fuse`: no stack is moved."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding

import coda_jax as coda
from coda_jax.jaxprs.walk import equations
from tests.test_fuse import DOORS, largest_error, with_gradients

pytestmark = pytest.mark.filterwarnings("ignore:gemm:coda_jax.FallbackWarning")
D, F, LAYERS, ROWS = 32, 64, 3, 16


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape) / shape[0] ** 0.5, jnp.float32)


def stacks(axis):
    shapes = {"gate": (D, F), "up": (D, F), "down": (F, D)}
    weights = {name: normal(*shape, LAYERS, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    return {name: jnp.moveaxis(x, 2, axis) for name, x in weights.items()} | {"scale": 1 + normal(D, LAYERS, seed=4)}


X = normal(ROWS, D, seed=5) * ROWS**0.5


def layer(x, w):
    n = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * w["scale"]
    return x + (jax.nn.silu(n @ w["gate"]) * (n @ w["up"])) @ w["down"]


def moved(w, axis=1):
    return {name: jnp.moveaxis(x, axis if x.ndim > 2 else 1, 0) for name, x in w.items()}


def scanned(w, x, step=layer, **options):
    return lax.scan(lambda x, w: (step(x, w), None), x, w, **options)[0]


def square(x):
    return jnp.sum(jnp.square(x))


def with_keys(w, x):
    """Keys and numbers beside the layers, and a result that is stacked along the second axis too."""

    def step(x, each):
        w, key, number = each
        x = layer(x, w) * jax.random.bernoulli(key, 0.9, x.shape) + number
        return x, x

    keys = jax.random.split(jax.random.key(0), LAYERS)
    x, xs = lax.scan(step, x, (moved(w), keys, jnp.arange(LAYERS)))
    return square(x) + jnp.sum(jnp.sin(jnp.moveaxis(xs, 0, 1)))


def nested(w, x):
    """A loop over pairs of loops; all are stacked along the second axis."""
    pairs = {name: jnp.stack([y, y / 2], 1) for name, y in w.items()}
    return square(lax.scan(lambda x, w: (scanned(moved(w), x), None), x, moved(pairs))[0])


def twice(w, x):
    """Two loops over the same layers."""
    return square(scanned(moved(w), scanned(moved(w), x), reverse=True))


checkpoint = jax.checkpoint(layer)
saving = jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_saveable)
LOSSES = {
    "": lambda w, x: square(scanned(moved(w), x)),
    "reverse": lambda w, x: square(scanned(moved(w), x, reverse=True)),
    "unroll": lambda w, x: square(scanned(moved(w), x, unroll=2)),
    "remat": lambda w, x: square(scanned(moved(w), x, checkpoint)),
    "remat of dots": lambda w, x: square(scanned(moved(w), x, saving)),
    "remat around": jax.checkpoint(lambda w, x: square(scanned(moved(w), x))),
    "keys": with_keys,
    "nested": nested,
    "twice": twice,
}


def moves(f, *args):
    """How many stacks of matrices are moved."""
    every = (e for e, _ in equations(jax.make_jaxpr(f)(*args).jaxpr))
    return sum(e.primitive.name == "transpose" and e.invars[0].aval.size >= LAYERS * D * F for e in every)


def kept(f, *args):
    return coda.explain(f, *args, platform="cuda", device="H100").totals.kept_bytes


@pytest.mark.parametrize("door", ["grad(fuse)", "fuse(grad)"])
@pytest.mark.parametrize("name", LOSSES)
def test_no_stack_is_moved(name, door):
    loss, w = LOSSES[name], stacks(1)
    plain, fused = with_gradients(loss), DOORS[door](loss)
    assert largest_error(jax.jit(fused)(w, X), jax.jit(plain)(w, X)) < 1e-5
    assert moves(plain, w, X) >= 6
    assert moves(fused, w, X) == 0


@pytest.mark.parametrize("door", ["grad(fuse)", "fuse(grad)"])
@pytest.mark.parametrize("step", [layer, checkpoint], ids=["", "remat"])
def test_as_much_is_kept_as_of_stacks_along_the_first_axis(step, door):
    along = [lambda w, x, axis=axis: square(scanned(moved(w, axis), x, step)) for axis in (0, 1)]
    first, second = (kept(DOORS[door](loss), stacks(axis), X) for axis, loss in enumerate(along))
    assert second == first


@pytest.mark.parametrize("door", ["grad(fuse)", "fuse(grad)"])
def test_layers_whose_elements_lie_apart_are_moved(door):
    """A step that read them where they lie would read all layers."""
    w = stacks(2)
    loss = lambda w, x: square(scanned(moved(w, 2), x))  # noqa: E731
    fused = DOORS[door](loss)
    assert moves(fused, w, X) == moves(with_gradients(loss), w, X)
    assert largest_error(jax.jit(fused)(w, X), jax.jit(with_gradients(loss))(w, X)) < 1e-5


def test_stacks_read_elsewhere_too_are_moved_once():
    def loss(w, x):
        layers = moved(w)
        return square(scanned(layers, x)) + jnp.sum(layers["gate"][0] * layers["gate"][1])

    fused = DOORS["grad(fuse)"](loss)
    assert largest_error(jax.jit(fused)(stacks(1), X), jax.jit(with_gradients(loss))(stacks(1), X)) < 1e-5
    assert moves(coda.fuse(loss), stacks(1), X) == 1


@pytest.mark.parametrize("argnum", [0, 1])
def test_one_argument_is_differentiated(argnum):
    loss, w = LOSSES[""], stacks(1)
    found, expected = (jax.jit(jax.grad(f, argnum))(w, X) for f in (coda.fuse(loss), loss))
    assert largest_error(found, expected) < 1e-5


def test_derivatives_of_higher_order():
    loss, w = LOSSES[""], stacks(1)
    of = lambda f: jax.grad(lambda w, x: square(jax.grad(f, 1)(w, x)), (0, 1))  # noqa: E731
    assert largest_error(jax.jit(of(coda.fuse(loss)))(w, X), jax.jit(of(loss))(w, X)) < 1e-5


def test_a_batch():
    loss, w = LOSSES[""], stacks(1)
    of = lambda f: with_gradients(lambda w, x: jnp.sum(jax.vmap(f, (None, 0))(w, jnp.stack([x, 2 * x]))))  # noqa: E731
    assert largest_error(jax.jit(of(coda.fuse(loss)))(w, X), jax.jit(of(loss))(w, X)) < 1e-5


def test_a_forward_mode_is_refused_by_name():
    with pytest.raises(NotImplementedError, match="fuse has no forward mode"):
        jax.jvp(lambda x: coda.fuse(LOSSES[""])(stacks(1), x), (X,), (X,))


def test_the_report_calls_it_a_loop():
    report = coda.fuse.report(lambda w, x, first: LOSSES[""](w, jax.nn.relu(x @ first)), stacks(1), X, normal(D, D))
    assert "the derivative of loop" in str(report)
    assert "the derivative of products" not in str(report)


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
@pytest.mark.parametrize("door", ["grad(fuse)", "fuse(grad)"])
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_sharded_stacks(kind, door):
    loss, w = LOSSES["remat"], stacks(1)
    expected = jax.jit(with_gradients(loss))(w, X)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType[kind],) * 2)
    with jax.set_mesh(mesh):
        columns = jax.P("data", None, "model") if kind == "Auto" else jax.P()
        specs = dict.fromkeys(w, jax.P()) | {"gate": columns, "up": columns}
        sharded = {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in w.items()}
        rows = jax.device_put(X, NamedSharding(mesh, jax.P("data")))
        fused = DOORS[door](loss)
        found = jax.jit(fused)(sharded, rows)
        assert moves(fused, sharded, rows) == 0
    assert largest_error(jax.tree.map(np.asarray, found), jax.tree.map(np.asarray, expected)) < 1e-5


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
def test_a_shard_map():
    loss, w = LOSSES[""], stacks(1)
    expected = jax.jit(with_gradients(loss))(w, X)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        specs = {"in_specs": (jax.P(), jax.P("data")), "out_specs": jax.P("data")}
        whole = lambda w, x: jnp.sum(jax.shard_map(lambda w, x: loss(w, x)[None], **specs)(w, x))  # noqa: E731
        for door in ("grad(fuse)", "fuse(grad)"):
            found = jax.jit(DOORS[door](whole))(w, X)
            assert largest_error(jax.tree.map(np.asarray, found), jax.tree.map(np.asarray, expected)) < 1e-5
