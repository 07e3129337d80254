"""Tests that run kernels: skipped where there is no Hopper GPU."""

import pytest

from tests.requirements import missing_hopper


def pytest_collection_modifyitems(items):
    here = [item for item in items if "gpu" in item.path.parts]
    reason = missing_hopper() if here else None
    for item in here:
        item.add_marker(pytest.mark.gpu)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
