"""Results in another order than acc's: y.T and coda.contraction_order, their shapes, batches and gradients."""

import functools
import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import coda_jax as coda
from coda_jax.epilogue import NotTileLocalError, trace

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
M, K, N = 48, 16, 64
RNG = np.random.default_rng(3)


def random(*shape):
    """Small integers: their products are exact."""
    return jnp.asarray(RNG.integers(-3, 4, shape), jnp.float32)


A, B, X = random(M, K), random(K, N), random(M, N)
ORDER = [0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15]


def ordered(x):
    """Along the last axis."""
    x = np.asarray(x)
    return x.reshape(*x.shape[:-1], -1, 16)[..., ORDER].reshape(x.shape)


def check(got, want):
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert one.shape == other.shape
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


# --- the order


@pytest.mark.parametrize("axis", [-1, 0, 1])
def test_order(axis):
    x = np.arange(32 * 48 * 16).reshape(32, 48, 16)
    got = coda.contraction_order(x, axis=axis)
    check(got, np.moveaxis(ordered(np.moveaxis(x, axis, -1)), -1, axis))
    batched = jax.vmap(lambda x: coda.contraction_order(x, axis=axis % 3), in_axes=3, out_axes=1)(np.stack([x, -x], 3))
    check(batched, np.stack([got, -got], 1))
    ct = jnp.asarray(RNG.integers(0, 100, x.shape), jnp.float32)
    (dx,) = jax.vjp(lambda x: coda.contraction_order(x, axis=axis), jnp.zeros(x.shape))[1](ct)
    check(coda.contraction_order(dx, axis=axis), ct)


def test_a_product_of_both_in_the_order():
    check(coda.contraction_order(A) @ coda.contraction_order(B, axis=0), A @ B)


def test_contraction_order_refuses_bad_axes_and_sizes():
    with pytest.raises(ValueError, match="axis -1 has size 24; it must be a multiple of 16"):
        coda.contraction_order(jnp.zeros((3, 24)))
    with pytest.raises(ValueError, match=r"axis = 2; x has shape \(16, 16\)"):
        coda.contraction_order(jnp.zeros((16, 16)), axis=2)
    (m,) = export.symbolic_shape("m")
    with pytest.raises(ValueError, match="axis -1 has the symbolic size m; it must be known"):
        jax.eval_shape(coda.contraction_order, jax.ShapeDtypeStruct((4, m), jnp.float32))
    with pytest.raises(ValueError, match="axis -1 has the symbolic size m"):
        jax.eval_shape(
            lambda a, b: coda.gemm(a, b, epilogue=lambda acc: coda.contraction_order(acc.T)),
            jax.ShapeDtypeStruct((m, K), jnp.float32),
            B,
        )


# --- results


def swiglu(acc):
    gate, up = jnp.split(acc, 2, axis=1)
    return gate * up


def rotated(acc):
    first, second = jnp.split(acc.reshape(acc.shape[0], -1, 32), 2, axis=-1)
    return jnp.concatenate([-second, first], axis=-1).reshape(acc.shape)


RESULTS = {
    "transposed": lambda acc: acc.T,
    "beside the other": lambda acc: (acc, acc.T),
    "before what follows": lambda acc: jnp.swapaxes(acc, 0, 1) * 2 + 1,
    "of two": lambda acc: (acc.T, (acc * acc).T),
    "ordered": lambda acc: coda.contraction_order(acc),
    "ordered rows": lambda acc: coda.contraction_order(acc.T),
    "ordered before it is transposed": lambda acc: coda.contraction_order(acc, axis=0).T,
    "ordered before what follows": lambda acc: coda.contraction_order(acc) * 2 + coda.contraction_order(acc * acc),
    "both": lambda acc: (q := coda.saturate(acc, E4M3), coda.contraction_order(q), coda.contraction_order(q.T)),
    "twice": lambda acc: acc.T.T,
    "a half": lambda acc: (swiglu(acc).T, coda.contraction_order(swiglu(acc))),
    "joined halves": lambda acc: jnp.concatenate(jnp.split(acc, 2, axis=1)[::-1], axis=1).T,
    "of heads": lambda acc: (rotated(acc).T, coda.contraction_order(rotated(acc))),
    "slices": lambda acc: [x.T for x in jnp.split(acc, [16], axis=1)],
    "ordered slices": lambda acc: [coda.contraction_order(x) for x in jnp.split(acc, [16], axis=1)],
    "reduced": lambda acc: (jnp.sum(acc.T, axis=0), jnp.max(acc.T, axis=1), jnp.max(acc.T)),
}


