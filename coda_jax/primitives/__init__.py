"""The product with an epilogue: the function, its derivative, the JAX primitive, and its lowering to the kernel."""

from coda_jax.primitives.gemm import gemm as gemm
from coda_jax.primitives.notes import FallbackError as FallbackError
from coda_jax.primitives.notes import FallbackWarning as FallbackWarning
from coda_jax.primitives.notes import strict as strict
