"""`coda.fp8.matmul` in functions under `coda.fuse`: products of the graph, as the same quantisers in plain JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import coda_jax as coda
from benchmarks import plain_llama, unmodified
from coda_jax.jaxprs.walk import equations
from coda_jax.primitives.gemm_primitive import PRIMITIVES
from flax_layers import GPT2, GPT2Config, Llama, LlamaConfig, fp8
from flax_layers.layer_stack import run_layers
from tests.tolerance import check

pytestmark = pytest.mark.filterwarnings("ignore:gemm:coda_jax.FallbackWarning", "ignore:block:coda_jax.FallbackWarning")
D, F, H = 32, 64, 4
DELAYED = coda.fp8.Recipe(scaling="delayed", history=H)
E5M2 = coda.fp8.Recipe(gradient_dtype=jnp.float8_e5m2)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def weights():
    shapes = {"up": (D, F), "gate": (D, F), "down": (F, D)}
    arrays = {name: normal(i, *shape) * shape[0] ** -0.5 for i, (name, shape) in enumerate(shapes.items())}
    return arrays | {"norm": 1 + 0.1 * normal(9, D)}


def histories():
    """Maxima of x, with headroom, and smaller ones of cotangents, of which the first are clipped."""
    return {name: jnp.stack([jnp.full(H, 0.6), jnp.full(H, 2e-3 if i else 1e-7)]) for i, name in enumerate(weights())}


def feed_forward(w, x, recipe, h=None, multiply=None):
    def times(x, name):
        if multiply is not None:
            return multiply(x, w[name])
        return coda.fp8.matmul(x, w[name], recipe=recipe, history=None if h is None else h[name])

    rstd = jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)
    y = x * rstd * w["norm"]
    return x + times(jax.nn.silu(times(y, "gate")) * times(y, "up"), "down")


def once(w, x, h=None, recipe=None):
    return feed_forward(w, x, recipe, h)


def scanned(w, x, h=None, recipe=None):
    stack, stack_h = (jax.tree.map(lambda x: jnp.stack([x, x / 2, x / 3]), one) for one in (w, h))
    return jax.lax.scan(lambda x, of: (feed_forward(of[0], x, recipe, of[1]), None), x, (stack, stack_h))[0]


def checkpointed(w, x, h=None, recipe=None):
    policy = jax.checkpoint_policies.dots_saveable
    return jax.checkpoint(functools.partial(once, recipe=recipe), policy=policy)(w, x, h)


def in_branch(w, x, h=None, recipe=None):
    return jax.lax.cond(jnp.sum(x) < 1e4, functools.partial(once, recipe=recipe), lambda w, x, h: x, w, x, h)


def twice(w, x, h=None, recipe=None):
    return once(w, once(w, x, h, recipe), h, recipe)


def beside_attention(w, x, h=None, recipe=None):
    q = coda.fp8.matmul(x, w["up"], recipe=recipe, history=None if h is None else h["up"])
    p = jax.nn.softmax(jnp.einsum("btd,bsd->bts", q, q) / 8, axis=-1)
    y = jnp.einsum("bts,bsd->btd", p, q)
    return x + coda.fp8.matmul(y, w["down"], recipe=recipe, history=None if h is None else h["down"])


def loss_of(f, recipe):
    return lambda w, x, h=None: jnp.mean(jnp.square(f(w, x, h, recipe=recipe)) * jnp.linspace(0.5, 1.5, x.shape[-1]))


FORMS = [once, scanned, checkpointed, in_branch, twice, beside_attention]
RECIPES = {"current": None, "e5m2": E5M2, "delayed": DELAYED}


def arguments(recipe):
    return weights(), normal(7, 2, 24, D), *([histories()] if recipe is DELAYED else [])


def products_in_8_bits(f, *args):
    every = equations(jax.make_jaxpr(f)(*args).jaxpr)
    return sum(e.primitive in PRIMITIVES and e.invars[0].aval.dtype.itemsize == 1 for e, _ in every)


def assert_alike(found, expected, bound=3e-6):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        norm = float(jnp.linalg.norm(y.ravel()))
        assert float(jnp.linalg.norm((x - y).ravel())) <= bound * max(norm, 1e-12)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.__name__)
def test_values_gradients_and_histories_are_those_of_plain_jax(form, recipe):
    args, loss = arguments(recipe), loss_of(form, recipe)
    numbers = tuple(range(len(args)))
    plain = jax.value_and_grad(loss, numbers)
    expected = jax.jit(plain)(*args)
    options = {"defer_norms": False}  # each product rounds what it is given
    for fused in (jax.value_and_grad(coda.fuse(loss, **options), numbers), coda.fuse(plain, **options)):
        assert_alike(jax.jit(fused)(*args), expected)
        assert products_in_8_bits(fused, *args) >= 6  # and no others
    if recipe is DELAYED:
        assert all(float(x[0, 0]) > 0 for name, x in expected[1][2].items() if name in ("up", "down"))


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_deferred_norm_is_as_near_to_float64_and_a_history_is_of_what_is_rounded(recipe):
    """The result, and each gradient, is at most 1.3 times as far as where the normalised array is rounded."""
    w, x = weights(), 40 * normal(7, 8, 48, D)

    def loss(w, x, h=None, multiply=None):
        y = feed_forward(w, x, recipe, h, multiply)
        return jnp.mean(jnp.square(y) * jnp.linspace(0.5, 1.5, D)), y - x

    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.float64), (w, x))
        gradient = jax.grad(functools.partial(loss, multiply=jnp.matmul), (0, 1), has_aux=True)
        exact = jax.tree.map(np.asarray, gradient(*wide))

    def found(f):
        """The gradients and the result, and the histories, after three steps on the same arrays."""
        step, h = jax.jit(jax.grad(f, (0, 1, 2), has_aux=True)), dict.fromkeys(w, jnp.zeros((2, H)))
        for _ in range(3):
            (*gradients, maxima), y = step(w, x, h)
            h = jax.tree.map(coda.fp8.next_history, h, maxima)
        return (tuple(gradients), y), h

    def error(result):
        pairs = zip(*map(jax.tree.leaves, (result, exact)), strict=True)
        return np.asarray([np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b) for a, b in pairs])

    (deferred, h), (applied, _) = (found(f) for f in (coda.fuse(loss, defer_norms=True), loss))
    assert np.all(error(deferred) < 1.3 * error(applied)) and not np.array_equal(error(deferred), error(applied))
    assert float(h["up"][0, 0]) == float(jnp.max(jnp.abs(x)))  # and not of the normalised array
    assert_alike(found(coda.fuse(loss, exact=True))[0], applied)


def test_products_of_one_array_round_it_by_one_scale():
    """It is of the largest maximum in their histories, and values are clipped where they are beyond its range."""
    w, x, h = weights(), normal(7, 2, 24, D), histories()
    h |= {"up": jnp.stack([jnp.full(H, 1e-3), h["up"][1]])}

    def loss(w, x, h):
        each = (coda.fp8.matmul(x, w[name], recipe=DELAYED, history=h[name]) for name in ("up", "gate"))
        return jnp.mean(jnp.square(sum(each)))

    step = jax.value_and_grad(loss, (0, 1, 2))
    as_fused = h | {"up": h["up"].at[0].set(h["gate"][0])}
    found = jax.value_and_grad(coda.fuse(loss), (0, 1, 2))(w, x, h)
    assert_alike(found, step(w, x, as_fused))
    assert float(step(w, x, h)[1][2]["up"][0, 1]) == 1 and float(found[1][2]["up"][0, 1]) == 0
    assert_alike(jax.value_and_grad(coda.fuse(loss, exact=True), (0, 1, 2))(w, x, h), step(w, x, h))


def test_given_scales_are_of_the_normalised_array():
    """A norm is not deferred through a product that says how what it is given is rounded."""
    w, x = weights(), 40 * normal(7, 8, 48, D)

    def loss(w, x):
        y = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6) * w["norm"]
        return jnp.mean(jnp.square(coda.fp8.matmul(y, w["up"], x_scale=64.0)))

    step = jax.value_and_grad(loss, (0, 1))
    assert_alike(jax.value_and_grad(coda.fuse(loss, defer_norms=True), (0, 1))(w, x), step(w, x))


def test_epilogues_round_what_products_read():
    """With delayed scaling nothing but what is given, normalised and residual is rounded by a pass."""

    def typed(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    d, f = 2048, 8192
    w = {"up": typed(d, f), "gate": typed(d, f), "down": typed(f, d), "norm": typed(d)}
    h = {name: typed(2, H, dtype=jnp.float32) for name in w}
    report = coda.fuse.report(loss_of(once, DELAYED), w, typed(4, 2048, d), h)
    assert [("round" in one.epilogue, one.reason) for one in report.products] == [(False, ""), (True, ""), (False, "")]
    assert report.fused.totals.passes_bytes < 0.25 * report.plain.totals.passes_bytes
    assert report.fused.totals.kept_bytes < report.plain.totals.kept_bytes


def typed_layer(name, joined):
    """A layer of 2 x 8192 tokens in plain JAX by fp8.matmul, its parameters, and that of flax_layers."""
    width, hidden, heads, bf16 = 2048, 8192, 32, jnp.bfloat16
    options = {"fp8": DELAYED, "dtype": bf16, "param_dtype": bf16}
    if name == "gpt2":
        config = GPT2Config(n_embd=width, n_layer=1, n_head=heads, n_inner=hidden)
        model = nnx.eval_shape(lambda: GPT2(config, rngs=nnx.Rngs(0), **options).layers)
        shapes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, hidden), "down": (hidden, width)}
        vectors = {f"{one}_bias": shape[-1:] for one, shape in shapes.items()}
        vectors |= dict.fromkeys(("norm_1", "norm_1_bias", "norm_2", "norm_2_bias"), (width,))
    else:
        config = LlamaConfig(1000, width, hidden, 1, heads, 8)
        model = nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0), **options).layers)
        apart = {"q": (width, width), "k": (width, 512), "v": (width, 512), "gate": (width, hidden)}
        shapes = {"qkv": (width, 3072), "gate_up": (width, 2 * hidden)} if joined else apart | {"up": (width, hidden)}
        shapes |= {"out": (width, width), "down": (hidden, width)}
        vectors = dict.fromkeys(("attention_norm", "mlp_norm"), (width,))
    graphdef, *state = nnx.split(model, nnx.Param, fp8.History)
    w = {one: jax.ShapeDtypeStruct(shape, bf16) for one, shape in (shapes | vectors).items()}
    h = dict.fromkeys(shapes, jax.ShapeDtypeStruct((2, H), jnp.float32))

    def plain(w, h, x):
        def multiply(x, w, name):
            return coda.fp8.matmul(x, w[name], recipe=DELAYED, history=h[name])

        if name == "llama":
            cos, sin = plain_llama.angles(jnp.arange(x.shape[1]), config)
            x = plain_llama.attention(x, w, cos, sin, config, None, multiply)
            return plain_llama.mlp(x, w, config.rms_norm_eps, multiply)
        y = unmodified.layer_norm(x, w["norm_1"], w["norm_1_bias"])
        each = jnp.split(multiply(y, w, "qkv") + w["qkv_bias"], 3, axis=-1)
        y = unmodified.attention(*(unmodified.heads_of(z, heads) for z in each), is_causal=True)
        x = x + multiply(y, w, "out") + w["out_bias"]
        y = unmodified.layer_norm(x, w["norm_2"], w["norm_2_bias"])
        return x + multiply(jax.nn.gelu(multiply(y, w, "up") + w["up_bias"]), w, "down") + w["down_bias"]

    def ours(params, histories, x):
        return run_layers(nnx.merge(graphdef, params, histories), x)

    return plain, (w, h), ours, state


@pytest.mark.parametrize(("name", "joined"), [("llama", True), ("llama", False), ("gpt2", True)])
def test_a_layer_moves_and_keeps_no_more_than_that_of_flax_layers(name, joined):
    """A Llama's layer equals it but for two tables of angles; a GPT-2's keeps a copy in 8 bits of its first norm."""
    plain, (w, h), ours, state = typed_layer(name, joined)
    x = jax.ShapeDtypeStruct((2, 8192, 2048), jnp.bfloat16)

    def counts(f, *args):
        step = jax.value_and_grad(lambda *args: jnp.mean(jnp.square(f(*args).astype(jnp.float32))), (0, 1, 2))
        return coda.explain(step, *args, x, device="H100").totals

    found, expected = counts(coda.fuse(plain), w, h), counts(ours, *state)
    assert found.passes_bytes <= 1.003 * expected.passes_bytes
    assert found.kept_bytes <= (1.001 if name == "llama" else 1.05) * expected.kept_bytes


@pytest.mark.parametrize("recipe", [coda.fp8.Recipe(), DELAYED], ids=["current", "delayed"])
def test_columns_in_two_axes(recipe):
    """Gate and up of one weight (D, 2, F): parts of one product, as of (D, 2 F), with the same epilogues."""
    gate_up, down, x = normal(0, D, 2, F) * D**-0.5, normal(1, F, D) * F**-0.5, normal(2, 48, D)
    h = jnp.full((2, 2, H), 0.6)

    def loss(gate_up, down, x, h, *, is_flat):
        of_up, of_down = ({} if recipe.scaling == "current" else {"history": one} for one in h)
        if is_flat:
            z = coda.fp8.matmul(x, gate_up.reshape(D, 2 * F), recipe=recipe, **of_up).reshape(48, 2, F)
        else:
            z = coda.fp8.matmul(x, gate_up, recipe=recipe, **of_up)
        y = coda.fp8.matmul(jax.nn.silu(z[:, 0]) * z[:, 1], down, recipe=recipe, **of_down)
        return jnp.mean(jnp.square(y))

    def step(is_flat):
        return jax.value_and_grad(coda.fuse(functools.partial(loss, is_flat=is_flat)), (0, 1, 2, 3))

    args = gate_up, down, x, h
    found = jax.jit(step(False))(*args)
    assert_alike(found, jax.jit(step(True))(*args))
    assert_alike(found, jax.jit(jax.value_and_grad(functools.partial(loss, is_flat=False), (0, 1, 2, 3)))(*args))
    plans = [[*coda.explain(step(is_flat), *args, platform="cuda").blocks] for is_flat in (False, True)]
    assert plans[0] == plans[1]
    assert products_in_8_bits(step(False), *args) == 6


def test_a_batch_of_vmap_has_one_scale():
    """Its values are those of the batch as rows."""
    w, x = arguments(None)
    many = jnp.stack([x, 5 * x, x + 1])
    loss = loss_of(once, None)
    batched = coda.fuse(lambda w, x: jnp.mean(jax.vmap(loss, (None, 0))(w, x)), defer_norms=False)
    fused = jax.value_and_grad(batched, (0, 1))
    assert_alike(fused(w, many), jax.value_and_grad(loss, (0, 1))(w, many))
    each = jnp.stack([x @ x.mT for x in normal(3, 2, D, D)])  # a weight for each: a scale for each
    batch = jax.vmap(coda.fp8.matmul)(many[:2, 0], each)
    assert_alike(
        coda.fuse(lambda x, w: jax.vmap(coda.fp8.matmul)(x, w) + jnp.sum(x @ w))(many[:2, 0], each),
        batch + jnp.sum(many[:2, 0] @ each),
    )


@pytest.mark.parametrize("given", [(16.0, 64.0, 8.0), (2000.0, 1e4, 512.0)], ids=["within", "clipped"])
def test_given_scales(given):
    x, w, dy = normal(0, 48, D), normal(1, D, F), normal(2, 48, F)
    options = dict(zip(("x_scale", "w_scale", "gradient_scale"), given, strict=True))

    def product(x, w):
        return jnp.tanh(coda.fp8.matmul(2 * x, w, **options)) * dy

    def q(x, scale):
        return np.asarray(np.clip(np.asarray(x) * np.float32(scale), -448, 448), jnp.float8_e4m3fn).astype(np.float64)

    x8, w8 = q(2 * x, given[0]), q(w, given[1])
    exact = np.tanh(x8 @ w8 / (given[0] * given[1]))
    dy8 = q(np.asarray(np.asarray(dy, np.float64) * (1 - exact * exact), np.float32), given[2])
    expected = (
        exact * np.asarray(dy, np.float64),
        2 * dy8 @ w8.T / (given[2] * given[1]),
        x8.T @ dy8 / (given[0] * given[2]),
    )
    (y, pullback), (plain, plain_pullback) = (jax.vjp(f, x, w) for f in (coda.fuse(product), product))
    found, own = (y, *pullback(jnp.ones_like(y))), (plain, *plain_pullback(jnp.ones_like(y)))
    for out, exact, plain in zip(found, expected, own, strict=True):
        check(out, exact, plain)


def test_layers_take_it():
    """A plain layer of nnx says in which products it trains in 8 bits."""

    class MLP(nnx.Module):
        def __init__(self, rngs):
            options = {"rngs": rngs, "dot_general": coda.fp8.DotGeneral()}
            self.up, self.down = nnx.Linear(D, F, **options), nnx.Linear(F, D, **options)

        def __call__(self, x):
            return self.down(nnx.gelu(self.up(x)))

    model, x = MLP(nnx.Rngs(0)), normal(0, 2, 24, D)

    def loss(model, x):
        return jnp.mean(jnp.square(model(x) - x))

    fused = nnx.value_and_grad(coda.fuse(loss))
    assert_alike(fused(model, x), nnx.value_and_grad(loss)(model, x))
    assert [one.reason for one in coda.fuse.report(loss, model, x).products] == ["", ""]


def test_what_is_not_fused_rounds_alike():
    """In a body of shard_map with a sum over the mesh, and in a function with a rule of its own."""
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    w, x = arguments(None)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(jax.P("rows"), jax.P()), out_specs=jax.P())
    def summed(x, w):
        return jax.lax.psum(jnp.sum(jnp.tanh(coda.fp8.matmul(x, w))), "rows")

    @jax.custom_vjp
    def own(x, w):
        return jnp.cumsum(coda.fp8.matmul(x, w), axis=0)

    own.defvjp(lambda x, w: (own(x, w), w), lambda w, dy: (dy @ w.T, jnp.ones_like(w)))

    def loss(w, x):
        return summed(x, w["up"]) + jnp.sum(jnp.square(own(x, w["gate"])))

    expected = jax.jit(jax.value_and_grad(loss))(w, x)
    assert_alike(jax.jit(jax.value_and_grad(coda.fuse(loss)))(w, x), expected)
    with pytest.raises(NotImplementedError, match=r"reverse-mode"):
        jax.jit(coda.fuse(lambda x, w: jax.jvp(lambda x: coda.fp8.matmul(x, w), (x,), (x,))))(x[0], w["up"])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"recipe": "e4m3"}, TypeError, r"recipe = 'e4m3'; it must be a coda.fp8.Recipe"),
        ({"recipe": E5M2, "dtype": jnp.float8_e5m2}, TypeError, r"dtype = float8_e5m2 beside Recipe"),
        ({"recipe": DELAYED}, ValueError, r"history is None beside .*delayed.*it must be float32 \(2, H\)"),
        ({"history": jnp.zeros((3, 2))}, ValueError, r"history is float32 of shape \(3, 2\)"),
        ({"history": jnp.zeros((2, 3)), "x_scale": 2.0}, TypeError, r"a history is given, and a scale"),
    ],
)
def test_what_it_refuses(options, error, message):
    with pytest.raises(error, match=message):
        coda.fp8.matmul(normal(0, 16, D), normal(1, D, F), **options)
