"""Settings of a test run: which tests, and a folder of its own for compiled programs, thrown away at the end."""

import atexit
import os
import shutil
import sys
import tempfile
import zlib
from collections import defaultdict

import pytest

# Set before coda_jax and jax are imported; pytest-xdist's workers inherit them.
if "CODA_JAX_CACHE_DIR" not in os.environ:
    folder = tempfile.mkdtemp(prefix="coda_jax-test-")
    os.environ["CODA_JAX_CACHE_DIR"] = folder
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
if sys.dont_write_bytecode:  # tests start processes: without bytecode each would compile all of JAX's sources anew
    sys.dont_write_bytecode = False
    sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = os.path.join(os.environ["CODA_JAX_CACHE_DIR"], "bytecode")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Most of a run is XLA's compiling, often of a program met before. A folder each worker: JAX writes entries in place.
os.environ["JAX_COMPILATION_CACHE_DIR"] = os.path.join(
    os.environ["CODA_JAX_CACHE_DIR"], f"xla-{os.environ.get('PYTEST_XDIST_WORKER', 'main')}"
)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
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
    """Chooses the tests by two settings; all run where both are empty or unset.

    ``CODA_JAX_TEST_SAMPLE=i/n``: of the tests that are not marked slow, one in n of each test's parameters and at least
    one; other i, other ones.
    ``CODA_JAX_TEST_SLICE=i/n``: one in n of all tests, the slow ones too. With both, what either chooses.
    """
    if not any(map(os.environ.get, ("CODA_JAX_TEST_SAMPLE", "CODA_JAX_TEST_SLICE"))):
        return
    chosen = {*_sample(items), *_slice(items)}
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def _fraction(setting):
    index, count = map(int, os.environ[setting].split("/"))
    return lambda item: (zlib.crc32(item.nodeid.encode()) - index) % count


def _sample(items):
    if not os.environ.get("CODA_JAX_TEST_SAMPLE"):
        return
    place = _fraction("CODA_JAX_TEST_SAMPLE")
    groups = defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow") is None:
            groups[item.nodeid.split("[")[0]].append(item)
    for group in groups.values():
        first = min(group, key=place)
        yield from (item for item in group if place(item) == 0 or item is first)


def _slice(items):
    if os.environ.get("CODA_JAX_TEST_SLICE"):
        place = _fraction("CODA_JAX_TEST_SLICE")
        yield from (item for item in items if place(item) == 0)


@pytest.fixture
def nothing_said_yet(monkeypatch):
    """As in a new process: each reason for a fallback is said once in one."""
    from coda_jax.primitives import fallbacks

    monkeypatch.setattr(fallbacks, "_reported", set())


@pytest.fixture
def quick_to_compile(monkeypatch):
    """For programs that run once or twice: optimising them takes longer than running them."""
    import jax
    import jax.numpy as jnp

    jit = jax.jit

    def quick(*args, **options):
        if not isinstance(jnp.zeros(()), jax.core.Tracer):  # JAX refuses them inside of another program
            options["compiler_options"] = {"xla_backend_optimization_level": 0}
        return jit(*args, **options)

    monkeypatch.setattr(jax, "jit", quick)
