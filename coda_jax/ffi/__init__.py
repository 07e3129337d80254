"""The XLA FFI module: compiles kernels with NVRTC and launches them by two handlers, "coda_gemm" and "coda_launch".

The first is for products, the second for other kernels; both launch on XLA's stream.

Everything that a kernel needs is in the custom call's attributes, so a program loaded from XLA's compilation cache or
from ``jax.export`` in a fresh process only needs this module to be imported. Importing needs neither a GPU nor a driver
nor NVRTC: those are opened when the first kernel compiles or runs.

Environment, read when this module is imported:

* ``CODA_JAX_CACHE_DIR``: where compiled kernels are kept (default ``$XDG_CACHE_HOME/coda_jax``, else
  ``~/.cache/coda_jax``; empty: nowhere). The least recently used entries are removed when it exceeds 256 MiB. A new
  folder is readable by its user alone (0700). An entry is used only if this user or root owns it and nobody else may
  write it: users may share a folder that root fills, and otherwise need one each. A folder that cannot be written, or
  an entry that is not used, is reported once on stderr.
* ``CODA_JAX_QUIET=1``: no line on stderr when a kernel compiles. Warnings stay.
* ``CODA_JAX_DUMP_DIR``: debugging: source, log and image of every kernel are written here, with line information.
  ``coda_jax.explain(..., source=True)`` prints the sources with the names of the user's functions and operands.

In both folders ``~`` is the home directory, and a relative one stays where it was at import.
"""

import atexit
import dataclasses
import functools
import importlib.util
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

try:
    from coda_jax.ffi import _ffi
except ImportError as error:
    message = "coda_jax's native module _ffi is not built for this Python, or does not load; python -m coda_jax.doctor"
    message = f"{message} says how to mend it: {error}"
    root = pathlib.Path(__file__).resolve().parents[2]
    if (root / "CMakeLists.txt").exists():
        message += f". {root} is the source: start Python elsewhere if coda_jax is installed, or pip install -e {root}"
    raise ImportError(message, name=error.name) from error

__all__ = [
    "ABI",
    "Compiled",
    "GemmCall",
    "LaunchCall",
    "cache_directory",
    "compile",
    "compile_async",
    "gemm_call",
    "headers",
    "headers_hash",
    "kernel_key",
    "launch_call",
    "unavailable_reason",
]

ABI: int = _ffi.ABI
TARGET = "coda_gemm"
LAUNCH_TARGET = "coda_launch"

_CACHE_LIMIT_BYTES = 256 << 20
_OPTIONS = (
    "--std=c++20",
    "--device-as-default-execution-space",
    "--fmad=true",
    "--prec-div=false",
    "--prec-sqrt=false",
    "--ptxas-options=-v",
)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled kernel; `log` lists registers and spills, `cached` is true if it came from disk."""

    cubin: bytes
    log: str
    seconds: float
    cached: bool


@functools.cache
def headers() -> Mapping[str, str]:
    """The kernel headers by include name: the packaged ones, or those of the source tree."""
    package = pathlib.Path(__file__).resolve().parents[1]
    packaged = package / "cuda"
    folder = packaged if packaged.is_dir() else package.parent / "cuda"
    texts = {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.cuh"))}
    if not texts:
        raise FileNotFoundError(f"no kernel headers in {folder}")
    return texts


@functools.cache
def headers_hash() -> str:
    """A digest of the headers' contents; a program generated with other headers is refused."""
    return _ffi.digest([part for item in headers().items() for part in item])[:16]


def kernel_key(source: str, arch: str) -> str:
    """The key of a compiled kernel in every cache: a digest of all that it depends on, except NVRTC's version."""
    return _ffi.kernel_key(source, arch)


def compile_async(source: str, name: str, arch: str) -> None:
    """Queues a kernel on the compiler's threads; the program that calls it waits for it when XLA instantiates it.

    Args:
      source: CUDA text that defines ``coda_gemm``, or ``coda_attention`` for a `LaunchCall`; may include any of
        `headers`.
      name: the operator, for messages.
      arch: the architecture, as NVRTC has it: "sm_90a".
    """
    _ffi.submit(name, source, arch)


