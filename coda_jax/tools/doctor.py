"""`python -m coda_jax.doctor`: whether kernels compile and run here, what is missing, and the command that mends it.

This file imports the rest of the package inside functions, as it must also run where the native module does not load.
"""

from __future__ import annotations

import ctypes
import dataclasses
import difflib
import importlib
import importlib.metadata
import os
import pathlib
import platform
import re
import stat
import sys
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from coda_jax.tools import source_tree

VARIABLES = ("CACHE_DIR", "DUMP_DIR", "QUIET", "STRICT", "TILES_BY", "TUNED")  # CODA_JAX_...; docs/settings.md
OTHERS = ("CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS", "LD_LIBRARY_PATH", "XLA_FLAGS")
OLDEST_DRIVER = 13000  # what jax[cuda13] needs, as cuDriverGetVersion returns it
_SHAPE = (256, 128)  # of both factors of the test products
INSTALL = 'pip install "coda-jax[cuda]"'


@dataclasses.dataclass(frozen=True)
class Finding:
    """A line of the report.

    Attributes:
      subject: what was checked.
      text: the result.
      mend: the command or step that mends it.
      is_broken: whether the process ends with an error; with a `mend` and False it is only a note.
    """

    subject: str
    text: str
    mend: str | None = None
    is_broken: bool = False

    def __str__(self) -> str:
        mark = "BROKEN" if self.is_broken else "note" if self.mend else "ok"
        lines = "\n".join(self.text.splitlines()).replace("\n", "\n" + " " * 22)
        return f"{mark:7} {self.subject:13} {lines}" + (f"\n{'':21} -> {self.mend}" if self.mend else "")


def broken(subject: str, text: str, mend: str) -> Finding:
    return Finding(subject, text, mend, is_broken=True)


@dataclasses.dataclass(frozen=True)
class Machine:
    """The machine as the driver describes it.

    Attributes:
      version: the newest CUDA that the driver supports, 13000 for 13.0; None without a driver.
      gpus: name and compute capability of each GPU.
      fault: why the driver does not work.
    """

    version: int | None = None
    gpus: tuple[tuple[str, str], ...] = ()
    fault: str | None = None


