"""Layers called with a `coda.Value`, which stands for an array not yet computed: inside of a `coda.block`.

A product is `x @ kernel`, of which biases, adapters, activations and the rotary embedding are maps; attention is
opaque. So the block that calls the layers, in whatever order, is planned as one, forward and backward. Arrays that are
kept have the names of `flax_layers.remat`, and stored arrays are sharded by the rules in force.

A layer that is called with arrays is a block of its own, of the same lines: `flax_layers.as_block`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

import coda_jax as coda
from coda_jax.extend import Head, array, in_heads, rotate_heads, split_heads, with_fallback_note
from flax_layers.adapters import apply, have_kernels
from flax_layers.fp8 import History
from flax_layers.linear import Linear, apply_as_one_product, is_linear, product
from flax_layers.remat import QKV, named
from flax_layers.sharding import STREAM, activation_spec, constrain

_HIDDEN_NAME = "mlpwi"  # of `flax_layers.remat`
_CALLS: dict[type, Any] = {}  # of the layers that take values


def takes_values(layer: type) -> type:
    """Marks a class of layers, which has `_linears`, whose own `__call__` takes values."""
    _CALLS[layer] = layer.__call__
    return layer


def accepts_values(layer: Any) -> bool:
    """Whether a layer takes values, by its class's own call: no subclass or tool has replaced it."""
    return any(isinstance(layer, cls) and type(layer).__call__ is call for cls, call in _CALLS.items())


class Reason(NamedTuple):
    """Why layers are not one block, and what to do about it."""

    text: str
    remedy: str


def why_not(layer: Any, x: Any) -> Reason | None:
    """Why a layer cannot be called with a value like x, an array or what holds one; None where it can."""
    if not accepts_values(layer):
        text = f"a {type(layer).__name__} does not take the values of a block"
        return Reason(text, "A coda.block takes the lines of a layer of your own")
    return why_not_linears(layer) or why_not_one_dtype([layer], x)


def why_not_linears(layer: Any, linears: Sequence[Any] | None = None) -> Reason | None:
    """`why_not` of a layer's modules in the place of Linears, all of them or these."""
    other = next((one for one in (layer._linears() if linears is None else linears) if not have_kernels(one)), None)
    if other is None:
        return None
    remedy = (
        "Keep a flax_layers.Linear, or a low-rank adapter of one, there. What logs an array may override the __call__ "
        "of the block or of its norm"
    )
    return Reason(_no_linear(layer, other), remedy)


def _no_linear(layer: Any, other: Any) -> str:
    """Says which module of a layer stands in the place of a Linear, and what it is."""
    owner, kind = type(layer).__name__, type(other)
    where = next((f"{owner}.{name}" for name, value in vars(layer).items() if value is other), f"A module of {owner}")
    if isinstance(other, Linear):
        what = f"a {kind.__name__}, a flax_layers.Linear with a __call__ of its own"
    elif kind.__name__ == "Linear":
        what = f"{kind.__module__.partition('.')[0]}'s Linear, no flax_layers.Linear"
    else:
        what = f"a {kind.__name__}, no flax_layers.Linear"
    return f"{where} is {what}"


def why_not_one_dtype(modules: Sequence[Any], x: Any) -> Reason | None:
    """`why_not` of modules whose layers compute in several dtypes."""
    dtypes = _dtypes(modules, x)
    each = ", ".join(f"{path} in {dtype}" for dtype, path in dtypes.items())
    return Reason(f"its layers compute in several dtypes, {each}", "Give them one dtype=") if len(dtypes) > 1 else None


def with_reason(x: jax.Array, reason: Reason) -> jax.Array:
    """x, with a note for GPUs and `coda.explain` why the layer that makes it is not one block."""
    message = (
        f"{reason.text}: its layer is not one block. Its products are kernels all the same, but norm, rotary, "
        "activation or their backward passes are passes of XLA's around them"
    )
    return with_fallback_note(x, "flax_layers", message, reason.remedy)


class Angles(NamedTuple):
    """The angles that attention of a value reads for positions: cos and sin, (T, Dh / 2) or with the rows of x.

    They are made outside of the block, so that a scan over layers makes them once. Both are None without a rotary
    embedding.
    """

    cos: Any
    sin: Any


def is_value(x: Any) -> bool:
    """Whether x is a value of a block, or a Stream of one."""
    return isinstance(array(x), coda.Value)


