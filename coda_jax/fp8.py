"""Products that quantise to fp8 by themselves, and so train: a `Recipe` of blocks, `matmul` and `DotGeneral`."""

from coda_jax.graph.rounded import Recipe as Recipe
from coda_jax.graph.rounded import history_scale as history_scale
from coda_jax.graph.rounded import next_history as next_history
from coda_jax.operators.fp8_matmul import DotGeneral as DotGeneral
from coda_jax.operators.fp8_matmul import matmul as matmul

__all__ = ["DotGeneral", "Recipe", "history_scale", "matmul", "next_history"]
