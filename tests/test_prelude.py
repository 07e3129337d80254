"""Arithmetic on vectors and scalars alone leaves the epilogue: it is done before the kernel, with the same values."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import coda_jax as coda
from coda_jax.jaxprs.walk import equations_of
from coda_jax.primitives.gemm_primitive import PRIMITIVES
from tests.gemm_cases import assert_close

pytestmark = pytest.mark.usefixtures("quick_to_compile")
M, N, K = 24, 16, 32
P = PartitionSpec
CAPTURED = jnp.linspace(-1, 1, N, dtype=jnp.float32)


@jax.custom_jvp
def doubled_derivative(x):
    return jnp.exp(x)


doubled_derivative.defjvp(lambda x, dx: (jnp.exp(x[0]), 2 * jnp.exp(x[0]) * dx[0]))


@jax.custom_vjp
def scaled_exponential(x, scale):
    return jnp.exp(x) * scale


scaled_exponential.defvjp(
    lambda x, scale: (jnp.exp(x) * scale, (x, scale)),
    lambda kept, dy: (2 * dy * jnp.exp(kept[0]) * kept[1], jnp.sum(dy * jnp.exp(kept[0]))),
)


def on_halves(acc, row, half):
    left, right = jnp.split(acc * jnp.exp(row), 2, axis=1)
    return left * jax.nn.sigmoid(half) + right


def on_heads(acc, channel, column):
    heads = acc.reshape(acc.shape[0], 2, N // 2) * jnp.exp(channel)
    return heads.reshape(acc.shape) * lax.rsqrt(column * column + 1)


def flat_column(acc, column):
    return acc * lax.rsqrt(1 + column * column), jnp.sum(acc, axis=1) * jnp.exp(column[:, 0])


COLUMN, ROW, HALF, CHANNEL, SCALAR = (M, 1), (N,), (N // 2,), (N // 2,), ()
# name -> epilogue, shapes of the operands, kinds of those behind the prelude, operations that are in it
CASES = {
    "rows": (lambda acc, s: acc * lax.rsqrt(s * s / 7 + 1), [COLUMN], ["column_vector"], {"rsqrt", "div"}),
    "columns": (lambda acc, s: acc * jnp.exp(s) + jnp.tanh(s), [ROW], ["row_vector"] * 2, {"exp", "tanh"}),
    "one row": (lambda acc, s: acc * jnp.exp(s), [(1, N)], ["row_vector"], {"exp"}),
    "scalars": (lambda acc, s, t: acc / jnp.exp(s * t), [SCALAR, SCALAR], ["scalar"], {"exp"}),
    "a vector and a scalar": (lambda acc, s, t: acc * jnp.exp(s / t), [ROW, SCALAR], ["row_vector"], {"exp"}),
    "both axes": (
        lambda acc, s, t: acc * (jnp.exp(s) * jnp.tanh(t)),
        [ROW, COLUMN],
        ["row_vector", "column_vector"],
        {"exp", "tanh"},
    ),
    "read beside": (lambda acc, s: acc * jnp.exp(s) + s, [COLUMN], ["column_vector"] * 2, {"exp"}),
    "one of two": (lambda acc, s: (acc * jnp.exp(s), acc + jnp.exp(s)), [ROW], ["row_vector"], {"exp"}),
    "halves": (on_halves, [ROW, HALF], ["row_vector"] * 2, {"exp", "logistic"}),
    "heads": (on_heads, [CHANNEL, COLUMN], ["head_vector", "column_vector"], {"exp", "rsqrt"}),
    "after a reduction": (flat_column, [COLUMN], ["column_vector"] * 2, {"rsqrt"}),
    "captured": (lambda acc: acc * jnp.exp(CAPTURED), [], ["row_vector"], {"exp"}),
    "its own derivative": (lambda acc, s: acc * doubled_derivative(s), [ROW], ["row_vector"], {"exp"}),
    "softplus": (lambda acc, s: acc * jax.nn.softplus(s), [ROW], ["row_vector"], {"exp", "log1p"}),
    "beside a scalar": (
        lambda acc, s, t: acc * jnp.logaddexp(s, t) + jnp.logaddexp(t, 2.0),
        [COLUMN, SCALAR],
        ["column_vector", "scalar"],
        {"exp", "log1p"},
    ),
    "its own derivative beside a scalar": (
        lambda acc, s, t: acc * scaled_exponential(s, t),
        [ROW, SCALAR],
        ["row_vector"],
        {"exp"},
    ),
    "in 16 bits": (lambda acc, s: acc * jnp.exp(s.astype(jnp.bfloat16)), [ROW], ["row_vector"], {"exp"}),
    "broadcast first": (
        lambda acc, s, t: acc * jnp.exp(jnp.broadcast_to(s, acc.shape) * t),
        [ROW, SCALAR],
        ["row_vector"],
        {"exp"},
    ),
}
STAYS = {
    "cheap": (lambda acc, s, t: acc * (s + 2 * t), [ROW, ROW], ["row_vector"] * 2, {"add", "mul"}),
    "of constants": (lambda acc: acc * jnp.exp(jnp.float32(2)), [], [], set()),
    "a condition": (lambda acc, s: jnp.where(jnp.tanh(s) > 0, acc, 0), [ROW], ["row_vector"], {"tanh", "gt"}),
    "of tiles": (lambda acc, s: acc * jnp.exp(acc + s), [ROW], ["row_vector"], {"exp"}),
    "of rows and columns": (
        lambda acc, s, t: acc * jnp.exp(s + t),
        [ROW, COLUMN],
        ["row_vector", "column_vector"],
        {"exp"},
    ),
    "a table": (lambda acc, s: acc * jnp.exp(s), [(M, N)], ["tile"], {"exp"}),
}


def arrays(shapes, m=M, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 2 + len(shapes))
    a, b = jax.random.normal(keys[0], (m, K), dtype), jax.random.normal(keys[1], (K, N), dtype)
    return a, b, *(jax.random.normal(key, shape, jnp.float32) for key, shape in zip(keys[2:], shapes, strict=True))


def product(epilogue, *options, **keywords):
    return functools.partial(coda.gemm, *options, epilogue=epilogue, **keywords)


def plain(epilogue, a, b, *operands):
    """The same in JAX."""
    return epilogue(jnp.matmul(a, b, preferred_element_type=jnp.float32), *operands)


def program_of(f, *args):
    """The program of the one product in f."""
    (equation,) = (one for one, _ in equations_of(f, *args)[0] if one.primitive in PRIMITIVES)
    return equation.params["spec"].program


def check(program, kinds, moved=frozenset(), stayed=frozenset()):
    assert [operand.kind.word for operand in program.operands] == kinds
    operations = {node.op for node in program.nodes}
    assert operations.isdisjoint(moved) and operations >= stayed


def total(f):
    return lambda *args: sum(jnp.sum(jnp.sin(x.astype(jnp.float32))) for x in jax.tree.leaves(f(*args)))


@pytest.mark.smoke
@pytest.mark.parametrize("name", CASES)
def test_values_gradients_and_programs(name):
    epilogue, shapes, kinds, moved = CASES[name]
    args = arrays(shapes)
    f, of = product(epilogue), functools.partial(plain, epilogue)
    check(program_of(f, *args), kinds, moved=moved)
    assert_close(jax.jit(f)(*args), of(*args), 1e-5)
    every, rtol = range(len(args)), 1e-2 if name == "in 16 bits" else 1e-4
    assert_close(jax.jit(jax.grad(total(f), every))(*args), jax.grad(total(of), every)(*args), rtol)


@pytest.mark.parametrize("name", STAYS)
def test_cheap_or_tile_arithmetic_stays_in_the_epilogue(name):
    epilogue, shapes, kinds, stayed = STAYS[name]
    args = arrays(shapes)
    check(program_of(product(epilogue), *args), kinds, stayed=stayed)
    assert_close(jax.jit(product(epilogue))(*args), plain(epilogue, *args), 1e-5)


def test_as_many_rows_as_columns():
    """The kind of an operand follows from its axis, not from its size."""
    epilogue, *_ = CASES["both axes"]
    args = arrays([(N,), (N, 1)], m=N)
    assert_close(jax.jit(product(epilogue))(*args), plain(epilogue, *args), 1e-5)


def test_one_row_has_no_prelude():
    epilogue, *_ = CASES["columns"]
    args = arrays([ROW], m=1)
    assert {"exp", "tanh"} <= {node.op for node in program_of(product(epilogue), *args).nodes}
    assert_close(jax.jit(product(epilogue))(*args), plain(epilogue, *args), 1e-5)


def test_names_of_operands():
    def epilogue(acc, kept, gone, also_kept):
        return acc * jnp.exp(gone) + kept + also_kept

    program = program_of(product(epilogue), *arrays([ROW, COLUMN, SCALAR]))
    assert program.user_names.operands == ("kept", "also_kept", "hoisted_0")
    assert program.user_names.function == "epilogue"


def test_results_keep_their_structure_and_dtypes():
    def epilogue(acc, scale):
        return {"y": acc * jnp.exp(scale), "sums": (jnp.sum(acc, axis=1),)}

    args = arrays([ROW], dtype=jnp.bfloat16)
    out = product(epilogue, out_dtype={"y": jnp.float16, "sums": None})(*args)
    assert out["y"].dtype == jnp.float16 and out["sums"][0].dtype == jnp.float32


def test_several_axes_of_rows():
    epilogue, *_ = CASES["rows"]
    a, b, scale = arrays([COLUMN])
    f = product(epilogue)
    several = a.reshape(4, 6, K), b, scale.reshape(4, 6, 1)
    check(program_of(f, *several), ["column_vector"], moved={"rsqrt"})
    assert_close(jax.jit(f)(*several), plain(epilogue, a, b, scale).reshape(4, 6, N), 1e-5)


def test_columns_in_several_arrays():
    """An operand in as many arrays as b has no prelude: its columns are not one array."""

    def epilogue(acc, scale):
        return jnp.split(acc * jnp.exp(scale), [N // 2], axis=1)

    a, b, scale = arrays([ROW])
    one, other = product(epilogue)(a, [b[:, : N // 2], b[:, N // 2 :]], scale)
    assert_close((one, other), tuple(plain(epilogue, a, b, scale)), 1e-5)


@pytest.mark.parametrize("axes", [(0, None, None, 0), (None, 0, 0, None), (0, 0, 0, 0), (0, None, 0, None)], ids=str)
def test_batches(axes):
    epilogue, *_ = CASES["a vector and a scalar"]
    single = arrays([ROW, SCALAR])
    args = [x if axis is None else jnp.stack([x, x + 0.5, -x]) for x, axis in zip(single, axes, strict=True)]
    f, of = product(epilogue), functools.partial(plain, epilogue)
    assert_close(jax.jit(jax.vmap(f, axes))(*args), jax.vmap(of, axes)(*args), 1e-5)
    gradients = [jax.jit(jax.grad(total(jax.vmap(one, axes)), range(4)))(*args) for one in (f, of)]
    assert_close(*gradients, 1e-4)


def test_a_loop_and_second_derivatives():
    epilogue, *_ = CASES["rows"]
    a, _, scale = arrays([COLUMN])
    weights = jax.random.normal(jax.random.key(5), (3, K, K)) / K**0.5

    def loop(multiply, a, weights, scale):
        return lax.scan(lambda x, w: (multiply(x, w, scale), None), a, weights)[0]

    def second(multiply):
        loss = lambda scale: total(functools.partial(loop, multiply))(a, weights, scale)  # noqa: E731
        return jax.jit(jax.jacrev(lambda scale: jnp.sum(jax.grad(loss)(scale) ** 2)))(scale)

    assert_close(second(product(epilogue)), second(functools.partial(plain, epilogue)), 1e-3)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_meshes(kind):
    epilogue, shapes, kinds, moved = CASES["both axes"]
    args = arrays(shapes)
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind, kind))
    specs = (P("x", None), P(None, "y"), P("y"), P("x", None))
    f = product(epilogue, implementation="xla")
    with jax.set_mesh(mesh):
        sharded = [jax.device_put(x, jax.NamedSharding(mesh, spec)) for x, spec in zip(args, specs, strict=True)]
        check(program_of(f, *sharded), kinds, moved=moved)
        out, gradients = jax.jit(lambda *args: (f(*args), jax.grad(total(f), range(4))(*args)))(*sharded)
    of = functools.partial(plain, epilogue)
    assert_close(jax.device_get(out), of(*args), 1e-5)
    assert_close(jax.device_get(gradients), jax.grad(total(of), range(4))(*args), 1e-4)


def test_inside_a_region():
    epilogue, *_ = CASES["both axes"]
    args = arrays([ROW, COLUMN])
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    specs = (P("x", None), P(), P(), P("x", None))
    f = jax.shard_map(product(epilogue), mesh=mesh, in_specs=specs, out_specs=P("x", None))
    of = functools.partial(plain, epilogue)
    assert_close(jax.jit(f)(*args), of(*args), 1e-5)
    assert_close(jax.jit(jax.grad(total(f), range(4)))(*args), jax.grad(total(of), range(4))(*args), 1e-4)


def test_symbolic_rows():
    epilogue, _, kinds, moved = CASES["rows"]
    (m,) = jax.export.symbolic_shape("m")
    types = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((m, K), (K, N), (m, 1))]
    check(program_of(product(epilogue), *types), kinds, moved=moved)


def test_no_prelude_where_a_result_takes_an_operands_place():
    args = (*arrays([ROW]), jnp.ones((M, N)))
    f = product(lambda acc, s, total: acc * jnp.exp(s) + total, out_dtype=jnp.float32, input_output_aliases={1: 0})
    check(program_of(f, *args), ["row_vector", "tile"], stayed={"exp"})


def test_by_group_stays():
    sizes = jnp.array([10, 14])
    f = lambda a, b, scale: coda.ragged_gemm(a, b, sizes, coda.ByGroup(scale), epilogue=lambda acc, s: acc * jnp.exp(s))  # noqa: E731
    a, b, _ = arrays([ROW])
    args = a, jnp.stack([b, b]), jnp.ones((2, N))
    assert_close(jax.jit(f)(*args), np.asarray(plain(lambda acc: acc * jnp.exp(1.0), a, b)), 1e-5)


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_casts_beside_a_prelude(dtype):
    """The rest of the epilogue is traced again: its casts are casts then, not the arithmetic that rounds so."""

    def epilogue(acc, column):
        rounded = acc.astype(dtype).astype(jnp.float32)
        return doubled_derivative(0.1 * rounded) * lax.rsqrt(column / N + 1e-6)

    a, b, column = [jnp.asarray(x) for x in np.random.default_rng(0).uniform(0.5, 1, (3, N, N)) / 2]
    arrays = a, b, column[:, :1]

    def loss(product):
        return lambda *args: jnp.sum(jnp.sin(product(*args)))

    fused = loss(lambda a, b, column: coda.gemm(a, b, column, epilogue=epilogue))
    plain = loss(lambda a, b, column: epilogue(a @ b, column))
    for one, other in zip(*(jax.grad(f, (0, 1, 2))(*arrays) for f in (fused, plain)), strict=True):
        assert_close(one, other)
