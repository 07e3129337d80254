"""The kernel against float64: layouts, sizes, dtypes, every operand kind, gradients, transformations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coda_jax as coda
from benchmarks.programs import PROGRAMS
from coda_jax.epilogue import logsumexp
from coda_jax.tiles.arch import SM90
from tests import tolerance

CPU = jax.devices("cpu")[0]


def _matrices(m, n, k, dtype, transpose_a=False, transpose_b=False, seed=0):
    keys = jax.random.split(jax.random.key(seed), 2)
    a = jax.random.normal(keys[0], (k, m) if transpose_a else (m, k)).astype(dtype)
    b = jax.random.normal(keys[1], (n, k) if transpose_b else (k, n)) / np.sqrt(k)
    return a, b.astype(dtype)


def _float64(tree):
    """The tree's floating arrays in float64, on the host; inside jax.enable_x64."""

    def is_float(x):
        return jnp.issubdtype(x.dtype, jnp.floating)

    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.float64 if is_float(x) else x.dtype), tree)


def _reference(function, *arguments):
    """function(*arguments) in float64 on the host."""
    with jax.enable_x64(True), jax.default_device(CPU):
        return jax.tree.map(np.asarray, function(*_float64(arguments)))


def _plain(epilogue, transpose_a=False, transpose_b=False):
    """The textbook formula, in whatever dtype its arguments have; the product is rounded to it."""

    def function(a, b, *operands):
        acc = (a.T if transpose_a else a) @ (b.T if transpose_b else b)
        if acc.dtype != jnp.float64:  # XLA may drop a rounding that a conversion back follows
            acc = jax.lax.reduce_precision(acc, jnp.finfo(acc.dtype).nexp, jnp.finfo(acc.dtype).nmant)
        return acc if epilogue is None else epilogue(acc, *operands)

    return function


def compare(fused, plain, a, b, operands):
    """fused(a, b, *operands) against plain in float64, by the tolerance of plain in the arguments' own dtypes."""
    out = jax.jit(fused)(a, b, *operands)
    reference = _reference(plain, a, b, *operands)
    same_dtype = jax.jit(plain)(a, b, *operands)
    for got, want, rough in zip(*map(jax.tree.leaves, (out, reference, same_dtype)), strict=True):
        tolerance.check(got, want.astype(np.float64), rough, dtype=got.dtype)


SIZES = [(8, 8, 8), (64, 72, 40), (128, 128, 64), (136, 136, 72), (392, 264, 136), (120, 1032, 520), (1024, 384, 2048)]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("transpose_a", [False, True])
def test_layouts_and_sizes(transpose_a, transpose_b, dtype):
    sizes = list(SIZES)
    if not transpose_a:
        sizes += [(m, 136, 72) for m in (1, 7, 127, 129)]
    if transpose_a and not transpose_b:
        sizes += [(136, 136, k) for k in (1, 63, 65)]
    fused = functools.partial(coda.gemm, transpose_a=transpose_a, transpose_b=transpose_b, implementation="cuda")
    for m, n, k in sizes:
        a, b = _matrices(m, n, k, dtype, transpose_a, transpose_b)
        compare(fused, _plain(None, transpose_a, transpose_b), a, b, ())


@pytest.mark.parametrize("out_dtype", [jnp.bfloat16, jnp.float16, jnp.float32], ids=["bf16", "f16", "f32"])
def test_output_dtypes(out_dtype):
    a, b = _matrices(264, 392, 200, jnp.bfloat16)
    fused = functools.partial(coda.gemm, out_dtype=out_dtype, implementation="cuda")
    assert jax.eval_shape(fused, a, b).dtype == out_dtype
    compare(fused, lambda a, b: (a @ b).astype(out_dtype), a, b, ())


# Below, at and above the edges of tiles, and of halves: N / 2 = 8, 72, 168, 200.
EDGES = [(129, 144, 72), (128, 256, 64), (1, 16, 8), (257, 272, 136), (384, 336, 72), (127, 400, 264)]


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_at_tile_edges(name):
    program = PROGRAMS[name]
    for m, n, k in EDGES:
        n = program.columns(n)
        a, b = _matrices(m, n, k, jnp.bfloat16, transpose_b=True)
        asked = program.out_dtype(m, n)
        fused = functools.partial(
            coda.gemm, epilogue=program.epilogue, out_dtype=asked, transpose_b=True, implementation="cuda"
        )
        operands = program.operands(m, n)
        types = jax.tree.leaves(jax.eval_shape(fused, a, b, *operands))
        for type_, dtype in zip(types, jax.tree.leaves(asked, is_leaf=lambda x: x is None), strict=True):
            assert type_.dtype == (dtype or jnp.float32)
        compare(fused, _plain(program.epilogue, transpose_b=True), a, b, operands)


