"""Products that quantise to fp8 by themselves, and so train: a `Recipe` of blocks, `matmul` and `DotGeneral`.

`init` and `calibrate` make the histories of a function that `coda.fuse` rounds with delayed scales.
"""

from coda_jax.fusion.first_histories import calibrate as calibrate
from coda_jax.fusion.first_histories import init as init
from coda_jax.graph.rounded import Recipe as Recipe
from coda_jax.graph.rounded import history_scale as history_scale
from coda_jax.graph.rounded import next_history as next_history
from coda_jax.operators.fp8_matmul import DotGeneral as DotGeneral
from coda_jax.operators.fp8_matmul import matmul as matmul

__all__ = ["DotGeneral", "Recipe", "calibrate", "history_scale", "init", "matmul", "next_history"]
