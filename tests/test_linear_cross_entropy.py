"""The loss head against the textbook: losses and every cotangent, chunks, options, memory, transformations."""

import contextlib
import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coda_jax as coda
from coda_jax.operators.head.shifted_heads import ExponentialHead
from tests.chain_cases import normal
from tests.gemm_cases import assert_close, jit
from tests.loss_cases import TOKENS, VOCABULARY, WIDTH, arguments, compare, loss, plain
from tests.nvrtc import kernels, needs_nvrtc

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
# Three chunks, the last of which is shorter. 16-bit logits of 131 columns are padded.
CASES = {
    "mean": (BF16, 131, {}),
    "mean_float32": (F32, 131, {"transpose_w": True}),
    "mean_tied": (F16, 131, {"transpose_w": True}),
    "none": (BF16, 136, {"reduction": "none", "soft_cap": 3.0}),
    "none_tied": (F32, 131, {"reduction": "none", "z_loss": 1e-2, "transpose_w": True}),
    "sum": (F16, 136, {"reduction": "sum", "label_smoothing": 0.1}),
    "everything": (BF16, 131, {"label_smoothing": 0.2, "z_loss": 1e-2, "soft_cap": 5.0, "transpose_w": True}),
    "everything_float32": (F32, 136, {"label_smoothing": 0.2, "z_loss": 1e-2, "soft_cap": 5.0}),
}


@pytest.mark.parametrize("dtype, vocabulary, options", CASES.values(), ids=CASES)
def test_against_the_textbook(dtype, vocabulary, options):
    args = arguments(dtype, vocabulary=vocabulary, transpose_w=options.get("transpose_w", False))
    compare(functools.partial(loss, **options), args, **{"reduction": "mean", **options})


def test_plain_input_and_mixed_dtypes():
    """No norm; float32 parameters and stream: their gradients leave the products in float32."""
    x, _, kernel, labels, weights = arguments(F32, (3, 100))
    args = (x, None, kernel, labels, weights)
    got, want = (jit(jax.value_and_grad(lambda *a, f=f: f(*a)[0], (0, 2)))(*args) for f in (loss, plain))
    assert_close(got, want, rtol=1e-5)
    rounded = jax.grad(lambda *a: loss(*a, dtype=BF16)[0], (0, 2))(*args)
    for gradient, exact in zip(rounded, want[1], strict=True):
        assert gradient.dtype == F32 and gradient.shape == exact.shape
        np.testing.assert_allclose(gradient, exact, atol=0.03 * float(jnp.abs(exact).max()))
        assert not (gradient.astype(BF16) == gradient).all()  # never rounded to bfloat16


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("options", [{}, {"chunk_bytes": 1 << 20}, {"soft_cap": 40.0}, {"reduction": "sum"}], ids=str)
def test_a_label_that_is_nearly_certain(options, dtype):
    """Its cotangent p - 1 is a small difference: of the exact logit, not of the one that is kept in 16 bits."""
    x = jnp.ones((160, 2), dtype)
    kernel = jnp.zeros((2, 136), dtype).at[:, 7].set(jnp.asarray([11.0, 1 / 32 + 1 / 128], dtype))
    labels = jnp.full(160, 7)

    def textbook(x, kernel):
        y = x.astype(F32) @ kernel.astype(F32)
        y = jnp.tanh(y / options["soft_cap"]) * options["soft_cap"] if "soft_cap" in options else y
        losses = jax.nn.logsumexp(y, axis=1) - y[:, 7]
        return jnp.sum(losses) / (1 if "reduction" in options else 160)

    def fused(x, kernel):
        return loss(x, None, kernel, labels, None, **options)[0]

    got, want = (jit(jax.value_and_grad(f, (0, 1)))(x, kernel) for f in (fused, textbook))
    assert 1e-3 < want[0] / (160 if "reduction" in options else 1) < 1e-2  # 1 - p
    np.testing.assert_allclose(got[0], want[0], rtol=1e-3)
    for gradient, exact in zip(got[1], want[1], strict=True):
        np.testing.assert_allclose(gradient.astype(F32)[:, 1], exact.astype(F32)[:, 1], rtol=2e-2)
        np.testing.assert_allclose(gradient.astype(F32), exact.astype(F32), rtol=2e-2, atol=1e-6)


