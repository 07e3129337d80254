"""The residual that a module adds its result to."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

import coda_jax as coda
from coda_jax import DeferredNorm, Stream
from coda_jax.extend import array

Residual = jax.Array | Stream | Literal[True] | None


class Sum(NamedTuple):
    """The residual that a result is added to.

    Attributes:
      array: the residual itself.
      is_stream: whether the sum is a Stream.
      has_sums: whether that Stream has the row sums of its squares.
      is_normalised: whether the norm of the module's input normalises it.
    """

    array: jax.Array
    is_stream: bool
    has_sums: bool
    is_normalised: bool = False

    @classmethod
    def of(cls, residual: Residual, x: Any) -> Sum | None:
        """The residual that a module's `residual=` means, beside the input x.

        Args:
          residual: True for the array that x, a DeferredNorm, normalises; an array or a Stream; None for no residual.
          x: the module's input.
        """
        if residual is None:
            return None
        if isinstance(x, coda.Value):
            raise TypeError("residual is given beside a value of a coda.block; write the sum, x + layer(h)")
        if residual is True:
            if not isinstance(x, DeferredNorm):
                raise ValueError(
                    "residual=True adds what a norm that is not applied yet normalises; the input is "
                    f"{type(x).__name__}. Give the norm a Stream, or give the residual itself"
                )
            return cls(x.x, True, x.mean is None, True)
        return cls(jnp.asarray(array(residual)), isinstance(residual, Stream), isinstance(residual, Stream))
