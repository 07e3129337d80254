"""Operands of which a row's group chooses: values and gradients beside numpy in float64, under vmap, on meshes."""

import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from coda_jax.epilogue import ByGroup, NotTileLocalError, emit, evaluate, trace
from coda_jax.epilogue.groups import GroupOffsets, group_offsets, unmarked
from coda_jax.epilogue.operand_kinds import GROUP_OFFSETS, GROUP_SCALAR, GROUP_VECTOR, TILE
from coda_jax.lowering import select
from coda_jax.lowering.addressing import unsupported_reason
from coda_jax.lowering.launch import folds
from coda_jax.lowering.mesh_plan import units
from coda_jax.primitives import fallbacks
from coda_jax.primitives.axes import BATCH, Dimension, ProductAxis
from coda_jax.primitives.derivative import Options, product
from coda_jax.primitives.mesh_types import sharding_over_explicit
from coda_jax.primitives.spec import CallOptions, GemmSpec
from tests import tolerance
from tests.partitioned import mesh_of, run
from tests.trace_cases import typed

P = PartitionSpec
M, N, K, G = 24, 16, 8, 5


def bias(xp, acc, x):
    return xp.tanh(acc + x)


def scale(xp, acc, s):
    y = acc * s
    return y, xp.sum(y * y, axis=1)


def vector_and_scalars(xp, acc, x, s, t):
    return acc * s + xp.tanh(acc * x) * t


def beside_others(xp, acc, row, x, tile, column, s):
    return xp.tanh(acc + row * x) * column + tile * s


