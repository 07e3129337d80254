"""The function of a head's logits z before they are summed: y = z / T or, capped, y = c tanh(z / c) / T."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from coda_jax.operators.head.arrays import Statistics


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

    def cotangent_columns(self, labels: jax.Array, stats: Statistics, cotangents: Statistics) -> list[Any]:
        """Columns (m, 1), or None, that the cotangent of z reads: labels, scale, statistics and their cotangents, cap.

        The columns of labels and of the targets' cotangents are None where a token has several labels, (m, k).
        """
        targets = (labels, cotangents.target) if labels.ndim == 1 else (None, None)
        rows = (stats.lse, stats.entropy, cotangents.lse, targets[1], cotangents.total, cotangents.entropy)
        label_column, *others = (None if x is None else x[:, None] for x in (targets[0], *rows))
        scale, cap = self.columns()
        return [label_column, scale, *others, cap]

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
