"""`coda.fuse` over meshes: automatic and explicit axes, and shard_map."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding

import coda_jax as coda
from tests import plain_models
from tests.plain_models import loss_of, model, rms_norm
from tests.test_fuse import DOORS, counts, largest_error, with_gradients

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
COLUMNS = {"q", "k", "v", "up", "gate"}


def specs(w, is_tensor_parallel):
    """Weights sharded as under FSDP, or under FSDP and tensor parallelism."""
    if not is_tensor_parallel:
        return {name: jax.P("data") if x.ndim > 1 else jax.P() for name, x in w.items()}
    of_columns = {name: jax.P("data", "model") for name in COLUMNS}
    return {name: jax.P() for name in w} | of_columns | dict.fromkeys(("out", "down"), jax.P("model", "data"))


@pytest.mark.parametrize("door", ["grad(fuse)", "fuse(grad)"])
@pytest.mark.parametrize("kind, shape", [("Auto", (8, 1)), ("Auto", (4, 2)), ("Explicit", (8, 1))])
def test_a_sharded_model(kind, shape, door):
    loss, (w, x) = model("llama")
    x = jnp.concatenate([x, -x, 2 * x, x + 1])
    expected = jax.jit(with_gradients(loss))(w, x)
    mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(AxisType[kind],) * 2)
    with jax.set_mesh(mesh):
        sharded = {
            name: jax.device_put(w[name], NamedSharding(mesh, spec)) for name, spec in specs(w, shape[1] > 1).items()
        }
        rows = jax.device_put(x, NamedSharding(mesh, jax.P("data")))
        f, plain = DOORS[door](loss), with_gradients(loss)
        found, own = jax.jit(f)(sharded, rows), jax.jit(plain)(sharded, rows)
        assert counts(f, sharded, rows)[1] == 21
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(own), strict=True):
            assert jax.typeof(a).sharding == jax.typeof(b).sharding
    assert largest_error(jax.tree.map(np.asarray, found), jax.tree.map(np.asarray, expected)) < 1e-5


def block(w, x):
    return x + jax.nn.silu(rms_norm(x, w["norm_1"]) @ w["up"]) @ w["down"]


def test_an_explicit_sharding_of_a_result_stays():
    w, x = plain_models.weights(), jnp.concatenate([plain_models.inputs()] * 4)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        rows = jax.device_put(x, NamedSharding(mesh, jax.P("data")))
        found = jax.jit(coda.fuse(block))(w, rows)
        assert jax.typeof(found).sharding.spec == jax.P("data", None, None)
    assert largest_error(np.asarray(found), np.asarray(block(w, x))) < 1e-5


def in_shards(f, *, sums=False):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    body = (lambda w, x: jax.lax.pmean(f(w, x), "data")) if sums else f
    out = jax.P() if sums else jax.P("data")
    return jax.shard_map(body, mesh=mesh, in_specs=(jax.P(), jax.P("data")), out_specs=out)


@pytest.mark.smoke
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_a_body_of_shard_map(where):
    w, x = plain_models.weights(), jnp.concatenate([plain_models.inputs()] * 4)
    f = in_shards(coda.fuse(block)) if where == "inside" else coda.fuse(in_shards(block))
    assert largest_error(jax.jit(f)(w, x), block(w, x)) < 1e-5
    assert counts(f, w, x) == (0, 2)
    loss, plain = loss_of(f), loss_of(block)
    assert largest_error(jax.jit(with_gradients(loss))(w, x), with_gradients(plain)(w, x)) < 1e-5
    assert counts(with_gradients(loss), w, x) == (0, 6)


def test_a_body_of_shard_map_closes_over_an_array():
    def body(w, x):
        return coda.fuse(lambda x: block(w, x))(x)

    w, x = plain_models.weights(), jnp.concatenate([plain_models.inputs()] * 4)
    f = in_shards(body)
    assert largest_error(jax.jit(f)(w, x), block(w, x)) < 1e-5
    assert largest_error(*(jax.jit(with_gradients(loss_of(g)))(w, x) for g in (f, block))) < 1e-5


def test_a_collective_stays_where_it_is():
    w, x = plain_models.weights(), jnp.concatenate([plain_models.inputs()] * 4)
    f = coda.fuse(in_shards(block, sums=True))
    assert largest_error(jax.jit(f)(w, x), in_shards(block, sums=True)(w, x)) < 1e-5
    assert counts(f, w, x) == (0, 2) and "psum" in str(jax.make_jaxpr(f)(w, x))


def test_a_sharding_constraint_stays():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def f(w, x):
        h = jax.lax.with_sharding_constraint(jax.nn.silu(x @ w["up"]), NamedSharding(mesh, jax.P("data")))
        return h @ w["down"]

    w, x = plain_models.weights(), jnp.concatenate([plain_models.inputs()] * 4)
    assert largest_error(jax.jit(coda.fuse(f))(w, x), f(w, x)) < 1e-5
    assert "sharding_constraint" in str(jax.make_jaxpr(coda.fuse(f))(w, x))


def test_what_stands_between_two_collectives_varies_as_it_did():
    def f(w, x):
        y = jax.lax.psum(x @ w, "data")
        return jax.lax.all_gather(jnp.tanh(y @ w), "data")

    w, x = jnp.eye(8) + 0.1, jnp.sin(jnp.arange(512.0)).reshape(64, 8)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    g = jax.shard_map(f, mesh=mesh, in_specs=(jax.P(), jax.P("data")), out_specs=jax.P("data"))
    assert largest_error(jax.jit(coda.fuse(g))(w, x), jax.jit(g)(w, x)) < 1e-5


def dense(w, x, labels, mask):
    """Vectors, numbers, masks and bodies that vary over no axis of a mesh stand beside products that do."""
    h = jax.nn.relu(x @ w["up"] + w["bias"]) * w["scale"] * w["number"] + np.linspace(0, 1, 32, dtype=np.float32)
    h = jnp.where((labels % 2 == 0)[..., None], h, 0) * mask[..., None] + jnp.where(jnp.arange(32) < 9, 0.5, h)
    y = jax.lax.scan(lambda c, s: (jnp.tanh(c * s) + c, None), h @ w["down"], w["steps"])[0]
    return jax.checkpoint(lambda w, y: jnp.tanh(y @ w["up"] + w["bias"]) @ w["down"])(w, y)


def head_loss(w, x, labels, mask):
    losses = optax.softmax_cross_entropy_with_integer_labels(jax.nn.relu(x @ w["head"]), labels)
    return jnp.sum(jnp.where(mask, losses, 0)) / 32


def beside_products():
    generator = np.random.default_rng(0)
    shapes = {"up": (8, 32), "down": (32, 8), "head": (8, 1024), "steps": (2, 8), "bias": (32,), "scale": (32,)}
    w = {name: jnp.float32(0.3 * generator.standard_normal(shape)) for name, shape in (shapes | {"number": ()}).items()}
    x, labels = jnp.float32(generator.standard_normal((8, 4, 8))), jnp.arange(32).reshape(8, 4)
    return w, x, labels, labels % 3 == 0


@pytest.mark.parametrize("f", [dense, head_loss])
def test_what_varies_over_no_axis_stands_beside_what_does(f):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    sums = f is head_loss

    def on_mesh(f):
        body = (lambda *args: jax.lax.pmean(f(*args), "data")) if sums else f
        specs = jax.P(), *(jax.P("data"),) * 3
        return jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=jax.P() if sums else jax.P("data"))

    def step(f):
        return jax.value_and_grad(lambda *args: jnp.sum(jnp.sin(f(*args))), (0, 1))

    args = beside_products()
    plain = step(on_mesh(f))
    expected = jax.jit(plain)(*args)
    for g in (step(on_mesh(coda.fuse(f))), step(coda.fuse(on_mesh(f))), coda.fuse(plain)):
        assert largest_error(jax.jit(g)(*args), expected) < 1e-5


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("f", [dense, head_loss])
def test_what_stands_beside_products_over_explicit_axes(f, door):
    w, *arrays = beside_products()
    plain = with_gradients(lambda *args: jnp.sum(jnp.sin(f(*args))))
    expected = jax.jit(plain)(w, *arrays)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        w = {
            name: jax.device_put(x, NamedSharding(mesh, jax.P("data" if name in ("up", "down") else None)))
            for name, x in w.items()
            if x.ndim
        } | {"number": w["number"]}
        args = w, *(jax.device_put(x, NamedSharding(mesh, jax.P("data"))) for x in arrays)
        fused = DOORS[door](lambda *args: jnp.sum(jnp.sin(f(*args))))
        own, found = jax.eval_shape(plain, *args), jax.jit(fused)(*args)
        for a, b in zip(*map(jax.tree.leaves, (found, own)), strict=True):
            assert not b.ndim or jax.typeof(a).sharding == b.sharding
    assert largest_error(*(jax.tree.map(np.asarray, x) for x in (found, expected))) < 1e-5


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("of", ["step", "loss"])
def test_shardings_of_a_jitted_function_hold(of, kind):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType[kind],))
    w, x = plain_models.weights(), jnp.concatenate([plain_models.inputs()] * 4)
    whole, rows = NamedSharding(mesh, jax.P()), NamedSharding(mesh, jax.P("data"))
    cut = {name: rows if kind == "Auto" and x.ndim > 1 else whole for name, x in w.items()}

    def step(w, x):
        value, gradient = jax.value_and_grad(loss_of(block))(w, x)
        return value, jax.tree.map(lambda w, g: w - 0.1 * g, w, gradient), jnp.tanh(x)

    placed = {"in_shardings": (cut, rows), "donate_argnums": 0} if of == "step" else {"in_shardings": (cut, rows)}
    out = (whole, cut, whole if kind == "Auto" else rows) if of == "step" else whole
    jitted = jax.jit(step if of == "step" else loss_of(block), **placed, out_shardings=out)
    fused = coda.fuse(jitted)
    assert not any(one.reason for one in coda.fuse.report(fused, w, x).products) or kind == "Explicit"
    results = []
    for is_fused, f in enumerate((jitted, fused)):
        f = f if of == "step" else jax.value_and_grad(f)
        given = jax.device_put(jax.tree.map(jnp.copy, w), cut), jax.device_put(jnp.copy(x), rows)
        with jax.set_mesh(mesh):
            assert counts(f, *given)[1 - is_fused] == 0
            results.append((f(*given), [one.is_deleted() for one in jax.tree.leaves(given)]))
    (own, own_gone), (found, gone) = results
    assert gone == own_gone
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(own), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
    assert largest_error(jax.tree.map(np.asarray, found), jax.tree.map(np.asarray, own)) < 1e-5
