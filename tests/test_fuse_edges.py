"""Functions at the edges of what `coda.fuse` is given: sizes of one and of none, dtypes, meshes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coda_jax as coda
from coda_jax.fusion.dots import is_derivative
from coda_jax.graph import calls
from coda_jax.graph.plan import has_rows
from coda_jax.graph.values import Map, reachable
from tests import plain_models
from tests.test_fuse import DOORS, largest_error, with_gradients

pytestmark = pytest.mark.filterwarnings("ignore:gemm:coda_jax.FallbackWarning")


def normal(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def check(f, *args, argnums=0, bound=1e-5, **options):
    """Values and gradients are those of f, whose results are summed; options are of `coda.fuse`."""

    def loss(f):
        return lambda *args: sum(jnp.sum(jnp.sin(jnp.float32(x))) for x in jax.tree.leaves(f(*args)))

    fused = coda.fuse(f, **options)
    assert largest_error(fused(*args), f(*args)) < bound
    expected = jax.jit(jax.grad(loss(f), argnums))(*args)
    for g in (jax.grad(loss(fused), argnums), coda.fuse(jax.grad(loss(f), argnums), **options)):
        assert largest_error(jax.jit(g)(*args), expected) < bound


@pytest.mark.parametrize("rows", [(1,), (1, 1), (1, 1, 1), (3, 1)])
def test_one_row(rows):
    def f(w, x):
        h = jnp.tanh(x @ w["a"])
        h = h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-2) * w["s"]
        return h @ w["b"]

    check(f, {"a": normal(8, 8), "b": normal(8, 8, seed=1), "s": normal(8, seed=2)}, normal(*rows, 8, seed=3))


def test_a_vector_of_columns_that_is_cast_beside_one_row_is_no_table():
    def f(w, x):
        wide = x.astype(jnp.float32)
        h = (wide - wide.mean(-1, keepdims=True)) * w["s"] + w["s"]
        return (h.astype(x.dtype) @ w["a"]).astype(jnp.float32)

    w = {"a": normal(8, 8, dtype=jnp.bfloat16), "s": normal(8, seed=2, dtype=jnp.bfloat16)}
    check(f, w, normal(1, 8, seed=3, dtype=jnp.bfloat16), bound=2e-2)


def test_rows_that_others_broadcast_along():
    """A mean over tokens is a product's factor, with rows of its own, and is read beside all tokens."""

    def f(w, x):
        mean = jnp.mean(x @ w, 1, keepdims=True)
        return (x * jnp.tanh(mean) + mean @ w) @ w

    check(f, normal(8, 8), normal(8, 8, 8, seed=1))
    check(f, normal(8, 8), normal(2, 3, 8, seed=1))


def test_complex_numbers():
    w, x = normal(8, 8), normal(2, 4, 8, seed=1)
    z = x + 1j * normal(2, 4, 8, seed=2)
    check(lambda w, x: jnp.abs(jnp.fft.fft(x @ w)) @ w, w, x)
    check(lambda w, x, z: jnp.real((x @ w) * z), w, x, z)
    check(lambda w, x: jnp.real(jnp.exp(1j * (x @ w)) * jnp.exp(2j * (jnp.tanh(x @ w) @ w))), w, x)


def _router(w, x):
    parts = jax.nn.softmax(x.astype(jnp.float32) @ w["router"], -1)
    return x + (jax.nn.silu(x @ w["a"]) @ w["b"]) * parts[..., :1].astype(x.dtype)


def _head(w, x):
    y = x + jax.nn.silu(x @ w["a"]) @ w["b"]
    return jax.nn.log_softmax(y.astype(jnp.float32) @ w["head"])


def _in_the_middle(w, x):
    h = jnp.tanh((x @ w["a"]).astype(jnp.float16) @ w["half"])
    return h.astype(x.dtype) @ w["a"] @ w["b"]


@pytest.mark.parametrize("f", [_router, _head, _in_the_middle])
def test_products_in_two_dtypes(f):
    w = {"a": normal(8, 32, dtype=jnp.bfloat16), "b": normal(32, 8, seed=1, dtype=jnp.bfloat16)}
    w |= {"router": normal(8, 4), "head": normal(8, 24, seed=2), "half": normal(32, 8, seed=3, dtype=jnp.float16)}
    args = jax.tree.map(lambda x: x / 4, w), normal(2, 4, 8, seed=4, dtype=jnp.bfloat16)
    check(f, *args, argnums=(0, 1), bound=3e-2)
    step = jax.grad(lambda w, x: jnp.sum(f(w, x).astype(jnp.float32)), (0, 1))
    reasons = [one.reason for one in coda.fuse.report(step, *args).products]
    left = len(list(filter(None, reasons)))
    assert (len(reasons), left) == ((11, 3) if f is _in_the_middle else (9, 3))
    assert all("others' bfloat16" in reason for reason in reasons if reason)


