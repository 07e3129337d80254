"""The memory of `plan_costs`: what a device holds at once.

With P parameters of all layers, embedding and head, f devices of FSDP, t of tensor parallelism, T tokens on a device,
and V columns of the vocabulary on a device,

| what                  | bytes                                                                               |
|-----------------------|-------------------------------------------------------------------------------------|
| parameters, gradients | P / f / t elements, of `param_dtype` and of `gradient_dtype`                        |
| optimizer             | `optimizer_states` P / f / t elements of `optimizer_dtype`; Adam has two moments    |
| activations           | 2 T (2 D + (Q + H + 2 F) / t) of each layer; less with `remat`, plus one full layer |
| gathered              | 2 P / t of the layers' parameters, if f > 1; with `remat` those of one layer        |
| head                  | 2 C V, of a chunk of C tokens; 2 V D of the weight and 4 V D of its gradient        |

Adam is described in arXiv 1412.6980. Activations are the bfloat16 arrays that layers of this library keep: the stream
before each sub-layer, qkv, the context, and the hidden product. Sequence parallelism shards the stream over t, too;
with k experts a token it is 2 + k times as wide, and F is that of k experts. The head's weight counts if it is gathered
or cast, and its gradient if it is not the one that is kept. Other memory that XLA allocates is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from coda_jax.costs import loss_chunk
from flax_layers.plan.steps import Sizes
from flax_layers.remat import (
    ATTENTION_OUTPUT,
    CONTEXT,
    EXPERT_ROWS,
    LAYER_INPUT,
    LAYER_OUTPUT,
    NAMES,
    POLICIES,
    QKV,
    names_of,
)

if TYPE_CHECKING:
    from flax_layers.plan.costs import PlanCosts


def kept_names(remat: Any) -> frozenset[str]:
    """The arrays that a layer keeps, by the names of `flax_layers.remat`.

    Raises:
      ValueError: an unknown policy or name, or a policy that is a function, which does not tell what it keeps.
    """
    if remat is None:
        return NAMES
    if callable(remat) or (isinstance(remat, str) and remat not in POLICIES):
        allowed = f"{', '.join(POLICIES)}, names of arrays to keep as a tuple, or None"
        raise ValueError(f"plan_costs: {remat=}; it must be one of {allowed}")
    return names_of(remat) | {LAYER_INPUT, LAYER_OUTPUT}


def made_again(sizes: Sizes, remat: Any) -> tuple[str, ...]:
    """The products of a layer, by name, that run again in the backward pass. The last one of a layer never does."""
    if remat is None:
        return ()
    kept = kept_names(remat)
    needs: Mapping[str, set[str]] = {"qkv": {*QKV}, "out": {ATTENTION_OUTPUT}}
    names = [name for name, _, _ in sizes.products if not name.endswith("down")]
    return tuple(name for name in names if not needs.get(name, {"mlpwi"}) <= kept)


def gib_of(plan: PlanCosts) -> dict[str, float]:
    """GiB on a device, by use."""
    sizes, mesh = plan.sizes, plan.mesh
    layer_parameters = sizes.parameters_of_all_tokens + sizes.parameters_of_experts / mesh.get("expert", 1)
    parameters = sizes.layers * layer_parameters + sizes.vocabulary * sizes.features * 2
    shard = parameters / mesh["fsdp"] / mesh["tensor"]
    all_kept = _layer_bytes(plan, kept_names(None))
    kept = sizes.layers * _layer_bytes(plan, kept_names(plan.remat))
    gathered = 2 * layer_parameters / mesh["tensor"] if mesh["fsdp"] > 1 else 0.0
    each = {
        "parameters": shard * _bytes(plan.param_dtype),
        "gradients": shard * _bytes(plan.gradient_dtype),
        "optimizer": shard * plan.optimizer_states * _bytes(plan.optimizer_dtype),
        "activations": kept if plan.remat is None else kept + all_kept - kept / sizes.layers,
        "gathered": gathered * (sizes.layers if plan.remat is None else 1),
        "head": _head(plan),
    }
    return {name: size / 2**30 for name, size in each.items()}


def _layer_bytes(plan: PlanCosts, names: frozenset[str]) -> float:
    """Bytes of a layer's activations with these names."""
    sizes, tensor = plan.sizes, plan.mesh["tensor"]
    stream_shards = tensor if plan.sequence_parallel else 1
    hidden = (sizes.experts_per_token or 1) * sizes.hidden + sizes.shared
    heads, key_value = sizes.heads * sizes.head, sizes.key_value_heads * sizes.head
    query, key, value = QKV
    elements = {
        LAYER_INPUT: sizes.features / stream_shards,  # LAYER_OUTPUT is the next layer's
        query: heads / tensor,
        key: key_value / tensor,
        value: key_value / tensor,
        CONTEXT: heads / tensor,
        ATTENTION_OUTPUT: sizes.features / stream_shards,
        EXPERT_ROWS: sizes.experts_per_token * sizes.features / stream_shards,
        "mlpwi": (1 + sizes.is_gated) * hidden / tensor,
    }
    return 2 * plan.tokens * sum(size for name, size in elements.items() if name in names)


def _head(plan: PlanCosts) -> float:
    """Bytes of a chunk's exponentials, and of the copies of the head's weight and its gradient, if there are any."""
    sizes, is_sharded = plan.sizes, plan.mesh["fsdp"] > 1
    is_cast = is_sharded or plan.param_dtype != np.dtype(jnp.bfloat16).name
    vocabulary = sizes.vocabulary // plan.mesh["tensor"]
    chunk, columns = loss_chunk(plan.tokens, sizes.features, vocabulary, has_copy=is_cast)
    weight_elements = columns * sizes.features
    has_own_gradient = is_sharded or plan.gradient_dtype != np.dtype(jnp.float32).name
    return 2 * chunk * columns + 2 * weight_elements * is_cast + 4 * weight_elements * has_own_gradient


def _bytes(dtype: str) -> int:
    return np.dtype(dtype).itemsize
