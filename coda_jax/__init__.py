"""GEMM epilogues written in JAX, run inside Hopper matrix products."""

from coda_jax.epilogue import NotTileLocalError as NotTileLocalError
from coda_jax.primitives import FallbackWarning as FallbackWarning
from coda_jax.primitives import GemmConfig as GemmConfig
from coda_jax.primitives import gemm as gemm

__version__ = "0.1.0"