def check_call(layer: Any, layers: Sequence[Any], **options: Any) -> None:
    """Checks the call of a layer with a value, which some arguments do not fit.

    Args:
      layer: the layer that is called.
      layers: its modules in the place of Linears.
      options: arguments that must be None, by name.

    Raises:
      TypeError: an option that is not None; a module that is neither a Linear nor a low-rank adapter of one.
    """
    for option, value in options.items():
        if value is not None:
            rule = "write the sum, x + layer(h)" if option == "residual" else "call it with an array"
            raise TypeError(f"{type(layer).__name__}: {option} is given beside a value of a coda.block; {rule}")
    for one in layers:
        if not have_kernels(one):
            raise TypeError(
                f"{_no_linear(layer, one)}; for a value of a coda.block it must be one, or an nnx.LoRA or "
                "nnx.LoRALinear of a Linear"
            )


def in_stream(x: Any, name: str) -> Any:
    """x (..., D), of the residual stream, kept under this name and sharded as the stream."""
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
      gate_up: a kernel (D, 2, F), or a module in its place that returns (..., 2F); or two layers, gate and up.
      activation: of the gate.
      fp8, history: of the kernel's product; layers have their own.
    """
    if isinstance(gate_up, nnx.Module):
        z = apply(gate_up, x)
    elif not isinstance(gate_up, tuple):
        z = _with_sharded_halves(product(x, [gate_up[...]], fp8, history))
    else:  # one of them is an adapter: other pairs of layers have one kernel here
        gate, up = (hidden(apply(layer, x)).named(_HIDDEN_NAME) for layer in gate_up)
        return gate.map(lambda gate, up: activation(gate) * up, up)
    return z.named(_HIDDEN_NAME).map(coda.gated(activation))


def _with_sharded_halves(z: Any) -> Any:
    """The product (..., 2, F), with F sharded by the rules in force."""
    spec = activation_spec((*z.shape[:-2], z.shape[-1]), "batch", None, "mlp")
    return z if spec is None else z.constrained(jax.P(*spec[:-1], None, spec[-1]))


def activated(x: Any, up: Any, activation: Callable[[jax.Array], jax.Array]) -> Any:
    """activation(up(x)); without adapters the bias is added after the array that is kept."""
    if not is_linear(up) or up.bias is None:
        return hidden(apply(up, x)).named(_HIDDEN_NAME).map(activation)
    z = hidden(product(x, [up.kernel[...]], up.fp8, up.fp8_history)).named(_HIDDEN_NAME)
    return z.map(lambda z, bias: activation(z + bias[None, :]), up.bias[...])


def query_key_value(layer: Any, x: Any, angles: Angles, keys_values: Sequence[Any] | None = None) -> list[Any]:
    """q (..., T, H Dh), k and v (..., T, Hkv Dh), as attention reads them.

    Args:
      layer: the Attention.
      x: the value, (B, T, D) or (T, D).
      angles: of the positions, arrays or values.
      keys_values: k and v of another text, arrays or values, which are returned; there are no angles then.
    """
    layers = layer._projections()
    tables: Any = () if angles.cos is None else tuple(map(x._trace.value, angles))
    (q_scale, k_scale), head = _norms_of_heads(layer, x)
    if keys_values is not None:
        q = _over_width(layer, apply(layer.query, x), layer.q_norm)
        heads = [rotate_heads(q, tables, q_scale, head), *map(x._trace.value, keys_values)]
    elif layer.qk_norm == "width" or (len(layers) > 1 and not is_linear(*layers)):
        z_q, z_k, v = (apply(one, x) for one in layers)
        z_q, z_k = (_over_width(layer, z, norm) for z, norm in ((z_q, layer.q_norm), (z_k, layer.k_norm)))
        heads = [rotate_heads(z_q, tables, q_scale, head), rotate_heads(z_k, tables, k_scale, head), v]
    else:
        z = apply_as_one_product(layers, x) if is_linear(*layers) else apply(layers[0], x)
        heads = split_heads(z, tables, () if q_scale is None else (q_scale, k_scale), head, layer._ends)
    # With norms over each head, q and k before the norms come after q, k and v.
    specs = _column_specs(layer._specs(heads[0].shape[:-1]))
    each = zip(heads, (*QKV, *QKV[:2]), (*specs, *specs[:2]), strict=False)
    return [y.named(name).constrained(spec) for y, name, spec in each][:3]


def key_value(layer: Any, x: Any) -> list[Any]:
    """k and v (..., S, Hkv Dh) of a text that another one attends to; k is normalised.

    Args:
      layer: the Attention.
      x: the value, (B, S, D) or (S, D).
    """
    (_, k_scale), head = _norms_of_heads(layer, x)
    k, v = (apply(one, x) for one in (layer.key, layer.value))
    heads = rotate_heads(_over_width(layer, k, layer.k_norm), (), k_scale, head), v
    specs = _column_specs(layer._specs(x.shape[:-1]))[1:]
    return [y.named(name).constrained(spec) for y, name, spec in zip(heads, QKV[1:], specs, strict=True)]


def _norms_of_heads(layer: Any, x: Any) -> tuple[Any, Head]:
    """The scales of norms over each head of q and of k, or None of both; and what the heads are."""
    norms = [norm for norm in (layer.q_norm, layer.k_norm) if norm is not None and layer.qk_norm != "width"]
    head = Head(layer.head_dim, float(norms[0].epsilon) if norms else 0.0)
    return tuple(x._trace.value(norm.whole_scale) for norm in norms) or (None, None), head


def _over_width(layer: Any, z: Any, norm: Any) -> Any:
    """q or k, normalised over all heads where the layer has such norms."""
    return norm._deferred(z) if layer.qk_norm == "width" else z  # not norm(z): a tool may replace that call


def attention(
    layer: Any,
    x: coda.Value,
    angles: Angles,
    mask: Any = None,
    segment_ids: Any = None,
    cache: Any = None,
    bias: Any = None,
    keys_values: Sequence[Any] | None = None,
) -> Any:
    """Attention of a value; with a cache a pair of it and of the longer cache.

    Args:
      layer: the Attention.
      x: (B, T, D) or (T, D).
      angles: of the positions, arrays or values.
      mask, segment_ids, cache, bias: as in Attention, arrays or values.
      keys_values: k and v of another text.
    """
    q, k, v = query_key_value(layer, x, angles, keys_values)
    arrays = {"mask": mask, "segment_ids": segment_ids, "cache": cache, "bias": bias, "sinks": layer._sinks()}
    leaves, tree = jax.tree.flatten(arrays)

    def attention(q: jax.Array, k: jax.Array, v: jax.Array, *arrays: jax.Array) -> Any:
        q, k, v = (in_heads(y, layer.head_dim) for y in (q, k, v))
        return layer._attended(q, k, v, **jax.tree.unflatten(tree, arrays))

    context, longer = coda.opaque(attention, q, k, v, *leaves)
    y = apply(layer.out, context.constrained(_column_specs(layer._specs(x.shape[:-1]))[0]))
    return y if cache is None else (y, longer)


def _column_specs(specs: Sequence[jax.P] | None) -> list[jax.P | None]:
    """The specs of q, k and v as (..., T, H Dh), from their specs as (..., T, H, Dh)."""
    return [None] * 3 if specs is None else [jax.P(*spec[:-1]) for spec in specs]


def hidden(x: Any) -> Any:
    """The hidden activation (..., F), sharded by the rules in force."""
    return x.constrained(activation_spec(x.shape, "batch", None, "mlp"))


def dtype_of_products(modules: Sequence[Any], x: Any) -> Any:
    """The compute dtype of the layers of modules for x: the first, where they have several."""
    return next(iter(_dtypes(modules, x)), jnp.dtype(x.dtype))


def _dtypes(modules: Sequence[Any], x: Any) -> dict[Any, str]:
    """The compute dtypes of the layers of modules, each with the path of one."""
    dtypes: dict[Any, str] = {}
    for path, layer in (pair for module in modules for pair in nnx.iter_modules(module)):
        dtype, kernel = getattr(layer, "dtype", None), getattr(layer, "gate_up", None)
        if isinstance(layer, Linear | nnx.Linear):
            kernel = layer.kernel
        elif isinstance(layer, nnx.LoRA) and dtype is not None:  # without one it computes in its base's
            kernel = layer.lora_a
        if isinstance(kernel, nnx.Variable):
            resolved = jnp.dtype(dtype or jnp.result_type(x.dtype, kernel[...].dtype))
            dtypes.setdefault(resolved, ".".join(map(str, path)))
    return dtypes
