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

    It is where it was measured to be faster, forward and backward together (`make bench-attention`, H200, at 93bd054,
    ms of the kernels and of cuDNN): heads wider than 128 without segments (causal, 1 x 8192: 8 heads of 256 2.67 and
    2.36, 16 of 192 over 128 4.67 and 3.95), and heads wider than 64 that see all keys, from 2048 tokens on (8 x 2048,
    32 heads of 128: 4.26 and 4.09). Arrays of all pairs are cuDNN's too, since the kernels' reading of them was not
    measured beside it; and so is everything on GPUs other than Hopper, where the kernels cannot run.

    Args:
      width: of a head, a multiple of 8.
      queries, keys: how many there are, T and S.
      is_causal, has_window, has_segments, has_mask, has_bias: the masks and what is added to scores. Segments, and a
        window beside a mask or a bias, are a dense mask to cuDNN.
    """
    if machine_reason() is not None or has_mask or has_bias:
        return True
    if has_segments:
        return False
    sees_all = not (is_causal or has_window)
    is_long = not (isinstance(queries, int) and isinstance(keys, int)) or min(queries, keys) >= 2048
    return width > 128 or (width > 64 and sees_all and is_long)