def swiglu(xp, acc, x):
    gate, up = (acc + x)[:, : N // 2], (acc + x)[:, N // 2 :]
    return gate / (1 + xp.exp(-gate)) * up


def half_vectors(xp, acc, x):
    return acc[:, : N // 2] * x + acc[:, N // 2 :]


def wider(xp, acc, x):
    return xp.concatenate([acc * x[:, :N], acc - x[:, N:]], axis=1)


def maximum(xp, acc, x):
    return xp.max(acc * x, axis=0)


def finished(xp, acc, s):
    return xp.sum(acc, axis=1, keepdims=True) * s, s * 2


class Case(NamedTuple):
    """An epilogue, and the shapes of its operands: those in lists are by group."""

    function: object
    shapes: tuple


CASES = {
    "bias": Case(bias, ([G, N],)),
    "scale": Case(scale, ([G, 1],)),
    "vector and scalars": Case(vector_and_scalars, ([G, N], [G], [G, 1])),
    "beside others": Case(beside_others, ((N,), [G, N], (M, N), (M, 1), [G])),
    "swiglu": Case(swiglu, ([G, N],)),
    "half vectors": Case(half_vectors, ([G, N // 2],)),
    "2 N columns": Case(wider, ([G, 2 * N],)),
    "maximum": Case(maximum, ([G, N],)),
    "finished": Case(finished, ([G],)),
}


def random(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def sizes_of(rows, groups, seed=0, unused=3):
    """Random sizes, zeros among them where there are several groups, and rows that are in none."""
    rng = np.random.default_rng(seed)
    weights = rng.random(groups) * (np.arange(groups) % 3 != 1)
    used = max(rows - unused, 0)
    sizes = rng.multinomial(used, weights / weights.sum()) if weights.sum() else np.zeros(groups)
    assert sizes.sum() == used and (groups < 2 or (sizes == 0).any())
    return jnp.asarray(sizes, jnp.int32)


def operands_of(case, m=M, groups=G, dtype=jnp.float32, seed=1):
    operands = []
    for i, shape in enumerate(case.shapes):
        actual = [groups, *shape[1:]] if isinstance(shape, list) else [m if size == M else size for size in shape]
        x = random(*actual, seed=seed + i, dtype=dtype)
        operands.append(ByGroup(x) if isinstance(shape, list) else x)
    return operands


def grouped(a, b, operands, sizes, function, *, dtype=None, **options):
    """The product, tiles in float32 or `dtype`; a tuple of its outputs."""

    def dtypes(traced):
        tiles = {store.output for store in traced.program.stores}
        return [(dtype or jnp.float32) if i in tiles else x.dtype for i, x in enumerate(traced.out_avals)]

    epilogue = functools.partial(function, jnp)
    return tuple(product(a, b, operands, epilogue, dtypes, Options(**options), sizes)[0])


def of_rows(x, sizes, m):
    """x (G, ...) for each row, in numpy: by the definition, group by group."""
    x = np.asarray(x)
    out, first = np.zeros((m, *x.shape[1:]), x.dtype), 0
    for g, size in enumerate(np.asarray(sizes)):
        out[first : first + size] = x[g]
        first += size
    return out.reshape(m, -1)


def reference(a, b, operands, sizes, function, dtype=np.float64):
    """The textbook formula, in numpy."""
    m = a.shape[0]
    a, b = np.asarray(a).astype(dtype), np.asarray(b).astype(dtype)
    plain = [
        of_rows(x.array, sizes, m).astype(dtype) if isinstance(x, ByGroup) else np.asarray(x).astype(dtype)
        for x in operands
    ]
    outputs = function(np, a @ b, *plain)
    return outputs if isinstance(outputs, tuple) else (outputs,)


def check(outputs, a, b, operands, sizes, function):
    exact, plain = (reference(a, b, operands, sizes, function, dtype) for dtype in (np.float64, np.float32))
    assert len(outputs) == len(exact)
    for i, (out, one, other) in enumerate(zip(outputs, exact, plain, strict=True)):
        if out.dtype != jnp.float32:  # rounded once
            other = other.astype(out.dtype)
        tolerance.check(np.asarray(out), one, other + 4e-7 * np.abs(one).max(), dtype=out.dtype, name=str(i))


# ---- values


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("m", "groups"), [(M, G), (M, M), (M, 1), (1, 3), (M, N), (7, 40)])
@pytest.mark.parametrize("name", CASES)
def test_values(name, m, groups, dtype):
    case = CASES[name]
    a, b, operands = random(m, K, seed=8), random(K, N, seed=9), operands_of(case, m, groups, dtype)
    for unused in (0, 3) if m > 1 else (0,):
        sizes = sizes_of(m, groups, seed=m + groups, unused=unused)
        check(jax.jit(functools.partial(outputs, case))(a, b, arrays(operands), sizes), a, b, operands, sizes, case[0])


def arrays(operands):
    return [unmarked(x) for x in operands]


def outputs(case, a, b, operands, sizes, **options):
    """`grouped` of a case; operands without their marks, so that it is a function of arrays."""
    pairs = zip(case.shapes, operands, strict=True)
    marked = [ByGroup(x) if isinstance(shape, list) else x for shape, x in pairs]
    return grouped(a, b, marked, sizes, case.function, **options)


def test_empty_groups_alone():
    """All rows are in none; and one group has them all."""
    a, b, x = random(M, K), random(K, N, seed=1), random(G, N, seed=2)
    for sizes in ([0] * G, [0, 0, M, 0, 0], [M, 0, 0, 0, 0], [0, 0, 0, 0, M]):
        sizes = jnp.asarray(sizes, jnp.int32)
        check(grouped(a, b, [ByGroup(x)], sizes, bias), a, b, [ByGroup(x)], sizes, bias)


def test_a_value_that_is_not_finite_stays_in_its_group():
    """A group without rows gives none of its values, and rows without a group read zeros."""
    x = random(G, N).at[1].set(jnp.nan).at[3].set(jnp.inf)
    sizes = jnp.asarray([4, 0, 5, 0, 6], jnp.int32)
    (out,) = grouped(random(M, K), random(K, N, seed=1), [ByGroup(x)], sizes, lambda xp, acc, x: acc * 0 + x)
    np.testing.assert_array_equal(out, of_rows(x, sizes, M))
    assert np.isfinite(out).all() and not np.asarray(out)[15:].any()


def test_integers_and_masks_of_a_group():
    a, b, sizes = random(M, K), random(K, N, seed=1), sizes_of(M, G)
    for x in (jnp.arange(G, dtype=jnp.int32), jnp.arange(G * N).reshape(G, N) % 3 == 0):
        (out,) = grouped(a, b, [ByGroup(x)], sizes, lambda xp, acc, x: jnp.where(x > 0, acc, 0.0))
        np.testing.assert_allclose(out, np.where(of_rows(x, sizes, M) > 0, a @ b, 0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("transpose", [False, True])
def test_arrays_of_many_axes_and_several(transpose):
    """M of two axes, N of two, and N of two arrays, which are halves or not."""
    a, b, x, sizes = random(4, M // 4, K), random(K, N, seed=1), random(G, N, seed=2), sizes_of(M, G)
    flat, marked = a.reshape(M, K), [ByGroup(x)]
    factors = [b.reshape(K, 2, N // 2), [b[:, : N // 2], b[:, N // 2 :]]]
    if transpose:
        factors = jax.tree.map(lambda b: jnp.moveaxis(b, 0, -1), factors)
    for of_b in factors:
        for function in (bias, swiglu) if isinstance(of_b, list) else (swiglu,):
            halves = not isinstance(of_b, list)
            (out,) = grouped(a, of_b, marked, sizes, function, transpose_b=transpose, halves=halves)
            assert out.shape[:2] == a.shape[:2]
            check([out.reshape(M, -1)], flat, b, marked, sizes, function)


# ---- jit, vmap


@pytest.mark.parametrize("name", ["vector and scalars", "beside others", "finished"])
@pytest.mark.parametrize("batched", ["a", "b", "operands", "sizes", "a operands sizes", "a b operands sizes"])
def test_vmap(name, batched):
    """A batch of each argument; a batch of a with one b and one sizes is not more rows of one product."""
    case, count = CASES[name], 3
    values = {
        "a": [random(M, K, seed=i) for i in range(count)],
        "b": [random(K, N, seed=10 + i) for i in range(count)],
        "operands": [arrays(operands_of(case, seed=20 + 10 * i)) for i in range(count)],
        "sizes": [sizes_of(M, G, seed=i) for i in range(count)],
    }
    axes = [0 if key in batched.split() else None for key in values]
    stacked = [
        jax.tree.map(lambda *x: jnp.stack(x), *each) if axis == 0 else each[0]
        for each, axis in zip(values.values(), axes, strict=True)
    ]
    got = jax.jit(jax.vmap(functools.partial(outputs, case), in_axes=axes))(*stacked)
    for i in range(count):
        one = [each[i if axis == 0 else 0] for each, axis in zip(values.values(), axes, strict=True)]
        for out, expected in zip(got, outputs(case, *one), strict=True):
            np.testing.assert_allclose(out[i], expected, rtol=1e-5, atol=1e-5)


def test_vmap_twice():
    a, sizes = random(2, 3, M, K), jnp.stack([sizes_of(M, G, seed=i) for i in range(3)])
    b, x = random(K, N, seed=1), random(2, G, N, seed=2)
    f = functools.partial(outputs, CASES["bias"])
    inner = jax.vmap(f, in_axes=(0, None, None, 0))
    (got,) = jax.vmap(inner, in_axes=(0, None, 0, None))(a, b, [x], sizes)
    for i in range(2):
        for j in range(3):
            (expected,) = f(a[i, j], b, [x[i]], sizes[j])
            np.testing.assert_allclose(got[i, j], expected, rtol=1e-5, atol=1e-6)


# ---- gradients


def segment_sums(x, sizes):
    """By the definition, in numpy."""
    ends = np.cumsum(sizes)
    return np.stack([x[end - size : end].sum(axis=0) for size, end in zip(np.asarray(sizes), ends, strict=True)])


@pytest.mark.parametrize("residuals", ["preactivation", "recompute"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("m", "groups"), [(M, G), (M, M), (M, 1), (M, N)])
def test_gradients(m, groups, dtype, residuals):
    """The gradients of x and s in tanh(acc + x) s are each group's sum over its rows, in float32, rounded once."""
    a, b = random(m, K, seed=8), random(K, N, seed=9)
    x, s = random(groups, N, seed=1, dtype=dtype), random(groups, seed=2, dtype=dtype)
    sizes, weights = sizes_of(m, groups, seed=m), random(m, N, seed=3)

    def loss(a, b, x, s):
        (y,) = grouped(
            a, b, [ByGroup(x), ByGroup(s)], sizes, lambda xp, acc, x, s: xp.tanh(acc + x) * s, residuals=residuals
        )
        return jnp.sum(y * weights)

    da, db, dx, ds = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(a, b, x, s)
    a, b, x, s, weights = (np.asarray(v).astype(np.float64) for v in (a, b, x, s, weights))
    t, scales = np.tanh(a @ b + of_rows(x, sizes, m)), of_rows(s, sizes, m)
    dacc = weights * scales * (1 - t * t)
    expected = {
        "da": (da, dacc @ b.T),
        "db": (db, a.T @ dacc),
        "dx": (dx, segment_sums(dacc, sizes)),
        "ds": (ds, segment_sums((weights * t).sum(axis=1), sizes)),
    }
    assert dx.dtype == ds.dtype == dtype
    for name, (got, exact) in expected.items():
        rtol = 2.0**-8 if got.dtype == jnp.bfloat16 else 1e-5
        atol = 1e-5 * np.abs(exact).max()
        np.testing.assert_allclose(np.asarray(got, np.float64), exact, rtol=rtol, atol=atol, err_msg=name)
    assert not np.asarray(dx, np.float32)[np.asarray(sizes) == 0].any()


def test_a_gradient_is_summed_in_float32():
    """Many rows of a group, each of which bfloat16 would lose beside the sum."""
    m, sizes = 4096, jnp.asarray([4096], jnp.int32)
    a, b = jnp.ones((m, 1), jnp.float32), jnp.ones((1, 2), jnp.float32)

    def loss(x):
        return jnp.sum(grouped(a, b, [ByGroup(x)], sizes, lambda xp, acc, x: acc + x)[0])

    np.testing.assert_array_equal(jax.grad(loss)(jnp.zeros((1, 2), jnp.bfloat16)), np.full((1, 2), 4096.0))


def test_a_gradient_under_vmap_and_of_second_order():
    a, b, sizes = random(2, M, K), random(K, N, seed=1), sizes_of(M, G)
    x = random(G, N, seed=2)

    def loss(x, a):
        return jnp.sum(grouped(a, b, [ByGroup(x)], sizes, bias)[0] ** 2)

    def plain(x, a):
        rows = np.repeat(np.arange(G), np.asarray(sizes))
        known = jnp.concatenate([x[rows], jnp.zeros((M - len(rows), N))])
        return jnp.sum(jnp.tanh(a @ b + known) ** 2)

    one, other = (jax.vmap(jax.grad(f), in_axes=(None, 0))(x, a) for f in (loss, plain))
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    one, other = (jax.grad(lambda x, f=f: jnp.sum(jax.grad(f)(x, a[0]) ** 2))(x) for f in (loss, plain))
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


# ---- the program, and the kernel


def traced(function, operands, m=M, groups=G):
    return trace(functools.partial(function, jnp), typed(m, N), operands, typed(groups + 1, dtype=jnp.int32))


def test_a_mark_and_no_shape_means_a_group():
    """(M, N) is a tile, and by group it is a vector of each, in a program of another text."""
    epilogue, captured = traced(lambda xp, acc, x, y: acc * x + y, [ByGroup(typed(M, N)), typed(M, N)], groups=M)
    assert [one.kind for one in epilogue.program.operands] == [GROUP_VECTOR, TILE, GROUP_OFFSETS]
    assert len(captured) == 1
    for line in ("operand 0: group_vector float32->float32 full", "operand 2: group_offsets int32->int32 full"):
        assert line in str(epilogue.program).split("\n")
    tiles, _ = trace(lambda acc, x, y: acc * x + y, typed(M, N), [typed(M, N)] * 2)
    assert str(tiles.program) != str(epilogue.program)
    scalars = traced(lambda xp, acc, x, y: acc * x + y, [ByGroup(typed(G)), ByGroup(typed(G, 1))])[0]
    assert [one.kind for one in scalars.program.operands] == [GROUP_SCALAR, GROUP_SCALAR, GROUP_OFFSETS]


def test_captured_arrays_stand_before_the_offsets():
    table = np.arange(N, dtype=np.float32)
    x, sizes, acc = random(G, N), sizes_of(M, G), random(M, N, seed=1)
    epilogue, captured = trace(lambda acc, x: acc * table + x, acc, [ByGroup(x)], group_offsets(sizes, M))
    assert [one.kind.word for one in epilogue.program.operands] == ["group_vector", "row_vector", "group_offsets"]
    expected = acc * table + of_rows(x, sizes, M)
    for out in (evaluate(epilogue.program, acc, x, *captured), epilogue.call(acc, x, *captured)):
        np.testing.assert_allclose(out[0], expected, rtol=1e-6, atol=1e-6)


def test_a_group_of_as_many_scalars_as_twice_n_makes_no_halves():
    """Neither does it where the offsets are so many."""
    for groups in (2 * N, 2 * N - 1):
        epilogue, _ = traced(scale, [ByGroup(typed(groups))], groups=groups)
        assert epilogue.program.halves.count == 1


def test_the_struct_has_them_in_the_lists_of_a_batch():
    """In those of row vectors and scalars, at the index of a batch; the offsets have a number and no entry."""

    def function(xp, acc, row, x, s, one, t):
        return acc * s + row + xp.tanh(acc * x) * t * one, xp.sum(acc, axis=1)

    operands = [typed(N), ByGroup(typed(G, N)), ByGroup(typed(G)), typed(), ByGroup(typed(G, 1))]
    program = traced(function, operands)[0].program
    text = emit(program, [np.dtype(np.float32)], [False] * len(program.operands))
    found = {}
    for name, entries in re.findall(r"VectorAccess (\w+)\[\] = {(.*?)};\n", text, re.DOTALL):
        found[name] = re.findall(r"pointer = (\d)[^}]*?(batched = true)?}", entries)
    batched = "batched = true"
    assert found == {
        "row_vector": [("0", ""), ("1", batched)],
        "scalar": [("2", batched), ("3", ""), ("4", batched)],
    }
    assert "in.row_vector[1].f" in text and "in.scalar[2].f" in text and "group" not in text
    assert "row_reduction[] = {{.pointer = 6, " in text


def spec_and_types(function, operands, dtype=jnp.bfloat16, groups=G):
    epilogue, captured = traced(function, operands, groups=groups)
    program = epilogue.program
    dtypes = [np.dtype(np.float32)] * program.num_outputs
    spec = GemmSpec.of(CallOptions(), program, dtypes, "f")
    return spec, [typed(M, K, dtype=dtype), typed(K, N, dtype=dtype), *arrays(operands), *captured]


@pytest.mark.parametrize(
    "operand",
    [typed(G, N), typed(G)],
)
def test_the_kernel_refuses_it(operand):
    reason = "operand 1 is by group in a dense product; the kernel takes it in a product of groups only"
    spec, types = spec_and_types(lambda xp, acc, row, x: acc * row + x, [typed(N), ByGroup(operand)])
    assert unsupported_reason(types, spec) == reason
    unread, types = spec_and_types(lambda xp, acc, row, x: acc * row, [typed(N), ByGroup(operand)])
    assert unsupported_reason(types, unread) is None


def test_a_batch_is_not_folded_into_rows():
    spec, _ = spec_and_types(bias, [ByGroup(typed(G, N))])
    assert not folds(spec.replace(batched=(True, False, False, False)))


def test_a_gpu_takes_xlas_form_and_says_so(monkeypatch):
    def devices(platform=None):
        if platform == "cuda":
            raise RuntimeError("no cuda backend")
        return jax.local_devices()

    monkeypatch.setattr(select.jax, "devices", devices)
    monkeypatch.setattr(select.ffi, "unavailable_reason", lambda: None)
    monkeypatch.setattr(fallbacks, "_reported", set())

    def f(a, b, x, sizes):
        return grouped(a, b, [ByGroup(x)], sizes, bias)

    types = (typed(M, K, dtype=jnp.bfloat16), typed(K, N, dtype=jnp.bfloat16), typed(G, N), typed(G, dtype=jnp.int32))
    with pytest.warns(UserWarning, match="operand 0 is by group in a dense product"):
        lowered = jax.jit(f).trace(*types).lower(lowering_platforms=("cuda",)).as_text()
    assert "dot_general" in lowered and "@coda_gemm(" not in lowered


# ---- meshes


def test_rows_are_not_sharded():
    spec, _ = spec_and_types(bias, [ByGroup(typed(G, N))])
    m, n, k = (ProductAxis(dimension) for dimension in (Dimension.M, Dimension.N, Dimension.K))
    assert units(spec, {m: M, n: N, k: K}) == {BATCH: 1, m: 0, n: 1, k: 1}


# How a, b, a vector and scalars of each group, and their sizes are sharded; a device's a and b. Over automatic axes the
# axis that may not shard rows is free for columns.
LAYOUTS = {
    "columns": ((P(), P(None, "model"), P(None, "model"), P(), P()), (M, K), (K, N // 2)),
    "rows": ((P("data"), P(), P(), P(), P()), (M, K), (K, N)),
    "rows and columns": ((P("data"), P(None, "model"), P(None, "model"), P(), P()), (M, K), (K, N // 2)),
    "groups": ((P(), P(), P("data"), P("data"), P("data")), (M, K), (K, N)),
    "k": ((P(None, "model"), P("model"), P(), P(), P()), (M, K // 2), (K // 2, N)),
    "vector's columns by the axis of rows": ((P("data"), P(), P(None, "data"), P(), P()), (M, K), (K, N // 2)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_meshes(kind, layout):
    specs, part_of_a, part_of_b = LAYOUTS[layout]
    if kind is AxisType.Explicit and layout.startswith("vector"):
        part_of_b = (K, N)  # the vector is gathered, as a row vector would be
    groups = 4
    a, b, x, s = random(M, K), random(K, N, seed=1), random(groups, N, seed=2), random(groups, seed=3)
    sizes = sizes_of(M, groups)

    def f(a, b, x, s, sizes):
        marked, sharding = [ByGroup(x), ByGroup(s)], sharding_over_explicit(P()) if layout == "k" else None
        (y,) = grouped(a, b, marked, sizes, lambda xp, acc, x, s: xp.tanh(acc * s) + x, out_sharding=sharding)
        return y, jnp.sum(y * y)

    def gradients(a, b, x, s, sizes):
        return jax.grad(lambda *floats: f(*floats, sizes)[1], argnums=(0, 1, 2, 3))(a, b, x, s)

    for function in (f, gradients):
        got, parts, _ = run(function, (a, b, x, s, sizes), specs, kind)
        for one, expected in zip(got, function(a, b, x, s, sizes), strict=True):
            np.testing.assert_allclose(one, expected, rtol=1e-4, atol=1e-4)
        if function is f:
            assert {part[1:] for part in parts} == {(part_of_a, part_of_b)}


def test_manual_axes():
    """Inside a shard_map over the columns, with the vectors sharded alike and the sizes replicated."""
    mesh = mesh_of(AxisType.Auto)
    a, b, x, sizes = random(M, K), random(K, N, seed=1), random(G, N, seed=2), sizes_of(M, G)

    def loss(a, b, x, sizes):
        return jnp.sum(grouped(a, b, [ByGroup(x)], sizes, bias)[0] ** 2)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P(None, "model"), P(None, "model"), P()), out_specs=P())
    def each(a, b, x, sizes):
        return jax.lax.psum(loss(a, b, x, sizes), "model")

    for f in (lambda f: f, lambda f: jax.grad(f, argnums=(0, 1, 2))):
        got, expected = (jax.jit(f(of))(a, b, x, sizes) for of in (each, loss))
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


# ---- refusals

SIZES = jnp.asarray([2, 3, 0, 4, 5], jnp.int32)
VECTOR = ByGroup(jnp.ones((G, N)))


@pytest.mark.parametrize(
    ("operand", "sizes", "error", "message"),
    [
        (VECTOR, None, ValueError, "operand 'x' is by group, and group_sizes is None; it must be"),
        (jnp.ones((1, N)), SIZES, ValueError, "group_sizes has shape (5,), and no operand is by group"),
        (VECTOR, SIZES.astype(jnp.float32), TypeError, "group_sizes has dtype float32; it must be int32"),
        (VECTOR, SIZES.astype(jnp.int16), TypeError, "group_sizes has dtype int16; it must be int32"),
        (VECTOR, SIZES[None], ValueError, "group_sizes has shape (1, 5); it must be (G,)"),
        (VECTOR, SIZES[0], ValueError, "group_sizes has shape (); it must be (G,)"),
        (VECTOR, GroupOffsets(jnp.arange(5)), ValueError, "(5, 16) and is by group, and group_sizes has 4 groups"),
        (VECTOR, SIZES[:4], ValueError, "operand 'x' has shape (5, 16) and is by group, and group_sizes has 4 groups"),
        (ByGroup(jnp.ones(())), SIZES, ValueError, "operand 'x' has shape () and is by group"),
        (ByGroup(jnp.ones((G, 3))), SIZES, NotTileLocalError, "operand 'x' has shape (5, 3); beside acc (M, N)"),
        (ByGroup(jnp.ones((G, 1, N))), SIZES, NotTileLocalError, "operand 'x' has shape (5, 1, 16); beside acc"),
        (ByGroup(jnp.ones((G, N), jnp.int8)), SIZES, NotTileLocalError, "has dtype int8"),
    ],
)
def test_refusals(operand, sizes, error, message):
    def f(acc, x):
        return acc + x

    with pytest.raises(error) as info:
        product(jnp.ones((M, K)), jnp.ones((K, N)), [operand], f, lambda _: [jnp.float32], Options(), sizes)
    assert message in str(info.value)
