"""`coda.fuse`: the values and gradients of functions that it fuses, what it fuses, and what it leaves as it is."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import coda_jax as coda
from coda_jax.jaxprs.walk import equations
from coda_jax.primitives import gemm_primitive
from coda_jax.tools.fusion_report import IS_KERNEL
from tests import plain_models
from tests.plain_models import NAMES, layer_norm, loss_of, model, rms_norm

pytestmark = pytest.mark.filterwarnings("ignore:gemm:coda_jax.FallbackWarning")


def relative_error(found, expected, floor=0.0):
    a, b = (np.asarray(x, np.float64) for x in (found, expected))
    return np.linalg.norm(a - b) / max(np.linalg.norm(b), floor, 1e-30)


def largest_error(found, expected):
    """The largest error of all arrays, each relative to its own norm, or to a hundredth of the largest norm."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    pairs = list(zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True))
    for x, y in pairs:
        assert x.dtype == y.dtype and x.shape == y.shape
    floor = 1e-2 * max(np.linalg.norm(np.asarray(y, np.float64)) for _, y in pairs)
    return max(relative_error(x, y, floor) for x, y in pairs)


def joined(arrays):
    """All arrays as one, so that small gradients, which are differences of large terms, count as what they are."""
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(arrays)])


def counts(f, *args):
    """How many products a function has that are not coda_jax's, and that are; bodies count once."""
    names = [equation.primitive.name for equation, _ in equations(jax.make_jaxpr(f)(*args).jaxpr)]
    return names.count("dot_general"), names.count("coda_gemm")


def with_gradients(loss):
    return jax.value_and_grad(loss, argnums=(0, 1))


DOORS = {
    "grad(fuse)": lambda loss: with_gradients(coda.fuse(loss)),
    "fuse(grad)": lambda loss: coda.fuse(with_gradients(loss)),
    "exact": lambda loss: with_gradients(coda.fuse(loss, exact=True)),
}


@pytest.mark.smoke
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", NAMES)
def test_a_model_has_its_values_and_gradients(name, door):
    loss, args = model(name)
    found, expected = (jax.jit(f)(*args) for f in (DOORS[door](loss), with_gradients(loss)))
    assert largest_error(found, expected) < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_in_16_bits_a_model_is_as_near_to_float32_as_it_was(name):
    loss, args = model(name, jnp.bfloat16)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), args)
    exact = jax.jit(with_gradients(model(name)[0]))(*wide)
    errors = []
    for f in (with_gradients(loss), DOORS["grad(fuse)"](loss), DOORS["exact"](loss)):
        found = jax.tree.map(lambda x: x.astype(jnp.float32), jax.jit(f)(*args))
        errors.append(relative_error(joined(found), joined(exact)))
    own, *fused = errors
    assert max(fused) < 1.5 * own + 1e-3


