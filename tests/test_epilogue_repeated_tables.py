"""Head tables of S rows, where S divides M, which an epilogue repeats with jnp.tile."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import coda_jax as coda
from coda_jax.epilogue import NotTileLocalError, evaluate, trace
from coda_jax.lowering import cuda, select
from tests.host_execution import HostPrograms
from tests.nvrtc import needs_nvrtc
from tests.test_epilogue_heads import angles, turned, turned_by_whole_tables, turned_neighbours, turned_pairs
from tests.test_gemm_cuda import calls, operands_and_results, text

BATCH, ROWS, DIM, N, K = 3, 4, 8, 32, 16
M = BATCH * ROWS


def over_rows(acc, *tables):
    return (jnp.tile(table, (acc.shape[0] // table.shape[0], 1)) for table in tables)


def rotary(acc, cos, sin):
    return turned(acc, *over_rows(acc, cos, sin), DIM)


def rotary_of_one_head(acc, cos, sin):
    return turned(acc, *over_rows(acc, cos, sin), N)


def rotary_of_one_whole_table(acc, cos, sin):
    return turned_by_whole_tables(acc, *over_rows(acc, cos, sin), N)


def rotary_of_one_heads_neighbours(acc, cos, sin):
    return turned_neighbours(acc, *over_rows(acc, cos, sin), N)


def rotary_of_one_heads_pairs(acc, cos, sin):
    return turned_pairs(acc, *over_rows(acc, cos, sin), N)


def rotary_of_whole_tables(acc, cos, sin):
    return turned_by_whole_tables(acc, *over_rows(acc, cos, sin), DIM)


def rotary_neighbours(acc, cos, sin):
    """One table is worked on before it is repeated."""
    return turned_neighbours(acc, *over_rows(acc, cos * 2 - cos, sin), DIM)


def rotary_of_one_head_of_a_sum(acc, tile, cos, sin):
    """A tile (M, N) is no table (M, Dh), where the one head has all N columns."""
    return rotary_of_one_head(acc + tile, cos, sin)


def columns_beside_heads(acc, cos, sin):
    """An axis of size 1 before all columns makes no head of them."""
    y = rotary((acc.reshape(M, 1, N) * 2).reshape(M, N), cos, sin)
    return (y.reshape(M, 1, N) - 1).reshape(M, N), jnp.sum((acc * acc).reshape(M, 1, N), axis=(1, 2))


def one_heads_neighbours_and_sums(acc, cos, sin):
    y = rotary_of_one_heads_neighbours(acc, cos, sin)
    one = acc.reshape(M, 1, N)
    return y, jnp.sum(one * one, axis=0), jnp.sum(one * one, axis=(1, 2))


def two_periods(acc, table, other, rstd):
    table, other = over_rows(acc, table, other)
    y = (acc * rstd).reshape(acc.shape[0], -1, DIM) * table[:, None, :] + other[:, None, :]
    return y.reshape(acc.shape), jnp.sum(y, axis=(1, 2))


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


CASES = {
    "halves": (rotary, angles(ROWS, DIM // 2)),
    "whole": (rotary_of_whole_tables, [jnp.tile(x, (1, 2)).astype(jnp.bfloat16) for x in angles(ROWS, DIM // 2)]),
    "neighbours": (rotary_neighbours, angles(ROWS, DIM // 2)),
    "two_periods": (two_periods, (normal(1, ROWS, DIM), normal(2, 2 * M // 4, DIM), normal(3, M, 1))),
    "one_head": (rotary_of_one_head, angles(ROWS, N // 2)),
    "one_head_of_a_sum": (rotary_of_one_head_of_a_sum, (normal(4, M, N), *angles(ROWS, N // 2))),
    "one_head_whole": (rotary_of_one_whole_table, [jnp.tile(x, (1, 2)) for x in angles(ROWS, N // 2)]),
    "one_head_neighbours": (rotary_of_one_heads_neighbours, angles(ROWS, N // 2)),
    "one_head_pairs": (rotary_of_one_heads_pairs, angles(ROWS, N // 2)),
    "one_heads_neighbours_and_sums": (one_heads_neighbours_and_sums, angles(ROWS, N // 2)),
    "columns_beside_heads": (columns_beside_heads, angles(ROWS, DIM // 2)),
    "one_head_every_row": (rotary_of_one_head, angles(M, N // 2)),
    "every_row": (rotary, angles(M, DIM // 2)),
    "one_row": (rotary, [x[1:] for x in angles(2, DIM // 2)]),
}


@pytest.fixture(scope="module")
def on_the_host(tmp_path_factory):
    programs = [trace(f, normal(0, M, N), operands)[0].program for f, operands in CASES.values()]
    return HostPrograms(programs, tmp_path_factory.mktemp("tables"))


@pytest.mark.parametrize("name", CASES)
def test_program_and_generated_code(name, on_the_host):
    f, operands = CASES[name]
    acc, index = normal(0, M, N), list(CASES).index(name)
    expected = jax.tree.leaves(f(acc, *(x.astype(jnp.float32) for x in operands)))
    for outputs in (
        evaluate(on_the_host.programs[index], acc, *operands),
        on_the_host.run(index, np.asarray(acc), [np.asarray(x) for x in operands]),
    ):
        for out, want in zip(outputs, expected, strict=True):
            np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)


def test_the_period_is_part_of_the_program():
    periods = {"two_periods": [ROWS, M // 2, 0], "every_row": [0, 0], "one_row": [0, 0]}
    programs = {name: trace(f, normal(0, M, N), operands)[0].program for name, (f, operands) in CASES.items()}
    for name, expected in periods.items():
        assert [operand.period for operand in programs[name].operands] == expected
    assert programs["halves"] != trace(rotary, normal(0, M, N), angles(2, DIM // 2))[0].program


@pytest.mark.parametrize("residuals", ["preactivation", "recompute"])
def test_gradient_with_leading_axes(residuals):
    """The gradients are those of plain JAX, of the tables too: sums over the batch and the heads."""
    x, w = normal(1, BATCH, ROWS, K), normal(2, K, N) / 4

    def fused(x, w, *tables):
        return coda.gemm(x, w, *tables, epilogue=rotary, residuals=residuals)

    def plain(x, w, *tables):
        return rotary((x @ w).reshape(M, N), *tables).reshape(BATCH, ROWS, N)

    arguments = (x, w, *angles(ROWS, DIM // 2))
    got, pull = jax.vjp(jax.jit(fused), *arguments)
    want, pull_plain = jax.vjp(plain, *arguments)
    cotangent = jnp.cos(want)
    for a, b in zip((got, *pull(cotangent)), (want, *pull_plain(cotangent)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_vmap():
    x, w, tables = normal(1, 2, M, K), normal(2, K, N), angles(ROWS, DIM // 2)
    for axes in ((None, None), (0, None), (0, 0)):
        batch = [jnp.stack([y, y + 1]) if axis == 0 else y for y, axis in zip(tables, axes, strict=True)]
        got = jax.vmap(lambda x, *o: coda.gemm(x, w, *o, epilogue=rotary), in_axes=(0, *axes))(x, *batch)
        for i in range(2):
            one = [y[i] if axis == 0 else y for y, axis in zip(batch, axes, strict=True)]
            np.testing.assert_allclose(got[i], rotary(x[i] @ w, *one), rtol=1e-5, atol=1e-5)


@needs_nvrtc
@pytest.mark.parametrize("batched", [False, True])
def test_a_batch_shares_its_tables_in_one_product(batched, monkeypatch):
    for module in (cuda, select):
        monkeypatch.setattr(module, "machine_reason", lambda: None)
    table = jax.ShapeDtypeStruct((2, 8, 16) if batched else (8, 16), jnp.float32)
    a, b = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2, 24, 64), (64, 96)))

    def f(acc, cos, sin):
        return turned(acc, *over_rows(acc, cos, sin), 32)

    mapped = jax.vmap(
        lambda a, b, *o: coda.gemm(a, b, *o, epilogue=f), in_axes=(0, None, *(0 if batched else None,) * 2)
    )
    (call,) = calls(text(mapped, a, b, table, table))
    rows = ["2x24x64xbf16", *["2x8x16xf32"] * 2] if batched else ["48x64xbf16", *["8x16xf32"] * 2]
    given, _ = operands_and_results(call)
    assert [given[0], *given[2:]] == rows


def test_tables_repeated_other_than_by_rows_are_refused():
    table = jnp.ones((ROWS, DIM))

    def joined(acc, table):
        return (acc.reshape(M, -1, DIM) * jnp.tile(table, (BATCH, 2))[:, None, :DIM]).reshape(acc.shape)

    with pytest.raises(NotTileLocalError, match="repeats the column of a heads; a rope table's S rows"):
        trace(joined, normal(0, M, N), (table,))
    with pytest.raises(NotTileLocalError, match=r"operand 'cos' has shape \(5, 4\), which does not broadcast"):
        trace(lambda acc, cos: acc.reshape(M, -1, DIM).reshape(M, N) + cos[0, 0], normal(0, M, N), (jnp.ones((5, 4)),))


def test_a_count_does_not_go_along_a_tables_rows():
    def f(acc, table):
        of_rows = jnp.sum(table, axis=1) * jnp.arange(N, dtype=jnp.float32)[:ROWS]
        return (acc.reshape(M, -1, DIM) * jnp.tile(of_rows, BATCH)[:, None, None]).reshape(acc.shape)

    with pytest.raises(NotTileLocalError):
        trace(f, normal(0, M, N), (normal(1, ROWS, DIM),))


def test_symbolic_batch():
    (batch,) = export.symbolic_shape("batch")
    x = jax.ShapeDtypeStruct((batch, ROWS, K), jnp.float32)
    w, tables = normal(2, K, N), angles(ROWS, DIM // 2)

    def run(x, w, *tables):
        return coda.gemm(x, w, *tables, epilogue=rotary)

    exported = export.export(jax.jit(run), platforms=("cpu",))(x, w, *tables)
    x = normal(1, BATCH, ROWS, K)
    np.testing.assert_allclose(exported.call(x, w, *tables), run(x, w, *tables), rtol=1e-5, atol=1e-5)


def test_symbolic_rows_that_may_be_no_multiple():
    (m,) = export.symbolic_shape("m")

    def f(acc, table):
        (table,) = over_rows(acc, table)
        return (acc.reshape(acc.shape[0], -1, DIM) * table[:, None, :]).reshape(acc.shape)

    acc = jax.ShapeDtypeStruct((m, N), jnp.float32)
    with pytest.raises(NotTileLocalError, match=r"has shape \(4, 8\).*M = m is not known to be a multiple of 4"):
        trace(f, acc, (jnp.ones((ROWS, DIM)),))


@needs_nvrtc
def test_qkv_projection_passes_its_tables_as_they_are(monkeypatch):
    for module in (cuda, select):
        monkeypatch.setattr(module, "machine_reason", lambda: None)
    shapes = ((2, 24, 64), (2, 24), (64,), (64, 96), (24, 16), (24, 16))
    dtypes = (jnp.bfloat16, jnp.float32, *[jnp.bfloat16] * 2, *[jnp.float32] * 2)
    types = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]

    def project(x, sumsq, scale, *arguments):
        return coda.qkv_projection(coda.DeferredNorm(x, sumsq, scale), *arguments, num_heads=1, num_kv_heads=1)

    (call,) = calls(text(project, *types))
    assert operands_and_results(call)[0] == ["48x64xbf16", "64x96xbf16", "48x1xf32", "24x16xf32", "24x16xf32"]
