"""Epilogues with operands for the tests of coda.gemm, and their comparison with the textbook formula in float64."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import coda_jax as coda
from tests import tolerance


@dataclasses.dataclass(frozen=True)
class Case:
    """An epilogue and its operands' shapes and dtypes by (m, n); dtype None is that of a.

    `maximum`: which output is a maximum, and along which axis. Its gradient is compared where the largest two differ.
    """

    name: str
    epilogue: Callable[..., Any] | None
    operands: Callable[[int, int], Sequence[tuple[tuple[int, ...], Any]]] = lambda m, n: ()
    maximum: tuple[int, int] | None = None

    def __str__(self) -> str:
        return self.name


def residual_sumsq(acc, x):
    y = acc + x
    return y, jnp.sum(y * y, axis=1)


def bias_gelu_max(acc, bias):
    y = jax.nn.gelu(acc + bias)
    return y, jnp.max(acc + bias, axis=1)


def swiglu(acc, rstd):
    gate, up = jnp.split(acc * rstd, 2, axis=1)
    return jax.nn.silu(gate) * up


def swiglu_backward(acc, z, rstd):
    gate, up = jnp.split(z, 2, axis=1)
    sigmoid = jax.nn.sigmoid(gate)
    dy, _ = jnp.split(acc, 2, axis=1)
    dgate, dup = dy * up * (sigmoid + gate * sigmoid * (1 - sigmoid)), dy * gate * sigmoid
    dz = jnp.concatenate([dgate, dup], axis=1)
    return {"dz": dz * rstd, "y": gate * sigmoid * up, "s": jnp.sum(dz * z, axis=1)}


def gated_backward(acc, z, rstd):
    gate, up = jnp.split(z, 2, axis=1)
    sigmoid = jax.nn.sigmoid(gate)
    dz = jnp.concatenate([acc * up * (sigmoid + gate * sigmoid * (1 - sigmoid)), acc * gate * sigmoid], axis=1)
    return {"dz": dz * rstd, "y": gate * sigmoid * up, "s": jnp.sum(dz * z, axis=1)}


def scaled(acc, scale, column, row):
    y = jnp.tanh(acc * scale + column) * row
    return y, jnp.mean(y, axis=0), jnp.sum(y)


def masked(acc, keep, labels, x):
    columns = jax.lax.broadcasted_iota(jnp.int32, acc.shape, 1)
    y = jnp.where(keep, acc, 0.5 * acc * x)
    return y, jnp.sum(jnp.where(columns == labels, y, 0.0), axis=1)


def cross_entropy(acc, rstd, labels):
    z = acc * rstd
    column = jax.lax.broadcasted_iota(jnp.int32, z.shape, 1)
    return jax.nn.logsumexp(z, axis=1) - jnp.sum(jnp.where(column == labels, z, 0), axis=1)


def half_operands(acc, bias, x):
    first, second = jnp.split(acc, 2, axis=1)
    return first * second + x * bias, jnp.sum(first * x, axis=0)


def column_maximum(acc, x):
    return acc * x, jnp.max(acc, axis=0), jnp.min(acc * acc, axis=1)


CASES = [
    Case("identity", None),
    Case("residual_sumsq", residual_sumsq, lambda m, n: [((m, n), None)]),
    Case("bias_gelu_max", bias_gelu_max, lambda m, n: [((n,), jnp.float32)], maximum=(1, 1)),
    Case("swiglu", swiglu, lambda m, n: [((m, 1), jnp.float32)]),
    Case("swiglu_backward", swiglu_backward, lambda m, n: [((m, n), None), ((m, 1), jnp.float32)]),
    Case("gated_backward", gated_backward, lambda m, n: [((m, 2 * n), None), ((m, 1), jnp.float32)]),
    Case("scaled", scaled, lambda m, n: [((), jnp.float32), ((m, 1), None), ((1, n), jnp.float32)]),
    Case("masked", masked, lambda m, n: [((n,), jnp.bool_), ((m, 1), jnp.int32), ((m, n), jnp.float32)]),
    Case("cross_entropy", cross_entropy, lambda m, n: [((m, 1), jnp.float32), ((m, 1), jnp.int32)]),
    Case("half_operands", half_operands, lambda m, n: [((n // 2,), None), ((m, n // 2), None)]),
]


def random(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Normal floats, integers from 0 to 7, or booleans."""
    if dtype == jnp.bool_:
        return jnp.asarray(rng.integers(0, 2, shape).astype(bool))
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.asarray(rng.integers(0, 8, shape).astype(dtype))
    return jnp.asarray(rng.standard_normal(shape).astype(dtype))


def arguments(case: Case, m: int, n: int, k: int, dtype: Any, *, transpose_a=False, transpose_b=False, seed=0) -> list:
    """a, b and the operands of a case, random-normal; the product has unit variance."""
    rng = np.random.default_rng(seed)
    a = rng.standard_normal((k, m) if transpose_a else (m, k))
    b = rng.standard_normal((n, k) if transpose_b else (k, n)) / np.sqrt(k)
    operands = [random(rng, shape, dtype if own is None else own) for shape, own in case.operands(m, n)]
    return [jnp.asarray(a.astype(dtype)), jnp.asarray(b.astype(dtype)), *operands]


