"""Rounding to the floats of 8 bits: by XLA's form and by the kernel's functions on the host, bit for bit ml_dtypes."""

import ctypes
import pathlib
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coda_jax.epilogue import dtypes
from coda_jax.epilogue.rounding import round_to
from coda_jax.epilogue.saturate import saturate_p

ROOT = pathlib.Path(__file__).resolve().parents[1]
FP8 = (jnp.float8_e4m3fn, jnp.float8_e5m2)


def edges(dtype):
    """All values of the dtype, all that lie halfway between two, their neighbours in float32; and others anywhere."""
    values = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    values = np.unique(values[np.isfinite(values)])
    beyond = [2 * values[-1], np.inf, 3e38, 1e-40, 5.9e-8]
    halfway = np.concatenate([values, (values[1:] + values[:-1]) / 2, values * 1.0625, beyond, np.negative(beyond)])
    halfway = halfway.astype(np.float32)
    near = [np.nextafter(halfway, np.float32(to), dtype=np.float32) for to in (-np.inf, np.inf)]
    anywhere = np.arange(0, 2**32, 99991, dtype=np.uint64).astype(np.uint32).view(np.float32)
    return np.concatenate([halfway, *near, anywhere, np.float32([0.0, -0.0, np.nan, -np.nan])])


def expected(x, dtype):
    with np.errstate(invalid="ignore"):
        return x.astype(dtype)


@pytest.mark.parametrize("dtype", FP8)
def test_by_xla(dtype):
    x = edges(dtype)
    rounded = jax.jit(lambda x: round_to(x, np.dtype(dtype)))(x)
    assert rounded.dtype == dtype
    np.testing.assert_array_equal(np.asarray(rounded).view(np.uint8), expected(x, dtype).view(np.uint8))


@pytest.mark.parametrize("dtype", FP8)
def test_xla_keeps_it(dtype):
    """XLA keeps the rounding where the dtype is at once left again."""
    x = edges(dtype)
    rounded = jax.jit(lambda x: round_to(x, np.dtype(dtype)).astype(jnp.float32))(x)
    np.testing.assert_array_equal(rounded, expected(x, dtype).astype(np.float32))


@pytest.mark.parametrize("dtype", FP8)
def test_in_memory_a_gpu_converts_at_once(dtype):
    """tests/gpu/test_fp8_results.py shows that both ways give the same values on a GPU."""

    def lowered(in_memory, platform):
        function = jax.jit(lambda x: saturate_p.bind(x, dtype=np.dtype(dtype), in_memory=in_memory))
        return function.trace(jnp.ones(8)).lower(lowering_platforms=(platform,)).as_text()

    assert "reduce_precision" not in lowered(True, "cuda")
    assert all("reduce_precision" in lowered(*of) for of in ((False, "cuda"), (True, "cpu"), (False, "cpu")))


@pytest.mark.parametrize("dtype", FP8)
def test_by_the_kernel(tmp_path, dtype):
    """The form that the host compiles."""
    function = dtypes.row_of(dtype).rounding
    (tmp_path / "rounding.cc").write_text(
        '#include "elementwise.cuh"\n'
        f'extern "C" void rounded(int n, float* x) {{ for (int i = 0; i < n; ++i) x[i] = {function}(x[i]); }}\n'
    )
    library, source = tmp_path / "rounding.so", tmp_path / "rounding.cc"
    options = ["-std=c++20", "-O2", "-shared", "-fPIC", f"-I{ROOT / 'cuda'}"]
    subprocess.run(["g++", *options, "-o", str(library), str(source)], check=True)
    x = edges(dtype)
    rounded = x.copy()
    ctypes.CDLL(str(library)).rounded(len(x), rounded.ctypes.data_as(ctypes.c_void_p))
    np.testing.assert_array_equal(rounded, expected(x, dtype).astype(np.float32))
    np.testing.assert_array_equal(np.signbit(rounded), np.signbit(x))
