"""The feed-forward sub-layer of a pre-norm block, gated or not, as one graph of products."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from coda_jax.graph.author import Value
from coda_jax.graph.lines import fused, like, product, store_as
from coda_jax.graph.normed import sum_of_squares
from coda_jax.operators.deferred_norm import DeferredNorm, check_arrays, row_flags, width_of
from coda_jax.operators.run import norm_value, row_spec, run_operator
from coda_jax.operators.stream import Stream, array
from coda_jax.primitives.dtypes import joined_halves, resolve_dtype

MLP_NAME = "mlpwi"  # MaxText's

Activation = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class gated:
    """activation(gate) * up of z (M, 2F), gate in its first half of the columns and up in its second: SwiGLU of silu.

    Its pullback, JAX's own, for the cotangent dh of the result:

        dgate = activation'(gate) * up * dh,   dup = activation(gate) * dh

    Args:
      activation: an elementwise function of one float32 array; with of_both of two.
      of_both: whether the result is activation(gate, up), as of gpt-oss's experts.

    Raises:
      TypeError: activation is no function of so many arrays, or is itself gated.
    """

    activation: Callable[..., jax.Array]
    of_both: bool = False

    def __post_init__(self) -> None:
        if not callable(self.activation) or isinstance(self.activation, gated):
            raise TypeError(f"gated: activation = {self.activation!r}; it must be a function, and not gated itself")
        try:
            inspect.signature(self.activation).bind(*[None] * (1 + self.of_both))
        except ValueError:  # it says nothing of its arguments
            pass
        except TypeError:
            name = getattr(self.activation, "__name__", self.activation)
            taken, rule = "one array, the gate", "it must be a function of that, by which up is multiplied. A function "
            rule += "of gate and up wants of_both=True"
            if self.of_both:
                taken, rule = "two arrays, gate and up", "with of_both=True it must be a function of both"
            raise TypeError(f"gated: activation = {name} cannot be called with {taken}; {rule}") from None

    def __call__(self, z: jax.Array) -> jax.Array:
        gate, up = jnp.split(z, 2, axis=1)
        return self.activation(gate, up) if self.of_both else self.activation(gate) * up


def activated(z: jax.Array, bias: jax.Array | None = None, *, activation: Activation) -> jax.Array:
    """Epilogue: activation(z + bias)."""
    return activation(z if bias is None else z + bias[None, :])


def add_residual(acc: jax.Array, residual: jax.Array | None = None, bias: jax.Array | None = None) -> jax.Array:
    """Epilogue: y = acc + bias + residual."""
    y = acc if bias is None else acc + bias[None, :]
    return y if residual is None else y + residual


def add_residual_sumsq(
    acc: jax.Array, residual: jax.Array | None = None, bias: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Epilogue: y = acc + bias + residual and the row sums of y * y."""
    y = add_residual(acc, residual, bias)
    # The norm that reads the sums differentiates through y; with the gradient stopped here the epilogue is linear in
    # acc, and so keeps nothing for the backward pass.
    z = jax.lax.stop_gradient(y)
    return y, jnp.sum(z * z, axis=1)


def _feed_forward(
    norm: Any,
    up: Value,
    up_bias: Value | None,
    down: Value,
    down_bias: Value | None,
    other: Value | None,
    *,
    activation: Activation,
    adds_x: bool,
    out_dtype: Any,
    hidden_sharding: jax.P | None,
    keep_weights: bool,
) -> tuple[Value, ...]:
    """y, and for an RMSNorm the row sums of its squares."""
    h = norm_value(norm)
    z = product(h, [up], keep_weights=keep_weights).named(MLP_NAME).constrained(_product_spec(hidden_sharding, up))
    hidden = fused("activated", activated, z, up_bias, activation=activation).constrained(hidden_sharding)
    acc = like(product(hidden, [down], keep_weights=keep_weights), h.x)
    y = store_as(fused("add_residual", add_residual, acc, h.x if adds_x else other, down_bias), out_dtype)
    return (y,) if h.norm.mean is not None else (y, sum_of_squares(y, is_column=False))


def _product_spec(spec: jax.P | None, w: Value) -> jax.P | None:
    """The sharding of the product with w (D, F) or (D, 2, F), from that of (..., F)."""
    return spec if spec is None or w.ndim == 2 else jax.P(*spec[:-1], None, spec[-1])


