"""Settings of a test run: which tests, and a folder of its own for compiled programs, thrown away at the end."""

import atexit
import json
import os
import pathlib
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


GPU = pathlib.Path(__file__).with_name("gpu")
# CPU seconds of each file's tests, the mean of a test's parameters; tests that are not on record take none. Written by
# CODA_JAX_TEST_SECONDS=write make test, of all that can be in a sample, on a machine that does nothing else.
RECORD = pathlib.Path(__file__).with_name("seconds.json")
MOST_SECONDS = 2.5  # of a file's tests in make test
IS_WRITTEN = os.environ.get("CODA_JAX_TEST_SECONDS") == "write"


def pytest_sessionstart():
    from tests.requirements import unmet  # only now, since it imports jax

    if reasons := unmet():
        raise pytest.UsageError("CODA_JAX_TEST_REQUIRES asks for what is not here: " + "; ".join(reasons))


def pytest_ignore_collect(collection_path, config):
    """Leaves out tests/gpu where no kernel runs, but for files that the command line names: their tests are skipped."""
    return True if collection_path == GPU and _why_gpu_is_left_out(config) else None


def _why_gpu_is_left_out(config):
    """Empty also where the command line names other tests: asking for a GPU starts XLA in this process."""
    from tests.requirements import missing_hopper

    paths = (pathlib.Path(path).resolve() for path in config.args)
    is_among = any(path != GPU and GPU.is_relative_to(path) for path in paths)
    return (missing_hopper() or "") if is_among else ""


def pytest_collection_modifyitems(config, items):
    """Chooses the tests by two settings; all run where both are empty or unset.

    ``CODA_JAX_TEST_SAMPLE=i/n``: of the tests that are not marked slow, one in n of each test's parameters and at least
    one; other i, other ones. Of each file those that are marked smoke, with one of their parameters; and as many others
    as take `MOST_SECONDS` together on record, and at least one: first one parameter of each test, the quickest first.
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
    record = {} if IS_WRITTEN else json.loads(RECORD.read_text())
    groups = defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow") is None:
            groups[_test(item.nodeid)].append(item)
    files = defaultdict(list)
    for (file, test), group in groups.items():
        seconds = record.get(file, {}).get(test, 0)
        for i, item in enumerate(sorted(group, key=place)):
            if i == 0 and item.get_closest_marker("smoke"):
                yield item
            elif i == 0 or place(item) == 0:
                files[file].append((i, seconds, item))
    for tests in files.values():
        spent = 0
        for _, seconds, item in sorted(tests, key=lambda test: test[:2]):
            if not spent or spent + seconds <= MOST_SECONDS:
                spent += seconds
                yield item


def _test(nodeid):
    """Its file and its name, without parameters."""
    file, _, test = nodeid.partition("::")
    return file, test.split("[")[0]


def _slice(items):
    if os.environ.get("CODA_JAX_TEST_SLICE"):
        place = _fraction("CODA_JAX_TEST_SLICE")
        yield from (item for item in items if place(item) == 0)


# ---- what tests cost: a worker measures and its reports carry the figures; the process that gathers these sums them up

_spent = 0.0  # by this process and its children, up to its last report
_seconds = defaultdict(lambda: defaultdict(float))  # of a test, by its parameters


def pytest_runtest_logstart():
    global _spent
    _spent = sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    global _spent
    report = yield
    before, _spent = _spent, sum(os.times()[:4])
    report.cpu_seconds = _spent - before
    return report


def pytest_runtest_logreport(report):
    _seconds[_test(report.nodeid)][report.nodeid] += getattr(report, "cpu_seconds", 0)  # none of a worker that died


def pytest_terminal_summary(terminalreporter, config):
    """Says what is left out, and what the tests took; writes that where it is asked for."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    if reason := _why_gpu_is_left_out(config):
        terminalreporter.line(f"tests/gpu is left out: {reason}")
    of_all = sum(seconds for of_test in _seconds.values() for seconds in of_test.values())
    terminalreporter.line(f"{of_all:.0f} CPU seconds in {len(_seconds)} tests")
    if IS_WRITTEN:
        record = defaultdict(dict)
        for (file, test), of_test in _seconds.items():
            if (mean := sum(of_test.values()) / len(of_test)) >= 0.1:
                record[file][test] = round(mean, 1)
        RECORD.write_text(json.dumps(json.loads(RECORD.read_text()) | record, indent=0, sort_keys=True) + "\n")


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
        # JAX refuses them inside of another program, where coda.fuse uses what it has made outside, and derivatives of
        # its constraints are.
        is_kept = sys._getframe(1).f_globals["__name__"].startswith(("coda_jax.fusion", "coda_jax.graph"))
        if not (is_kept or isinstance(jnp.zeros(()), jax.core.Tracer)):
            options["compiler_options"] = {"xla_backend_optimization_level": 0}
        return jit(*args, **options)

    monkeypatch.setattr(jax, "jit", quick)