def textbook(case: Case, transpose_a=False, transpose_b=False) -> Callable[..., Any]:
    """The formula in whatever dtype its arguments have; products of 16-bit arrays are rounded, as users write them."""

    def formula(a, b, *operands):
        acc = (a.T if transpose_a else a) @ (b.T if transpose_b else b)
        return acc if case.epilogue is None else case.epilogue(acc, *operands)

    return formula


def is_floating(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def as_float64(x: Any) -> Any:
    x = np.asarray(x)
    return x.astype(np.float64) if is_floating(x) else x


# Quick to compile; and without excess precision, which would skip the roundings that 16-bit dtypes ask for.
COMPILER_OPTIONS = {"xla_allow_excess_precision": False, "xla_backend_optimization_level": 0}
jit = functools.partial(jax.jit, compiler_options=COMPILER_OPTIONS)


def pullback(function: Callable[..., Any], arguments: Sequence[Any], cotangents: Any) -> Callable[[], Any]:
    """(outputs, cotangents of the floating arguments) of function, jitted; cotangents take the outputs' dtypes."""
    floating = [i for i, x in enumerate(arguments) if is_floating(x)]

    @jit
    def run(arguments, cotangents):
        def of_floating(*varied):
            given = dict(zip(floating, varied, strict=True))
            return jax.tree.leaves(function(*(given.get(i, x) for i, x in enumerate(arguments))))

        outputs, vjp = jax.vjp(of_floating, *(arguments[i] for i in floating))
        return outputs, vjp([ct.astype(x.dtype) for ct, x in zip(cotangents, outputs, strict=True)])

    return lambda: run(list(arguments), list(cotangents))


def compare(
    case: Case, args: Sequence[jax.Array], *, by_rows=False, transpose_a=False, transpose_b=False, **options
) -> None:
    """Outputs and every cotangent of coda.gemm against the textbook formula in float64."""
    a = args[0]

    def fused(a, b, *operands):
        return coda.gemm(
            a, b, *operands, epilogue=case.epilogue, transpose_a=transpose_a, transpose_b=transpose_b, **options
        )

    formula = textbook(case, transpose_a, transpose_b)
    shapes = jax.tree.leaves(jax.eval_shape(fused, *args))
    m, n = (a.shape[1] if transpose_a else a.shape[0]), (args[1].shape[0] if transpose_b else args[1].shape[1])
    rng = np.random.default_rng(17)
    cotangents = [random(rng, x.shape, x.dtype) for x in shapes]
    if case.maximum:
        output, axis = case.maximum
        cotangents[output] = cotangents[output] * _distinct(formula, args, axis, a.dtype)

    outputs, gradients = pullback(fused, args, cotangents)()
    rough_outputs, rough_gradients = pullback(formula, args, cotangents)()
    with jax.enable_x64(True):
        exact_outputs, exact_gradients = pullback(
            formula, [jnp.asarray(as_float64(x)) for x in args], [as_float64(ct) for ct in cotangents]
        )()
    for i, (got, exact, rough) in enumerate(zip(outputs, exact_outputs, rough_outputs, strict=True)):
        tile = got.shape in ((m, n), (m, n // 2), (m, 2 * n))
        dtype = a.dtype if tile else jnp.float32
        rows = by_rows and got.ndim > 0 and got.shape[0] == m
        tolerance.check(got, exact, rough, dtype=dtype, by_rows=rows, name=f"{case} output {i}")
    floating = [x for x in args if is_floating(x)]
    for i, (x, got, exact, rough) in enumerate(zip(floating, gradients, exact_gradients, rough_gradients, strict=True)):
        rows = by_rows and x.ndim == 2 and x.shape[0] == m
        tolerance.check(got, exact, rough, dtype=x.dtype, by_rows=rows, name=f"{case} cotangent {i}")


def _distinct(formula: Callable[..., Any], args: Sequence[jax.Array], axis: int, dtype: Any) -> jax.Array:
    """1 where the two largest values of acc + bias differ by more than rounding can hide."""
    a, b, bias = (np.asarray(x).astype(np.float64) for x in args[:3])
    largest = np.sort(a @ b + bias, axis=axis)
    gap = np.take(largest, -1, axis) - np.take(largest, -2, axis)
    return jnp.asarray(gap > 8 * tolerance.ulp(np.abs(largest).max(), dtype), jnp.float32)


def total(outputs: Any) -> jax.Array:
    """A scalar to differentiate, with different weights for all elements."""
    leaves = jax.tree.leaves(outputs)
    return sum(jnp.vdot(jnp.cos(jnp.arange(x.size, dtype=jnp.float32)), x.astype(jnp.float32).ravel()) for x in leaves)


def assert_close(got: Any, want: Any, rtol: float = 2e-5) -> None:
    """Equal types, and equal values up to the order of float32 sums."""
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol * max(1.0, float(jnp.abs(y).max(initial=0))))
