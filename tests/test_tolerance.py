"""The tolerance rule itself: what it lets pass and what it does not."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.tolerance import check, ulp

REFERENCE = np.linspace(-2.0, 3.0, 60).reshape(6, 10)
PLAIN = REFERENCE.astype(jnp.bfloat16)


def test_ulp_is_the_distance_to_the_next_value():
    for dtype in (np.float32, np.float16, np.float64):
        values = np.array([1.0, 1.5, 2.0, 3.9, 1e-3, 60000.0], dtype)
        np.testing.assert_array_equal(ulp(values.astype(np.float64), dtype), np.spacing(values).astype(np.float64))
    assert ulp(np.float64(1.0), jnp.bfloat16) == 2.0**-7


def test_rounded_once_passes():
    check(PLAIN, REFERENCE, PLAIN, dtype=jnp.bfloat16)


def test_zeros_in_one_row_fail():
    out = PLAIN.copy()
    out[2] = 0
    with pytest.raises(AssertionError, match=r"9 of 60 values are wrong; worst at \(2, 9\): got 0"):
        check(out, REFERENCE, PLAIN)


def test_error_beyond_twice_the_plain_one_fails():
    worst = np.abs(PLAIN.astype(np.float64) - REFERENCE).max()
    out = REFERENCE.copy()
    out[1, 3] += 2 * worst + 2 * 2.0**-6 * 1.01
    with pytest.raises(AssertionError, match=r"1 of 60 .* worst at \(1, 3\)"):
        check(out, REFERENCE, PLAIN.astype(np.float64), dtype=np.float64)
    out = REFERENCE.copy()
    out[1, 3] += 1.9 * worst
    check(out, REFERENCE, PLAIN.astype(np.float64), dtype=np.float64)


def test_by_rows_sees_a_small_row():
    scales = np.logspace(-3, 3, 6)[:, None]
    reference = REFERENCE * scales
    plain = reference.astype(np.float32)
    out = plain.copy()
    out[0] = 0
    check(out, reference, reference.astype(jnp.bfloat16))
    with pytest.raises(AssertionError, match=r"worst at \(0, "):
        check(out, reference, plain, by_rows=True)


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (PLAIN[:5], "shapes"),
        (PLAIN.astype(np.float32), "dtype float32, expected bfloat16"),
        (np.full_like(PLAIN, np.nan), "60 values that are not finite"),
    ],
)
def test_shape_dtype_and_finiteness(out, message):
    with pytest.raises(AssertionError, match=message):
        check(out, REFERENCE, PLAIN, dtype=jnp.bfloat16)


def test_empty_arrays_pass():
    check(np.zeros((0, 4), np.float32), np.zeros((0, 4)), np.zeros((0, 4), np.float32))
