"""QuACK's products in CuTe DSL (quack-kernels), tuned by itself at the first call of a shape."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.peers import Absent, GroupedPeer, Peer, Prepared
from benchmarks.peers.torch_cublas import import_torch, prepare_with


def _interface() -> Any:
    try:
        import quack.gemm_interface as interface
    except ImportError as error:
        raise Absent(f"quack-kernels is not installed ({error})") from error
    return interface


def _version() -> str:
    try:
        return f"quack-kernels {importlib.metadata.version('quack-kernels')}"
    except importlib.metadata.PackageNotFoundError:
        return "quack-kernels of a version that it does not tell"


def load() -> list[Peer]:
    torch = import_torch()
    return [Peer("quack", _version(), prepare_with(_interface().gemm), jnp.from_dlpack, torch.cuda.synchronize)]


def load_grouped() -> list[GroupedPeer]:
    torch = import_torch()
    includes = "the products and their epilogues; columns of gate and up are interleaved in a weight made beforehand"
    prepare = functools.partial(_prepare, _interface())
    return [GroupedPeer("quack", _version(), includes, prepare, torch.cuda.synchronize)]


def _prepare(interface: Any, part: str, arguments: Sequence[jax.Array]) -> Prepared | None:
    torch = import_torch()
    *arrays, sizes = (torch.from_dlpack(jax.block_until_ready(x)) for x in arguments)
    if sizes.ndim != 1:
        return None  # a layer's routing
    offsets = torch.nn.functional.pad(sizes.cumsum(0), (1, 0)).to(torch.int32)
    by_rows = {"cu_seqlens_m": offsets}
    if part.startswith("experts"):
        x, w_gate_up, w_down, *dy = arrays
        w_gate_up = w_gate_up.transpose(2, 3).flatten(2).contiguous()
        if not dy:
            return Prepared(functools.partial(_forward, interface, x, w_gate_up, w_down, by_rows), jnp.from_dlpack)
        call = functools.partial(_with_gradients, interface, x, w_gate_up, w_down, *dy, offsets)
        return Prepared(call, _gradients_to_jax)
    a, b = arrays
    call: Callable[[], Any]
    if part.endswith("wgrad"):
        call = functools.partial(interface.gemm, a.T, b, cu_seqlens_k=offsets)
    elif part.endswith("SwiGLU"):
        groups, width, _ = b.shape
        b = b.reshape(groups, width, 2, -1).transpose(2, 3).flatten(2).contiguous()
        options = {"activation": "swiglu", "store_preact": False, **by_rows}
        return Prepared(lambda: interface.gemm_gated(a, b, **options)[1], jnp.from_dlpack)
    else:
        call = functools.partial(interface.gemm, a, b.mT if part.endswith("dgrad") else b, **by_rows)
    return Prepared(call, jnp.from_dlpack)


def _forward(interface: Any, x: Any, w_gate_up: Any, w_down: Any, by_rows: dict[str, Any]) -> Any:
    _, hidden = interface.gemm_gated(x, w_gate_up, activation="swiglu", store_preact=False, **by_rows)
    return interface.gemm(hidden, w_down, **by_rows)


def _with_gradients(interface: Any, x: Any, w_gate_up: Any, w_down: Any, dy: Any, offsets: Any) -> Any:
    by_rows, by_sums = {"cu_seqlens_m": offsets}, {"cu_seqlens_k": offsets}
    z, hidden = interface.gemm_gated(x, w_gate_up, activation="swiglu", **by_rows)
    y = interface.gemm(hidden, w_down, **by_rows)
    dz, hidden = interface.gemm_dgated(dy, w_down.mT, z, activation="swiglu", dynamic_scheduler=False, **by_rows)[:2]
    dw_down = interface.gemm(hidden.T, dy, **by_sums)
    dx = interface.gemm(dz, w_gate_up.mT, **by_rows)
    return y, dx, interface.gemm(x.T, dz, **by_sums), dw_down


def _gradients_to_jax(results: Sequence[Any]) -> Any:
    y, dx, dw_gate_up, dw_down = map(jnp.from_dlpack, results)
    groups, width, _ = dw_gate_up.shape
    return y, (dx, dw_gate_up.reshape(groups, width, -1, 2).swapaxes(2, 3), dw_down)