def test_padding_beside_very_negative_logits():
    """The padding's logits, 0, would have probabilities exp(240)."""
    x, kernel, labels = jnp.ones((4, 8), BF16), jnp.full((8, 131), -30, BF16), jnp.arange(4)
    value, gradients = jax.value_and_grad(lambda x, k: loss(x, None, k, labels, None)[0], (0, 1))(x, kernel)
    np.testing.assert_allclose(value, np.log(131), rtol=1e-4)
    assert all(jnp.isfinite(g).all() for g in gradients)


def test_labels_and_weights():
    x, scale, kernel, labels, weights = arguments(F32, (20,))
    ignored = jnp.full_like(labels, -100)

    def value_and_gradient(labels, weights=None, **options):
        return jax.value_and_grad(lambda x: loss(x, scale, kernel, labels, weights, **options)[0])(x)

    value, gradient = value_and_gradient(ignored)
    assert value == 0 and not gradient.any()
    empty = loss(x[:0], scale, kernel, labels[:0], None)
    assert empty == (0, 0)
    value, gradient = value_and_gradient(labels)
    none = jnp.where(labels == -100, 7, labels)
    assert_close((value, gradient), value_and_gradient(none, labels != -100))
    assert not (labels == 3).any()
    assert_close((value, gradient), value_and_gradient(jnp.where(labels == -100, 3, labels), ignore_index=3))
    assert loss(x, scale, kernel, labels, None)[1] == (labels != -100).sum()
    assert_close(loss(x, scale, kernel, labels, weights)[1], weights[labels != -100].sum())
    for wrong, options in ((VOCABULARY, {}), (-1, {}), (-100, {"ignore_index": None})):
        value, gradient = value_and_gradient(none.at[4].set(wrong), reduction="sum", **options)
        assert jnp.isnan(value) and jnp.isnan(gradient[4]).all() and jnp.isfinite(gradient[:4]).all()


@pytest.mark.slow
def test_transformations():
    """vmap of everything, checkpoint, second derivatives, jit with a gradient of the weights."""
    x, scale, kernel, labels, weights = arguments(F32, (2, 129), 8, 24)

    def value(f, **options):
        return lambda x, scale, kernel, weights, labels: f(x, scale, kernel, labels, weights, **options)[0].sum()

    def mapped(f, **options):
        gradient = jax.value_and_grad(value(f, **options), (0, 1, 2, 3))
        return lambda *a: jax.vmap(gradient, (0, None, None, 0, 0))(*a)

    def each_kernel(f):
        gradient = jax.grad(value(f), (0, 2))
        return lambda x, s, k, w, y: jax.vmap(gradient, (None, None, 0, None, None))(x, s, jnp.stack([k, 2 * k]), w, y)

    def summed_gradient(f):
        return lambda *a: sum(jnp.sum(jnp.sin(9 * g)) for g in jax.grad(value(f), (0, 2))(*a))

    transforms = {
        "vmap": mapped,
        "vmap of each loss": functools.partial(mapped, reduction="none"),
        "vmap over kernels": each_kernel,
        "checkpoint": lambda f: jax.grad(jax.checkpoint(value(f)), (0, 1, 2, 3)),
        "second derivative": lambda f: jax.grad(summed_gradient(f), 2),
    }

    def all_of(f):
        return jit(lambda *a: {name: transform(f)(*a) for name, transform in transforms.items()})

    got, want = (all_of(f)(x, scale, kernel, weights, labels) for f in (loss, plain))
    for (path, g), w in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=2e-4, atol=2e-4 * float(jnp.abs(w).max()), err_msg=str(path))


