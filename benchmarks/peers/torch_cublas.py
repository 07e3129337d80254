"""torch.matmul, which is cuBLAS by its own heuristics, and a loss by it; on the memory of the jax arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.peers import Absent, LossPeer, Peer, PreparedLoss


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


def prepare_loss(loss: Callable[[Any, Any, Any], Any]) -> Callable[..., PreparedLoss]:
    """`LossPeer.prepare` of a function of torch tensors x (M, D), w (V, D) and labels (M,)."""
    import torch

    def prepare(x: jax.Array, w: jax.Array, labels: jax.Array, has_gradient: bool) -> PreparedLoss:
        x, w, labels = (torch.from_dlpack(jax.block_until_ready(array)) for array in (x, w.T, labels))
        labels = labels.long()
        for factor in (x, w):
            factor.requires_grad_(has_gradient)

        def call() -> Any:
            with torch.set_grad_enabled(has_gradient):
                value = loss(x, w, labels)
            return (value, *torch.autograd.grad(value, (x, w))) if has_gradient else (value,)

        call()  # compiles kernels
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        made = call()
        torch.cuda.synchronize()
        results = sum(y.numel() * y.element_size() for y in made)
        temporaries = torch.cuda.max_memory_allocated() - before - results
        return PreparedLoss(call, float(made[0].detach()), temporaries)

    return prepare


def load_losses() -> list[LossPeer]:
    torch = import_torch()
    functions = torch.nn.functional
    prepare = prepare_loss(lambda x, w, labels: functions.cross_entropy(functions.linear(x, w), labels))
    return [LossPeer("torch", f"torch {torch.__version__}", prepare, torch.cuda.synchronize)]
