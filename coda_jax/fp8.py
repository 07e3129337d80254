"""Products that quantise to fp8 by themselves, and so train: `coda.fp8.matmul`, and `DotGeneral` for Flax's layers."""

from coda_jax.operators.fp8_matmul import DotGeneral as DotGeneral
from coda_jax.operators.fp8_matmul import matmul as matmul

__all__ = ["DotGeneral", "matmul"]
