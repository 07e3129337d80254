"""A program that another process lowered: from an export, and from JAX's persistent compilation cache.

Both meet a process that never lowered it, so nothing has queued its kernel: instantiate has to compile it.
"""

import os
import pathlib
import subprocess
import sys

import pytest

from tests.nvrtc import needs_nvrtc

pytestmark = needs_nvrtc

COMMON = """
import sys, pathlib
import jax, jax.numpy as jnp
from jax import export
from coda_jax import ffi

stages = ffi._ffi.handlers()[ffi.TARGET]
ffi.TARGET = "coda_gemm_on_cpu"
jax.ffi.register_ffi_target(ffi.TARGET, stages, platform="cpu")
args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((256, 64), (64, 128))]
path = pathlib.Path(sys.argv[1])

@jax.jit
def product(a, b):
    return ffi.gemm_call(
        [a, b], [jax.ShapeDtypeStruct((256, 128), jnp.bfloat16)], ffi.GemmCall(
            name="gemm[elsewhere]", source='extern "C" __global__ void coda_gemm(float* x) { x[0] = 1; }', maps=[],
            pointers=[0, 1, 2], transpose_a=False, transpose_b=False, tile_m=128, tile_n=128, halves=1, cluster_m=1,
            arch="sm_90a", threads=128, smem_bytes=0,
        )
    )
"""
EXPORT = """
check = [export.DisabledSafetyCheck.custom_call(ffi.TARGET)]
path.write_bytes(export.export(product, platforms=["cpu"], disabled_checks=check)(*args).serialize())
"""
LOAD = """
exported = export.deserialize(bytearray(path.read_bytes()))
jax.jit(exported.call).lower(*args).compile()
"""
COMPILE = """
jax.monitoring.register_event_listener(lambda event, **_: print(event, file=sys.stderr))
product.lower(*args).compile()
"""
HIT = "/jax/compilation_cache/cache_hits"


def run(code: str, argument: pathlib.Path, kernels: pathlib.Path, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", COMMON + code, str(argument)],
        env={**os.environ, "CODA_JAX_CACHE_DIR": str(kernels), "CODA_JAX_QUIET": "0", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stderr


@pytest.mark.slow
def test_export_runs_in_a_fresh_process(tmp_path):
    assert "compiling" not in run(EXPORT, tmp_path / "program", tmp_path / "kernels")
    assert "compiling gemm[elsewhere]" in run(LOAD, tmp_path / "program", tmp_path / "kernels")
    assert "compiling" not in run(LOAD, tmp_path / "program", tmp_path / "kernels")  # now on disk


def test_persistent_compilation_cache(tmp_path):
    environment = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "xla"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    first = run(COMPILE, tmp_path, tmp_path / "kernels", **environment)
    assert "compiling gemm[elsewhere]" in first
    assert HIT not in first
    # now the program comes from JAX's cache; its kernel is compiled where the kernel cache is gone
    second = run(COMPILE, tmp_path, tmp_path / "other", **environment)
    assert "compiling gemm[elsewhere]" in second
    assert HIT in second