@pytest.mark.parametrize(
    "epilogue", [PROGRAMS["exp_sum"].epilogue, functools.partial(logsumexp, axis=1)], ids=["exp_sum", "logsumexp"]
)
def test_row_reductions_of_any_number_of_columns(epilogue):
    fused = functools.partial(coda.gemm, epilogue=epilogue, transpose_b=True, implementation="cuda")
    for m, n, k in [(129, 131, 72), (64, 1, 64), (257, 262, 136), (120, 516, 40)]:
        a, b = _matrices(m, n, k, jnp.bfloat16, transpose_b=True)
        compare(fused, _plain(epilogue, transpose_b=True), a, b, ())


def test_row_sums_beside_float32_rows_of_any_four_columns():
    def epilogue(acc):
        return acc.astype(jnp.float32), jnp.sum(jnp.exp(acc), axis=1)

    fused = functools.partial(
        coda.gemm, epilogue=epilogue, out_dtype=(jnp.float32, None), transpose_b=True, implementation="cuda"
    )
    for m, n, k in [(129, 132, 72), (65, 4, 64), (120, 516, 40)]:
        a, b = _matrices(m, n, k, jnp.bfloat16, transpose_b=True)
        compare(fused, _plain(epilogue, transpose_b=True), a, b, ())


@pytest.mark.parametrize("tile", list(SM90.tiles)[1:], ids=str)
@pytest.mark.parametrize(
    "name",
    [
        "residual_sumsq",
        "swiglu",
        "gated_backward",
        "column_sum",
        "extrema",
        "every_vector",
        "logsumexp_pick",
        "rotary_qkv",
    ],
)
def test_every_tile(name, tile):
    program = PROGRAMS[name]
    for m, n, k in [*EDGES[:4], (1, 400, 136), (65, 784, 264)]:
        n = program.columns(n)
        config = coda.GemmConfig(tile_m=tile[0], tile_n=tile[1])
        fused = functools.partial(
            coda.gemm, epilogue=program.epilogue, transpose_b=True, implementation="cuda", config=config
        )
        a, b = _matrices(m, n, k, jnp.bfloat16, transpose_b=True)
        compare(fused, _plain(program.epilogue, transpose_b=True), a, b, program.operands(m, n))


@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("tile", [(64, 64), (64, 128), (128, 128), (128, 256)], ids=str)
@pytest.mark.parametrize("name", ["residual_sumsq", "column_sum", "gated_backward"])
def test_few_rows(name, tile, transpose_a):
    """Rows of a tile that are not loaded, here NaN of the product before, reach no result."""
    program, config = PROGRAMS[name], coda.GemmConfig(tile_m=tile[0], tile_n=tile[1])
    product = functools.partial(coda.gemm, transpose_a=transpose_a, transpose_b=True, implementation="cuda")
    fused = functools.partial(product, epilogue=program.epilogue, config=config)
    nan = jnp.full((4096, 4096), jnp.nan, jnp.bfloat16)
    for m in (8, 16, 40, 72, 104) if transpose_a else (1, 7, 16, 40, 63, 72, 100):
        n, k = program.columns(400), 520
        a, b = _matrices(m, n, k, jnp.bfloat16, transpose_a, transpose_b=True)
        operands = jax.block_until_ready(program.operands(m, n))
        jax.block_until_ready(product(nan, nan, config=coda.GemmConfig(tile_m=128, tile_n=256)))
        compare(fused, _plain(program.epilogue, transpose_a, True), a, b, operands)


@pytest.mark.parametrize("name", ["qk_norm_rotary", "qk_norm_rotary_64", "rotary_repeated", "rotary_neighbours"])
def test_heads_in_a_tile_that_two_warpgroups_share(name):
    """Whose tables registers keep; `rotary_qkv` is above."""
    program, config = PROGRAMS[name], coda.GemmConfig(tile_m=128, tile_n=256)
    fused = functools.partial(
        coda.gemm, epilogue=program.epilogue, transpose_b=True, implementation="cuda", config=config
    )
    for m, n, k in [(129, 400, 72), (6, 128, 64), (1026, 1536, 136)]:
        n = program.columns(n)
        a, b = _matrices(m, n, k, jnp.bfloat16, transpose_b=True)
        compare(fused, _plain(program.epilogue, transpose_b=True), a, b, program.operands(m, n))