NAMES = ("label_smoothing", "z_loss", "soft_cap")
SCHEDULED = (jnp.float32(0.1), jnp.float32(1e-2), jnp.float32(3.0))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_coefficients_of_a_schedule(reduction):
    """Traced ones: loss, their gradients among all, and second derivatives."""
    x, scale, kernel, labels, weights = arguments(F32, (2, 129), 8, 24)

    def value(f):
        def of_arrays(x, kernel, *coefficients):
            options = dict(zip(NAMES, coefficients, strict=True))
            losses, _ = f(x, scale, kernel, labels, weights, reduction=reduction, **options)
            return jnp.sum(losses * jnp.arange(129)) / 129 if reduction == "none" else losses

        return of_arrays

    def all_of(f):
        def summed(*a):
            return sum(jnp.sum(jnp.sin(9 * g)) for g in jax.grad(value(f), range(5))(*a))

        return jit(lambda *a: (jax.value_and_grad(value(f), range(5))(*a), jax.grad(summed, range(1, 5))(*a)))

    got, want = (all_of(f)(x, kernel, *SCHEDULED) for f in (loss, plain))
    for (path, g), w in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-3, atol=1e-3 * float(jnp.abs(w).max()), err_msg=str(path))


def test_arrays_are_numbers():
    """Outside of jit and in it, of other dtypes too; a traced one out of its range gives NaN, all gradients too."""
    x, scale, kernel, labels, weights = arguments(F32, (20,), 8, 24)

    @jax.jit
    def of_arrays(*coefficients):
        def value(x, kernel):
            return loss(x, scale, kernel, labels, weights, **dict(zip(NAMES, coefficients, strict=True)))[0]

        return jax.value_and_grad(value, (0, 1))(x, kernel)

    numbers = 0.25, 0.5, 3
    want, _ = loss(x, scale, kernel, labels, weights, **dict(zip(NAMES, numbers, strict=True)))
    for given in (numbers, (np.float32(0.25), BF16(0.5), jnp.int32(3)), (F16(0.25), np.asarray(0.5), np.int64(3))):
        eager, _ = loss(x, scale, kernel, labels, weights, **dict(zip(NAMES, given, strict=True)))
        np.testing.assert_allclose([eager, of_arrays(*given)[0]], want, rtol=1e-5)
    for i, wrong in ((0, 1.0), (0, -0.1), (1, -1.0), (1, jnp.inf), (2, 0.0), (2, -3.0), (2, jnp.nan), (2, jnp.inf)):
        given = [wrong if i == j else number for j, number in enumerate(numbers)]
        assert all(jnp.isnan(y).any() for y in jax.tree.leaves(of_arrays(*given)))


