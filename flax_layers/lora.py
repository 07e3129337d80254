"""Low-rank adapters (LoRA, arXiv 2106.09685): put into a model, removed, or merged into its kernels.

    y = x @ kernel + x @ lora_a @ lora_b

Each is flax's nnx.LoRA around the module that it adapts, so that nnx.LoRAParam is what an optimizer is given:

    add_lora(model, 8, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.LoRAParam)
    loss, gradient = nnx.value_and_grad(loss_of, argnums=nnx.DiffState(0, nnx.LoRAParam))(model, tokens)

There is no factor alpha / rank: `lora_b` includes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from coda_jax.extend import explicit_cuts, explicit_sharding, join_halves, split_halves
from flax_layers.axis_metadata import name_parameters
from flax_layers.linear import Linear
from flax_layers.lm_head import LMHead
from flax_layers.moe.experts import Experts

# The projections that may be adapted, by the names of the modules' attributes.
PROJECTIONS = ("qkv", "query", "key", "value", "out", "gate_up", "gate", "up", "down")
_FEED_FORWARD = ("gate_up", "gate", "up", "down")


def add_lora(
    model: Any,
    rank: int,
    *,
    targets: Sequence[str] = PROJECTIONS,
    dtype: DTypeLike | None = None,
    param_dtype: DTypeLike = jnp.float32,
    rngs: nnx.Rngs,
) -> None:
    """Puts nnx.LoRA around projections of a Llama or a GPT2, in place; `lora_b` is 0, so that the model is the same.

    `gate_up` (D, 2, F) becomes the kernel (D, 2F) of a Linear. Layers stacked for a scan get stacked adapters.

    Args:
      model: the model, or a module with such projections.
      rank: r; a multiple of 8 for the kernel.
      targets: names of projections, of `PROJECTIONS` and "head"; default all but the head.
      dtype: compute dtype of the adapters; default that of what they adapt.
      param_dtype: storage dtype of `lora_a` (D, r) and `lora_b` (r, N).
      rngs: source of keys.

    Raises:
      ValueError: a rank below 1, a target that is unknown or that the model does not have, or an adapter there; or
        feed-forward targets of a model with experts, for which there are no adapters.
    """
    if not isinstance(rank, int) or rank < 1:
        raise ValueError(f"add_lora: {rank=} must be an integer, at least 1")
    known = (*PROJECTIONS, "head")
    if unknown := [name for name in targets if name not in known]:
        raise ValueError(f"add_lora: target {unknown[0]!r} is not one of {', '.join(known)}")
    if (feed_forward := [name for name in targets if name in _FEED_FORWARD]) and _has_experts(model):
        raise ValueError(
            f"add_lora: target {feed_forward[0]!r}: the model has experts, for which there are no adapters; give "
            "targets=('qkv', 'out'), of attention alone"
        )
    name_parameters(model)
    places = [(parent, name) for parent, name in projections(model) if name in targets]
    missing = set(targets) - {name for _, name in places}
    if not places or (tuple(targets) != PROJECTIONS and missing):
        raise ValueError(f"add_lora: the model has no {', '.join(sorted(missing))}")
    for parent, name in places:
        if isinstance(getattr(parent, name), nnx.LoRA | nnx.LoRALinear):
            raise ValueError(f"add_lora: {name} has an adapter already: merge_lora or remove_lora first")
    for parent, name in places:
        *stacked, features, columns = _sizes(parent, name)
        draws = [
            nnx.LoRA(features, rank, columns, param_dtype=param_dtype, rngs=rngs)
            for _ in range(stacked[0] if stacked else 1)
        ]
        a, b = (
            jnp.stack([x[...] for x in arrays]) if stacked else arrays[0][...]
            for arrays in zip(*((lora.lora_a, lora.lora_b) for lora in draws), strict=True)
        )
        put_lora(parent, name, a, b, dtype=dtype)


def merge_lora(model: Any) -> None:
    """Adds lora_a @ lora_b to each kernel, in place, and removes the adapters; in float32, rounded once.

    A head that is tied to the embedding has no kernel of its own.

    Raises:
      ValueError: an adapter of a tied head, or one around another module than a Linear.
    """
    _take_out(model, merge=True)


def remove_lora(model: Any) -> None:
    """Removes the adapters, in place, which leaves the model that was adapted.

    Raises:
      ValueError: an adapter around another module than a Linear.
    """
    _take_out(model, merge=False)


def _take_out(model: Any, *, merge: bool) -> None:
    name_parameters(model)
    places = [(parent, name) for parent, name in projections(model) if _is_adapted(getattr(parent, name))]
    for parent, name in places:
        base = _base_of(getattr(parent, name))
        if not isinstance(base, nnx.Linear | Linear | LMHead):
            raise ValueError(f"{name} is an adapter around {type(base).__name__}, which is no Linear")
        if merge and base.kernel is None:
            raise ValueError(f"{name} is tied to the embedding: its adapter cannot be merged into a kernel")
    for parent, name in places:
        adapter = getattr(parent, name)
        base, lora = _base_of(adapter), getattr(adapter, "lora", adapter)
        if merge:
            kernel = base.kernel[...]
            base.kernel[...] = (kernel.astype(jnp.float32) + _delta(kernel, lora)).astype(kernel.dtype)
        if name == "gate_up":
            parent.gate_up = nnx.Param(split_halves(base.kernel[...]))
        elif isinstance(adapter, nnx.LoRALinear):
            bias = None if base.bias is None else base.bias[...]
            setattr(parent, name, _linear(base.kernel[...], bias, base.dtype))
        else:
            setattr(parent, name, base)
        name_parameters(parent)


def put_lora(parent: Any, name: str, a: jax.Array, b: jax.Array, *, dtype: DTypeLike | None = None) -> None:
    """Puts an nnx.LoRA with these arrays, (D, r) and (r, N) or stacks of them, around the projection `name`."""
    base = getattr(parent, name)
    if name == "gate_up" and not isinstance(base, nnx.Module):
        base = _linear(join_halves(base[...]), None, parent.dtype)
    base_dtype = base.dtype

    def abstract() -> nnx.LoRA:
        return nnx.LoRA(a.shape[-2], a.shape[-1], b.shape[-1], dtype=dtype or base_dtype, rngs=nnx.Rngs(0))

    lora = nnx.eval_shape(abstract)
    lora.param_dtype = a.dtype
    lora.lora_a, lora.lora_b = nnx.LoRAParam(a), nnx.LoRAParam(b)
    lora.base_module = nnx.data(base)
    setattr(parent, name, lora)
    name_parameters(parent)


def projections(model: Any) -> Iterator[tuple[Any, str]]:
    """The modules that have projections, and the names of these, `PROJECTIONS` and "head"."""
    for _, module in nnx.iter_modules(model):
        if not isinstance(module, nnx.LoRA | nnx.LoRALinear | Experts):
            for name in (*PROJECTIONS, "head"):
                value = vars(module).get(name)
                if isinstance(value, nnx.Module) or (name == "gate_up" and value is not None):
                    yield module, name


def _has_experts(model: Any) -> bool:
    return any(isinstance(module, Experts) for _, module in nnx.iter_modules(model))


def _is_adapted(module: Any) -> bool:
    return isinstance(module, nnx.LoRALinear) or (isinstance(module, nnx.LoRA) and module.base_module is not None)


def _base_of(adapter: Any) -> Any:
    return adapter if isinstance(adapter, nnx.LoRALinear) else adapter.base_module


def _delta(kernel: jax.Array, lora: nnx.LoRA) -> jax.Array:
    """lora_a @ lora_b in float32, sharded as the kernel over explicit mesh axes."""
    a, b = (x[...].astype(jnp.float32) for x in (lora.lora_a, lora.lora_b))
    kernel_sharding = explicit_sharding(kernel)
    if kernel_sharding is not None:
        is_traced = isinstance(kernel, jax.core.Tracer)
        mesh: Any = kernel_sharding.mesh if is_traced else kernel.sharding.mesh  # type: ignore[attr-defined]
        reshard = jax.sharding.reshard if is_traced else jax.device_put  # outside of jax.set_mesh, too
        *lead, rows, columns = (axes or None for axes in explicit_cuts(kernel))
        a = reshard(a, NamedSharding(mesh, PartitionSpec(*lead, rows, None)))
        b = reshard(b, NamedSharding(mesh, PartitionSpec(*lead, None, columns)))
    return a @ b


def _sizes(parent: Any, name: str) -> tuple[int, ...]:
    """(D, N) of a projection, after the number of layers where they are stacked."""
    base: Any = getattr(parent, name)
    if isinstance(base, LMHead):
        return base.in_features, base.vocab_size
    if not isinstance(base, nnx.Module):
        *rows, two, features = base.shape
        return (*rows, two * features)
    kernel: Any = vars(base)["kernel"]
    shape: tuple[int, ...] = kernel.shape
    return shape


def _linear(kernel: jax.Array, bias: jax.Array | None, dtype: DTypeLike | None) -> Linear:
    """A Linear of these arrays, or of stacks of them."""
    sizes: Any = kernel.shape[-2:]
    linear: Linear = nnx.eval_shape(lambda: Linear(*sizes, use_bias=bias is not None, dtype=dtype, rngs=nnx.Rngs(0)))
    linear.kernel = nnx.Param(kernel)
    if bias is not None:
        linear.bias = nnx.Param(bias)
    return linear
