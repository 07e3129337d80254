"""Layers of a `coda.Value`, which stands for an array that is not there yet: what they are inside of a `coda.block`.

A product is `x @ kernel`, of which biases, adapters, activations and the rotary embedding are maps; attention is
opaque. So the block that calls the layers, in whatever order, is planned as one, forward and backward. What is kept has
the names of `flax_layers.remat`, and what lies in memory is laid by the rules in force.

A layer that is called with arrays is a block of its own, of the same lines: `flax_layers.as_block`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

import coda_jax as coda
from coda_jax.extend import Head, array, heads_apart, heads_turned, in_heads, noted
from flax_layers.adapters import have_kernels, mapped
from flax_layers.fp8 import History
from flax_layers.linear import Linear, is_linear, mapped_together, product
from flax_layers.remat import QKV, named
from flax_layers.sharding import STREAM, activation_spec, constrain

_HIDDEN_NAME = "mlpwi"  # of `flax_layers.remat`
_CALLS: dict[type, Any] = {}  # of the layers that take values


def takes_values(layer: type) -> type:
    """Marks a class of layers, which has `_linears`, whose own `__call__` takes values."""
    _CALLS[layer] = layer.__call__
    return layer


def takes(layer: Any) -> bool:
    """Whether a layer is one that takes values, called as it is: no subclass or tool has another call in its place."""
    return any(isinstance(layer, of) and type(layer).__call__ is call for of, call in _CALLS.items())


class Reason(NamedTuple):
    """Why layers are not one block, and what to do about it."""

    text: str
    remedy: str


def why_not(layer: Any, x: Any) -> Reason | None:
    """Why a layer cannot be called with a value like x, an array or what holds one; None where it can."""
    if not takes(layer):
        text = f"a {type(layer).__name__} does not take the values of a block"
        return Reason(text, "A coda.block takes the lines of a layer of your own")
    return why_not_linears(layer._linears()) or why_not_one_dtype([layer], x)


def why_not_linears(layers: Sequence[Any]) -> Reason | None:
    """`why_not` of what stands in the place of Linears."""
    other = next((type(one).__name__ for one in layers if not have_kernels(one)), None)
    if other is None:
        return None
    remedy = "Keep a flax_layers.Linear, or a low-rank adapter of one, there"
    return Reason(f"a {other} stands in the place of a Linear", remedy)


def why_not_one_dtype(modules: Sequence[Any], x: Any) -> Reason | None:
    """`why_not` of modules whose layers compute in several dtypes."""
    found = _dtypes(modules, x)
    each = ", ".join(f"{path} in {dtype}" for dtype, path in found.items())
    return Reason(f"its layers compute in several dtypes, {each}", "Give them one dtype=") if len(found) > 1 else None


def apart(x: jax.Array, reason: Reason) -> jax.Array:
    """x, with a note for GPUs and `coda.explain` why the layer that makes it is not one block."""
    message = f"{reason.text}: its layer is not one block, and norm, activation or their backward passes are passes"
    return noted(x, "flax_layers", message, reason.remedy)


class Angles(NamedTuple):
    """The angles that attention of a value takes for positions: cos and sin, (T, Dh / 2) or with the rows of x.

    They are made outside of the block, so that a scan over layers makes them once. Without a rotary embedding both are
    None.
    """

    cos: Any
    sin: Any


def is_value(x: Any) -> bool:
    """Whether x is a value of a block, or a Stream of one."""
    return isinstance(array(x), coda.Value)


def check_call(layer: Any, layers: Sequence[Any], **options: Any) -> None:
    """Raises where a layer is given a value beside what it has for arrays alone.

    Args:
      layer: which is called.
      layers: those that it is made of, in the place of Linears.
      options: what must be None, by its name.

    Raises:
      TypeError: an option that is not None; a module that is neither a Linear nor a low-rank adapter of one.
    """
    name = type(layer).__name__
    for option, given in options.items():
        if given is not None:
            rule = "write the sum, x + layer(h)" if option == "residual" else "call it with an array"
            raise TypeError(f"{name}: {option} is given beside a value of a coda.block; {rule}")
    for one in layers:
        if not have_kernels(one):
            raise TypeError(
                f"{name}: a {type(one).__name__} stands in the place of a Linear; for a value of a coda.block it must "
                "be a flax_layers.Linear, or an nnx.LoRA or nnx.LoRALinear of a Linear"
            )


def in_stream(x: Any, name: str) -> Any:
    """x (..., D), of the residual stream, which is kept under this name and lies as the stream does."""
    if isinstance(x, coda.Value):
        return x.named(name).constrained(activation_spec(x.shape, *STREAM))
    return named(constrain(x, *STREAM), name)


def gated(
    x: Any,
    gate_up: Any,
    activation: Callable[[jax.Array], jax.Array],
    fp8: coda.fp8.Recipe | None = None,
    history: History | None = None,
) -> Any:
    """activation(x @ gate) * (x @ up).

    Args:
      x: the value, (..., D).
      gate_up: a kernel (D, 2, F), or what stands in its place and gives (..., 2F); or two layers, gate and up.
      activation: of the gate.
      fp8, history: of the kernel's product; layers have their own.
    """
    if isinstance(gate_up, nnx.Module):
        z = mapped(gate_up, x)
    elif not isinstance(gate_up, tuple):
        z = _of_halves(product(x, [gate_up[...]], fp8, history))
    else:  # adapters among them: other pairs of layers have one kernel here
        gate, up = (hidden(mapped(layer, x)).named(_HIDDEN_NAME) for layer in gate_up)
        return gate.map(lambda gate, up: activation(gate) * up, up)
    return z.named(_HIDDEN_NAME).map(coda.gated(activation))


def _of_halves(z: Any) -> Any:
    """The product (..., 2, F), whose F a mesh may cut."""
    spec = activation_spec((*z.shape[:-2], z.shape[-1]), "batch", None, "mlp")
    return z if spec is None else z.constrained(jax.P(*spec[:-1], None, spec[-1]))


def activated(x: Any, up: Any, activation: Callable[[jax.Array], jax.Array]) -> Any:
    """activation(up(x)); without adapters the bias is added behind what is kept."""
    if not is_linear(up) or up.bias is None:
        return hidden(mapped(up, x)).named(_HIDDEN_NAME).map(activation)
    z = hidden(product(x, [up.kernel[...]], up.fp8, up.fp8_history)).named(_HIDDEN_NAME)
    return z.map(lambda z, bias: activation(z + bias[None, :]), up.bias[...])


def query_key_value(layer: Any, x: Any, angles: Angles, given: Sequence[Any] | None = None) -> list[Any]:
    """q (..., T, H Dh), k and v (..., T, Hkv Dh), as attention takes them.

    Args:
      layer: the Attention.
      x: the value, (B, T, D) or (T, D).
      angles: of the positions, arrays or values.
      given: k and v of another text, arrays or values, which stay as they are; there are no angles then.
    """
    layers = layer._projections()
    tables: Any = () if angles.cos is None else tuple(map(x._trace.value, angles))
    (of_q, of_k), head = _norms_of_heads(layer, x)
    if given is not None:
        q = _over_width(layer, mapped(layer.query, x), layer.q_norm)
        made = [heads_turned(q, tables, of_q, head), *map(x._trace.value, given)]
    elif layer.qk_norm == "width" or (len(layers) > 1 and not is_linear(*layers)):
        z_q, z_k, v = (mapped(one, x) for one in layers)
        z_q, z_k = (_over_width(layer, z, norm) for z, norm in ((z_q, layer.q_norm), (z_k, layer.k_norm)))
        made = [heads_turned(z_q, tables, of_q, head), heads_turned(z_k, tables, of_k, head), v]
    else:
        z = mapped_together(layers, x) if is_linear(*layers) else mapped(layers[0], x)
        made = heads_apart(z, tables, () if of_q is None else (of_q, of_k), head, layer._ends)
    # Behind norms of heads stand q and k before them.
    specs = _of_columns(layer._specs(made[0].shape[:-1]))
    each = zip(made, (*QKV, *QKV[:2]), (*specs, *specs[:2]), strict=False)
    return [y.named(name).constrained(spec) for y, name, spec in each][:3]


def key_value(layer: Any, x: Any) -> list[Any]:
    """k and v (..., S, Hkv Dh) of a text that another one attends to; k is normalised.

    Args:
      layer: the Attention.
      x: the value, (B, S, D) or (S, D).
    """
    (_, of_k), head = _norms_of_heads(layer, x)
    k, v = (mapped(one, x) for one in (layer.key, layer.value))
    made = heads_turned(_over_width(layer, k, layer.k_norm), (), of_k, head), v
    specs = _of_columns(layer._specs(x.shape[:-1]))[1:]
    return [y.named(name).constrained(spec) for y, name, spec in zip(made, QKV[1:], specs, strict=True)]


def _norms_of_heads(layer: Any, x: Any) -> tuple[Any, Head]:
    """The scales of norms over each head of q and of k, or None of both; and what the heads are."""
    norms = [norm for norm in (layer.q_norm, layer.k_norm) if norm is not None and layer.qk_norm != "width"]
    head = Head(layer.head_dim, float(norms[0].epsilon) if norms else 0.0)
    return tuple(x._trace.value(norm.whole_scale) for norm in norms) or (None, None), head


def _over_width(layer: Any, z: Any, norm: Any) -> Any:
    """q or k, normalised over all heads where the layer's norms are that."""
    return norm._deferred(z) if layer.qk_norm == "width" else z  # its call may be a tool's