@pytest.mark.parametrize("door", ["grad(fuse)", "fuse(grad)"])
@pytest.mark.parametrize("name", ["norms of products", "layer norms"])
def test_passes_read_rounded_streams_in_bfloat16(name, door):
    """The stream that passes add norms to, or make norms of, is bfloat16 in the function, and so is its cotangent.

    With float32 in their place XLA moves 0.61 of the bytes that it moves where nothing is fused, or more.
    """

    def layer(w, x, one):
        if name == "layer norms":
            return x + layer_norm(x, w["scale"], w["bias"]) @ one
        return x + rms_norm(x @ one, w["scale"])

    def loss(w, x):
        for one in w["out"]:
            x = layer(w, x, one)
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    def typed(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    args = {"out": [typed(256, 256)] * 3, "scale": typed(256), "bias": typed(256)}, typed(2, 512, 256)
    plain, fused = (
        coda.explain(f, *args, platform="cuda").totals.passes_bytes for f in (with_gradients(loss), DOORS[door](loss))
    )
    assert fused < 0.6 * plain


@pytest.mark.smoke
@pytest.mark.parametrize("name", NAMES)
def test_all_products_become_kernels_or_attention_and_no_more_bytes_move(name):
    loss, args = model(name, jnp.bfloat16)
    report = coda.fuse.report(loss, *args)
    assert not any(one.reason for one in report.products) or name == "mixer"
    assert [one.epilogue for one in report.products].count(("attention",)) == 2 * (name not in ("mixer", "adapted"))
    plain, fused = report.plain.totals, report.fused.totals
    assert fused.passes_bytes < plain.passes_bytes
    assert fused.kept_bytes <= 1.02 * plain.kept_bytes  # a norm's statistics, which XLA computes again


def layer(w, x):
    return x + jax.nn.silu(rms_norm(x, w["norm_1"]) @ w["up"]) @ w["down"]


def stacked(count=3):
    return jax.tree.map(lambda *xs: jnp.stack(xs), *(plain_models.weights(seed=i) for i in range(count)))


def scan(w, x):
    return jax.lax.scan(lambda x, w: (layer(w, x), jnp.sum(x)), x, w)[0]


def scan_of_checkpoints(w, x):
    return jax.lax.scan(jax.checkpoint(lambda x, w: (layer(w, x), None)), x, w)[0]


def first(w):
    return jax.tree.map(lambda x: x[0], w)


@jax.custom_vjp
def own_derivative(x, w):
    return jnp.sin(x @ w)


own_derivative.defvjp(
    lambda x, w: (own_derivative(x, w), (x, w)),
    lambda kept, d: (2 * d @ kept[1].T, jnp.einsum("btd,btf->df", kept[0], d)),
)

NESTS = {  # a function, and how many products are ours: forward, with the gradient; others
    "scan": (scan, 2, 6, 0),
    "scan_of_checkpoints": (scan_of_checkpoints, 2, 7, 0),
    "checkpoint": (lambda w, x: jax.checkpoint(layer)(first(w), x), 2, 7, 0),
    "cond": (lambda w, x: jax.lax.cond(x[0, 0, 0] > 0, lambda x: layer(first(w), x), lambda x: 2 * x, x), 2, 6, 0),
    "fori": (lambda w, x: jax.lax.fori_loop(0, 3, lambda i, x: layer(jax.tree.map(lambda a: a[i], w), x), x), 2, 6, 0),
    "jit": (lambda w, x: jax.jit(layer)(first(w), x), 2, 6, 0),
    "vmap": (lambda w, x: jax.vmap(layer, in_axes=(None, 0))(first(w), x), 2, 6, 0),
    "tied": (lambda w, x: layer(first(w), layer(first(w), x)), 4, 12, 0),
    "relu": (lambda w, x: jax.nn.relu(x @ w["up"][0]) @ w["down"][0], 2, 6, 0),
    "custom_vjp": (lambda w, x: own_derivative(x, w["up"][0]) @ w["down"][0], 2, 6, 0),
    "transposed": (lambda w, x: jnp.einsum("df,btd->fbt", w["up"][0], x).transpose(1, 2, 0) * 2, 1, 3, 0),
    "of_weights": (lambda w, x: x @ (w["q"][0] @ w["q"][0].T), 2, 6, 0),
}


@pytest.mark.parametrize("name", NESTS)
def test_nested_functions_are_fused_too(name):
    f, forward, backward, others = NESTS[name]
    w, x = stacked(), plain_models.inputs()
    loss = loss_of(f)
    assert largest_error(coda.fuse(f)(w, x), f(w, x)) < 1e-5
    assert counts(coda.fuse(f), w, x) == (others, forward)
    for door in ("grad(fuse)", "fuse(grad)"):
        found, expected = (jax.jit(g)(w, x) for g in (DOORS[door](loss), with_gradients(loss)))
        assert largest_error(found, expected) < 1e-5
    assert counts(with_gradients(coda.fuse(loss)), w, x)[1] == backward


def test_a_function_inside_of_transformations():
    w, x = plain_models.weights(), plain_models.inputs()
    fused, loss = coda.fuse(loss_of(layer)), loss_of(layer)
    xs = jnp.stack([x, 2 * x])
    batched = [jax.vmap(jax.grad(f), in_axes=(None, 0))(w, xs) for f in (fused, loss)]
    assert largest_error(*batched) < 1e-5
    of_batch = [jax.grad(lambda w, f=f: jnp.sum(jax.vmap(f, in_axes=(None, 0))(w, xs)))(w) for f in (fused, loss)]
    assert largest_error(*of_batch) < 1e-5
    rows = [jax.jacrev(lambda x, f=f: f(w, x).mean(axis=(0, 1)))(x) for f in (coda.fuse(layer), layer)]
    assert largest_error(*rows) < 1e-5
    second = [jax.grad(lambda x, f=f: jnp.sum(jnp.square(jax.grad(f, 1)(w, x))))(x) for f in (fused, loss)]
    assert largest_error(*second) < 1e-4
    scanned = [jax.lax.scan(lambda x, _, f=f: (f(w, x), None), x, None, length=2)[0] for f in (coda.fuse(layer), layer)]
    assert largest_error(*scanned) < 1e-5


def of_two_rows(up, down, x):
    """Products of all tokens, and of the first alone."""
    h = x @ up
    return (jnp.repeat((h[:, 0] @ down)[:, None], h.shape[1], axis=1) @ down.T) * h


def of_sums_over_rows(up, down, x):
    """Products that sum over the rows of one factor and give those of the other, as vmap makes them."""
    e = jnp.transpose(jax.lax.dot_general(up.T, x, (((1,), (2,)), ((), ()))), (1, 2, 0))
    q = jax.lax.dot_general(down.T, e, (((1,), (2,)), ((), ())))
    return jax.lax.dot_general(q, down.T, (((0,), (0,)), ((), ()))) * e


def of_a_cast_table(up, down, x):
    return jnp.tanh((x @ up) * (jnp.arange(x.shape[1]) / 8).reshape(1, -1, 1).astype(jnp.bfloat16)) @ down


def of_heads_in_front(up, down, x):
    """A weight (N, D, H), as Gemma's code has it, and one whose two axes are summed over in the other order."""
    h = jnp.einsum("btd,ndh->btnh", rms_norm(x, jnp.ones(x.shape[-1])), up.reshape(64, 8, 12).transpose(1, 0, 2))
    return jnp.einsum("btnh,hnd->btd", jnp.tanh(h), down.reshape(12, 8, 64))


@pytest.mark.parametrize("f", [of_heads_in_front, of_two_rows, of_sums_over_rows, of_a_cast_table])
@pytest.mark.parametrize("door", DOORS)
def test_products_of_other_rows_in_one_function(f, door):
    w, x = plain_models.weights(), plain_models.inputs()
    loss = lambda w, x: jnp.mean(jnp.square(f(w["up"], w["down"], x)))  # noqa: E731
    found, expected = (jax.jit(g)(w, x) for g in (DOORS[door](loss), with_gradients(loss)))
    assert largest_error(found, expected) < 1e-5
    # Beside its gradient down.T is read as it lies, and one product is one of rows.
    assert counts(DOORS[door](loss), w, x)[0] == (f is of_sums_over_rows and door == "fuse(grad)")


def test_a_derivative_of_a_scan_is_fused_whatever_its_own_would_keep():
    w, x = stacked(), plain_models.inputs()
    f = coda.fuse(
        with_gradients(loss_of(lambda w, x: jax.lax.scan(lambda x, w: (plain_models.llama(w, x), None), x, w)[0]))
    )
    assert counts(f, w, x)[1] == 21


def test_effects_stay_in_their_order(capfd):
    def f(w, x):
        y = x @ w["up"]
        jax.debug.print("first {}", jnp.int32(y[0, 0, 0] * 0), ordered=True)
        y = jax.nn.silu(y) @ w["down"]
        jax.debug.print("second {}", jnp.int32(y[0, 0, 0] * 0), ordered=True)
        return jnp.tanh(y @ w["q"])

    w, x = plain_models.weights(), plain_models.inputs()
    found = jax.jit(coda.fuse(f))(w, x)
    jax.effects_barrier()
    assert capfd.readouterr().out.split() == ["first", "0", "second", "0"]
    assert largest_error(found, f(w, x)) < 1e-5
    assert counts(coda.fuse(f), w, x) == (0, 3)


def test_random_keys_and_integers_are_arguments_too():
    def f(w, x, key, tokens):
        h = jnp.take(w["q"], tokens, axis=0) + x
        key, other = jax.random.split(key)
        h = jax.nn.relu(h @ w["up"]) @ w["down"]
        mask = jax.random.bernoulli(other, 0.9, h.shape)
        return jnp.where(mask, h / 0.9, 0.0) @ w["q"], key

    w, x = plain_models.weights(), plain_models.inputs()
    tokens = jnp.arange(x.shape[0] * x.shape[1]).reshape(x.shape[:2]) % 7
    key = jax.random.key(3)
    (found, found_key), (expected, expected_key) = coda.fuse(f)(w, x, key, tokens), f(w, x, key, tokens)
    assert largest_error(found, expected) < 1e-5
    assert jnp.array_equal(jax.random.key_data(found_key), jax.random.key_data(expected_key))
    gradients = [jax.grad(lambda w, g=g: jnp.sum(g(w, x, key, tokens)[0] ** 2))(w) for g in (coda.fuse(f), f)]
    assert largest_error(*gradients) < 1e-5


def test_names_reach_the_policies_of_checkpoints():
    def f(w, x):
        h = checkpoint_name(jax.nn.silu(x @ w["up"]), "hidden")
        return jnp.sum(jnp.square(h @ w["down"]))

    w, x = plain_models.weights(), plain_models.inputs()
    kept = {}
    for names in ((), ("hidden",)):
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        g = jax.grad(jax.checkpoint(coda.fuse(f), policy=policy))
        assert largest_error(g(w, x), jax.grad(f)(w, x)) < 1e-5
        kept[names] = counts(g, w, x)[1]
    assert kept[()] > kept["hidden",]


def test_arrays_that_a_function_closes_over_have_gradients():
    w, x = plain_models.weights(), plain_models.inputs()

    def loss(scale):
        return jnp.sum(coda.fuse(lambda x: jax.nn.silu(x @ (w["up"] * scale)) @ w["down"])(x))

    def plain(scale):
        return jnp.sum(jax.nn.silu(x @ (w["up"] * scale)) @ w["down"])

    assert largest_error(jax.grad(loss)(2.0), jax.grad(plain)(2.0)) < 1e-5


@pytest.mark.parametrize(
    "holder", [lambda f: f, jax.checkpoint, lambda f: lambda w: jax.lax.cond(w[0, 0] > 9, f, f, w)]
)
@pytest.mark.parametrize("door", DOORS)
def test_arrays_that_a_jitted_function_closes_over(door, holder):
    x, numbers = plain_models.inputs(), np.arange(plain_models.WIDTH, dtype=np.float32)
    inner = jax.jit(lambda w: jnp.tanh(x @ w) * numbers)
    loss = lambda w, scale: jnp.sum(jnp.square(scale * holder(inner)(w)))  # noqa: E731
    args = plain_models.weights()["q"], jnp.float32(0.1)
    assert largest_error(DOORS[door](loss)(*args), with_gradients(loss)(*args)) < 1e-5
    assert counts(DOORS[door](loss), *args)[0] == 0


def test_effects_of_a_jitted_function_that_closes_over_an_array(capfd):
    x = plain_models.inputs()

    @jax.jit
    def f(w):
        jax.debug.print("seen")
        return x @ w

    w = plain_models.weights()["q"]
    assert largest_error(coda.fuse(f)(w), x @ w) < 1e-5
    jax.effects_barrier()
    assert "seen" in capfd.readouterr().out


def test_a_module_that_a_function_closes_over_changes_as_it_did():
    x, found = jnp.arange(32.0).reshape(4, 8) / 8, []
    for fuse in (lambda f: f, coda.fuse):
        module = Noisy(nnx.Rngs(0))
        f = fuse(lambda x, module=module: module(x))
        found.append([f(x), f(x), *jax.tree.leaves(nnx.state(module, nnx.BatchStat))])
    assert largest_error(*found) < 1e-6


def test_arrays_that_change_are_read_again():
    class Plain:
        def __init__(self):
            self.w = jnp.eye(8)

        def __call__(self, x):
            return jnp.tanh(x @ self.w)

    plain, model, x = Plain(), nnx.Linear(8, 8, rngs=nnx.Rngs(0)), jnp.ones((4, 8))
    for f in (coda.fuse(plain), coda.fuse(lambda x: jnp.tanh(model(x)))):
        before = f(x)
        plain.w, model.kernel[...] = 2 * plain.w, 2 * model.kernel[...]
        assert largest_error(f(x), before) > 1e-2


def test_a_function_that_asks_for_values_runs_as_it_is():
    def f(x, w):
        return x @ w if x[0, 0, 0] > 0 else x @ (2 * w)

    w, x = plain_models.weights(), plain_models.inputs()
    assert largest_error(coda.fuse(f)(x, w["up"]), f(x, w["up"])) < 1e-6
    report = coda.fuse.report(f, x, w["up"])
    assert str(report) == "fuse(f): it runs as it is, for it asks for the value of an array"
    assert (report.plain, report.fused, report.products) == (None, None, ())


def test_an_index_of_bools_and_a_string_of_numpy():
    def f(x, w, name):
        y = x @ w
        return y[x[..., 0] > 0] if name == "some" else y

    w, x = plain_models.weights(), plain_models.inputs()
    for name in map(np.str_, ("some", "all")):
        assert largest_error(coda.fuse(f)(x, w["up"], name), f(x, w["up"], name)) < 1e-6


def test_a_trace_is_of_the_context_that_it_was_made_in():
    @coda.fuse
    def f(x, w):
        return x @ w / jax.lax.axis_size("batch")

    w, x = plain_models.weights()["up"], plain_models.inputs()
    for count in (2, 4):
        found = jax.vmap(f, (0, None), axis_name="batch")(jnp.stack([x] * count), w)
        assert largest_error(found, jnp.stack([x @ w / count] * count)) < 1e-5

    @coda.fuse
    def noisy(x, w):
        return x @ w + jax.random.normal(jax.random.key(0))

    for name in ("threefry2x32", "rbg"):
        with jax.default_prng_impl(name):
            assert largest_error(noisy(x, w), noisy.plain(x, w)) < 1e-5


def test_only_traces_that_are_used_again_are_kept():
    def with_effects(x, w):
        jax.debug.callback(lambda _: None, x[0, 0, 0])
        return jnp.tanh(x @ w)

    w, x = plain_models.weights()["up"], plain_models.inputs()
    f, weights = coda.fuse(with_effects), []
    g = coda.fuse(lambda x: jnp.tanh(x @ weights[-1]))
    for _ in range(3):
        f(x, w)
        jax.grad(lambda w: weights.append(w) or jnp.sum(g(x)))(w)
    assert len(f.pieces.made) == len(g.pieces.made) == 1


class Noisy(nnx.Module):
    """A module with statistics and random numbers, which a call changes."""

    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)
        self.norm, self.dropout = nnx.BatchNorm(16, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.down(self.dropout(self.norm(self.up(x))))


@pytest.mark.smoke
def test_a_module_changes_in_place_as_it_did():
    x = jnp.arange(32.0).reshape(4, 8) / 8
    losses, modules, found = [], [Noisy(nnx.Rngs(0)) for _ in range(2)], []
    for f, module in zip(
        (lambda m, x: jnp.mean(m(x) ** 2), coda.fuse(lambda m, x: jnp.mean(m(x) ** 2))), modules, strict=True
    ):
        steps = [nnx.value_and_grad(f)(module, x), nnx.jit(nnx.value_and_grad(f))(module, x)]
        losses.append([loss for loss, _ in steps])
        found.append([jax.tree.leaves(gradient) for _, gradient in steps])
        with pytest.raises(AttributeError):
            coda.fuse(lambda m: m.nothing)(module)
    assert largest_error(losses[1], losses[0]) < 1e-5 and largest_error(found[1], found[0]) < 1e-4
    plain, fused = (jax.tree.leaves(nnx.state(module, nnx.BatchStat)) for module in modules)
    assert largest_error(fused, plain) < 1e-6
    counts = [[x.item() for x in jax.tree.leaves(nnx.state(module, nnx.RngCount))] for module in modules]
    assert counts[0] == counts[1] == [2]


class Shared(nnx.Module):
    """A module of two names for one stream of random numbers, that counts its calls."""

    def __init__(self, rngs):
        self.linear, self.first, self.second, self.calls = nnx.Linear(8, 8, rngs=rngs), rngs, rngs, 0

    def __call__(self, x):
        self.calls += 1
        return self.linear(x) + sum(jax.random.normal(rngs.noise(), x.shape) for rngs in (self.first, self.second))


def test_shared_variables_and_static_attributes_change_as_they_did():
    x, results = jnp.ones((4, 8)), []
    for f in (lambda m, x: m(x), coda.fuse(lambda m, x: m(x))):
        module = Shared(nnx.Rngs(0, noise=1))
        results.append([f(module, x), f(module, x), nnx.jit(f)(module, x), module.first.noise.count[...]])
        assert module.calls == 3
    assert largest_error(results[1], results[0]) < 1e-6
    report = coda.fuse.report(lambda m, x: m(x), Shared(nnx.Rngs(0, noise=1)), x)
    assert report.reason == "it changes the structure of an argument"  # for Flax, attributes are a part of that
    count = nnx.Variable(jnp.zeros(()))

    def f(a, b, x):
        a[...] += 1
        return x @ x.T * b[...]

    fused = coda.fuse(f)
    assert jnp.all(fused(count, count, x) == 8) and count[...] == 1
    assert fused.reason == "it changes a variable that modules among its arguments share"


def test_an_argument_that_changes_its_structure():
    def f(options, w, x):
        options["seen"] = x
        return x @ w

    w, x = plain_models.weights()["q"], plain_models.inputs()
    options, fused = {}, coda.fuse(f)
    assert largest_error(fused(options, w, x), x @ w) < 1e-6
    assert options["seen"] is x and fused.reason == "it changes the structure of an argument"
    assert fused({"seen": x}, w, x).shape == x.shape


def test_one_signature_is_traced_once():
    traces = []

    @coda.fuse
    def f(x, w, scale=1.0):
        traces.append(scale)
        return jnp.tanh(x @ w) * scale

    w, x = plain_models.weights(), plain_models.inputs()
    for scale in (1.0, 1.0, 2.0, 2.0):
        assert largest_error(f(x, w["up"], scale), jnp.tanh(x @ w["up"]) * scale) < 1e-5
    assert len(traces) == 2


def test_outside_jit_equal_layers_are_compiled_once():
    w, x = jnp.eye(8), jnp.ones((4, 8))

    def compiled(layers):
        def f(w, x):
            for _ in range(layers):
                x = jnp.tanh(x @ w)
            return jnp.sum(x)

        before = gemm_primitive._run._cache_size()
        assert largest_error(jax.grad(coda.fuse(f))(w, x), jax.grad(f)(w, x)) < 1e-5
        return gemm_primitive._run._cache_size() - before

    assert 0 < compiled(4) < 12
    assert compiled(9) <= 1  # a sum of nine gradients, which is another one


@pytest.mark.parametrize("has_positions", [False, True])
def test_heads_that_are_rotated_in_float32_are_stored_once_as_attention_reads_them(has_positions):
    """A tile that a call reads in 16 bits is no array in more bytes, which all of its readers would compute again.

    Positions of each token, as of packed rows, give a table that queries and keys share.
    """
    rows, heads = (2, 256), (4, 64)

    def turned(h, c, s):
        a, b = jnp.split(h.astype(jnp.float32), 2, axis=-1)
        return jnp.concatenate([a * c - b * s, b * c + a * s], axis=-1).astype(h.dtype)

    def loss_with(rotation):
        def loss(w, x, positions):
            q, k, v = ((x @ w[name]).reshape(*rows, *heads) for name in "qkv")
            angles = positions[..., None, None] * jnp.linspace(1, 0, heads[1] // 2)
            tables = jnp.cos(angles), jnp.sin(angles)
            o = jax.nn.dot_product_attention(rotation(q, *tables), rotation(k, *tables), v, is_causal=True)
            return jnp.sum((o.reshape(x.shape) @ w["o"]).astype(jnp.float32))

        return loss

    x = jax.ShapeDtypeStruct((*rows, math.prod(heads)), jnp.bfloat16)
    w = dict.fromkeys("qkvo", jax.ShapeDtypeStruct((x.shape[-1],) * 2, jnp.bfloat16))
    positions = jax.ShapeDtypeStruct(rows if has_positions else rows[1:], jnp.int32)
    turning, without = (
        coda.explain(jax.grad(coda.fuse(loss_with(f))), w, x, positions, platform="cuda").totals
        for f in (turned, lambda h, *_: h)
    )
    more = 4 * math.prod(rows) * heads[0] + 4 * math.prod(positions.shape) * heads[1]  # a log-sum-exp; cos and sin
    assert turning.kept_bytes <= without.kept_bytes + more
    assert turning.passes_bytes < without.passes_bytes + math.prod(x.shape) * 2  # tables alone: attention turns back


@pytest.mark.parametrize("is_gradient", [False, True])
def test_norms_of_heads_are_made_in_the_epilogue_of_their_product(is_gradient):
    """Their sums are no arrays of their own, and the gradient of the scale is a sum over rows and heads by a map."""
    rows, heads, dim = 4, 4, 32

    def loss(x, w, scale, out):
        q = (x @ w).reshape(*x.shape[:2], heads, dim)
        q = q * jax.lax.rsqrt(jnp.mean(q * q, axis=-1, keepdims=True) + 1e-6) * scale
        return jnp.sum(jnp.sin(q.reshape(*x.shape[:2], -1) @ out))

    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (2, rows, 32), (32, heads * dim), (dim,), (heads * dim, 32)
    arrays = [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]
    function = jax.value_and_grad(loss, (0, 1, 2, 3)) if is_gradient else loss
    found, expected = jax.jit(coda.fuse(function))(*arrays), jax.jit(function)(*arrays)
    for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-4 * float(jnp.max(jnp.abs(y))))
    passes = coda.explain(coda.fuse(function), *arrays, platform="cuda").passes
    assert not [x for x in passes if "rsqrt" in x.operation and x.bytes > 4 * 2 * rows * heads * dim]


def test_a_check_passes_and_finds_what_is_wrong(monkeypatch):
    w, x = plain_models.weights(), plain_models.inputs()
    loss = coda.fuse(loss_of(layer), check=True)
    assert largest_error(jax.jit(with_gradients(loss))(w, x), with_gradients(loss_of(layer))(w, x)) < 1e-5
    monkeypatch.setattr("coda_jax.fusion.lift._powers", lambda *xs, powers, factor: 1.1 * xs[0])
    monkeypatch.setattr("coda_jax.graph.norm.scaled_backward", lambda u, acc, r, d, inner: (r * d, inner))

    def planted(merged, equation, inputs, *given):
        return [1.1 * x for x in results(merged, equation, inputs, *given)]

    from coda_jax.fusion.merged import Merged

    results = Merged.results
    monkeypatch.setattr(Merged, "results", planted)
    with pytest.raises(Exception, match="differs from the original's"):
        jax.block_until_ready(coda.fuse(loss_of(layer), check=True)(w, x))
        jax.effects_barrier()


def test_a_check_of_infinities_and_of_8_bits():
    def f(w, x):
        y = x @ w["up"]
        return jnp.where(y > 0, y, -jnp.inf), y.astype(jnp.float8_e4m3fn)

    w, x = plain_models.weights(), plain_models.inputs()
    jax.block_until_ready(coda.fuse(f, check=True)(w, x))
    jax.effects_barrier()


@pytest.mark.parametrize("aux", ["a number", "an array", "a dict"])
def test_a_report_of_a_loss_beside_other_results_has_its_gradient(aux):
    """As `jax.grad` takes it with has_aux=True; a function that has derivatives already is none."""

    def loss(w, x):
        y = layer(w, x)
        value = jnp.mean(jnp.square(y))
        return value, {"a number": jnp.sqrt(value), "an array": y, "a dict": {"rms": jnp.sqrt(value)}}[aux]

    args = plain_models.weights(), plain_models.inputs()
    one, other = (coda.fuse.report(f, *args) for f in (loss, lambda *args: loss(*args)[0]))
    for found, expected in ((one.plain, other.plain), (one.fused, other.fused)):
        assert 0 < found.totals.kept_bytes == pytest.approx(expected.totals.kept_bytes, abs=16)  # of a square root
    assert sum(one.fused.products.values()) == sum(other.fused.products.values()) == 3 * len(one.products)
    for f in (loss, coda.fuse(loss)):
        with_gradient = jax.grad(f, has_aux=True)
        found, expected = with_gradient(*args), jax.grad(loss, has_aux=True)(*args)
        assert largest_error(found, expected) < 1e-5
    step = coda.fuse.report(jax.value_and_grad(lambda w, x: loss(w, x)[0]), *args)
    assert sum(step.fused.products.values()) == len(step.products)  # it is not differentiated again


@pytest.mark.smoke
def test_a_report_names_lines_epilogues_and_reasons():
    loss, args = model("llama")
    text = str(coda.fuse.report(coda.fuse(loss, attention=False), *args))
    assert "fuse(llama): 7 of 9 products are coda_jax's" in text
    assert "plain_models.py:" in text and "left: both factors have batch axes" in text
    assert "passes between products" in text and "backward pass of llama" in text


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"memory": "least"}, ValueError, "'same' or None"),
        ({"implementation": "fast"}, ValueError, "implementation"),
        ({"defer_norms": "always"}, ValueError, "True, False or None"),
    ],
)
def test_bad_options_are_refused(options, error, words):
    with pytest.raises(error, match=words):
        coda.fuse(layer, **options)
    with pytest.raises(TypeError, match="it must be a function"):
        coda.fuse(3)


