"""Attention in plain JAX under `coda.fuse`, in layers: loops, checkpoints, vmap, meshes, modules of other libraries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.ad_checkpoint import checkpoint_name
from jax.lax import with_sharding_constraint
from jax.sharding import AxisType, NamedSharding

import coda_jax as coda
from coda_jax.attend.primitive import FORMS
from coda_jax.jaxprs.walk import equations
from tests.test_fuse import joined, largest_error, relative_error
from tests.test_fuse_attention import normal, taken

pytestmark = pytest.mark.filterwarnings("ignore:gemm:coda_jax.FallbackWarning")
B, T, H, K, D = 2, 16, 4, 2, 8
W, F, LAYERS = H * D, 48, 2
ids = jnp.array([[0] * 6 + [1] * 10, [0] * 16])
policies = jax.checkpoint_policies


def weights():
    shapes = {"q": (W, W), "k": (W, K * D), "v": (W, K * D), "out": (W, W), "up": (W, F), "down": (F, W)}
    return {name: normal(i, *shape) / shape[0] ** 0.5 for i, (name, shape) in enumerate(shapes.items())}


x = normal(9, B, T, W)


def layer(w, x, ids):
    length, each = x.shape[-2], x.shape[:-1]
    h = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    q, k, v = ((h @ w[name]).reshape(*each, -1, D) for name in "qkv")
    k, v = (jnp.repeat(y, H // K, -2) for y in (k, v))
    s = jnp.einsum("...thd,...shd->...hts", q, k) / D**0.5
    mask = (ids[..., :, None] == ids[..., None, :]) & jnp.tril(jnp.ones((length, length), bool))
    p = jax.nn.softmax(jnp.where(mask[..., None, :, :], s, -1e9), axis=-1)
    y = checkpoint_name(jnp.einsum("...hts,...shd->...thd", p, v).reshape(x.shape), "attended")
    x = x + y @ w["out"]
    return x + jax.nn.silu(x @ w["up"]) @ w["down"]


def in_turn(w, x, ids):
    return layer(w, layer(w, x, ids), ids)


def scanned(w, x, ids):
    stacked = jax.tree.map(lambda y: jnp.stack([y] * LAYERS), w)
    return jax.lax.scan(lambda x, w: (layer(w, x, ids), None), x, stacked)[0]


def rematerialised(policy):
    return lambda w, x, ids: jax.checkpoint(layer, policy=policy)(w, x, ids)


def scanned_and_rematerialised(w, x, ids):
    stacked = jax.tree.map(lambda y: jnp.stack([y] * LAYERS), w)
    return jax.lax.scan(jax.checkpoint(lambda x, w: (layer(w, x, ids), None)), x, stacked)[0]


def mapped(w, x, ids):
    return jax.vmap(layer, in_axes=(None, 0, 0))(w, x, ids)


def fused_inside(w, x, ids):
    return coda.fuse(layer)(w, layer(w, x, ids), ids)


def branched(w, x, ids):
    return jax.lax.cond(ids[0, 0] == 0, layer, lambda w, x, ids: x, w, x, ids)


LAYERED = {
    "in turn": in_turn,
    "scan": scanned,
    "checkpoint": rematerialised(None),
    "checkpoint that keeps products": rematerialised(policies.dots_saveable),
    "checkpoint that keeps the result": rematerialised(policies.save_only_these_names("attended")),
    "scan of checkpoints": scanned_and_rematerialised,
    "vmap": mapped,
    "fuse in fuse": fused_inside,
    "cond": branched,
}
ONE_BODY = ("scan", "checkpoint", "scan of checkpoints")


def with_gradients(f):
    return jax.value_and_grad(lambda w, x, ids: jnp.mean(jnp.square(f(w, x, ids))), (0, 1))


def are_there(function, *args):
    """How many calls of attention a function has, and how many exponentials of all pairs."""
    every = [e for e, _ in equations(jax.make_jaxpr(function)(*args).jaxpr)]
    exponentials = [e for e in every if e.primitive.name == "exp" and e.outvars[0].aval.size >= B * H * T * T]
    return sum(e.primitive in FORMS for e in every), len(exponentials)


@pytest.mark.parametrize("name", LAYERED)
def test_layers_attend_in_all_bodies(name):
    f, args = LAYERED[name], (weights(), x, ids)
    loss = coda.fuse(lambda w, x, ids: jnp.mean(jnp.square(f(w, x, ids))))
    fused = jax.value_and_grad(loss, (0, 1))
    assert largest_error(jax.jit(fused)(*args), jax.jit(with_gradients(f))(*args)) < 1e-5
    found, exponentials = are_there(fused, *args)
    assert found >= 2 and exponentials == 0


@pytest.mark.parametrize("name", LAYERED)
def test_the_gradient_of_layers_attends_where_both_passes_stand_together(name):
    f, args = LAYERED[name], (weights(), x, ids)
    fused = coda.fuse(with_gradients(f))
    assert largest_error(jax.jit(fused)(*args), jax.jit(with_gradients(f))(*args)) < 1e-5
    found, exponentials = are_there(fused, *args)
    if name in ("in turn", "vmap", "scan"):
        assert found == 2 * (2 if name == "in turn" else 1) and exponentials == 0


def with_mask(w, x, mask):
    """A layer whose mask is made outside of it."""
    length, h = x.shape[1], x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    q, k, v = ((h @ w[name]).reshape(*x.shape[:2], -1, D) for name in "qkv")
    k, v = (jnp.repeat(y, H // K, -2) for y in (k, v))
    s = jnp.where(mask, jnp.einsum("bthd,bshd->bhts", q, k) / D**0.5, -1e9)
    y = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(s, axis=-1), v)
    return x + y.reshape(x.shape[0], length, -1) @ w["out"]


def several_in_a_body(w, x, mask):
    return with_mask(w, with_mask(w, x, mask), mask)


def looped(body, results=lambda x: None, reverse=False):
    """The square of a loop of layers, whose mask is made in front of it; the body's results are summed too."""

    def loss(w, x):
        mask = jnp.tril(jnp.ones((T, T), bool))[None, None]
        stacked = jax.tree.map(lambda y: jnp.stack([y, y * 0.7, y * 1.2]), w)

        def step(x, w):
            y = body(w, x, mask)
            return y, results(y)

        x, others = jax.lax.scan(step, x, stacked, reverse=reverse)
        return jnp.mean(x**2) + sum(jnp.mean(y) for y in jax.tree.leaves(others))

    return loss


