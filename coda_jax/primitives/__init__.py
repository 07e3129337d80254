"""Operators: the product with an epilogue, and what is made of it."""

from coda_jax.primitives.config import GemmConfig as GemmConfig
from coda_jax.primitives.gemm import gemm as gemm
from coda_jax.primitives.gemm_cuda import FallbackWarning as FallbackWarning