def test_memory_is_a_gate(monkeypatch):
    loss, args = model("llama")
    for name in ("kept_by_jax", "surely_kept_by_jax"):
        monkeypatch.setattr(f"coda_jax.fusion.pieces.{name}", lambda *_: 0)
    monkeypatch.setattr("coda_jax.fusion.pieces._VECTORS", 0)
    assert counts(coda.fuse(loss), *args)[1] == 0
    reasons = {one.reason for one in coda.fuse.report(loss, *args).products if one.epilogue != ("attention",)}
    assert all(reason.startswith("its backward pass would keep") for reason in reasons)
    products = coda.fuse.report(scan, stacked(), plain_models.inputs()).products
    assert len(products) == 2  # once, though the loop was tried in graphs that kept too much
    assert counts(coda.fuse(loss, memory=None), *args)[1] == 7


def test_the_implementation_is_that_of_the_products():
    w, x = plain_models.weights(), plain_models.inputs()
    with pytest.raises(NotImplementedError, match=r"implementation=.cuda."):
        coda.fuse(layer, implementation="cuda")(w, x)
    assert largest_error(coda.fuse(layer, implementation="xla")(w, x), layer(w, x)) < 1e-5


def feed_forward(w, x):
    return x + jax.nn.silu(rms_norm(x, w["norm_1"]) @ w["up"]) @ w["down"]


