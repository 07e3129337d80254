"""Importing: without GPU, driver or NVRTC, and quickly."""

import importlib.metadata
import os
import subprocess
import sys
from importlib import resources

import pytest


def run(code: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_opens_neither_driver_nor_nvrtc_nor_backend():
    out = run(
        "import coda_jax, coda_jax.ffi, jax\n"
        "maps = open('/proc/self/maps').read()\n"
        "from jax._src import xla_bridge\n"
        "print('libcuda' in maps, 'nvrtc' in maps, xla_bridge.backends_are_initialized())"
    )
    assert out.split() == ["False", "False", "False"]


def test_cpu_backend_starts_after_the_handler_is_registered():
    out = run("import coda_jax.ffi, jax.numpy as jnp; print(jnp.ones(3).sum())", JAX_PLATFORMS="cpu")
    assert out.strip() == "3.0"


def test_import_adds_little_to_that_of_jax():
    out = run(
        "import jax, jax.ffi, numpy, time; start = time.process_time(); import coda_jax.ffi; "
        "print(time.process_time() - start)"
    )
    assert float(out) < 0.5


@pytest.mark.parametrize("package", ["coda_jax", "flax_layers"])
def test_type_checkers_read_the_annotations(package):
    assert (resources.files(package) / "py.typed").is_file()


def test_public_names():
    import coda_jax

    assert callable(coda_jax.gemm)
    assert coda_jax.GemmConfig.__name__ == "GemmConfig"
    assert coda_jax.__version__ == importlib.metadata.version("coda-jax")
