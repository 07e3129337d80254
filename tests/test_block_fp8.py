"""Blocks whose products have factors of 8 bits, by a recipe: values, gradients, and where factors are rounded."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coda_jax as coda
from coda_jax.jaxprs.walk import equations_of
from coda_jax.primitives.gemm_primitive import PRIMITIVES
from tests.block_cases import FORMS, arguments, in_block, loss

pytestmark = pytest.mark.usefixtures("quick_to_compile")
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
SIZES = {"length": 16, "width": 32, "hidden": 48}


def distance(found, exact):
    a, b = (np.asarray(x, np.float64).ravel() for x in (found, exact))
    return np.linalg.norm(a - b) / (np.linalg.norm(b) or 1.0)


def value_and_gradients(block, *args):
    return jax.tree.leaves(jax.jit(jax.value_and_grad(loss(block), (0, 1)))(*args))


@functools.cache
def of_lines(name, recipe):
    """The block's lines as plain JAX, with the same quantisers or with none."""
    return value_and_gradients(in_block(name, implementation="xla", fp8=recipe), *arguments(**SIZES))


@pytest.mark.smoke
@pytest.mark.parametrize("recipe", [coda.fp8.Recipe(), coda.fp8.Recipe(gradient_dtype=E5M2)], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("name", FORMS)
def test_gradients_are_those_of_the_same_quantisers_in_plain_jax(name, recipe):
    """A sum in another order may round to the next of few values, which moves what is behind it a little."""
    found = value_and_gradients(in_block(name, fp8=recipe), *arguments(**SIZES))
    rounded, exact = of_lines(name, recipe), of_lines(name, None)
    rough = max(distance(x, y) for x, y in zip(rounded, exact, strict=True))
    assert 0.01 < rough < 0.3
    for x, y in zip(found, rounded, strict=True):
        assert distance(x, y) <= 0.3 * rough


def feed_forward(x, scale, up, down, of_up, of_down):
    z = coda.rms_norm(x, scale).matmul(up, history=of_up)
    return x + z.map(jax.nn.gelu).matmul(down, history=of_down)


@pytest.fixture(scope="module")
def weights():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (2, 16, 32), (32, 64), (64, 32)
    x, up, down = (jax.random.normal(key, shape) / 6 for key, shape in zip(keys, shapes, strict=True))
    return 6 * x, jnp.ones(32), up, down


@pytest.mark.parametrize("history", [1, 4])
def test_delayed_scales_follow_the_maxima_of_steps_before(weights, history):
    recipe = coda.fp8.Recipe(scaling="delayed", history=history)
    histories = [jnp.zeros((2, history))] * 2

    def step(implementation, *args):
        block = coda.block(feed_forward, fp8=recipe, implementation=implementation)
        return jax.jit(jax.value_and_grad(lambda *args: jnp.sum(jnp.sin(block(*args))), range(6)))(*args)

    for i in range(history + 1):
        (value, found), (exact, rounded) = (step(of, *weights, *histories) for of in ("auto", "xla"))
        assert distance(value, exact) <= 1e-5
        assert max(distance(x, y) for x, y in zip(found, rounded, strict=True)) <= 1e-5
        histories = [coda.fp8.next_history(*pair) for pair in zip(histories, found[4:], strict=True)]
        seen = min(i + 1, history)
        np.testing.assert_allclose(histories[0][0, :seen], jnp.max(jnp.abs(weights[0])), rtol=1e-6)
        assert all(bool((x[:, :seen] > 0).all() and (x[:, seen:] == 0).all()) for x in histories)


def test_a_history_is_overwritten_by_what_was_seen():
    history = jnp.array([[3.0, 2.0, 1.0], [6.0, 5.0, 4.0]])
    gradient = jnp.array([[7.0, 0.0, 0.0], [0.0, 0.0, 0.0]])  # of the second nothing
    np.testing.assert_array_equal(coda.fp8.next_history(history, gradient), [[7.0, 3.0, 2.0], [6.0, 5.0, 4.0]])
    for value in (jnp.nan, jnp.inf):
        overflown = gradient.at[0, 0].set(value)
        np.testing.assert_array_equal(coda.fp8.next_history(history, overflown), history)


@pytest.mark.parametrize("dtype, largest", [(E4M3, 448.0), (E5M2, 57344.0)])
def test_scales_leave_headroom(dtype, largest):
    recipe = coda.fp8.Recipe(scaling="delayed", headroom=8, dtype=dtype, gradient_dtype=E4M3)
    amax = jnp.array([[0.3, 5.0, 0.0], [0.0, 0.0, 0.0]])
    scale, of_none = coda.fp8.history_scale(amax, recipe)
    assert largest / 2 < 8 * 5.0 * float(scale) <= largest and of_none == 1
    assert float(coda.fp8.history_scale(amax[0], recipe, is_cotangent=True)) * 8 * 5.0 <= 448


@pytest.mark.parametrize("is_cotangent", [False, True])
@pytest.mark.parametrize("dtype, largest", [(E4M3, 448.0), (E5M2, 57344.0)])
def test_scales_of_any_history_are_finite_and_above_0(dtype, largest, is_cotangent):
    """Maxima that are not finite are ignored, and beside the end of float32's range there is no headroom."""
    end = float(jnp.finfo(jnp.float32).max)
    for headroom in (1.0, 8.0, 1e30):
        recipe = coda.fp8.Recipe(scaling="delayed", headroom=headroom, dtype=dtype, gradient_dtype=dtype)
        scale_of = functools.partial(coda.fp8.history_scale, recipe=recipe, is_cotangent=is_cotangent)
        for kept in (5.0, 1e-20):
            expected = scale_of(jnp.array([kept, 0.0, 0.0]))
            for ignored in (jnp.inf, jnp.nan):
                assert scale_of(jnp.array([ignored, kept, 0.0])) == expected > 0
        assert scale_of(jnp.array([jnp.inf, jnp.nan, 0.0])) == 1
        scale = float(scale_of(jnp.array([3e38, 1.0, 0.0])))
        assert largest / 2 < end * scale <= largest or headroom == 1
        assert 0 < 3e38 * scale <= largest
        assert 0 < scale_of(jnp.array([1e-37, 0.0, 0.0])) < jnp.inf


def test_a_step_after_one_at_the_end_of_the_range(weights):
    """Scales are of maxima that no headroom leaves in float32's range, forward and backward."""
    block = coda.block(feed_forward, fp8=coda.fp8.Recipe(scaling="delayed", history=2))
    histories = [jnp.array([[3e38, 1.0], [jnp.inf, 2.0]])] * 2
    value, gradients = jax.value_and_grad(lambda *args: jnp.sum(block(*args)), range(6))(*weights, *histories)
    assert jnp.isfinite(value) and all(bool(jnp.isfinite(g).all()) for g in gradients)


def test_values_beyond_the_range_are_clipped_and_recorded(weights):
    """A step whose values are 1000 times the last one's: finite, and the history has them."""
    recipe = coda.fp8.Recipe(scaling="delayed", history=2)
    block = coda.block(feed_forward, fp8=recipe)
    x, *others = weights
    histories = [jnp.full((2, 2), 1e-3)] * 2
    loss_of = jax.value_and_grad(lambda *args: jnp.sum(jnp.sin(block(*args))), range(6))
    value, gradients = loss_of(x, *others, *histories)
    assert jnp.isfinite(value) and all(bool(jnp.isfinite(g).all()) for g in gradients)
    assert float(gradients[4][0, 0]) == float(jnp.max(jnp.abs(x)))


def test_an_input_that_is_not_finite_leaves_histories_alone(weights):
    block = coda.block(feed_forward, fp8=coda.fp8.Recipe(scaling="delayed", history=2))
    x, *others = weights
    histories = [jnp.full((2, 2), 2.0)] * 2
    x = x.at[0, 0, 0].set(jnp.nan)
    gradients = jax.grad(lambda *args: jnp.sum(block(*args)), range(6))(x, *others, *histories)
    first, second = (coda.fp8.next_history(*pair) for pair in zip(histories, gradients[4:], strict=True))
    np.testing.assert_array_equal(first, histories[0])
    np.testing.assert_array_equal(second, [[2.0, 2.0], [1.0, 2.0]])  # the cotangent of the sum, ones, is finite


def products(f, *args):
    return [one for one, _ in equations_of(f, *args)[0] if one.primitive in PRIMITIVES]


def test_all_factors_are_of_8_bits_along_k(weights):
    block = coda.block(feed_forward, fp8=coda.fp8.Recipe(scaling="delayed"))
    args = *weights, jnp.ones((2, 16)), jnp.ones((2, 16))
    found = products(jax.grad(lambda *args: jnp.sum(block(*args)), range(6)), *args)
    assert len(found) == 6
    for one in found:
        assert {x.aval.dtype for x in one.invars[:2]} == {np.dtype(E4M3)}
        assert one.params["spec"].transpose_b and not one.params["spec"].transpose_a


def test_delayed_copies_and_maxima_are_made_by_the_epilogue_that_makes_the_tile(weights):
    block = coda.block(feed_forward, fp8=coda.fp8.Recipe(scaling="delayed"), dtype=jnp.bfloat16)
    args = *weights, jnp.ones((2, 16)), jnp.ones((2, 16))
    explained = coda.explain(jax.value_and_grad(lambda *args: jnp.sum(block(*args)), range(6)), *args, platform="cuda")
    lines = [line for line in str(explained).splitlines() if line.startswith("  feed_forward_")]
    (of_hidden,) = (line for line in lines if line.startswith("  feed_forward_0 "))
    (of_cotangent,) = (line for line in lines if "gelu backward" in line)
    assert all(f" {what}" in of_hidden for what in ("round", "amax")) and "transpose" not in of_hidden
    # The transposed copy of the hidden activation too: it is not kept, for z is read here.
    assert all(f" {what}" in of_cotangent for what in ("gelu,", "round", "transpose", "amax")), of_cotangent
    assert any(x.array == "bfloat16[2,16,64]" for x in explained.kept)
    assert not any(x.array in ("float8_e4m3fn[64,2,16]", "float8_e4m3fn[64,32]") for x in explained.kept)


def test_a_history_alone_is_differentiated(weights):
    """The first layer of a frozen model has a history's gradient, and none of its input and weights."""
    for scaling in ("current", "delayed"):
        block = coda.block(feed_forward, fp8=coda.fp8.Recipe(scaling=scaling))
        histories = [jnp.ones((2, 16))] * 2
        grad = jax.grad(lambda *of, block=block: jnp.sum(jnp.sin(block(*weights, *of))), (0, 1))
        whole = jax.grad(lambda *args, block=block: jnp.sum(jnp.sin(block(*args))), range(6))(*weights, *histories)
        for found, expected in zip(grad(*histories), whole[4:], strict=True):
            assert float(found[0, 0]) > 0 and float(found[1, 0]) > 0
            np.testing.assert_array_equal(found, expected)


def test_pieces_of_a_cotangent_are_rounded_before_they_are_put_together(weights):
    """Else a pass on a GPU would write and read them in float32 first."""

    def heads(x, w):
        a, b = (x @ w).map(lambda y: jnp.split(y, 2, axis=-1))
        return coda.opaque(lambda a, b: jnp.sin(a) * jnp.cos(b), a, b)

    block = coda.block(heads, fp8=coda.fp8.Recipe())
    x, _, up, _ = weights
    equations, _ = equations_of(jax.grad(lambda x, w: jnp.sum(block(x, w)), (0, 1)), x, up)
    joined = {one.outvars[0].aval.dtype for one, _ in equations if one.primitive.name == "concatenate"}
    assert joined == {np.dtype(E4M3)}


def test_no_rows():
    """Nothing comes of them, and zeros are gradients and maxima: of products by themselves, and of blocks."""
    w, history = jnp.ones((32, 16)), jnp.ones((2, 3))
    delayed = coda.fp8.Recipe(scaling="delayed", history=3)
    products = [lambda x, w, _: coda.fp8.matmul(x, w)]
    for implementation in ("auto", "xla"):
        block = coda.block(lambda x, w, h: x.matmul(w, history=h), fp8=delayed, implementation=implementation)
        current = coda.block(lambda x, w: x @ w, fp8=coda.fp8.Recipe(), implementation=implementation)
        products += [block, lambda x, w, _, current=current: current(x, w)]
    for product, lead in itertools.product(products, [(0,), (2, 0)]):
        y, back = jax.vjp(product, jnp.ones((*lead, 32)), w, history)
        assert y.shape == (*lead, 16)
        dx, *others = back(y)
        assert dx.shape == (*lead, 32) and not any(g.any() for g in others)
    assert not coda.fp8.matmul(jnp.ones((2, 4, 0)), jnp.ones((0, 16))).any()


def test_a_factor_of_two_products_is_rounded_once():
    x, w = jnp.ones((16, 32)), jnp.ones((32, 64))
    both = coda.block(lambda x, a, b: (x @ a, x @ b), fp8=coda.fp8.Recipe())
    equations, _ = equations_of(both, x, w, 2 * w)
    assert [one.primitive.name for one, _ in equations].count("saturate") == 3


def test_a_factor_of_two_products_has_the_scale_of_each():
    """The range of the first product's history is 14, that of the second one's 1e4."""
    x, w, y = 100 * jnp.ones((16, 32)), jnp.ones((32, 64)), jnp.ones((32, 64))

    def lines(x, w, y, *histories):
        return tuple(x.matmul(v, history=history) for v, history in zip((w, y), histories, strict=True))

    block = coda.block(lines, fp8=coda.fp8.Recipe(scaling="delayed", history=2))
    first, second = block(x, w, y, jnp.ones((2, 2)), jnp.full((2, 2), 1e3))
    np.testing.assert_array_equal(first, 32 * 14.0)
    np.testing.assert_allclose(second, 32 * 100.0, rtol=0.07)


@pytest.mark.parametrize("shape", [(32, 2, 16), (32, 4, 16)])
def test_weights_of_several_axes(shape):
    x, w = jax.random.normal(jax.random.key(0), (2, 16, 32)), jax.random.normal(jax.random.key(1), shape)
    f = lambda x, w: x @ w  # noqa: E731
    found = coda.block(f, fp8=coda.fp8.Recipe())(x, w)
    assert found.shape == (2, 16, *shape[1:])
    exact = jnp.tensordot(x, w, 1)
    assert 0.005 < distance(found, exact) < 0.06


@pytest.mark.parametrize("transform", ["vmap", "remat", "scan"])
def test_transformations(transform):
    x, p = arguments(**SIZES)
    block = in_block("llama", fp8=coda.fp8.Recipe())
    if transform == "vmap":
        found, exact = jax.vmap(block, (0, None))(jnp.stack([x, 2 * x]), p)[1], block(2 * x, p)
    else:
        called = {"remat": jax.checkpoint(block), "scan": lambda x, p: _scanned(block, x, p)}[transform]
        found, exact = (jax.tree.leaves(jax.grad(loss(f), (0, 1))(x, p)) for f in (called, block))
        found, exact = (jnp.concatenate([jnp.ravel(x) for x in of]) for of in (found, exact))
    assert distance(found, exact) <= 1e-5


def _scanned(block, x, p):
    return jax.lax.scan(lambda x, _: (block(x, p), None), x, None, length=1)[0]


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: coda.fp8.Recipe(dtype=jnp.bfloat16), TypeError, "dtype = bfloat16"),
        (lambda: coda.fp8.Recipe(gradient_dtype=jnp.int8), TypeError, "gradient_dtype = int8"),
        (lambda: coda.fp8.Recipe(scaling="row"), ValueError, "scaling = 'row'"),
        (lambda: coda.fp8.Recipe(history=0), ValueError, "history = 0"),
        (lambda: coda.fp8.Recipe(headroom=0.5), ValueError, "headroom = 0.5"),
        (lambda: coda.block(jnp.sin, fp8="e4m3"), TypeError, "fp8 = 'e4m3'"),
        (lambda: _product(fp8=3), TypeError, "fp8 = 3"),
        (lambda: _product(history=jnp.ones((2, 4))), TypeError, "a history is given for a product without a recipe"),
        (lambda: _product(fp8=coda.fp8.Recipe(), history=jnp.ones(4)), ValueError, r"float32 of shape \(4,\)"),
    ],
)
def test_errors(make, error, message):
    with pytest.raises(error, match=message):
        make()


def _product(**options):
    return coda.block(lambda x, w: x.matmul(w, **options))(jnp.ones((16, 32)), jnp.ones((32, 16)))


def test_a_history_that_is_not_differentiated_is_told(weights):
    block = coda.block(feed_forward, fp8=coda.fp8.Recipe(scaling="delayed", history=2))
    histories = [jnp.ones((2, 2))] * 2
    with pytest.warns(UserWarning, match="not by its fp8 histories"):
        jax.grad(lambda *args: jnp.sum(block(*args)), (0, 2))(*weights, *histories)
    jax.jit(block)(*weights, *histories)  # without a gradient there is nothing to tell