CALLED = {
    "in place": lambda layer, w, x: layer(w, layer(w, x)),
    "jit": lambda layer, w, x: jax.jit(layer)(w, jax.jit(layer)(w, x)),
    "checkpoint": lambda layer, w, x: jax.checkpoint(layer)(w, x),
    "scan": lambda layer, w, x: jax.lax.scan(lambda x, _: (layer(w, x), None), x, length=2)[0],
    "cond": lambda layer, w, x: jax.lax.cond(x[0, 0, 0] > 0, layer, lambda w, x: x, w, x),
    "vmap": lambda layer, w, x: jax.vmap(layer, (None, 0))(w, x),
    "gradient": lambda layer, w, x: x - jax.grad(lambda x: jnp.sum(jnp.float32(layer(w, x)) ** 2))(x),
    "within another": lambda layer, w, x: coda.fuse(lambda w, x: jnp.tanh(layer(w, x)))(w, x),
}


@pytest.mark.smoke
@pytest.mark.parametrize("door", ["grad(fuse)", "fuse(grad)"])
@pytest.mark.parametrize("called", CALLED)
def test_a_fused_function_is_a_part_of_the_one_that_calls_it(called, door):
    def loss(layer):
        return lambda w, x: jnp.mean(jnp.square(CALLED[called](layer, w, x).astype(jnp.float32)))

    w, x = plain_models.weights(), plain_models.inputs()
    plain, inside = loss(feed_forward), loss(coda.fuse(feed_forward))
    if called == "gradient" and door == "grad(fuse)":  # of the second order
        assert largest_error(coda.fuse(inside)(w, x), plain(w, x)) < 1e-5
    else:
        assert largest_error(jax.jit(DOORS[door](inside))(w, x), jax.jit(with_gradients(plain))(w, x)) < 1e-5
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), (w, x))
    fuse = coda.fuse if called == "gradient" and door == "grad(fuse)" else DOORS[door]
    found, expected = (coda.explain(fuse(f), *types, platform="cuda") for f in (inside, plain))
    assert found.totals.passes_bytes == expected.totals.passes_bytes
    assert found.totals.kept_bytes == expected.totals.kept_bytes
    assert (found.kernels, found.others) == (expected.kernels, expected.others) and not found.others


