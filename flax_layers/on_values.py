"""Layers inside of a `coda.block`: what they are of a `coda.Value`, which stands for an array that is not there yet.

A product is `x @ kernel`, of which biases, adapters, activations and the rotary embedding are maps; attention is
opaque. So the block that calls the layers, in whatever order, is planned as one, forward and backward. What is kept has
the names of `flax_layers.remat`, and what lies in memory is laid by the rules in force.

`linear.project` multiplies values, and with it Linear and its adapters do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

import coda_jax as coda
from coda_jax.extend import array, explicit_axes, in_heads
from flax_layers.attend import attend
from flax_layers.linear import Linear, is_linear, mapped, takes_norm
from flax_layers.remat import QKV, named
from flax_layers.sharding import STREAM, activation_spec, constrain, mesh_axes, spec_of

_HIDDEN_NAME = "mlpwi"  # of `flax_layers.remat`


class Angles(NamedTuple):
    """What attention of a value takes for positions: cos and sin, (T, Dh / 2) or with the rows of x.

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
        if not takes_norm(one):
            raise TypeError(
                f"{name}: a {type(one).__name__} stands in the place of a Linear; for a value of a coda.block it must "
                "be a flax_layers.Linear, or an nnx.LoRA or nnx.LoRALinear of a Linear"
            )


def linear(layer: Any, x: Any) -> Any:
    """layer(x), of a Linear or an adapter of one."""
    return mapped(layer, x)


def in_stream(x: Any, name: str) -> Any:
    """x (..., D), of the residual stream, which is kept under this name; an array also lies as the stream does.

    A value is not laid: a product that makes it would have the columns of its factor gathered, over all mesh axes.
    """
    return x.named(name) if isinstance(x, coda.Value) else named(constrain(x, *STREAM), name)


def gated(x: Any, gate_up: Any, activation: Callable[[jax.Array], jax.Array]) -> Any:
    """activation(x @ gate) * (x @ up).

    Args:
      x: the value, (..., D).
      gate_up: a kernel (D, 2, F), or what stands in its place and gives (..., 2F); or two layers, gate and up.
      activation: of the gate.
    """
    if isinstance(gate_up, nnx.Module):
        z = linear(gate_up, x)
    elif not isinstance(gate_up, tuple):
        kernel: Any = gate_up[...]
        if hasattr(kernel, "has_halves"):  # an argument of the block: its halves stay apart, of which a mesh may cut F
            kernel.has_halves = True
        z = _of_halves(x @ kernel)
    elif _are_one_product(gate_up, "mlp"):
        z = _in_one_product(gate_up, x)
    else:
        gate, up = (hidden(linear(layer, x)).named(_HIDDEN_NAME) for layer in gate_up)
        return gate.map(lambda gate, up: activation(gate) * up, up)
    return z.named(_HIDDEN_NAME).map(coda.gated(activation))


def _of_halves(z: Any) -> Any:
    """The product (..., 2, F), whose F a mesh may cut."""
    spec = activation_spec((*z.shape[:-2], z.shape[-1]), "batch", None, "mlp")
    return z if spec is None else z.constrained(jax.P(*spec[:-1], None, spec[-1]))


def activated(x: Any, up: Any, activation: Callable[[jax.Array], jax.Array]) -> Any:
    """activation(up(x)); without adapters the bias is added behind what is kept."""
    if not is_linear(up) or up.bias is None:
        return hidden(linear(up, x)).named(_HIDDEN_NAME).map(activation)
    z = hidden(x @ up.kernel[...]).named(_HIDDEN_NAME)
    return z.map(lambda z, bias: activation(z + bias[None, :]), up.bias[...])


