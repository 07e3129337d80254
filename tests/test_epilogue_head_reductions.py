"""Reductions of each head that the epilogue goes on with: norms of heads, their softmax, with rotary embedding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coda_jax as coda
from coda_jax.epilogue import NotTileLocalError, emit, evaluate, trace
from coda_jax.epilogue.operand_kinds import HEAD_VECTOR
from coda_jax.epilogue.trace import _WIDEST_HEAD
from coda_jax.lowering.addressing import unsupported_reason
from coda_jax.primitives.spec import CallOptions, GemmSpec
from coda_jax.tiles.arch import SM90
from tests.host_execution import HostPrograms
from tests.test_epilogue_heads import acc_of, angles, turned, turned_neighbours

M, DIM, EPS = 5, 8, 1e-2
COS, SIN = angles(M, DIM // 2)
RSTD = jnp.linspace(0.5, 2, M)[:, None]
SCALE, OTHER = jnp.linspace(0.5, 2, DIM), jnp.linspace(-1, 1, DIM)


def in_heads(x):
    return x.reshape(x.shape[0], -1, DIM)


def rms_norm(x, scale):
    heads = in_heads(x)
    return (heads * jax.lax.rsqrt(jnp.mean(heads * heads, -1, keepdims=True) + EPS) * scale).reshape(x.shape)


def layer_norm(x, scale, bias):
    heads = in_heads(x)
    centred = heads - jnp.mean(heads, -1, keepdims=True)
    return (centred / jnp.sqrt(jnp.mean(centred**2, -1, keepdims=True) + EPS) * scale + bias).reshape(x.shape)


def qk_norm(heads, kv_heads, turn=turned):
    def qk_norm_rotary(acc, rstd, q_scale, k_scale, cos, sin):
        q, k, v = jnp.split(acc * rstd, [heads * DIM, (heads + kv_heads) * DIM], axis=1)
        return turn(rms_norm(q, q_scale), cos, sin, DIM), turn(rms_norm(k, k_scale), cos, sin, DIM), v

    return qk_norm_rotary


def norm_before_parts(acc, scale, cos, sin):
    """One norm for all heads, of which some are then turned."""
    z = rms_norm(acc, scale)
    return turned(z[:, : 2 * DIM], cos, sin, DIM), z[:, 2 * DIM :]


def everything(acc, bias, scalar, shift):
    """Reductions of rows and columns beside those of heads; a maximum spread over its head is a tile."""
    y = acc * scalar + bias
    largest = in_heads(y).max(-1, keepdims=True)
    spread = jnp.broadcast_to(largest, in_heads(y).shape).reshape(acc.shape)
    z = (in_heads(y) - largest + shift).reshape(acc.shape) + spread * 2
    return z, jnp.sum(z * spread, axis=1), jnp.sum(spread, axis=0)


def by_halves(acc, scale):
    """The halves of a head, each divided by the sum of the other's squares; half a scale."""
    a, b = jnp.split(in_heads(acc), 2, axis=-1)
    a, b = (x / (jnp.sum(y * y, -1, keepdims=True) + 1) * scale for x, y in ((a, b), (b, a)))
    return jnp.concatenate([a, b], axis=-1).reshape(acc.shape)


def sixteen_bits(acc):
    """Reductions of bfloat16 and of conditions."""
    heads = in_heads(acc).astype(jnp.bfloat16)
    positive = jnp.sum(heads > 0, -1, keepdims=True)
    some = jnp.any(heads > 1.5, -1, keepdims=True)
    low = jnp.min(heads, axis=-1, keepdims=True)
    return jnp.where(some, heads - low, heads * positive).astype(jnp.float32).reshape(acc.shape)


def log_softmax(acc):
    return (in_heads(acc) - coda.logsumexp(in_heads(acc), -1, keepdims=True)).reshape(acc.shape)