def test_a_function_jitted_inside_of_a_fused_one_is_fused_alone_outside_of_it():
    """JAX's trace of it inside serves there alone, and what it has of one outside serves outside alone."""
    w, x = plain_models.weights(), plain_models.inputs()
    for first in (0, 1):
        layer = jax.jit(coda.fuse(feed_forward))
        pair = [coda.fuse(lambda w, x, layer=layer: jnp.tanh(layer(w, x))), layer]
        for f in (pair[first], pair[1 - first]):
            assert counts(f, w, x) == (0, 2)
        assert [not one.reason for one in coda.fuse.report(pair[0], w, x).products] == [True, True]


def test_report_counts_products_inside_a_fused_function():
    w, x = plain_models.weights(), plain_models.inputs(jnp.bfloat16)
    w = jax.tree.map(lambda x: x.astype(jnp.bfloat16), w)

    def loss(layer):
        return lambda w, x: jnp.mean(jnp.square((layer(w, x) @ w["up"]).astype(jnp.float32)))

    plain, inside = (coda.fuse.report(loss(f), w, x) for f in (feed_forward, coda.fuse(feed_forward)))
    assert (inside.products, inside.backward) == (plain.products, plain.backward)
    assert all("(feed_forward)" in one.line for one in inside.products[:2])
    own = coda.fuse.report(loss(coda.fuse(feed_forward, exact=True)), w, x)
    assert [one.reason for one in own.products if one.reason] == [IS_KERNEL] * 2
    assert "test_fuse.py" in own.products[-1].line
    assert inside.plain.totals == own.plain.totals == plain.plain.totals


