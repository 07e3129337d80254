"""The requirements of tests, which a machine may lack. Tests skip without one, unless the run says it must be there.

Environment: ``CODA_JAX_TEST_REQUIRES``, names of `CHECKS` separated by commas: without one of them no test is run, so
that a run which is meant to cover something does not pass by skipping it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import pathlib
from collections.abc import Callable

import jax


def missing_hopper() -> str | None:
    """Why kernels cannot run here."""
    try:
        device = jax.devices("gpu")[0]
    except RuntimeError as error:
        return f"no GPU: {error}"
    capability = getattr(device, "compute_capability", None)
    return None if capability == "9.0" else f"compute capability {capability}; the kernels want 9.0"


def missing_nvrtc() -> str | None:
    """Why kernels cannot be compiled here."""
    from coda_jax import ffi

    return ffi.unavailable_reason()


RECORD = pathlib.Path(__file__).with_name("kernels.json")


def versions() -> dict[str, str]:
    """The versions of what makes and prints machine code of a product, beside this library."""
    pinned = {name: importlib.metadata.version(name) for name in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvdisasm")}
    return pinned | {"jax": ".".join(jax.__version__.split(".")[:2])}


def missing_versions_of_record() -> str | None:
    """Why the kernels on record cannot be compared with those that are made here."""
    try:
        here = versions()
    except importlib.metadata.PackageNotFoundError as error:
        return f"not installed: {error}"
    of_record = json.loads(RECORD.read_text())["versions"]
    return None if here == of_record else f"the kernels on record are of {of_record}, here is {here}"


def missing_transformers() -> str | None:
    """Says which packages of the comparison with Hugging Face transformers are not installed."""
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else None


CHECKS: dict[str, Callable[[], str | None]] = {
    "hopper": missing_hopper,
    "nvrtc": missing_nvrtc,
    "record": missing_versions_of_record,
    "transformers": missing_transformers,
}


def unmet() -> list[str]:
    """The requirements of this run that are not met, each with the reason.

    Raises:
      ValueError: ``CODA_JAX_TEST_REQUIRES`` has an unknown name.
    """
    names = [name for name in os.environ.get("CODA_JAX_TEST_REQUIRES", "").split(",") if name]
    if unknown := set(names) - CHECKS.keys():
        raise ValueError(f"CODA_JAX_TEST_REQUIRES={','.join(names)}: {unknown} is not among {sorted(CHECKS)}")
    return [f"{name}: {reason}" for name in names if (reason := CHECKS[name]())]
