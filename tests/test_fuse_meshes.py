"""`coda.fuse` over meshes: automatic and explicit axes, and shard_map."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Format, Layout
from jax.lax import with_sharding_constraint
from jax.sharding import AxisType, NamedSharding, reshard

import coda_jax as coda
from coda_jax.fusion.losses import row_losses
from coda_jax.jaxprs.walk import equations
from tests import partitioned, plain_models
from tests.nvrtc import kernels, needs_nvrtc
from tests.plain_models import loss_of, model, rms_norm
from tests.test_fuse import DOORS, counts, joined, largest_error, relative_error, with_gradients
from tests.test_sharding_plans import matrices

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
        assert counts(f, sharded, rows)[1] == 18  # of 21, of which 3 and 2 are summed together
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


def test_varying_axes_are_kept_between_collectives():
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
def test_unvarying_and_varying_arrays_fuse_together(f):
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
def test_arrays_over_explicit_axes_keep_values_and_shardings(f, door):
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


# --- constraints

P, FREE = jax.P, jax.P.UNCONSTRAINED
STREAM, HIDDEN = P("data"), P("data", None, "model")
SPECS = {
    **dict.fromkeys(("x", "norm", "down", "out", "vector"), STREAM),
    **dict.fromkeys(("gate", "up", "inner", "hidden"), HIDDEN),
}


def marked_loss(mark):
    """The loss of an MLP block of which `mark(name, array)` constrains arrays, or names them."""

    def loss(w, x):
        x = mark("x", x)
        h = mark("norm", rms_norm(x, w["norm"]))
        gate, up = mark("gate", h @ w["gate"] + mark("bias", w["bias"])), mark("up", h @ mark("weight", w["up"]))
        hidden = mark("hidden", jax.nn.silu(mark("inner", 2 * gate)) * up)
        y = mark("out", x + mark("down", hidden @ w["down"])).astype(jnp.float32)
        return jnp.sum(mark("vector", jnp.mean(y * y, -1))) + jnp.sum(jnp.sin(y))

    return loss


def marked_heads(mark):
    """A loss of products that are split into heads, before attention and before elementwise operations."""

    def loss(w, x):
        q, k, v = (mark(name, (x @ w[name]).reshape(*x.shape[:-1], 4, 4)) for name in ("q", "k", "v"))
        turned = mark("turned", jnp.concatenate([jnp.sin(q[..., :2]), q[..., 2:]], -1))
        context = mark("context", jax.nn.dot_product_attention(turned, k, v))
        y = mark("out", context.reshape(x.shape) @ w["out"]) + jnp.tanh(mark("flat", turned.reshape(x.shape)))
        return jnp.sum(jnp.sin(y.astype(jnp.float32)))

    return loss


def marked_arguments(dtype=jnp.float32, width=16, hidden=32, rows=(8, 12)):
    generator = np.random.default_rng(0)
    shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width), "bias": (hidden,)}
    shapes |= {"norm": (width,)} | dict.fromkeys(("q", "k", "v", "out"), (width, width))
    w = {name: jnp.asarray(generator.standard_normal(shape) / shape[0] ** 0.5, dtype) for name, shape in shapes.items()}
    return w, jnp.asarray(generator.standard_normal((*rows, width)), dtype)


def meshes(kind=AxisType.Auto):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)


def to(specs, mesh=None):
    """A function that constrains the arrays of these names, to each spec in turn; over the mesh, or that in use."""

    def constrain(name, x):
        asked = specs.get(name, [])
        for spec in asked if isinstance(asked, list) else [asked]:
            x = with_sharding_constraint(x, spec if mesh is None else NamedSharding(mesh, spec))
        return x

    return constrain


def resharded(specs):
    return lambda name, x: reshard(x, specs[name]) if name in specs else x


def values_are_plains(loss, door, *args):
    """Whether a door's results have the types, the shardings over explicit axes and the values of plain JAX's."""
    plain = with_gradients(loss)
    found, expected = jax.jit(DOORS[door](loss))(*args), jax.jit(plain)(*args)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert jax.typeof(a).sharding == jax.typeof(b).sharding
    found, expected = (jax.tree.map(np.asarray, x) for x in (found, expected))
    if args[1].dtype == jnp.float32:
        return largest_error(found, expected) < 1e-5
    exact = jax.jit(plain)(*jax.tree.map(lambda x: x.astype(jnp.float32), args))
    errors = [relative_error(np.float32(joined(x)), np.asarray(joined(exact))) for x in (found, expected)]
    return errors[0] < 1.5 * errors[1] + 1e-3


def totals(loss, door, *args):
    """Bytes of passes and kept ones, products that are kernels and others, in 16 bits."""
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), args)
    found = coda.explain(DOORS[door](loss), *types, platform="cuda")
    return found.totals.passes_bytes, found.totals.kept_bytes, found.kernels, found.others


@pytest.mark.smoke
@pytest.mark.parametrize("door", ["grad(fuse)", "fuse(grad)"])
@pytest.mark.parametrize("names", [["hidden"], ["gate"], ["up"], ["norm"], ["x", "down", "out"], sorted(SPECS)])
def test_a_constraint_ends_no_fusion(names, door):
    args = marked_arguments(width=64, hidden=256, rows=(8, 96))
    with jax.set_mesh(meshes()):
        free, found = (totals(marked_loss(to({name: SPECS[name] for name in of})), door, *args) for of in ((), names))
    assert found == free


ON_SEVERAL = {"x": P(("data", "model")), "hidden": P("model", "data"), "out": P(None, None, "data")}
UNCONSTRAINED = {"x": P(FREE, "data"), "gate": P("data", FREE, "model"), "hidden": P(FREE), "norm": P("data", FREE)}
UNEVEN = {"gate": P(None, ("data", "model")), "hidden": P(None, "model", "data"), "vector": P(None, "data")}
WEIGHTS = {"weight": P(None, "model"), "bias": P("model"), "vector": P("data", "model")}
CONSTRAINED = {  # a loss, and specs of arrays in it
    "of all": (marked_loss, SPECS),
    "several mesh axes": (marked_loss, ON_SEVERAL),
    "unconstrained": (marked_loss, UNCONSTRAINED),
    "uneven": (marked_loss, UNEVEN),
    "in a row": (marked_loss, {name: [spec, P(None, "data"), spec] for name, spec in SPECS.items()}),
    "weights and vectors": (marked_loss, WEIGHTS),
    "heads": (marked_heads, dict.fromkeys(("q", "k", "v", "turned", "context", "flat"), HIDDEN)),
    "widths of heads": (marked_heads, {"q": P("data", None, None, "model"), "turned": P(None, None, "data", "model")}),
}


@pytest.mark.parametrize("door", ["grad(fuse)", "fuse(grad)"])
@pytest.mark.parametrize(
    "name, dtype", [*((name, "float32") for name in CONSTRAINED), ("of all", "bfloat16"), ("heads", "bfloat16")]
)
def test_constraints_change_no_value(name, dtype, door):
    (make, specs), args = CONSTRAINED[name], marked_arguments(jnp.dtype(dtype))
    with jax.set_mesh(meshes()):
        assert values_are_plains(make(to(specs)), door, *args)


@pytest.mark.parametrize("door", ["grad(fuse)", "fuse(grad)"])
def test_a_constraint_on_a_mesh_that_is_not_in_use(door):
    other = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    mark = to({"x": P("a"), "hidden": P("a", None, "b"), "gate": P(None, "b")}, other)
    loss, args = marked_loss(mark), marked_arguments()
    assert values_are_plains(loss, door, *args)
    assert counts(DOORS[door](loss), *args) == (0, 9)
    one, both = to(SPECS, meshes()), lambda name, x: mark(name, x) if name == "hidden" else one(name, x)
    assert values_are_plains(marked_loss(both), door, *args)  # which JAX takes in one function, but not in two


@pytest.mark.parametrize("door", ["grad(fuse)", "fuse(grad)"])
def test_a_constraint_of_a_layout_stays(door):
    mesh = meshes()
    formats = {"hidden": Format(Layout((1, 0, 2)), NamedSharding(mesh, HIDDEN))}
    formats["gate"] = Format(Layout((0, 1, 2)), NamedSharding(mesh, STREAM))
    loss = marked_loss(lambda name, x: with_sharding_constraint(x, formats[name]) if name in formats else x)
    args = marked_arguments()
    assert values_are_plains(loss, door, *args)
    assert counts(DOORS[door](loss), *args) == (0, 9)
    asked = [
        e.params["layout"] for e, _ in equations(jax.make_jaxpr(DOORS[door](loss))(*args).jaxpr) if "layout" in e.params
    ]
    assert formats["hidden"].layout in asked and formats["gate"].layout in asked


@pytest.mark.parametrize("door", ["grad(fuse)", "fuse(grad)"])
@pytest.mark.parametrize("name", sorted(SPECS))
def test_each_device_has_the_part_that_a_constraint_asks_for(name, door):
    """Without a constraint, arguments that are not sharded are multiplied whole on each device."""
    w, x = marked_arguments()
    w = {key: w[key] for key in ("norm", "gate", "bias", "up", "down")}

    def step(mark):
        f = DOORS[door](marked_loss(mark))
        return lambda *arrays: f(dict(zip(w, arrays, strict=False)), arrays[-1])

    arrays = [*w.values(), x]
    results, parts, _ = partitioned.run(step(to({name: SPECS[name]})), arrays, [()] * len(arrays), data=4)
    assert largest_error(results, jax.device_get(jax.jit(with_gradients(marked_loss(to({}))))(w, x))) < 1e-5
    columns = 16 if SPECS[name] == HIDDEN else 32
    assert [shapes for _, *shapes in parts].count([(2, 12, 16), (16, columns)]) >= 2  # rows in 4, perhaps columns in 2
    whole = partitioned.run(step(to({})), arrays, [()] * len(arrays), data=4)[1]
    assert [shapes for _, *shapes in whole].count([(8, 12, 16), (16, 32)]) >= 2


def marked_block(mark):
    def block(w, x):
        h = mark("norm", rms_norm(mark("x", x), w["norm"]))
        hidden = mark("hidden", jax.nn.silu(mark("gate", h @ w["gate"])) * mark("up", h @ w["up"]))
        return mark("out", x + mark("down", hidden @ w["down"]))

    return block


def scanned(f):
    return lambda w, x: jax.lax.scan(lambda x, w: (f(w, x), None), x, jax.tree.map(lambda x: jnp.stack([x, x / 2]), w))[
        0
    ]


def in_part_of_the_mesh(f):
    return jax.shard_map(f, in_specs=(P(), P("data")), out_specs=P("data"), axis_names={"data"})


ONE_ROW = {"x": P(), "out": P(), "hidden": P(None, "model"), "gate": P(None, "model")}  # of a batch
PART = {"x": P(), "out": P(), "hidden": P(None, None, "model"), "gate": P(None, None, "model")}
BODIES = {
    "scan": (scanned, SPECS),
    "scan of checkpoints": (lambda f: scanned(jax.checkpoint(f)), SPECS),
    "cond": (lambda f: lambda w, x: jax.lax.cond(x[0, 0, 0] < 9, f, lambda w, x: x, w, x), SPECS),
    "vmap": (lambda f: jax.vmap(f, in_axes=(None, 0)), ONE_ROW | {"norm": P("data")}),
    "vmap over an axis": (lambda f: jax.vmap(f, in_axes=(None, 0), spmd_axis_name="data"), ONE_ROW),
    "vmap of fuse": (lambda f: jax.vmap(coda.fuse(f), in_axes=(None, 0)), ONE_ROW | {"norm": P("data")}),
    "shard_map": (in_part_of_the_mesh, PART),
    "fuse in shard_map": (lambda f: in_part_of_the_mesh(coda.fuse(f)), PART),
}


@pytest.mark.parametrize("door", ["grad(fuse)", "fuse(grad)"])
@pytest.mark.parametrize("name", BODIES)
def test_constraints_in_bodies(name, door):
    around, specs = BODIES[name]
    args = marked_arguments()
    with jax.set_mesh(meshes()):
        loss = loss_of(around(marked_block(to(specs))))
        assert values_are_plains(loss, door, *args)
        assert counts(DOORS[door](loss), *args) == counts(DOORS[door](loss_of(around(marked_block(to({}))))), *args)
        assert "sharding_constraint[" in str(jax.make_jaxpr(DOORS[door](loss))(*args))


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("names", [["x", "out"], ["norm", "gate", "up"], ["x", "norm", "gate", "up", "hidden", "out"]])
def test_a_reshard_ends_no_fusion(names, door):
    whole = {name: P(*spec, *[None] * (3 - len(spec))) for name, spec in SPECS.items()}
    args = marked_arguments()
    with jax.set_mesh(meshes(AxisType.Explicit)):
        w, x = args[0], jax.device_put(args[1], NamedSharding(meshes(AxisType.Explicit), P("data")))
        free, loss = (loss_of(marked_block(resharded({name: whole[name] for name in of}))) for of in ((), names))
        assert values_are_plains(loss, door, w, x)
        assert totals(loss, door, w, x)[0] == totals(free, door, w, x)[0]


@pytest.mark.parametrize("door", ["grad(fuse)", "fuse(grad)"])
@pytest.mark.parametrize("saved", [["gate", "up"], ["hidden"], ["gate", "up", "norm", "hidden"]])
def test_a_policy_sees_names_beside_constraints(saved, door):
    """As many products as under the same names alone in plain JAX: a named product is not run again."""
    policy, args, constrain = (
        jax.checkpoint_policies.save_only_these_names(*saved),
        marked_arguments(),
        to(SPECS, meshes()),
    )

    marks = [
        lambda name, x: checkpoint_name(x, name),
        lambda name, x: checkpoint_name(constrain(name, x), name),
        lambda name, x: constrain(name, checkpoint_name(x, name)),
    ]
    losses = [loss_of(jax.checkpoint(marked_block(mark), policy=policy)) for mark in marks]
    plain = counts(with_gradients(losses[0]), *args)[0]
    assert [counts(DOORS[door](loss), *args) for loss in losses] == [(0, plain)] * 3


def heads_in_front(w, x):
    q, k, v = jnp.einsum("btd,dchk->cbhtk", x, w["parts"])
    return jnp.mean(jnp.square(jnp.einsum("bhtk,hkd->btd", jnp.tanh(q) * k + v, w["out"])))


@pytest.mark.parametrize("door", ["grad(fuse)", "fuse(grad)"])
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_a_product_in_another_order_over_a_mesh(kind, door):
    rng = np.random.default_rng(0)
    w = {"parts": rng.standard_normal((16, 3, 2, 8)) / 4, "out": rng.standard_normal((2, 8, 16)) / 4}
    w, x = jax.tree.map(jnp.float32, (w, rng.standard_normal((8, 4, 16))))
    expected = jax.jit(with_gradients(heads_in_front))(w, x)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType[kind],))
    with jax.set_mesh(mesh):
        rows = jax.device_put(x, NamedSharding(mesh, jax.P("data")))
        found, own = (jax.jit(f)(w, rows) for f in (DOORS[door](heads_in_front), with_gradients(heads_in_front)))
        assert counts(DOORS[door](heads_in_front), w, rows) == (0, 6)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(own), strict=True):
            assert jax.typeof(a).sharding == jax.typeof(b).sharding
    assert largest_error(jax.tree.map(np.asarray, found), jax.tree.map(np.asarray, expected)) < 1e-5


def constrained_head(spec):
    """The loss of logits that are constrained; None for no constraint."""

    def loss(w, x, labels, mask):
        z = jnp.tanh(x @ w["up"]) @ w["down"] @ w["head"]
        z = z if spec is None else with_sharding_constraint(z, NamedSharding(meshes(), spec))
        losses = optax.softmax_cross_entropy_with_integer_labels(z.astype(jnp.float32), labels)
        losses = losses if spec is None else with_sharding_constraint(losses, NamedSharding(meshes(), P(*spec[:2])))
        return jnp.sum(jnp.where(mask, losses, 0))

    return loss


@pytest.mark.parametrize("spec", [P("data"), P("data", None, "model"), P(FREE, FREE, "model"), P(None, "data")])
def test_constrained_logits_are_made_in_chunks(spec):
    args, loss = beside_products(), constrained_head(spec)
    found, expected = (jax.jit(with_gradients(f))(*args) for f in (coda.fuse(loss), loss))
    assert largest_error(*(jax.tree.map(np.asarray, x) for x in (found, expected))) < 1e-5
    assert ("linear_cross_entropy",) in [one.epilogue for one in coda.fuse.report(loss, *args).products]


def test_constrained_logits_shard_the_factors_of_the_loss():
    (w, *rows), names = beside_products(), ("up", "down", "head")

    def products_of(spec):
        f = with_gradients(coda.fuse(constrained_head(spec)))
        arrays = [*(w[name] for name in names), *rows]
        step = lambda *arrays: f(dict(zip(names, arrays, strict=False)), *arrays[3:])  # noqa: E731
        return [shapes for _, *shapes in partitioned.run(step, arrays, [()] * 6, data=4)[1]]

    assert [(8, 8), (8, 512)] in products_of(P("data", None, "model"))  # 32 tokens in four, the vocabulary in two
    assert [(32, 8), (8, 1024)] in products_of(None)


def asked(z, *spec):
    return with_sharding_constraint(z, NamedSharding(meshes(), P(*spec)))


CONSTRAINED_LOGITS = {
    "shifted": lambda z: asked(z, "data", None, "model")[:, :-1],
    "of_the_shifted": lambda z: asked(z[:, :-1], "data", None, "model"),
    "of_rows": lambda z: asked(z[:, 1:].reshape(-1, z.shape[-1]), "data").reshape(8, 3, -1),
    "capped": lambda z: asked((20 * jnp.tanh(asked(z, "data") / 20))[:, 1:], None, None, "model"),
    "padded": lambda z: asked(jnp.where(jnp.arange(1040) < 1030, asked(z, None, None, "model"), -1e9)[:, 1:], "data"),
}


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("name", CONSTRAINED_LOGITS)
def test_logits_that_are_changed_may_be_constrained(name, is_tied):
    (w, x, labels, _), own = beside_products(), CONSTRAINED_LOGITS[name]
    head = jnp.sin(jnp.arange(1040 * 8.0)).reshape((1040, 8) if is_tied else (8, 1040))

    def loss(w, head, x):
        z = asked(jnp.tanh(x @ w["up"]) @ w["down"], "data")
        z = own(jnp.einsum("btd,vd->btv", z, head) if is_tied else z @ head)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(z, labels[:, 1:]))

    found, expected = (jax.jit(jax.value_and_grad(f, (0, 1, 2)))(w, head, x) for f in (coda.fuse(loss), loss))
    assert largest_error(*(jax.tree.map(np.asarray, x) for x in (found, expected))) < 1e-5
    assert ("linear_cross_entropy",) in [one.epilogue for one in coda.fuse.report(loss, w, head, x).products]


@jax.custom_vjp
def by_rule(z, labels):
    return jax.nn.logsumexp(z, axis=-1) - jnp.sum(z * jax.nn.one_hot(labels, z.shape[-1]), axis=-1)


def backward_by_rule(kept, d):
    z, labels = kept
    return d[..., None] * (jax.nn.softmax(z) - 0.5 * jax.nn.one_hot(labels, z.shape[-1])), None


by_rule.defvjp(lambda z, labels: (by_rule(z, labels), (z, labels)), backward_by_rule)


def test_a_loss_with_a_rule_is_one_of_chunks_on_each_device(monkeypatch):
    monkeypatch.setattr(row_losses, "CHUNK_BYTES", 4 * 1024 * 128)
    labels = jnp.arange(384).reshape(8, 48)
    w, x = (jnp.sin(jnp.arange(8.0 * size)) for size in (1024, 384))
    args = w.reshape(8, 1024), x.reshape(8, 48, 8)

    def loss(w, x, is_constrained):
        z = x @ w
        z = asked(z, "data", None, "model") if is_constrained else z
        losses = by_rule(z.astype(jnp.float32), labels)
        return jnp.mean(asked(losses, "data") if is_constrained else losses)

    def products_of(is_constrained):
        step = with_gradients(lambda w, x: coda.fuse(loss)(w, x, is_constrained))
        return [shapes for _, *shapes in partitioned.run(step, args, [()] * 2, data=4)[1]]

    found, expected = (jax.jit(with_gradients(f), static_argnums=2)(*args, True) for f in (coda.fuse(loss), loss))
    assert largest_error(*(jax.tree.map(np.asarray, x) for x in (found, expected))) < 1e-5
    assert [(32, 8), (8, 512)] in products_of(True)  # 128 tokens in four, the vocabulary in two
    assert [(128, 8), (8, 1024)] in products_of(False)


# --- products that are summed over the mesh together


def with_separate_weights(w, x, mark, dot):
    """A block whose norms are read by products with a weight each; `dot` multiplies by a weight whose rows are cut."""
    h = mark("norm", rms_norm(x, w["norm_1"]))
    q, k, v = (plain_models.heads(h @ w[name]) for name in ("q", "wide_k", "wide_v"))
    x = mark("x", x + dot(plain_models.attention(q, k, v), w["out"]))
    h = mark("norm", rms_norm(x, w["norm_2"]))
    return mark("x", x + dot(jax.nn.silu(h @ w["gate"]) * (h @ w["up"]), w["down"]))


SCHEMES = {"tensor": {}, "sequence": {"x": P(None, "model", None), "norm": P(None, None, None)}}


@pytest.mark.parametrize("door", ["grad(fuse)", "fuse(grad)"])
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_products_of_one_array_are_summed_over_the_mesh_once(scheme, kind, door):
    """A layer's products are summed over the mesh four times, as those of joined weights: not once for each weight."""
    mesh, specs = jax.make_mesh((4,), ("model",), (AxisType[kind],), devices=jax.devices()[:4]), SCHEMES[scheme]
    asked = specs.get("x", P(None, None, None))
    names = ("norm_1", "norm_2", "q", "wide_k", "wide_v", "out", "gate", "up", "down")
    w, x = {name: plain_models.weights()[name] for name in names}, plain_models.inputs(length=64)
    mark = resharded(specs) if kind == "Explicit" else to(specs, mesh)

    def dot(x, w):
        return jnp.einsum("btk,kn->btn", x, w, out_sharding=asked) if kind == "Explicit" else x @ w

    def cut(name, x):
        columns, rows = name in {*COLUMNS, "wide_k", "wide_v"}, name in ("out", "down")
        spec = P(None, "model") if columns else P("model", None) if rows else P(None)
        return jax.device_put(x, NamedSharding(mesh, spec))

    plain = with_gradients(loss_of(lambda w, x: with_separate_weights(w, x, to({}), jnp.matmul)))
    expected = jax.jit(plain)(w, x)
    step = DOORS[door](loss_of(lambda w, x: with_separate_weights(w, x, mark, dot)))
    with partitioned.partitioned_on_cpus(), jax.set_mesh(mesh):
        args = {name: cut(name, x) for name, x in w.items()}, jax.device_put(x, NamedSharding(mesh, asked))
        compiled = jax.jit(step).lower(*args).compile()
        found = jax.device_get(compiled(*args))
    assert largest_error(found, jax.device_get(expected)) < 1e-5
    sums = matrices(compiled)
    assert sums.get("all-reduce", 0) + sums.get("reduce-scatter", 0) == 4


