"""torch.matmul, which is cuBLAS by its own heuristics; on the memory of the jax arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.peers import Absent, Peer


def import_torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise Absent("torch is not installed") from error
    if not torch.cuda.is_available():
        raise Absent("torch finds no GPU")
    return torch


def prepare_with(multiply: Callable[[Any, Any], Any]) -> Callable[..., Callable[[], Any]]:
    """`Peer.prepare` of a function on torch tensors, to which a stored transpose is a view."""
    import torch

    def prepare(a: jax.Array, b: jax.Array, transpose_a: bool, transpose_b: bool) -> Callable[[], Any]:
        a, b = (torch.from_dlpack(jax.block_until_ready(x)) for x in (a, b))
        return functools.partial(multiply, a.T if transpose_a else a, b.T if transpose_b else b)

    return prepare


def load() -> list[Peer]:
    torch = import_torch()
    # A split product is added up in float32, as everywhere else in the table.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    version = f"torch {torch.__version__}, CUDA {torch.version.cuda}"
    return [Peer("torch", version, prepare_with(torch.matmul), jnp.from_dlpack, torch.cuda.synchronize)]