@pytest.mark.parametrize("name", RESULTS)
def test_results(name):
    epilogue = RESULTS[name]
    check(jax.jit(functools.partial(coda.gemm, epilogue=epilogue))(A, B), epilogue(A @ B))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", ["transposed", "beside the other", "ordered rows", "twice", "joined halves"])
def test_of_16_bits(name, dtype):
    a, b, epilogue = A.astype(dtype), B.astype(dtype), RESULTS[name]
    check(jax.jit(functools.partial(coda.gemm, epilogue=epilogue, out_dtype="float32"))(a, b), epilogue(A @ B))


@pytest.mark.parametrize("residuals", ["preactivation", "recompute"])
@pytest.mark.parametrize("name", ["linear", "square"])
def test_gradients_of_16_bits(name, residuals):
    arguments = A.astype(jnp.bfloat16), B.astype(jnp.bfloat16), X
    fused = functools.partial(coda.gemm, epilogue=GRADIENTS[name], residuals=residuals)
    got, want = gradients(fused, *arguments), gradients(lambda a, b, x: GRADIENTS[name](a @ b, x), A, B, X)
    for one, other in zip(got, want, strict=True):
        one, other = np.asarray(one, np.float32), np.asarray(other)
        np.testing.assert_allclose(one, other, rtol=3e-2, atol=2e-2 * np.abs(other).max())


def test_vectors():
    """Beside a transposed tile they are transposed too."""
    row, column = random(N), random(M, 1)
    got = coda.gemm(A, B, row, column, epilogue=lambda acc, row, column: acc.T * row[:, None] + column.T)
    check(got, (A @ B).T * row[:, None] + column.T)


def test_programs():
    """A result that is stored in another order is no other value."""

    def stores(epilogue, shape=(M, N)):
        return trace(epilogue, jax.ShapeDtypeStruct(shape, jnp.float32), ())[0].program.stores

    one, two, three = stores(RESULTS["both"])
    assert one.values == two.values == three.values
    assert [(x.transposed, x.contraction_order) for x in (one, two, three)] == [
        (False, False),
        (False, True),
        (True, True),
    ]
    assert stores(RESULTS["twice"]) == stores(lambda acc: acc)
    (square,) = stores(lambda acc: acc.T, (M, M))
    assert square.transposed


REFUSED = {
    "with what is not": (
        lambda acc, x: acc.T + x,
        "combines an axis indexed by the row with one indexed by the column",
    ),
    "with an operand": (lambda acc, x: acc + x.T, "combines an axis indexed by the row with one indexed by the column"),
    "taken apart": (lambda acc, x: jnp.split(acc.T, 2, axis=0)[0], "transposed array; transpose the result last"),
    "reshaped": (lambda acc, x: acc.T.reshape(2, -1, M), "transposed array; transpose the result last"),
    "an axis more": (lambda acc, x: acc.T[None], "transposed array; transpose the result last"),
    "ordered and not": (
        lambda acc, x: coda.contraction_order(acc) + x,
        "elements in contraction order with others in their own order; order it last",
    ),
    "of rows and of columns": (
        lambda acc, x: coda.contraction_order(acc) + coda.contraction_order(x, axis=0),
        "elements in contraction order with others",
    ),
    "ordered, with a vector": (
        lambda acc, x: coda.contraction_order(acc) + jnp.arange(M),
        "elements in contraction order with others",
    ),
    "ordered, reduced": (
        lambda acc, x: jnp.max(coda.contraction_order(acc), axis=1),
        "is of an array in contraction order; order the result last",
    ),
    "ordered twice": (
        lambda acc, x: coda.contraction_order(coda.contraction_order(acc)),
        "that is in contraction order",
    ),
    "along another axis": (
        lambda acc, x: coda.contraction_order(acc, axis=0),
        "output 0 is in contraction order along the rows, and not along its last axis.*Return its transpose",
    ),
    "ordered, then transposed": (
        lambda acc, x: coda.contraction_order(acc).T,
        "along the columns, and not along",
    ),
    "heads": (
        lambda acc, x: coda.contraction_order(acc.reshape(M, 3, 16)).reshape(M, M),
        "orders an axis indexed by the column of a head",
    ),
    "24 columns": (
        lambda acc, x: coda.contraction_order(jnp.split(acc, 2, axis=1)[0]),
        "size 24; it must be a",
    ),
}