LOOPS = {
    "a mask made outside": (looped(with_mask), 1),
    "two in a body": (looped(several_in_a_body), 2),
    "results of steps": (looped(with_mask, results=lambda x: (x * 2, jnp.sin(x))), 1),
    "from the last to the first": (looped(with_mask, reverse=True), 1),
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_and_its_backward_loop_attend(name):
    loss, count = LOOPS[name]
    step = jax.value_and_grad(loss, (0, 1))
    fused = coda.fuse(step)
    assert largest_error(jax.jit(fused)(weights(), x), jax.jit(step)(weights(), x)) < 1e-5
    assert are_there(fused, weights(), x) == (2 * count, 0)
    taken_there = [one for one in coda.fuse.report(step, weights(), x).products if one.epilogue == ("attention",)]
    assert len(taken_there) == 6 * count


def test_probabilities_that_a_step_gives_back_stay():
    def body(w, x, mask):
        q, k = ((x @ w[name]).reshape(B, T, -1, D) for name in "qk")
        s = jnp.einsum("bthd,bshd->bhts", q, jnp.repeat(k, H // K, 2)) / D**0.5
        return jax.nn.softmax(jnp.where(mask, s, -1e9), axis=-1)

    def loss(w, x):
        mask = jnp.tril(jnp.ones((T, T), bool))

        def step(x, w):
            p = body(w, x, mask)
            v = jnp.repeat((x @ w["v"]).reshape(B, T, K, D), H // K, 2)
            return x + jnp.einsum("bhts,bshd->bthd", p, v).reshape(x.shape) @ w["out"], p

        x, p = jax.lax.scan(step, x, jax.tree.map(lambda y: y[None], w))
        return jnp.mean(x**2) + jnp.sum(p[..., 0] ** 2)

    step = jax.value_and_grad(loss, (0, 1))
    fused = coda.fuse(step)
    assert largest_error(jax.jit(fused)(weights(), x), jax.jit(step)(weights(), x)) < 1e-5
    assert are_there(fused, weights(), x)[0] == 0


def test_a_batch_of_what_is_fused():
    w = weights()
    f = jax.vmap(coda.fuse(layer), in_axes=(None, 0, 0))
    assert largest_error(jax.jit(f)(w, x, ids), layer(w, x, ids)) < 1e-5
    assert are_there(f, w, x, ids)[0] == 1


def test_queries_of_one_graph_with_their_products():
    """The products around attention are kernels with epilogues, and nothing stands between."""
    report = coda.fuse.report(lambda w, x: jnp.mean(jnp.square(layer(w, x, ids))), weights(), x)
    assert not any(one.reason for one in report.products) and len(report.products) == 8
    assert [one.epilogue for one in report.products].count(("attention",)) == 2


# --- meshes


def on_mesh(*names):
    return jax.make_mesh((2, 2), names, axis_types=(AxisType.Auto,) * 2)


@pytest.mark.parametrize("of", ["q, k and v", "scores", "probabilities"])
def test_a_constraint_of_sequences_and_heads_is_kept(of):
    mesh, w = on_mesh("data", "model"), weights()

    def f(w, x):
        def placed(y, *spec):
            return with_sharding_constraint(y, NamedSharding(mesh, jax.P(*spec)))

        q, k, v = ((x @ w[name]).reshape(B, T, -1, D) for name in ("q", "out", "q"))
        if of == "q, k and v":
            q, k, v = (placed(y, "data", None, "model") for y in (q, k, v))
        s = jnp.einsum("bthd,bshd->bhts", q, k) / D**0.5
        s = placed(s, "data", "model") if of == "scores" else s
        p = jax.nn.softmax(s, axis=-1)
        p = placed(p, "data", "model", None, None) if of == "probabilities" else p
        return jnp.einsum("bhts,bshd->bthd", p, v).reshape(B, T, W) @ w["out"]

    rows = jax.device_put(x, NamedSharding(mesh, jax.P("data")))
    fused = coda.fuse(lambda w, x: jnp.mean(jnp.square(f(w, x))))
    plain = jax.value_and_grad(lambda w, x: jnp.mean(jnp.square(f(w, x))), (0, 1))
    assert largest_error(jax.jit(jax.value_and_grad(fused, (0, 1)))(w, rows), jax.jit(plain)(w, rows)) < 1e-5
    assert taken(fused) == 2
    constraints = [
        (e.params["sharding"].spec, e.invars[0].aval.ndim)
        for e, _ in equations(jax.make_jaxpr(fused)(w, rows).jaxpr)
        if e.primitive.name == "sharding_constraint"
    ]
    of_heads = [spec for spec, rank in constraints if rank == 4]
    assert of_heads and all(spec[0] == "data" and spec[2] == "model" for spec in of_heads)
    of_rows = [spec for spec, rank in constraints if rank != 4]  # of what the products of these heads read
    assert all(spec[0] == "data" and "model" not in spec for spec in of_rows)


def test_a_constraint_that_cuts_rows_leaves_the_scores():
    mesh, w = on_mesh("data", "model"), weights()

    def f(w, x):
        q = (x @ w["q"]).reshape(B, T, -1, D)
        s = with_sharding_constraint(
            jnp.einsum("bthd,bshd->bhts", q, q), NamedSharding(mesh, jax.P("data", None, "model"))
        )
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(s), q)

    fused = coda.fuse(f)
    assert largest_error(jax.jit(fused)(w, x), f(w, x)) < 1e-5
    assert taken(fused) == 0
    assert any("cuts the rows" in reason for piece in fused.pieces.made for _, reason in piece.attentions.left)


def test_a_body_of_shard_map_attends():
    mesh = on_mesh("data", "model")
    specs = (jax.P(), jax.P("data"), jax.P("data"))
    f = jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=jax.P("data"))
    args = weights(), x, ids
    fused = jax.value_and_grad(coda.fuse(lambda *args: jnp.mean(jnp.square(f(*args)))), (0, 1))
    assert largest_error(jax.jit(fused)(*args), jax.jit(with_gradients(layer))(*args)) < 1e-5
    assert are_there(fused, *args) == (2, 0)


def test_explicit_axes_are_left():
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        q = jax.device_put(normal(0, B, T, H, D), jax.P("data", None, "model"))
        fused = coda.fuse(
            lambda q: jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, q)), q)
        )
        found, expected = (jax.jit(g)(q) for g in (fused, fused.plain))
    assert largest_error(np.asarray(found), np.asarray(expected)) < 1e-5
    assert any("explicit axes" in reason for piece in fused.pieces.made for _, reason in piece.attentions.left)