def pairs(acc, scale):
    """The same sum over the pairs of a head and over both of each."""
    x = acc.reshape(acc.shape[0], -1, DIM // 2, 2)
    rstd = jax.lax.rsqrt(jnp.sum(x * x, axis=(-2, -1), keepdims=True) + EPS)
    return (x * rstd).reshape(acc.shape[0], -1, DIM).reshape(acc.shape) * scale


def norm_backward(acc, z, scale):
    """The derivative of a norm: of its input, and of its scale, which is summed over rows and heads."""
    return jax.vjp(rms_norm, z, scale)[1](acc)


def over_rows(acc):
    """Each head's columns, and those of all heads, reduced over the rows."""
    heads = in_heads(acc)
    return heads.sum(0), heads.max((0, 1)), (heads * heads).min(axis=(0, 1), keepdims=True)


QK = (RSTD, SCALE, OTHER, COS, SIN)
CASES = {
    "norm": (4, rms_norm, (SCALE,)),
    "norm_of_two_heads": (2, rms_norm, (SCALE,)),  # a scale as wide as half of N
    "norm_of_one_head": (1, rms_norm, (SCALE,)),
    "layer_norm_of_one_head": (1, layer_norm, (SCALE, OTHER[None])),
    "softmax_of_one_head": (1, lambda acc: jax.nn.softmax(in_heads(acc), axis=-1).reshape(acc.shape), ()),
    "row_scale": (4, rms_norm, (SCALE[None].astype(jnp.bfloat16),)),
    "layer_norm": (4, layer_norm, (SCALE, OTHER[None])),
    "max_subtract": (4, lambda acc: (in_heads(acc) - in_heads(acc).max(-1, keepdims=True)).reshape(acc.shape), ()),
    "softmax": (4, lambda acc: jax.nn.softmax(in_heads(acc), axis=-1).reshape(acc.shape), ()),
    "log_softmax": (4, log_softmax, ()),
    "qk_norm": (8, qk_norm(4, 2), QK),
    "one_head_each": (3, qk_norm(1, 1), QK),
    "neighbours": (8, qk_norm(4, 2, turned_neighbours), QK),
    "before_parts": (4, norm_before_parts, (SCALE, COS, SIN)),
    "everything": (4, everything, (jnp.linspace(-1, 1, 4 * DIM), jnp.float32(3), SCALE)),
    "halves": (4, by_halves, (SCALE[: DIM // 2],)),
    "sixteen_bits": (4, sixteen_bits, ()),
    "pairs": (4, pairs, (jnp.linspace(-1, 1, 4 * DIM),)),
    "backward": (4, norm_backward, (acc_of(4 * DIM) * RSTD, SCALE)),
    "backward_of_one_head": (1, norm_backward, (acc_of(DIM) * RSTD, SCALE)),
    "over_rows": (4, over_rows, ()),
    "one_head_over_rows": (1, over_rows, ()),
    "of_a_table": (4, lambda acc, t: (in_heads(acc) * t.max(-1)[:, None, None]).reshape(acc.shape), (OTHER + RSTD,)),
}


@pytest.fixture(scope="module")
def on_the_host(tmp_path_factory):
    programs = [trace(f, acc_of(n * DIM), operands)[0].program for n, f, operands in CASES.values()]
    return HostPrograms(programs, tmp_path_factory.mktemp("head_reductions"))


@pytest.mark.parametrize("name", CASES)
def test_program_and_generated_code(name, on_the_host):
    heads, f, operands = CASES[name]
    acc, number = acc_of(heads * DIM), list(CASES).index(name)
    expected = jax.tree.leaves(f(acc, *(x.astype(jnp.float32) for x in operands)))
    program = on_the_host.programs[number]
    for outputs in (
        evaluate(program, acc, *operands),
        on_the_host.run(number, np.asarray(acc), [np.asarray(x) for x in operands]),
    ):
        for out, want in zip(outputs, expected, strict=True):
            assert out.shape == want.shape
            np.testing.assert_allclose(np.asarray(out, np.float32), want, rtol=1e-5, atol=1e-5)


def test_passes_over_a_head():
    """One for sums of the accumulator, one for the sums that need these; none where a part is not reduced."""

    def passes(name):
        heads, f, operands = CASES[name]
        program = trace(f, acc_of(heads * DIM), operands)[0].program
        text = emit(program, [np.dtype(np.float32)] * len(program.stores), [False] * len(operands))
        return next(line.split(" = ")[1] for line in text.splitlines() if "head_pass[]" in line)

    assert passes("layer_norm") == "{{0, 1}};"
    assert passes("qk_norm") == "{{0}, {0}, {-1}};"  # of queries, keys and values
    assert passes("before_parts") == "{{0}, {0}};"


def test_a_scale_of_heads_is_a_vector_of_a_head():
    for shape in ((DIM,), (1, DIM), (DIM // 2,)):
        f = by_halves if shape == (DIM // 2,) else rms_norm
        (epilogue, _) = trace(f, acc_of(4 * DIM), (jnp.ones(shape),))
        assert [o.kind for o in epilogue.program.operands] == [HEAD_VECTOR]
    captured = trace(lambda acc: rms_norm(acc, SCALE), acc_of(4 * DIM), ())[0].program
    assert [o.kind for o in captured.operands] == [HEAD_VECTOR]


@pytest.mark.parametrize(
    "f, operands, message",
    [
        (lambda acc: in_heads(acc).max(-1), (), r"output 0 has shape \(5, 4\), a value for each head"),
        (lambda acc: jnp.prod(in_heads(acc), -1), (), "reduce_prod"),
        (lambda acc: acc[:, :DIM].sum(1), (), "a reduction of a slice of the columns"),
        (lambda acc, scale: acc * scale[0], (jnp.ones(DIM),), r"operand 'scale' has shape \(8,\), which does not"),
        (
            lambda acc, scale: rms_norm(acc, scale[0]),
            (jnp.ones(DIM // 4),),
            r"operand 'scale' has shape \(2,\).*nor against heads of Dh = 8 .*\(Dh,\)",
        ),
        (rms_norm, (jnp.ones(DIM, jnp.int32),), "arrays over heads are bfloat16, float16 or float32"),
    ],
)
def test_refusals(f, operands, message):
    with pytest.raises(NotTileLocalError, match=message):
        trace(f, acc_of(4 * DIM), operands)


def test_heads_of_a_tile_operand_are_left_to_xla():
    def f(acc, x):
        return ((acc + x).reshape(-1, 2, 32) / (acc + x).reshape(-1, 2, 32).max(-1, keepdims=True)).reshape(acc.shape)

    a, b, x = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((16, 64), (64, 64), (16, 64)))
    program = trace(f, jax.ShapeDtypeStruct((16, 64), jnp.float32), (x,))[0].program
    spec = GemmSpec.of(CallOptions(), program, [jnp.bfloat16], "f")
    reason = unsupported_reason((a, b, x), spec)
    assert reason is not None and "operand 0: a reduction of each head depends on this tile" in reason
    arrays = [jax.random.normal(jax.random.key(i), s.shape, s.dtype) for i, s in enumerate((a, b, x))]
    got = coda.gemm(*arrays, epilogue=f)
    want = f(jnp.matmul(*arrays[:2], preferred_element_type=jnp.float32), arrays[2])
    np.testing.assert_allclose(got.astype(jnp.float32), want, rtol=1e-2)


@pytest.mark.slow
def test_gradient_vmap_and_leading_axes():
    x, w = jax.random.normal(jax.random.key(1), (2, M, 16)), jax.random.normal(jax.random.key(2), (16, 8 * DIM)) / 4
    rows = [jnp.broadcast_to(y, (2, *y.shape)) for y in (RSTD, COS, SIN)]
    epilogue = qk_norm(4, 2)

    def fused(x, w, rstd, cos, sin, q_scale, k_scale):
        return coda.gemm(x, w, rstd, q_scale, k_scale, cos, sin, epilogue=epilogue)

    def plain(x, w, rstd, cos, sin, q_scale, k_scale):
        rstd, cos, sin = (r.reshape(2 * M, -1) for r in (rstd, cos, sin))
        y = epilogue((x @ w).reshape(2 * M, -1), rstd, q_scale, k_scale, cos, sin)
        return tuple(z.reshape(2, M, -1) for z in y)

    arguments = (x, w, *rows, SCALE, OTHER)
    got, pull = jax.vjp(jax.jit(fused), *arguments)
    want, pull_plain = jax.vjp(plain, *arguments)
    cotangents = tuple(jnp.cos(y) for y in want)
    for a, b in zip((*got, *pull(cotangents)), (*want, *pull_plain(cotangents)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5)
    mapped = jax.vmap(lambda x, *o: coda.gemm(x, w, *o, epilogue=epilogue), (0, None, 0, None, None, None))
    got = mapped(x, RSTD, jnp.stack([SCALE, SCALE + 1]), OTHER, COS, SIN)
    for i in range(2):
        for a, b in zip(got, epilogue(x[i] @ w, RSTD, SCALE + i, OTHER, COS, SIN), strict=True):
            np.testing.assert_allclose(a[i], b, rtol=1e-5, atol=1e-5)


def test_one_row():
    """A vector of a head is taken for a table of one row where there is one, and lies along the heads all the same."""

    def f(acc, scale, bias):
        return layer_norm(acc, scale, bias)

    acc = jnp.linspace(-1, 2, 3 * DIM)[None]
    fused = coda.gemm(jnp.eye(1, 4), jnp.pad(acc, ((0, 3), (0, 0))), SCALE, OTHER[None], epilogue=f)
    np.testing.assert_allclose(fused, layer_norm(acc, SCALE, OTHER), rtol=1e-5, atol=1e-6)


def test_the_widest_head_that_is_tried_is_that_of_the_widest_tile():
    assert max(tile_n for _, tile_n in SM90.tiles) == _WIDEST_HEAD