def attention(
    layer: Any,
    x: coda.Value,
    angles: Angles,
    mask: Any = None,
    segment_ids: Any = None,
    cache: Any = None,
    bias: Any = None,
    given: Sequence[Any] | None = None,
) -> Any:
    """Attention of a value; with a cache a pair of it and of the longer cache.

    Args:
      layer: the Attention.
      x: (B, T, D) or (T, D).
      angles: of the positions, arrays or values.
      mask, segment_ids, cache, bias: as Attention has them, of arrays or values.
      given: k and v of another text.
    """
    q, k, v = query_key_value(layer, x, angles, given)
    leaves, tree = jax.tree.flatten({"mask": mask, "segment_ids": segment_ids, "cache": cache, "bias": bias})

    def attention(q: jax.Array, k: jax.Array, v: jax.Array, *arrays: jax.Array) -> Any:
        q, k, v = (in_heads(y, layer.head_dim) for y in (q, k, v))
        return layer._attended(q, k, v, **jax.tree.unflatten(tree, arrays))

    context, longer = coda.opaque(attention, q, k, v, *leaves)
    y = mapped(layer.out, context.constrained(_of_columns(layer._specs(x.shape[:-1]))[0]))
    return y if cache is None else (y, longer)


def _of_columns(specs: Sequence[jax.P] | None) -> list[jax.P | None]:
    """How q, k and v lie as (..., T, H Dh), of how they lie as (..., T, H, Dh)."""
    return [None] * 3 if specs is None else [jax.P(*spec[:-1]) for spec in specs]


def hidden(x: Any) -> Any:
    """The hidden activation (..., F), laid by the rules in force."""
    return x.constrained(activation_spec(x.shape, "batch", None, "mlp"))


def dtype_of_products(modules: Sequence[Any], x: Any) -> Any:
    """The compute dtype of the layers of modules, of x: that of the first, where they have several."""
    return next(iter(_dtypes(modules, x)), jnp.dtype(x.dtype))


def _dtypes(modules: Sequence[Any], x: Any) -> dict[Any, str]:
    """The compute dtypes of the layers of modules, each with the path of one."""
    found: dict[Any, str] = {}
    for path, layer in (pair for module in modules for pair in nnx.iter_modules(module)):
        dtype, kernel = getattr(layer, "dtype", None), getattr(layer, "gate_up", None)
        if isinstance(layer, Linear | nnx.Linear):
            kernel = layer.kernel
        elif isinstance(layer, nnx.LoRA) and dtype is not None:  # without one it computes in its base's
            kernel = layer.lora_a
        if isinstance(kernel, nnx.Variable):
            resolved = jnp.dtype(dtype or jnp.result_type(x.dtype, kernel[...].dtype))
            found.setdefault(resolved, ".".join(map(str, path)))
    return found
