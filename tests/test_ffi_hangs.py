"""Processes that fork while kernels compile, and processes that may start no thread: nothing waits for ever."""

import textwrap

import pytest

from tests.compiler_cases import child, finish, preloaded, slow_source
from tests.nvrtc import needs_nvrtc

pytestmark = needs_nvrtc


def test_child_forked_between_compilations_compiles(tmp_path):
    code = """
        import os
        from coda_jax import ffi
        text = 'extern "C" __global__ void coda_gemm(float* x) { x[0] *= %d.5f; }'
        ffi.compile(text % 0, "gemm[fork]", "sm_90a")
        pid = os.fork()
        ok = all(ffi.compile(text % i, "gemm[fork]", "sm_90a").cubin for i in range(4))
        if pid == 0:
            os._exit(0 if ok else 1)
        print(os.waitpid(pid, 0)[1])
    """
    out, err = finish(child(code, tmp_path))
    assert out == "0\n", err


FORK = """
    import os, sys, time
    from coda_jax import ffi

    def in_a_child(text):
        pid = os.fork()
        if pid == 0:
            try:
                print(ffi.compile(text, "gemm[fork]", "sm_90a").cached, flush=True)
            except RuntimeError as error:
                told = "spawn" in str(error) and str(error) == ffi.unavailable_reason()
                print("refused" if told else error, flush=True)
            os._exit(0)
        return pid

    text = 'extern "C" __global__ void coda_gemm(float* x) { x[0] *= %d.5f; }'
"""


@pytest.mark.slow
def test_child_forked_while_a_kernel_compiles_is_told_to_spawn(tmp_path):
    """NVRTC's locks are held there for ever. What is on disk is there for the child all the same."""
    code = f"""
        ffi.compile(text % 0, "gemm[fork]", "sm_90a")
        reading, writing = os.pipe()
        os.dup2(writing, 2)
        ffi.compile_async({slow_source(0)!r}, "gemm[slow]", "sm_90a")
        assert b"gemm[slow]" in os.read(reading, 1000)  # it compiles now
        for i in range(2):
            os.waitpid(in_a_child(text % i), 0)
        ffi.compile({slow_source(0)!r}, "gemm[slow]", "sm_90a")
        os.waitpid(in_a_child(text % 2), 0)
    """
    out, err = finish(child(textwrap.dedent(FORK) + textwrap.dedent(code), tmp_path, CODA_JAX_QUIET="0"))
    assert out.split() == ["True", "refused", "False"], err


@pytest.mark.slow
def test_child_forked_while_nvrtc_is_opened_is_told_to_spawn(tmp_path):
    code = f"""
        begin = time.monotonic()
        ffi.compile_async({slow_source(0)!r}, "gemm[slow]", "sm_90a")
        children = []
        for delay in (0, 0.003, 0.01, 0.03, 0.1):
            time.sleep(max(0, begin + delay - time.monotonic()))
            children.append(in_a_child(text % len(children)))
        for pid in children:
            os.waitpid(pid, 0)
    """
    out, err = finish(child(textwrap.dedent(FORK) + textwrap.dedent(code), tmp_path))
    assert len(out.split()) == 5, err
    assert set(out.split()) <= {"refused", "False"}
    assert "refused" in out.split()


NO_THREADS = r"""
#include <errno.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*), void* argument) {
  static int started = 0;
  const char* limit = getenv("THREADS");
  if (limit != NULL && started++ >= atoi(limit)) return EAGAIN;
  return ((__typeof__(&pthread_create))dlsym(RTLD_NEXT, "pthread_create"))(thread, attributes, run, argument);
}
"""


@pytest.mark.parametrize("threads", [0, 1])
@pytest.mark.slow
def test_where_no_thread_can_be_started_kernels_compile_all_the_same(tmp_path, threads):
    """By the caller, or by the threads that there are."""
    code = f"""
        import os
        from coda_jax import ffi
        text = 'extern "C" __global__ void coda_gemm(float* x) {{ x[0] *= %d.5f; }}'
        os.environ["THREADS"] = "{threads}"
        for i in range(4):
            ffi.compile_async(text % i, "gemm[alone]", "sm_90a")
        for i in range(6):
            assert ffi.compile(text % i, "gemm[alone]", "sm_90a").cubin
        ffi._ffi.shutdown()
        assert ffi.compile(text % 6, "gemm[alone]", "sm_90a").cubin
        print("done")
    """
    out, err = finish(child(code, tmp_path, **preloaded(tmp_path, NO_THREADS)))
    assert out == "done\n", err