@pytest.mark.parametrize("options", [{"exact": True}, {"implementation": "xla"}, {"check": True}, {"memory": None}])
def test_options_of_a_fused_function_inside_hold(options):
    """Options that it has none of are those of the function around; others are its own."""
    w, x = (jax.tree.map(lambda x: x.astype(jnp.bfloat16), y) for y in (plain_models.weights(), plain_models.inputs()))

    def twice(layer):
        return lambda w, x: layer(w, layer(w, x))

    inside = twice(coda.fuse(feed_forward))
    assert str(jax.make_jaxpr(coda.fuse(inside, **options))(w, x)).count("coda_gemm") >= 4
    found, expected = (jax.jit(coda.fuse(f, **options))(w, x) for f in (inside, twice(feed_forward)))
    np.testing.assert_array_equal(found, expected)
    own = coda.fuse(twice(coda.fuse(feed_forward, **options)))
    assert largest_error(*(jax.jit(f)(w, x).astype(jnp.float32) for f in (own, coda.fuse(twice(feed_forward))))) < 2e-2
    one = jax.jit(coda.fuse(feed_forward, **options))
    np.testing.assert_array_equal(jax.jit(own)(w, x), one(w, one(w, x)))


def test_a_fused_function_in_one_that_stays_is_fused_alone():
    def convolved(w, x):
        images = jnp.broadcast_to(x[0][:, :, None, None], (*x.shape[1:], 8, 8))
        kernel = jnp.ones((images.shape[1], images.shape[1], 7, 7))
        return x + jnp.mean(jax.lax.conv(images, kernel, (1, 1), "SAME"))

    def f(layer):
        return lambda w, x: layer(w, convolved(w, x))

    w, x = plain_models.weights(), plain_models.inputs()
    (reason,) = {one.reason for one in coda.fuse.report(f(feed_forward), w, x).products}
    assert "convolutions" in reason
    inside = f(coda.fuse(feed_forward))
    assert counts(coda.fuse(inside), w, x) == (0, 2)
    assert not any(one.reason for one in coda.fuse.report(inside, w, x).products)
    assert largest_error(coda.fuse(inside)(w, x), f(feed_forward)(w, x)) < 1e-5


