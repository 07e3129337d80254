"""coda.gemm under jit, grad, vmap, scan and checkpoint; what it keeps for the gradient; what it compiles."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coda_jax as coda
from coda_jax.primitives import gemm_primitive
from tests.gemm_cases import assert_close, total
from tests.gemm_cases import jit as quick_jit

RNG = np.random.default_rng(5)
BATCH, M, K, N = 3, 16, 8, 24
A = jnp.asarray(RNG.standard_normal((BATCH, M, K)), jnp.float32)
B = jnp.asarray(RNG.standard_normal((BATCH, K, N)), jnp.float32)
X = jnp.asarray(RNG.standard_normal((BATCH, M, N)), jnp.float32)
ROW = jnp.asarray(RNG.standard_normal((BATCH, N)), jnp.float32)
COLUMN = jnp.asarray(RNG.standard_normal((BATCH, M, 1)), jnp.float32)
SCALE = jnp.asarray(RNG.standard_normal(BATCH), jnp.float32)


def rows_only(acc, x, row, column, scale):
    y = jnp.sin(acc * scale + column) * row + x
    return y, jnp.sum(y * acc, axis=1)


def both_axes(acc, x, row, column, scale):
    y, sums = rows_only(acc, x, row, column, scale)
    index = jax.lax.broadcasted_iota(jnp.float32, acc.shape, 0)
    return y, sums, jnp.sum(y * index, axis=0), jnp.mean(y)


def plain(f):
    return lambda a, b, *operands: f(a @ b, *operands)


def fused(f, **options):
    return lambda a, b, *operands: coda.gemm(a, b, *operands, epilogue=f, **options)


ARGUMENTS = (A, B, X, ROW, COLUMN, SCALE)
EVERYTHING, SHARED_B, ROWS = (0,) * 6, (0, None, 0, None, 0, None), (0, None, 0, None, None, None)
BATCHES = {"everything": EVERYTHING, "shared b": SHARED_B, "b alone": (None, 0, *[None] * 4), "rows": ROWS}
BATCHES["last axis"] = (2, 1, 0, 1, 0, 0)


def mapped(axes):
    """The arguments with the batch at `axes`, those not mapped without it."""
    return [x[0] if axis is None else jnp.moveaxis(x, 0, axis) for x, axis in zip(ARGUMENTS, axes, strict=True)]


@pytest.mark.smoke
@pytest.mark.parametrize("f", [rows_only, both_axes])
@pytest.mark.parametrize("batch", BATCHES)
def test_vmap_and_its_gradient(batch, f):
    axes = BATCHES[batch]
    arguments = mapped(axes)

    def loss(function):
        return lambda *xs: total(jax.vmap(function, in_axes=axes)(*xs))

    outputs = [quick_jit(jax.vmap(function, in_axes=axes))(*arguments) for function in (fused(f), plain(f))]
    assert_close(*outputs)
    gradients = [quick_jit(jax.grad(loss(function), range(6)))(*arguments) for function in (fused(f), plain(f))]
    assert_close(*gradients)


def test_vmap_of_an_epilogue_that_has_nothing_of_the_product():
    """Neither tiles nor reductions tell the size of the batch then."""
    axes = (0, None, 0)
    summed = jax.vmap(fused(lambda acc, row: jnp.sum(row)), in_axes=axes)(A, B[0], ROW)
    np.testing.assert_allclose(summed, ROW.sum(1), rtol=1e-6)


def test_vmap_of_grad():
    def per_example(function):
        gradient = jax.grad(lambda *xs: total(function(*xs)), (0, 1, 4))
        return quick_jit(jax.vmap(gradient, in_axes=SHARED_B))

    arguments = mapped(SHARED_B)
    for residuals in ("preactivation", "recompute"):
        assert_close(
            per_example(fused(both_axes, residuals=residuals))(*arguments), per_example(plain(both_axes))(*arguments)
        )


@pytest.mark.parametrize("inner", [SHARED_B, (None, 0, None, None, None, 0), EVERYTHING], ids=str)
@pytest.mark.parametrize("outer", [(0, None, None, None, None, None), (None, 0, 0, None, None, None)], ids=str)
def test_nested_vmap(outer, inner):
    """Batches merge; an argument has either, both or none."""
    inner_arguments = mapped(inner)
    arguments = [x if axis is None else jnp.stack([x, 2 * x]) for x, axis in zip(inner_arguments, outer, strict=True)]
    nested = [jax.vmap(jax.vmap(f(both_axes), in_axes=inner), in_axes=outer) for f in (fused, plain)]
    results = [quick_jit(f)(*arguments) for f in nested]
    assert_close(*results)


def test_vmap_with_one_epilogue_of_many_inputs():
    """Captured values are batched like operands."""

    def run(multiply):
        return jax.vmap(lambda a, scale, row: multiply(a, lambda acc: jnp.tanh(acc * scale) + row), in_axes=(0, 0, 0))

    got = run(lambda a, f: coda.gemm(a, B[0], epilogue=f))(A, SCALE, ROW)
    assert_close(got, run(lambda a, f: f(a @ B[0]))(A, SCALE, ROW))


@pytest.mark.parametrize("residuals", ["preactivation", "recompute"])
@pytest.mark.parametrize("jit", [False, True])
def test_gradient_of_captured_values(jit, residuals):
    constant = jnp.linspace(0, 1, N)

    def loss(multiply):
        def of(a, scale, row, x):
            return total(
                multiply(a, lambda acc, x: (jnp.tanh(acc * scale + constant) * row + x, jnp.sum(acc * row, axis=1)), x)
            )

        gradient = jax.value_and_grad(of, (0, 1, 2, 3))
        return quick_jit(gradient) if jit else gradient

    got = loss(lambda a, f, x: coda.gemm(a, B[0], x, epilogue=f, residuals=residuals))(A[0], SCALE[0], ROW[0], X[0])
    assert_close(got, loss(lambda a, f, x: f(a @ B[0], x))(A[0], SCALE[0], ROW[0], X[0]))


@pytest.mark.parametrize("residuals", ["preactivation", "recompute"])
def test_gradient_of_a_captured_python_number(residuals):
    def loss(multiply):
        return jax.value_and_grad(lambda scale: total(multiply(lambda acc: jnp.tanh(acc * scale["s"]))))

    got = loss(lambda f: coda.gemm(A[0], B[0], epilogue=f, residuals=residuals))({"s": 0.3})
    assert_close(got, loss(lambda f: f(A[0] @ B[0]))({"s": 0.3}))


@pytest.mark.parametrize("residuals", ["preactivation", "recompute"])
def test_custom_vjp_function_that_closes_over_an_array(residuals):
    """Its own rule is the derivative; what it closes over is a constant to it, as in JAX."""

    row = ROW[0]

    @jax.custom_vjp
    def tripled(x):
        return x * row

    tripled.defvjp(lambda x: (x * row, None), lambda _, g: (3 * g * row,))

    def gradient(multiply):
        return quick_jit(jax.grad(lambda a: total(multiply(a, tripled))))(A[0])

    got = gradient(lambda a, f: coda.gemm(a, B[0], epilogue=f, residuals=residuals))
    assert_close(got, gradient(lambda a, f: f(a @ B[0])))


def test_without_jit_and_with_a_search_for_nans():
    def f(a):
        return coda.gemm(a, B[0], ROW[0], epilogue=lambda acc, row: jnp.log(acc) * row)

    with jax.disable_jit():
        assert_close(coda.gemm(A[0], B[0]), A[0] @ B[0])
        assert_close(jax.grad(lambda a: total(coda.gemm(a, B[0])))(A[0]), jax.grad(lambda a: total(a @ B[0]))(A[0]))

    def gradient(a):  # the epilogue's own is 0 / 0, at an acc of 0
        return jax.grad(lambda a: jnp.sum(coda.gemm(a, B[0], epilogue=lambda acc: jnp.sqrt(acc) * 0)))(0 * a)

    with jax.debug_nans(True):
        for g, operation in ((f, "log"), (jax.jit(f), "log"), (jax.jit(gradient), "mul|dot_general")):
            with pytest.raises(FloatingPointError, match=operation):
                g(A[0])


@pytest.mark.parametrize("residuals", ["preactivation", "recompute"])
def test_scan_with_captured_values(residuals):
    """Over layers: weights and a captured row are scanned, a captured scale is not."""
    weights = jnp.asarray(RNG.standard_normal((3, K, K)), jnp.float32) / 3
    rows = jnp.asarray(RNG.standard_normal((3, K)), jnp.float32)

    def loss(multiply):
        def of(x, weights, rows, scale):
            def layer(x, parameters):
                w, row = parameters
                y, sums = multiply(
                    x, w, lambda acc, x: (jnp.tanh(acc + row) * scale + x, jnp.sum(acc * acc, axis=1)), x
                )
                return y, sums

            return total(jax.lax.scan(layer, x, (weights, rows)))

        return quick_jit(jax.grad(of, (0, 1, 2, 3)))

    got = loss(lambda a, b, f, x: coda.gemm(a, b, x, epilogue=f, residuals=residuals))(A[0], weights, rows, SCALE[0])
    assert_close(got, loss(lambda a, b, f, x: f(a @ b, x))(A[0], weights, rows, SCALE[0]))


@pytest.mark.parametrize(
    "policy", [None, jax.checkpoint_policies.save_only_these_names("coda_preactivation")], ids=["all", "named"]
)
def test_checkpoint(policy):
    """The named pre-activation can be saved, so that the product is not computed again."""

    def loss(function):
        return lambda *xs: total(function(*xs))

    arguments = [x[0] for x in ARGUMENTS]
    gradient = jax.grad(jax.checkpoint(loss(fused(both_axes)), policy=policy), (0, 1, 2))
    assert_close(quick_jit(gradient)(*arguments), quick_jit(jax.grad(loss(plain(both_axes)), (0, 1, 2)))(*arguments))
    products = str(jax.make_jaxpr(gradient)(*arguments)).count("coda_gemm[")
    assert products == (4 if policy is None else 3)


@pytest.mark.smoke
@pytest.mark.parametrize("residuals", ["preactivation", "recompute"])
def test_second_derivatives(residuals):
    arguments = [x[0] for x in ARGUMENTS]

    def loss(function):
        first = jax.grad(lambda *xs: total(function(*xs)), (0, 1, 4, 5))
        return quick_jit(jax.grad(lambda *xs: total([jnp.sin(x) for x in first(*xs)]), (0, 1, 3)))

    got = loss(fused(both_axes, residuals=residuals))(*arguments)
    assert_close(got, loss(plain(both_axes))(*arguments), rtol=2e-4)


def keeps(kept, f, *operands, dtype=jnp.bfloat16, **options):
    """Whether the gradient keeps these shapes and dtypes beside a and b."""
    a, b = A[0].astype(dtype), B[0].astype(dtype)
    _, pullback = jax.vjp(fused(f, **options), a, b, *operands)
    found = sorted((x.shape, x.dtype.name) for x in jax.tree.leaves(pullback))
    return found == sorted([*kept, *((x.shape, x.dtype.name) for x in (a, b))])


def test_gradient_keeps_only_factors_that_it_reads():
    x, row, column = X[0].astype(jnp.bfloat16), ROW[0], COLUMN[0]
    tile, preactivation = ((M, N), "bfloat16"), ((M, N), "bfloat16")
    keep = jnp.arange(N) % 2 == 0
    # Linear in acc, or in all: nothing, or the factors that are read.
    assert keeps([], lambda acc, x: acc + x, x)
    assert keeps([], lambda acc, x: (acc + x, jnp.sum(acc, axis=1)), x)
    assert keeps([((N,), "bool")], lambda acc, keep: jnp.where(keep, acc, 0), keep)
    # Not linear: the rounded acc, and the operands that the derivative reads.
    assert keeps([preactivation], lambda acc, x: jnp.sin(acc) + x, x)
    assert keeps([preactivation, ((M, 1), "float32")], lambda acc, column: acc * column, column)
    assert keeps([preactivation, ((N,), "float32")], lambda acc, row: jax.nn.silu(acc + row), row)
    assert keeps([preactivation, tile], lambda acc, x: (jnp.sin(acc) * x, jnp.max(acc, axis=1)), x)
    assert keeps([((M, N), "float32")], lambda acc: jnp.sin(acc), dtype=jnp.float32)
    # Only the arguments.
    assert keeps([], lambda acc, x: jnp.sin(acc) + x, x, residuals="recompute")
    assert keeps([tile], lambda acc, x: jnp.sin(acc) * x, x, residuals="recompute")


def test_no_residual_of_a_scan_is_a_float32_tile():
    """Read in the jaxpr: what the forward loop stacks for the backward loop."""
    weights = jnp.ones((3, K, K), jnp.bfloat16)

    def loss(x, weights):
        def layer(x, w):
            return coda.gemm(x, w, x, epilogue=lambda acc, x: jax.nn.silu(acc) + x), None

        return jnp.sum(jax.lax.scan(layer, x, weights)[0].astype(jnp.float32))

    jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1)))(A[0].astype(jnp.bfloat16), weights)
    (forward, _) = [eqn for eqn in jaxpr.jaxpr.eqns if eqn.primitive.name == "scan"]
    stacked = [v.aval for v in forward.outvars if v.aval.shape[:1] == (3,) and v.aval.shape[1:] == (M, K)]
    assert stacked and all(aval.dtype == jnp.bfloat16 for aval in stacked)


def test_fresh_lambdas_compile_once():
    """Outside jit too: fifty functions of one mathematics, one program; and none of them is kept alive."""
    a, b, x = A[0, :5], B[0], X[0, :5]
    compiled, counting = [], True

    def count(event, duration, **_):
        if counting and event.endswith("backend_compile_duration"):
            compiled.append(event)

    coda.gemm(a, b, x, epilogue=lambda acc, x: acc - x)  # what all products have in common is compiled
    jax.monitoring.register_event_duration_secs_listener(count)
    coda.gemm(a, b, x, epilogue=lambda acc, x: jnp.cos(acc) * x - 3)
    assert len(compiled) == 1
    entries = gemm_primitive._run._cache_size()
    references = []
    for _ in range(50):
        f = lambda acc, x: jnp.cos(acc) * x - 3  # noqa: E731
        references.append(weakref.ref(f))
        coda.gemm(a, b, x, epilogue=f)
    assert len(compiled) == 1
    assert gemm_primitive._run._cache_size() == entries

    def gradient():
        return jax.grad(lambda a: jnp.sum(coda.gemm(a, b, x, epilogue=lambda acc, x: jnp.cos(acc) * x - 3)))(a)

    gradient()
    before = len(compiled)
    for _ in range(5):
        gradient()
    assert len(compiled) == before
    counting = False
    del f
    gc.collect()
    assert not any(reference() for reference in references)


def test_a_different_function_is_a_different_program():
    for constant in (2.0, 3.0):
        out = coda.gemm(A[0], B[0], epilogue=lambda acc: acc * constant)  # noqa: B023
        assert_close(out, (A[0] @ B[0]) * constant)


def test_in_place_with_one_row():
    """A tile of one row is a row vector, which has nothing to gain."""
    out = coda.gemm(A[0][:1], B[0], X[0][:1], epilogue=lambda acc, x: acc + x, input_output_aliases={0: 0})
    assert_close(out, A[0][:1] @ B[0] + X[0][:1])


def test_in_place_on_cpu():
    """The XLA form leaves aliasing to XLA; the operand stays valid."""
    total_before = X[0]
    out = coda.gemm(A[0], B[0], total_before, epilogue=jnp.add, input_output_aliases={0: 0})
    assert_close(out, A[0] @ B[0] + X[0])
    assert_close(total_before, X[0])
    got = jax.vmap(lambda a, x: coda.gemm(a, B[0], x, epilogue=jnp.add, input_output_aliases={0: 0}), (0, None))(
        A, X[0]
    )
    assert_close(got, A @ B[0] + X[0])
