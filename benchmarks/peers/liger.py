"""Liger's fused linear cross-entropy, a chunk of tokens at a time; on the memory of the jax arrays.

As its users have it: the gradient of w is summed over the chunks in the dtype of w.
"""

from __future__ import annotations

from importlib.metadata import version

from benchmarks.peers import Absent, LossPeer
from benchmarks.peers.torch_cublas import import_torch, prepare_loss


def load_losses() -> list[LossPeer]:
    torch = import_torch()
    try:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy
    except ImportError as error:
        raise Absent("liger-kernel is not installed") from error
    prepare = prepare_loss(liger_fused_linear_cross_entropy)
    return [LossPeer("liger", f"liger-kernel {version('liger-kernel')}", prepare, torch.cuda.synchronize)]
