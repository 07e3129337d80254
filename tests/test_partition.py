"""Products that XLA partitions: values, what each device computes, and which collectives there are."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import coda_jax as coda
from coda_jax.lowering import record
from coda_jax.lowering.on_devices import BARE
from tests.gemm_cases import assert_close, total
from tests.partitioned import collectives, mesh_of, partitioned_on_cpus, run
from tests.requirements import RECORD

P = PartitionSpec
M, K, N = 64, 32, 64
RNG = np.random.default_rng(11)
A, B, X = (jnp.asarray(RNG.standard_normal(shape), jnp.float32) for shape in ((M, K), (K, N), (M, N)))
ROW, COLUMN = (jnp.asarray(RNG.standard_normal(shape), jnp.float32) for shape in ((N,), (M, 1)))


def everything(acc, x, row, column):
    y = jax.nn.silu(acc + row) * column + x
    return y, jnp.sum(y * y, axis=1), coda.logsumexp(y, axis=1), jnp.max(y, axis=0), jnp.min(y, axis=1), jnp.mean(y)


def fused(a, b, x, row, column):
    return coda.gemm(a, b, x, row, column, epilogue=everything)


# Layouts of a, b, x, row, column; the parts of a and b that are multiplied; how often arrays are moved. Scalars and the
# reductions of one call meet in one all-reduce, or two.
LAYOUTS = {
    "data parallel": ((P("data"), P(), P("data"), P(), P("data")), (M // 2, K), (K, N), {}),
    "FSDP, K": ((P("data"), P("data"), P("data"), P(), P("data")), (M // 2, K), (K, N), {"all-gather": 1}),
    "FSDP, N": ((P("data"), P(None, "data"), P("data"), P(), P("data")), (M // 2, K), (K, N), {"all-gather": 1}),
    "columns": (
        (P("data"), P(None, "model"), P("data", "model"), P("model"), P("data")),
        (M // 2, K),
        (K, N // 2),
        {},
    ),
    "K": ((P("data", "model"), P("model"), P("data"), P(), P("data")), (M // 2, K // 2), (K // 2, N), {}),
    "K, scattered": (
        (P("data", "model"), P("model"), P(("data", "model")), P(), P(("data", "model"))),
        (M // 2, K // 2),
        (K // 2, N),
        {"reduce-scatter": 1},
    ),
    "K, scattered over columns": (
        (P("data", "model"), P("model"), P("data", "model"), P("model"), P("data")),
        (M // 2, K // 2),
        (K // 2, N),
        {"reduce-scatter": 1},
    ),
    "K by two axes, scattered over one": (
        (P(None, ("data", "model")), P(("data", "model")), P(None, "model"), P("model"), P()),
        (M, K // 4),
        (K // 4, N),
        {"reduce-scatter": 1},
    ),
}


@pytest.mark.smoke
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_products(kind, layout):
    specs, part_of_a, part_of_b, moved = LAYOUTS[layout]
    got, parts, found = run(fused, (A, B, X, ROW, COLUMN), specs, kind)
    assert_close(got, fused(A, B, X, ROW, COLUMN), rtol=1e-5)
    assert parts == [("everything", part_of_a, part_of_b)]
    found.pop("all-reduce", None)  # of vectors, and of K's sum
    assert found == moved


def scaled(acc, x, row, column):
    y = (acc * column - acc * row) / 3
    return y, jnp.sum(y * x, axis=1), jnp.mean(y)


# Epilogues of a product whose k is cut; whether each device runs them on its own part, and their results are summed.
OF_PARTS = {
    "linear": (scaled, True),
    "acc itself": (lambda acc, x, row, column: acc, True),
    "of halves": (lambda acc, x, row, column: jnp.split(acc * column, 2, axis=1)[1], True),
    "affine": (lambda acc, x, row, column: acc * column + x, False),
    "a square": (lambda acc, x, row, column: acc * acc, False),
    "a quotient": (lambda acc, x, row, column: column / (1 + acc * acc), False),
    "a maximum": (lambda acc, x, row, column: jnp.max(acc * column, axis=1), False),
    "of one that is not": (lambda acc, x, row, column: (acc, jnp.sum(jnp.abs(acc), axis=1)), False),
    "beside a constant": (lambda acc, x, row, column: (acc, x * row), False),
    "divided by an operand": (lambda acc, x, row, column: acc / (2 + row * row), False),
    "two tiles": (lambda acc, x, row, column: (acc * row, acc * column), False),
    "no kernel": (lambda acc, x, row, column: jnp.split(acc * 2, [30], axis=1)[1], False),
}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("name", OF_PARTS)
def test_an_epilogue_of_each_part_or_of_the_sum(name, kind):
    epilogue, of_parts = OF_PARTS[name]
    whole, cut = P("data"), (P("data", "model"), P("model"))

    def f(a, b, x, row, column):
        return coda.gemm(a, b, x, row, column, epilogue=epilogue)

    arguments = (A.astype(jnp.bfloat16), B.astype(jnp.bfloat16), X, ROW, COLUMN)
    mesh = mesh_of(kind)
    with partitioned_on_cpus() as records, jax.set_mesh(mesh):
        specs = (*cut, whole, P(), whole)
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arguments, specs, strict=True)]
        got = jax.device_get(jax.jit(f)(*placed))
    assert_close(got, f(*arguments), rtol=2e-2)
    ((spec, types, _),) = records
    assert [x.shape for x in types[:2]] == [(M // 2, K // 2), (K // 2, N)]
    assert len(spec.program.operands) == len(types) - 2
    assert (spec.program == BARE) == (not of_parts)


@pytest.mark.parametrize("of_row", [P("p"), P()], ids=["row cut", "row whole"])
@pytest.mark.parametrize("of_a", [P("p"), P(None, "p"), P()], ids=["rows", "k", "whole"])
@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "apart"])
def test_halves_cut_by_the_minor_part_of_an_axis(is_packed, of_a, of_row):
    """Eight devices on four columns: XLA cuts by parts of the axis, the minor ones too."""
    rng = np.random.default_rng(3)
    a, *halves = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((8, 24), (24, 4), (24, 4)))
    b, row = jnp.stack(halves, axis=1) if is_packed else tuple(halves), jnp.asarray(rng.standard_normal(8), jnp.float32)

    def f(a, b, row):
        return coda.gemm(a, b, row, epilogue=lambda acc, r: swiglu(acc + r))

    mesh = jax.make_mesh((8,), ("p",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:8])
    with partitioned_on_cpus(), jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in ((a, of_a), (b, P()), (row, of_row))]
        got = jax.device_get(jax.jit(f)(*placed))
    assert_close(got, f(a, b, row), rtol=1e-5)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("result", [P(("data", "model")), P("data", "model")], ids=str)
def test_a_linear_epilogue_of_a_sum_that_is_scattered(result, kind):
    """Each device has a part of the sum, and runs the epilogue on it: no results are summed whole."""

    def f(a, b, x, row):
        return coda.gemm(a, b, x, row, epilogue=lambda acc, x, row: (acc * row / 3, jnp.sum(acc)))

    arguments = (A.astype(jnp.bfloat16), B.astype(jnp.bfloat16), X, ROW)
    mesh = mesh_of(kind)
    shardings = (NamedSharding(mesh, result), NamedSharding(mesh, P())) if kind is AxisType.Auto else None
    with partitioned_on_cpus() as records, jax.set_mesh(mesh):
        specs = (P("data", "model"), P("model"), result, P())
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arguments, specs, strict=True)]
        compiled = jax.jit(f, out_shardings=shardings).lower(*placed).compile()
        got = compiled(*placed)
    assert_close(jax.device_get(got), f(*arguments), rtol=2e-2)
    assert got[0].sharding.is_equivalent_to(NamedSharding(mesh, result), 2)
    assert [spec.program == BARE for spec, _, _ in records] == [True]
    assert collectives(compiled)["reduce-scatter"] == 1


IN_RANGE = {
    "acc": (lambda acc, x: acc, 1000),
    "linear": (lambda acc, x: acc * x, 500),
    "not linear": (lambda acc, x: jnp.maximum(acc, x), 1000),
}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("name", IN_RANGE)
def test_a_sum_of_parts_beyond_the_range_of_float16(name, kind):
    """A device's part is 8e4 or -7.9e4, their sum 1e3: it is summed, and an epilogue runs on it, in float32."""
    epilogue, want = IN_RANGE[name]
    a = jnp.tile(jnp.asarray([100.0] * (K // 2) + [-98.75] * (K // 2), jnp.float16), (M, 1))
    b, x = jnp.full((K, N), 50, jnp.float16), jnp.full((M, N), 0.5, jnp.float16)

    def f(a, b, x):
        return coda.gemm(a, b, x, epilogue=epilogue)

    got, *_ = run(f, (a, b, x), (P(None, "model"), P("model"), P()), kind)
    np.testing.assert_array_equal(got, np.float16(want))


def test_types_that_leave_a_product_open():
    """Over explicit axes that cut K a product lies as its first tile; without one JAX's error is that of jnp.matmul."""
    for function in (jnp.matmul, coda.gemm):
        with pytest.raises(Exception, match="out_sharding"):
            run(function, (A, B), (P("data", "model"), P("model")), AxisType.Explicit)


def swiglu(acc):
    gate, up = jnp.split(acc, 2, axis=1)
    return jax.nn.silu(gate) * up


def rotary(acc, table):
    heads = acc.reshape(acc.shape[0], -1, 32)
    a, b = jnp.split(heads, 2, axis=-1)
    table = table[:, None, :]
    return jnp.concatenate([a * table - b, b * table + a], axis=-1).reshape(acc.shape)


def indexed(acc):
    row, column = (jax.lax.broadcasted_iota(jnp.int32, acc.shape, axis) for axis in (0, 1))
    return jnp.where(row >= column, acc, 0.0)


def sliced(acc):
    return tuple(jnp.split(acc, [16, 48], axis=1))


@pytest.mark.parametrize(
    ("epilogue", "operand", "part_of_a", "part_of_b"),
    [
        (swiglu, None, (M // 2, K), (K, N)),  # a part of N has no equal shares of the halves
        (rotary, jnp.cos(X[:, :16]), (M // 2, K), (K, N // 2)),  # whole heads
        (indexed, None, (M, K), (K, N)),  # a part's indices are not those of the whole
        (sliced, None, (M // 2, K), (K, N)),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_dimensions_that_may_be_cut(epilogue, operand, part_of_a, part_of_b):
    operands = () if operand is None else (operand,)

    def multiply(a, b, *operands):
        return coda.gemm(a, b, *operands, epilogue=epilogue)

    specs = (P("data"), P(None, "model"), *(P("data") for _ in operands))
    got, parts, _ = run(multiply, (A, B, *operands), specs)
    assert_close(got, multiply(A, B, *operands), rtol=1e-5)
    assert parts == [(epilogue.__name__, part_of_a, part_of_b)]


def test_batches():
    """Products with a batch of a, or of a and b, are those of one device, also where their batch is sharded."""
    a, b = jnp.stack([A, -A, 2 * A, A + 1]), jnp.stack([B, B + 1, -B, B])

    def both(a, b, row):
        f = jax.vmap(
            lambda a, b, row: coda.gemm(a, b, row, epilogue=lambda acc, row: jnp.tanh(acc + row)), (0, 0, None)
        )
        return f(a, b, row)

    got, parts, found = run(both, (a, b, ROW), (P("data"), P("data"), P()))
    assert_close(got, both(a, b, ROW), rtol=1e-5)
    assert [shapes for _, *shapes in parts] == [[(2, M, K), (2, K, N)]] and not found
    shared = jax.vmap(lambda a, b: coda.gemm(a, b, epilogue=jnp.tanh), (0, None))
    got, parts, _ = run(shared, (a, B), (P(None, "data"), P(None, "model")))
    assert_close(got, shared(a, B), rtol=1e-5)
    assert [shapes for _, *shapes in parts] == [[(4, M // 2, K), (K, N // 2)]]


def test_a_batch_of_sums_that_are_scattered():
    a, b = jnp.stack([A, 2 * A]), jnp.stack([B, B - 1])
    multiply = jax.vmap(lambda a, b: coda.gemm(a, b, epilogue=jnp.tanh))
    result = NamedSharding(mesh_of(AxisType.Auto), P(None, "model"))
    specs = (P("data", None, "model"), P("data", "model"))
    got, parts, found = run(multiply, (a, b), specs, out_shardings=result)
    assert_close(got, multiply(a, b), rtol=1e-5)
    assert [shapes for _, *shapes in parts] == [[(1, M, K // 2), (1, K // 2, N)]]
    assert found == {"reduce-scatter": 1, "all-gather": 1}


@pytest.mark.smoke
@pytest.mark.parametrize("residuals", ["preactivation", "recompute"])
def test_gradients(residuals):
    def loss(a, b, x, row, column):
        outputs = coda.gemm(a, b, x, row, column, epilogue=everything, residuals=residuals)
        return total(outputs)

    gradient = jax.grad(loss, range(5))
    specs = (P("data"), P("data", "model"), P("data", "model"), P("model"), P("data"))
    got, parts, _ = run(gradient, (A, B, X, ROW, COLUMN), specs)
    assert_close(got, jax.jit(gradient)(A, B, X, ROW, COLUMN), rtol=1e-4)
    assert len(parts) >= 3


def test_sizes_that_the_devices_do_not_divide():
    """Such a dimension is not cut."""
    a = A[:63]

    def multiply(a, b):
        return coda.gemm(jax.lax.with_sharding_constraint(a, P("data")), b, epilogue=jnp.tanh)

    got, parts, found = run(multiply, (a, B), (P(), P()))
    assert_close(got, jnp.tanh(a @ B), rtol=1e-5)
    assert parts == [("tanh", (63, K), (K, N))] and set(found) == {"all-gather"}  # of a, which the user cuts unevenly
    # What is cut beside it stays so: nothing of full size is gathered.
    got, parts, found = run(lambda a, b: coda.gemm(a, b, epilogue=jnp.tanh), (a, B), (P(), P(None, "model")))
    assert parts == [("tanh", (63, K), (K, N // 2))] and not found


def test_a_gradient_where_rows_are_two_axes_that_are_cut():
    """Recomputed, the derivative is an epilogue of each device's part: only the weight's gradient is summed."""

    def loss(a, b, x):
        return jnp.sum(jnp.sin(coda.gemm(a, b, x, epilogue=jnp.multiply, residuals="recompute")))

    arguments = A.reshape(4, -1, K), B, X.reshape(4, -1, N)
    specs = P("data", "model"), P(), P("data", "model")
    mesh = mesh_of(AxisType.Auto)
    gradients = tuple(NamedSharding(mesh, spec) for spec in specs)
    got, parts, found = run(jax.grad(loss, (0, 1, 2)), arguments, specs, out_shardings=gradients)
    assert_close(got, jax.jit(jax.grad(loss, (0, 1, 2)))(*arguments), rtol=1e-4)
    assert {part_of_a for _, part_of_a, _ in parts} <= {(2, M // 8, K), (2, M // 8, N)}
    assert found == {"all-reduce": 1}


def test_parts_too_narrow_for_the_asked_kernel_are_refused():
    a, b = A.astype(jnp.bfloat16), B[:, :8].astype(jnp.bfloat16)  # 8 columns, 4 on a device: 8 bytes

    def multiply(a, b):
        return coda.gemm(a, b, epilogue=jnp.tanh, implementation="cuda")

    with pytest.raises(Exception, match="implementation='cuda' was asked for, but b: a row of 4 bfloat16 is 8 bytes"):
        run(multiply, (a, b), (P(), P(None, "model")))


def test_plans_on_record_are_bounded():
    for i in range(record.PRODUCTS + 10):
        for j in range(record.PLANS + 2):
            record.record(f"test {i}", record.Shard(str(j), None, None, ""))
    kept = [record.recorded(f"test {i}") for i in (0, record.PRODUCTS + 9)]
    assert kept[0] == [] and [part.factors for part in kept[1]] == [str(j + 2) for j in range(record.PLANS)]
    assert len(record._plans) == record.PRODUCTS


SHARDINGS = st.sampled_from([(), ("data",), ("model",), ("data", "model"), ("model", "data")])


def _spec(axes):
    """A PartitionSpec that names no axis twice."""
    used, entries = set(), []
    for of_one in axes:
        entries.append(tuple(axis for axis in of_one if axis not in used) or None)
        used |= set(of_one)
    return P(*entries)


@pytest.mark.slow
@hypothesis.settings(deadline=None, derandomize=True, max_examples=12)
@hypothesis.given(
    st.lists(st.tuples(SHARDINGS, SHARDINGS), min_size=3, max_size=3), SHARDINGS, SHARDINGS, st.booleans()
)
def test_any_sharding_gives_the_same(of_matrices, of_row, of_column, backward):
    specs = (*map(_spec, of_matrices), _spec([of_row]), _spec([of_column, ()]))
    function = jax.grad(lambda *arguments: total(fused(*arguments)), range(5)) if backward else fused
    got, _, _ = run(function, (A, B, X, ROW, COLUMN), specs)
    assert_close(got, jax.jit(function)(A, B, X, ROW, COLUMN), rtol=1e-4)


CACHE = """
import sys, jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
import coda_jax as coda
from coda_jax.lowering import record
from tests.partitioned import partitioned_on_cpus
for option, value in (("jax_compilation_cache_dir", sys.argv[1]), ("jax_persistent_cache_min_compile_time_secs", 0),
                      ("jax_persistent_cache_min_entry_size_bytes", -1),
                      ("jax_remove_custom_partitioning_ptr_from_cache_key", True)):
    jax.config.update(option, value)
mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:4])
a = jax.device_put(jnp.ones((8, 16)), NamedSharding(mesh, P(("x", "y"))))
def beside_manual(f):
    return jax.shard_map(f, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"), axis_names={"x"})
with partitioned_on_cpus() as records:
    for region in (lambda f: f, beside_manual):
        for f in (jnp.tanh, jnp.sin):
            out = jax.jit(region(lambda a, b: coda.gemm(a, b, epilogue=lambda acc: f(acc))))(a, jnp.ones((16, 8)))
            print(float(abs(out - f(16.0)).max()) < 1e-6, len(records))
"""


@pytest.mark.slow
def test_the_persistent_cache_knows_the_epilogue(tmp_path):
    """Its key holds the call's shapes and rule; a digest beside them tells epilogues apart, also of other processes."""
    import subprocess
    import sys

    def lines():
        command = [sys.executable, "-c", CACHE, str(tmp_path)]
        done = subprocess.run(command, cwd=RECORD.parents[1], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout.splitlines()

    assert lines() == ["True 1", "True 2", "True 3", "True 4"]
    assert lines() == ["True 0"] * 4  # hits: no callback
