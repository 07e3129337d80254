"""The meaning of a product with an epilogue: the function, its derivative, the JAX primitive and its XLA form."""

from coda_jax.primitives.fallbacks import FallbackError as FallbackError
from coda_jax.primitives.fallbacks import FallbackWarning as FallbackWarning
from coda_jax.primitives.fallbacks import strict as strict
from coda_jax.primitives.gemm import gemm as gemm
from coda_jax.primitives.ragged_gemm import ragged_contraction as ragged_contraction
from coda_jax.primitives.ragged_gemm import ragged_gemm as ragged_gemm
from coda_jax.primitives.symmetric_gemm import symmetric_gemm as symmetric_gemm