def machine() -> Machine:
    """The machine by libcuda itself, as JAX may see fewer GPUs."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        has_device = any(pathlib.Path("/dev").glob("nvidia[0-9]*"))
        return Machine(fault=f"there are GPUs in /dev, but no driver library: {error}" if has_device else None)
    version, count = ctypes.c_int(), ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    if (status := driver.cuInit(0)) or (status := driver.cuDeviceGetCount(ctypes.byref(count))):
        return Machine(version.value, fault=f"the driver does not start: {_error_name(driver, status)}")
    gpus = []
    for index in range(count.value):
        device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        name = ctypes.create_string_buffer(256)
        driver.cuDeviceGet(ctypes.byref(device), index)
        driver.cuDeviceGetName(name, len(name), device)
        for number, attribute in ((major, 75), (minor, 76)):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
            driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
        gpus.append((name.value.decode(), f"{major.value}.{minor.value}"))
    return Machine(version.value, tuple(gpus))


def _error_name(driver: ctypes.CDLL, status: int) -> str:
    name = ctypes.c_char_p()
    driver.cuGetErrorName(status, ctypes.byref(name))
    return (name.value or b"error").decode() + f" ({status})"


def check_python() -> Iterator[Finding]:
    here = f"{platform.python_version()}, {sys.executable}; {platform.system()} {platform.machine()}"
    yield Finding("Python", here)


def check_native() -> Iterator[Finding]:
    """Checks the package and its compiled module."""
    try:
        ffi = importlib.import_module("coda_jax.ffi")
    except Exception as error:  # whatever stops the import is the finding
        yield broken("coda_jax", f"does not import: {error}", _reinstall(getattr(error, "name", None) or "coda_jax"))
        return
    where = pathlib.Path(ffi.__file__ or "").parents[1]
    yield Finding("coda_jax", f"{_version('coda-jax')}, {where}; native module {ffi._ffi.__file__}, ABI {ffi.ABI}")


def _reinstall(module: str) -> str:
    """The command that installs what is missing if this module does not import."""
    if not module.startswith("coda_jax"):
        return INSTALL
    return (
        f"pip install -e {source_tree.ROOT}"
        if source_tree.is_source()
        else "pip install --force-reinstall --no-deps coda-jax"
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def check_jax(here: Machine) -> Iterator[Finding]:
    """Checks jax against the versions that this package supports, and the CUDA plugin against jax."""
    version = _version("jax") or "0"
    yield Finding("jax", f"jax {version}, jaxlib {_version('jaxlib')}, flax {_version('flax')}")
    requirements = importlib.metadata.requires("coda-jax") or [] if _version("coda-jax") else []
    requirement = next((x for x in requirements if re.match(r"jax\b[<>=]", x)), "")
    for relation, bound in re.findall(r"(>=|<)([\d.]+)", requirement):
        if (_numbers(version) >= _numbers(bound)) != (relation == ">="):
            yield broken("jax", f"jax {version} is not supported: {requirement}", f'pip install "{requirement}"')
    plugin = _version("jax-cuda13-plugin")
    if plugin is None:
        text = "jax-cuda13-plugin is not installed: JAX sees no GPU"
        yield broken("CUDA plugin", text, INSTALL) if here.gpus else Finding("CUDA plugin", f"{text}, and none is here")
    elif _numbers(plugin) != _numbers(version):
        text = f"jax-cuda13-plugin {plugin} is not of jax {version}"
        yield broken("CUDA plugin", text, f'pip install "jax[cuda13]=={version}"')
    else:
        yield Finding("CUDA plugin", f"jax-cuda13-plugin {plugin}")


def check_driver(here: Machine) -> Iterator[Finding]:
    if here.version is not None:
        says = f"CUDA {here.version // 1000}.{here.version % 1000 // 10}"
        file = pathlib.Path("/proc/driver/nvidia/version")
        number = re.search(r"\s(\d+\.[\d.]+)\s", file.read_text()) if file.exists() else None
        says += f", driver {number[1]}" if number else ""
        if here.version < OLDEST_DRIVER:
            text = f"is for {says}; jax[cuda13] needs one for CUDA 13.0"
            yield broken(
                "driver", text, "install NVIDIA's driver 580 or newer (apt-get install nvidia-open), and reboot"
            )
        else:
            yield Finding("driver", f"is for {says}")
    if here.fault is not None:
        mend = (
            "nvidia-smi says more; a container needs its GPUs: docker run --gpus all, with the NVIDIA Container Toolkit"
        )
        yield broken("driver", here.fault, mend)
    elif here.version is None:
        yield Finding("driver", "none here: products take XLA's form on a CPU")


def check_gpus(here: Machine) -> Iterator[Finding]:
    from coda_jax.tiles.arch import current

    arch = current()
    for name, capability in here.gpus:
        if capability == arch.capability:
            yield Finding("GPU", f"{name}, compute capability {capability}")
        else:
            need = f"the kernels need {arch.capability} ({arch.name})"
            text = f"{name} has compute capability {capability}; {need}, products take XLA's form"
            yield broken(
                "GPU", text, f"use a {arch.name} GPU; CUDA_VISIBLE_DEVICES=... names it where others are beside it"
            )
    if not here.gpus and here.version is not None and here.fault is None:
        yield broken("GPU", "the driver shows none", "unset CUDA_VISIBLE_DEVICES; nvidia-smi -L lists what is there")
    if here.gpus and not _is_seen():
        mend = "unset JAX_PLATFORMS" if os.environ.get("JAX_PLATFORMS") else INSTALL
        yield broken("GPU", 'JAX does not see it: jax.devices("cuda") is empty', mend)


def _is_seen() -> bool:
    import jax

    try:
        return bool(jax.devices("cuda"))
    except RuntimeError:
        return False


def check_nvrtc(here: Machine) -> Iterator[Finding]:
    from coda_jax import ffi

    if reason := ffi.unavailable_reason():
        yield Finding("NVRTC", reason, 'pip install "nvidia-cuda-nvrtc>=13.0,<14"', is_broken=bool(here.gpus))
        return
    loaded = pathlib.Path("/proc/self/maps").read_text()
    path = next(line.split()[-1] for line in loaded.splitlines() if re.search(r"/libnvrtc\.so", line))
    major, minor = ctypes.c_int(), ctypes.c_int()
    ctypes.CDLL(path).nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    yield Finding("NVRTC", f"{major.value}.{minor.value}, {path}")


def check_cache() -> Iterator[Finding]:
    """Checks the folder of compiled kernels: whether a file can be written, and whether entries are not used."""
    from coda_jax import ffi

    folder = pathlib.Path(ffi.cache_directory())
    if not ffi.cache_directory():
        mend = (
            "unset CODA_JAX_CACHE_DIR" if "CODA_JAX_CACHE_DIR" in os.environ else "export CODA_JAX_CACHE_DIR=<folder>"
        )
        yield Finding("cache", "kernels are kept nowhere: each process compiles its own", mend)
        return
    probe = folder / f"doctor.{uuid.uuid4().hex}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError as error:
        mend = "export CODA_JAX_CACHE_DIR=<a folder that you may write>"
        yield broken("cache", f"{folder} cannot be written, each process compiles its kernels: {error}", mend)
        return
    entries = [path.lstat() for path in folder.glob("*.kernel")]
    about = folder.stat()
    size = sum(entry.st_size for entry in entries) / 2**20
    whose = f"mode {stat.S_IMODE(about.st_mode):04o}, owner {about.st_uid}"
    yield Finding("cache", f"{folder}, {whose}; {len(entries)} kernels, {size:.1f} MiB")
    unused = [x for x in entries if x.st_uid not in (0, os.geteuid()) or x.st_mode & (stat.S_IWGRP | stat.S_IWOTH)]
    if unused:
        text = f"{len(unused)} of them are not used: another user owns them, or others may write them"
        yield Finding("cache", text, "export CODA_JAX_CACHE_DIR=<a folder of your own>")


def check_environment() -> Iterator[Finding]:
    """Reports the environment variables that have an effect, and misspelt ones, which have none."""
    known = {f"CODA_JAX_{name}" for name in VARIABLES}
    shown = [f"{name}={os.environ[name]}" for name in sorted({*known, *OTHERS}) if name in os.environ]
    yield Finding("environment", "\n".join(shown) or "no variable that counts is set")
    for name in sorted(os.environ):
        if name.startswith("CODA_JAX_") and not name.startswith("CODA_JAX_TEST_") and name not in known:
            (near,) = difflib.get_close_matches(name, known, 1, 0.0)
            yield Finding("environment", f"{name} is no variable of coda_jax", f"unset {name}; or is {near} meant?")


def check_tiles() -> Iterator[Finding]:
    """Checks the setting by which tiles are chosen. Reading a table warns by itself if it fails."""
    from coda_jax.tiles.constants import tiles_by

    try:
        tiles_by()
    except RuntimeError as error:
        yield broken("tiles", str(error), "unset CODA_JAX_TILES_BY")


def _bias_gelu(acc: Any, bias: Any) -> Any:
    import jax

    return jax.nn.gelu(acc + bias)


def check_kernel(here: Machine) -> Iterator[Finding]:
    """Compiles products with an epilogue, with factors of 16 and of 8 bits. On a GPU that has the kernels it also runs
    them, and compares with float64.
    """
    from coda_jax import ffi
    from coda_jax.epilogue.dtypes import FACTORS, FLOATS_OF_8_BITS
    from coda_jax.tiles.arch import current

    arch = current()
    is_here = any(capability == arch.capability for _, capability in here.gpus)
    if ffi.unavailable_reason():
        return
    for dtype in (FACTORS[0], FLOATS_OF_8_BITS[0]):
        findings = [*_compiled(dtype)]
        yield from findings
        if any(finding.is_broken for finding in findings):
            return
        if is_here and _is_seen():
            yield from _run(dtype)
    if not is_here:
        yield Finding("kernel", f"not run: no {arch.name} GPU here")


def _compiled(dtype: str) -> Iterator[Finding]:
    """Compiles a product of factors of this dtype, and yields its finding."""
    import jax

    import coda_jax
    from coda_jax import ffi
    from coda_jax.tiles.arch import current

    target = current().target
    types = [jax.ShapeDtypeStruct(shape, dtype) for shape in (_SHAPE, _SHAPE)]
    types.append(jax.ShapeDtypeStruct(_SHAPE[:1], "float32"))
    try:
        (product,) = coda_jax.explain(_gemm, *types, platform="cuda", source=True).products
        if product.source is None:
            yield Finding("kernel", f"not compiled: {product.reason}")
            return
        # A unique source, whose kernel is not kept: a cached one would prove nothing about NVRTC.
        source = f"{product.source}\n// doctor {uuid.uuid4().hex}\n"
        made = ffi.compile(source, "doctor", target)
    except Exception as error:  # whatever stops it is the finding
        yield broken("kernel", f"{dtype} does not compile: {error}", 'pip install -U "nvidia-cuda-nvrtc>=13.0,<14"')
        return
    if ffi.cache_directory():
        for entry in pathlib.Path(ffi.cache_directory()).glob(f"{ffi.kernel_key(source, target)}-*.kernel"):
            entry.unlink()
    registers = re.search(r"Used (\d+) registers", made.log)
    text = f"{product.tile} of {dtype} compiled for {target} in {made.seconds:.1f} s, {len(made.cubin) / 1024:.0f} KiB"
    yield Finding("kernel", text + (f", {registers[1]} registers" if registers else ""))


def _gemm(a: Any, b: Any, bias: Any) -> Any:
    import coda_jax

    return coda_jax.gemm(a, b, bias, epilogue=_bias_gelu, transpose_b=True, implementation="cuda")


def _run(dtype: str) -> Iterator[Finding]:
    import jax
    import numpy as np

    generator = np.random.default_rng(0)
    a, b = (np.asarray(jax.numpy.asarray(generator.standard_normal(_SHAPE), dtype)) for _ in "ab")
    bias = generator.standard_normal(_SHAPE[0]).astype(np.float32)
    z = a.astype(np.float64) @ b.astype(np.float64).T + bias.astype(np.float64)
    expected = 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))  # jax.nn.gelu's default
    try:
        with jax.default_device(jax.devices("cuda")[0]):
            got = np.asarray(jax.jit(_gemm)(a, b, bias)).astype(np.float64)
    except Exception as error:
        yield broken(
            "kernel", f"{dtype} does not run: {error}", "mend what is broken above; else report it with this output"
        )
        return
    worst = float(np.max(np.abs(got - expected)) / np.max(np.abs(expected)))
    if worst < 2**-8:  # half a unit in bfloat16's last place, twice
        yield Finding("kernel", f"{dtype} ran, off by {worst:.1e} of the largest value")
    else:
        yield broken(
            "kernel",
            f"of {dtype} gives wrong results, off by {worst:.1e} of the largest value",
            "report it with this output",
        )


def findings() -> Iterator[Finding]:
    """The entire report, in the order in which faults should be mended."""
    yield from check_python()
    native = [*check_native()]
    yield from native
    here = machine()
    checks: list[Callable[[], Iterator[Finding]]] = [lambda: check_jax(here), lambda: check_driver(here)]
    if not any(finding.is_broken for finding in native):
        checks += [lambda: check_gpus(here), lambda: check_nvrtc(here), check_cache, check_tiles]
    checks.append(check_environment)
    if not any(finding.is_broken for finding in native):
        checks.append(lambda: check_kernel(here))
    for check in checks:
        yield from check()


def main() -> int:
    """Prints the report; 1 where something is broken."""
    if (package := source_tree.hidden_package()) is not None:
        print(Finding("coda_jax", *source_tree.describe(package)), flush=True)
        return source_tree.examine()
    faults = 0
    for finding in findings():
        print(finding, flush=True)
        faults += finding.is_broken
    print(f"\n{faults} broken" if faults else "\nnothing is broken")
    return 1 if faults else 0