def mlp(
    norm: DeferredNorm,
    w_up: jax.Array | Sequence[jax.Array],
    w_down: jax.Array,
    *,
    up_bias: jax.Array | None = None,
    down_bias: jax.Array | None = None,
    activation: Activation = jax.nn.gelu,
    residual: jax.Array | Stream | bool = True,
    dtype: Any = None,
    hidden_sharding: jax.P | None = None,
    keep_weights: bool = False,
    implementation: str = "auto",
) -> Stream:
    """x + activation(norm(x) w_up + up_bias) w_down + down_bias, with the row sums of its squares for an RMSNorm.

        z = norm(x) w_up + up_bias                            one product
        y = x + activation(z) w_down + down_bias              one product, which for RMSNorm also sums y * y

    The backward pass is derived, and is four products:

        dz = activation'(z) * (dy w_down^T), hidden = activation(z)     one, whose epilogue goes on to t = rstd * dz
        dw_down = hidden^T dy                                            one
        dx and dw_up from t, as in graph/norm.py                         two

    Kept for it are x, its statistics, and z without what up_bias adds (named "mlpwi" for `jax.checkpoint` policies),
    rounded to the compute dtype. A LayerNorm is applied, in a pass, and its gradient is one.

    Args:
      norm: of x (..., D), the residual stream.
      w_up: (D, F); with a `gated` activation (D, 2F), gate in the first half and up in the second, or (D, 2, F), of
        which a mesh may shard F, or a pair of (D, F).
      w_down: (F, D), F a multiple of 8 for the kernel.
      up_bias: (F,) or (2F,), as w_up's columns.
      down_bias: (D,).
      activation: an elementwise function of one float32 array; or `gated(function)`. Arrays that it closes over have
        gradients. One that is not local to tiles is a pass of XLA's, with a note.
      residual: the summand: True for x, whose cotangent is then added in the epilogue of the product that makes dx;
        False for nothing; or another array (..., D) or Stream.
      dtype: compute dtype, of the products' inputs; default the promotion of x and w_up.
      hidden_sharding: the sharding of the hidden activation (..., F), of z and of t over the mesh of `jax.set_mesh`: a
        constraint to XLA on automatic axes, a reshard on explicit ones. It does not change the result.
      keep_weights: whether the weights in the compute dtype, w_up multiplied by the norm's scale, are kept for the
        backward pass and not computed again. Over automatic mesh axes that shard them as FSDP's do they are then
        gathered once, for a copy's memory.
      implementation: as in `gemm`.

    Returns:
      y (..., D) in the residual's dtype, without one in x's; its row sums of squares (...,) float32, through which no
      gradient flows, or with a LayerNorm, whose statistic needs the entire row, None.

    Raises:
      TypeError: activation is no function, norm no DeferredNorm, or an array or dtype not bfloat16, float16 or float32.
      ValueError: shapes that do not fit, or a norm with a bias and no mean.
    """
    is_gated = isinstance(activation, gated)
    name, up_name = ("gated_mlp", "w_gate_up") if is_gated else ("mlp", "w_up")  # in messages
    up = joined_halves(name, up_name, w_up)
    if not callable(activation):
        raise TypeError(f"{name}: activation = {activation!r}; it must be a function")
    features = w_down.shape[0]
    columns = 2 * features if is_gated else features
    width = width_of(name, norm)
    other = None if isinstance(residual, bool) else array(residual)
    check_arrays(
        name,
        norm,
        {
            up_name: (up, (width, 2, features) if is_gated and up.ndim == 3 else (width, columns)),
            "w_down": (w_down, (features, width)),
            "up_bias": (up_bias, (columns,)),
            "down_bias": (down_bias, (width,)),
            "residual": (other, norm.shape),
        },
    )
    arguments = [norm, up, up_bias, w_down, down_bias]
    y, *squares = run_operator(
        name,
        _feed_forward,
        [*arguments, other],
        [*row_flags(arguments), None if other is None else True],
        dtype=resolve_dtype(name, dtype, norm.x, up),
        implementation=implementation,
        activation=activation,
        adds_x=residual is True,
        out_dtype=norm.dtype if other is None else other.dtype,
        hidden_sharding=row_spec(hidden_sharding, norm),
        keep_weights=keep_weights,
    )
    return Stream(y, squares[0] if squares else None)


def gated_mlp(
    norm: DeferredNorm,
    w_gate_up: jax.Array | Sequence[jax.Array],
    w_down: jax.Array,
    *,
    activation: Activation = jax.nn.silu,
    residual: jax.Array | Stream | bool = True,
    dtype: Any = None,
    hidden_sharding: jax.P | None = None,
    keep_weights: bool = False,
    implementation: str = "auto",
) -> Stream:
    """x + (activation(gate) * up) w_down where gate, up are the halves of norm(x) w_gate_up: `mlp` with a gate.

    Args:
      norm: of x (..., D), the residual stream.
      w_gate_up: (D, 2F), (D, 2, F) or a pair of (D, F), as `mlp`'s w_up; F a multiple of 8 for the kernel.
      w_down: (F, D).
      activation: an elementwise function of one float32 array.
      residual, dtype, hidden_sharding, keep_weights, implementation: as in `mlp`, which says what is returned and
        raised.
    """
    return mlp(
        norm,
        w_gate_up,
        w_down,
        activation=gated(activation),
        residual=residual,
        dtype=dtype,
        hidden_sharding=hidden_sharding,
        keep_weights=keep_weights,
        implementation=implementation,
    )