@pytest.mark.parametrize("door", ["grad(fuse)", "fuse(grad)"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "gemma", "parallel", "adapted"])
def test_models_under_tensor_parallelism(name, door):
    loss, (w, x) = model(name)
    wide = {*COLUMNS, "wide_k", "wide_v", "lora_b"}
    cuts = [(None, "model") if n in wide else ("model",) if n in ("out", "down") else () for n in w]
    f = DOORS[door](loss)

    def step(*arrays):
        return f(dict(zip(w, arrays, strict=False)), arrays[-1])

    found, *_ = partitioned.run(step, [*w.values(), x], [*cuts, ("data",)])
    assert largest_error(found, jax.device_get(jax.jit(with_gradients(loss))(w, x))) < 1e-5


@pytest.mark.parametrize("door", ["grad(fuse)", "fuse(grad)"])
@pytest.mark.parametrize("around", ["scan of checkpoints", "vmap"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_summed_products_in_bodies(around, door, dtype):
    """Also in the form that XLA runs, in which products are added in float32."""
    w, x = marked_arguments(jnp.dtype(dtype))
    with jax.set_mesh(meshes()):
        loss = loss_of(BODIES[around][0](marked_block(to({}))))
        w |= {n: jax.device_put(x, NamedSharding(meshes(), P(None, "model"))) for n, x in w.items() if n in COLUMNS}
        assert values_are_plains(loss, door, w, x)


@pytest.mark.parametrize("door", ["grad(fuse)", "fuse(grad)"])
def test_a_gradient_of_a_gradient_over_a_mesh(door):
    loss, (w, x) = marked_loss(to({})), marked_arguments()

    def twice(f):
        return jax.jit(jax.grad(lambda w, x: sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(f(w, x)[1])), (0, 1)))

    with jax.set_mesh(meshes()):
        found, expected = (twice(f)(w, x) for f in (DOORS[door](loss), with_gradients(loss)))
    assert largest_error(jax.tree.map(np.asarray, found), jax.tree.map(np.asarray, expected)) < 1e-5


@pytest.mark.parametrize("door", ["grad(fuse)", "fuse(grad)"])
def test_devices_that_share_rows_alone_multiply_as_without_a_mesh(door):
    """No factors are concatenated: each device runs the products that one device runs, on its rows."""
    w, x = marked_arguments(width=64, hidden=256, rows=(8, 96))
    w = {name: w[name] for name in ("norm", "gate", "bias", "up", "down")}
    f = DOORS[door](marked_loss(to({})))

    def step(*arrays):
        return f(dict(zip(w, arrays, strict=False)), arrays[-1])

    parts = [shapes for _, *shapes in partitioned.run(step, [*w.values(), x], [*[()] * 5, ("data",)], data=4)[1]]
    assert len(parts) == 9 and parts.count([(2, 96, 256), (64, 256)]) == 2


@needs_nvrtc
@pytest.mark.parametrize("door", ["grad(fuse)", "fuse(grad)"])
def test_summed_products_are_kernels_of_each_device(door):
    mesh = jax.make_mesh((4,), ("model",), (AxisType.Explicit,), devices=jax.devices()[:4])
    w, x = plain_models.weights(jnp.bfloat16, width=256, hidden=512), plain_models.inputs(jnp.bfloat16, width=256)

    def mlp(w, x):
        h = rms_norm(x, w["norm_1"])
        hidden = jax.nn.silu(h @ w["gate"]) * (h @ w["up"])
        return x + jnp.einsum("btk,kn->btn", hidden, w["down"], out_sharding=P(None, None, None))

    cuts = {"norm_1": P(None), "gate": P(None, "model"), "up": P(None, "model"), "down": P("model", None)}
    with jax.set_mesh(mesh):
        types = {n: jax.ShapeDtypeStruct(w[n].shape, w[n].dtype, sharding=NamedSharding(mesh, cuts[n])) for n in cuts}
        rows = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P(None, None, None)))
        step = DOORS[door](loss_of(mlp))
        found = coda.explain(step, types, rows, platform="cuda")
        assert kernels(step, types, rows) == 9 and not any("XLA" in product.tile for product in found.products)


@pytest.mark.parametrize("door", ["grad(fuse)", "fuse(grad)"])
def test_a_gather_with_an_out_sharding(door):
    """JAX traces it with automatic axes in the place of explicit ones; what is behind it is fused."""
    w, tokens = plain_models.weights(), jnp.arange(64).reshape(8, 8) % 20
    width = len(w["up"])
    table = jax.random.normal(jax.random.key(0), (32, width))

    def loss(w, table, spec=None):
        x = table.at[tokens].get(mode="fill", out_sharding=spec)
        return jnp.mean(jnp.square(block(w, x - jnp.mean(x, axis=-1, keepdims=True))))

    expected = jax.jit(with_gradients(loss))(w, table)
    with jax.set_mesh(jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))):
        f = DOORS[door](lambda w, table: loss(w, table, jax.P("data", None, None)))
        arrays = jax.device_put((w, table), jax.P())
        found = jax.jit(f)(*arrays)
        assert counts(f, *arrays)[1] == 6
    assert largest_error(jax.tree.map(np.asarray, found), jax.tree.map(np.asarray, expected)) < 1e-5
