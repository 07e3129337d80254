"""The gated feed-forward of experts: `gated_mlp` on rows that are sorted by expert, by grouped products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from coda_jax.epilogue.dtypes import INT32
from coda_jax.graph.author import Value
from coda_jax.graph.lines import column, for_each_row, fused, grouped_product, like, store_as
from coda_jax.operators.deferred_norm import check_shapes
from coda_jax.operators.feed_forward import MLP_NAME, Activation, gated
from coda_jax.operators.run import run_operator
from coda_jax.primitives.call_arguments import check_implementation
from coda_jax.primitives.dtypes import check_dtype, check_floats, joined_halves, resolve_dtype


def expert_mlp(
    x: jax.Array,
    w_gate_up: jax.Array | Sequence[jax.Array],
    w_down: jax.Array,
    group_sizes: jax.Array,
    *,
    up_bias: jax.Array | Sequence[jax.Array] | None = None,
    down_bias: jax.Array | None = None,
    row_scale: jax.Array | None = None,
    activation: Activation = jax.nn.silu,
    dtype: Any = None,
    keep_weights: bool = False,
    implementation: str = "auto",
) -> jax.Array:
    """row_scale * (activation(gate) * up) w_down of each row's expert, gate and up the halves of x w_gate_up.

        u = x w_gate_up[e], hidden = row_scale * activation(gate) * up      one grouped product
        y = hidden w_down[e]                                                one

    e is the row's expert. The backward pass is four grouped products, of which the first computes in its epilogue all
    that is elementwise, and the gradient of row_scale:

        acc = dy w_down[e]^T, dhidden = row_scale * acc, drow_scale = sum_F acc * hidden      one, whose epilogue goes
            on to t, the cotangent of u, and stores row_scale * hidden
        dw_down[e] = (row_scale * hidden)^T dy, over the rows of e                            one
        dx = t w_gate_up[e]^T, dw_gate_up[e] = x^T t                                          two

    So the routing weight's gradient needs neither y nor hidden kept (SonicMoE, arXiv 2512.14080). Kept are the
    arguments, and u (named "mlpwi" for `jax.checkpoint` policies) rounded to the compute dtype.

    With biases an epilogue reads those of each row's expert, and their gradients are products with rows of ones:

        u = x w_gate_up[e] + up_bias[e],   y = hidden w_down[e] + row_scale * down_bias[e]
        dup_bias[e] = sum of t, ddown_bias[e] = sum of row_scale * dy, over the rows of e     two narrow ones
        drow_scale = sum_F acc * hidden + sum_D dy * down_bias[e]                             a pass of XLA's over dy

    Args:
      x: (R, D), rows sorted by expert. Rows from sum(group_sizes) on have no expert: they are zeros in the result and
        in every gradient, whatever x, row_scale and the result's cotangent hold there.
      w_gate_up: (E, D, 2F), gate in the first half of the columns and up in the second; or (E, D, 2, F); or a pair of
        (E, D, F).
      w_down: (E, F, D); D and F multiples of 8 for the kernel.
      group_sizes: (E,) int32, how many rows each expert has, in their order. Their sum is at most R, and none is
        negative; else the result is that of other sizes.
      up_bias: (E, 2F), gate's in the first half of the columns; or (E, 2, F); or a pair of (E, F).
      down_bias: (E, D).
      row_scale: (R,), each row's factor in the result, as a routing weight; None for 1.
      activation: a function of float32 arrays, elementwise; or `gated(function, of_both=True)`, of gate and up. Arrays
        that it closes over have gradients.
      dtype: compute dtype, of the products' inputs; default the promotion of x and w_gate_up.
      keep_weights: whether the weights in the compute dtype are kept for the backward pass and not cast again.
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
    up_bias = joined_halves(name, "up_bias", up_bias, axis=1)
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
    columns = (2, features) if up_bias is not None and up_bias.ndim == 3 else (2 * features,)
    biases = {"up_bias": (up_bias, (experts, *columns)), "down_bias": (down_bias, (experts, width))}
    check_shapes(name, x, {**biases, "row_scale": (row_scale, (rows,))})
    if group_sizes.shape != (experts,):
        raise ValueError(
            f"{name}: group_sizes has shape {group_sizes.shape}; beside w_down {w_down.shape} it must be {(experts,)}"
        )
    arguments = [x, gate_up, w_down, group_sizes, row_scale, up_bias, down_bias]
    y: jax.Array = run_operator(
        name,
        _expert_feed_forward,
        arguments,
        [None if argument is None else argument is x or argument is row_scale for argument in arguments],
        dtype=resolve_dtype(name, dtype, x, gate_up),
        implementation=implementation,
        activation=activation if isinstance(activation, gated) else gated(activation),
        keep_weights=keep_weights,
    )
    return y


def _expert_feed_forward(
    x: Value,
    gate_up: Value,
    down: Value,
    group_sizes: Value,
    row_scale: Value | None,
    up_bias: Value | None,
    down_bias: Value | None,
    *,
    activation: gated,
    keep_weights: bool,
) -> Value:
    u = grouped_product(x, gate_up, group_sizes, keep_weights=keep_weights)
    if up_bias is not None:  # a map of its own, so that u + up_bias and up_bias have one cotangent
        u = fused("add_bias", jnp.add, u, for_each_row(up_bias, group_sizes, x.shape[0]))
    scale = None if row_scale is None else column(row_scale)
    hidden = fused("activated", scaled, u.named(MLP_NAME), scale, activation=activation)
    y = like(grouped_product(hidden, down, group_sizes, keep_weights=keep_weights), x)
    if down_bias is not None:
        bias = for_each_row(down_bias, group_sizes, x.shape[0])
        if scale is None:
            y = fused("add_bias", jnp.add, y, bias)
        else:
            y = y.map(add_scaled, bias, scale, pullback=add_scaled_pullback)
    return store_as(y, x.dtype)


def scaled(z: jax.Array, row_scale: jax.Array | None, *, activation: Activation) -> jax.Array:
    """Epilogue: row_scale * activation(z)."""
    hidden = activation(z)
    return hidden if row_scale is None else hidden * row_scale


def add_scaled(acc: jax.Array, bias: jax.Array, row_scale: jax.Array) -> jax.Array:
    """Epilogue: acc + row_scale * bias."""
    return acc + bias * row_scale


def add_scaled_pullback(
    y: jax.Array, acc: jax.Array, bias: jax.Array, row_scale: jax.Array, dy: jax.Array
) -> tuple[jax.Array, ...]:
    """Cotangents of acc, bias and row_scale; dy may be NaN in rows of no expert, where bias is 0."""
    return dy, row_scale * dy, jnp.sum(jnp.where(bias == 0, 0.0, bias * dy), axis=1, keepdims=True)
