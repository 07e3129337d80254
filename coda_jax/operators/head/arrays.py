"""The arrays that the loss head reads and returns, whose types also hold their cotangents; and the logits' curve,

    y = z / T  or, capped,  y = c tanh(z / c) / T

the function of the logits z that is summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

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

    @property
    def x(self) -> jax.Array:
        """x (M, D) itself, whether or not a norm of it is projected."""
        return self.h.x if isinstance(self.h, DeferredNorm) else self.h


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


class LogitCurve(NamedTuple):
    """y = capped(z) / T of the logits z (m, V) of some tokens.

    Attributes:
      scale: 1 / T, a column (m, 1); None: 1.
      cap: c, a number or a column (m, 1); None: logits are not capped.
    """

    scale: Any
    cap: Any

    @property
    def has_cap_column(self) -> bool:
        return not isinstance(self.cap, float | None)

    def columns(self) -> tuple[Any, Any]:
        """The columns of scale and cap, or None."""
        return self.scale, self.cap if self.has_cap_column else None

    def for_tile(self, scale: Any, cap: Any) -> LogitCurve:
        """The same curve with columns as an epilogue reads them; a number stays a constant."""
        return LogitCurve(scale, self.cap if cap is None else cap)

    def capped(self, z: jax.Array) -> jax.Array:
        return z if self.cap is None else self.cap * jnp.tanh(z / self.cap)

    def scaled(self, x: jax.Array) -> jax.Array:
        return x if self.scale is None else x * self.scale

    def of(self, z: jax.Array) -> jax.Array:
        return self.scaled(self.capped(z))

    def unscaled(self, y: jax.Array) -> jax.Array:
        return y if self.scale is None else y / self.scale

    def through(self, dy: jax.Array, capped: jax.Array) -> jax.Array:
        """dz from dy."""
        return self.scaled(dy if self.cap is None else dy * (1 - jnp.square(capped / self.cap)))

    def cap_terms(self, dy: jax.Array, capped: jax.Array) -> jax.Array:
        """The term that each dy adds to dc: dy / T (t - artanh(t) (1 - t^2)) with t = tanh(z / c)."""
        t = jnp.clip(capped / self.cap, -1 + 2.0**-20, 1 - 2.0**-20)  # artanh(1) is infinite
        return self.scaled(dy * (t - jnp.arctanh(t) * (1 - jnp.square(t))))


class ChunkArrays(NamedTuple):
    """The arrays that a chunk's products read.

    Attributes:
      formed: the arrays that are projected, h (m, D), and u (m, r) beside a low-rank delta, in the compute dtype.
      w: [W; B] in the compute dtype, (D + r, columns) or stored (columns, D + r).
      labels: (m,) or (m, k) int32, as columns of this shard of W.
      curve: of the logits.
      shift: one number near the logits, (), by which exponentials are shifted; None: each row's are by its own.
    """

    formed: list[jax.Array]
    w: jax.Array
    labels: jax.Array
    curve: LogitCurve
    shift: Any = None

    def concatenate(self) -> jax.Array:
        """[h, u]."""
        return self.formed[0] if len(self.formed) == 1 else jnp.concatenate(self.formed, axis=1)


class CotangentColumns(NamedTuple):
    """The columns (m, 1), or None, that the cotangent of a chunk's z reads; a d before a name: its cotangent.

    Those of labels and of the targets' cotangents are None where a token has several labels, (m, k).
    """

    labels: Any
    scale: Any
    lse: Any
    entropy: Any
    dlse: Any
    dtarget: Any
    dtotal: Any
    dentropy: Any
    cap: Any

    @classmethod
    def of(cls, arrays: ChunkArrays, stats: Statistics, cotangents: Statistics) -> CotangentColumns:
        def column(x: Any) -> Any:
            return None if x is None else x[:, None]

        labels, dtarget = (arrays.labels, cotangents.target) if arrays.labels.ndim == 1 else (None, None)
        scale, cap = arrays.curve.columns()
        return cls(
            labels=column(labels),
            scale=scale,
            lse=column(stats.lse),
            entropy=column(stats.entropy),
            dlse=column(cotangents.lse),
            dtarget=column(dtarget),
            dtotal=column(cotangents.total),
            dentropy=column(cotangents.entropy),
            cap=cap,
        )


class LogitCotangent(NamedTuple):
    """The cotangent of a chunk's z: factor * dz, and the sums of its rows.

    Attributes:
      dz: (m, columns), in the compute dtype.
      rows: (m,) float32 each, the terms of d(1/T) and dc, those that are asked for.
      factor: (m, 1) float32; None: 1.
      is_lost: (m,) bool, the rows that it does not hold; None: it holds all.
    """

    dz: jax.Array
    rows: Sequence[jax.Array]
    factor: jax.Array | None = None
    is_lost: jax.Array | None = None