@pytest.mark.parametrize("implementation", ["auto", "cuda"])
@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name, implementation):
    epilogue, message = REFUSED[name]
    b = random(K, M)  # a square product: sizes tell nothing
    with pytest.raises(ValueError, match=message):
        jax.make_jaxpr(lambda a, b, x: coda.gemm(a, b, x, epilogue=epilogue, implementation=implementation))(
            A, b, A @ b
        )


def test_in_place_of_an_operand():
    options = {"epilogue": lambda acc, x: (acc + x).T, "out_dtype": "float32", "input_output_aliases": {0: 0}}
    with pytest.raises(ValueError, match="output 0, which is not a float32 tile of its shape"):
        jax.eval_shape(lambda a, b, x: coda.gemm(a, b, x, **options), A, random(K, M), random(M, M))


# --- arrays of many axes


def everything(acc):
    return acc.T, coda.contraction_order(acc.T), coda.contraction_order(acc), jnp.max(acc.T, axis=1)


def test_axes_of_rows_and_columns():
    """The axes of the rows, and those of the columns, are in each other's place."""
    a, b = random(3, 2, 8, K), random(K, 4, 16)
    transposed, of_rows, of_columns, largest = jax.jit(functools.partial(coda.gemm, epilogue=everything))(a, b)
    acc = (a.reshape(-1, K) @ b.reshape(K, -1)).astype(jnp.float32)
    check(transposed, acc.T.reshape(4, 16, 3, 2, 8))
    check(of_rows, ordered(acc.T).reshape(4, 16, 3, 2, 8))
    check(of_columns, ordered(acc).reshape(3, 2, 8, 4, 16))
    check(largest, jnp.max(acc, axis=0))