# --- modules of libraries


def of_nnx(call, **options):
    module = nnx.MultiHeadAttention(
        num_heads=H, in_features=W, qkv_features=W, decode=False, rngs=nnx.Rngs(0), **options
    )
    graph, params, rest = nnx.split(module, nnx.Param, ...)
    return (lambda params, x: call(nnx.merge(graph, params, rest), x)), params


def of_linen(call, **options):
    module = linen.MultiHeadDotProductAttention(num_heads=H, **options)
    params = module.init(jax.random.key(0), x, x)
    return (lambda params, x: call(module, params, x)), params


def of_equinox(mask=None):
    eqx = pytest.importorskip("equinox")
    module = eqx.nn.MultiheadAttention(H, W, key=jax.random.key(0))
    arrays, static = eqx.partition(module, eqx.is_array)

    def f(arrays, x):
        module = eqx.combine(arrays, static)
        return jax.vmap(lambda x: module(x, x, x, mask=mask))(x)

    return f, arrays


def of_haiku():
    hk = pytest.importorskip("haiku")

    def call(x):
        init = hk.initializers.VarianceScaling(1.0)
        mask = jnp.tril(jnp.ones((1, 1, T, T)))
        return hk.MultiHeadAttention(H, D, w_init=init, model_size=W)(x, x, x, mask=mask)

    transformed = hk.without_apply_rng(hk.transform(call))
    return transformed.apply, transformed.init(jax.random.key(0), x)


