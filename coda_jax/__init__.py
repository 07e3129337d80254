"""GEMM epilogues written in JAX, run inside Hopper matrix products."""

import importlib as _importlib
import sys as _sys
import typing as _typing
import warnings as _warnings

try:
    from coda_jax import ffi as ffi
except ImportError:
    if "coda_jax.doctor" in _sys.orig_argv:  # python -m imports this package before the module, which says the rest
        from coda_jax.tools.doctor import main as _main

        raise SystemExit(_main()) from None
    raise

from coda_jax import fp8 as fp8
from coda_jax.attend import AttentionConfig as AttentionConfig
from coda_jax.attend import Intervals as Intervals
from coda_jax.attend import attention as attention
from coda_jax.attend import cuda as _attend_cuda  # noqa: F401  the same of attention
from coda_jax.epilogue import ByGroup as ByGroup
from coda_jax.epilogue import NotTileLocalError as NotTileLocalError
from coda_jax.epilogue import contraction_order as contraction_order
from coda_jax.epilogue import logsumexp as logsumexp
from coda_jax.epilogue import saturate as saturate
from coda_jax.fusion import fuse as fuse
from coda_jax.fusion import opaque as opaque
from coda_jax.graph import Value as Value
from coda_jax.graph import block as block
from coda_jax.graph import check as check
from coda_jax.lowering import cuda as _cuda  # noqa: F401  it registers how products are lowered on a GPU
from coda_jax.operators import DeferredNorm as DeferredNorm
from coda_jax.operators import Stream as Stream
from coda_jax.operators import dropout as dropout
from coda_jax.operators import expert_mlp as expert_mlp
from coda_jax.operators import gated as gated
from coda_jax.operators import gated_mlp as gated_mlp
from coda_jax.operators import layer_norm as layer_norm
from coda_jax.operators import linear_cross_entropy as linear_cross_entropy
from coda_jax.operators import mlp as mlp
from coda_jax.operators import norm_projection as norm_projection
from coda_jax.operators import project as project
from coda_jax.operators import qkv_projection as qkv_projection
from coda_jax.operators import rms_norm as rms_norm
from coda_jax.operators import rotary as rotary
from coda_jax.operators import token_logprobs as token_logprobs
from coda_jax.primitives import FallbackError as FallbackError
from coda_jax.primitives import FallbackWarning as FallbackWarning
from coda_jax.primitives import gemm as gemm
from coda_jax.primitives import ragged_contraction as ragged_contraction
from coda_jax.primitives import ragged_gemm as ragged_gemm
from coda_jax.primitives import strict as strict
from coda_jax.primitives import symmetric_gemm as symmetric_gemm
from coda_jax.tiles import GemmConfig as GemmConfig

if _typing.TYPE_CHECKING:
    from coda_jax.tools.compare import Comparison as Comparison
    from coda_jax.tools.compare import compare as compare
    from coda_jax.tools.explain import Explanation as Explanation
    from coda_jax.tools.explain import explain as explain
    from coda_jax.tools.tune import Tuning as Tuning
    from coda_jax.tools.tune import tune as tune

__version__ = "0.1.0"

__all__ = [
    "AttentionConfig",
    "ByGroup",
    "Comparison",
    "DeferredNorm",
    "Explanation",
    "FallbackError",
    "FallbackWarning",
    "GemmConfig",
    "Intervals",
    "NotTileLocalError",
    "Stream",
    "Tuning",
    "Value",
    "__version__",
    "attention",
    "block",
    "check",
    "compare",
    "contraction_order",
    "dropout",
    "expert_mlp",
    "explain",
    "fp8",
    "fuse",
    "gated",
    "gated_mlp",
    "gemm",
    "layer_norm",
    "linear_cross_entropy",
    "logsumexp",
    "mlp",
    "norm_projection",
    "opaque",
    "project",
    "qkv_projection",
    "ragged_contraction",
    "ragged_gemm",
    "rms_norm",
    "rotary",
    "saturate",
    "strict",
    "symmetric_gemm",
    "token_logprobs",
    "tune",
]

# Tools are imported when they are asked for: a program that trains needs none of them.
_TOOLS = {
    "Comparison": "compare",
    "compare": "compare",
    "Explanation": "explain",
    "explain": "explain",
    "Tuning": "tune",
    "tune": "tune",
}


# Names that are elsewhere now.
_MOVED = {"PlanCosts": "flax_layers.plan", "plan_costs": "flax_layers.plan"}


def __getattr__(name: str) -> _typing.Any:
    if name in _MOVED:
        _warnings.warn(f"coda_jax.{name} is {_MOVED[name]}.{name} now", DeprecationWarning, stacklevel=2)
        return getattr(_importlib.import_module(_MOVED[name]), name)
    if name not in _TOOLS:
        raise AttributeError(f"module 'coda_jax' has no attribute {name!r}")
    globals()[name] = tool = getattr(_importlib.import_module(f"coda_jax.tools.{_TOOLS[name]}"), name)
    return tool


def __dir__() -> list[str]:
    return __all__