@pytest.mark.parametrize("kind", ["pieces", "halves", "stacked halves"])
def test_several_arrays(kind):
    def apart(acc):
        return [x.T for x in jnp.split(acc, [N // 2], axis=1)]

    def halves(acc):
        return swiglu(acc).T, (acc * 2).T

    b = (B[:, : N // 2], B[:, N // 2 :])
    epilogue = apart if kind == "pieces" else halves
    got = jax.jit(functools.partial(coda.gemm, epilogue=epilogue))(A, jnp.stack(b, 1) if "stacked" in kind else b)
    want = [*epilogue(A @ B)]
    if "stacked" in kind:
        want[1] = want[1].reshape(2, N // 2, M)
    check(got, want)


def test_one_row():
    for a, b in ((random(1, K), B), (A, random(K, 1)), (random(1, K), random(K, 1))):
        check(coda.gemm(a, b, epilogue=lambda acc: (acc.T, acc)), ((a @ b).T, a @ b))


# --- batches


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)], ids=str)
def test_batches(axes):
    a = random(3, M, K) if axes[0] == 0 else A
    b = random(3, K, N) if axes[1] == 0 else B

    def multiply(a, b):
        return coda.gemm(a, b, epilogue=everything)

    want = jax.vmap(lambda a, b: everything(a @ b), in_axes=axes)(a, b)
    check(jax.jit(jax.vmap(multiply, in_axes=axes))(a, b), want)

    def nested(f):
        return jax.jit(jax.vmap(jax.vmap(f, in_axes=axes), in_axes=(0, None)))

    several = jnp.stack([a, a + 1])
    check(nested(multiply)(several, b), nested(lambda a, b: everything(a @ b))(several, b))


def test_groups():
    """Rows in no group are zeros, in transposed results too; no order mixes rows of groups."""
    sizes, b = jnp.array([16, 0, 20], jnp.int32), random(3, K, N)
    got = jax.jit(lambda *x: coda.ragged_gemm(*x, epilogue=lambda acc: (acc.T, coda.contraction_order(acc + 1))))(
        A, b, sizes
    )
    acc = np.concatenate([A[:16] @ b[0], A[16:36] @ b[2]])
    outside = ((0, M - 36), (0, 0))
    check(got, (np.pad(acc, outside).T, np.pad(ordered(acc + 1), outside)))
    with pytest.raises(NotTileLocalError, match="output 0 is in contraction order along rows that groups divide"):
        coda.ragged_gemm(A, b, sizes, epilogue=lambda acc: coda.contraction_order(acc.T))


# --- gradients


def gradients(multiply, *arguments):
    def loss(*arguments):
        outputs = jax.tree.leaves(multiply(*arguments))
        return sum(jnp.sum(x.astype(jnp.float32) * (1 + jnp.arange(x.size).reshape(x.shape) % 7)) for x in outputs)

    return jax.jit(jax.grad(loss, argnums=tuple(range(len(arguments)))))(*arguments)


GRADIENTS = {
    "linear": lambda acc, x: (acc + x).T,
    "square": lambda acc, x: ((acc * acc).T, coda.contraction_order(acc * x)),
    "ordered": lambda acc, x: coda.contraction_order((acc * acc + x).T),
    "quantised": lambda acc, x: (
        q := coda.saturate(acc * acc / 64, E5M2),
        coda.contraction_order(q.T),
        jnp.max(jnp.abs(acc * x), axis=1),
    ),
    "a half": lambda acc, x: (swiglu(acc).T, x.T),
}


@pytest.mark.parametrize("residuals", ["preactivation", "recompute"])
@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("n", [M, N])
def test_gradients(name, residuals, n):
    epilogue, b, x = GRADIENTS[name], random(K, n), random(M, n)
    fused = functools.partial(coda.gemm, epilogue=epilogue, residuals=residuals)
    got, want = gradients(fused, A, b, x), gradients(lambda a, b, x: epilogue(a @ b, x), A, b, x)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4 * np.abs(other).max())
        assert np.abs(other).max() > 0 or name == "a half"


@pytest.mark.parametrize("name", ["ordered", "quantised, twice"])
def test_the_derivative_is_an_epilogue(name):
    """Also where cotangents have the other order, the product computed again has them as tiles of (M, N)."""

    def twice(acc, x):
        q = coda.saturate(acc * acc + x, E5M2)
        return q, coda.contraction_order(q.T)  # cotangents of 8 bits, which are added

    def function(a, b, x):
        epilogue = twice if name != "ordered" else GRADIENTS["ordered"]
        outputs = coda.gemm(a, b, x, epilogue=epilogue, residuals="recompute")
        return sum(jnp.sum(y.astype(jnp.float32) ** 2) for y in jax.tree.leaves(outputs))

    text = str(jax.make_jaxpr(jax.grad(function, (0, 1, 2)))(A, B, X))
    # y, then that of its derivative, and da and db.
    assert re.findall(r", name=(\w+)[,)]", text) == [
        *["twice" if "twice" in name else "lambda"] * 2,
        *["gemm"] * 2,
    ]


def test_gradients_of_batches_and_axes():
    a, b = random(3, 2, 8, K), random(K, 4, 16)

    def plain(a, b):
        acc = a.reshape(-1, K) @ b.reshape(K, -1)
        return jnp.square(acc).T.reshape(*b.shape[1:], *a.shape[:-1])

    def fused(a, b):
        return coda.gemm(a, b, epilogue=lambda acc: jnp.square(acc).T)

    for one, other in zip(gradients(fused, a, b), gradients(plain, a, b), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
    mapped = [jax.vmap(f, in_axes=(0, None)) for f in (fused, plain)]
    for one, other in zip(*(gradients(f, a, b) for f in mapped), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


# --- any of these together

STEP = st.sampled_from(["scale", "saturate", "astype", "bf16", "T", "order"])


@pytest.mark.slow
@hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
@hypothesis.given(st.lists(STEP, max_size=6), st.sampled_from([16, 32, 48]), st.sampled_from([16, 32, 48]))
def test_any_steps(steps, m, n):
    """Steps that are not refused give what JAX computes."""

    def epilogue(acc):
        y = acc
        for step in steps:
            y = {
                "scale": lambda y: y.astype(jnp.float32) * 1.5,
                "saturate": lambda y: coda.saturate(y.astype(jnp.float32) * 9, E4M3),
                "astype": lambda y: y.astype(jnp.float32).astype(E5M2),
                "bf16": lambda y: y.astype(jnp.bfloat16),
                "T": lambda y: y.T,
                "order": lambda y: coda.contraction_order(y),
            }[step](y)
        return y.astype(jnp.float32)

    a, b = random(m, K), random(K, n)
    try:
        got = coda.gemm(a, b, epilogue=epilogue)
    except NotTileLocalError as error:
        assert "contraction order" in str(error) and "order" in steps
        return
    check(got, epilogue(a @ b))
