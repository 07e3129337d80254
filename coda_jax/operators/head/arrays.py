"""The arrays that the loss head reads and returns; each type also holds their cotangents."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from coda_jax.operators.deferred_norm import DeferredNorm

Hidden = DeferredNorm | jax.Array  # the projected array: a norm of x, or x itself


class Tokens(NamedTuple):
    """The arrays of the tokens.

    Attributes:
      h: x (M, D) or a norm of it, which is projected.
      inner: u (M, r), beside a low-rank delta.
      scale: 1 / T, () or (M,) float32; None: 1.
      cap: c, () or (M,) float32, the bound of logits where it is an array; None: a number of the head's, or no bound.
    """

    h: Hidden
    inner: jax.Array | None = None
    scale: jax.Array | None = None
    cap: jax.Array | None = None


class Kernel(NamedTuple):
    """The arrays that the head projects with.

    Attributes:
      w: W (D, V), or stored (V, D).
      b: B (r, V), of a low-rank delta.
    """

    w: jax.Array
    b: jax.Array | None = None


class Statistics(NamedTuple):
    """The statistics of the logits of each token, float32; also their cotangents.

    Attributes:
      lse: (M,).
      target: (M,), or (M, k) of k labels a token.
      total: (M,), where the head has it.
      entropy: (M,), where the head has it.
      best: (M,), the number of the largest logit's column, the first of several, where the head has it.
      rank: (M,), the number of logits that compare with the label's as the head says, where it says so.
    """

    lse: Any
    target: Any
    total: Any = None
    entropy: Any = None
    best: Any = None
    rank: Any = None
