"""Operators: the product with an epilogue, and what is made of it."""

from coda_jax.primitives.config import GemmConfig as GemmConfig
from coda_jax.primitives.gated_mlp import gated_mlp as gated_mlp
from coda_jax.primitives.gemm import gemm as gemm
from coda_jax.primitives.gemm_cuda import FallbackWarning as FallbackWarning
from coda_jax.primitives.layer_norm import layer_statistics as layer_statistics
from coda_jax.primitives.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
from coda_jax.primitives.mlp import mlp as mlp
from coda_jax.primitives.norm_projection import norm_projection as norm_projection
from coda_jax.primitives.qkv_projection import qkv_projection as qkv_projection
from coda_jax.primitives.qkv_projection import rotary as rotary
