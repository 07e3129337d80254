"""torch._scaled_mm, which is cuBLAS's product of e4m3 factors, with fast and with slow accumulation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.peers import Peer
from benchmarks.peers.torch_cublas import import_torch


def load() -> list[Peer]:
    torch = import_torch()
    one = torch.ones((), device="cuda")

    def prepare(fast: bool, a: jax.Array, b: jax.Array, transpose_a: bool, transpose_b: bool) -> Callable[[], Any]:
        if transpose_a or not transpose_b:
            raise ValueError("torch._scaled_mm takes a (M, K) and b (N, K)")
        a, b = (torch.from_dlpack(jax.block_until_ready(_bytes(x))).view(torch.float8_e4m3fn) for x in (a, b))
        options = {"scale_a": one, "scale_b": one, "out_dtype": torch.bfloat16, "use_fast_accum": fast}
        return functools.partial(torch._scaled_mm, a, b.T, **options)

    version = f"torch {torch.__version__}, CUDA {torch.version.cuda}"
    return [
        Peer(name, version, functools.partial(prepare, fast), jnp.from_dlpack, torch.cuda.synchronize)
        for name, fast in (("torch_fast", True), ("torch_slow", False))
    ]


def _bytes(x: jax.Array) -> jax.Array:
    """The same memory as bytes: DLPack has no fp8 in all versions."""
    return jax.lax.bitcast_convert_type(x, jnp.uint8)