@needs_nvrtc
def test_kernels_with_a_traced_soft_cap():
    x, scale, kernel, labels, weights = arguments(BF16, (2, 64), 8, 24)

    def value(x, kernel, cap, reduction):
        options = {"reduction": reduction, "soft_cap": cap, "z_loss": cap, "label_smoothing": cap / 9}
        return loss(x, scale, kernel, labels, weights, dtype=BF16, **options)[0].sum()

    for reduction, count in (("mean", 3), ("none", 4)):
        gradient = jax.grad(functools.partial(value, reduction=reduction), (0, 1, 2))
        assert kernels(gradient, x, kernel, F32(3.0)) == count


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_data_parallel_gradient(reduction):
    """Under shard_map each shard works in chunks; the gradient of a replicated parameter is summed over the shards."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x, scale, kernel, labels, weights = arguments(F32, (8, 70), 8, 24)
    data = jax.P("data")

    def gradient(f):
        def of_shard(x, scale, kernel, weights, labels):
            def mean(*a):
                loss, total = f(*a[:3], labels, a[3], reduction=reduction)
                return jax.lax.psum(loss.sum(), "data") / jax.lax.psum(total, "data")

            return jax.value_and_grad(mean, (0, 1, 2, 3))(x, scale, kernel, weights)

        specs = (data, jax.P(), jax.P(), data, data)
        out_specs = (jax.P(), specs[:4])
        return jit(jax.shard_map(of_shard, mesh=mesh, in_specs=specs, out_specs=out_specs))

    got, want = (gradient(f)(x, scale, kernel, weights, labels) for f in (loss, plain))
    assert_close(got, want, rtol=1e-4)


@pytest.mark.parametrize("sizes", [(4, 1), (2, 2)])
@pytest.mark.parametrize("is_set", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_explicit_mesh(reduction, is_set, sizes):
    """Tokens are sharded over an explicit axis, the parameters know of no mesh: each shard has chunks of its own."""
    mesh = jax.make_mesh(sizes, ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    x, scale, kernel, labels, weights = arguments(F32, (8, 70), 8, 24)

    def gradient(x, labels, weights):
        def value(x, scale, kernel, weights):
            return loss(x, scale, kernel, labels, weights, reduction=reduction)[0].sum()

        return jit(jax.value_and_grad(value, (0, 1, 2, 3)))(x, scale, kernel, weights)

    want = gradient(x, labels, weights)
    with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
        got = gradient(*(jax.device_put(a, jax.NamedSharding(mesh, jax.P("data"))) for a in (x, labels, weights)))
    assert jax.typeof(got[1][0]).sharding.spec == jax.P("data", None, None)
    assert_close(got, want, rtol=1e-4)


def of_large_logits(size, shift=0.0):
    """x, kernel and labels, bfloat16, of logits of about this size around a shift."""
    x, kernel = normal(0, TOKENS, WIDTH).astype(BF16), size * normal(1, WIDTH, VOCABULARY) / WIDTH**0.5
    labels = np.random.default_rng(0).integers(0, VOCABULARY, TOKENS)
    return x.at[:, 0].set(1), kernel.at[0].set(shift).astype(BF16), jnp.asarray(labels)


def gradients(f, x, kernel, labels, **options):
    value = jit(jax.value_and_grad(lambda x, k: f(x, None, k, labels, jnp.ones(len(x)), **options)[0], (0, 1)))
    return value(x, kernel)


@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.parametrize("size, shift", [(1, 0), (8, 0), (8, 300), (8, -300)])
def test_exponentials_are_as_exact_as_the_result(size, shift, transpose_w):
    """Logits of 8 that are rounded to bfloat16 make gradients that are off by 4 %."""
    x, kernel, labels = of_large_logits(size, shift)
    if transpose_w:
        _, got = gradients(lambda x, s, k, *a: loss(x, s, k.T, *a, transpose_w=True), x, kernel, labels)
    else:
        _, got = gradients(loss, x, kernel, labels)
    _, want = gradients(plain, x.astype(F32), kernel.astype(F32), labels)
    # The bias's row of dW, of a constant input, cancels in a column of W: it is but rounding.
    for one, exact in zip((got[0][:, 1:], got[1]), (want[0][:, 1:], want[1]), strict=True):
        assert jnp.linalg.norm(one.astype(F32) - exact) < 6e-3 * jnp.linalg.norm(exact)


@pytest.mark.smoke
def test_exponentials_out_of_range_are_made_again():
    """The result for logits of +-300, and for one such row alone, is bit for bit that of the head that keeps logits."""
    x, kernel, labels = of_large_logits(100)
    one_row = (0.01 * x).at[200].multiply(300)
    for given in (x, one_row):
        got = gradients(loss, given, kernel, labels)
        with only_logits():
            assert_equal(got, gradients(loss, given, kernel, labels))
    with only_logits():
        of_logits = gradients(loss, 0.01 * x, kernel, labels)
    assert not (of_logits[1][1] == gradients(loss, 0.01 * x, kernel, labels)[1][1]).all()


@pytest.mark.parametrize(
    "height, column, others, weight",
    [
        (86, 16, 0, 1.0),
        (86, 64, 0, 1e20),
        (80, 2.0**12, 0, 1e20),
        (74, 1, 0, 1e-5),
        (-40, 1, 1, 1e23),
        (1, 1, 0, 1e-30),
    ],
)
def test_products_of_a_row_that_is_far_from_the_others(height, column, others, weight):
    """Neither overflows beside large weights, and small inputs of the row are not lost beside its exponentials."""
    tokens, rng = 160, np.random.default_rng(0)
    x, kernel = rng.normal(size=(tokens, 8)), rng.normal(size=(8, VOCABULARY))
    x[:, 0], kernel[0], kernel[:, 3] = 0, others, 0
    kernel[0, 3] = column
    x[70] = [height / column, 2.0**-8, *[0] * 6]
    labels = jnp.asarray(rng.integers(4, VOCABULARY, tokens))
    x, kernel, weights = jnp.asarray(x, BF16), jnp.asarray(kernel, BF16), jnp.full(tokens, weight, F32)

    def value(f, *given):
        g = lambda x, k, w: f(x, None, k, labels, w, reduction="sum")[0]  # noqa: E731
        return jit(jax.value_and_grad(g, (0, 1)))(*given)

    got = value(loss, x, kernel, weights)
    with jax.enable_x64(True):
        want = value(plain, *(jnp.asarray(np.float64(y)) for y in (x, kernel, weights)))
    for one, exact in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.float64(one), exact, rtol=0.02, atol=0.02 * float(np.abs(exact).max()))
    np.testing.assert_allclose(np.float64(got[1][1][1, 3]), want[1][1][1, 3], rtol=0.05)


@contextlib.contextmanager
def only_logits():
    """Heads keep logits, not exponentials."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExponentialHead, "of", lambda head, *_: head)
        yield


