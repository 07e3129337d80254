"""Attention of PyTorch by cuDNN, of rows of several lengths, and FlexAttention; on the memory of the jax arrays."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.attention_cases import Case
from benchmarks.peers import AttentionPeer, PreparedAttention
from benchmarks.peers.torch_cublas import import_torch

Attend = Callable[[Any, Any, Any], Any]  # tensors q (B, T, H, D), k and v -> y


def _by_cudnn(torch: Any, case: Case) -> Attend | None:
    if case.mean is not None or case.window is not None:
        return None  # an array of all pairs, which cuDNN's attention in PyTorch would read
    from torch.nn.attention import SDPBackend, sdpa_kernel

    options = {"is_causal": case.is_causal, "enable_gqa": case.heads != case.key_heads}

    def attend(q: Any, k: Any, v: Any) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)

    return attend


def _varlen(torch: Any, case: Case) -> Attend | None:
    if case.mean is None:
        return None
    lengths = [length for row in case.documents for length in row]
    most = max(lengths)
    ends = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
    window = (-1 if case.window is None else case.window - 1, 0 if case.is_causal else -1)
    multiply = _varlen_function(torch, window, case.heads != case.key_heads)
    if multiply is None:
        return None

    def attend(q: Any, k: Any, v: Any) -> Any:
        rows = (x.flatten(0, 1) for x in (q, k, v))
        return multiply(*rows, ends, ends, most, most).unflatten(0, q.shape[:2])

    return attend


def _varlen_function(torch: Any, window: tuple[int, int], is_grouped: bool) -> Callable[..., Any] | None:
    """f(q, k, v, ends of queries, ends of keys, most queries, most keys) -> y, of rows one after the other."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        of_aten = torch.ops.aten._flash_attention_forward
        left, right = (None if size < 0 else size for size in window)

        def by_aten(*arguments: Any) -> Any:
            bounds = {"window_size_left": left, "window_size_right": right} if left is not None else {}
            return of_aten(*arguments, 0.0, right == 0, False, **bounds)[0]

        return by_aten
    names = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"enable_gqa": is_grouped} if "enable_gqa" in names else {}
    if "window_size" in names:
        options["window_size"] = window
    elif window[0] >= 0:
        return None
    else:
        options["is_causal"] = window[1] == 0
    return functools.partial(varlen_attn, **options)


def visible_of(case: Case, ids: Any) -> Callable[..., Any]:
    """FlexAttention's mask of a case and its segment ids (B, T): whether a query sees a key."""

    def visible(batch: Any, head: Any, query: Any, key: Any) -> Any:
        seen = ids[batch, query] == ids[batch, key] if case.mean is not None else query == query
        if case.is_causal:
            seen = seen & (key <= query)
        return seen if case.window is None else seen & (key > query - case.window)

    return visible


def _flex(torch: Any, case: Case) -> Attend | None:
    if case.mean is None and case.window is None:
        return None
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    visible = visible_of(case, torch.from_numpy(case.segment_ids()).cuda())
    torch.compiler.reset()  # what is compiled for the cases before counts towards a limit
    rows = None if case.mean is None else case.batch
    mask = create_block_mask(visible, rows, None, case.length, case.length, device="cuda")
    options = {"block_mask": mask, "enable_gqa": case.heads != case.key_heads}
    compiled = torch.compile(flex_attention, dynamic=False)

    def attend(q: Any, k: Any, v: Any) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return compiled(q, k, v, **options).transpose(1, 2)

    return attend


def _prepare(torch: Any, make: Callable[[Any, Case], Attend | None]) -> Any:
    @functools.lru_cache(maxsize=1)  # one for both passes and all sets of arrays of a case
    def attend_of(case: Case) -> Attend | None:
        return None if case.has_bias else make(torch, case)

    def prepare(case: Case, arrays: Sequence[jax.Array]) -> PreparedAttention | None:
        attend = attend_of(case)
        if attend is None:
            return None
        q, k, v, *dy = (torch.from_dlpack(jax.block_until_ready(x)) for x in arrays)
        inputs = [x.detach().requires_grad_(bool(dy)) for x in (q, k, v)]

        def call() -> Any:
            with torch.set_grad_enabled(bool(dy)):
                y = attend(*inputs)
            return (y.detach(), *torch.autograd.grad(y, inputs, *dy)) if dy else (y,)

        call()  # compiles kernels
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        made = call()
        torch.cuda.synchronize()
        results = sum(x.numel() * x.element_size() for x in made)
        return PreparedAttention(call, to_jax, torch.cuda.max_memory_allocated() - before - results)

    def to_jax(results: Any) -> tuple[jax.Array, ...]:
        torch.cuda.synchronize()
        return tuple(jnp.from_dlpack(x.contiguous()) for x in results)

    return prepare


def load_attention() -> list[AttentionPeer]:
    torch = import_torch()
    version = f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}"
    made = {
        "torch_cudnn": (_by_cudnn, "scaled_dot_product_attention by cuDNN"),
        "torch_varlen": (_varlen, "documents of all rows one after the other, by FlashAttention 2"),
        "torch_flex": (_flex, "flex_attention, compiled; its mask of blocks is made before"),
    }
    return [
        AttentionPeer(name, version, includes, _prepare(torch, make), torch.cuda.synchronize)
        for name, (make, includes) in made.items()
    ]
