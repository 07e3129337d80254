"""CUTLASS 3.x's collectives, compiled here from its headers by nvcc into XLA custom calls.

The headers are those of `CUTLASS_PATH`, a checkout, or of the wheel nvidia-cutlass. As custom calls the products run on
XLA's stream and in its memory, like every other row.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import functools
import hashlib
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import uuid
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib

from benchmarks.peers import Absent, Peer

FOLDER = pathlib.Path(__file__).parent
SOURCES = [FOLDER / name for name in ("cutlass_product.cu", "cutlass_handler.cc")]
BUILD = pathlib.Path(__file__).resolve().parents[2] / "build" / "peers"
HANDLERS = ("cutlass_pingpong_128x128", "cutlass_cooperative_128x128", "cutlass_cooperative_128x256")
LAYOUTS = ((False, True), (False, False), (True, False))  # transpose_a, transpose_b: those of the benchmark


def folder() -> pathlib.Path:
    """The folder of CUTLASS's `include` and `tools/util/include`."""
    if named := os.environ.get("CUTLASS_PATH"):
        root = pathlib.Path(named)
    elif (wheel := importlib.util.find_spec("cutlass_library")) and wheel.origin:
        root = pathlib.Path(wheel.origin).parent / "source"
    else:
        raise Absent("neither CUTLASS_PATH nor the wheel nvidia-cutlass gives its headers")
    if not (root / "include/cutlass/version.h").exists():
        raise Absent(f"{root} has no include/cutlass/version.h")
    return root


def version(root: pathlib.Path) -> str:
    text = (root / "include/cutlass/version.h").read_text()
    return "CUTLASS " + ".".join(re.findall(r"#define CUTLASS_(?:MAJOR|MINOR|PATCH) +(\d+)", text))


def build(root: pathlib.Path, transpose_a: bool, transpose_b: bool) -> pathlib.Path:
    """The shared library for one way to store a and b; minutes for the first time."""
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if not pathlib.Path(nvcc).exists():
        raise Absent("nvcc is not on the path")
    includes = [root / "include", root / "tools/util/include", jax.ffi.include_dir()]
    command = [nvcc, "-arch=sm_90a", "-O3", "-std=c++17", "--expt-relaxed-constexpr", "-DNDEBUG", "-shared"]
    command += ["-Xcompiler", "-fPIC", *(f"-I{include}" for include in includes)]
    command += [f"-DTRANSPOSE_A={transpose_a:d}", f"-DTRANSPOSE_B={transpose_b:d}", *map(str, SOURCES)]
    texts = [source.read_text() for source in (*SOURCES, FOLDER / "cutlass_product.h")]
    text = "\n".join([*command, jaxlib.__version__, version(root), *texts])
    library = BUILD / f"cutlass_{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        unfinished = library.with_suffix(f".{uuid.uuid4().hex}")
        built = subprocess.run([*command, "-o", str(unfinished)], capture_output=True, text=True)
        if built.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{built.stdout}{built.stderr}")
        unfinished.rename(library)
    return library


def register(library: pathlib.Path, layout: tuple[bool, bool]) -> None:
    handlers = ctypes.CDLL(str(library))
    for name in HANDLERS:
        jax.ffi.register_ffi_target(target(name, *layout), jax.ffi.pycapsule(getattr(handlers, name)), platform="CUDA")


def target(name: str, transpose_a: bool, transpose_b: bool) -> str:
    """The custom call's name."""
    return f"{name}_{'t' if transpose_a else 'n'}{'t' if transpose_b else 'n'}"


def prepare(name: str, a: jax.Array, b: jax.Array, transpose_a: bool, transpose_b: bool) -> Callable[[], jax.Array]:
    function = jitted(name, transpose_a, transpose_b)
    return lambda: function(a, b)


@functools.cache
def jitted(name: str, transpose_a: bool, transpose_b: bool) -> Any:
    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        m, n = a.shape[1 if transpose_a else 0], b.shape[0 if transpose_b else 1]
        result = jax.ShapeDtypeStruct((m, n), jnp.bfloat16)
        return jax.ffi.ffi_call(target(name, transpose_a, transpose_b), result)(a, b)

    product.__name__ = name  # timing.executions tells functions apart by it
    return jax.jit(product)


def load() -> list[Peer]:
    root = folder()
    if jax.default_backend() != "gpu":
        raise Absent("there is no GPU")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        libraries = list(pool.map(lambda layout: build(root, *layout), LAYOUTS))
    for library, layout in zip(libraries, LAYOUTS, strict=True):
        register(library, layout)
    return [Peer(name, version(root), functools.partial(prepare, name)) for name in HANDLERS]
