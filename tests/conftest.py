"""Settings of the whole test run: kernels are cached in a folder of its own, thrown away at the end."""

import atexit
import functools
import os
import shutil
import tempfile
import zlib
from collections import defaultdict

import pytest

if "CODA_JAX_CACHE_DIR" not in os.environ:  # set before coda_jax is imported; pytest-xdist's workers inherit it
    folder = tempfile.mkdtemp(prefix="coda_jax-test-")
    os.environ["CODA_JAX_CACHE_DIR"] = folder
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
os.environ.setdefault("CODA_JAX_QUIET", "1")
for setting in ("CODA_JAX_TILES_BY", "CODA_JAX_STRICT"):  # the defaults are what is tested
    os.environ.pop(setting, None)
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")  # for shard_map; before jax starts its backends
if shutil.which("nvidia-smi") is None:  # most tests run a program once: optimising it takes longer
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"


def pytest_sessionstart():
    from tests.requirements import unmet  # only now, since it imports jax

    if reasons := unmet():
        raise pytest.UsageError("CODA_JAX_TEST_REQUIRES asks for what is not here: " + "; ".join(reasons))


def pytest_collection_modifyitems(config, items):
    """With CODA_JAX_TEST_SAMPLE=i/n one in n of each test's parameters, at least one; other i, other ones."""
    if "CODA_JAX_TEST_SAMPLE" not in os.environ:
        return
    index, count = map(int, os.environ["CODA_JAX_TEST_SAMPLE"].split("/"))

    def place(item):
        return (zlib.crc32(item.nodeid.encode()) - index) % count

    groups = defaultdict(list)
    for item in items:
        groups[item.nodeid.split("[")[0]].append(item)
    kept = {item for group in groups.values() for item in group if place(item) == 0 or item is min(group, key=place)}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


@pytest.fixture
def quick_to_compile(monkeypatch):
    """For programs that run once or twice: optimising them takes longer than running them."""
    import jax

    monkeypatch.setattr(jax, "jit", functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0}))
