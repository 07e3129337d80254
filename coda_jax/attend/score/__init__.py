"""Scores of attention as the user's JAX function has them: checked, differentiated and written as CUDA.

    s' = score(s, *operands)        s = scale q k^T, (B, H, T, S) float32

elements    translates the function's equations to nodes for one pair of a query and a key, from its result backwards
gathers     says which entry of a table a gather reads for a pair
before      finds what XLA computes of the function's arrays before the call
trace       traces a function and its derivative, and takes the arrays that it reads apart
program     is the data model
distances   has entries of tables by distance computed before the call, too
linear      has the derivative by each of what it reads; facts, what is known where a key is not hidden
evaluate    computes it by XLA; text writes its CUDA
hiding      finds the keys that it hides, as a band and in tiles, from its bounds there, which ranges has
"""

from coda_jax.attend.score.program import HIDDEN as HIDDEN
from coda_jax.attend.score.program import Score as Score
from coda_jax.attend.score.trace import trace as trace
