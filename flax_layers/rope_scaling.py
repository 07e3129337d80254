"""Rotary frequencies stretched for longer contexts."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """The scaling of rotary frequencies that Llama 3.1 and later have, with Hugging Face's names.

    A frequency of wavelength w, n = original_max_position_embeddings / w turns over the original context, becomes

        frequency * (s + (1 - s) / factor),  s = (n - low_freq_factor) / (high_freq_factor - low_freq_factor) in [0, 1]
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def scaled(self, frequency: jax.Array) -> jax.Array:
        """The frequencies, in radians a position, after scaling."""
        turns = self.original_max_position_embeddings * frequency / (2 * math.pi)
        s = jnp.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0, 1)
        return frequency * (s + (1 - s) / self.factor)