@pytest.mark.parametrize("door", ["gradient_of_fused", "fused_gradient"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_products_of_16_bits_beside_larger_ones_in_float32(dtype, door):
    """Kernels multiply 16 bits: what is fused is the layers, however large the head in float32 is."""
    w = {"a": normal(8, 32, dtype=dtype), "b": normal(32, 8, seed=1, dtype=dtype), "head": normal(8, 512, seed=2)}
    args = jax.tree.map(lambda x: x / 4, w), normal(2, 4, 8, seed=4, dtype=dtype)

    def f(w, x):
        return jnp.mean(jnp.square(_head(w, x)))

    check(f, *args, argnums=(0, 1), bound=3e-2)
    whole = jax.value_and_grad(f, (0, 1))
    report = coda.fuse.report(f if door == "gradient_of_fused" else whole, *args)
    left = [one.reason for one in report.products if one.reason]
    assert left == [f"its factors are float32, others' {dtype.__name__}"] * (1 if door == "gradient_of_fused" else 3)
    assert len(report.products) == (3 if door == "gradient_of_fused" else 9)
    assert report.fused.totals.passes_bytes < report.plain.totals.passes_bytes
    assert report.fused.totals.kept_bytes <= report.plain.totals.kept_bytes


def _in_8_bits(x, dtype=jnp.float8_e4m3fn):
    return x.astype(dtype).astype(x.dtype)


ROUNDED = {
    "activation": lambda w, x: (_in_8_bits(jnp.tanh(x @ w["a"])) * 2) @ w["b"],
    "product": lambda w, x: _in_8_bits(x @ w["a"], jnp.float8_e5m2) @ w["b"],
    "factors": lambda w, x: jnp.tanh(_in_8_bits(x) @ _in_8_bits(w["a"])) @ _in_8_bits(w["b"], jnp.float8_e5m2),
    "weight of 8 bits": lambda w, x: jnp.tanh(x @ w["a8"].astype(x.dtype)) @ w["b"],
    "result": lambda w, x: jnp.tanh(x @ w["a"]).astype(jnp.float8_e5m2),
    "arithmetic": lambda w, x: (jnp.tanh(x @ w["a"]).astype(jnp.float8_e4m3fn) * 3).astype(x.dtype) @ w["b"],
    "no kernel's": lambda w, x: _in_8_bits(jnp.tanh(x @ w["a"]), jnp.float8_e4m3fnuz) @ w["b"],
    "reduced": lambda w, x: (jax.lax.reduce_precision(jnp.tanh(x @ w["a"]), 4, 3) * 2) @ w["b"],
}


@pytest.mark.parametrize("exact", [False, True])
def test_floats_of_8_bits_round(exact):
    w = {"a": normal(8, 16) / 4, "b": normal(16, 8, seed=1), "a8": normal(8, 16).astype(jnp.float8_e4m3fn)}
    given = {key: w[key] for key in ("a", "b")}
    every = lambda given, x: {name: f(w | given, x) for name, f in ROUNDED.items()}  # noqa: E731
    check(every, given, normal(2, 4, 8, seed=2), exact=exact)


def test_a_transpose_of_a_product_in_another_dtype():
    """The gradient of y y^T in float32 transposes the result of a product that is none of the graph's, of 16 bits."""

    def f(w, x):
        y = x @ w["a"] @ w["a"]
        wide = y[:, :4].astype(jnp.float32)
        return jnp.tanh(wide @ wide.T) @ wide, y @ w["b"]

    w = {"a": normal(8, 8, dtype=jnp.bfloat16) / 3, "b": normal(8, 8, seed=1, dtype=jnp.bfloat16)}
    check(f, w, normal(8, 8, seed=2, dtype=jnp.bfloat16), bound=4e-2)


def test_64_bits():
    def f(w, x, index):
        table = np.arange(8)
        return jnp.argmax(jnp.tanh(x @ w), -1), x[index] @ w * table, index * 2**40 + table[:2]

    with jax.enable_x64(True):
        args = normal(8, 8), normal(2, 4, 8, seed=1), jnp.arange(2)
        assert largest_error(coda.fuse(f)(*args), f(*args)) < 1e-5
        wide = normal(8, 8, dtype=jnp.float64), normal(2, 4, 8, seed=1, dtype=jnp.float64), jnp.arange(2)
        assert largest_error(coda.fuse(f)(*wide), f(*wide)) < 1e-14


def _centred(y):
    return (y - y.mean(-1, keepdims=True)) / jnp.sqrt(y.var(-1, keepdims=True) + 1e-2)


BESIDE_64_BITS = {
    "scale": lambda w, x, i: (jnp.tanh(x @ w["a"]) * w["s"]).astype(x.dtype) @ w["a"] + w["s"] * w["n"],
    "norm": lambda w, x, i: _centred((x @ w["a"]).astype(jnp.float64)) * w["s"],
    "product": lambda w, x, i: jnp.tanh(jnp.tanh(x @ w["a"]).astype(jnp.float64) @ w["wide"]).astype(x.dtype) @ w["a"],
    "relu": lambda w, x, i: jax.nn.relu((x @ w["a"]) * w["n"]) + jax.nn.relu(x @ w["a"]),
    "mask": lambda w, x, i: jnp.where((i % 2 == 0)[..., None], jnp.tanh(x @ w["a"]), 0) @ w["a"] * i[..., None],
    "integers": lambda w, x, i: jnp.floor(x @ w["a"]).astype(jnp.int64) + 2**40 * i[..., None],
    "table": lambda w, x, i: jnp.tanh(x @ w["a"]) * np.linspace(0, 1, 8) + np.arange(8),
}


def test_64_bits_beside_products_of_32():
    every = lambda *args: {name: f(*args) for name, f in BESIDE_64_BITS.items()}  # noqa: E731
    with jax.enable_x64(True):
        w = {"a": normal(8, 8) / 3, "n": jnp.float64(2.5)}
        w |= {"s": normal(8, seed=1, dtype=jnp.float64), "wide": normal(8, 8, seed=2, dtype=jnp.float64)}
        args = w, normal(2, 4, 8, seed=3), jnp.arange(8).reshape(2, 4)
        check(every, *args)
        assert coda.fuse(lambda w, x, _: (x @ w["a"], 2**40, 0.1))(*args)[1:] == (2**40, 0.1)


def test_arrays_in_64_bits_are_computed_in_64_bits():
    def loss(w, x):
        s = w["s"] * jnp.sin(w["s"])  # it has several cotangents, and is kept
        y = jnp.tanh(x @ w["a"]).astype(jnp.float64) * jax.lax.stop_gradient(0 * s)
        return jnp.sum(s * s) + jnp.sum(jnp.exp(s)) + jnp.sum(y)

    with jax.enable_x64(True):
        args = {"a": normal(8, 8), "s": normal(8, seed=1, dtype=jnp.float64)}, normal(2, 4, 8, seed=2)
        expected = jax.value_and_grad(loss)(*args)
        for f in (jax.value_and_grad(coda.fuse(loss)), coda.fuse(jax.value_and_grad(loss))):
            assert largest_error(f(*args), expected) < 1e-14


def test_a_loss_in_64_bits_is_no_chunked_one():
    def loss(w, x, labels):
        z = jax.nn.log_softmax((x @ w).astype(jnp.float64))
        return -jnp.mean(jnp.take_along_axis(z, labels[:, None], -1))

    with jax.enable_x64(True):
        args = normal(8, 1024) / 3, normal(16, 8, seed=1), jnp.arange(16)
        np.testing.assert_allclose(coda.fuse(loss)(*args), loss(*args), rtol=1e-12)
        assert largest_error(*(jax.grad(f)(*args) for f in (coda.fuse(loss), loss))) < 1e-5


@pytest.mark.parametrize("shapes", [((2, 0, 8), (8, 8)), ((2, 4, 0), (0, 8)), ((2, 4, 8), (8, 0))])
def test_empty_arrays(shapes):
    f = coda.fuse(lambda w, x: jnp.tanh(x @ w) + 1)
    x, w = (normal(*shape) for shape in shapes)
    assert largest_error(f(w, x), jnp.tanh(x @ w) + 1) < 1e-6
    assert jax.grad(lambda w: jnp.sum(f(w, x)))(w).shape == w.shape


MESH = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


@pytest.mark.parametrize("check_vma", [True, False])
def test_bodies_of_shard_map(check_vma):
    """Inside and outside of it, compiled and not, in two layers whose arrays vary over other axes."""

    def plain(w, x):
        for _ in range(2):
            h = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-3) * w["s"]
            x = x + jax.lax.psum(jax.nn.silu(h @ w["a"]) @ w["b"], "model")
        return x

    def on_mesh(f):
        specs = {"a": jax.P(None, "model"), "b": jax.P("model"), "s": jax.P()}, jax.P("data")
        return jax.shard_map(f, mesh=MESH, in_specs=specs, out_specs=jax.P("data"), check_vma=check_vma)

    def loss(f):
        return lambda w, x: jnp.sum(jnp.sin(f(w, x)))

    w = {"a": normal(8, 12), "b": normal(12, 8, seed=1), "s": normal(8, seed=2)}
    args = w, normal(8, 3, 8, seed=3)
    expected = jax.jit(on_mesh(plain))(*args)
    assert largest_error(coda.fuse(on_mesh(plain))(*args), expected) < 1e-5
    expected = jax.jit(jax.grad(loss(on_mesh(plain))))(*args)
    for f in (
        jax.grad(loss(on_mesh(coda.fuse(plain)))),
        jax.grad(coda.fuse(loss(on_mesh(plain)))),
        coda.fuse(jax.grad(loss(on_mesh(plain)))),
    ):
        assert largest_error(jax.jit(f)(*args), expected) < 1e-5


def test_rows_that_are_all_alike():
    """The cotangent of a sum, which no array has made."""

    def loss(w, x):
        return jnp.sum(jnp.tanh(x @ w) @ w)

    args = normal(8, 8), normal(2, 4, 8, seed=1)
    gradients = [jax.jit(g)(*args) for g in (coda.fuse(jax.grad(loss, (0, 1))), jax.grad(loss, (0, 1)))]
    assert largest_error(*gradients) < 1e-5


def test_tables_beside_several_axes_of_rows():
    """Arrays that differ along some of the axes of rows, read by elementwise operations at once and cast first."""

    def f(w, x):
        y = jnp.tanh(x @ w["a"] + w["positions"]) * w["batch"]
        return (y * w["positions"].astype(jnp.float16).astype(jnp.float32)) @ w["a"]

    w = {"a": normal(8, 8), "positions": normal(3, 8, seed=1), "batch": normal(2, 1, 8, seed=2)}
    check(f, w, normal(2, 3, 8, seed=3), bound=1e-3)


def test_rows_that_are_alike_have_all_axes():
    """An array that repeats one row lies in memory as the others do, and is sharded as they are."""

    def f(w, b, x):
        y = jnp.broadcast_to(jnp.tanh(b), x.shape)
        return y, x @ w + y

    fused = coda.fuse(f)
    args = normal(8, 8), normal(8, seed=1), normal(2, 3, 8, seed=2)
    assert largest_error(fused(*args), f(*args)) < 1e-5
    (piece,) = fused.pieces.made
    assert piece.lifted.graph.rows == (2, 3) and all(map(has_rows, piece.lifted.graph.outputs))


def test_numbers_of_python_are_weak():
    def f(x, w, number):
        return x @ w * number, number * 2, 3.0, jnp.float32(1)

    args = normal(2, 8), normal(8, 8), 2.0
    for found in (jax.jit(coda.fuse(f))(*args), coda.fuse(f)(*args[:2], jnp.asarray(2.0)), coda.fuse(f)(*args)):
        expected = jax.jit(f)(*args)
        assert all(isinstance(x, jax.Array) for x in found)
        assert [jax.typeof(x).weak_type for x in found] == [jax.typeof(x).weak_type for x in expected]
        assert largest_error(found, expected) < 1e-6


def test_a_loop_without_a_derivative():
    def f(w, x):
        _, x = jax.lax.while_loop(lambda s: s[0] < jnp.sum(x) % 3 + 2, lambda s: (s[0] + 1, jnp.tanh(s[1] @ w)), (0, x))
        return x @ w

    args = normal(8, 8), normal(2, 4, 8, seed=1)
    assert largest_error(coda.fuse(f)(*args), f(*args)) < 1e-5


def test_heads_of_one_row_in_a_loop():
    def f(w, x):
        def step(x, _):
            q = (x @ w).reshape(*x.shape[:-1], 2, 4)
            q = q * jax.lax.rsqrt(jnp.mean(q * q, -1, keepdims=True) + 1e-2)
            return q.reshape(x.shape), None

        return jax.lax.scan(jax.checkpoint(step), x, None, length=2)[0]

    check(f, normal(8, 8), normal(1, 1, 1, 8, seed=1))


@pytest.mark.smoke
def test_the_cotangent_of_a_mean_over_rows_has_the_rows():
    def f(w, x):
        h = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-2) * w["s"]
        return (x + jnp.tanh(h @ w["a"]) @ w["b"]).mean((0, 1))

    w = {"a": normal(8, 16), "b": normal(16, 8, seed=1), "s": normal(8, seed=2)}
    check(f, w, normal(2, 4, 8, seed=3), argnums=(0, 1))


