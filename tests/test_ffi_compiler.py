"""The compiler: NVRTC on a pool of threads, errors, progress."""

import contextlib
import os
import pathlib
import threading
import time

import pytest

from coda_jax import ffi
from coda_jax.tiles.arch import SM90
from tests.compiler_cases import child, empty_compiler, entries, finish, slow_source, source
from tests.nvrtc import needs_nvrtc

pytestmark = needs_nvrtc


@pytest.fixture
def cache(tmp_path, monkeypatch):
    yield from empty_compiler(tmp_path / "cache", monkeypatch)


def test_cubin_and_log(cache):
    compiled = ffi.compile(source(2), "gemm[test]", SM90.target)
    assert compiled.cubin.startswith(b"\x7fELF")
    assert "0 bytes spill stores" in compiled.log
    assert not compiled.cached
    assert ffi.compile(source(2), "gemm[test]", SM90.target).cubin == compiled.cubin


def test_includes_the_kernel_headers(cache):
    name = next(iter(ffi.headers()))
    with pytest.raises(RuntimeError, match="no_such_header"):
        ffi.compile('#include "no_such_header.cuh"', "gemm[test]", SM90.target)
    assert ffi.compile(f'#include "{name}"\n' + source(2), "gemm[test]", SM90.target).cubin


def test_compile_error_names_operator_and_shows_log(cache):
    with pytest.raises(RuntimeError, match=r"gemm\[broken\].*sm_90a") as caught:
        ffi.compile("__global__ void f() { undeclared = 1; }", "gemm[broken]", SM90.target)
    assert 'identifier "undeclared" is undefined' in str(caught.value)
    assert "gemm[broken].cu(1)" in str(caught.value)


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
    ffi.compile(source(1), "gemm[warm]", SM90.target)  # opens NVRTC
    for i in range(4):
        ffi.compile_async(slow_source(i), "gemm[slow]", SM90.target)
    waiting = threading.Thread(
        target=lambda: [ffi.compile(slow_source(i), "gemm[slow]", SM90.target) for i in range(4)]
    )
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
        ffi.compile_async(slow_source(3), "gemm[once]", SM90.target)
    ffi.compile(slow_source(3), "gemm[once]", SM90.target)
    assert capfd.readouterr().err == "coda_jax: compiling gemm[once] for sm_90a\n"
    cache()
    ffi.compile(slow_source(3), "gemm[once]", SM90.target)  # from disk: silent
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_progress_says_how_many_wait(tmp_path):
    code = """
        from coda_jax import ffi
        text = 'extern "C" __global__ void coda_gemm(float* x) { x[0] *= %d.5f; }'
        for i in range(20):
            ffi.compile_async(text % i, f"gemm[{i}]", "sm_90a")
        for i in range(20):
            ffi.compile(text % i, f"gemm[{i}]", "sm_90a")
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
            text = f'extern "C" __global__ void coda_gemm(float* x) {{ x[0] *= {i}.5f; }}'
            ffi.compile_async(text, "gemm[exit]", "sm_90a")
    """
    process = child(code, tmp_path)
    _, err = finish(process)
    assert process.returncode == 0, err
    assert err == ""
    assert len(entries(tmp_path)) < 250
    assert not list(tmp_path.glob("*.temporary"))


def test_dump_folder_gets_source_log_and_image(cache, tmp_path, monkeypatch):
    without = ffi.compile(source(2), "gemm[shown]", SM90.target)
    monkeypatch.setenv("CODA_JAX_DUMP_DIR", str(tmp_path))
    cache()
    compiled = ffi.compile(source(2), "gemm[shown]", SM90.target)
    assert b".debug_line" in compiled.cubin  # and the image that is kept has none
    assert b".debug_line" not in without.cubin
    stem = tmp_path / f"gemm_shown_-{ffi.kernel_key(source(2), SM90.target)[:12]}"
    assert stem.with_suffix(".cu").read_text() == source(2)
    assert stem.with_suffix(".log").read_text() == compiled.log
    assert stem.with_suffix(".cubin").read_bytes() == compiled.cubin
    cache()
    assert ffi.compile(source(2), "gemm[shown]", SM90.target).cubin == compiled.cubin


def test_dump_folder_that_cannot_be_written_is_said_once(cache, monkeypatch, capfd):
    monkeypatch.setenv("CODA_JAX_DUMP_DIR", "/proc/none")
    cache()
    for factor in (2, 3):
        assert ffi.compile(source(factor), "gemm[shown]", SM90.target).cubin
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("coda_jax: kernels are not written to CODA_JAX_DUMP_DIR: /proc/none/gemm_shown_-")


def test_missing_nvrtc_gives_a_reason(tmp_path):
    code = """
        import pathlib
        from coda_jax import ffi
        ffi._nvrtc_libraries = lambda: [("", "/nonexistent/libnvrtc.so.13")]
        ffi._configure()
        print(ffi.unavailable_reason())
        try:
            ffi.compile("", "gemm[test]", "sm_90a")
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
    """A job that failed is compiled the second time: the file that was missing may be there."""
    missing = tmp_path / "late.cuh"
    text = f'#include "{missing}"\n' + source(3)
    with pytest.raises(RuntimeError, match=r"late\.cuh"):
        ffi.compile(text, "gemm[test]", SM90.target)
    missing.write_text("")
    assert ffi.compile(text, "gemm[test]", SM90.target).cubin