@pytest.mark.parametrize(
    ("name", "config"),
    [
        *(
            (name, coda.GemmConfig(tile_m=128, column_passes=2))
            for name in PROGRAMS
            if name not in ("rotary_256", "qk_norm_rotary_192")  # whose tile is one head
        ),
        *(
            (name, coda.GemmConfig(tile_m=tile_m, tile_n=tile_n, column_passes=passes))
            for (tile_m, tile_n), passes in (((128, 192), 3), ((128, 256), 4), ((64, 128), 2), ((64, 64), 2))
            for name in ("residual_sumsq", "gated_backward", "column_sum", "every_vector", "logsumexp_pick")
        ),
        ("swiglu", coda.GemmConfig(tile_m=128, tile_n=192, column_passes=3)),
        ("residual_sumsq", coda.GemmConfig(tile_m=128, tile_n=192, column_passes=3, split_k=True)),
        ("gated_backward", coda.GemmConfig(tile_m=128, tile_n=128, column_passes=2, split_k=True)),
    ],
    ids=str,
)
def test_column_passes(name, config):
    """Parts of a tile's columns that the epilogue works on one after the other."""
    program = PROGRAMS[name]
    fused = functools.partial(
        coda.gemm, epilogue=program.epilogue, transpose_b=True, implementation="cuda", config=config
    )
    for m, n, k in PARTS[:3] if config.split_k else EDGES[:4]:
        n = program.columns(n)
        a, b = _matrices(m, n, k, jnp.bfloat16, transpose_b=True)
        compare(fused, _plain(program.epilogue, transpose_b=True), a, b, program.operands(m, n))


def test_erfc_is_as_exact_as_its_comment_says():
    x = jax.random.uniform(jax.random.key(0), (512, 512), minval=-6, maxval=9).astype(jnp.bfloat16)
    out = coda.gemm(x, jnp.eye(512, dtype=x.dtype), epilogue=jax.lax.erfc, out_dtype=jnp.float32, implementation="cuda")
    tolerance.check_erfc(out, x)


# A tile in many parts; some in some; whole tiles and then parts; one row; nothing to split.
PARTS = [(136, 144, 4104), (768, 768, 8192), (2056, 2064, 520), (4096, 1280, 520), (1, 144, 1032), (264, 400, 40)]


@pytest.mark.parametrize("tile", SM90.split_k_tiles, ids=str)
@pytest.mark.parametrize("name", ["identity", "residual_sumsq", "swiglu", "column_sum", "logsumexp_pick"])
def test_split_k(name, tile):
    program = PROGRAMS[name]
    fused = functools.partial(
        coda.gemm,
        epilogue=program.epilogue,
        transpose_b=True,
        implementation="cuda",
        config=coda.GemmConfig(tile_m=tile[0], tile_n=tile[1], split_k=True),
    )
    for m, n, k in PARTS:
        n = program.columns(n)
        a, b = _matrices(m, n, k, jnp.bfloat16, transpose_b=True)
        compare(fused, _plain(program.epilogue, transpose_b=True), a, b, program.operands(m, n))


@pytest.mark.parametrize("residuals", ["preactivation", "recompute"])
@pytest.mark.parametrize("name", ["residual_sumsq", "swiglu", "bias_gelu", "column_sum", "every_vector", "rotary_qkv"])
def test_gradients(name, residuals):
    program = PROGRAMS[name]
    m, n, k = 264, program.columns(400), 136
    a, b = _matrices(m, n, k, jnp.bfloat16)
    operands = program.operands(m, n)
    asked = program.out_dtype(m, n)
    plain = _plain(program.epilogue)
    differentiable = [i for i, x in enumerate((a, b, *operands)) if jnp.issubdtype(x.dtype, jnp.floating)]

    def rounded(*arguments):
        """Plain, its tiles rounded as the kernel's are; in float64 they stay as they are."""
        tree = jax.tree.structure(asked, is_leaf=lambda x: x is None)
        leaves = [
            x if dtype is None or x.dtype == jnp.float64 else x.astype(dtype)
            for x, dtype in zip(tree.flatten_up_to(plain(*arguments)), tree.flatten_up_to(asked), strict=True)
        ]
        return jax.tree.unflatten(tree, leaves)

    def gradient(function):
        def total(*arguments):
            outputs = jax.tree.leaves(function(*arguments))
            weights = [((jnp.arange(x.size) * 37 + i) % 17 - 8).reshape(x.shape) for i, x in enumerate(outputs)]
            return sum(jnp.sum(x * w.astype(x.dtype) / 8) for x, w in zip(outputs, weights, strict=True))

        return jax.grad(total, argnums=differentiable)

    fused = functools.partial(
        coda.gemm, epilogue=program.epilogue, out_dtype=asked, residuals=residuals, implementation="cuda"
    )
    compare(gradient(fused), gradient(rounded), a, b, operands)