@jax.custom_vjp
def through(w, x):
    return coda.fuse(feed_forward)(w, x)


through.defvjp(lambda w, x: jax.vjp(coda.fuse(feed_forward), w, x), lambda pullback, cotangent: pullback(2 * cotangent))


def test_a_fused_function_in_one_with_a_derivative_of_its_own_is_fused_alone():
    def f(w, x):
        return through(w, x) @ w["up"]

    w, x = plain_models.weights(), plain_models.inputs()
    assert counts(coda.fuse(f), w, x) == (0, 3)
    assert largest_error(coda.fuse(f)(w, x), f(w, x)) < 1e-5
    found, expected = (jax.grad(lambda w: jnp.sum(f(w, x) ** 2))(w) for f in (coda.fuse(f), f))  # noqa: B023
    assert largest_error(found, expected) < 1e-5


def test_the_gradient_of_a_fused_loss_inside_keeps_no_logits():
    def loss(w, x, labels):
        z = jnp.float32(x @ w)
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(z), labels[..., None], -1))

    args = (
        jax.ShapeDtypeStruct((64, 4096), jnp.bfloat16),
        jax.ShapeDtypeStruct((4, 256, 64), jnp.bfloat16),
        jax.ShapeDtypeStruct((4, 256), jnp.int32),
    )
    fused = coda.fuse(loss)
    found = coda.explain(coda.fuse(with_gradients(fused)), *args, platform="cuda")
    expected = coda.explain(with_gradients(fused), *args, platform="cuda")
    assert found.totals.passes_bytes == expected.totals.passes_bytes
    assert (found.kernels, found.others) == (expected.kernels, expected.others)
    assert all(one.reason == IS_KERNEL for one in coda.fuse.report(with_gradients(fused), *args).products)
    mean = coda.fuse(lambda w, x, labels: jnp.mean(jax.vmap(fused, (None, 0, 0))(w, x, labels)))
    assert counts(mean, *args)[0] == 0


