"""Each operation of the epilogue language: the generated visitor, run on the host, against the JAX function."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import coda_jax as coda
from coda_jax import ffi
from coda_jax.epilogue import emit, evaluate, trace
from coda_jax.tiles.arch import SM90
from tests.host_execution import HostPrograms
from tests.tolerance import check_erfc

M, N = 24, 16
F = N // 2


def _spread(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Normal values, with zeros, ties at halves, large, small and non-finite ones among them."""
    x = rng.normal(size=shape).astype(np.float32) * 2
    special = np.array(
        [0.0, -0.0, 0.5, 1.5, -2.5, 1.0, -1.0, 60.0, -60.0, 1e-6, np.inf, -np.inf, np.nan, 3e38], np.float32
    )
    x.flat[: special.size] = special
    return x


RNG = np.random.default_rng(0)
ACC = _spread(RNG, (M, N))
X = np.flipud(_spread(RNG, (M, N))).copy()
BF16 = jnp.asarray(RNG.normal(size=(M, N)), jnp.bfloat16)
F16 = jnp.asarray(RNG.normal(size=(M, F)), jnp.float16)
ROW = RNG.normal(size=(N,)).astype(np.float32)
ROW_INT = RNG.integers(-5, 5, size=(1, N)).astype(np.int32)
HALF_ROW = RNG.normal(size=(1, F)).astype(np.float32)
COLUMN = RNG.normal(size=(M, 1)).astype(np.float32)
WIDE = jnp.asarray(RNG.normal(size=(M, 2 * N)), jnp.bfloat16)
WIDE_ROW = RNG.normal(size=(2 * N,)).astype(np.float32)
MASK = RNG.integers(0, 2, size=(M, 1)).astype(bool)
SCALAR = np.float32(1.7)
COUNT = np.int32(3)

UNARY = [
    "exp", "exp2", "log", "log1p", "expm1", "sin", "cos", "tan", "tanh", "sinh", "cosh", "asin", "acos", "atan",
    "asinh", "acosh", "atanh", "logistic", "erf", "erfc", "rsqrt", "sqrt", "cbrt", "abs", "neg", "sign", "floor",
    "ceil", "square", "is_finite",
]  # fmt: skip
BINARY = ["add", "sub", "mul", "div", "rem", "max", "min", "atan2", "eq", "ne", "lt", "le", "gt", "ge"]
ACTIVATIONS = [
    "silu", "relu", "relu6", "softplus", "leaky_relu", "elu", "celu", "selu", "sigmoid", "hard_tanh", "hard_silu",
    "log_sigmoid", "soft_sign", "mish", "squareplus", "hard_sigmoid",
]  # fmt: skip

Case = tuple[Callable[..., Any], tuple[Any, ...]]


def number(x):
    """Booleans and integers are returned as floats, since tiles are."""
    return x.astype(jnp.float32)


def tame(a):
    return jnp.clip(jnp.nan_to_num(a), -3, 3)


def _cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for name in UNARY:
        cases[name] = (lambda a, name=name: number(getattr(lax, name)(a)), ())
    for name in BINARY:
        cases[name] = (lambda a, x, name=name: number(getattr(lax, name)(a, x)), (X,))
    for name in ACTIVATIONS:
        cases[name] = (getattr(jax.nn, name), ())
    return cases | _expressions() | _derivatives() | _halves() | _reductions()