def test_vmap_with_shared_and_with_batched_b():
    m, n, k, batch = 136, 264, 72, 3
    program = PROGRAMS["residual_sumsq"]
    a = jax.random.normal(jax.random.key(0), (batch, m, k)).astype(jnp.bfloat16)
    x = jax.random.normal(jax.random.key(1), (batch, m, n)).astype(jnp.bfloat16)
    b = jax.random.normal(jax.random.key(2), (batch, k, n)).astype(jnp.bfloat16)
    config = coda.GemmConfig(tile_m=128, tile_n=256)  # two partial sums a row: XLA can add them in one order only
    for b_argument, axis in ((b[0], None), (b, 0)):
        fused = functools.partial(coda.gemm, epilogue=program.epilogue, implementation="cuda", config=config)

        def mapped(function, axis=axis):
            return jax.vmap(function, in_axes=(0, axis, 0))

        compare(mapped(fused), mapped(_plain(program.epilogue)), a, b_argument, (x,))
        one_by_one = [jax.jit(fused)(a[i], b_argument if axis is None else b_argument[i], x[i]) for i in range(batch)]
        together = jax.jit(mapped(fused))(a, b_argument, x)
        for got, want in zip(together, map(jnp.stack, zip(*one_by_one, strict=True)), strict=True):
            np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


def test_vmap_over_an_operand_alone():
    m, n, k, batch = 136, 264, 72, 3
    a, b = _matrices(m, n, k, jnp.bfloat16)
    x = jax.random.normal(jax.random.key(1), (batch, m, n)).astype(jnp.bfloat16)
    fused = functools.partial(coda.gemm, epilogue=PROGRAMS["residual_sumsq"].epilogue, implementation="cuda")

    def mapped(function):
        return jax.vmap(function, in_axes=(None, None, 0))

    compare(mapped(fused), mapped(_plain(PROGRAMS["residual_sumsq"].epilogue)), a, b, (x,))


@pytest.mark.parametrize("config", [None, coda.GemmConfig(tile_m=128, tile_n=256)], ids=["chosen", "cooperative"])
def test_column_reductions_and_row_vectors_under_vmap(config):
    m, n, k, batch = 136, 264, 72, 3
    program = PROGRAMS["column_sum"]
    a = jax.random.normal(jax.random.key(0), (batch, m, k)).astype(jnp.bfloat16)
    b = jax.random.normal(jax.random.key(2), (k, n)).astype(jnp.bfloat16)
    bias = jax.random.normal(jax.random.key(1), (batch, n), jnp.float32)
    fused = functools.partial(coda.gemm, epilogue=program.epilogue, implementation="cuda", config=config)

    def mapped(function):
        return jax.vmap(function, in_axes=(0, None, 0))

    compare(mapped(fused), mapped(_plain(program.epilogue)), a, b, (bias,))


def test_accumulation_in_a_scan_makes_no_copy():
    m, n, k, steps = 512, 768, 256, 8
    a = jax.random.normal(jax.random.key(0), (steps, m, k)).astype(jnp.bfloat16)
    b = jax.random.normal(jax.random.key(1), (steps, k, n)).astype(jnp.bfloat16)

    @jax.jit
    def accumulate(a, b):
        def step(total, factors):
            out = coda.gemm(
                *factors,
                total,
                epilogue=lambda acc, total: acc + total,
                out_dtype=jnp.float32,
                input_output_aliases={0: 0},
                implementation="cuda",
            )
            return out, None

        return jax.lax.scan(step, jnp.zeros((m, n), jnp.float32), (a, b))[0]

    body = accumulate.lower(a, b).compile().as_text()
    copies = [line for line in body.splitlines() if f"f32[{m},{n}]" in line.split("=")[-1][:40] and " copy" in line]
    assert "coda_gemm" in body
    assert not copies, copies
    expected = np.einsum("smk,skn->mn", np.asarray(a, np.float64), np.asarray(b, np.float64))
    np.testing.assert_allclose(np.asarray(accumulate(a, b)), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.usefixtures("nothing_said_yet")
def test_float32_says_once_why_it_takes_the_xla_form():
    a, b = _matrices(64, 64, 64, jnp.float32)
    with pytest.warns(coda.FallbackWarning, match="float32"):
        jax.jit(lambda a, b: coda.gemm(a, b))(a, b)
    with pytest.raises(NotImplementedError, match="bfloat16, float16"):
        jax.jit(lambda a, b: coda.gemm(a, b, implementation="cuda"))(a, b)


def test_odd_row_pitch_is_named():
    a, b = _matrices(64, 100, 64, jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="multiples of 16"):
        jax.jit(lambda a, b: coda.gemm(a, b, implementation="cuda"))(a, b)
