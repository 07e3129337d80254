"""A checkout that hides the installed package: Python that starts in it imports the source, which is not compiled."""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterable

ROOT = pathlib.Path(__file__).resolve().parents[2]  # the folder that has this package


def is_source() -> bool:
    """Whether `ROOT` is a checkout, and not a folder into which pip installs."""
    return (ROOT / "CMakeLists.txt").exists()


def hidden_package() -> pathlib.Path | None:
    """The compiled package that this uncompiled checkout hides, as after `pip install .` in it; None without one."""
    if not is_source() or sys.flags.safe_path:
        return None
    try:
        importlib.import_module("coda_jax.ffi")
    except Exception:  # which one is the report's
        spec = importlib.machinery.PathFinder.find_spec("coda_jax", _without_source(sys.path))
        if spec is not None and spec.origin is not None:
            package = pathlib.Path(spec.origin).parent
            if any((package / "ffi" / f"_ffi{end}").exists() for end in importlib.machinery.EXTENSION_SUFFIXES):
                return package
    return None


def _without_source(folders: Iterable[str]) -> list[str]:
    return [folder for folder in folders if pathlib.Path(folder).resolve() != ROOT]


def describe(package: pathlib.Path) -> tuple[str, str]:
    """The doctor's text on the package that a checkout hides, and the command that mends it."""
    text = f"Python that starts in {ROOT} imports the source there, which is not compiled, and fails"
    return f"{text}\nexamined is what is installed, {package}", f"start Python elsewhere, or pip install -e {ROOT}"


def examine() -> int:
    """Runs the hidden package's doctor, and returns its exit status."""
    environment = dict(os.environ)
    if "PYTHONPATH" in environment:
        environment["PYTHONPATH"] = os.pathsep.join(_without_source(environment["PYTHONPATH"].split(os.pathsep)))
    return subprocess.run([sys.executable, "-P", "-m", "coda_jax.doctor"], env=environment).returncode