@dataclasses.dataclass(frozen=True)
class _Turn:
    """What is done to the heads of a matrix (M, H Dh), of queries or of keys, as functions for maps.

    Their operands are cos and sin (M / n, Dh / 2), of positions that n sequences share, and a norm's scale (Dh,).

    Attributes:
      dim: Dh.
      has_tables: whether they are turned.
      epsilon: of the norm that they have before; None for no norm.
    """

    dim: int
    has_tables: bool
    epsilon: float | None

    def turned(self, y: jax.Array, *operands: jax.Array, back: bool = False) -> jax.Array:
        rows, columns = y.shape
        heads = y.reshape(rows, columns // self.dim, self.dim)
        if self.epsilon is not None:
            rstd = lax.rsqrt(jnp.mean(heads * heads, axis=-1, keepdims=True) + self.epsilon)
            heads = heads * rstd * operands[-1][None, None, :]
        if self.has_tables:
            cos, sin = (_of_rows(table, rows) for table in operands[:2])
            heads = coda.rotary(heads, cos, -sin if back else sin)
        return heads.reshape(y.shape)

    def turned_back(self, y: jax.Array, *tables: jax.Array) -> jax.Array:
        """The matrix again; of heads without a norm."""
        return self.turned(y, *tables, back=True)

    def of(self, x: Any, tables: Sequence[Any], scale: Any) -> Any:
        """A value, turned."""
        if self.epsilon is None and not self.has_tables:
            return x
        inverse = self.turned_back if self.epsilon is None else None
        return x.map(self.turned, *tables, *(() if scale is None else (scale,)), inverse=inverse)


def _of_rows(table: jax.Array, rows: int) -> jax.Array:
    count = table.shape[0]
    repeats = 0 if isinstance(count, int) and count == 0 else rows // count
    return jnp.tile(lax.stop_gradient(table), (repeats, 1))


@dataclasses.dataclass(frozen=True)
class _Heads:
    """The same of one matrix with the columns of q, k and v; its operands are the tables, and the scales of both norms.

    Attributes:
      q, k: what is done to the heads of each.
      ends: where the columns of q and those of k end.
    """

    q: _Turn
    k: _Turn
    ends: tuple[int, int]

    def split_and_turned(self, z: jax.Array, *operands: jax.Array) -> list[jax.Array]:
        """q, k, v of z; with norms of heads also q and k before them, of which alone z is known again."""
        q, k, v = jnp.split(z, self.ends, axis=1)
        count = 2 * self.q.has_tables
        of_q, of_k = (operands[:count] + operands[count + i : count + i + 1] for i in (0, 1))
        before = [] if self.q.epsilon is None else [q, k]
        return [self.q.turned(q, *of_q), self.k.turned(k, *of_k), v, *before]

    def joined(self, *arrays: jax.Array) -> jax.Array:
        """z of what `split_and_turned` gives: a rotation turns back, a norm does not."""
        if self.q.epsilon is None:
            q, k, v, *tables = arrays
            q, k = self.q.turned_back(q, *tables), self.k.turned_back(k, *tables)
        else:
            _, _, v, q, k, *_ = arrays
        return jnp.concatenate([q, k, v], axis=1)


def attention(layer: Any, x: coda.Value, angles: Angles, mask: Any, segment_ids: Any) -> Any:
    """Attention of a value.

    Args:
      layer: the Attention.
      x: (B, T, D) or (T, D).
      angles: of the positions, arrays or values.
      mask, segment_ids: as Attention has them, arrays or values.
    """
    q, k, v = _query_key_value(layer, x, () if angles.cos is None else angles)
    seen = {name: x for name, x in (("mask", mask), ("segment_ids", segment_ids)) if x is not None}
    # What is opaque is traced without its arrays' shardings, which cuDNN's call would need over explicit mesh axes.
    is_explicit = bool(explicit_axes(jax.sharding.get_abstract_mesh()))

    def attention(q: jax.Array, k: jax.Array, v: jax.Array, *arrays: jax.Array) -> jax.Array:
        # Named here, since its derivative keeps them as they are here.
        q, k, v = (named(in_heads(y, layer.head_dim), name) for y, name in zip((q, k, v), QKV, strict=True))
        given = dict(zip(seen, arrays, strict=True))
        y, _ = attend(
            q,
            k,
            v,
            is_causal=layer.is_causal,
            sliding_window=layer.sliding_window,
            implementation=layer.implementation or ("xla" if is_explicit else None),
            mask=given.get("mask"),
            segment_ids=given.get("segment_ids"),
        )
        return y.reshape(*y.shape[:-2], y.shape[-2] * y.shape[-1])

    context: Any = coda.opaque(attention, q, k, v, *seen.values())
    return linear(layer.out, context.constrained(_of_columns(layer._specs(x.shape[:-1]))[0]))


def _query_key_value(layer: Any, x: coda.Value, tables: Sequence[Any]) -> list[Any]:
    """q (..., T, H Dh), k and v (..., T, Hkv Dh)."""
    layers = layer._projections()
    norms = [norm for norm in (layer.q_norm, layer.k_norm) if norm is not None]
    q, k = (
        _Turn(layer.head_dim, bool(tables), None if norm is None else float(norm.epsilon))
        for norm in (norms or (None, None))
    )
    scales = [norm.whole_scale for norm in norms]
    if len(layers) > 1 and not _are_one_product(layers, "heads", "kv_heads"):
        z_q, z_k, v = (linear(one, x) for one in layers)
        of_q, of_k = scales or (None, None)
        return _lying(layer, [q.of(z_q, tables, of_q), k.of(z_k, tables, of_k), v])
    z = linear(layers[0], x) if len(layers) == 1 else _in_one_product(layers, x)
    ends = layer.num_heads * layer.head_dim, (layer.num_heads + layer.num_kv_heads) * layer.head_dim
    heads = _Heads(q, k, ends)
    return _lying(layer, z.map(heads.split_and_turned, *tables, *scales, inverse=heads.joined))[:3]


def _are_one_product(layers: Sequence[Any], *names: str) -> bool:
    """Whether layers are Linears whose kernels may stand side by side.

    All have a bias or none; and no mesh cuts their columns, of these names, which would have to be gathered.
    """
    if not is_linear(*layers) or len({layer.bias is None for layer in layers}) > 1:
        return False
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.empty or not (explicit_axes(mesh) or mesh_axes(spec_of(names)))


def _in_one_product(layers: Sequence[Any], x: Any) -> Any:
    """The results of Linears, side by side."""
    z = x @ _side_by_side([layer.kernel for layer in layers])
    return z if layers[0].bias is None else z + _side_by_side([layer.bias for layer in layers])


def _side_by_side(kernels: Sequence[Any]) -> Any:
    """Kernels (K, N_i), or biases (N_i,), as one."""
    first, *others = (kernel[...] for kernel in kernels)
    return first.map(_concatenated, *others)


def _concatenated(*arrays: jax.Array) -> jax.Array:
    return jnp.concatenate(arrays, axis=-1)


def _lying(layer: Any, arrays: Sequence[Any]) -> list[Any]:
    """q, k and v, and q and k before their norms where they are behind these, named and laid by the rules in force."""
    specs = _of_columns(layer._specs(arrays[0].shape[:-1]))
    each = zip(arrays, (*QKV, *QKV[:2]), (*specs, *specs[:2]), strict=False)
    return [x.named(name).constrained(spec) for x, name, spec in each]


def _of_columns(specs: Sequence[jax.P] | None) -> list[jax.P | None]:
    """How q, k and v lie as (..., T, H Dh), of how they lie as (..., T, H, Dh)."""
    return [None] * 3 if specs is None else [jax.P(*spec[:-1]) for spec in specs]


def hidden(x: Any) -> Any:
    """The hidden activation (..., F), laid by the rules in force."""
    return x.constrained(activation_spec(x.shape, "batch", None, "mlp"))


def dtype_of_products(module: Any, x: Any) -> Any:
    """The compute dtype of all layers of a module that is one block, of x.

    Raises:
      TypeError: layers of several, which it names.
    """
    found: dict[Any, str] = {}
    for path, layer in nnx.iter_modules(module):
        dtype, kernel = getattr(layer, "dtype", None), getattr(layer, "gate_up", None)
        if isinstance(layer, Linear | nnx.Linear):
            kernel = layer.kernel
        elif isinstance(layer, nnx.LoRA) and dtype is not None:  # without one it computes in its base's
            kernel = layer.lora_a
        if isinstance(kernel, nnx.Variable):
            resolved = jnp.dtype(dtype or jnp.result_type(x.dtype, kernel[...].dtype))
            found.setdefault(resolved, ".".join(map(str, path)))
    if len(found) > 1:
        each = ", ".join(f"{path} in {dtype}" for dtype, path in found.items())
        raise TypeError(
            f"{type(module).__name__}: layers of one block compute in one dtype; here {each}. Give them the same dtype="
        )
    return next(iter(found), jnp.dtype(x.dtype))
