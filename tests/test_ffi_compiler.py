"""The compiler: NVRTC on a pool of threads, errors, progress, and the cache on disk that processes share."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from coda_jax import ffi
from tests.nvrtc import needs_nvrtc

pytestmark = needs_nvrtc

KERNEL = 'extern "C" __global__ void coda_gemm(float* x) { x[threadIdx.x] *= FACTOR; }'


def source(factor: int) -> str:
    return KERNEL.replace("FACTOR", f"{factor}.0f")


def slow_source(seed: int) -> str:
    """A kernel that takes NVRTC some 0.5 s: hundreds of different functions."""
    steps = "\n".join(f"x[{i}] = sinf(x[{i}] * {i + seed}.5f) + powf(x[{i + 1}], {seed}.25f);" for i in range(40))
    return f'extern "C" __global__ void coda_gemm(float* x) {{ {steps} }}'


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty compiler on an empty folder; `cache()` again is as a new process on the same folder."""
    folder = tmp_path / "cache"

    def restart(**settings) -> pathlib.Path:
        monkeypatch.setenv("CODA_JAX_CACHE_DIR", str(folder))
        ffi._configure(**settings)
        return folder

    restart()
    yield restart
    monkeypatch.undo()
    ffi._configure()


def child(code: str, folder: pathlib.Path, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "CODA_JAX_CACHE_DIR": str(folder), **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen) -> tuple[str, str]:
    """What a child printed; one that hangs is killed."""
    try:
        return process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise


def entries(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(folder.glob("*.kernel"))


def test_cubin_and_log(cache):
    compiled = ffi.compile(source(2), "gemm[test]")
    assert compiled.cubin.startswith(b"\x7fELF")
    assert "0 bytes spill stores" in compiled.log
    assert not compiled.cached
    assert ffi.compile(source(2), "gemm[test]").cubin == compiled.cubin


def test_includes_the_kernel_headers(cache):
    name = next(iter(ffi.headers()))
    with pytest.raises(RuntimeError, match="no_such_header"):
        ffi.compile('#include "no_such_header.cuh"', "gemm[test]")
    assert ffi.compile(f'#include "{name}"\n' + source(2), "gemm[test]").cubin


def test_compile_error_names_operator_and_shows_log(cache):
    with pytest.raises(RuntimeError, match=r"gemm\[broken\].*sm_90a") as caught:
        ffi.compile("__global__ void f() { undeclared = 1; }", "gemm[broken]")
    assert 'identifier "undeclared" is undefined' in str(caught.value)
    assert "gemm[broken].cu(1)" in str(caught.value)


def test_second_process_reads_the_first_ones_entry(cache):
    first = ffi.compile(source(2), "gemm[test]")
    cache()
    second = ffi.compile(source(2), "gemm[test]")
    assert second.cached
    assert (second.cubin, second.log, second.seconds) == (first.cubin, first.log, first.seconds)


@pytest.mark.parametrize("where", ["magic", "checksum", "cubin", "log", "sizes"])
def test_damaged_entry_is_rebuilt(cache, where):
    first = ffi.compile(source(2), "gemm[test]")
    folder = cache()
    (entry,) = entries(folder)
    data = bytearray(entry.read_bytes())
    data[{"magic": 0, "checksum": 9, "cubin": 40 + len(first.cubin) // 2, "log": -3, "sizes": 18}[where]] ^= 0x10
    entry.write_bytes(data)
    rebuilt = ffi.compile(source(2), "gemm[test]")
    assert not rebuilt.cached
    assert rebuilt.cubin == first.cubin
    cache()
    assert ffi.compile(source(2), "gemm[test]").cached


@pytest.mark.parametrize("keep", [0, 7, 39, 41, -1])
def test_truncated_entry_is_rebuilt(cache, keep):
    first = ffi.compile(source(2), "gemm[test]")
    folder = cache()
    (entry,) = entries(folder)
    entry.write_bytes(entry.read_bytes()[:keep])
    rebuilt = ffi.compile(source(2), "gemm[test]")
    assert not rebuilt.cached
    assert rebuilt.cubin == first.cubin


def test_least_recently_used_entries_are_evicted(cache):
    folder = cache()
    ffi.compile(source(0), "gemm[test]")
    bytes_each = entries(folder)[0].stat().st_size
    ffi.compile(source(1), "gemm[test]")
    ffi.compile(source(2), "gemm[test]")
    for age, number in ((300, 0), (200, 1), (100, 2)):
        (entry,) = folder.glob(ffi.kernel_key(source(number)) + "*")
        os.utime(entry, (time.time() - age, time.time() - age))
    cache(cache_limit_bytes=3 * bytes_each + bytes_each // 2)
    assert ffi.compile(source(0), "gemm[test]").cached  # a use: number 1 is now the oldest
    ffi.compile(source(3), "gemm[test]")
    left = {path.name.partition("-")[0] for path in entries(folder)}
    assert left == {ffi.kernel_key(source(number)) for number in (0, 2, 3)}


def test_abandoned_temporary_file_is_removed_and_a_fresh_one_kept(cache):
    folder = cache()
    folder.mkdir()
    old, fresh = folder / "a.1.0.temporary", folder / "b.1.0.temporary"
    old.write_bytes(b"x")
    fresh.write_bytes(b"x")
    os.utime(old, (time.time() - 7200, time.time() - 7200))
    ffi.compile(source(2), "gemm[test]")
    assert not old.exists()
    assert fresh.exists()


def test_unwritable_folder_means_no_cache(tmp_path, monkeypatch):
    blocker = tmp_path / "file"
    blocker.write_text("not a folder")
    for folder in (str(blocker / "cache"), ""):
        monkeypatch.setenv("CODA_JAX_CACHE_DIR", folder)
        for _ in range(2):
            ffi._configure()
            assert not ffi.compile(source(2), "gemm[test]").cached
    monkeypatch.undo()
    ffi._configure()


def test_default_folder_follows_the_platform(monkeypatch):
    monkeypatch.delenv("CODA_JAX_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert ffi.cache_directory() == "/somewhere/coda_jax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/user")
    assert ffi.cache_directory() == "/home/user/.cache/coda_jax"


RACE = """
    import sys
    from coda_jax import ffi
    sys.stdin.readline()
    for i in range(6):
        compiled = ffi.compile(f'extern "C" __global__ void coda_gemm(float* x) {{ x[0] *= {i}.5f; }}', "gemm[race]")
        assert compiled.cubin.startswith(b"\\x7fELF")
    print("done")
"""


def test_processes_race_for_the_same_entries(tmp_path):
    processes = [child(RACE, tmp_path) for _ in range(4)]
    for process in processes:  # all have started by the time the first goes on
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        out, err = finish(process)
        assert out == "done\n", err
    assert len(entries(tmp_path)) == 6
    assert not list(tmp_path.glob("*.temporary"))


def test_killed_process_leaves_no_bad_entry(tmp_path, cache):
    code = """
        from coda_jax import ffi
        print("ready", flush=True)
        for i in range(10**6):
            ffi.compile(f'extern "C" __global__ void coda_gemm(float* x) {{ x[0] *= {i}.5f; }}', "gemm[kill]")
    """
    for wait in (0.05, 0.16, 0.27):
        process = child(code, tmp_path / "cache")
        assert process.stdout.readline() == "ready\n"
        time.sleep(wait)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    cache()
    for i in range(12):
        text = f'extern "C" __global__ void coda_gemm(float* x) {{ x[0] *= {i}.5f; }}'
        assert ffi.compile(text, "gemm[kill]").cubin.startswith(b"\x7fELF")


def runnable_threads() -> int:
    """Threads of this process that run or wait for a core, the calling one aside."""
    count = 0
    for task in pathlib.Path("/proc/self/task").iterdir():
        if task.name == str(threading.get_native_id()):
            continue
        with contextlib.suppress(FileNotFoundError):  # it has ended meanwhile
            count += task.joinpath("stat").read_text().rpartition(")")[2].split()[0] == "R"
    return count


def test_cold_kernels_compile_side_by_side(cache):
    """Counts threads that want a core: that does not depend on how busy the machine is, as time does."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core")
    ffi.compile(source(1), "gemm[warm]")  # opens NVRTC
    for i in range(4):
        ffi.compile_async(slow_source(i), "gemm[slow]")
    waiting = threading.Thread(target=lambda: [ffi.compile(slow_source(i), "gemm[slow]") for i in range(4)])
    waiting.start()
    samples = []
    while waiting.is_alive():
        samples.append(runnable_threads())
        time.sleep(0.005)
    waiting.join()
    assert len(samples) > 20
    assert sum(count >= 2 for count in samples) > 0.6 * len(samples), samples


def test_a_job_is_compiled_once_however_often_it_is_queued(cache, capfd, monkeypatch):
    monkeypatch.setenv("CODA_JAX_QUIET", "0")
    cache()
    for _ in range(20):
        ffi.compile_async(slow_source(3), "gemm[once]")
    ffi.compile(slow_source(3), "gemm[once]")
    assert capfd.readouterr().err == "coda_jax: compiling gemm[once] for sm_90a\n"
    cache()
    ffi.compile(slow_source(3), "gemm[once]")  # from disk: silent
    assert capfd.readouterr().err == ""


def test_progress_says_how_many_wait(tmp_path):
    code = """
        from coda_jax import ffi
        text = 'extern "C" __global__ void coda_gemm(float* x) { x[0] *= %d.5f; }'
        for i in range(20):
            ffi.compile_async(text % i, f"gemm[{i}]")
        for i in range(20):
            ffi.compile(text % i, f"gemm[{i}]")
    """
    _, err = finish(child(code, tmp_path, CODA_JAX_QUIET="0"))
    lines = err.splitlines()
    assert len(lines) == 20
    assert all(line.startswith("coda_jax: compiling gemm[") for line in lines)
    assert any(line.endswith(" queued)") for line in lines)
    _, err = finish(child(code, tmp_path / "other", CODA_JAX_QUIET="1"))
    assert err == ""


def test_exit_with_a_full_queue_is_quick_and_clean(tmp_path):
    code = """
        from coda_jax import ffi
        for i in range(500):
            ffi.compile_async(f'extern "C" __global__ void coda_gemm(float* x) {{ x[0] *= {i}.5f; }}', "gemm[exit]")
    """
    process = child(code, tmp_path)
    _, err = finish(process)
    assert process.returncode == 0, err
    assert err == ""
    assert len(entries(tmp_path)) < 250
    assert not list(tmp_path.glob("*.temporary"))


def test_child_forked_between_compilations_compiles(tmp_path):
    code = """
        import os
        from coda_jax import ffi
        text = 'extern "C" __global__ void coda_gemm(float* x) { x[0] *= %d.5f; }'
        ffi.compile(text % 0, "gemm[fork]")
        pid = os.fork()
        ok = all(ffi.compile(text % i, "gemm[fork]").cubin for i in range(4))
        if pid == 0:
            os._exit(0 if ok else 1)
        print(os.waitpid(pid, 0)[1])
    """
    out, err = finish(child(code, tmp_path))
    assert out == "0\n", err


def test_dump_folder_gets_source_log_and_image(tmp_path, monkeypatch):
    monkeypatch.setenv("CODA_JAX_DUMP_DIR", str(tmp_path))
    ffi._configure()
    compiled = ffi.compile(source(2), "gemm[shown]")
    stem = tmp_path / f"gemm_shown_-{ffi.kernel_key(source(2))[:12]}"
    assert stem.with_suffix(".cu").read_text() == source(2)
    assert stem.with_suffix(".log").read_text() == compiled.log
    assert stem.with_suffix(".cubin").read_bytes() == compiled.cubin
    monkeypatch.undo()
    ffi._configure()


def test_missing_nvrtc_gives_a_reason(tmp_path):
    code = """
        import pathlib
        from coda_jax import ffi
        ffi._nvrtc_libraries = lambda: [("", "/nonexistent/libnvrtc.so.13")]
        ffi._configure()
        print(ffi.unavailable_reason())
        try:
            ffi.compile("", "gemm[test]")
        except RuntimeError as error:
            assert str(error) == ffi.unavailable_reason()
            print("raised")
    """
    out, err = finish(child(code, tmp_path))
    assert "NVRTC was not found" in out, err
    assert "/nonexistent/libnvrtc.so.13" in out
    assert out.endswith("raised\n")


def test_nvrtc_is_searched_in_cuda_home(tmp_path, monkeypatch):
    library = tmp_path / "lib64"
    library.mkdir()
    for name in ("libnvrtc.so.13", "libnvrtc.so.13.0.88", "libnvrtc.so.12.9", "libnvrtc-builtins.so.13.0"):
        (library / name).touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert (str(library / "libnvrtc-builtins.so.13.0"), str(library / "libnvrtc.so.13.0.88")) in ffi._nvrtc_libraries()


def test_failed_job_is_tried_again(cache, tmp_path):
    """What was missing may be there the second time."""
    missing = tmp_path / "late.cuh"
    text = f'#include "{missing}"\n' + source(3)
    with pytest.raises(RuntimeError, match=r"late\.cuh"):
        ffi.compile(text, "gemm[test]")
    missing.write_text("")
    assert ffi.compile(text, "gemm[test]").cubin
