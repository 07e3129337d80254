"""Rotary frequencies stretched for longer contexts."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from flax_layers.config_checks import check_not_negative, check_positive


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """The scaling of rotary frequencies that Llama 3.1 and later have, with Hugging Face's names.

    A frequency of wavelength w, n = original_max_position_embeddings / w turns over the original context, becomes

        frequency * (s + (1 - s) / factor),  s = (n - low_freq_factor) / (high_freq_factor - low_freq_factor) in [0, 1]

    Raises:
      ValueError: a factor or a context that is no number above 0, or a high_freq_factor that is not above
        low_freq_factor, 0 or more.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        check_positive(self, "factor", "high_freq_factor", "original_max_position_embeddings")
        check_not_negative(self, "low_freq_factor")
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"RopeScaling: high_freq_factor={self.high_freq_factor!r}; it must be above "
                f"low_freq_factor={self.low_freq_factor!r}"
            )

    def scaled(self, frequency: jax.Array) -> jax.Array:
        """The frequencies, in radians a position, after scaling."""
        turns = self.original_max_position_embeddings * frequency / (2 * math.pi)
        s = jnp.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0, 1)
        return frequency * (s + (1 - s) / self.factor)
