"""Columns seen as heads, and slices of the columns as outputs of their own: rotary embedding in each spelling."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coda_jax as coda
from coda_jax.epilogue import NotTileLocalError, emit, evaluate, trace
from coda_jax.epilogue.operand_kinds import COLUMN_VECTOR, ROPE_TABLE
from tests.host_execution import HostPrograms

M = 5


def angles(rows, half):
    angle = jnp.arange(rows)[:, None] * 10.0 ** -jnp.linspace(0, 2, half)
    return jnp.cos(angle), jnp.sin(angle)


def turned(x, cos, sin, dim):
    """Halves taken apart and joined."""
    a, b = jnp.split(x.reshape(x.shape[0], -1, dim), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x.shape)


def turned_by_whole_tables(x, cos, sin, dim):
    """Hugging Face's spelling: x cos + rotate_half(x) sin with tables of Dh columns."""
    x = x.reshape(x.shape[0], -1, dim)
    rotated = jnp.concatenate([-x[..., dim // 2 :], x[..., : dim // 2]], axis=-1)
    return (x * cos[:, None, :] + rotated * sin[:, None, :]).reshape(x.shape[0], -1)


def turned_neighbours(x, cos, sin, dim):
    """Every second column taken and stacked."""
    x = x.reshape(x.shape[0], -1, dim)
    a, b = x[..., 0::2], x[..., 1::2]
    cos, sin = cos[:, None, :], sin[:, None, :]
    return jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x.shape[0], -1)


def turned_pairs(x, cos, sin, dim):
    """The same, the pairs along an axis of their own."""
    pairs = x.reshape(x.shape[0], -1, dim // 2, 2)
    a, b = pairs[..., 0], pairs[..., 1]
    cos, sin = cos[:, None, :], sin[:, None, :]
    both = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return both.reshape(x.shape[0], -1, dim).reshape(x.shape)


def neighbours_everywhere(acc, bias, tile, whole_table, column):
    y = (acc + bias) * tile
    heads = y.reshape(M, -1, 8) + whole_table[:, None, :]
    a, b = heads[..., 0::2], heads[..., 1::2]
    z = jnp.stack([a * b, b - a], axis=-1).reshape(acc.shape) + jnp.arange(acc.shape[1]) * column
    return z, jnp.sum(z, axis=0), jnp.sum(z, axis=1), y[:, :8], z[:, 8:]


def qkv(heads, kv_heads, dim):
    def rotary_qkv(acc, rstd, cos, sin):
        q, k, v = jnp.split(acc * rstd, [heads * dim, (heads + kv_heads) * dim], axis=1)
        return turned(q, cos, sin, dim), turned(k, cos, sin, dim), v

    return rotary_qkv


def qkv_by_heads(heads, kv_heads, dim):
    """The same, the parts taken along the axis of heads."""

    def rotary_qkv(acc, rstd, cos, sin):
        z = (acc * rstd).reshape(acc.shape[0], -1, dim)
        q, k, v = jnp.split(z, [heads, heads + kv_heads], axis=1)
        return [turned(x.reshape(M, -1), cos, sin, dim) if i < 2 else x.reshape(M, -1) for i, x in enumerate((q, k, v))]

    return rotary_qkv


def qkv_by_slices(heads, kv_heads, dim):
    """The same with slices, the first of which may be a half of all columns."""

    def rotary_qkv(acc, rstd, cos, sin):
        z, first, second = acc * rstd, heads * dim, (heads + kv_heads) * dim
        q, k, v = z[:, :first], z[:, first:second], z[:, second:]
        return turned(q, cos, sin, dim), turned(k, cos, sin, dim), v

    return rotary_qkv


def qkv_operands(dim):
    return (jnp.linspace(0.5, 2, M)[:, None], *angles(M, dim // 2))


def everything_in_heads(acc, bias, column, tile, table):
    """Every kind of operand, both reductions, indices, a rounded tile."""
    y = acc + bias + column * tile + jnp.arange(acc.shape[1])
    heads = y.reshape(M, -1, 8) * table[:, None, :]
    a, b = jnp.split(heads, 2, axis=-1)
    z = jnp.concatenate([a - b, a * b], axis=-1).reshape(acc.shape)
    return z.astype(jnp.bfloat16), jnp.sum(z, axis=1), jnp.max(y, axis=0), jnp.sum(heads * heads, axis=(1, 2))


def parts(acc, bias):
    """Parts without heads, one of them twice, beside the whole and its sum."""
    y = acc + bias
    return y[:, :8] * 2, y[:, 8:40], jnp.tanh(y[:, 8:40]), y[:, 40:], y, jnp.sum(y, axis=1)


CASES = {
    "half_tables": (48, lambda acc, c, s: turned(acc, c, s, 16), angles(M, 8)),
    "whole_tables": (
        48,
        lambda acc, c, s: turned_by_whole_tables(acc, c, s, 16),
        tuple(jnp.tile(x, (1, 2)) for x in angles(M, 8)),
    ),
    "bfloat16_tables": (
        48,
        lambda acc, c, s: turned(acc, c, s, 16),
        tuple(x.astype(jnp.bfloat16) for x in angles(M, 8)),
    ),
    "neighbours": (48, lambda acc, c, s: turned_neighbours(acc, c, s, 16), angles(M, 8)),
    "pairs": (48, lambda acc, c, s: turned_pairs(acc, c, s, 16), angles(M, 8)),
    "neighbours_everywhere": (
        24,
        neighbours_everywhere,
        (
            jnp.arange(24.0),
            jnp.linspace(-1, 1, M * 24).reshape(M, 24).astype(jnp.bfloat16),
            jnp.arange(M * 8.0).reshape(M, 8) / 9,
            jnp.linspace(0, 1, M)[:, None],
        ),
    ),
    "grouped": (8 * 8, qkv(4, 2, 8), qkv_operands(8)),
    "one_kv_head": (6 * 8, qkv(4, 1, 8), qkv_operands(8)),
    "one_head_each": (3 * 8, qkv(1, 1, 8), qkv_operands(8)),
    "along_heads": (8 * 8, qkv_by_heads(4, 2, 8), qkv_operands(8)),
    "slices": (8 * 8, qkv_by_slices(4, 2, 8), qkv_operands(8)),
    "uneven_slices": (7 * 8, qkv_by_slices(3, 2, 8), qkv_operands(8)),
    "everything": (
        24,
        everything_in_heads,
        (jnp.arange(24.0), jnp.ones((M, 1)), jnp.ones((M, 24), jnp.bfloat16), jnp.arange(M * 8.0).reshape(M, 8) / 9),
    ),
    "parts": (56, parts, (jnp.linspace(-1, 1, 56),)),
}


def qkv_of_pairs(heads, kv_heads, dim):
    def rotary_qkv(acc, rstd, cos, sin):
        q, k, v = jnp.split(acc * rstd, [heads * dim, (heads + kv_heads) * dim], axis=1)
        return turned_pairs(q, cos, sin, dim), turned_pairs(k, cos, sin, dim) + k, v

    return rotary_qkv


def table_first(acc, table):
    cos, sin = jnp.split(table, 2, axis=1)
    return turned(acc, cos, sin, 8)


CASES |= {
    "one_kv_head_of_pairs": (4 * 8, qkv_of_pairs(2, 1, 8), qkv_operands(8)),
    "one_head_of_pairs": (16, lambda acc, c, s: turned_pairs(acc, c, s, 16), angles(M, 8)),
    "two_parts_of_one_head": (16, lambda acc, c, s: (turned(acc[:, :8], c, s, 8), acc[:, 8:] * 2), angles(M, 4)),
    "table_first": (24, table_first, (jnp.concatenate(angles(M, 4), axis=1),)),
}


@pytest.mark.parametrize(
    "f",
    [
        lambda acc: tuple(jnp.split(acc - acc[:, :1], [8], axis=1)),
        lambda acc: (x := acc.reshape(M, 3, 8)) + x[:, 2:3],
        lambda acc: tuple(jnp.split(jax.nn.sigmoid(acc[:, -1:]) * acc, [8], axis=1)),
        lambda acc: tuple(jnp.split(acc * acc[:, 0][:, None], [8], axis=1)),
    ],
    ids=["first", "head", "last", "squeezed"],
)
def test_one_column_does_not_meet_all(f):
    """A value that is broadcast from a slice of the columns is in no other tile, and is refused."""
    with pytest.raises(NotTileLocalError, match="combines columns"):
        trace(f, acc_of(24), ())


def test_a_box_is_within_half_a_head():
    a, b = jnp.ones((M, 16), jnp.bfloat16), jnp.ones((16, 128), jnp.bfloat16)
    call = jax.jit(
        lambda *x: coda.gemm(
            *x,
            epilogue=lambda acc, c, s: turned(acc, c, s, 64),
            config=coda.GemmConfig(box_n=64),
            implementation="cuda",
        )
    )
    with pytest.raises((ValueError, NotImplementedError), match=r"box_n = 64 does not divide half a head of 64|NVRTC"):
        call.trace(a, b, *angles(M, 32)).lower(lowering_platforms=("cuda",))


def acc_of(n):
    return jax.random.normal(jax.random.key(n), (M, n))


@pytest.fixture(scope="module")
def on_the_host(tmp_path_factory):
    programs = [trace(f, acc_of(n), operands)[0].program for n, f, operands in CASES.values()]
    return HostPrograms(programs, tmp_path_factory.mktemp("heads"))


@pytest.mark.parametrize("name", CASES)
def test_program_and_generated_code(name, on_the_host):
    n, f, operands = CASES[name]
    acc = acc_of(n)
    expected = jax.tree.leaves(f(acc, *(x.astype(jnp.float32) for x in operands)))
    program = on_the_host.programs[list(CASES).index(name)]
    assert len(program.stores) == sum(x.ndim == 2 for x in expected)
    for outputs in (
        evaluate(program, acc, *operands),
        on_the_host.run(list(CASES).index(name), np.asarray(acc), [np.asarray(x) for x in operands]),
    ):
        for out, want in zip(outputs, expected, strict=True):
            assert out.shape == want.shape
            np.testing.assert_allclose(np.asarray(out, np.float32), want.astype(jnp.float32), rtol=1e-5, atol=1e-5)


def test_sections_of_equal_programs_share_their_code():
    n, f, operands = CASES["grouped"]
    program = trace(f, acc_of(n), operands)[0].program
    assert program.sections == ((0, 32), (32, 48), (48, 64))
    assert [o.kind for o in program.operands] == [COLUMN_VECTOR, ROPE_TABLE, ROPE_TABLE]
    assert program == trace(qkv_by_heads(4, 2, 8), acc_of(n), operands)[0].program


def test_sections_end_where_the_next_begins_whatever_is_stored_in_them():
    def slices_and_whole(acc):
        return acc[:, :48], acc[:, :32], acc

    program = trace(slices_and_whole, acc_of(64), ())[0].program
    assert program.sections == ((0, 32), (32, 48), (48, 64))
    for dtypes in itertools.permutations([np.dtype(jnp.bfloat16), np.dtype(np.float32), np.dtype(np.float16)]):
        text = re.search(r"Section section\[\] = (.*?);", emit(program, dtypes, ()), re.DOTALL)[1]
        assert list(map(int, re.findall(r"\.end = (\d+)", text))) == [32, 48, 64]
        assert list(map(int, re.findall(r"\.first = (\d+)", text))) == [32, 48]


def test_a_table_needs_heads():
    with pytest.raises(NotTileLocalError, match=r"operand 'table' has shape \(5, 8\), which does not broadcast"):
        trace(lambda acc, table: acc * table[:, :1], acc_of(32), (jnp.ones((M, 8)),))
    with pytest.raises(NotTileLocalError, match=r"operand 'table' has shape \(5, 4\).*nor against heads of Dh = 16"):
        trace(
            lambda acc, table: (acc.reshape(M, 2, 16) * table[:, :1, None]).reshape(M, 32),
            acc_of(32),
            (jnp.ones((M, 4)),),
        )


@pytest.mark.parametrize("residuals", ["preactivation", "recompute"])
def test_gradient_and_leading_axes(residuals):
    heads, kv_heads, dim = 4, 2, 8
    x, w = jax.random.normal(jax.random.key(1), (2, M, 16)), jax.random.normal(jax.random.key(2), (16, 64)) / 4
    rstd, cos, sin = qkv_operands(dim)
    rows = [jnp.broadcast_to(y, (2, *y.shape)) for y in (rstd, cos, sin)]
    epilogue = qkv(heads, kv_heads, dim)

    def fused(x, w, *rows):
        return coda.gemm(x, w, *rows, epilogue=epilogue, residuals=residuals)

    def plain(x, w, *rows):
        y = epilogue((x @ w).reshape(2 * M, 64), *(r.reshape(2 * M, -1) for r in rows))
        return tuple(z.reshape(2, M, -1) for z in y)

    got, pull = jax.vjp(jax.jit(fused), x, w, *rows)
    want, pull_plain = jax.vjp(plain, x, w, *rows)
    cotangents = tuple(jnp.cos(y) for y in want)
    for a, b in zip((*got, *pull(cotangents)), (*want, *pull_plain(cotangents)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_vmap():
    n, f, operands = CASES["grouped"]
    x, w = jax.random.normal(jax.random.key(1), (3, M, 16)), jax.random.normal(jax.random.key(2), (16, n))
    for axes in ((None, None, None), (0, 0, 0), (None, 0, None)):
        batch = [jnp.stack([y, y + 1, y + 2]) if axis == 0 else y for y, axis in zip(operands, axes, strict=True)]
        got = jax.vmap(lambda x, *o: coda.gemm(x, w, *o, epilogue=f), in_axes=(0, *axes))(x, *batch)
        for i in range(3):
            one = [y[i] if axis == 0 else y for y, axis in zip(batch, axes, strict=True)]
            for a, b in zip(got, f(x[i] @ w, *one), strict=True):
                np.testing.assert_allclose(a[i], b, rtol=1e-5, atol=1e-5)


def test_no_rows():
    x, w, cos, sin = jnp.ones((0, 16)), jnp.ones((16, 32)), jnp.ones((0, 8)), jnp.ones((0, 8))

    def f(acc, cos, sin):
        a, b = jnp.split(acc.reshape(acc.shape[0], 2, 16), 2, axis=-1)
        cos, sin = cos[:, None], sin[:, None]
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(acc.shape)

    y, pull = jax.vjp(lambda x, w: coda.gemm(x, w, cos, sin, epilogue=f), x, w)
    assert y.shape == (0, 32) and not pull(y)[1].any()


def test_nothing_is_accumulated_in_place_beside_parts():
    def f(acc, c):
        return acc + c, acc[:, :8]

    with pytest.raises(ValueError, match="beside outputs that are slices of the columns"):
        coda.gemm(
            *map(jnp.ones, [(M, 4), (4, 32), (M, 32)]),
            epilogue=f,
            out_dtype=jnp.float32,
            input_output_aliases={0: 0},
        )