def compile(source: str, name: str, arch: str) -> Compiled:
    """Compiles a kernel, or loads it from memory or disk. Arguments as for `compile_async`.

    Raises:
      RuntimeError: with the operator's name and NVRTC's full log; or NVRTC was not found.
    """
    return Compiled(*_ffi.compile(name, source, arch))


def unavailable_reason() -> str | None:
    """Why kernels cannot be compiled here, and which libraries were tried; None if they can be."""
    return _ffi.unavailable_reason() or None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Call:
    """The fields of every custom call: `struct Program` in kernels.h."""

    name: str
    source: str
    arch: str
    threads: int
    smem_bytes: int

    def attributes(self) -> dict[str, Any]:
        """The attributes, in the types of the handler's struct, with versions and the kernel's key."""
        values = {field.name: _attribute(getattr(self, field.name)) for field in dataclasses.fields(self)}
        versions = {"abi": np.int32(ABI), "headers": headers_hash(), "key": kernel_key(self.source, self.arch)}
        return versions | values


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmCall(_Call):
    """The custom call of a product. Its attributes are these fields and those that `attributes` adds.

    Buffers are numbered operands first, then results, all row-major.

    Attributes:
      name: the operator, for messages.
      source: CUDA text of the kernel, and `arch` what it is compiled for, as for `compile_async`.
      maps: six numbers per tensor map: buffer, halves, split_rows, box_columns, box_rows, swizzle_bytes.
      pointers: buffers whose addresses follow the maps in the kernel's parameter block.
      transpose_a: a is (k, m), else (m, k); either may have a batch dimension in front.
      transpose_b: b is (n, k), else (k, n).
      tile_m: rows of a block's tile.
      tile_n: columns of a block's tile, all halves together.
      halves: 2 where a tile holds matching columns of the two halves of n.
      cluster_m: blocks of a cluster, along m.
      threads: of a block.
      smem_bytes: dynamic shared memory of a block.
      flags: with split-K, or if blocks claim their tiles, the int32 buffer with a row for each block that may run,
        which is zeroed before; or -1.
      yield_k_blocks: the work of a block, in k blocks of 128 bytes of its tiles, after which it ends and frees its SM;
        0 if there are only as many blocks as run at a time, as split-K needs.
    """

    maps: Sequence[int]
    pointers: Sequence[int]
    transpose_a: bool
    transpose_b: bool
    tile_m: int
    tile_n: int
    halves: int
    cluster_m: int
    flags: int = -1
    yield_k_blocks: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchCall(_Call):
    """The custom call of a kernel that is no product. Its attributes are these fields and those that `attributes` adds.

    Buffers are numbered operands first, then results, all row-major. The kernel's one parameter is a block of at most
    4096 bytes: tensor maps of 128 bytes, pointers of 8, then `sizes` and `words`, int32 each.

    Attributes:
      name: the operator, for messages.
      source: CUDA text of the kernel ``coda_attention``, and `arch` what it is compiled for, as for `compile_async`.
      threads: of a block.
      smem_bytes: dynamic shared memory of a block.
      grid: three numbers per factor of the number of blocks: buffer, axis, and a divisor of that dimension, rounded up.
        With 0 blocks nothing is launched.
      maps: three numbers per tensor map of an array (batch, rows, heads, columns): buffer, box_columns, box_rows. A box
        is of one head, its rows of 128 bytes, swizzled; what is outside the array reads as 0. Of an array without
        elements the map is zero bytes.
      pointers: buffers whose addresses follow the maps; -1: a null pointer.
      sizes: two numbers per dimension that follows the pointers: buffer, axis.
      words: numbers that follow the sizes.
      zeroed: buffers, of a multiple of 4 bytes, that are set to 0 before, be it for no blocks.
      resident: blocks for each multiprocessor at most, which then share the work; 0: as many as the grid has.
      overlaps: the kernel may begin while what is before it on the stream ends, for which it waits itself; not if
        anything is zeroed.
    """

    grid: Sequence[int]
    maps: Sequence[int] = ()
    pointers: Sequence[int] = ()
    sizes: Sequence[int] = ()
    words: Sequence[int] = ()
    zeroed: Sequence[int] = ()
    resident: int = 0
    overlaps: bool = False


def _attribute(value: Any) -> Any:
    if isinstance(value, str):
        return value
    return np.bool_(value) if isinstance(value, bool | np.bool_) else np.asarray(value, np.int32)[()]


