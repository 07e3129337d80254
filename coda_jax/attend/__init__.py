"""Attention: the public function, its primitives and their form by XLA.

attention   is the public function, its checks and the call of cuDNN
masks       reduces all masks of a call to a `MaskSpec` and few arrays
probabilities  checks sinks and dropout, and has the gradient of sinks; dropout has its text in the kernels
spec        is the data model: what a mask is, all that a call of the primitives is beside its arrays
primitive   has the two primitives, forward and backward, their types, batching and derivatives
blocks      computes both by XLA, a block of queries at a time: the reference, and the form on other platforms
choose      says where cuDNN is faster
"""

from coda_jax.attend.attention import attention as attention
from coda_jax.attend.masks import Intervals as Intervals
from coda_jax.attend.spec import AttentionConfig as AttentionConfig
