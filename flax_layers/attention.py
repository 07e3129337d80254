"""Grouped-query self-attention with rotary position embedding."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

import coda_jax as coda
from coda_jax import rotary as rotary
from coda_jax.extend import in_heads
from flax_layers.adapters import LowRank, apply
from flax_layers.attend import Implementation, attend
from flax_layers.axis_metadata import name_parameters
from flax_layers.config_checks import check_implementation, check_positive_argument
from flax_layers.decoding.kv_cache import KVCache
from flax_layers.fused import fused
from flax_layers.linear import Linear, default_kernel_init, is_linear
from flax_layers.norm import RMSNorm
from flax_layers.remat import QKV, named
from flax_layers.rope_scaling import RotaryScaling, check_rotary, with_amplitude
from flax_layers.rope_scaling import rotary_angles as rotary_angles
from flax_layers.sharding import constrain
from flax_layers.text_angles import Angles, angles_of

_QKV_AXES = tuple(("batch", None, heads, None) for heads in ("heads", "kv_heads", "kv_heads"))


class Attention(nnx.Module):
    """Grouped-query self-attention, with rotary position embedding unless rope_theta is None.

    q, k, v = split(x @ qkv);  y = softmax(rotary(q) rotary(k)^T / sqrt(Dh)) v @ out

    With qk_norm q and k are RMS-normalised over each head before they are turned, as in Qwen3; with qk_norm="width"
    over all heads at once, as in OLMo 2. No tile has an entire row, so that is one pass over q and one over k, after
    products of their own, which have separate kernels then.

    With use_sinks, as in gpt-oss, exp(sinks[h]) is a term in the sum of each row's softmax, so that a query may attend
    to nothing.

    Attention is `coda.attention`. With soft_cap, as in Gemma 2, scores s become soft_cap tanh(s / soft_cap), by its
    score function.

    The three projections are one product and one kernel, `qkv.kernel` (D, (H + 2 Hkv) Dh), query heads first, then key
    heads, then value heads; `split_kernel` gives the separate ones of other checkpoints. With separate_qkv they are
    three products, of `query.kernel`, `key.kernel` and `value.kernel`, whose heads a mesh may shard: tensor parallelism
    needs that. Each reads x, and those of few heads gain less.

    Args:
      in_features: D.
      num_heads: H, query heads.
      num_kv_heads: Hkv, key and value heads, a divisor of H; default H.
      head_dim: Dh, even; default D / H.
      rope_theta: base of the rotary frequencies; None for no rotary embedding.
      rope_scaling: how they are stretched for longer contexts: see `flax_layers.rope_scaling`.
      partial_rotary_factor: the fraction of a head that is turned: the first of its pairs of columns, i and i + Dh / 2.
      qk_norm: whether q and k are normalised, with the scales `q_norm.scale` and `k_norm.scale` (Dh,); "width" for
        norms over all heads, with scales (H Dh,) and (Hkv Dh,).
      qk_scale_offset: added to these scales, see RMSNorm.
      epsilon: of these two norms.
      use_bias: whether the projections have a bias.
      use_out_bias: whether the output projection has one; default use_bias.
      separate_qkv: whether query, key and value have kernels of their own.
      is_causal: whether a position sees only itself and earlier ones.
      sliding_window: how many positions a position sees, itself and those before; default all. Needs is_causal.
      scale: of scores; default 1 / sqrt(Dh).
      soft_cap: of scores; default none.
      use_sinks: whether heads have sinks, the parameter `sinks` (H,), at first 0. Not beside a soft_cap.
      dtype: compute dtype; default the promotion of input and kernels.
      param_dtype: storage dtype of the kernels, `out.kernel` (H Dh, D) among them.
      kernel_init: initialiser of both.
      fp8: a `coda.fp8.Recipe` by which the products train in 8 bits; default in the compute dtype.
      implementation: that of jax.nn.dot_product_attention, or a function with its arguments, which may also take
        segment_ids: see `flax_layers.attend`. Default: `coda.attention`, but cuDNN where it was measured to be faster:
        on a GPU, in 16 bits, where Dh is a multiple of 8 up to 256, before Hopper up to 128. A token alone over a cache
        attends by XLA.
      rngs: source of keys.

    Raises:
      ValueError: head counts that do not divide, an odd head_dim, another qk_norm, a scale, soft_cap or rope_theta
        that is not finite and above 0, sinks beside a soft_cap or cuDNN, a partial_rotary_factor that turns no pairs,
        a rope_scaling without frequencies for this head, or a sliding_window below 1 or without is_causal.
      TypeError: an argument that must be a number and is none, or a rope_scaling that is no RotaryScaling.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        rope_theta: float | None = 10000.0,
        rope_scaling: RotaryScaling | None = None,
        partial_rotary_factor: float = 1.0,
        qk_norm: bool | Literal["width"] = False,
        qk_scale_offset: float = 0.0,
        epsilon: float = 1e-6,
        use_bias: bool = False,
        use_out_bias: bool | None = None,
        separate_qkv: bool = False,
        is_causal: bool = True,
        sliding_window: int | None = None,
        scale: float | None = None,
        soft_cap: float | None = None,
        use_sinks: bool = False,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: nnx.Initializer = default_kernel_init,
        fp8: coda.fp8.Recipe | None = None,
        implementation: Implementation | None = None,
        rngs: nnx.Rngs,
    ):
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads < 1 or num_kv_heads < 1:
            raise ValueError(f"{num_heads=} and {num_kv_heads=} must be at least 1")
        if head_dim is None:
            if in_features % num_heads:
                raise ValueError(f"head_dim is not given and {in_features=} is not a multiple of {num_heads=}")
            head_dim = in_features // num_heads
        if num_heads % num_kv_heads:
            raise ValueError(f"{num_heads=} is not a multiple of {num_kv_heads=}")
        check_rotary(head_dim, rope_theta, rope_scaling, partial_rotary_factor)
        if sliding_window is not None and (sliding_window < 1 or not is_causal):
            raise ValueError(f"{sliding_window=} must be at least 1 and wants is_causal=True, got {is_causal=}")
        if qk_norm not in (True, False, "width"):
            raise ValueError(f"{qk_norm=} must be True, False or 'width'")
        for name, value in (("scale", scale), ("soft_cap", soft_cap)):
            if value is not None:
                check_positive_argument(name, value)
        check_implementation(implementation, soft_cap, has_sinks=use_sinks)
        separate_qkv = separate_qkv or qk_norm == "width"
        linear = partial(Linear, dtype=dtype, param_dtype=param_dtype, kernel_init=kernel_init, fp8=fp8, rngs=rngs)
        if separate_qkv:
            self.query = linear(in_features, num_heads * head_dim, use_bias=use_bias)
            self.key = linear(in_features, num_kv_heads * head_dim, use_bias=use_bias)
            self.value = linear(in_features, num_kv_heads * head_dim, use_bias=use_bias)
        else:
            self.qkv = linear(in_features, (num_heads + 2 * num_kv_heads) * head_dim, use_bias=use_bias)
        self.separate_qkv = separate_qkv
        out_bias = use_bias if use_out_bias is None else use_out_bias
        self.out = linear(num_heads * head_dim, in_features, use_bias=out_bias)
        norm = partial(RMSNorm, epsilon=epsilon, param_dtype=param_dtype, scale_offset=qk_scale_offset, rngs=rngs)
        counts = (num_heads, num_kv_heads) if qk_norm == "width" else (1, 1)
        self.q_norm = norm(counts[0] * head_dim) if qk_norm else nnx.data(None)
        self.k_norm = norm(counts[1] * head_dim) if qk_norm else nnx.data(None)
        self.sinks: Any = nnx.Param(jnp.zeros((num_heads,), param_dtype)) if use_sinks else nnx.data(None)
        name_parameters(self)
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.rope_theta = rope_theta
        self.rope_scaling = rope_scaling
        self.partial_rotary_factor = partial_rotary_factor
        self.qk_norm = qk_norm
        self.is_causal = is_causal
        self.sliding_window = sliding_window
        self.scale = scale
        self.soft_cap = soft_cap
        self.implementation = implementation

    def split_kernel(self) -> list[jax.Array]:
        """The kernels of the query (D, H Dh), key and value (D, Hkv Dh) projections."""
        layers = self._projections()
        if not is_linear(*layers):
            raise TypeError(
                f"{', '.join(type(x).__name__ for x in layers)} in the place of Linears: no kernels to give"
            )
        kernels = [layer.kernel[...] for layer in layers]
        return kernels if self.separate_qkv else jnp.split(kernels[0], self._ends, axis=-1)

    def _projections(self) -> tuple[Any, ...]:
        return (self.query, self.key, self.value) if self.separate_qkv else (self.qkv,)

    @fused
    def __call__(
        self,
        x: jax.Array,
        *,
        positions: jax.Array | None = None,
        mask: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        cache: KVCache | None = None,
        bias: jax.Array | None = None,
    ) -> Any:
        """Applies the layer.

        Args:
          x: (B, T, D) or (T, D).
          positions: (T,) or (B, T) integer positions for the rotary embedding; default 0 to T - 1, or those after the
            cache's. Segments need no positions of their own: a rotated query and key depend on the difference. Where
            frequencies depend on how long a text is (LongRopeScaling, DynamicRopeScaling), a row or a segment is one,
            as long as from its smallest position to its largest.
          mask: boolean, broadcastable to (B, H, T, T), True where a query may see a key; with is_causal both apply.
            Keys that no query sees, by a mask (B, 1, 1, T), are padding, which no text has.
          segment_ids: (B, T) or (T,) integers, as x; a position sees only those of its own segment, a run of equal
            ids: for sequences packed into one row. Padding is a segment of its own. Or `Segments`, which
            several layers may share.
          cache: of the tokens before x (B, T, D), which are then seen too; see `init_cache`.
          bias: floats, broadcastable to (B, H, T, T), which are added to the scores, after a soft cap.

        Returns:
          (B, T, D) or (T, D) in the compute dtype; with a cache a pair of that and the longer cache.

        Raises:
          ValueError: x, positions or segment_ids of another shape, or a cache beside mask, bias or segment_ids, or
            without is_causal; and a bias, another mask or a cache that does not say how long a text is, where
            frequencies depend on that.
          TypeError: a mask that is not boolean, or a bias that is not floats.
        """
        angles = angles_of(self, x.shape, positions, cache, segment_ids, mask, bias)
        q, k, v = self._query_key_value(x, angles)
        y, longer = self._attended(q, k, v, mask, segment_ids, cache, bias)
        return y if cache is None else (y, longer)

    def _query_key_value(self, x: jax.Array, angles: Angles | None) -> list[jax.Array]:
        """q (..., T, H, Dh), k and v (..., T, Hkv, Dh), as attention reads them."""
        if self.separate_qkv:
            q, k, v = (apply(layer, x) for layer in (self.query, self.key, self.value))
        else:
            q, k, v = jnp.split(apply(self.qkv, x), self._ends, axis=-1)
        q, k, v = self._in_heads(q, 0), self._in_heads(k, 1), self._in_heads(v, 2)
        if angles is not None:
            q, k = (rotary(y, *angles) for y in (q, k))
        return [self._as_read(y, i) for i, y in enumerate((q, k, v))]

    def _in_heads(self, y: jax.Array, which: int) -> jax.Array:
        """Columns (..., H Dh) of queries, keys or values as heads (..., H, Dh), normalised as the layer says."""
        norm = (self.q_norm, self.k_norm, None)[which]
        y = y if norm is None else named(y, QKV[which])  # the norm's derivative reads it
        y = norm(y) if self.qk_norm == "width" and norm is not None else y
        heads = in_heads(y, self.head_dim)
        return norm(heads) if self.qk_norm is True and norm is not None else heads

    def _as_read(self, heads: jax.Array, which: int) -> jax.Array:
        """Queries, keys or values, kept under their name and sharded by the rules in force."""
        return constrain(named(heads, QKV[which]), *_QKV_AXES[which])

    def _attended(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        mask: Any,
        segment_ids: Any,
        cache: KVCache | None = None,
        bias: Any = None,
    ) -> tuple[jax.Array, KVCache | None]:
        """The result (..., T, D) of heads (..., T, H, Dh), and the longer cache."""
        scaling = None if self.rope_theta is None else self.rope_scaling
        q, scale = with_amplitude(q, self.scale, scaling, self.partial_rotary_factor)
        y, cache = attend(
            q,
            k,
            v,
            is_causal=self.is_causal,
            sliding_window=self.sliding_window,
            segment_ids=segment_ids,
            mask=mask,
            bias=bias,
            scale=scale,
            soft_cap=self.soft_cap,
            sinks=None if self.sinks is None else self.sinks[...],
            cache=cache,
            implementation=self.implementation,
        )
        y = constrain(y, *_QKV_AXES[0]).reshape(*y.shape[:-2], self.num_heads * self.head_dim)
        return apply(self.out, y), cache

    def init_cache(self, batch_size: int, capacity: int, dtype: DTypeLike | None = None) -> KVCache:
        """An empty cache for `capacity` tokens a row, in the compute dtype (where there is none, the kernel's)."""
        first = self._projections()[0]
        if (adapter := LowRank.of(first)) is not None:
            first = adapter.base
        dtype = dtype or first.dtype or first.kernel.dtype
        return KVCache.empty(batch_size, capacity, self.num_kv_heads, self.head_dim, dtype)

    @property
    def _ends(self) -> tuple[int, int]:
        """The ends of the columns of queries, and of those of keys, in a kernel of all three."""
        queries = self.num_heads * self.head_dim
        return queries, queries + self.num_kv_heads * self.head_dim