def gemm_call(
    args: Sequence[jax.Array],
    results: Sequence[jax.ShapeDtypeStruct],
    call: GemmCall,
    input_output_aliases: Mapping[int, int] | None = None,
) -> list[jax.Array]:
    """The custom call of a product.

    Args:
      args: a, b, then the epilogue's operands.
      results: tiles, then one array of partial results for each reduction, then the kernel's own arrays, flags last.
      call: its attributes.
      input_output_aliases: operand number to result number, equal in shape and dtype.
    """
    return _call(TARGET, args, results, call, input_output_aliases)


def launch_call(
    args: Sequence[jax.Array],
    results: Sequence[jax.ShapeDtypeStruct],
    call: LaunchCall,
    input_output_aliases: Mapping[int, int] | None = None,
) -> list[jax.Array]:
    """The custom call of a kernel that is no product.

    Args:
      args: the kernel's operands.
      results: what it writes, with arrays of its own.
      call: its attributes.
      input_output_aliases: operand number to result number, equal in shape and dtype.
    """
    return _call(LAUNCH_TARGET, args, results, call, input_output_aliases)


def _call(
    target: str,
    args: Sequence[jax.Array],
    results: Sequence[jax.ShapeDtypeStruct],
    call: _Call,
    input_output_aliases: Mapping[int, int] | None,
) -> list[jax.Array]:
    launch = jax.ffi.ffi_call(target, list(results), input_output_aliases=dict(input_output_aliases or {}))
    return list(launch(*args, **call.attributes()))


def cache_directory() -> str:
    """The folder where compiled kernels are kept; empty if they are not."""
    setting = os.environ.get("CODA_JAX_CACHE_DIR")
    if setting is not None:
        return _absolute(setting) if setting else ""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # which its specification says to ignore
        base = os.path.expanduser("~/.cache")
    return os.path.join(base, "coda_jax") if os.path.isabs(base) else ""


@functools.cache  # the result at import: a program may change its directory later
def _absolute(folder: str) -> str:
    return os.path.abspath(os.path.expanduser(folder))


def _nvrtc_libraries() -> list[tuple[str, str]]:
    """Candidates in order of preference: (builtins, or "" to leave them to the loader; NVRTC)."""
    folders: list[pathlib.Path] = []
    for namespace in _nvidia_namespace():
        folders += [*sorted(namespace.glob("cu[0-9]*/lib"), reverse=True), namespace / "cuda_nvrtc" / "lib"]
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if root := os.environ.get(variable):
            folders += [pathlib.Path(root, "lib64"), pathlib.Path(root, "lib")]
    folders.append(pathlib.Path("/usr/local/cuda/lib64"))
    libraries = []
    for folder in folders:
        builtins = max(folder.glob("libnvrtc-builtins.so.*"), key=_version, default=None)
        library = max(folder.glob("libnvrtc.so.*"), key=_version, default=None)
        if builtins and library:
            libraries.append((str(builtins), str(library)))
    return [*libraries, ("", "libnvrtc.so.13"), ("", "libnvrtc.so.12")]


def _nvidia_namespace() -> list[pathlib.Path]:
    spec = importlib.util.find_spec("nvidia")  # a namespace package, which may have several folders
    return [pathlib.Path(path) for path in (spec.submodule_search_locations or [])] if spec else []


def _version(path: pathlib.Path) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", path.name.partition(".so.")[2]))


def _configure(cache_limit_bytes: int = _CACHE_LIMIT_BYTES) -> None:
    """Reads the environment and starts an empty compiler."""
    dump_directory = os.environ.get("CODA_JAX_DUMP_DIR", "")
    _ffi.configure(
        headers=list(headers().items()),
        headers_hash=headers_hash(),
        options=_OPTIONS,
        libraries=_nvrtc_libraries(),
        cache_directory=cache_directory(),
        cache_limit_bytes=cache_limit_bytes,
        dump_directory=_absolute(dump_directory) if dump_directory else "",
        quiet=os.environ.get("CODA_JAX_QUIET", "0") not in ("", "0"),
    )


_configure()
atexit.register(_ffi.shutdown)
for _target, _stages in _ffi.handlers().items():
    jax.ffi.register_ffi_target(_target, _stages, platform="CUDA", api_version=1)
