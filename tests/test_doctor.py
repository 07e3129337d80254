"""`python -m coda_jax.doctor`: every fault is named with what mends it, and ends the process with an error."""

import ctypes
import os
import pathlib
import re
import shutil
import subprocess
import sys

import jax
import pytest

import coda_jax as coda
from coda_jax import ffi
from coda_jax.tools import doctor
from tests.compiler_cases import empty_compiler
from tests.nvrtc import needs_nvrtc

SETTINGS = pathlib.Path(__file__).parents[1] / "docs" / "settings.md"
DRIVER = """
#include <string.h>
int cuDriverGetVersion(int* v) { *v = VERSION; return 0; }
int cuInit(unsigned flags) { return STATUS; }
int cuGetErrorName(int status, const char** name) { *name = "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"; return 0; }
int cuDeviceGetCount(int* count) { *count = 1; return 0; }
int cuDeviceGet(int* device, int i) { *device = i; return 0; }
int cuDeviceGetName(char* name, int size, int device) { strncpy(name, "NVIDIA Stand-in", size); return 0; }
int cuDeviceGetAttribute(int* value, int attribute, int device) { *value = attribute == 75 ? MAJOR : 0; return 0; }
"""


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """Puts a driver with one GPU in the place of this machine's."""

    def install(version=13000, major=9, status=0):
        library = tmp_path / f"libcuda-{version}-{major}-{status}.so"
        values = [f"-DVERSION={version}", f"-DMAJOR={major}", f"-DSTATUS={status}"]
        command = ["gcc", "-shared", "-fPIC", *values, "-x", "c", "-", "-o", str(library)]
        subprocess.run(command, input=DRIVER, text=True, check=True)
        real = ctypes.CDLL
        monkeypatch.setattr(doctor.ctypes, "CDLL", lambda name: real(library if name == "libcuda.so.1" else name))

    return install


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch, tmp_path):
    """As on a machine without a GPU, with a cache of its own."""
    real = ctypes.CDLL

    def library(name):
        if name == "libcuda.so.1":
            raise OSError("no such file")
        return real(name)

    monkeypatch.setattr(doctor.ctypes, "CDLL", library)
    monkeypatch.setattr(doctor, "_is_seen", lambda: False)
    monkeypatch.setenv("CODA_JAX_CACHE_DIR", str(tmp_path / "kernels"))
    for name in [name for name in os.environ if name.startswith("CODA_JAX_TEST_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    yield from empty_compiler(tmp_path / "kernels", monkeypatch)


def faults():
    return {(x.subject, x.mend): x.text for x in doctor.findings() if x.is_broken}


@needs_nvrtc
def test_a_machine_without_a_gpu_is_whole(capsys, tmp_path, kernels):
    assert doctor.main() == 0
    out = capsys.readouterr().out
    assert "of bfloat16 compiled for sm_90a" in out and "of float8_e4m3fn compiled for sm_90a" in out
    assert "not run: no Hopper GPU here" in out and out.endswith("nothing is broken\n")
    assert "BROKEN" not in out and "note" not in out
    assert [*(tmp_path / "kernels").iterdir()] == []  # the probe and the kernel of the trial are gone


@needs_nvrtc
def test_a_gpu_that_jax_does_not_see(driver, monkeypatch, capsys):
    driver()
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    assert set(faults()) == {("CUDA plugin", doctor.INSTALL), ("GPU", doctor.INSTALL)}
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert ("GPU", "unset JAX_PLATFORMS") in faults()
    assert doctor.main() == 1 and capsys.readouterr().out.endswith("\n2 broken\n")


@pytest.mark.parametrize(
    ("values", "subject", "text", "mend"),
    [
        ({"version": 12020}, "driver", "is for CUDA 12.2", "driver 580 or newer"),
        ({"status": 803}, "driver", "does not start: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803)", "nvidia-smi"),
        ({"major": 8}, "GPU", "NVIDIA Stand-in has compute capability 8.0; the kernels need 9.0", "use a Hopper GPU"),
    ],
)
def test_driver_and_gpu(driver, values, subject, text, mend):
    driver(**values)
    here = doctor.machine()
    found = [x for x in (*doctor.check_driver(here), *doctor.check_gpus(here)) if x.is_broken and x.subject == subject]
    assert text in found[0].text and mend in found[0].mend


@pytest.mark.parametrize("has_gpu", [False, True])
def test_no_nvrtc(has_gpu, driver, monkeypatch):
    """Broken beside a GPU; on a CPU it is only said."""
    if has_gpu:
        driver()
    monkeypatch.setattr(ffi, "unavailable_reason", lambda: "NVRTC was not found. Tried:\n  libnvrtc.so.13")
    (found,) = doctor.check_nvrtc(doctor.machine())
    assert found.is_broken == has_gpu
    assert "NVRTC was not found" in found.text and found.mend == 'pip install "nvidia-cuda-nvrtc>=13.0,<14"'
    assert str(found).startswith("BROKEN" if has_gpu else "note")


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("CODA_JAX_CACHE_DIR", str(tmp_path / "file" / "kernels"))
    (found,) = doctor.check_cache()
    assert found.is_broken and "cannot be written" in found.text and "CODA_JAX_CACHE_DIR=" in found.mend


def test_leftovers_of_a_killed_doctor_are_no_finding(tmp_path):
    """Processes of several containers have one number."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / f"doctor.{os.getpid()}").touch()
    (sound,) = doctor.check_cache()
    assert not sound.is_broken


def test_entries_that_others_may_write(tmp_path):
    folder = tmp_path / "kernels"
    folder.mkdir(mode=0o755)
    (folder / "a.kernel").touch(mode=0o644)
    (sound,) = doctor.check_cache()
    assert "mode 0755" in sound.text and "1 kernels" in sound.text
    (folder / "a.kernel").chmod(0o666)
    *_, note = doctor.check_cache()
    assert note.text.startswith("1 of them are not used") and not note.is_broken


@needs_nvrtc
def test_a_kernel_that_does_not_compile(monkeypatch):
    monkeypatch.setattr(ffi, "compile", lambda *_: (_ for _ in ()).throw(RuntimeError("doctor: NVRTC: out of memory")))
    (found,) = doctor.check_kernel(doctor.Machine())
    assert found.is_broken and "NVRTC: out of memory" in found.text


def test_versions(monkeypatch):
    versions = {"jax": "0.9.1", "jax-cuda13-plugin": "0.9.0", "coda-jax": "0.1.0"}
    monkeypatch.setattr(doctor, "_version", versions.get)
    _, old, plugin = doctor.check_jax(doctor.Machine())
    assert old.is_broken and old.text.startswith("jax 0.9.1 is not supported: jax") and ">=0.10.2" in old.mend
    assert plugin.is_broken and plugin.mend == 'pip install "jax[cuda13]==0.9.1"'


def test_variables(monkeypatch):
    monkeypatch.setenv("CODA_JAX_CACHE_DIRR", "/tmp")
    monkeypatch.setenv("CODA_JAX_TILES_BY", "power")
    shown, unknown = doctor.check_environment()
    assert "CODA_JAX_TILES_BY=power" in shown.text
    assert (
        unknown.text == "CODA_JAX_CACHE_DIRR is no variable of coda_jax" and "CODA_JAX_CACHE_DIR meant" in unknown.mend
    )
    (tiles,) = doctor.check_tiles()
    assert tiles.is_broken and "'power'" in tiles.text


@pytest.mark.skipif(not SETTINGS.exists(), reason="the documents are not beside these tests")
def test_known_variables_are_documented():
    text = SETTINGS.read_text()
    assert len(re.findall(r"^\| `CODA_JAX_", text, re.MULTILINE)) == len(doctor.VARIABLES)
    assert all(f"`CODA_JAX_{name}" in text for name in doctor.VARIABLES)


def test_a_native_module_that_is_not_built(tmp_path):
    """Then the package does not import, and the doctor still speaks."""
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['coda_jax.ffi._ffi'] = None")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}

    def run(*command):
        return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=120)

    found = run("-m", "coda_jax.doctor")
    assert found.returncode == 1 and "BROKEN  coda_jax      does not import: coda_jax's native module" in found.stdout
    assert "-> pip install " in found.stdout and "1 broken" in found.stdout and found.stderr == ""
    plain = run("-c", "import coda_jax")
    assert plain.returncode == 1 and "python -m coda_jax.doctor says how to mend it" in plain.stderr


def test_a_checkout_that_hides_the_installed_package(tmp_path):
    """As after `pip install .` in a clone: that package is examined, and is whole; an import says what to do."""
    package = pathlib.Path(coda.__file__).parent
    clone, site = tmp_path / "clone", tmp_path / "site"
    for root in (clone, site):
        shutil.copytree(package, root / "coda_jax", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copy(ffi._ffi.__file__, site / "coda_jax" / "ffi")
    (site / "coda_jax" / "cuda").mkdir(exist_ok=True)  # of an editable install the headers lie in its checkout
    for name, text in ffi.headers().items():
        (site / "coda_jax" / "cuda" / name).write_text(text)
    (clone / "CMakeLists.txt").touch()
    editable = "[x for x in sys.meta_path if not type(x).__name__.startswith('ScikitBuild')]"
    (site / "sitecustomize.py").write_text(f"import sys; sys.meta_path[:] = {editable}")
    environment = {**os.environ, "PYTHONPATH": str(site)}

    def run(*command):
        options = {"env": environment, "cwd": clone, "capture_output": True, "text": True, "timeout": 120}
        return subprocess.run([sys.executable, *command], **options)

    plain = run("-c", "import coda_jax")
    assert plain.returncode == 1
    assert f"{clone} is the source: start Python elsewhere if coda_jax is installed, or pip install" in plain.stderr
    found = run("-m", "coda_jax.doctor")
    note, _, report = found.stdout.partition(f"-> start Python elsewhere, or pip install -e {clone}\n")
    assert note.startswith("note ") and f"examined is what is installed, {site / 'coda_jax'}" in note
    assert f"{site / 'coda_jax'}; native module {site}" in report and found.stderr == ""
    # Beside a GPU there may be real faults; that the package does not import is none of them.
    assert "does not import" not in report and report.endswith(("nothing is broken\n", " broken\n"))
    (site / "coda_jax" / "ffi" / pathlib.Path(ffi._ffi.__file__).name).unlink()
    alone = run("-m", "coda_jax.doctor")
    assert alone.returncode == 1 and "BROKEN  coda_jax      does not import" in alone.stdout


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_the_run_is_compared_with_float64(monkeypatch, dtype):
    """XLA's form on a CPU in the kernel's place, and one that is slightly wrong."""
    monkeypatch.setattr(jax, "devices", lambda platform=None: jax.local_devices())

    def product(factor):
        return lambda a, b, bias: factor * coda.gemm(a, b, bias, epilogue=doctor._bias_gelu, transpose_b=True)

    monkeypatch.setattr(doctor, "_gemm", product(1))
    (right,) = doctor._run(dtype)
    assert right.text.startswith(f"{dtype} ran, off by ") and not right.is_broken
    monkeypatch.setattr(doctor, "_gemm", product(1.02))
    (wrong,) = doctor._run(dtype)
    assert wrong.is_broken and "wrong results" in wrong.text
    monkeypatch.setattr(doctor, "_gemm", None)
    (lost,) = doctor._run(dtype)
    assert lost.is_broken and lost.text.startswith(f"{dtype} does not run: ")