def test_halves_and_a_slice_of_one_product():
    def f(w, x):
        y = x @ w
        z = jnp.concatenate([y[..., 8:], y[..., :8]], -1)
        u = z[..., 1:9]
        return z, jnp.round(u * 4).astype(jnp.int32), u

    check(f, normal(8, 16), normal(8, 8, 8, seed=1), argnums=(0, 1))


def test_an_empty_array_beside_products():
    f = lambda w, x, nothing: (jnp.tanh(x @ w), nothing * 2)  # noqa: E731
    args = normal(8, 8), normal(4, 8, seed=1), jnp.zeros(0)
    check(f, *args)
    assert not any(one.reason for one in coda.fuse.report(f, *args).products)


def dropped(w, x, key):
    """x + dropout(tanh(dropout(x) a) b), and a mask of the argument."""
    a, b = (
        jax.random.bernoulli(one, 0.8, shape) for one, shape in zip(jax.random.split(key), (x.shape,) * 2, strict=True)
    )
    h = jnp.tanh((jnp.where(a, x, 0) / 0.8) @ w["a"])
    return jnp.where(x > -1, x, 0) + (h @ w["b"]) * b / 0.8


@pytest.mark.smoke
@pytest.mark.parametrize("width", [16, 24])
def test_masks(width):
    w = {"a": normal(width, 16), "b": normal(16, width, seed=1)}
    check(dropped, w, normal(2, 4, width, seed=2), jax.random.key(0), argnums=(0, 1))


