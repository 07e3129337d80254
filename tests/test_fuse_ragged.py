"""`coda.fuse` of experts in plain JAX: `jax.lax.ragged_dot` becomes a product of groups of the graph."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding

import coda_jax as coda
from tests import tolerance
from tests.test_fuse import DOORS, joined, largest_error, relative_error

TOKENS, WIDTH, HIDDEN, EXPERTS, TOP = 24, 16, 24, 5, 2
BOTH = ["grad(fuse)", "fuse(grad)"]
TRANSPOSED = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])
OF_GROUPS = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def weights(dtype=jnp.float32, width=WIDTH, hidden=HIDDEN, experts=EXPERTS, is_joined=False):
    each = {"down": (hidden, width), "gate": (width, (1 + is_joined) * hidden)}
    each |= {} if is_joined else {"up": (width, hidden)}
    w = {
        name: normal(i, experts, *shape, dtype=dtype) / shape[0] ** 0.5 for i, (name, shape) in enumerate(each.items())
    }
    return w | {"router": normal(7, width, experts, dtype=dtype) / width**0.5}


def order_by_expert(w, x, top=TOP, logits=None):
    """The rows of x by expert, their experts' sizes and weights, and the order by which they come back."""
    experts, logits = w["router"].shape[1], x @ w["router"] if logits is None else logits
    chosen, ids = lax.top_k(jax.nn.softmax(logits.astype(jnp.float32)), top)
    order = jnp.argsort(ids.reshape(-1))
    sizes = jnp.bincount(ids.reshape(-1), length=experts).astype(jnp.int32)
    return x[order // top], sizes, chosen.reshape(-1)[order], jnp.argsort(order)


def plain_layer(w, x, top=TOP, logits=None):
    rows, sizes, chosen, back = order_by_expert(w, x, top, logits)
    if "up" in w:
        gate, up = (lax.ragged_dot(rows, w[name], sizes) for name in ("gate", "up"))
    else:
        gate, up = jnp.split(lax.ragged_dot(rows, w["gate"], sizes), 2, axis=-1)
    y = lax.ragged_dot(jax.nn.silu(gate) * up, w["down"], sizes)
    y = y * chosen[:, None].astype(y.dtype)
    return jnp.sum(y[back].reshape(len(x), top, -1), axis=1)


def operator_layer(w, x, top=TOP):
    rows, sizes, chosen, back = order_by_expert(w, x, top)
    gate_up = (w["gate"], w["up"]) if "up" in w else w["gate"]
    y = coda.expert_mlp(rows, gate_up, w["down"], sizes, row_scale=chosen)
    return jnp.sum(y[back].reshape(len(x), top, -1), axis=1)


def loss_of(f):
    return lambda w, x: jnp.mean(jnp.sin(f(w, x).astype(jnp.float32)))


def with_gradients(loss):
    return jax.value_and_grad(loss, argnums=(0, 1))


def compare(loss, args, door, bound=1e-5):
    found, expected = jax.jit(lambda *args: (DOORS[door](loss)(*args), with_gradients(loss)(*args)))(*args)
    assert largest_error(found, expected) < bound


def groups_in(f, *args):
    """How many products of groups a function has that are coda_jax's, and that are XLA's."""
    names = str(jax.make_jaxpr(f)(*args))
    return names.count("ragged=Dimension"), names.count("ragged_dot_general[")


@pytest.mark.smoke
@pytest.mark.parametrize("is_joined", [False, True])
@pytest.mark.parametrize("door", DOORS)
def test_a_layer_has_its_values_and_gradients(door, is_joined):
    compare(loss_of(plain_layer), (weights(is_joined=is_joined), normal(9, TOKENS, WIDTH)), door)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("door", BOTH)
def test_in_16_bits_a_layer_is_as_near_to_float64_as_it_was(door, dtype):
    """The rows' order is given: a rounded router would choose other experts."""
    sizes = jnp.asarray([11, 0, 20, 1, 9], jnp.int32)

    def layer(w, x):
        gate, up = (lax.ragged_dot(x, w[name], sizes) for name in ("gate", "up"))
        y = lax.ragged_dot(jax.nn.silu(gate) * up, w["down"], sizes)
        return y * w["scale"][:, None].astype(y.dtype)

    def loss(w, x):
        return jnp.sum(jnp.sin(layer(w, x).astype(w["scale"].dtype)))

    rows = 47
    w = {name: x for name, x in weights(dtype).items() if name != "router"} | {"scale": normal(5, rows)}
    args = w, normal(9, rows, WIDTH, dtype=dtype)

    def results(layer, with_gradients, args):
        return jax.jit(lambda *args: (layer(*args), with_gradients(*args)[1]))(*args)

    found = results(coda.fuse(layer), DOORS[door](loss), args)
    rough = results(layer, with_gradients(loss), args)
    with jax.enable_x64(True):
        exact = results(layer, with_gradients(loss), jax.tree.map(lambda x: x.astype(jnp.float64), args))
    for one, reference, plain in zip(*map(jax.tree.leaves, (found, exact, rough)), strict=True):
        tolerance.check(one, np.asarray(reference), plain)


@pytest.mark.parametrize("is_joined", [False, True])
@pytest.mark.parametrize("door", BOTH)
def test_a_layer_has_the_programs_of_the_operator(door, is_joined):
    """All six products are kernels, gates and routing weights in epilogues, and no more is kept, nor moved."""
    w = weights(jnp.bfloat16, 256, 512, 8, is_joined)
    args = jax.tree.map(jax.typeof, w), jax.ShapeDtypeStruct((2048, 256), jnp.bfloat16)
    fused = coda.explain(DOORS[door](loss_of(plain_layer)), *args, platform="cuda")
    own = coda.explain(with_gradients(loss_of(operator_layer)), *args, platform="cuda")
    assert fused.totals.passes_bytes <= 1.001 * own.totals.passes_bytes
    assert fused.totals.kept_bytes <= own.totals.kept_bytes + 4 * 2048 * 8
    assert not any(one.operation.startswith("ragged") for one in fused.other_products)
    *_, gate, down = coda.fuse.report(loss_of(plain_layer), *args).products
    assert {"silu", "row scale"} <= set(gate.epilogue) and not down.epilogue and not down.reason


SIZES = (7, 0, 12, 4, 6)
MAPS = {
    "silu": lambda gate, up: jax.nn.silu(gate) * up,
    "sigmoid": lambda gate, up: jax.nn.sigmoid(gate) + up,
    "clipped": lambda gate, up: (jnp.clip(up, -1, 1) + 1) * jnp.minimum(gate, 0.5) * jax.nn.sigmoid(gate),
    "exp": lambda gate, up: jnp.exp(gate) * jnp.cos(up),
    "relu": lambda gate, up: jnp.square(jax.nn.relu(gate)) * jax.nn.relu6(up),
}
ENDS = {
    "itself": lambda x, h, y: jnp.sin(y),
    "residual": lambda x, h, y: jnp.sin(x + y),
    "cosine": lambda x, h, y: jnp.cos(y),
    "hidden": lambda x, h, y: jnp.concatenate([jnp.sin(y), jnp.square(h)], axis=1),
    "sums": lambda x, h, y: jnp.sum(jnp.exp(y), axis=0) * jnp.sin(y),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("name", MAPS)
def test_rows_in_no_group_are_as_in_jax(name, end, door):
    """A kernel stores zeros there whatever its epilogue is: a map that makes others of zeros is a pass."""
    rows, sizes = 37, jnp.asarray(SIZES, jnp.int32)
    ids = jnp.repeat(jnp.arange(EXPERTS), sizes, total_repeat_length=rows)

    def loss(w, x):
        gate, up = (lax.ragged_dot(x, w[name], sizes) for name in ("gate", "up"))
        h = MAPS[name](gate + w["down"][:, :, 0][ids], up)
        y = lax.ragged_dot(h, w["down"], sizes) * jnp.sum(x, 1, keepdims=True)
        return jnp.sum(ENDS[end](x, h, y) * jnp.arange(1.0, rows + 1)[:, None]) / rows**2

    compare(loss, (weights(), normal(9, rows, WIDTH)), door, 5e-5)


@pytest.mark.parametrize("name", ["silu", "exp"])
def test_the_report_names_maps_that_are_not_zeros_in_rows_in_no_group(name):
    def loss(w, x):
        y = lax.ragged_dot(x, w["gate"], jnp.asarray(SIZES, jnp.int32))
        return jnp.sum(jnp.sin((jax.nn.silu(y) if name == "silu" else jnp.exp(y)) @ w["down"][0]))

    plans = coda.explain(coda.fuse(loss), weights(), normal(9, 37, WIDTH), platform="cuda")
    assert ("rows in no group" in str(plans)) == (name == "exp")


def stored(w, x, sizes):
    y = lax.ragged_dot_general(x, w["down"], sizes, TRANSPOSED)
    return jnp.sum(jnp.sin(y) * y)


def of_swapped(w, x, sizes):
    return jnp.sum(jnp.sin(lax.ragged_dot(x, jnp.swapaxes(w["down"], 1, 2), sizes)))


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("f, least", [(stored, 3), (of_swapped, 3)])
def test_other_forms_of_ragged_dot_general(f, least, door):
    sizes = jnp.asarray(SIZES, jnp.int32)
    loss, args = functools.partial(f, sizes=sizes), (weights(), normal(9, 37, WIDTH))
    compare(loss, args, door)
    assert groups_in(DOORS[door](loss), *args)[0] >= least


def test_a_sum_over_the_rows_of_each_group_has_a_gradient():
    """JAX has none of it: it is compared with products by masks."""
    sizes = jnp.asarray(SIZES, jnp.int32)

    def loss(w, x, contract):
        z = jnp.tanh(lax.ragged_dot(x, w["gate"], sizes))
        gram = contract(x, z)
        return jnp.sum(jnp.sin(gram)) + jnp.sum(jnp.swapaxes(gram, 1, 2) * w["down"])

    def by_masks(a, b):
        ends = jnp.cumsum(sizes)[:, None]
        own = (jnp.arange(len(a)) < ends) & (jnp.arange(len(a)) >= ends - sizes[:, None])
        return jnp.einsum("gr,rm,rn->gmn", own.astype(a.dtype), a, b)

    def by_groups(a, b):
        return lax.ragged_dot_general(a, b, sizes, OF_GROUPS)

    args = weights(), normal(9, 37, WIDTH)
    fused, expected = (functools.partial(loss, contract=f) for f in (by_groups, by_masks))
    found, expected = (jax.jit(f)(*args) for f in (with_gradients(coda.fuse(fused)), with_gradients(expected)))
    assert largest_error(found, expected) < 1e-5


def test_derivatives_of_derivatives():
    w, x, sizes = weights(), normal(9, 37, WIDTH), jnp.asarray(SIZES, jnp.int32)

    def loss(w):
        def inner(x):
            return jnp.sum(jnp.sin(lax.ragged_dot(x, w, sizes)))

        return jnp.sum(jnp.square(jax.grad(inner)(x)))

    found, expected = (jax.jit(f)(w["gate"]) for f in (jax.grad(coda.fuse(loss)), jax.grad(loss)))
    assert largest_error([found], [expected]) < 1e-5


LEFT = {
    "both factors have batch axes": lambda w, x: jax.vmap(lax.ragged_dot)(
        jnp.stack([x, x]), jnp.stack([w["gate"]] * 2), jnp.ones((2, EXPERTS), jnp.int32)
    ),
    "asks for precision": lambda w, x: lax.ragged_dot(
        x, w["gate"], jnp.ones(EXPERTS, jnp.int32), precision=lax.Precision.HIGHEST
    ),
    "the sizes of its groups are int16": lambda w, x: lax.ragged_dot(x, w["gate"], jnp.ones(EXPERTS, jnp.int16)),
    "its factors are float32 and bfloat16": lambda w, x: lax.ragged_dot(
        x, w["gate"].astype(jnp.bfloat16), jnp.ones(EXPERTS, jnp.int32), preferred_element_type=jnp.float32
    ),
    "its groups are along axes (1,)": lambda w, x: lax.ragged_dot_general(
        x[None],
        w["gate"],
        jnp.ones(EXPERTS, jnp.int32),
        lax.RaggedDotDimensionNumbers((((2,), (1,)), ((), ())), [1], [0]),
    ),
    "experts with a capacity": lambda w, x: jnp.einsum("ebk,ekn->ebn", x[:20].reshape(EXPERTS, 4, -1), w["gate"]),
}


@pytest.mark.parametrize("reason", LEFT)
def test_others_are_left_with_their_reason(reason):
    def loss(w, x):
        return jnp.sum(jnp.sin(LEFT[reason](w, x @ w["router"] @ w["router"].T)))

    args = weights(), normal(9, TOKENS, WIDTH)
    compare(loss, args, "grad(fuse)")
    found = [one.reason for one in coda.fuse.report(loss, *args).products]
    assert sum(reason in one for one in found) == 1 and sum(not one for one in found) == 2


def stack(w, count=2):
    return {name: jnp.stack([x, *(x * (1 + i / 8) for i in range(1, count))]) for name, x in w.items()}


def _scan(layer):
    return lambda w, x: lax.scan(lambda h, one: (h + layer(one, h), None), x, w)[0]


HOLDERS = {
    "scan": lambda w, x: _scan(plain_layer)(stack(w), x),
    "scan of checkpoints": lambda w, x: _scan(jax.checkpoint(plain_layer))(stack(w), x),
    "checkpoint": jax.checkpoint(plain_layer),
    "policy": jax.checkpoint(plain_layer, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable),
    "jit": jax.jit(plain_layer),
    "cond": lambda w, x: lax.cond(jnp.sum(x) > -1e9, plain_layer, lambda w, x: x, w, x),
}


@pytest.mark.parametrize("door", BOTH)
@pytest.mark.parametrize("holder", HOLDERS)
def test_a_layer_inside_of_others(holder, door):
    loss, args = loss_of(HOLDERS[holder]), (weights(), normal(9, TOKENS, WIDTH))
    compare(loss, args, door)
    assert groups_in(DOORS[door](loss), *args)[1] == 0


def test_a_batch_of_a_fused_layer():
    w, x = weights(), normal(9, 2, TOKENS, WIDTH)
    found, expected = (
        jax.jit(jax.vmap(with_gradients(loss_of(f)), (None, 0)))(w, x) for f in (coda.fuse(plain_layer), operator_layer)
    )
    assert largest_error(found, expected) < 1e-5


@pytest.mark.parametrize("kind", ["of the product", "wide", "cast back"])
@pytest.mark.parametrize("door", BOTH)
def test_routing_weights_move_in_front_of_the_last_product(kind, door):
    """The result of the last product is not kept: the weights' gradient is a sum in an epilogue."""
    sizes, rows = jnp.asarray([300, 0, 212], jnp.int32), 512

    def loss(w, x):
        h = jax.nn.silu(lax.ragged_dot(x, w["gate"], sizes))
        y, scale = lax.ragged_dot(h, w["down"], sizes), w["scale"][:, None]
        if kind == "of the product":
            y = y * scale.astype(y.dtype)
        else:
            y = (y * scale).astype(y.dtype if kind == "cast back" else jnp.float32)
        return jnp.mean(jnp.sin(jnp.flip(y, 0).astype(jnp.float32)))

    w = weights(jnp.bfloat16, 64, 128, 3)
    args = {"gate": w["gate"], "down": w["down"], "scale": normal(5, rows)}, normal(9, rows, 64, dtype=jnp.bfloat16)
    own, fused = (jax.jit(f)(*args) for f in (with_gradients(loss), DOORS[door](loss)))
    exact = jax.jit(with_gradients(loss))(*jax.tree.map(lambda x: x.astype(jnp.float32), args))
    errors = [relative_error(joined(x), joined(exact)) for x in (fused, own)]
    assert errors[0] < 1.5 * errors[1] + 1e-3
    kept = coda.explain(with_gradients(coda.fuse(loss)), *args, platform="cuda").totals.kept_bytes
    assert kept < 2 * rows * (128 + (128 if kind == "wide" else 64) + 8)  # what the gate is of, and the cosine


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
@pytest.mark.parametrize("door", BOTH)
def test_over_automatic_axes_of_a_mesh(door):
    loss, (w, x) = loss_of(plain_layer), (weights(), normal(9, TOKENS, WIDTH))
    expected = jax.jit(with_gradients(loss))(w, x)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    specs = {"gate": jax.P(None, "data", "model"), "up": jax.P(None, "data", "model"), "down": jax.P(None, "model")}
    with jax.set_mesh(mesh):
        w = {name: jax.device_put(a, NamedSharding(mesh, specs.get(name, jax.P()))) for name, a in w.items()}
        x = jax.device_put(x, NamedSharding(mesh, jax.P("data")))
        found = jax.jit(DOORS[door](loss))(w, x)
    assert largest_error(jax.tree.map(np.asarray, found), jax.tree.map(np.asarray, expected)) < 1e-5
