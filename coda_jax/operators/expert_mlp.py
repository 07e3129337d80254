"""The gated feed-forward of experts: `gated_mlp`'s chain on rows that are sorted by expert, by grouped products."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from coda_jax.epilogue.dtypes import INT32
from coda_jax.epilogue.groups import GroupOffsets, group_offsets
from coda_jax.operators.chain import Chain, run_chain
from coda_jax.operators.deferred_norm import check_shapes
from coda_jax.operators.feed_forward import MLP_NAME, Activation, activated, activation_pullback, gated
from coda_jax.operators.norm_products import multiply, named
from coda_jax.primitives.call_arguments import check_implementation
from coda_jax.primitives.dtypes import check_dtype, check_floats, joined_halves, resolve_dtype


def expert_mlp(
    x: jax.Array,
    w_gate_up: jax.Array | Sequence[jax.Array],
    w_down: jax.Array,
    group_sizes: jax.Array,
    *,
    row_scale: jax.Array | None = None,
    activation: Activation = jax.nn.silu,
    dtype: Any = None,
    keep_weights: bool = False,
    implementation: str = "auto",
) -> jax.Array:
    """row_scale * (activation(gate) * up) w_down of each row's expert, gate and up the halves of x w_gate_up.

        u = x w_gate_up[e], hidden = activation(gate) * up             one grouped product
        y = row_scale * (hidden w_down[e])                             one

    e is the row's expert. The backward pass is four grouped products, of which the first says in its epilogue all that
    is elementwise, and what row_scale takes of it:

        acc = dy w_down[e]^T, dhidden = row_scale * acc, drow_scale = sum_F acc * hidden      one, whose epilogue goes
            on to t, the cotangent of u, and stores row_scale * hidden
        dw_down[e] = (row_scale * hidden)^T dy, over the rows of e                            one
        dx = t w_gate_up[e]^T, dw_gate_up[e] = x^T t                                          two

    So the routing weight's gradient needs neither y nor hidden kept (SonicMoE, arXiv 2512.14080). Kept are the
    arguments, and u (named "mlpwi" for `jax.checkpoint` policies) rounded to the compute dtype.

    Args:
      x: (R, D), rows sorted by expert. Rows from sum(group_sizes) on are of no expert: they are zeros in the result and
        in every gradient, whatever x, row_scale and the result's cotangent have there.
      w_gate_up: (E, D, 2F), gate in the first half of the columns and up in the second; or (E, D, 2, F); or both apart,
        a pair of (E, D, F).
      w_down: (E, F, D); D and F multiples of 8 for the kernel.
      group_sizes: (E,) int32, how many rows each expert has, in their order. Their sum is at most R, and none is
        negative; else the result is that of some other sizes.
      row_scale: (R,), each row's factor in the result, as a routing weight; None for one.
      activation: a function of float32 arrays, elementwise. It may close over arrays, but not over what is
        differentiated.
      dtype: compute dtype, of the products' inputs; default the promotion of x and w_gate_up.
      keep_weights: whether the weights in the compute dtype are kept for the backward pass and not made anew.
      implementation: as in `gemm`.

    Returns:
      y (R, D) in the dtype of x.

    Raises:
      TypeError: activation is no function, or an array or dtype not bfloat16, float16 or float32; group_sizes not
        int32.
      ValueError: shapes that do not fit.
    """
    name = "expert_mlp"
    check_implementation(name, implementation)
    gate_up = joined_halves(name, "w_gate_up", w_gate_up, axis=2)
    check_floats(name, x=x, w_gate_up=gate_up, w_down=w_down)
    check_dtype(name, "group_sizes", group_sizes, (INT32,))
    if x.ndim != 2 or w_down.ndim != 3:
        raise ValueError(
            f"{name}: x has shape {x.shape} and w_down {w_down.shape}; they must be (R, D) and (E, F, D), with the "
            "rows of x sorted by expert"
        )
    (rows, width), (experts, features, _) = x.shape, w_down.shape
    if not isinstance(experts, int) or experts == 0:
        raise ValueError(f"{name}: w_down has shape {w_down.shape}; the number of experts must be known, and not 0")
    columns = (2, features) if gate_up.ndim == 4 else (2 * features,)
    check_shapes(
        name, x, {"w_gate_up": (gate_up, (experts, width, *columns)), "w_down": (w_down, (experts, features, width))}
    )
    check_shapes(name, x, {"row_scale": (row_scale, (rows,))})
    if group_sizes.shape != (experts,):
        raise ValueError(
            f"{name}: group_sizes has shape {group_sizes.shape}; beside w_down {w_down.shape} it must be {(experts,)}"
        )
    chain = _ExpertFeedForward(
        gated(activation),
        dtype=resolve_dtype(name, dtype, x, gate_up),
        keep_weights=keep_weights,
        implementation=implementation,
    )
    arguments = [x, gate_up, w_down, group_sizes, row_scale]
    (y,) = run_chain(name, chain, arguments, [None if array is None else False for array in arguments])
    return y


@dataclasses.dataclass(frozen=True)
class _ExpertFeedForward(Chain):
    """`expert_mlp`, forward and backward: what it is beside its arrays."""

    activation: gated
    dtype: Any
    keep_weights: bool
    implementation: str

    def products(
        self,
        x: jax.Array,
        gate_up: jax.Array,
        down: jax.Array,
        group_sizes: jax.Array,
        row_scale: jax.Array | None,
        *,
        keep: bool,
    ) -> Any:
        """y; beside it, if asked for, what `backward` takes."""
        casts = (gate_up.astype(self.dtype), down.astype(self.dtype))
        offsets = group_offsets(group_sizes, x.shape[0])
        *kept, hidden = multiply(
            x.astype(self.dtype),
            casts[0],
            epilogue=named("expert_gated", activated, shift=None, activation=self.activation, keep=keep),
            out_dtypes=[self.dtype] * (1 + keep),
            implementation=self.implementation,
            halves=gate_up.ndim == 4,
            group_sizes=GroupOffsets(offsets),
        )
        kept = [checkpoint_name(u, MLP_NAME) for u in kept]
        outputs = multiply(
            hidden,
            casts[1],
            _column(row_scale),
            epilogue=None if row_scale is None else scale_rows,
            out_dtypes=[x.dtype],
            implementation=self.implementation,
            like=x,
            group_sizes=GroupOffsets(offsets),
        )
        kept_casts = casts if self.keep_weights else None
        return (outputs, (x, gate_up, down, kept_casts, offsets, row_scale, *kept)) if keep else outputs

    def backward(self, kept: tuple[Any, ...], cotangents: list[Any]) -> tuple[Any, ...]:
        (x, gate_up, down, casts, offsets, row_scale, u), (dy,) = kept, cotangents
        if dy is None:
            return (None,) * 5
        if casts is None:
            casts = [_cast_again(w, self.dtype) for w in (gate_up, down)]
        of_groups: dict[str, Any] = {"implementation": self.implementation, "group_sizes": GroupOffsets(offsets)}
        dout = dy.astype(self.dtype)
        t, hidden, *sums = multiply(
            dout,
            casts[1],
            u,
            _column(row_scale),
            epilogue=named("expert_gated_backward", expert_backward, activation=self.activation),
            out_dtypes=[self.dtype] * 2 + [jnp.float32] * (row_scale is not None),
            transpose_b=True,
            halves=gate_up.ndim == 4,
            **of_groups,
        )
        (ddown,) = multiply(hidden, dout, out_dtypes=[down.dtype], transpose_a=True, like=down, **of_groups)
        k_axes = gate_up.ndim - 2
        (dx,) = multiply(t, casts[0], out_dtypes=[x.dtype], transpose_b=True, k_axes=k_axes, like=x, **of_groups)
        (dgate_up,) = multiply(
            x.astype(self.dtype), t, out_dtypes=[gate_up.dtype], transpose_a=True, like=gate_up, **of_groups
        )
        drow_scale = None if row_scale is None else sums[0].astype(row_scale.dtype)
        return dx, dgate_up, ddown, None, drow_scale

    def with_batch(self, size: Any) -> None:
        return None  # rows of a batch are not sorted by expert


def scale_rows(acc: jax.Array, row_scale: jax.Array) -> jax.Array:
    """Epilogue: y = row_scale * acc."""
    return acc * row_scale


def expert_backward(
    acc: jax.Array, u: jax.Array, row_scale: jax.Array | None, *, activation: Activation
) -> tuple[jax.Array, ...]:
    """Epilogue of dy w_down^T: t, row_scale * hidden, and the row sums that are the cotangent of row_scale."""
    if row_scale is None:
        hidden, t = activation_pullback(acc, u, None, activation=activation)
        return t, hidden
    hidden, t = activation_pullback(acc * row_scale, u, None, activation=activation)
    return t, hidden * row_scale, jnp.sum(acc * hidden, axis=1)


def _column(rows: jax.Array | None) -> jax.Array | None:
    return None if rows is None else rows[:, None]


def _cast_again(w: jax.Array, dtype: Any) -> jax.Array:
    """w in another dtype; without a barrier XLA would take the forward's, and so keep it."""
    return w if w.dtype == dtype else lax.optimization_barrier(w).astype(dtype)