def test_a_mask_is_read_by_epilogues_as_bytes():
    def loss(f):
        return lambda *args: jnp.sum(jnp.square(f(*args)).astype(jnp.float32))

    w = {"a": normal(64, 64, dtype=jnp.bfloat16), "b": normal(64, 64, seed=1, dtype=jnp.bfloat16)}
    args = w, normal(2, 64, 64, seed=2, dtype=jnp.bfloat16), jax.random.key(0)
    plain, fused = (
        coda.explain(jax.grad(loss(f), (0, 1)), *args, platform="cuda") for f in (dropped, coda.fuse(dropped))
    )
    assert fused.others == 0
    assert fused.totals.kept_bytes <= plain.totals.kept_bytes
    assert not any(one.is_backward and "select" in one.operation and "gemm" in one.after for one in fused.passes)


def test_in_a_derivative_an_activation_is_one_tile():
    def loss(w, x):
        return jnp.sum(jnp.square((jax.nn.gelu(x @ w["a"]) * (x @ w["b"])) @ w["c"]))

    fused = coda.fuse(jax.value_and_grad(loss, (0, 1)))
    w = {"a": normal(8, 32), "b": normal(8, 32, seed=1), "c": normal(32, 8, seed=2)}
    fused(w, normal(4, 8, seed=3))
    (piece,) = fused.pieces.made
    stored = [[x for x in step.stores if x.shape == (4, 32)] for step in piece.lifted.graph.plan.steps]
    assert sorted(map(len, stored)) == [0] * 6 + [1, 2, 2]  # a; b and the hidden tile; both cotangents


