"""`coda.fuse(f, fp8=recipe)`: which products with weights are rounded to 8 bits, and their values and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

import coda_jax as coda
from tests.test_fuse_fp8 import assert_alike, normal, products_in_8_bits

pytestmark = pytest.mark.filterwarnings("ignore:gemm:coda_jax.FallbackWarning", "ignore:block:coda_jax.FallbackWarning")
D, F, V = 32, 64, 1024
RECIPE = coda.fp8.Recipe()
E5M2 = coda.fp8.Recipe(gradient_dtype=jnp.float8_e5m2)


def plain(x, w):
    return x @ w


def rounded(recipe):
    return functools.partial(coda.fp8.matmul, recipe=recipe)


def layers(count):
    shapes = {"q": (D, D), "up": (D, F), "gate": (D, F), "down": (F, D)}
    arrays = {name: normal(i, count, *shape) * shape[0] ** -0.5 for i, (name, shape) in enumerate(shapes.items())}
    return arrays | {"norm": 1 + 0.1 * normal(9, count, D)}


def layer(multiply, w, x):
    rstd = jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)
    y = x * rstd * w["norm"]
    q = multiply(y, w["q"])
    p = jax.nn.softmax(jnp.einsum("btd,bsd->bts", q, q) / 6, axis=-1)
    x = x + jnp.einsum("bts,bsd->btd", p, q)
    return x + multiply(jax.nn.silu(multiply(x, w["gate"])) * multiply(x, w["up"]), w["down"])


def unrolled(multiply, w, x):
    for i in range(2):
        x = layer(multiply, jax.tree.map(lambda one, i=i: one[i], w), x)
    return x


def scanned(multiply, w, x):
    return jax.lax.scan(lambda x, w: (layer(multiply, w, x), None), x, w)[0]


def checkpointed(multiply, w, x):
    step = jax.checkpoint(lambda x, w: (layer(multiply, w, x), None), policy=jax.checkpoint_policies.dots_saveable)
    return jax.lax.scan(step, x, w)[0]


def batched(multiply, w, x):
    return jax.vmap(functools.partial(unrolled, multiply), (None, 0))(w, x)


def nested(multiply, w, x):
    inner = coda.fuse(functools.partial(layer, multiply), defer_norms=False)
    return inner(jax.tree.map(lambda one: one[1], w), unrolled(multiply, w, x))


FORMS = [unrolled, scanned, checkpointed, nested]


def loss_of(form, multiply):
    return lambda w, x: jnp.mean(jnp.square(form(multiply, w, x)) * jnp.linspace(0.5, 1.5, D))


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.__name__)
def test_values_and_gradients_are_those_of_products_that_round(form):
    w, x = layers(2), normal(7, 2, 24, D)
    expected = jax.jit(jax.value_and_grad(loss_of(form, rounded(RECIPE)), (0, 1)))(w, x)
    loss, options = loss_of(form, plain), {"fp8": RECIPE, "defer_norms": False}
    for fused in (
        jax.value_and_grad(coda.fuse(loss, **options), (0, 1)),
        coda.fuse(jax.value_and_grad(loss, (0, 1)), **options),
    ):
        assert_alike(jax.jit(fused)(w, x), expected)
        assert products_in_8_bits(fused, w, x) >= 12


def test_a_batch_has_the_scale_of_all():
    w, x = layers(2), normal(7, 2, 24, D)
    one, many = loss_of(unrolled, rounded(RECIPE)), loss_of(batched, plain)
    fused = jax.value_and_grad(coda.fuse(many, fp8=RECIPE, defer_norms=False), (0, 1))
    expected = jax.value_and_grad(one, (0, 1))(w, x)
    assert_alike(
        fused(w, x[:, None]), jax.tree.map(lambda x: x, (expected[0], (expected[1][0], expected[1][1][:, None])))
    )


def test_cotangents_of_another_format():
    w, x = layers(2), normal(7, 2, 24, D)
    expected = jax.value_and_grad(loss_of(unrolled, rounded(E5M2)), (0, 1))(w, x)
    loss = loss_of(unrolled, plain)
    assert_alike(jax.value_and_grad(coda.fuse(loss, fp8=E5M2, defer_norms=False), (0, 1))(w, x), expected)
    with pytest.raises(ValueError, match=r"gradient_dtype must be dtype, or the loss be fused"):
        coda.fuse(jax.grad(loss), fp8=E5M2)(w, x)


def test_a_deferred_norm_rounds_what_it_normalises():
    """It is as near to float32 as the norm that is applied, and its products are of 8 bits too."""
    w, x = layers(2), normal(7, 2, 24, D)
    exact = jax.value_and_grad(loss_of(unrolled, plain), (0, 1))(w, x)

    def error(defers):
        fused = jax.value_and_grad(coda.fuse(loss_of(unrolled, plain), fp8=RECIPE, defer_norms=defers), (0, 1))
        assert products_in_8_bits(fused, w, x) == 24
        pairs = zip(*map(jax.tree.leaves, (fused(w, x), exact)), strict=True)
        return max(float(jnp.linalg.norm((a - b).ravel()) / jnp.linalg.norm(b.ravel())) for a, b in pairs)

    assert 1e-3 < error(True) < 1.5 * error(False)


def test_what_stays_in_its_dtype():
    """The head and the embedding, adapters' own products, activations' and computed weights, and odd sizes."""

    def typed(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def loss(w, tokens):
        x = w["embed"][tokens]
        x = x + jnp.tanh(x @ w["up"]) @ w["down"]
        x = x + x @ (w["a"] @ w["b"])
        x = x + x @ jnp.tanh(w["square"])
        x = x + (x @ w["odd"]) @ w["odd"].T
        x = x + jax.lax.ragged_dot(x[0], w["experts"], jnp.array([6, 10], jnp.int32))
        z = x @ w["head"]
        return jnp.mean(jax.nn.logsumexp(z, axis=-1) - jnp.take_along_axis(z, tokens[..., None], axis=-1)[..., 0])

    shapes = {"embed": (V, D), "up": (D, F), "down": (F, D), "a": (D, 16), "b": (16, D), "square": (D, D)}
    shapes |= {"odd": (D, 24), "head": (D, V), "experts": (2, D, D)}
    w = {name: typed(*shape) for name, shape in shapes.items()}
    tokens = jax.ShapeDtypeStruct((2, 16), jnp.int32)
    report = coda.fuse.report(coda.fuse(loss, fp8=RECIPE), w, tokens)
    kinds = [one.rounding for one in report.products if one.factors]
    assert kinds == [
        *["float8_e4m3fn"] * 2,
        "float32: both of its factors are weights",
        *["float32: its second factor is computed, and no weight"] * 2,
        "float32: n = 24 is no multiple of 16",
        "float32: k = 24 is no multiple of 16",
        "float32: its rows are of groups, as of experts",
    ]
    assert "float8_e4m3fn" in str(report) and "float32: n = 24 is no multiple of 16" in str(report)
    whole = coda.fuse.report(coda.fuse(loss, fp8=RECIPE, chunk_losses=False), w, tokens)
    assert [one.unrounded for one in whole.products][-1] == "it makes the logits of a loss over a vocabulary"
    fused = coda.fuse.report(coda.fuse(jax.value_and_grad(loss), fp8=RECIPE), w, tokens)
    assert sum(one.factors == "float8_e4m3fn" for one in fused.products) == 6


def test_carried_arrays_are_no_weights():
    w, x = normal(0, D, D) / 8, normal(1, 16, D)

    def loss(w, x):
        def step(carry, _):
            x, fast = carry
            return (jnp.tanh(x @ w), fast + x.T @ (x @ fast)), None

        x, fast = jax.lax.scan(step, (x, w), length=2)[0]
        return jnp.sum(x) + jnp.sum(fast)

    report = coda.fuse.report(coda.fuse(loss, fp8=RECIPE), w, x)
    assert sorted(one.rounding.partition(":")[0] for one in report.products) == ["float32", "float32", "float8_e4m3fn"]


@pytest.mark.parametrize("explicit", [False, True], ids=["automatic", "explicit"])
def test_on_four_devices(explicit):
    """FSDP: rows and weights are sharded."""
    w, x = layers(2), normal(7, 8, 16, D)
    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=((AxisType.Explicit if explicit else AxisType.Auto),))
    expected = jax.jit(jax.value_and_grad(loss_of(scanned, rounded(RECIPE)), (0, 1)))(w, x)

    def gathered(multiply, w, x):
        if explicit:
            w = jax.tree.map(lambda one: jax.reshard(one, jax.P()), w)
        return scanned(multiply, w, x)

    fused = jax.value_and_grad(coda.fuse(loss_of(gathered, plain), fp8=RECIPE, defer_norms=False), (0, 1))
    with jax.set_mesh(mesh):
        placed = jax.device_put(w, NamedSharding(mesh, jax.P(None, "fsdp"))), jax.device_put(x, jax.P("fsdp"))
        found = jax.jit(fused)(*placed)
    assert_alike(jax.device_get(found), jax.device_get(expected), 1e-5)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"fp8": True}, TypeError, r"fp8 = True; it must be a coda.fp8.Recipe, as coda.fp8.Recipe\(\), or None"),
        ({"fp8": RECIPE, "exact": True}, ValueError, r"exact = True beside fp8"),
        ({"fp8": RECIPE, "check": True}, ValueError, r"check = True beside fp8"),
    ],
)
def test_what_it_refuses(options, error, message):
    with pytest.raises(error, match=message):
        coda.fuse(lambda w, x: x @ w, **options)


def test_values_in_bfloat16_are_as_near_to_float32_as_products_that_round():
    w, x = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (layers(2), normal(7, 2, 24, D)))
    exact = jax.value_and_grad(loss_of(unrolled, plain), (0, 1))(*jax.tree.map(lambda x: x.astype(jnp.float32), (w, x)))

    def error(f):
        pairs = zip(*map(jax.tree.leaves, (jax.value_and_grad(f, (0, 1))(w, x), exact)), strict=True)
        return [np.linalg.norm(np.float64(a) - np.float64(b)) / np.linalg.norm(np.float64(b)) for a, b in pairs]

    ours, theirs = error(coda.fuse(loss_of(unrolled, plain), fp8=RECIPE)), error(loss_of(unrolled, rounded(RECIPE)))
    assert max(ours) < 1.5 * max(theirs)


@pytest.mark.parametrize("scaling", ["current", "delayed"])
def test_a_copy_of_two_tiles_is_made_again(scaling):
    """The backward pass keeps gate and up of silu(gate) * up, and its epilogue makes the copy in 8 bits."""

    def loss(w, x, h):
        options = {"recipe": coda.fp8.Recipe(scaling=scaling)}
        gate, up = (coda.fp8.matmul(x, w[name], history=h[name], **options) for name in ("gate", "up"))
        return jnp.sum(coda.fp8.matmul(jax.nn.silu(gate) * up, w["down"], history=h["down"], **options))

    rows, width, hidden = 4096, 1024, 4096
    shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    w = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
    h = dict.fromkeys(w, jax.ShapeDtypeStruct((2, 16), jnp.float32))
    x = jax.ShapeDtypeStruct((rows, width), jnp.bfloat16)
    step = jax.grad(coda.fuse(loss), (0, 2))
    kept = coda.explain(step, w, x, h, platform="cuda").totals.kept_bytes
    assert kept < 2 * 2 * rows * hidden + 2 * rows * width
