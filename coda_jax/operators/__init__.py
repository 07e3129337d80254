"""The operators of a transformer as chains of products, each with its derivative."""

from coda_jax.operators.gated_mlp import gated_mlp as gated_mlp
from coda_jax.operators.layer_norm import layer_statistics as layer_statistics
from coda_jax.operators.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
from coda_jax.operators.mlp import mlp as mlp
from coda_jax.operators.norm_projection import norm_projection as norm_projection
from coda_jax.operators.qkv_projection import qkv_projection as qkv_projection
from coda_jax.operators.qkv_projection import rotary as rotary