def train_step(w, momentum, x):
    value, (gradient, _) = with_gradients(loss_of(feed_forward))(w, x)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradient)
    return jax.tree.map(lambda w, m: w - 0.1 * m, w, momentum), momentum, value


def arguments_of_step(dtype):
    w, x = (jax.tree.map(lambda x: x.astype(dtype), y) for y in (plain_models.weights(), plain_models.inputs()))
    w = {name: w[name] for name in ("norm_1", "up", "down")}
    return jax.tree.map(jnp.copy, (w, jax.tree.map(jnp.zeros_like, w), x))


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("donated", [(), (0, 1), (1,)])
def test_a_jitted_step_is_fused_and_donates_what_it_donated(donated, dtype, caplog):
    step = jax.jit(train_step, donate_argnums=donated)
    fused = coda.fuse(step)
    products = coda.fuse.report(fused, *arguments_of_step(jnp.bfloat16)).products
    assert [(one.piece, one.reason) for one in products] == [("train_step", "")] * 6
    types = jax.eval_shape(lambda: arguments_of_step(jnp.bfloat16))
    found, expected, plain = (
        coda.explain(f, *types, platform="cuda") for f in (fused, coda.fuse(train_step), train_step)
    )
    assert (found.kernels, found.others) == (expected.kernels, expected.others) == (6, 0)
    assert found.totals.passes_bytes == expected.totals.passes_bytes < plain.totals.passes_bytes
    results, gone = [], []
    for f in (step, fused, jax.jit(lambda *args: fused(*args))):
        args = arguments_of_step(dtype)
        results.append(jax.tree.map(lambda x: x.astype(jnp.float32), f(*args)))
        gone.append([x.is_deleted() for x in jax.tree.leaves(args)])
    exact = train_step(*jax.tree.map(lambda x: x.astype(jnp.float32), arguments_of_step(dtype)))
    for other in results[1:]:
        assert largest_error(other, exact) < (1e-5 if dtype == jnp.float32 else 1e-2)
    assert gone[1] == gone[0] and any(gone[0]) == bool(donated) and not any(gone[2])
    again = arguments_of_step(dtype)
    with jax.log_compiles():
        caplog.clear()
        fused(*again)
    assert "compil" not in caplog.text.lower()
    assert [e.params["name"] for e in jax.make_jaxpr(fused)(*again).jaxpr.eqns] == ["train_step"]  # one program


def test_a_donated_step_beside_other_work_is_fused_by_itself(capfd):
    @functools.partial(jax.jit, donate_argnums=0)
    def step(w, x):
        jax.debug.print("loss {}", jnp.float32(1))
        return jax.tree.map(lambda w, g: w - g, w, jax.grad(loss_of(feed_forward))(w, x)), jnp.zeros(())

    def f(w, x):
        x = jnp.tanh(x @ w["up"])[..., : x.shape[-1]]
        return step(w, x)

    results = []
    for g in (f, coda.fuse(f)):
        w, _, x = arguments_of_step(jnp.float32)
        results.append(g(w, x))
        assert all(y.is_deleted() for y in jax.tree.leaves(w))
    assert largest_error(*results) < 1e-5
    w, _, x = arguments_of_step(jnp.float32)
    products = coda.fuse.report(f, w, x).products
    assert sorted(one.piece for one in products) == ["f", *["step"] * 6] and not any(one.reason for one in products)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("loss 1") == 2


def test_a_jitted_step_of_nnx_that_donates_its_model():
    class Model(nnx.Module):
        def __init__(self):
            self.up, self.down = nnx.Linear(8, 16, rngs=nnx.Rngs(0)), nnx.Linear(16, 8, rngs=nnx.Rngs(1))

    def step(model, x):
        def loss(model):
            return jnp.mean((x + model.down(nnx.gelu(model.up(x)))) ** 2)

        value, gradient = nnx.value_and_grad(loss)(model)
        nnx.update(model, jax.tree.map(lambda w, g: w - 0.1 * g, nnx.state(model), gradient))
        return value

    step, x = nnx.jit(step, donate_argnums=0), jnp.arange(32.0).reshape(4, 8) / 8
    fused = coda.fuse(step)
    values, states = [], []
    for f in (step, fused):
        model = Model()
        before = jax.tree.leaves(nnx.state(model))
        values.append([f(model, x) for _ in range(3)])
        states.append(nnx.state(model))
        assert all(one.is_deleted() for one in before)
    assert largest_error(*values) < 1e-5 and largest_error(*(jax.tree.leaves(s) for s in states)) < 1e-5
    assert [one.reason for one in coda.fuse.report(fused, Model(), x).products] == [""] * 5


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_gradient_of_a_fused_jitted_loss(dtype):
    w, _, x = arguments_of_step(dtype)
    loss = loss_of(feed_forward)
    fused = coda.fuse(jax.jit(loss))
    as_floats = functools.partial(jax.tree.map, lambda x: x.astype(jnp.float32))
    found, expected = (as_floats(with_gradients(f)(w, x)) for f in (fused, loss))
    assert largest_error(found, expected) < (1e-5 if dtype == jnp.float32 else 3e-2)
    if dtype == jnp.bfloat16:
        totals = [coda.explain(with_gradients(f), w, x, platform="cuda").totals for f in (fused, coda.fuse(loss))]
        assert totals[0].passes_bytes == totals[1].passes_bytes and totals[0].kept_bytes == totals[1].kept_bytes
