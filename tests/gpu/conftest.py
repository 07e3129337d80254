"""Tests that run kernels: skipped where there is no Hopper GPU."""

import jax
import pytest


def _reason_to_skip() -> str | None:
    try:
        device = jax.devices("gpu")[0]
    except RuntimeError as error:
        return f"no GPU: {error}"
    capability = getattr(device, "compute_capability", None)
    return None if capability == "9.0" else f"compute capability {capability}; the kernels want 9.0"


def pytest_collection_modifyitems(items):
    here = [item for item in items if "gpu" in item.path.parts]
    reason = _reason_to_skip() if here else None
    for item in here:
        item.add_marker(pytest.mark.gpu)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
