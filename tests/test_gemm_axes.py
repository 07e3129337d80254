"""Products whose M and N are several axes of their arrays, on one device and on parts of a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import coda_jax as coda
from coda_jax.operators.multiply import multiply
from tests.partitioned import partitioned_on_cpus

F, T = 24, 8
MESH = ((2, 2), ("data", "model"))


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def gated(z):
    gate, up = jnp.split(z, 2, axis=1)
    return jax.nn.silu(gate) * up


def keeps_all(z, bias):
    hidden = gated(z + bias[None, :])
    return z, hidden, jnp.sum(hidden, axis=1), jnp.max(z, axis=0)


A, W, BIAS = normal(0, 2, T, 16), normal(1, 16, 2, F), normal(2, 2 * F)


def plain(a, w, bias):
    z = jnp.einsum("btk,khf->bthf", a, w)
    hidden = jax.nn.silu((z + bias.reshape(2, F))[:, :, 0]) * (z + bias.reshape(2, F))[:, :, 1]
    return z, hidden, hidden.sum(-1), z.max((0, 1)).reshape(-1)


def of_axes(a, w, bias, **options):
    return coda.gemm(a, w, bias, epilogue=keeps_all, **options)


def check(found, expected, tolerance=2e-5):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


def sines(f):
    return lambda *arrays: sum(jnp.sum(jnp.sin(x)) for x in f(*arrays))


@pytest.mark.parametrize("residuals", ["preactivation", "recompute"])
def test_halves_with_an_axis_of_their_own(residuals):
    def found(*arrays):
        return of_axes(*arrays, residuals=residuals)

    check(found(A, W, BIAS), plain(A, W, BIAS))
    check(jax.grad(sines(found), (0, 1, 2))(A, W, BIAS), jax.grad(sines(plain), (0, 1, 2))(A, W, BIAS))


def test_two_right_hand_sides_are_the_halves():
    pair = (W[:, 0], W[:, 1])
    z, *others = plain(A, W, BIAS)
    expected = [z.reshape(2, T, 2 * F), *others]
    check(of_axes(A, pair, BIAS), expected)
    check(of_axes(A, tuple(x.T for x in pair), BIAS, transpose_b=True), expected)
    gradient = jax.grad(lambda pair: sines(of_axes)(A, pair, BIAS))(pair)
    expected = jax.grad(sines(plain), 1)(A, W, BIAS)
    check(gradient, (expected[:, 0], expected[:, 1]))


@pytest.mark.parametrize("residuals", ["preactivation", "recompute"])
@pytest.mark.parametrize("rows", [T, 1])
@pytest.mark.parametrize(
    "epilogue",
    [lambda acc, row: (gated(acc + row), jnp.max(acc)), lambda acc, row: (jnp.sin(acc) * row, jnp.sum(acc * row, 0))],
)
def test_a_row_vector_is_a_row_or_a_vector(epilogue, rows, residuals):
    """(1, N) beside columns of two axes, whose number of axes is that of (2, N / 2)."""

    def gradient(row):
        def f(*arrays):
            return coda.gemm(*arrays, epilogue=epilogue, residuals=residuals)

        return jax.jit(lambda *arrays: jax.value_and_grad(sines(f), (0, 1, 2))(*arrays))(A[0, :rows], W, row)

    value, (da, dw, drow) = gradient(BIAS[None])
    assert drow.shape == (1, 2 * F)
    check((value, (da, dw, drow[0])), gradient(BIAS))


def test_columns_of_several_axes_without_halves():
    w = normal(3, 16, 3, 4, 2)
    found = coda.gemm(A, w, epilogue=lambda acc: (jnp.tanh(acc), jnp.sum(acc, axis=1)))
    z = jnp.tensordot(A, w, 1)
    check(found, (jnp.tanh(z), z.sum((2, 3, 4))))


PARTS = tuple(normal(10 + i, 16, n) for i, n in enumerate((32, 16, 16)))
ENDS = (32, 48)
OF_PARTS = normal(13, 64)


def apart(acc, bias):
    """Columns of each part, a tile of all, and sums along both axes."""
    z = acc + bias[None, :]
    return [*jnp.split(jnp.tanh(z), ENDS, axis=1), jnp.sum(z * z, axis=1), jnp.sum(z, axis=0)]


def plain_parts(a, parts, bias):
    z = a @ jnp.concatenate(parts, axis=1) + bias
    return [*jnp.split(jnp.tanh(z), ENDS, axis=-1), (z * z).sum(-1), z.sum((0, 1))]


def of_parts(a, parts, bias):
    return coda.gemm(a, parts, bias, epilogue=apart)


@pytest.mark.slow
def test_several_right_hand_sides():
    check(of_parts(A, PARTS, OF_PARTS), plain_parts(A, PARTS, OF_PARTS))
    check(coda.gemm(A, PARTS), A @ jnp.concatenate(PARTS, axis=1))
    check(
        jax.grad(sines(of_parts), (0, 1, 2))(A, PARTS, OF_PARTS),
        jax.grad(sines(plain_parts), (0, 1, 2))(A, PARTS, OF_PARTS),
    )
    each = tuple(jnp.stack([x, 2 * x]) for x in PARTS)
    check(
        jax.vmap(of_parts, (None, 0, None))(A, each, OF_PARTS),
        jax.vmap(plain_parts, (None, 0, None))(A, each, OF_PARTS),
    )
    one = (each[0], *PARTS[1:])
    axes = (None, (0, None, None), None)
    check(jax.vmap(of_parts, axes)(A, one, OF_PARTS), jax.vmap(plain_parts, axes)(A, one, OF_PARTS))


def backward_products(a, ts, parts):
    """The products of the gradients: K is joined in the first, N and a tile of N in the second."""
    options = {"implementation": "auto"}

    def halved(acc, w):
        return [*jnp.split(0.5 * acc, ENDS, axis=1), jnp.sum(acc * w, axis=1)]

    (dx,) = multiply(ts, parts, out_dtypes=[jnp.float32], transpose_b=True, **options)
    dw = multiply(a, ts, parts, epilogue=halved, out_dtypes=[jnp.float32] * 4, transpose_a=True, k_axes=2, **options)
    return [dx, *dw]


TS = tuple(normal(14 + i, 2, T, n) for i, n in enumerate((32, 16, 16)))


def test_sums_over_several_arrays():
    g = jnp.einsum("btk,btn->kn", A, jnp.concatenate(TS, -1))
    w = jnp.concatenate(PARTS, axis=1)
    expected = [jnp.concatenate(TS, -1) @ w.T, *jnp.split(0.5 * g, ENDS, axis=1), (g * w).sum(1)]
    check(backward_products(A, TS, PARTS), expected, 1e-4)


@pytest.mark.parametrize("of_parts_", [P(None, "model"), P("data", "model"), P("data")], ids=str)
def test_parts_of_several_arrays(of_parts_):
    """Each device joins its own part of each of them: half of the query's, the key's and the value's columns."""
    mesh = jax.make_mesh(*MESH, axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])

    def step(a, ts, parts, bias):
        return of_parts(a, parts, bias), backward_products(a, ts, parts)

    expected = step(A, TS, PARTS, OF_PARTS)
    model = of_parts_[1] if len(of_parts_) > 1 else None
    specs = P("data"), P("data", None, model), of_parts_, P()
    with partitioned_on_cpus() as records:
        placed = jax.device_put((A, TS, PARTS, OF_PARTS), tuple(NamedSharding(mesh, spec) for spec in specs))
        check(jax.jit(step)(*placed), expected, 1e-4)
    by_name = {spec.name: [x.shape for x in types] for spec, types, _ in records}
    shares = [n // (2 if model else 1) for n in (32, 16, 16)]
    assert by_name["apart"][1:4] == [(16, n) for n in shares]
    assert [shape[-1] for shape in by_name["halved"][1:4]] == shares


def test_vmap():
    each = normal(4, 3, 16, 2, F)
    check(jax.vmap(of_axes, (None, 0, None))(A, each, BIAS), jax.vmap(plain, (None, 0, None))(A, each, BIAS))
    rows = normal(5, 3, 2, T, 16)
    check(jax.vmap(of_axes, (0, 0, None))(rows, each, BIAS), jax.vmap(plain, (0, 0, None))(rows, each, BIAS))


def test_sums_over_several_axes():
    """A weight's gradient sums over (B, T), the input's over (2, F)."""
    z = normal(6, 2, T, 2, F)
    options = {"out_dtypes": [jnp.float32], "implementation": "auto"}
    (dw,) = multiply(A, z, transpose_a=True, k_axes=2, **options)
    check(dw, jnp.einsum("btk,bthf->khf", A, z))
    (da,) = multiply(z, W, transpose_b=True, k_axes=2, **options)
    check(da, jnp.einsum("bthf,khf->btk", z, W), 1e-4)


LAYOUTS = {  # of a (B, T, K), of w (K, 2, F), of the gated result; the parts that each device multiplies
    "tensor parallel": (P("data"), P(None, None, "model"), P("data", None, "model"), [(1, T, 16), (16, 2, F // 2)]),
    "sequence parallel": (P("data", "model"), P(), P("data", "model"), [(1, T // 2, 16), (16, 2, F)]),
    "gathered sequence": (
        P("data", "model"),
        P(None, None, "model"),
        P("data", None, "model"),
        [(1, T, 16), (16, 2, F // 2)],
    ),
    "FSDP": (P("data"), P(("data", "model")), P("data"), [(1, T, 16), (16, 2, F)]),
}


@pytest.mark.parametrize("of_a, of_w, of_result, parts", LAYOUTS.values(), ids=LAYOUTS)
def test_parts_of_axes(of_a, of_w, of_result, parts):
    mesh = jax.make_mesh(*MESH, axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])

    def step(a, w):
        def loss(a, w):
            hidden = coda.gemm(a, w, epilogue=gated)
            hidden = jax.lax.with_sharding_constraint(hidden, NamedSharding(mesh, of_result))
            return jnp.sum(jnp.sin(hidden)), hidden

        return jax.grad(loss, (0, 1), has_aux=True)(a, w)

    expected = jax.jit(step)(A, W)
    with partitioned_on_cpus() as records:
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in ((A, of_a), (W, of_w))]
        check(jax.jit(step)(*placed), expected)
    first = next(types for spec, types, _ in records if spec.program.halves.count == 2)
    assert [x.shape for x in first] == parts


def test_a_row_parallel_product_is_scattered_over_the_sequence():
    """hidden (B, T, F) and w (F, D), both cut by F: a reduce-scatter, and the epilogue on (B, T / 2, D)."""
    mesh = jax.make_mesh(*MESH, axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    hidden, w, x = normal(7, 2, T, F), normal(8, F, 16), normal(9, 2, T, 16)

    def product(hidden, w, x):
        y, sums = coda.gemm(hidden, w, x, epilogue=lambda acc, x: (acc + x, jnp.sum(jnp.square(acc + x), axis=1)))
        return jax.lax.with_sharding_constraint(y, NamedSharding(mesh, P("data", "model"))), sums

    expected = product(hidden, w, x)
    with partitioned_on_cpus() as records:
        specs = P("data", None, "model"), P("model"), P("data", "model")
        placed = [
            jax.device_put(array, NamedSharding(mesh, spec)) for array, spec in zip((hidden, w, x), specs, strict=True)
        ]
        compiled = jax.jit(product).lower(*placed).compile()
        check(compiled(*placed), expected)
    assert [t.shape for t in records[0][1]] == [(1, T, F // 2), (F // 2, 16)]
    assert compiled.as_text().count("reduce-scatter(") == 1 and "all-reduce(" not in compiled.as_text()
