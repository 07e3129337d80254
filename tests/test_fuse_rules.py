"""`coda.fuse` of functions with a `jax.custom_vjp`: their rule is the derivative, and what they hold is fused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coda_jax as coda
from coda_jax.fusion.merged import Merged
from tests import plain_models
from tests.test_fuse import DOORS, counts, largest_error, loss_of, with_gradients


def with_rule(backward, forward=None):
    """A function with this rule; without `forward` its arguments are kept."""

    def decorated(f):
        function = jax.custom_vjp(f)
        function.defvjp(forward or (lambda *xs: (f(*xs), xs)), backward)
        return function

    return decorated


def moment(x):
    return jax.lax.rsqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True) + 1e-6)


@with_rule(lambda kept, d: (2 * d * jax.nn.sigmoid(kept[0]),))
def activation(x):  # its rule is not its derivative
    return x * jax.nn.sigmoid(x)


@jax.custom_vjp
def gated(gate, up):
    return jax.nn.silu(gate) * up


def gated_backward(kept, d):
    gate, up = kept
    wide, d = gate.astype(jnp.float32), d.astype(jnp.float32)
    s = jax.nn.sigmoid(wide)
    return (d * up * s * (1 + wide * (1 - s))).astype(gate.dtype), (3 * d * wide * s).astype(up.dtype)


gated.defvjp(lambda gate, up: (gated(gate, up), (gate, up)), gated_backward)  # it calls itself


@with_rule(lambda kept, d: (jnp.clip(d, *kept[1]),), lambda x: (x, (x, (-2e-5, 1e-5))))
def clipped(x):  # its rule is not linear
    return x


def of_all(x):
    return tuple(range(x.ndim - 1))


@with_rule(lambda kept, d: ((t := d * jnp.cos(kept[0] + kept[1])), 2 * jnp.sum(t, axis=of_all(t)).astype(d.dtype)))
def with_bias(x, bias):
    return jnp.sin(x + bias)


def norm_forward(x, scale):
    rstd = moment(x)
    return (x.astype(jnp.float32) * rstd).astype(x.dtype) * scale, (x, scale, rstd)


def norm_backward(kept, d):
    x, scale, rstd = kept
    normed, dy = x.astype(jnp.float32) * rstd, (d * scale).astype(jnp.float32)
    dx = rstd * (dy - normed * jnp.mean(dy * normed, axis=-1, keepdims=True))
    return dx.astype(x.dtype), 2 * jnp.sum(d.astype(jnp.float32) * normed, axis=of_all(x)).astype(scale.dtype)


@with_rule(norm_backward, norm_forward)
def norm(x, scale):
    return norm_forward(x, scale)[0]


@with_rule(lambda kept, d: (jnp.where(kept[1] > 0, d, 0.5 * d), None))
def masked(x, mask):
    return jnp.where(mask > 0, x, 1)


def mask_of(x):
    return jnp.arange(x.shape[0] * x.shape[1]).reshape(*x.shape[:2], 1) % 3


FUNCTIONS = {
    "activation": lambda w, x: x + activation(x @ w["up"]) @ w["down"],
    "gated": lambda w, x: x + gated(x @ w["gate"], x @ w["up"]) @ w["down"],
    "clipped": lambda w, x: x + clipped(jax.nn.gelu(clipped(x @ w["up"]))) @ w["down"],
    "read_twice": lambda w, x: (clipped(x @ w["up"]) @ w["down"]) * jnp.sin(clipped(x @ w["up"]) @ w["down"]),
    "of_all_rows": lambda w, x: x @ w["up"] + clipped(jnp.broadcast_to(w["b_up"], (*x.shape[:2], len(w["b_up"])))),
    "with_bias": lambda w, x: with_bias(x @ w["up"], w["b_up"]) @ w["down"],
    "norm": lambda w, x: x + jnp.tanh(norm(x, w["scale"]) @ w["up"]) @ w["down"],
    "norm_of_a_product": lambda w, x: x + norm(jnp.tanh(x @ w["up"]) @ w["down"], w["scale"]),
    "masked": lambda w, x: masked(x @ w["up"], mask_of(x)) @ w["down"],
}


def arguments(dtype=jnp.float32):
    w = plain_models.weights(dtype)
    new = plain_models.Weights(3, dtype)
    w = {"up": w["up"], "gate": w["gate"], "down": w["down"], "b_up": new(w["up"].shape[1], mean=0.1)}
    return w | {"scale": new(plain_models.WIDTH, mean=1.0)}, plain_models.inputs(dtype)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_rule_that_treats_rows_is_the_derivative_of_a_map(name, door):
    (w, x), loss = arguments(), loss_of(FUNCTIONS[name])
    found, expected = (jax.jit(f)(w, x) for f in (DOORS[door](loss), with_gradients(loss)))
    assert largest_error(found, expected) < 2e-5
    assert counts(coda.fuse(FUNCTIONS[name]), w, x)[0] == 0


@pytest.mark.parametrize("name", ["activation", "clipped", "of_all_rows", "with_bias", "norm", "masked"])
def test_each_rule_differs_from_the_derivative(name, monkeypatch):
    (w, x), f = arguments(), FUNCTIONS[name]
    expected = jax.grad(loss_of(f))(w, x)
    function = "clipped" if name == "of_all_rows" else name
    monkeypatch.setitem(globals(), function, globals()[function].__wrapped__)
    assert largest_error(jax.grad(loss_of(f))(w, x), expected) > 1e-3


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["gated", "norm"])
def test_in_16_bits_a_rule_is_as_near_to_float32_as_it_was(name, dtype, door):
    (w, x), loss = arguments(dtype), loss_of(FUNCTIONS[name])
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), (w, x))
    exact = with_gradients(loss)(*wide)
    each = (jax.jit(f)(w, x) for f in (DOORS[door](loss), with_gradients(loss)))
    error, plain = (largest_error(jax.tree.map(jnp.float32, found), exact) for found in each)
    assert error < 2 * plain + 1e-3


def explained(f, *args):
    return coda.explain(f, *args, platform="cuda", device="H100")


def types():
    w, _ = arguments(jnp.bfloat16)
    sizes = {plain_models.WIDTH: 512, w["up"].shape[1]: 2048}
    wide = {name: jax.ShapeDtypeStruct([sizes[size] for size in y.shape], y.dtype) for name, y in w.items()}
    return wide, jax.ShapeDtypeStruct((4, 1024, 512), jnp.bfloat16)


PLAIN = {
    "activation": lambda w, x: x + (lambda z: z * jax.nn.sigmoid(z))(x @ w["up"]) @ w["down"],
    "gated": lambda w, x: x + (jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"],
    "clipped": lambda w, x: x + jax.nn.gelu(x @ w["up"]) @ w["down"],
    "with_bias": lambda w, x: jnp.sin(x @ w["up"] + w["b_up"]) @ w["down"],
}


@pytest.mark.parametrize("name", PLAIN)
def test_an_elementwise_rule_is_a_part_of_epilogues(name):
    args = types()
    found, without = (explained(with_gradients(coda.fuse(loss_of(f[name]))), *args) for f in (FUNCTIONS, PLAIN))
    plain = explained(with_gradients(loss_of(FUNCTIONS[name])), *args)
    assert (found.kernels, found.others) == (plain.others, 0)
    assert found.totals.passes_bytes <= without.totals.passes_bytes + 2**16 < 0.3 * plain.totals.passes_bytes
    assert found.totals.kept_bytes <= min(without.totals.kept_bytes, plain.totals.kept_bytes) + 2**16


@pytest.mark.parametrize("name", ["norm", "norm_of_a_product"])
def test_a_rule_of_rows_moves_and_keeps_less_than_a_call(name):
    args = types()
    found, plain = (explained(with_gradients(f(loss_of(FUNCTIONS[name]))), *args) for f in (coda.fuse, lambda f: f))
    assert (found.kernels, found.others) == (plain.others, 0)
    assert found.totals.passes_bytes < 0.45 * plain.totals.passes_bytes
    assert found.totals.kept_bytes <= plain.totals.kept_bytes


def test_the_derivative_of_a_rule_is_that_of_its_functions():
    (w, x), f = arguments(), FUNCTIONS["gated"]

    def second(f):
        gradient = jax.grad(loss_of(f), argnums=1)
        return jax.grad(lambda w: jnp.sum(jnp.sin(gradient(w, x))))(w)

    assert largest_error(second(coda.fuse(f)), second(f)) < 2e-5


def scaled(factor):
    return with_rule(lambda _, d: (factor * d,), lambda x: (jnp.tanh(x), None))(jnp.tanh)


def test_equal_layers_have_one_rule_and_others_their_own(monkeypatch):
    calls, original = [], Merged._by_its_rule
    monkeypatch.setattr(Merged, "_by_its_rule", lambda self, *args: calls.append(1) or original(self, *args))

    def layers(*factors):
        def f(w, x):
            for factor in factors:
                x = x + scaled(factor)(x @ w["up"]) @ w["down"]
            return x

        return loss_of(f)

    def traced(loss):
        calls.clear()
        found, expected = (jax.grad(f)(*arguments()) for f in (coda.fuse(loss), loss))
        assert largest_error(found, expected) < 2e-5
        return len(calls)

    assert traced(layers(2.0, 2.0, 2.0)) == traced(layers(2.0, 2.0)) < traced(layers(2.0, 3.0))


@pytest.mark.parametrize("transformation", ["scan", "checkpoint", "vmap", "jit"])
def test_a_rule_inside_of_transformations(transformation):
    f = FUNCTIONS["gated"]
    around = {
        "scan": lambda w, x: jax.lax.scan(lambda x, _: (f(w, x), None), x, None, length=2)[0],
        "checkpoint": lambda w, x: jax.checkpoint(f)(w, x),
        "vmap": lambda w, x: jax.vmap(lambda w, x: f(w, x[None])[0], in_axes=(None, 0))(w, x),
        "jit": lambda w, x: jax.jit(f)(w, x),
    }[transformation]
    (w, x), loss = arguments(), loss_of(around)
    assert largest_error(*(with_gradients(f)(w, x) for f in (coda.fuse(loss), loss))) < 2e-5
    assert counts(with_gradients(coda.fuse(loss)), w, x)[0] == 0


@with_rule(lambda kept, d: (d[0] * d[1],), lambda x: ((x, jnp.sin(x)), None))
def of_two_results(x):
    return x, jnp.sin(x)


@jax.custom_vjp
def without_derivative(x):
    return jnp.sin(x)


def refuse(*_):
    raise NotImplementedError("no derivative of this")


without_derivative.defvjp(refuse, refuse)


@jax.custom_vjp
def with_symbols(x, y):
    return jnp.sin(x) * y


def forward_of_symbols(x, y):
    return jnp.sin(x.value) * y.value, (x.value, x.perturbed, y.perturbed)


with_symbols.defvjp(
    forward_of_symbols, lambda kept, d: (2 * d * jnp.cos(kept[0]) if kept[1] else None, None), symbolic_zeros=True
)


@with_rule(lambda kept, d: (jnp.cumsum(d, axis=0),), lambda x: (jnp.tanh(x), None))
def over_rows(x):
    return jnp.tanh(x)


@with_rule(lambda kept, d: (2 * d * activation(kept[0]),))
def of_another(x):
    return jnp.tanh(x)


STAYS = {
    "of_two_results": lambda w, x: sum(of_two_results(x @ w["up"])) @ w["down"],
    "with_symbols": lambda w, x: with_symbols(x @ w["up"], jnp.ones(x.shape[1:2] + w["b_up"].shape)) @ w["down"],
    "over_rows": lambda w, x: over_rows(x @ w["up"]) @ w["down"],
    "of_another": lambda w, x: of_another(x @ w["up"]) @ w["down"],
}


@pytest.mark.parametrize("name", STAYS)
def test_another_rule_stays_as_it_is(name):
    (w, x), loss = arguments(), loss_of(STAYS[name])
    assert largest_error(*(with_gradients(f)(w, x) for f in (coda.fuse(loss), loss))) < 2e-5


def test_a_rule_that_refuses_a_derivative_does_so_where_one_is_asked_for():
    def f(w, x):
        return without_derivative(x @ w["up"]) @ w["down"]

    args = arguments()
    assert largest_error(coda.fuse(f)(*args), f(*args)) < 1e-5
    with pytest.raises(NotImplementedError, match="no derivative of this"):
        jax.grad(coda.fuse(loss_of(f)))(*args)


def feed_forward(x, up, down):
    return jax.nn.gelu(x @ up) @ down


def feed_forward_backward(kept, d):
    x, up, down, z = kept
    h, pullback = jax.vjp(jax.nn.gelu, z)
    (dz,) = pullback(d @ down.T)
    return 2 * dz @ up.T, jnp.einsum("btd,btf->df", x, dz), jnp.einsum("btf,btd->fd", h, d)


@with_rule(feed_forward_backward, lambda x, up, down: (feed_forward(x, up, down), (x, up, down, x @ up)))
def block(x, up, down):
    return feed_forward(x, up, down)


def scanned(x, up, down):
    return jax.lax.scan(lambda x, w: (x + feed_forward(x, *w), None), x, (up[None], down[None]))[0]


@with_rule(lambda kept, d: kept(3 * d), lambda *xs: jax.vjp(scanned, *xs))
def block_of_a_loop(x, up, down):
    return scanned(x, up, down)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def applied(f, x, up, down):
    return f(x, up, down)


applied.defvjp(lambda f, *xs: jax.vjp(f, *xs), lambda f, kept, d: kept(2 * d))

HOLDS_PRODUCTS = {  # and how many products are ours with the gradient
    "block": (lambda w, x: x + block(x, w["up"], w["down"]), 7),
    "beside_others": (lambda w, x: jnp.tanh(block(jnp.sin(x @ w["up"]) @ w["down"], w["up"], w["down"]) @ w["up"]), 16),
    "block_of_a_loop": (lambda w, x: block_of_a_loop(x, w["up"], w["down"]), 6),
    "twice": (lambda w, x: block(block(x, w["up"], w["down"]), w["up"], w["down"]), 14),
    "of_a_function": (lambda w, x: applied(feed_forward, x, w["up"], w["down"]), 6),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", HOLDS_PRODUCTS)
def test_products_inside_of_a_rule_are_fused(name, door):
    f, count = HOLDS_PRODUCTS[name]
    (w, x), loss = arguments(), loss_of(f)
    fused = DOORS[door](loss)
    assert largest_error(*(jax.jit(g)(w, x) for g in (fused, with_gradients(loss)))) < 2e-5
    assert counts(coda.fuse(f), w, x)[0] == 0
    if door == "grad(fuse)":
        assert counts(fused, w, x) == (0, count)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_16_bits_products_inside_of_a_rule_are_as_near_to_float32(dtype):
    (w, x), loss = arguments(dtype), loss_of(HOLDS_PRODUCTS["block"][0])
    exact = with_gradients(loss)(*jax.tree.map(lambda x: x.astype(jnp.float32), (w, x)))
    each = (jax.jit(f)(w, x) for f in (with_gradients(coda.fuse(loss)), with_gradients(loss)))
    error, plain = (largest_error(jax.tree.map(jnp.float32, found), exact) for found in each)
    assert error < 2 * plain + 1e-3


def test_rule_with_products_moves_half_and_keeps_as_much():
    args, f = types(), HOLDS_PRODUCTS["block"][0]
    found, plain = (explained(with_gradients(g(loss_of(f))), *args) for g in (coda.fuse, lambda f: f))
    assert (found.kernels, found.others) == (plain.others, 0)
    assert found.totals.passes_bytes < 0.5 * plain.totals.passes_bytes
    assert found.totals.kept_bytes == plain.totals.kept_bytes
    report = coda.fuse.report(f, *args)
    assert [(one.piece, one.reason) for one in report.products] == [("custom_vjp", "")] * 2
    assert not report.backward[1:]  # the derivative of a rule's functions is of no use


def test_products_of_attention_in_a_rule_stay_with_their_reason():
    """The function itself is attention; the products of its forward and backward are left."""

    def attention(q, k, v):
        return jax.nn.softmax(q @ k.swapaxes(1, 2)) @ v

    own = with_rule(lambda kept, d: kept(2 * d), lambda *xs: jax.vjp(attention, *xs))(attention)

    def f(w, x):
        return own(x, jnp.sin(x), jnp.cos(x)) @ w["up"]

    (w, x), loss = arguments(), loss_of(f)
    assert largest_error(*(with_gradients(g)(w, x) for g in (coda.fuse(loss), loss))) < 2e-5
    products = coda.fuse.report(f, w, x).products
    assert [one.piece for one in products if one.epilogue == ("attention",)] == ["custom_vjp"] * 2
    left = [one.piece for one in products if one.reason]
    assert left == [*["custom_vjp forward"] * 2, *["custom_vjp backward"] * 4]
    assert "custom_vjp_call" in str(jax.make_jaxpr(coda.fuse(f))(w, x))


def test_policies_keep_no_more_of_rules_than_jax():
    def loss(w, x):
        kept = jax.checkpoint(HOLDS_PRODUCTS["block"][0], policy=jax.checkpoint_policies.dots_saveable)
        return jnp.mean(jnp.square(jnp.tanh(kept(w, x))))

    (w, x), fused = arguments(), with_gradients(coda.fuse(loss))
    assert largest_error(fused(w, x), with_gradients(loss)(w, x)) < 2e-5
    args = types()
    found, plain = (explained(f, *args) for f in (fused, with_gradients(loss)))
    assert found.totals.kept_bytes <= plain.totals.kept_bytes + 2**16
    assert found.kernels + found.others <= plain.kernels + plain.others


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_rule_whose_function_closes_over_numbers_has_its_gradient(dtype):
    """JAX refuses to differentiate what it closes over; a table of numbers is an argument of the call all the same."""
    table = np.linspace(0.5, 1.5, 32).astype(np.float32)

    @jax.custom_vjp
    def scaled(w, h):
        return (h * table).astype(h.dtype) @ w

    def backward(kept, d):
        return jax.vjp(lambda w, h: 2 * ((h * table).astype(h.dtype) @ w), *kept)[1](d)

    scaled.defvjp(lambda w, h: (scaled(w, h), (w, h)), backward)

    def loss(w, x):
        return jnp.sum(jnp.sin(scaled(w, jnp.tanh(x @ w)).astype(jnp.float32)))

    generator = np.random.default_rng(0)
    args = [jnp.asarray(generator.standard_normal(shape) / 4, dtype) for shape in ((32, 32), (2, 8, 32))]
    expected = jax.jit(jax.grad(loss, argnums=(0, 1)))(*args)
    for door in (jax.grad(coda.fuse(loss), argnums=(0, 1)), coda.fuse(jax.grad(loss, argnums=(0, 1)))):
        for found, exact in zip(jax.jit(door)(*args), expected, strict=True):
            found, exact = (np.asarray(x, np.float32) for x in (found, exact))
            assert np.linalg.norm(found - exact) < (1e-5 if dtype == jnp.float32 else 0.02) * np.linalg.norm(exact)
