"""Attention to another text."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from flax_layers.adapters import apply
from flax_layers.attend import Implementation
from flax_layers.attention import Attention
from flax_layers.axis_metadata import name_parameters
from flax_layers.fused import fused
from flax_layers.linear import Linear, default_kernel_init


class CrossAttention(Attention):
    """Grouped-query attention of one text to another, as a decoder's to its encoder's results.

    q = x @ query;  k, v = context @ key, context @ value;  y = softmax(q k^T / sqrt(Dh)) v @ out

    From "Attention Is All You Need" (arXiv 1706.03762).

    Args:
      in_features: D, of x.
      num_heads: H, query heads.
      context_features: C, of the context; default D.
      num_kv_heads: Hkv, key and value heads, a divisor of H; default H.
      head_dim: Dh; default D / H.
      qk_norm, epsilon, use_bias, use_out_bias, scale, soft_cap: as in Attention.
      dtype: compute dtype; default the promotion of input and kernels.
      param_dtype: storage dtype of `query.kernel` (D, H Dh), `key.kernel` and `value.kernel` (C, Hkv Dh), and
        `out.kernel` (H Dh, D).
      kernel_init: initialiser of all.
      implementation: as in Attention.
      rngs: source of keys.

    Raises:
      ValueError, TypeError: as Attention.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        context_features: int | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        qk_norm: bool | Literal["width"] = False,
        epsilon: float = 1e-6,
        use_bias: bool = False,
        use_out_bias: bool | None = None,
        scale: float | None = None,
        soft_cap: float | None = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: nnx.Initializer = default_kernel_init,
        implementation: Implementation | None = None,
        rngs: nnx.Rngs,
    ):
        options: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "kernel_init": kernel_init, "rngs": rngs}
        super().__init__(
            in_features,
            num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rope_theta=None,
            qk_norm=qk_norm,
            epsilon=epsilon,
            use_bias=use_bias,
            use_out_bias=use_out_bias,
            separate_qkv=True,
            is_causal=False,
            scale=scale,
            soft_cap=soft_cap,
            implementation=implementation,
            **options,
        )
        if context_features is not None and context_features != in_features:
            linear = partial(Linear, context_features, self.num_kv_heads * self.head_dim, use_bias=use_bias, **options)
            self.key, self.value = linear(), linear()
            name_parameters(self)
        self.in_features = in_features
        self.context_features = in_features if context_features is None else context_features

    @fused
    def __call__(  # type: ignore[override]
        self, x: jax.Array, context: jax.Array, *, mask: jax.Array | None = None, bias: jax.Array | None = None
    ) -> jax.Array:
        """Applies the layer.

        Args:
          x: (B, T, D) or (T, D).
          context: (B, S, C) or (S, C).
          mask: boolean, broadcastable to (B, H, T, S), True where a query may see a key, as where there is no padding.
          bias: floats, broadcastable to (B, H, T, S), which are added to the scores, after a soft cap.

        Returns:
          (B, T, D) or (T, D), in the compute dtype.

        Raises:
          ValueError: x or context of another shape.
          TypeError: a mask that is not boolean, or a bias that is not floats.
        """
        if x.ndim not in (2, 3) or context.ndim != x.ndim or context.shape[:-2] != x.shape[:-2]:
            raise ValueError(
                f"context {context.shape} beside x {x.shape}; they must be (B, S, C) and (B, T, D), or without B"
            )
        for name, shape, field in (("x", x.shape, "in_features"), ("context", context.shape, "context_features")):
            if shape[-1] != (width := getattr(self, field)):
                raise ValueError(f"{name} has shape {shape}; its last axis must be {field}={width}")
        columns = apply(self.query, x), apply(self.key, context), apply(self.value, context)
        q, k, v = (self._as_read(self._in_heads(y, i), i) for i, y in enumerate(columns))
        return self._attended(q, k, v, mask, None, bias=bias)[0]
