"""coda.ragged_gemm and coda.ragged_contraction: values beside a loop over groups, transformations, errors."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import coda_jax as coda
from coda_jax.epilogue import NotTileLocalError
from coda_jax.epilogue.groups import GroupOffsets, group_offsets
from coda_jax.primitives import fallbacks
from coda_jax.primitives.axes import Dimension
from coda_jax.primitives.derivative import Options, product
from tests.ragged_cases import CASES, SETTINGS, K, N, arguments, check, grouped, loop, poisoned, random, sizes_of

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
# Rows, groups and dtype of each case; the widest numbers of groups are in the slow test.
PROBLEMS = [
    ("bare", 37, 5, BF16),
    ("bias", 37, 5, F32),
    ("every kind", 40, 17, BF16),
    ("swiglu", 24, 3, F16),
    ("half vectors", 24, 24, F32),
    ("of each group", 37, 5, F32),
    ("bias", 1, 3, F32),
]


@functools.cache
def compiled(case, options=()):
    return jax.jit(functools.partial(grouped, case, **dict(options)))


def check_values(case, m, groups, dtype, sizes, **options):
    arrays = arguments(case, m, groups, dtype)
    exact, plain = (loop(case, arrays, sizes, kind) for kind in (np.float64, np.float32))
    a, b, *operands = poisoned(case, arrays, sizes)
    b = jnp.swapaxes(b, 1, 2) if options.get("transpose_b") else b
    outputs = compiled(case, tuple(options.items()))(a, b, jnp.asarray(sizes), *operands)
    assert dtype in [x.dtype for x in outputs]
    check(outputs, exact, plain)


@pytest.mark.smoke
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_values(problem):
    case, m, groups, dtype = problem

    @SETTINGS
    @hypothesis.given(sizes_of(m, groups))
    @hypothesis.example(np.zeros(groups, np.int32))
    @hypothesis.example(np.array([0] * (groups - 1) + [m], np.int32))
    @hypothesis.example(np.array([m // groups] * groups, np.int32))
    def of_sizes(sizes):
        check_values(case, m, groups, dtype, sizes, transpose_b=groups % 2 == 0)

    of_sizes()


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize(("m", "groups"), [(1, 1), (16, 16), (129, 64), (200, 33)])
def test_values_of_many(case, m, groups, dtype):
    @hypothesis.settings(SETTINGS, max_examples=20)
    @hypothesis.given(sizes_of(m, groups))
    def of_sizes(sizes):
        check_values(case, m, groups, dtype, sizes, transpose_b=len(case) % 2 == 0)

    if case != "fragile":  # zeros are not there, but near
        of_sizes()


def test_without_an_epilogue_it_is_ragged_dot():
    a, b = arguments("bare", 37, 5, F32)
    sizes = jnp.asarray([7, 0, 11, 1, 9], jnp.int32)
    np.testing.assert_allclose(coda.ragged_gemm(a, b, sizes), jax.lax.ragged_dot(a, b, sizes), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("transpose_b", [False, True])
def test_several_factors_and_halves(transpose_b):
    """(G, K, 2, N / 2) and two arrays give what one array of all columns does; and so do three arrays."""
    m, groups = 24, 4
    a, b, x = arguments("swiglu", m, groups, F32)
    sizes = jnp.asarray([5, 0, 9, 7], jnp.int32)
    expected = loop("swiglu", [a, b, x], np.asarray(sizes), np.float64)[0]
    pair = [b[:, :, : N // 2], b[:, :, N // 2 :]]
    for of_b in (b.reshape(groups, K, 2, N // 2), pair):
        of_b = jax.tree.map(lambda b: jnp.moveaxis(b, 1, -1) if transpose_b else b, of_b)
        (out,) = grouped("swiglu", a, of_b, sizes, x, transpose_b=transpose_b)
        assert out.shape == (m, N // 2)
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    thirds = jax.tree.map(lambda b: jnp.swapaxes(b, 1, 2) if transpose_b else b, jnp.split(b, [4, 6], axis=2))

    def apart(acc):
        return jnp.split(acc * 2, [4, 6], axis=1)

    outputs = coda.ragged_gemm(a, thirds, sizes, epilogue=apart, transpose_b=transpose_b)
    expected = 2 * loop("bare", [a, b], np.asarray(sizes), np.float64)[0]
    np.testing.assert_allclose(jnp.concatenate(outputs, 1), expected, rtol=1e-5, atol=1e-5)
    columns = jnp.moveaxis(b.reshape(groups, K, 4, 4), 1, -1) if transpose_b else b.reshape(groups, K, 4, 4)
    out = coda.ragged_gemm(a, columns, sizes, transpose_b=transpose_b)
    np.testing.assert_allclose(2 * out.reshape(m, N), expected, rtol=1e-5, atol=1e-5)


def test_no_rows_and_heads():
    a, b, vector = jnp.zeros((0, K)), random(1, 4, K, N), random(2, 4, N)

    def of_no_rows(a, b, vector):
        epilogue = lambda acc, x: (acc * x, (acc * x).sum(0))  # noqa: E731
        return coda.ragged_gemm(a, b, jnp.zeros(4, jnp.int32), coda.ByGroup(vector), epilogue=epilogue)

    outputs, pullback = jax.vjp(of_no_rows, a, b, vector)
    assert [x.shape for x in outputs] == [(0, N), (4, N)] and not outputs[1].any()
    da, *others = pullback((outputs[0], jnp.ones((4, N))))
    assert da.shape == (0, K) and not any(x.any() for x in others)

    def rotated(acc, table):  # whose rows repeat, whatever the groups
        return (acc.reshape(24, 2, 8) * jnp.tile(table, (3, 1))[:, None]).reshape(24, N)

    a, table, sizes = random(0, 24, K), random(3, 8, 8), np.array([5, 0, 9, 7], np.int32)
    out = coda.ragged_gemm(a, b, jnp.asarray(sizes), table, epilogue=rotated)
    expected = rotated(loop("bare", [a, b], sizes, np.float64)[0], table)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


def test_ranks_are_not_promoted():
    a, b, vector, row = arguments("of each group", 24, 4, F32)
    with jax.numpy_rank_promotion("raise"):
        jax.vjp(lambda *xs: grouped("of each group", *xs[:2], jnp.asarray([5, 0, 9, 7], jnp.int32), *xs[2:]),
                a, b, vector, row[None])[1]  # fmt: skip


@pytest.mark.parametrize("case", ["bare", "every kind", "of each group"])
@pytest.mark.parametrize("first", [0, 1, 3])
def test_a_group_offset(case, first):
    """b has three groups of six; rows of the others are in none."""
    m, groups = 40, 3
    sizes = np.array([7, 0, 9, 1, 12, 6], np.int32)
    arrays = arguments(case, m, groups, F32)
    exact, plain = (loop(case, arrays, sizes, kind, first) for kind in (np.float64, np.float32))
    a, b, *operands = poisoned(case, arrays, sizes, first)
    run = jax.jit(lambda first, *xs: grouped(case, *xs, group_offset=first))
    for offset in (jnp.int32(first), jnp.asarray([first], jnp.int32)):
        check(run(offset, a, b, jnp.asarray(sizes), *operands), exact, plain)
    check(grouped(case, a, b, jnp.asarray(sizes), *operands, group_offset=first), exact, plain)
    if case == "bare":
        check([coda.ragged_gemm(a, b, jnp.asarray(sizes), group_offset=first)], exact, plain)


@pytest.mark.parametrize(("sizes", "rows"), [([5, -3, 9], 20), ([15, 4, 9], 20), ([2**30] * 5, 7), ([-1], 0)])
def test_offsets_are_within_the_rows(sizes, rows):
    """Whatever the sizes are."""
    offsets = np.asarray(group_offsets(jnp.asarray(sizes, jnp.int32), rows))
    assert offsets.dtype == np.int32 and offsets.shape == (len(sizes) + 1,) and offsets[0] == 0
    assert (np.diff(offsets) >= 0).all() and offsets[-1] <= rows
    if np.cumsum(sizes)[-1] <= rows and min(sizes) >= 0:
        np.testing.assert_array_equal(offsets[1:], np.cumsum(sizes))


def test_a_dtype_for_each_output():
    a, b, *operands = arguments("every kind", 24, 3, BF16)
    sizes = jnp.asarray([5, 9, 7], jnp.int32)
    outputs = grouped("every kind", a, b, sizes, *operands, out_dtype=F32)
    assert [x.dtype for x in outputs] == [F32] * 3
    assert coda.ragged_gemm(a, b, sizes).dtype == BF16
    assert coda.ragged_gemm(a.astype(F32), b, sizes, out_dtype=F16).dtype == F16
    tiles = coda.ragged_gemm(
        *(a, b, sizes), epilogue=lambda acc: (acc, {"x": acc + 1}, acc.sum(0)), out_dtype=(F16, None, None)
    )
    assert [x.dtype for x in jax.tree.leaves(tiles)] == [F16, BF16, F32]


# ---- ragged contractions


def contraction_of(a, b, sizes, dtype):
    a, b = np.asarray(a).astype(dtype), np.asarray(b).astype(dtype)
    ends = np.cumsum(sizes)
    return np.stack([a[e - s : e].T @ b[e - s : e] for s, e in zip(sizes, ends, strict=True)])


@pytest.mark.parametrize(("rows", "groups", "dtype"), [(37, 5, BF16), (40, 17, F32), (24, 1, F16)])
def test_contractions(rows, groups, dtype):
    run = jax.jit(functools.partial(coda.ragged_contraction, out_dtype=F32))
    a, b = random(0, rows, K, dtype=dtype), random(1, rows, N, dtype=dtype)

    @SETTINGS
    @hypothesis.given(sizes_of(rows, groups))
    @hypothesis.example(np.zeros(groups, np.int32))
    def of_sizes(sizes):
        used = int(sizes.sum())
        exact, plain = (contraction_of(a, b, sizes, kind) for kind in (np.float64, np.float32))
        out = run(a.at[used:].set(jnp.nan), b.at[used:].set(jnp.inf), jnp.asarray(sizes))
        assert not np.asarray(out)[sizes == 0].any()
        check([out], [exact], [plain])

    of_sizes()
    assert coda.ragged_contraction(a, b, jnp.asarray([rows] + [0] * (groups - 1), jnp.int32)).dtype == dtype


@pytest.mark.parametrize(("first", "second"), [(np.nan, np.inf), (0, np.nan), (np.nan, 0)])
def test_contractions_of_some_groups(first, second):
    """Rows before the first group and behind the last hold what no sum may have."""
    sizes, begin, end = np.array([5, 0, 9], np.int32), 4, 18
    a, b = random(0, 24, K), random(1, 24, N)
    expected = contraction_of(a[begin:end], b[begin:end], sizes, np.float64)
    a, b = (x.at[:begin].set(value).at[end:].set(value) for x, value in ((a, first), (b, second)))
    offsets = GroupOffsets(begin + group_offsets(jnp.asarray(sizes), end - begin))
    options = Options(ragged=Dimension.K, transpose_a=True)
    (out,), _ = product(a, b, (), None, lambda _: [F32], options, offsets)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


# ---- transformations


@pytest.mark.parametrize("batched", ["a", "b", "sizes", "a b sizes operands", "operands"])
def test_vmap(batched):
    case, m, groups, count = "every kind", 24, 4, 3
    values = {
        "a": [random(i, m, K) for i in range(count)],
        "b": [random(10 + i, groups, K, N) for i in range(count)],
        "sizes": [jnp.asarray(sizes, jnp.int32) for sizes in ([5, 0, 9, 7], [0, 0, 0, 24], [1, 1, 1, 1])],
        "operands": [arguments(case, m, groups, F32, seed=20 + i)[2:] for i in range(count)],
    }
    axes = [0 if key in batched.split() else None for key in values]
    stacked = [
        jax.tree.map(lambda *x: jnp.stack(x), *each) if axis == 0 else each[0]
        for each, axis in zip(values.values(), axes, strict=True)
    ]

    def f(a, b, sizes, operands):
        return grouped(case, a, b, sizes, *operands)

    got = jax.jit(jax.vmap(f, in_axes=axes))(*stacked)
    for i in range(count):
        one = [each[i if axis == 0 else 0] for each, axis in zip(values.values(), axes, strict=True)]
        for out, expected in zip(got, jax.jit(f)(*one), strict=True):
            np.testing.assert_allclose(out[i], expected, rtol=1e-5, atol=1e-5)


def test_a_batch_runs_the_product_of_one():
    """One after the other: in the jaxpr is a loop over products without a batch, also under two vmaps."""
    a, b, sizes = random(0, 2, 3, 24, K), random(1, 4, K, N), jnp.asarray([[5, 0, 9, 7], [1, 2, 3, 4], [0, 0, 0, 0]])
    once = jax.vmap(coda.ragged_gemm, in_axes=(0, None, 0))
    twice = jax.vmap(once, in_axes=(0, None, None))
    text = str(jax.make_jaxpr(twice)(a, b, sizes))
    assert text.count("scan[") == 2 and text.count("coda_gemm[") == 1 and "batched=(False, False, False)" in text
    got = twice(a, b, sizes)
    for i in range(2):
        for j in range(3):
            np.testing.assert_allclose(got[i, j], coda.ragged_gemm(a[i, j], b, sizes[j]), rtol=1e-5, atol=1e-5)
    named = jax.vmap(once, in_axes=(0, None, None), spmd_axis_name="data")
    np.testing.assert_array_equal(named(a, b, sizes), got)


def test_scan_and_remat():
    b, sizes = random(1, 3, 4, K, K) / 3, jnp.asarray([[5, 0, 9, 7], [1, 2, 3, 4], [0, 0, 24, 0]])

    def layer(a, layer):
        b, sizes = layer
        return coda.ragged_gemm(a, b, sizes, epilogue=jnp.tanh) + a, None

    def loss(a, b, wrapped):
        return jnp.sum(jax.lax.scan(wrapped(layer), a, (b, sizes))[0] ** 2)

    a = random(0, 24, K)
    expected = a
    for i in range(3):
        expected = np.tanh(loop("bare", [expected, b[i]], np.asarray(sizes[i]), np.float64)[0]) + expected
    np.testing.assert_allclose(loss(a, b, lambda f: f), np.sum(np.asarray(expected) ** 2), rtol=1e-5)
    one, other = (jax.jit(jax.grad(functools.partial(loss, wrapped=f), (0, 1)))(a, b) for f in (lambda f: f, jax.remat))
    for x, y in zip(one, other, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore::coda_jax.FallbackWarning")  # a contraction over a symbolic size, in the gradient
@pytest.mark.slow
def test_symbolic_rows_and_export():
    pytest.importorskip("flatbuffers", reason="jax.export serialises with flatbuffers")
    (m,) = export.symbolic_shape("m")
    case, groups = "every kind", 5
    a, b, *operands = arguments(case, 37, groups, F32)
    symbolic = [(m, *x.shape[1:]) if x.shape[:1] == (37,) else x.shape for x in (a, *operands)]
    types = [jax.ShapeDtypeStruct(shape, F32) for shape in symbolic]

    def f(a, b, sizes, *operands):
        outputs = grouped(case, a, b, sizes, *operands)
        return jax.grad(lambda a: sum(jnp.sum(x * x) for x in grouped(case, a, b, sizes, *operands)))(a), outputs

    exported = export.export(jax.jit(f), platforms=("cpu", "cuda"))(
        types[0], jax.ShapeDtypeStruct(b.shape, F32), jax.ShapeDtypeStruct((groups,), jnp.int32), *types[1:]
    )
    loaded = export.deserialize(exported.serialize())
    sizes = jnp.asarray([7, 0, 11, 1, 9], jnp.int32)
    for got, expected in zip(
        jax.tree.leaves(loaded.call(a, b, sizes, *operands)), jax.tree.leaves(f(a, b, sizes, *operands)), strict=True
    ):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def test_arguments_by_group_go_through_jit():
    a, b, x = arguments("bias", 24, 4, F32)
    sizes, marked = jnp.asarray([5, 0, 9, 7], jnp.int32), coda.ByGroup(x)
    run = functools.partial(coda.ragged_gemm, epilogue=lambda acc, x: acc + x)
    np.testing.assert_array_equal(jax.jit(run)(a, b, sizes, marked), run(a, b, sizes, marked))
    assert jax.jit(lambda x: x)(marked).array.shape == x.shape


def test_inside_shard_map():
    """Each device has groups and rows of its own, as experts of a mesh axis have."""
    mesh = jax.make_mesh((4,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    P = jax.sharding.PartitionSpec
    case, m, groups = "every kind", 24, 3
    each = [arguments(case, m, groups, F32, seed=10 * i) for i in range(4)]
    sizes = np.array([[5, 0, 9], [0, 0, 0], [24, 0, 0], [3, 3, 3]], np.int32)
    whole = [jnp.stack(x) for x in zip(*each, strict=True)]

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))
    def run(sizes, a, b, *operands):
        outputs = grouped(case, a[0], b[0], sizes[0], *(x[0] for x in operands))
        return [x[None] for x in outputs]

    for got, i in ((run, i) for i in range(4)):
        expected = loop(case, each[i], sizes[i], np.float64)
        for x, y in zip(jax.jit(got)(jnp.asarray(sizes), *whole), expected, strict=True):
            np.testing.assert_allclose(x[i], y, rtol=1e-4, atol=1e-5)


# ---- what a GPU would run


def test_a_reduction_of_each_group_is_told():
    a, b, sizes = jnp.ones((24, K), BF16), jnp.ones((4, K, N), BF16), jnp.ones(4, jnp.int32)

    def f(a, b, sizes):
        return coda.ragged_gemm(a, b, sizes, epilogue=lambda acc: (acc, acc.sum(0)))

    (note,) = coda.explain(f, a, b, sizes, platform="cuda").notes
    assert "a reduction over the rows of each group is left to XLA" in note
    plain = coda.explain(functools.partial(coda.ragged_gemm, epilogue=jnp.tanh), a, b, sizes, platform="cuda")
    assert not plain.notes and len(plain.products) == 1


def test_strict_mode_refuses_what_is_left_to_xla(monkeypatch):
    monkeypatch.setattr(fallbacks, "_reported", set())
    types = [jax.ShapeDtypeStruct(*x) for x in (((24, K), BF16), ((4, K, N), BF16), ((4,), jnp.int32))]

    def lowered(epilogue):
        run = jax.jit(functools.partial(coda.ragged_gemm, epilogue=epilogue, implementation="xla"))
        return run.trace(*types).lower(lowering_platforms=("cuda",))

    with coda.strict():
        lowered(jnp.tanh)
        with pytest.raises(coda.FallbackError, match="a reduction over the rows of each group is left to XLA"):
            lowered(lambda acc: (acc, acc.sum(0)))


# ---- refusals

A, B, SIZES = jnp.ones((24, K)), jnp.ones((4, K, N)), jnp.asarray([5, 0, 9, 7], jnp.int32)


def add(acc, x):
    return acc + x


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((A[0], B, SIZES), {}, ValueError, "ragged_gemm: a has shape (8,); it must be a matrix"),
        ((A[None], B, SIZES), {}, ValueError, "ragged_gemm: a has shape (1, 24, 8); it must be a matrix"),
        ((A.astype(jnp.int32), B, SIZES), {}, TypeError, "ragged_gemm: a has dtype int32"),
        ((A, B[0], SIZES), {}, ValueError, "ragged_gemm: b has shape (8, 16); it must be (G, K, N)"),
        ((A, B[:, :7], SIZES), {}, ValueError, "a (24, 8) has K = 8, b (4, 7, 16) has K = 7; they must be equal"),
        ((A, B, SIZES), {"transpose_b": True}, ValueError, "b (4, 8, 16) transposed has K = 16"),
        ((A, [B, B[:3]], SIZES), {}, ValueError, "several must be (G, K, Ni) with one G and K"),
        ((A, [B, B[:, :7]], SIZES), {}, ValueError, "several must be (G, K, Ni) with one G and K"),
        ((A, B[:0], SIZES[:0]), {}, ValueError, "b has shape (0, 8, 16); it must have at least one group"),
        ((A, B, SIZES[:3]), {}, ValueError, "group_sizes has 3 groups, b has 4; they must be as many"),
        ((A, B, SIZES.astype(F32)), {}, TypeError, "group_sizes has dtype float32; it must be int32"),
        ((A, B, SIZES[None]), {}, ValueError, "group_sizes has shape (1, 4); it must be (G,)"),
        ((A, B, [5, 0, 9, 7]), {}, TypeError, "group_sizes is list; it must be an array (G,) int32"),
        ((A, B, SIZES), {"group_offset": 1}, ValueError, "group_offset = 1; group_sizes has 4 groups, b has 4"),
        ((A, B, SIZES[:3]), {"group_offset": 0}, ValueError, "group_sizes has 3 groups, b has 4; it must have b's"),
        ((A, B, SIZES), {"group_offset": -1}, ValueError, "group_offset = -1; group_sizes has 4 groups"),
        ((A, B, SIZES), {"group_offset": jnp.ones(2, jnp.int32)}, TypeError, "group_offset is int32 of shape (2,)"),
        ((A, B, SIZES), {"group_offset": jnp.ones(())}, TypeError, "group_offset is float32 of shape ()"),
        ((A, B, SIZES), {"group_offset": True}, TypeError, "group_offset is bool of shape ()"),
        ((A, B, SIZES[:3]), {"group_offset": SIZES[1]}, ValueError, "group_sizes has 3 groups, b has 4; it must have"),
        ((A, B, SIZES, A), {}, TypeError, "ragged_gemm: 1 operands without an epilogue"),
        ((A, B, SIZES), {"epilogue": 3}, TypeError, "ragged_gemm: epilogue is int"),
        ((A, B, SIZES), {"residuals": "none"}, ValueError, "ragged_gemm: residuals = 'none'"),
        ((A, B, SIZES), {"implementation": "gpu"}, ValueError, "ragged_gemm: implementation = 'gpu'"),
        ((A, B, SIZES), {"config": 128}, TypeError, "ragged_gemm: config is int"),
        ((A, B, SIZES), {"out_dtype": jnp.int8}, TypeError, "ragged_gemm: out_dtype of output 0 is int8"),
        ((A, B, SIZES), {"out_sharding": "data"}, TypeError, "ragged_gemm: out_sharding is str"),
        (
            (A, B, SIZES, coda.ByGroup(B[:3, 0])),
            {"epilogue": add},
            ValueError,
            "(3, 16) and is by group, and group_siz",
        ),
        ((A, B, SIZES, coda.ByGroup(B)), {"epilogue": add}, NotTileLocalError, "(4, 8, 16); beside acc (M, N)"),
        (
            (A, B, SIZES, B[:, 0]),
            {"epilogue": add},
            TypeError,
            "incompatible shapes for broadcasting: (24, 16), (4, 16)",
        ),
        (
            (A, B, SIZES),
            {"epilogue": lambda acc: acc.mean(0)},
            NotTileLocalError,
            "computed from a reduction over rows",
        ),
        ((A, B, SIZES), {"epilogue": lambda acc: acc - acc.sum(0)}, NotTileLocalError, "reduction"),
        (
            (A, B, SIZES),
            {"epilogue": lambda acc: acc.sum(1) / acc.sum()},
            NotTileLocalError,
            "computed from a reduction",
        ),
        ((A, B, SIZES), {"epilogue": lambda acc: jnp.cumsum(acc.sum(1))}, NotTileLocalError, "computed from a reduct"),
        ((A, B, SIZES), {"epilogue": lambda acc: jnp.sum(acc.sum(1)) + 1}, NotTileLocalError, "computed from a reduct"),
        ((A, B, SIZES), {"epilogue": lambda acc: (acc > 0).sum(0)}, NotTileLocalError, "computed from a reduction ove"),
        (
            (A, B, SIZES),
            {"epilogue": lambda acc: (acc.sum(0), jnp.sqrt(acc.sum(0)))},
            NotTileLocalError,
            "of each group, (G, N), and can only be returned as it is",
        ),
    ],
)
def test_refusals(arguments, options, error, message):
    with pytest.raises(error) as info:
        coda.ragged_gemm(*arguments, **options)
    assert message in str(info.value)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((A, A[:23], SIZES), {}, ValueError, "a (24, 8) has 24 rows, b (23, 8) has 23; they must be equal"),
        ((A, B, SIZES), {}, ValueError, "ragged_contraction: b has shape (4, 8, 16); it must be a matrix"),
        ((A, A, SIZES[:0]), {}, ValueError, "group_sizes has shape (0,); it must have at least one group"),
        ((A, A, SIZES.astype(jnp.int16)), {}, TypeError, "ragged_contraction: group_sizes has dtype int16"),
        ((A, A, SIZES), {"implementation": "gpu"}, ValueError, "ragged_contraction: implementation = 'gpu'"),
        ((A, A, SIZES), {"config": 128}, TypeError, "ragged_contraction: config is int"),
        ((A, A, SIZES), {"out_dtype": jnp.int8}, TypeError, "ragged_contraction: out_dtype of output 0 is int8"),
    ],
)
def test_refusals_of_contractions(arguments, options, error, message):
    with pytest.raises(error) as info:
        coda.ragged_contraction(*arguments, **options)
    assert message in str(info.value)


def test_messages_name_the_function():
    b = jnp.stack([B] * 2, axis=2).reshape(4, 8, 4, 8)
    with pytest.raises(ValueError, match=r"^ragged_gemm: b has columns \(4, 8\), and epilogue"):
        coda.ragged_gemm(A, b, SIZES, epilogue=lambda acc: acc[:, :16] * acc[:, 16:])
    with pytest.raises(NotImplementedError, match=r"^ragged_gemm 'tanh': implementation='cuda' was asked for"):
        coda.ragged_gemm(A, B, SIZES, epilogue=jnp.tanh, implementation="cuda")


def test_the_number_of_groups_is_known():
    (groups,) = export.symbolic_shape("g")
    a, b, sizes = (
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (((24, 8), F32), ((groups, 8, 16), F32), ((groups,), jnp.int32))
    )
    with pytest.raises(ValueError, match=r"ragged_gemm: b has shape \(g, 8, 16\); the number of groups must be known"):
        jax.eval_shape(coda.ragged_gemm, a, b, sizes)
    with pytest.raises(ValueError, match=r"ragged_contraction: group_sizes has shape \(g,\); the number of groups"):
        jax.eval_shape(coda.ragged_contraction, a, a, sizes)


def test_tiles_of_groups_are_not_split():
    explained = coda.explain(
        functools.partial(coda.ragged_gemm, config=coda.GemmConfig(split_k=True)),
        *(A.astype(jnp.bfloat16), B.astype(jnp.bfloat16), SIZES),
        platform="cuda",
    )
    assert "split_k = True with a product of groups; their tiles are never split" in str(explained)


def test_a_cpu_has_no_kernel():
    for implementation in ("xla", "auto"):
        config = coda.GemmConfig(tile_n=128)
        coda.ragged_gemm(A, B, SIZES, implementation=implementation, config=config)
        coda.ragged_contraction(A, A, SIZES, implementation=implementation, config=config)
    with pytest.raises(NotImplementedError, match="ragged_gemm"):
        coda.ragged_gemm(A, B, SIZES, implementation="cuda")
    with pytest.raises(NotImplementedError, match="ragged_contraction"):
        coda.ragged_contraction(A, A, SIZES, implementation="cuda")
    with pytest.raises(NotImplementedError, match=r"ragged_gemm.*forward mode"):
        jax.jvp(lambda a: coda.ragged_gemm(a, B, SIZES), (A,), (A,))
