"""Settings of the whole test run: kernels are cached in a folder of its own, thrown away at the end."""

import atexit
import os
import shutil
import tempfile

import pytest

if "CODA_JAX_CACHE_DIR" not in os.environ:  # set before coda_jax is imported; pytest-xdist's workers inherit it
    folder = tempfile.mkdtemp(prefix="coda_jax-test-")
    os.environ["CODA_JAX_CACHE_DIR"] = folder
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
os.environ.setdefault("CODA_JAX_QUIET", "1")
os.environ.pop("CODA_JAX_TILES_BY", None)  # the default is what is tested
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "4")  # for shard_map; before jax starts its backends
if shutil.which("nvidia-smi") is None:  # most tests run a program once: optimising it takes longer
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"


def pytest_sessionstart():
    from tests.requirements import unmet  # only now, since it imports jax

    if reasons := unmet():
        raise pytest.UsageError("CODA_JAX_TEST_REQUIRES asks for what is not here: " + "; ".join(reasons))
