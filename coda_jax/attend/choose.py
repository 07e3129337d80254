"""The calls at which cuDNN's attention is taken in the place of the kernels here, by what was measured."""

from __future__ import annotations

from typing import Any

from coda_jax.lowering.select import machine_reason


def prefers_cudnn(
    width: int,
    queries: Any,
    keys: Any,
    *,
    is_causal: bool = False,
    has_window: bool = False,
    has_segments: bool = False,
    has_mask: bool = False,
    has_bias: bool = False,
) -> bool:
    """Whether cuDNN's attention, which the caller has found able to compute this, is faster than `coda.attention`.

    `make bench-attention` measures both, by width, length and mask. It is also where the kernels here cannot run: on
    GPUs other than Hopper.

    Args:
      width: of a head, a multiple of 8.
      queries, keys: how many there are, T and S.
      is_causal, has_window, has_segments, has_mask, has_bias: the masks and what is added to scores. Segments, and a
        window beside a mask or a bias, are a dense mask to cuDNN.
    """
    if machine_reason() is not None:
        return True
    return width == 256 and not has_segments
