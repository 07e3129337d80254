"""The operators of a transformer: products with the operations between them, each with its derivative."""

from coda_jax.operators.deferred_norm import DeferredNorm as DeferredNorm
from coda_jax.operators.deferred_norm import layer_norm as layer_norm
from coda_jax.operators.deferred_norm import rms_norm as rms_norm
from coda_jax.operators.dropout import dropout as dropout
from coda_jax.operators.expert_mlp import expert_mlp as expert_mlp
from coda_jax.operators.feed_forward import gated as gated
from coda_jax.operators.feed_forward import gated_mlp as gated_mlp
from coda_jax.operators.feed_forward import mlp as mlp
from coda_jax.operators.head.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
from coda_jax.operators.head.token_logprobs import token_logprobs as token_logprobs
from coda_jax.operators.projection import norm_projection as norm_projection
from coda_jax.operators.projection import project as project
from coda_jax.operators.qkv_projection import qkv_projection as qkv_projection
from coda_jax.operators.rotary import rotary as rotary
from coda_jax.operators.stream import Stream as Stream