def test_a_product_of_sums_over_rows_is_no_derivative():
    x, w = normal(4, 8), normal(8, 16)
    for f, expected in (
        (jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w))), True),
        (jax.grad(jax.checkpoint(lambda w: jnp.sum(jnp.tanh(x @ w)))), True),
        (jax.checkpoint(lambda w: jnp.sum(jnp.tanh(x @ w))), False),
        (lambda w: x.T @ jnp.tanh(x @ w), False),
        (lambda w: (w.T @ w, x @ w), False),
    ):
        assert is_derivative(jax.make_jaxpr(f)(w).jaxpr) == expected


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma"])
def test_cotangents_are_in_memory_in_the_dtype_of_what_they_are_of(name):
    block = plain_models.PLAIN[name]
    loss = plain_models.loss_of(lambda w, x: block(w, block(w, x)))  # which reads the result in float32
    fused = coda.fuse(jax.grad(loss, (0, 1)))
    x = plain_models.inputs(jnp.bfloat16)
    jax.eval_shape(fused, plain_models.weights(jnp.bfloat16), x)
    (piece,) = fused.pieces.made
    plan, rows = piece.lifted.graph.plan, x.shape[0] * x.shape[1]
    values = [x for step in plan.steps for x in step.stores] + list(plan.by_xla)
    tiles = [x for x in values if isinstance(x, Map) and x.is_tile and x.shape[0] == rows]
    wide = [x for x in tiles if x.stored_as(jnp.bfloat16) == jnp.float32]
    assert len(wide) <= 1  # the result that the loss reads


def test_equal_layers_are_traced_once():
    def network(w, x):
        for one in w:
            x = plain_models.PLAIN["llama"](one, x)
        return x

    loss, counts = plain_models.loss_of(network), []
    for depth in (3, 6):
        w = [plain_models.weights(jnp.bfloat16)] * depth
        fused = coda.fuse(loss)
        jax.eval_shape(jax.grad(fused, (0, 1)), w, plain_models.inputs(jnp.bfloat16))
        pieces = [piece for piece in fused.pieces.made if piece.lifted is not None]
        derivatives = [piece.lifted.graph.derivative() for piece in pieces]
        plans = [plan for of in derivatives for plan in (of.forward_plan, of.backward().plan)]
        values = [x for plan in plans for x in reachable(plan.wanted)]
        counts.append((len({x.body for x in values if isinstance(x, Map)}), [len(plan.traces) for plan in plans]))
        steps = [piece.count * len(of.forward_plan.steps) for piece, of in zip(pieces, derivatives, strict=True)]
        assert sum(steps) == 7 * depth and all(plan.traces for plan in plans if plan.steps)
    assert counts[0] == counts[1]


def test_the_derivatives_of_equal_calls_are_traced_once(monkeypatch):
    """Attention of each layer is a call: four layers have no more traces of derivatives than three."""
    traced = []
    own = calls.traced_linear
    monkeypatch.setattr(calls, "traced_linear", lambda *args: traced.append(1) or own(*args))

    def loss(w, x):
        for one in w:
            x = plain_models.llama(one, x)
        return jnp.sum(x * x)

    counts = []
    for layers in (3, 4):
        w = jax.eval_shape(lambda: plain_models.weights())
        jax.eval_shape(jax.grad(coda.fuse(loss, attention=False)), [w] * layers, jax.eval_shape(plain_models.inputs))
        counts.append(len(traced))
        traced.clear()
    assert counts[0] == counts[1] > 0


def test_equations_that_differ_in_a_number_are_not_alike():
    def f(w, x):
        y = [jnp.tanh(x @ w) * 2.0, jnp.tanh(x @ w) * 3.0, jnp.tanh(x @ w) * -0.0, jnp.tanh(x @ w) * 0.0]
        y += [(x @ w) ** 2, (x @ w) ** 3, (x @ w)[:, :2], (x @ w)[:, 2:4]]
        return y, [jnp.tanh(x @ w) * x.sum(1, keepdims=True), jnp.tanh(x @ w) * x.sum(0)[:4].sum()]

    w, x = normal(8, 4), normal(4, 8, seed=1)
    for got, want in zip(jax.tree.leaves(coda.fuse(f)(w, x)), jax.tree.leaves(f(w, x)), strict=True):
        assert largest_error(got, want) < 1e-5
        assert np.array_equal(jnp.signbit(got), jnp.signbit(want))