def assert_equal(got, want):
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(one.astype(F32), other.astype(F32))


def test_exponentials_beside_a_cotangent_of_zero():
    """z_loss takes the log-sum-exp's cotangent through 0, where the label's is no multiple of anything."""
    x, kernel = jnp.ones((140, 8), BF16), jnp.full((8, 136), -0.875, BF16)
    z_loss = -0.5 / (-7 + np.log(136))
    arguments = (x, kernel, jnp.arange(140) % 136)
    _, got = gradients(loss, *arguments, z_loss=z_loss)
    _, want = gradients(plain, x.astype(F32), kernel.astype(F32), arguments[2], z_loss=z_loss)
    for one, exact in zip(got, want, strict=True):
        np.testing.assert_allclose(one.astype(F32), exact, rtol=1e-2, atol=1e-2 * float(jnp.abs(exact).max()))


def test_exponentials_beside_a_cotangent_that_is_exactly_zero():
    """Nothing is divided by that of the log-sum-exp alone, by z_loss, or of a token whose weight is 0."""
    x, kernel = jnp.ones((140, 8), BF16), jnp.full((8, 136), -25, BF16).at[:, 3].set(-1)
    labels, weights = jnp.full(140, 3), jnp.ones(140).at[5].set(0)
    for z_loss in (1 / 16, 0.0):  # lse is -8

        def value(f, x, k, z_loss=z_loss):
            return f(x, None, k, labels, weights, z_loss=z_loss, reduction="sum")[0]

        got = jit(jax.grad(functools.partial(value, loss), (0, 1)))(x, kernel)
        want = jit(jax.grad(functools.partial(value, plain), (0, 1)))(x.astype(F32), kernel.astype(F32))
        for one, exact in zip(got, want, strict=True):
            np.testing.assert_allclose(one.astype(F32), exact, rtol=1e-2, atol=1e-6)