def linen_masks(x):
    valid = x[..., 0] > -1
    return linen.combine_masks(linen.make_causal_mask(x[..., 0]), linen.make_attention_mask(valid, valid))


MODULES = {
    "nnx": lambda: of_nnx(lambda module, x: module(x)),
    "nnx, causal": lambda: of_nnx(lambda module, x: module(x, mask=nnx.make_causal_mask(x[..., 0]))),
    "nnx, other keys": lambda: of_nnx(lambda module, x: module(x, x[:, ::-1][:, :12])),
    "nnx, in 16 bits": lambda: of_nnx(lambda module, x: module(x), dtype=jnp.bfloat16),
    "linen": lambda: of_linen(lambda module, params, x: module.apply(params, x, x)),
    "linen, causal and padding": lambda: of_linen(
        lambda module, params, x: module.apply(params, x, x, mask=linen_masks(x))
    ),
    "linen, float32 softmax": lambda: of_linen(
        lambda module, params, x: module.apply(params, x, x), dtype=jnp.bfloat16, force_fp32_for_softmax=True
    ),
    "equinox": of_equinox,
    "equinox, causal": lambda: of_equinox(jnp.tril(jnp.ones((T, T), bool))),
    "haiku": of_haiku,
}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_of_a_library_attends(name):
    f, params = MODULES[name]()
    plain = jax.value_and_grad(lambda params, x: jnp.mean(jnp.square(f(params, x).astype(jnp.float32))), (0, 1))
    fused = coda.fuse(lambda params, x: jnp.mean(jnp.square(f(params, x).astype(jnp.float32))))
    gradient = coda.fuse(plain)
    expected = jax.jit(plain)(params, x)
    for found in (jax.jit(jax.value_and_grad(fused, (0, 1)))(params, x), jax.jit(gradient)(params, x)):
        if "16 bits" in name or "float32" in name:
            assert relative_error(joined(found), joined(expected)) < 1e-2
        else:
            assert largest_error(found, expected) < 1e-5
    assert (taken(fused), taken(gradient)) == (2, 6)


def test_weights_that_a_module_keeps_are_left():
    f, params = of_linen(
        lambda module, params, x: module.apply(params, x, x, sow_weights=True, mutable=["intermediates"])
    )
    fused = coda.fuse(f)
    (y, kept), (expected, theirs) = fused(params, x), f(params, x)
    assert largest_error([y, kept], [expected, theirs]) < 1e-5
    assert taken(fused) == 0