@pytest.mark.smoke
@pytest.mark.parametrize("length, deferred", [(64, 0), (12288, 1), (16384, 2)])
def test_norms_are_deferred_where_that_moves_fewer_bytes(length, deferred):
    types = jax.eval_shape(lambda: plain_models.weights(jnp.bfloat16, width=2048, hidden=8192))
    loss = plain_models.loss_of(plain_models.PLAIN["llama"])
    args = types, jax.ShapeDtypeStruct((1, length, 2048), jnp.bfloat16)
    found, moved = {}, {}
    for defers in (None, True, False):
        f = coda.fuse(loss, defer_norms=defers)
        explained = coda.explain(jax.value_and_grad(f, (0, 1)), *args, platform="cuda", device="H100")
        products = sum(count * one.cost.bytes for one, count in explained.products.items() if one.cost)
        moved[defers] = explained.totals.passes_bytes + products
        (piece,) = f.pieces.made
        values = reachable(piece.lifted.graph.outputs)
        found[defers] = sum(x.origin.name == "norm" for x in values if isinstance(x, Map))
    q, gate = 3, 2  # the products that read the first norm, and the second
    assert found == {None: (0, q, q + gate)[deferred], True: q + gate, False: 0}
    assert moved[None] <= 1.01 * min(moved[True], moved[False])  # it counts a weight that is scaled again as one pass


@pytest.mark.parametrize("rows, is_deferred", [(64, False), (96, True)])
def test_a_product_that_a_call_reads_saves_less(rows, is_deferred):
    """A call reads the product and gives its cotangent: the norm's derivative then reads both again."""

    def f(w, x):
        y = x * jax.lax.rsqrt(jnp.mean(x.astype(jnp.float32) ** 2, -1, keepdims=True) + 1e-3).astype(x.dtype)
        return jnp.cumsum((y * w["scale"]) @ w["up"], axis=0)

    types = {"scale": (16,), "up": (16, 32)}
    types = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in types.items()}
    fused = coda.fuse(f, memory=None)
    jax.eval_shape(fused, types, jax.ShapeDtypeStruct((rows, 16), jnp.bfloat16))
    (piece,) = fused.pieces.made
    values = reachable(piece.lifted.graph.outputs)
    assert any(x.origin.name == "norm" for x in values if isinstance(x, Map)) == is_deferred


def test_weights_in_float32_are_cast_in_any_case():
    types = jax.eval_shape(lambda: plain_models.weights(jnp.float32, width=2048, hidden=8192))

    def loss(w, x):
        return plain_models.loss_of(plain_models.PLAIN["llama"])(jax.tree.map(lambda x: x.astype(jnp.bfloat16), w), x)

    f = coda.fuse(loss)
    jax.eval_shape(f, types, jax.ShapeDtypeStruct((1, 9216, 2048), jnp.bfloat16))
    (piece,) = f.pieces.made
    assert sum(x.origin.name == "norm" for x in reachable(piece.lifted.graph.outputs) if isinstance(x, Map)) == 5


@pytest.mark.parametrize("columns, is_fused", [(10, False), (4096, True)])
def test_a_network_of_convolutions_is_left(columns, is_fused):
    def f(w, x):
        y = jax.lax.conv_general_dilated(x, w["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jax.nn.relu(jax.nn.relu(y).mean(axis=(1, 2)) @ w["head"])

    w, x = {"kernel": normal(3, 3, 1, 8), "head": normal(8, columns)}, normal(2, 8, 8, 1, seed=1)
    assert largest_error(coda.fuse(f)(w, x), f(w, x)) < 1e-5
    (one,) = coda.fuse.report(f, w, x).products
    assert ("ten times the operations" not in one.reason) == is_fused


def test_attention_logits_stay_out_of_the_graph():
    """A soft cap and a softmax of attention's logits whose rows are in front; no epilogue could make them."""

    def f(w, x):
        q, k = x @ w["q"], x @ w["k"]
        logits = jnp.einsum("btnd,bsnd->btns", q.reshape(2, 16, 2, 4), k.reshape(2, 16, 2, 4))
        weights = jax.nn.softmax(jnp.tanh(logits / 8) * 8, axis=-1)
        y = jnp.einsum("btns,bsnd->btnd", weights, k.reshape(2, 16, 2, 4)).reshape(2, 16, 8)
        return jnp.tanh(y @ w["q"])

    w = {"q": normal(8, 8), "k": normal(8, 8, seed=1)}
    x = normal(2, 16, 8, seed=2)
    fused = coda.fuse(jax.value_and_grad(lambda w, x: jnp.sum(f(w, x)), (0, 1)))
    assert largest_error(fused(w, x), jax.value_and_grad(lambda w, x: jnp.sum(f(w, x)), (0, 1))(w, x)) < 1e-5
    (piece,) = fused.pieces.made
    maps = [x for x in reachable(piece.lifted.graph.outputs) if isinstance(x, Map)]
    assert not any(x.shape == (32, 32) for x in maps)  # (B T, N S)


def _rotated(x, axis):
    """Heads (..., 8) whose halves are rotated by angles that depend on the place along an axis."""
    sizes = [1] * x.ndim
    sizes[axis] = x.shape[axis]
    angles = jnp.arange(x.shape[axis], dtype=jnp.float32).reshape(sizes)
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * jnp.cos(angles) - b * jnp.sin(angles), b * jnp.cos(angles) + a], -1).astype(x.dtype)


