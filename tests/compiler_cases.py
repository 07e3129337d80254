"""For tests of the compiler: kernels that compile quickly or slowly, an empty compiler, processes of their own."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator

import pytest

from coda_jax import ffi

KERNEL = 'extern "C" __global__ void coda_gemm(float* x) { x[threadIdx.x] *= FACTOR; }'


def source(factor: int) -> str:
    return KERNEL.replace("FACTOR", f"{factor}.0f")


def slow_source(seed: int) -> str:
    """A kernel that takes NVRTC some 0.5 s: hundreds of different functions."""
    steps = "\n".join(f"x[{i}] = sinf(x[{i}] * {i + seed}.5f) + powf(x[{i + 1}], {seed}.25f);" for i in range(40))
    return f'extern "C" __global__ void coda_gemm(float* x) {{ {steps} }}'


def empty_compiler(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., pathlib.Path]]:
    """A fixture: a compiler on a folder of its own; what it yields, called, is as a new process on the same folder."""

    def restart(**settings: int) -> pathlib.Path:
        monkeypatch.setenv("CODA_JAX_CACHE_DIR", str(folder))
        ffi._configure(**settings)
        return folder

    restart()
    yield restart
    monkeypatch.undo()
    ffi._configure()


def child(
    code: str, folder: pathlib.Path, *, cwd: pathlib.Path | None = None, **environment: str
) -> subprocess.Popen[str]:
    """A process, the first of a group, with its kernels in `folder`."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "CODA_JAX_CACHE_DIR": str(folder), **environment},
        cwd=cwd,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Returns what a child printed; a child that hangs is killed with all that it started."""
    try:
        return process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise


def entries(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(folder.glob("*.kernel"))


def preloaded(folder: pathlib.Path, text: str, **environment: str) -> dict[str, str]:
    """The environment of a process in which the functions of a C source come before those of the C library."""
    library = folder / "faults.so"
    command = ["gcc", "-shared", "-fPIC", "-D_GNU_SOURCE", "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input=text, text=True, check=True)
    before = os.environ.get("LD_PRELOAD", "")
    return {"LD_PRELOAD": f"{before}:{library}" if before else str(library), **environment}
