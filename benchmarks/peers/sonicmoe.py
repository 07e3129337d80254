"""SonicMoE's expert layer (sonic-moe, on QuACK's products), by its interface for a router's choice that is given."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.peers import Absent, GroupedPeer, Prepared
from benchmarks.peers.torch_cublas import import_torch


def load_grouped() -> list[GroupedPeer]:
    torch = import_torch()
    try:
        import sonicmoe
    except ImportError as error:
        raise Absent(f"sonic-moe is not installed ({error})") from error
    includes = "its sort of the choices, gathers in its products, the weighted sum; weights in its layout beforehand"
    version = f"sonic-moe {importlib.metadata.version('sonic-moe')}"
    return [GroupedPeer("sonicmoe", version, includes, functools.partial(_prepare, sonicmoe), torch.cuda.synchronize)]


def _prepare(sonicmoe: Any, part: str, arguments: Sequence[jax.Array]) -> Prepared | None:
    if not part.startswith("layer"):
        return None
    torch = import_torch()
    x, weights, w_gate_up, w_down, *rest = (torch.from_dlpack(jax.block_until_ready(one)) for one in arguments)
    *dy, ids = rest
    tokens, top_k = ids.shape
    experts = w_down.shape[0]
    # (2I, H, E) and (H, I, E), each with E of the largest stride and the second axis of the smallest.
    w1 = w_gate_up.permute(0, 2, 3, 1).flatten(1, 2).contiguous().permute(1, 2, 0)
    w2 = w_down.transpose(1, 2).contiguous().permute(1, 2, 0)
    of_tokens = torch.arange(tokens, device=x.device, dtype=torch.int32).repeat_interleave(top_k)
    stream = torch.cuda.current_stream().cuda_stream
    inputs = [x, weights.flatten(), w1, w2]
    if dy:
        inputs = [one.detach().clone().requires_grad_() for one in (x, weights.flatten())]
        inputs += [one.detach().requires_grad_() for one in (w1, w2)]

    def forward() -> Any:
        x, scores, w1, w2 = inputs
        routing = (scores, of_tokens, ids.flatten())
        activation = sonicmoe.enums.ActivationType.SWIGLU
        options = {"is_inference_mode_enabled": not dy, "concat_layout": True}
        return sonicmoe.moe_general_routing_inputs(
            x, *routing, w1, None, w2, None, experts, stream, activation, **options
        )[0]

    def with_gradients() -> Any:
        y = forward()
        return y.detach(), torch.autograd.grad(y, inputs, *dy)

    def to_jax(results: Any) -> Any:
        y, (dx, dscores, dw1, dw2) = results
        dw1 = jnp.from_dlpack(dw1.permute(2, 0, 1).contiguous()).reshape(experts, 2, -1, x.shape[1])
        dw2 = jnp.from_dlpack(dw2.permute(2, 0, 1).contiguous()).swapaxes(1, 2)
        y, dx, dscores = map(jnp.from_dlpack, (y, dx, dscores))
        return y, (dx, dscores.reshape(tokens, top_k), dw1.transpose(0, 3, 1, 2), dw2)

    return Prepared(with_gradients, to_jax) if dy else Prepared(forward, jnp.from_dlpack)
