"""The models' origins: packages of pip, files of repositories, and mocks of what their training does not call."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.lab.zoo.case import (
    Case,
    Sizes,
)

_ADOPTING = Path(__file__).parents[3] / "examples" / "adopting"

TRAINING = ("clu", "tensorflow", "tensorflow_datasets", "tensorflow_text", "ml_collections", "grain", "sentencepiece")


@dataclasses.dataclass(frozen=True)
class Model:
    """The origin of a model, and the function that makes it."""

    make: Callable[[Sizes], Case]
    requirements: tuple[str, ...] = ()
    files: tuple[tuple[str, str, str], ...] = ()
    absent: tuple[str, ...] = ()
    emptied: tuple[str, ...] = ()


MODELS: dict[str, Model] = {}


def model(**source: Any) -> Callable[[Callable[[Sizes], Case]], Callable[[Sizes], Case]]:
    """Registers what makes a model, by its name.

    Args:
      requirements: of pip.
      files: repository, commit and path of each file that is fetched. They lie in one folder by their paths.
      absent: packages that are imported and not called.
      emptied: packages whose `__init__.py` imports more than the model needs.
    """

    def register(make: Callable[[Sizes], Case]) -> Callable[[Sizes], Case]:
        MODELS[make.__name__] = Model(make, **source)
        return make

    return register


def imported(name: str) -> Any:
    """A module of the folder's."""
    return importlib.import_module(name)


def folder_of(repository: tuple[str, str]) -> Path:
    """The folder of a repository's files."""
    return Path(os.environ["CODA_JAX_ZOO"]) / "github" / repository[0] / repository[1]


def fetch(model: Model, folder: Path) -> None:
    """Installs packages and downloads files that are not there."""
    target = folder / "packages"
    missing = [one for one in model.requirements if not _is_there(one, target)]
    if missing:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--ignore-requires-python"]
        subprocess.run([*pip, "--target", str(target), *missing], check=True)
    for name in model.emptied:  # these import what the model does not need
        (target / name / "__init__.py").write_text("")
    for repository, commit, path in model.files:
        file = folder / "github" / repository / commit / path
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            with urllib.request.urlopen(f"https://raw.githubusercontent.com/{repository}/{commit}/{path}") as found:
                file.write_bytes(found.read())


def _is_there(requirement: str, target: Path) -> bool:
    name, _, version = requirement.partition("==")
    return (target / f"{name.replace('-', '_')}-{version}.dist-info").exists()


def standing_in(names: tuple[str, ...]) -> contextlib.AbstractContextManager[None]:
    """Mocks for packages, as examples/adopting has them."""
    spec = importlib.util.spec_from_file_location("adopting_packages", _ADOPTING / "packages.py")
    assert spec is not None and spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    manager: contextlib.AbstractContextManager[None] = module.standing_in(names)
    return manager
