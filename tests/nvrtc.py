"""For tests of what is lowered for a GPU: it is compiled by NVRTC, without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import pytest

from tests.requirements import missing_nvrtc

needs_nvrtc = pytest.mark.skipif(bool(missing_nvrtc()), reason=f"no NVRTC: {missing_nvrtc()}")


def kernels(function: Callable[..., Any], *arguments: Any) -> int:
    """How many kernels a function launches on a GPU."""
    lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))
    return lowered.as_text().count("@coda_gemm(")
