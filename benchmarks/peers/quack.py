"""QuACK's product in CuTe DSL (quack-kernels), tuned by itself at the first call of a shape."""

from __future__ import annotations

import importlib.metadata

import jax.numpy as jnp

from benchmarks.peers import Absent, Peer
from benchmarks.peers.torch_cublas import import_torch, prepare_with


def load() -> list[Peer]:
    torch = import_torch()
    try:
        from quack.gemm_interface import gemm
    except ImportError as error:
        raise Absent(f"quack-kernels is not installed ({error})") from error
    version = f"quack-kernels {importlib.metadata.version('quack-kernels')}"
    return [Peer("quack", version, prepare_with(gemm), jnp.from_dlpack, torch.cuda.synchronize)]