# The order that is asked for, the one with rows first, and the weight's axes.
ORDERS = {
    "columns, then rows": ("btd,df->fbt", "btd,df->btf", (16, 32)),
    "rows apart": ("btd,df->bft", "btd,df->btf", (16, 32)),
    "heads in front": ("btd,dhk->bhtk", "btd,dhk->bthk", (16, 2, 8)),
    "parts in front": ("btd,dchk->cbthk", "btd,dchk->btchk", (16, 3, 2, 8)),
    "parts, and heads in front": ("btd,dchk->cbhtk", "btd,dchk->btchk", (16, 3, 2, 8)),
    "heads last": ("btd,dhk->tbkh", "btd,dhk->bthk", (16, 2, 8)),
}


def _of_order(order):
    """A function of a product in this order: its parts, bias, rotation, activation, and a product of it."""

    def f(w, x):
        result = order.partition("->")[2]
        y = jnp.einsum(order, x, w["a"])
        if "c" in result:
            y, gate, more = (jax.lax.index_in_dim(y, i, result.index("c"), keepdims=False) for i in range(3))
            result = result.replace("c", "")
        if result.endswith("k"):
            y = _rotated(y, result.index("t"))
        if "c" in order:
            y = y * jax.nn.silu(gate) + more
        y = jnp.tanh(y)
        columns = "f" if "f" in result else "hk"
        return jnp.einsum(f"{result},{columns}e->bte", y, w["b"]), y

    return f


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", ORDERS)
def test_orders_of_axes_that_einsum_gives_a_product(name, dtype):
    order, _, sizes = ORDERS[name]
    columns = [size for size in sizes[1:] if size != 3]
    w = {"a": normal(*sizes, dtype=dtype) / 4, "b": normal(*columns, 16, seed=1, dtype=dtype) / 4}
    x = normal(2, 4, 16, seed=2, dtype=dtype)
    for exact in (False, True):
        bound = 2e-5 if dtype == jnp.float32 else 3e-2
        check(_of_order(order), w, x, argnums=(0, 1), bound=bound, exact=exact)


@pytest.mark.parametrize("door", ["grad(fuse)", "fuse(grad)"])
@pytest.mark.parametrize("name", ORDERS)
def test_a_product_in_another_order_moves_what_one_with_rows_first_moves(name, door):
    order, rows_first, sizes = ORDERS[name]
    sizes = [4 * size if size > 3 else size for size in sizes]
    columns = [size for size in sizes[1:] if size != 3]
    w = {
        "a": jax.ShapeDtypeStruct(sizes, jnp.bfloat16),
        "b": jax.ShapeDtypeStruct((*columns, 64), jnp.bfloat16),
    }
    x = jax.ShapeDtypeStruct((4, 128, 64), jnp.bfloat16)

    def loss(order):
        return lambda w, x: jnp.mean(jnp.square(_of_order(order)(w, x)[0].astype(jnp.float32)))

    found, own = (coda.explain(DOORS[door](loss(one)), w, x, platform="cuda") for one in (order, rows_first))
    plain = coda.explain(with_gradients(loss(order)), w, x, platform="cuda")
    assert (found.kernels, found.others) == (own.kernels, own.others) == (6, 0)
    assert found.totals.passes_bytes <= own.totals.passes_bytes
    assert found.totals.kept_bytes <= 1.01 * plain.totals.kept_bytes


# Einsums of y (B, T, D) and a scale s (D,), each with the multiplication and the sum that it is.
MULTIPLICATIONS = {
    "a scale": (lambda y, s: jnp.einsum("btd,d->btd", y, s), lambda y, s: y * s),
    "a scale in front": (lambda y, s: jnp.einsum("d,btd->btd", s, y), lambda y, s: y * s),
    "of the tokens": (lambda y, s: jnp.einsum("bt,btd->btd", y[..., 0], y), lambda y, s: y[..., :1] * y),
    "both whole": (lambda y, s: jnp.einsum("btd,btd->btd", y, jnp.sin(y)), lambda y, s: y * jnp.sin(y)),
    "of rows that are sums": (
        lambda y, s: y * jnp.einsum("btd,btd->bt", y, jnp.sin(y))[..., None],
        lambda y, s: y * jnp.sum(y * jnp.sin(y), axis=-1, keepdims=True),
    ),
    "of another order": (lambda y, s: jnp.einsum("dbt,d->btd", jnp.moveaxis(y, -1, 0), s), lambda y, s: y * s),
}


