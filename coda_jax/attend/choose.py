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
    """Whether cuDNN's attention, which the caller has found able to compute this, is taken in the place of the kernels.

    It is where it was measured to be faster (`make bench-attention`, H200, 2026-11-29; ms of the kernels and cuDNN):
    heads wider than 128 without segments (forward and backward, 1 x 8192, causal: 8 heads of 256 2.49 and 2.35, 16 of
    192 over 128 4.80 and 3.85), and a bias of all pairs beside heads of up to 64, forward alone (8 x 2048, 32 heads:
    1.75 and 1.09; with the backward pass 5.24 and 7.08, but which it is, is not known here). All is on GPUs other than
    Hopper, where the kernels cannot run.

    Args:
      width: of a head, a multiple of 8.
      queries, keys: how many there are, T and S.
      is_causal, has_window, has_segments, has_mask, has_bias: the masks and what is added to scores. Segments, and a
        window beside a mask or a bias, are a dense mask to cuDNN.
    """
    del queries, keys, is_causal, has_window, has_mask  # on Hopper nothing that was measured depends on these
    if machine_reason() is not None:
        return True
    if has_segments:
        return False
    return width > 128 or (has_bias and width <= 64)
