"""The one tolerance rule: twice the error of the plain formula in the same dtype, plus two units in the last place.

    max|out - reference| <= 2 max|plain - reference| + 2 ulp(max|reference|)

Everything finite, shapes and dtypes equal. `by_rows` judges each row by itself, for data whose rows differ in scale.

`check_erfc` is the error that `coda::erfc` states.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np


def ulp(magnitude: np.ndarray, dtype: Any) -> np.ndarray:
    """Distance to the next larger value of `dtype` at each magnitude."""
    info = jnp.finfo(dtype)
    exponent = np.floor(np.log2(np.maximum(np.asarray(magnitude, np.float64), float(info.tiny))))
    return np.exp2(exponent) * float(info.eps)


def check(
    out: Any, reference: Any, plain: Any, *, dtype: Any = None, by_rows: bool = False, name: str = "output"
) -> None:
    """Asserts the rule.

    Args:
      out: the result to judge.
      reference: the textbook formula in float64.
      plain: the textbook formula in the arguments' own dtypes.
      dtype: what `out` must have; None where the plain formula cannot have it and the caller looks at it.
      by_rows: judge each row (the first axis counts them) by its own errors and magnitude.
      name: for the message.
    """
    expected = np.dtype(out.dtype if dtype is None else dtype)
    assert np.dtype(out.dtype) == expected, f"{name}: dtype {out.dtype}, expected {expected}"
    assert out.shape == reference.shape == plain.shape, f"{name}: shapes {out.shape}, {reference.shape}, {plain.shape}"
    assert np.asarray(reference).dtype == np.float64, f"{name}: the reference is {np.asarray(reference).dtype}"
    exact, got, rough = (np.asarray(x).astype(np.float64) for x in (reference, out, plain))
    for label, array in (("reference", exact), (name, got), ("plain formula", rough)):
        not_finite = int((~np.isfinite(array)).sum())
        assert not not_finite, f"{name}: {label} has {not_finite} values that are not finite"
    if exact.size == 0:
        return
    error, rough_error = np.abs(got - exact), np.abs(rough - exact)
    axes = tuple(range(1, exact.ndim)) if by_rows else None

    def largest(x: np.ndarray) -> np.ndarray:
        return np.asarray(np.max(x, axis=axes, keepdims=True))

    allowed = np.broadcast_to(2 * largest(rough_error) + 2 * ulp(largest(np.abs(exact)), expected), exact.shape)
    wrong = error > allowed
    if wrong.any():
        worst = np.unravel_index(np.argmax(error / allowed), exact.shape)
        index = tuple(map(int, worst))
        raise AssertionError(
            f"{name}: {int(wrong.sum())} of {exact.size} values are wrong; worst at {index}: got {got[worst]:.9g}, "
            f"reference {exact[worst]:.9g}, error {error[worst]:.3g}, allowed {allowed[worst]:.3g} "
            f"(the plain formula errs by {rough_error[worst]:.3g} there)"
        )


def check_erfc(out: Any, x: Any) -> None:
    """Asserts that `out` is erfc(x) to the relative error that `coda::erfc` in cuda/elementwise.cuh states."""
    x = np.asarray(x, np.float64)
    assert np.max(np.abs(np.asarray(out, np.float64) / np.vectorize(math.erfc)(x) - 1) / (1 + x * x)) <= 8e-7