def _of_multiplication(f):
    return lambda w, x: jnp.tanh(f(jnp.tanh(x @ w["a"]), w["s"])) @ w["b"]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", MULTIPLICATIONS)
def test_an_einsum_that_is_a_multiplication(name, dtype):
    f = _of_multiplication(MULTIPLICATIONS[name][0])
    w = {"a": normal(16, 24, dtype=dtype) / 4, "s": 1 + normal(24, seed=3, dtype=dtype) / 8}
    w |= {"b": normal(24, 16, seed=1, dtype=dtype) / 4}
    x = normal(2, 4, 16, seed=2, dtype=dtype)
    for exact in (False, True):
        check(f, w, x, argnums=(0, 1), bound=2e-5 if dtype == jnp.float32 else 3e-2, exact=exact)


@pytest.mark.parametrize("door", ["grad(fuse)", "fuse(grad)"])
@pytest.mark.parametrize("name", MULTIPLICATIONS)
def test_an_einsum_that_is_a_multiplication_moves_what_that_moves(name, door):
    f, multiplied = map(_of_multiplication, MULTIPLICATIONS[name])
    large = {"a": (64, 128), "s": (128,), "b": (128, 64)}
    types = {key: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for key, shape in large.items()}
    rows = jax.ShapeDtypeStruct((4, 128, 64), jnp.bfloat16)
    losses = [lambda w, x, g=g: jnp.mean(jnp.square(g(w, x).astype(jnp.float32))) for g in (f, multiplied)]
    found, own = (coda.explain(DOORS[door](loss), types, rows, platform="cuda") for loss in losses)
    plain = coda.explain(with_gradients(losses[0]), types, rows, platform="cuda")
    assert (found.kernels, found.others) == (own.kernels, own.others) == (6, 0)
    assert found.totals.passes_bytes <= 1.05 * own.totals.passes_bytes < plain.totals.passes_bytes
    assert found.totals.kept_bytes <= 1.01 * plain.totals.kept_bytes


def test_a_sum_over_axes_in_the_middle_names_its_factor():
    def f(w, x):
        return jnp.einsum("btd,ts->bsd", jnp.tanh(x @ w["a"]), w["mixed"])

    w, x = {"a": normal(8, 16), "mixed": normal(4, 6, seed=1)}, normal(2, 4, 8, seed=2)
    check(f, w, x, argnums=(0, 1))
    reasons = [one.reason for one in coda.fuse.report(f, w, x).products if one.reason]
    assert reasons == ["it sums over axes (1,) of float32[2,4,16], which are not its last"]


def test_rows_of_an_embedding_are_kept_in_the_dtype_that_is_read():
    def loss(w, tokens):
        x = w["embed"][tokens].astype(jnp.bfloat16)
        return jnp.sum(jnp.tanh(x @ w["up"].astype(jnp.bfloat16)).astype(jnp.float32))

    types = {"embed": (512, 128), "up": (128, 128)}
    types = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in types.items()}
    step = jax.value_and_grad(coda.fuse(loss))
    kept = coda.explain(step, types, jax.ShapeDtypeStruct((4, 256), jnp.int32), platform="cuda").totals.kept_bytes
    assert kept <= 4 * 256 * (128 + 128) * 2 + 128 * 128 * 2  # the rows, the product and a weight, in 16 bits


def test_what_is_opaque_stays():
    def attention(q, k, v):
        p = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k))
        return jnp.einsum("bhts,bshd->bthd", p, v)

    def f(w, x, call):
        q, k, v = (y.reshape(*x.shape[:-1], 2, -1) for y in jnp.split(x @ w, 3, axis=-1))
        return jnp.tanh(call(q, k, v).reshape(x.shape) @ w[:, : x.shape[-1]])

    w, x = normal(16, 48), normal(2, 8, 16, seed=1)
    opaque = lambda w, x: f(w, x, lambda *qkv: coda.opaque(attention, *qkv))  # noqa: E731
    assert "coda_attention" in str(jax.make_jaxpr(coda.fuse(lambda w, x: f(w, x, attention)))(w, x))
    for g in (coda.fuse(opaque), coda.fuse(jax.grad(lambda w, x: jnp.sum(opaque(w, x))))):
        assert "coda_attention" not in str(jax.make_jaxpr(g)(w, x))
    check(opaque, w, x)


def test_a_method_has_the_name_of_its_class():
    class Layer:
        @coda.fuse
        def __call__(self, w, x):
            return jnp.tanh(x @ w)

    class Own(Layer):
        pass

    jaxpr = jax.make_jaxpr(Own())(normal(8, 8), normal(4, 8))
    assert "name=Own" in str(jaxpr) or "Own_0" in str(jaxpr)

    class Plain:
        def __call__(self, w, x):
            return jnp.tanh(x @ w)

    bound = coda.fuse(Plain().__call__)
    bound(normal(8, 8), normal(4, 8))
    assert bound.name == bound.pieces.made[0].name == "Plain"
