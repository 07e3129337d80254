"""GEMM epilogues written in JAX, run inside Hopper matrix products."""

from coda_jax.epilogue import NotTileLocalError as NotTileLocalError
from coda_jax.epilogue import logsumexp as logsumexp
from coda_jax.explain import Explanation as Explanation
from coda_jax.explain import explain as explain
from coda_jax.primitives import FallbackWarning as FallbackWarning
from coda_jax.primitives import GemmConfig as GemmConfig
from coda_jax.primitives import gated_mlp as gated_mlp
from coda_jax.primitives import gemm as gemm
from coda_jax.primitives import layer_statistics as layer_statistics
from coda_jax.primitives import linear_cross_entropy as linear_cross_entropy
from coda_jax.primitives import mlp as mlp
from coda_jax.primitives import norm_projection as norm_projection
from coda_jax.primitives import qkv_projection as qkv_projection
from coda_jax.primitives import rotary as rotary
from coda_jax.primitives.tune import Tuning as Tuning
from coda_jax.primitives.tune import tune as tune

__version__ = "0.1.0"