@needs_nvrtc
@pytest.mark.parametrize("sizes", [(1, 1), (4, 1), (2, 2)])
def test_kernels_on_an_explicit_mesh(sizes):
    mesh = jax.make_mesh(sizes, ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    x, scale, kernel, labels, weights = arguments(BF16, (8, 64), 8, 24)
    x, labels, weights = (jax.device_put(a, jax.NamedSharding(mesh, jax.P("data"))) for a in (x, labels, weights))
    gradient = jax.grad(lambda x, kernel: loss(x, scale, kernel, labels, weights, dtype=BF16)[0], (0, 1))
    assert kernels(gradient, x, kernel) == 6  # three of them only where exponentials leave their range
    products = coda.explain(gradient, x, kernel, platform="cuda", device="H100").products
    *others, of_kernel = [product.epilogue for product in products]  # of one chunk on each of four devices
    assert others == ["loss_exponentials", "scale_rows"] and of_kernel in ("accumulate", "gemm")


@pytest.mark.smoke
def test_no_array_of_all_logits():
    """For CUDA and for the CPU the largest array is a chunk's logits; the loop copies no accumulator."""
    tokens, width, vocabulary = 1024, 32, 1000

    def typed(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype)

    types = (typed((tokens, width), BF16), typed((width,), F32), typed((width, vocabulary), F32))
    types += (typed((tokens,), jnp.int32), typed((tokens,), F32))
    gradient = jax.value_and_grad(lambda *a: loss(*a, dtype=BF16)[0], (0, 1, 2, 4))
    for f, platform in itertools.product((lambda *a: loss(*a, dtype=BF16), gradient), ("cuda", "cpu")):
        lowered = jax.jit(f).trace(*types).lower(lowering_platforms=(platform,))
        shapes = re.findall(r"tensor<((?:\d+x)+)(?:bf16|f32|i32|i1)>", lowered.as_text())
        assert max(math.prod(map(int, shape[:-1].split("x"))) for shape in shapes) <= 128 * vocabulary
    text = lowered.compile().as_text()
    (unexpected,) = re.findall(r'body=%(\S+), .*op_name="[^"]*jit\(coda_fallback\)/while"', text)
    # The zeros that two loops begin with are one array on a CPU, and the loop that is not expected to run has a copy.
    for computation in re.split(r"\n(?=%|ENTRY )", text):
        copied = set(re.findall(rf"= f32\[{width},{vocabulary}\]\S* copy\((%\w+)", computation))
        assert computation.startswith(f"%{unexpected} ") or copied <= {"%wrapped_broadcast"}, copied


def test_products():
    """One a chunk without gradient, three with one: nothing is computed twice but for reduction="none"."""
    args = arguments(BF16, (256,), 8, 24)

    def count(f):
        return sum(coda.explain(f, *args).products.values())

    def gradient(**options):
        return jax.value_and_grad(lambda *args: loss(*args, **options)[0].sum(), (0, 2))

    assert count(loss) == 2
    assert count(gradient()) == 6
    assert count(gradient(reduction="none")) == 8


@pytest.mark.parametrize(
    "change, message",
    [
        ({"labels": jnp.zeros((5,), int)}, r"labels has shape \(5,\); beside x \(4, 8\) it must be \(4,\)"),
        ({"labels": jnp.zeros((4,))}, "labels have dtype float32; they must be integers"),
        ({"w": jnp.ones((9, 7))}, r"w has shape \(9, 7\); beside x \(4, 8\) it must be \(8, V\)"),
        ({"transpose_w": True}, r"w has shape \(8, 7\); .* it must be \(V, 8\) with transpose_w"),
        ({"sumsq": jnp.ones(5)}, r"sumsq has shape \(5,\); beside x \(4, 8\) it must be \(4,\)"),
        ({"scale": jnp.ones(4)}, r"scale has shape \(4,\); .* it must be \(8,\)"),
        ({"weights": jnp.ones((4, 1))}, r"weights has shape \(4, 1\)"),
        ({"reduction": "avg"}, "reduction = 'avg'; it must be one of 'mean', 'sum', 'none'"),
        ({"label_smoothing": 1.0}, r"label_smoothing = 1.0; it must be in \[0, 1\)"),
        ({"z_loss": -1.0}, "z_loss = -1.0; it must be 0 or a positive number"),
        ({"soft_cap": 0.0}, "soft_cap = 0.0; it must be a positive number or None"),
        ({"chunk_bytes": 0}, "chunk_bytes = 0; it must be positive"),
        ({"soft_cap": F32(-3.0)}, "soft_cap = -3.0; it must be a positive number or None"),
        (
            {"z_loss": jnp.ones(4)},
            r"z_loss has shape \(4,\); it must be 0 or a positive number, or an array \(\) of one",
        ),
        ({"z_loss": None}, "z_loss is NoneType; it must be 0 or a positive number, or"),
        ({"label_smoothing": "0.1"}, r"label_smoothing is str; it must be in \[0, 1\), or"),
        ({"soft_cap": jnp.ones((), bool)}, "soft_cap has dtype bool; it must be a positive number or None, or"),
    ],
)
def test_errors_name_the_value_and_the_rule(change, message):
    given = {"x": jnp.ones((4, 8)), "sumsq": jnp.ones(4), "scale": jnp.ones(8), "w": jnp.ones((8, 7))}
    given |= {"labels": jnp.zeros(4, int)} | change
    norm = coda.DeferredNorm(*(given.pop(name) for name in ("x", "sumsq", "scale")))
    with pytest.raises((ValueError, TypeError), match=f"linear_cross_entropy: {message}"):
        coda.linear_cross_entropy(norm, **given)