def _expressions() -> dict[str, Case]:
    def small(a):
        return jnp.clip(jnp.nan_to_num(a), -100, 100)

    def integers(a):
        return small(a).astype(jnp.int32)

    return {
        "round_even": (lambda a: jnp.round(a), ()),
        "round_away": (lambda a: lax.round(a, lax.RoundingMethod.AWAY_FROM_ZERO), ()),
        "clamp": (lambda a: lax.clamp(-1.0, a, 2.0), ()),
        "clip": (lambda a, s: jnp.clip(a, -s, s), (SCALAR,)),
        "integer_pow": (lambda a: a**3 + a**7 - a**2 + a**-2 + a**-5 + a**0, ()),
        "pow": (lambda a, x: jnp.abs(a) ** 2.5 + 2.0**a + jnp.abs(a) ** x, (X,)),
        "pow_int": (lambda a, c: lax.pow(a, jnp.broadcast_to(c, a.shape)), (COUNT,)),
        "logical": (lambda a, x: number(((a > 0) & (x > 0)) | ~(a < 1) ^ (x == a)), (X,)),
        "where": (lambda a, x: jnp.where(a > x, a * 2, x), (X,)),
        "where_scalar": (lambda a, s: jnp.where(s > 1, a, 0.0), (SCALAR,)),
        "select": (lambda a: jnp.select([a > 1, a > 0, a > -1], [a, a * 2, a * 3], -7.0), ()),
        "select_n": (lambda a: lax.select_n(integers(a) % 3, a, a + 1, a + 2), ()),
        "integer_arithmetic": (
            lambda a, r: number(
                (integers(a) * 3 - r) // 2 + integers(a) % 5 - abs(r) + jnp.sign(integers(a)) * -(r**2)
            ),
            (ROW_INT,),
        ),
        "integer_division": (lambda a, r: number(lax.div(integers(a), jnp.broadcast_to(r, a.shape))), (ROW_INT,)),
        "integer_remainder": (lambda a, r: number(lax.rem(integers(a), jnp.broadcast_to(r, a.shape))), (ROW_INT,)),
        "integer_bits": (lambda a: number((integers(a) & 6) | (integers(a) ^ 3) + ~integers(a)), ()),
        "integer_limits": (
            lambda a, r: number(jnp.maximum(integers(a), r) - jnp.minimum(r, 2) + jnp.clip(r, -2, 3)),
            (ROW_INT,),
        ),
        "to_int": (lambda a: number(small(a * 3).astype(jnp.int32)), ()),
        "bool_casts": (lambda a, m: number(a.astype(bool)) + m * 2 + number(m.astype(jnp.int32)), (MASK,)),
        "bool_limits": (lambda a, m: number(jnp.maximum(a > 0, m)) - number(jnp.minimum(a > 0, m)), (MASK,)),
        "row_and_column_index": (
            lambda a: (
                a * 0
                + lax.broadcasted_iota(jnp.int32, a.shape, 0) * 100
                + lax.broadcasted_iota(jnp.float32, a.shape, 1)
            ),
            (),
        ),
        "causal_mask": (lambda a: jnp.where(jnp.arange(M)[:, None] >= jnp.arange(N), a, -jnp.inf), ()),
        "arange": (
            lambda a: a + (jnp.arange(N) % 4 == 0) * 2.0 + jnp.sqrt(jnp.arange(M, dtype=jnp.float32))[:, None],
            (),
        ),
        "constants": (lambda a: a * 0.1 + 1e-30 - 1e30 + (-0.0) + np.pi + jnp.float32(1 / 3), ()),
        "infinities": (lambda a: jnp.where(a > 5, jnp.inf, jnp.where(a < -5, -jnp.inf, jnp.nan)), ()),
        "floor_divide": (lambda a: a // 0.75, ()),
        "modulo": (lambda a: a % 0.75, ()),
        "nan_to_num": (lambda a: jnp.nan_to_num(a), ()),
        "logaddexp": (lambda a, x: jnp.logaddexp(a, x), (X,)),
        "hypot": (lambda a, x: jnp.hypot(a / 4, x / 4), (X,)),
        "log2": (lambda a: jnp.log2(a), ()),
        "log10": (lambda a: jnp.log10(a), ()),
        "sinc": (lambda a: jnp.sinc(small(a) / 50), ()),
        "stop_gradient": (lambda a: lax.stop_gradient(a) * 2, ()),
        "barrier": (lambda a: lax.optimization_barrier(a) * 2, ()),
        "checkpoint": (lambda a: jax.checkpoint(lambda x: jnp.sin(x) * x)(a), ()),
        "reduce_precision": (lambda a: lax.reduce_precision(a, 8, 7) + lax.reduce_precision(a, 8, 23), ()),
        "astype_bf16": (lambda a: a.astype(jnp.bfloat16).astype(jnp.float32) - a, ()),
        "astype_f16": (lambda a: (a * 1e-4).astype(jnp.float16).astype(jnp.float32) + a.astype(jnp.float16), ()),
        "arithmetic_bf16": (lambda a, x: a.astype(jnp.bfloat16) * x.astype(jnp.bfloat16) + 1, (X,)),
        "widening_multiply": (
            lambda a, x: lax.mul(a.astype(jnp.bfloat16), x.astype(jnp.bfloat16), out_dtype=jnp.float32),
            (X,),
        ),
        "silu_bf16": (lambda a: jax.nn.silu(a.astype(jnp.bfloat16)), ()),
        "bf16_to_f16": (lambda a: a.astype(jnp.bfloat16).astype(jnp.float16), ()),
        "int_to_bf16": (lambda a: integers(a * 100).astype(jnp.bfloat16), ()),
        "clip_bf16": (lambda a: jnp.clip(a.astype(jnp.bfloat16), -1, 1), ()),
        "operand_kinds": (lambda a, t, r, c, s, m: (a + t) * r + c * s * m, (BF16, ROW, COLUMN, SCALAR, MASK)),
        "scalar_kinds": (lambda a, s, t, u: a * s + t * u, (SCALAR, SCALAR.reshape(1), SCALAR.reshape(1, 1))),
        "unused_operands": (lambda a, t, r, c, s: a * c, (BF16, ROW, COLUMN, SCALAR)),
        "vmap_inside": (lambda a, r: jax.vmap(lambda row: row * r)(a), (ROW,)),
        "squeeze_expand": (lambda a, c, r: (a[None] + c[:, 0][:, None] * r[None, :])[0], (COLUMN, ROW)),
        "gelu_tanh": (lambda a: jax.nn.gelu(a, approximate=True), ()),
        "gelu_erf": (lambda a: jax.nn.gelu(a, approximate=False), ()),
        "jit_of_jit": (lambda a: jax.jit(lambda x: jax.jit(jnp.sin)(x) + ROW)(a), ()),
    }


def _derivatives() -> dict[str, Case]:
    """The cases of derivatives: jax.vjp of an epilogue yields an epilogue."""

    def vjp(f: Callable[..., Any]) -> Callable[..., Any]:
        return lambda a, ct, *x: jax.vjp(f, a, *x)[1](ct)

    def gated(a):
        gate, up = jnp.split(a, 2, axis=1)
        return jax.nn.silu(gate) * up

    def sums(a, c, s):
        return jax.vjp(lambda x: (x.sum(1), (x * x).sum()), a)[1]((c[:, 0], s))

    return {
        "vjp_silu": (vjp(jax.nn.silu), (X,)),
        "vjp_gelu": (lambda a, ct: vjp(jax.nn.gelu)(a, jnp.clip(ct, -100, 100)), (X,)),  # 2 * ct is finite
        "vjp_relu": (vjp(jax.nn.relu), (X,)),
        "vjp_softplus": (vjp(jax.nn.softplus), (X,)),
        "vjp_max": (vjp(lambda a: jnp.maximum(a, 0.5)), (X,)),
        "vjp_gated": (vjp(gated), (F16.astype(jnp.float32),)),
        "vjp_half": (vjp(lambda a: a[:, :F] * 2), (F16.astype(jnp.float32),)),
        "vjp_upper_half": (vjp(lambda a: a[:, F:] ** 2), (F16.astype(jnp.float32),)),
        "vjp_concatenate": (vjp(lambda a: jnp.concatenate(jnp.split(a, 2, axis=1)[::-1], axis=1)), (X,)),
        "vjp_vectors": (vjp(lambda a, r, c: a * r + c), (np.nan_to_num(X, posinf=3, neginf=-3) % 3, ROW, COLUMN)),
        "vjp_sums": (sums, (COLUMN, SCALAR)),
        "vjp_astype": (lambda a, ct: vjp(lambda x: x.astype(jnp.bfloat16))(a, ct.astype(jnp.bfloat16)), (BF16,)),
    }


def _halves() -> dict[str, Case]:
    def everything(a, x, r, h):
        a = tame(a) + x.astype(jnp.float32)
        gate, up = jnp.split(a * r, 2, axis=1)
        out = jax.nn.silu(gate) * up + h
        return {
            "half": out,
            "tile": jnp.concatenate([up, gate * 2], axis=1),
            "row": jnp.sum(out * h, axis=1),
            "row_full": jnp.max(a, axis=1, keepdims=True),
            "column": jnp.sum(a, axis=0),
            "column_half": jnp.min(up, axis=0),
            "mean": jnp.mean(a),
        }

    def rotate(a, cos, sin):
        x, y = a[:, :F], a[:, F:]
        return jnp.concatenate([x * cos - y * sin, y * cos + x * sin], axis=-1)

    def gated_backward(a, z, c):  # of silu(gate) * up, at dy = a
        gate, up = jnp.split(z, 2, axis=1)
        s = jax.nn.sigmoid(gate)
        dz = jnp.concatenate([a * up * (s + gate * s * (1 - s)), a * gate * s], axis=1)
        return dz * c, gate * s * up, jnp.sum(dz * z, axis=1), jnp.sum(dz, axis=0), jnp.max(dz)

    return {
        "twice_as_wide": (gated_backward, (WIDE, COLUMN)),
        "doubled": (lambda a, r: jnp.concatenate([a, a * r], axis=1), (ROW,)),
        "doubled_rows": (lambda a, w, r: jnp.concatenate([a * r, a], axis=1) * w, (WIDE_ROW, ROW)),
        "doubled_index": (lambda a, w: w * jnp.arange(2 * N) + jnp.concatenate([a, a + jnp.arange(N)], 1), (WIDE,)),
        "wide_captured": (lambda a: a + WIDE[:, N:].astype(jnp.float32), ()),
        "halves": (everything, (BF16, ROW, F16)),
        "rotary_halves": (rotate, (HALF_ROW, HALF_ROW[0] + 1)),
        "half_index": (lambda a: a[:, F:] + jnp.arange(F) + jnp.arange(N)[F:], ()),
        "half_index_2d": (lambda a: a[:, :F] * lax.broadcasted_iota(jnp.int32, (M, F), 1), ()),
        "half_row_only": (lambda a, h: jnp.concatenate([a[:, :F] * h, a[:, F:]], axis=1), (HALF_ROW,)),
        "add_to_half": (lambda a, h: a.at[:, F:].add(h), (F16,)),
        "finish_with_scatter": (lambda a: jnp.zeros(M + 2).at[1:-1].add(jnp.sum(tame(a), axis=1)), ()),
        "pad_half": (
            lambda a: jnp.pad(a[:, :F], ((0, 0), (F, 0))) + jnp.pad(a[:, F:], ((0, 0), (0, F)), constant_values=2),
            (),
        ),
        "constant_half": (lambda a: (jnp.concatenate([a[:, :F], jnp.ones((M, F))], axis=1), jnp.zeros((M, F))), ()),
    }


def _reductions() -> dict[str, Case]:
    return {
        "row_sums": (lambda a: (a, jnp.sum(tame(a), axis=1), jnp.sum(tame(a) ** 2, axis=-1, keepdims=True)), ()),
        "row_limits": (lambda a: (jnp.max(a, axis=1), jnp.min(tame(a), axis=1), jnp.max(tame(a))), ()),
        "column_sums": (
            lambda a, x: (jnp.sum(tame(a) * tame(x), axis=0), jnp.mean(tame(a), axis=0), jnp.min(tame(x))),
            (X,),
        ),
        "finish": (lambda a: lax.rsqrt(jnp.mean(tame(a) ** 2, axis=1, keepdims=True) + 1e-6), ()),
        "finish_with_operands": (
            lambda a, c, r: (jnp.sum(tame(a), axis=1) * c[:, 0], jnp.sum(a * 0 + 1, axis=0) / r),
            (COLUMN, ROW),
        ),
        "finish_anything": (
            lambda a, c: jnp.cumsum(jnp.sort(jnp.sum(tame(a), axis=0))) + jnp.linalg.norm(c),
            (COLUMN,),
        ),
        "count": (
            lambda a: (jnp.sum(a > 0, axis=1), jnp.count_nonzero(a), jnp.sum(jnp.where(a <= 0, 1, 0), axis=0)),
            (),
        ),
        "any_all": (lambda a: (jnp.any(a > 3, axis=1), jnp.all(a > -3, axis=0), jnp.any(a > 1e9)), ()),
        "sum_of_bf16": (lambda a: jnp.sum(tame(a).astype(jnp.bfloat16), axis=1), ()),
        "max_of_bf16": (lambda a: jnp.max(a.astype(jnp.bfloat16), axis=0), ()),
        "masked_sum": (lambda a, m: jnp.sum(tame(a), axis=1, where=m), (MASK,)),
        "logsumexp": (
            lambda a: (coda.logsumexp(a), jax.nn.logsumexp(tame(a) * 20, axis=1), coda.logsumexp(a, 1, keepdims=True)),
            (),
        ),
        "logsumexp_of_the_tile": (lambda a: (jax.nn.logsumexp(tame(a)), coda.logsumexp(coda.logsumexp(a), 0)), ()),
        "logsumexp_by_hand": (
            lambda a, c: (lambda m: (jnp.log(jnp.sum(jnp.exp(a - m), axis=1, keepdims=True)) + m) * c)(
                jnp.max(a, axis=1, keepdims=True)
            ),
            (COLUMN,),
        ),
        "logsumexp_spread_over_columns": (
            lambda a, c: (
                jnp.broadcast_to(c, a.shape)
                + jnp.broadcast_to(jnp.log(jnp.sum(jnp.exp(tame(a) - c), axis=1, keepdims=True)), a.shape)
            ),
            (COLUMN,),
        ),
        "logsumexp_of_halves": (
            lambda a, h: (
                coda.logsumexp(jnp.concatenate([a[:, F:] * 2, a[:, :F]], axis=1)),
                coda.logsumexp(a[:, :F] * h),
            ),
            (HALF_ROW,),
        ),
        "logsumexp_masked": (
            lambda a, m: (
                jax.nn.logsumexp(jnp.where(m & (jnp.arange(N) < 5), a, -jnp.inf), axis=-1),
                coda.logsumexp(jnp.where(m, tame(a), jnp.finfo(jnp.float32).min)),
            ),
            (MASK,),
        ),
        "logsumexp_of_bf16": (lambda a: coda.logsumexp(tame(a).astype(jnp.bfloat16)), ()),
        "initial_max": (lambda a: jnp.max(tame(a), axis=1, initial=1.0), ()),
        "outer": (lambda a, r, c: (r * c, jnp.sum(r * c, axis=1)), (ROW, COLUMN)),
        "passed_through": (lambda a, t, r, c: (t, r, c, 3.0, a), (X, ROW, COLUMN)),
        "only_operands": (lambda a, r: jnp.sum(r) + jnp.max(r * 2), (ROW,)),
        "shared_sum": (lambda a: (jnp.sum(tame(a), axis=1), jnp.mean(tame(a), axis=1), jnp.sum(tame(a))), ()),
        "nested_outputs": (lambda a: {"x": [a, (a * 2, None)], "y": jnp.sum(tame(a), axis=0)}, ()),
    }


CASES = _cases()
# Absolute or relative error of single operations; XLA's own approximations differ by a few units in the last place.
TOLERANCE = 4e-6
CANCELLING = {"vjp_gelu": 3e-5}  # 1 + tanh(x) for x near -3


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """For each case: the epilogue, and flat outputs of f, evaluate, Program.evaluate and the generated visitor."""
    traced, arguments = {}, {}
    for name, (f, operands) in CASES.items():
        traced[name], captured = trace(f, ACC, operands)
        arguments[name] = [np.asarray(x) for x in (*operands, *captured)]
    programs = HostPrograms([epilogue.program for epilogue in traced.values()], tmp_path_factory.mktemp("host"))

    def plain(name: str, acc: Any, arguments: Any) -> list[Any]:
        f, operands = CASES[name]
        operands = [
            x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in arguments[: len(operands)]
        ]
        return jax.tree.leaves(f(acc, *operands))

    # XLA may drop the rounding to 16 bits from the plain function, but not from operations run one by one.
    rounds = [name for name, epilogue in traced.items() if "float16 " in epilogue.program.elementwise_text]

    def everything(acc: Any, arguments: Any) -> Any:
        return {
            name: (
                [] if name in rounds else plain(name, acc, arguments[name]),
                epilogue.call(acc, *arguments[name]),
                evaluate(epilogue.program, acc, *arguments[name]),
            )
            for name, epilogue in traced.items()
        }

    jitted = jax.jit(everything, compiler_options={"xla_backend_optimization_level": 0})(ACC, arguments)
    out = {}
    for number, (name, epilogue) in enumerate(traced.items()):
        expected, evaluated, reference = jitted[name]
        if name in rounds:
            expected = plain(name, jnp.asarray(ACC), list(map(jnp.asarray, arguments[name])))
        generated = programs.run(number, ACC, arguments[name])
        out[name] = epilogue, expected, evaluated, reference, generated
    return out


def _agree(actual: Any, expected: Any, dtype: Any, name: str, absolute: float) -> None:
    assert actual.shape == expected.shape, name
    # A value on the edge between two 16-bit numbers may round either way after float32 operations that differ in the
    # last place.
    tolerance = {"bfloat16": 2**-6, "float16": 2**-10}.get(np.dtype(dtype).name, TOLERANCE)
    x, y = np.asarray(actual, np.float32), np.asarray(expected, np.float32)
    np.testing.assert_allclose(x, y, rtol=tolerance, atol=absolute, err_msg=name)


@pytest.mark.parametrize("name", CASES)
def test_against_jax(name, results):
    epilogue, plain, evaluated, reference, generated = results[name]
    absolute = CANCELLING.get(name, TOLERANCE)
    assert len(plain) == len(evaluated) == len(reference) == len(generated) == len(epilogue.out_avals)
    for i, expected in enumerate(plain):
        expected = jnp.asarray(expected)
        where = f"{name} output {i}"
        assert reference[i].dtype == evaluated[i].dtype == epilogue.out_avals[i].dtype == expected.dtype, where
        _agree(evaluated[i], expected, expected.dtype, f"{where}, evaluate", absolute)
        _agree(reference[i], evaluated[i], expected.dtype, f"{where}, program", absolute)
        _agree(generated[i], evaluated[i], expected.dtype, f"{where}, generated", absolute)


def test_erfc_is_as_exact_as_its_comment_says(tmp_path):
    x = np.linspace(-6, 9, 1 << 16, dtype=np.float32).reshape(256, 256)
    program = trace(lax.erfc, x, ())[0].program
    (out,) = HostPrograms([program], tmp_path).run(0, x, [])
    check_erfc(out, x)


def test_every_program_compiles_for_hopper_without_spills():
    if reason := ffi.unavailable_reason():
        pytest.skip(reason)
    parts = ['#include "epilogue_abi.cuh"\n']
    for i, (f, operands) in enumerate(CASES.values()):
        program = trace(f, ACC, operands)[0].program
        text = emit(program, [np.dtype(np.float32)] * len(program.stores), [False] * len(program.operands))
        parts.append(f"namespace p{i} {{\n{text}}}\n")
        parts.append(
            f"using Epilogue{i} = coda::CompleteEpilogue<p{i}::Epilogue>;\n"
            f'extern "C" __global__ void run_{i}(const Epilogue{i}::Element* in, Epilogue{i}::Result* out) '
            f"{{ p{i}::Epilogue::evaluate<0>(in[threadIdx.x], out[threadIdx.x]); }}\n"
        )
    log = ffi.compile("".join(parts), "operations", SM90.target).log
    assert log.count("Compiling entry function") == len(CASES)
    assert set(re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", log)) == {"0"}
