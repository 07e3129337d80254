"""The feed-forward sub-layer of a pre-norm block, gated or not, as one chain of products."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from coda_jax.operators import norm_products
from coda_jax.operators.chain import Chain, row_spec, run_chain
from coda_jax.operators.deferred_norm import DeferredNorm, check_arrays, row_flags, width_of
from coda_jax.operators.norm_products import (
    Sums,
    cotangents,
    multiply,
    named,
    of_norm,
    with_rows_of,
)
from coda_jax.operators.stream import Stream, array, separate_residual
from coda_jax.primitives.dtypes import joined_halves, resolve_dtype
from coda_jax.primitives.mesh_types import constrained

MLP_NAME = "mlpwi"  # MaxText's

Activation = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class gated:
    """activation(gate) * up of z (M, 2F), gate in its first half of the columns and up in its second: SwiGLU of silu.

    Its pullback, which `activation_backward` takes from jax.vjp, for the cotangent dh of the result:

        dgate = activation'(gate) * up * dh,   dup = activation(gate) * dh

    Args:
      activation: a function, elementwise, of float32 arrays.
    """

    activation: Activation

    def __post_init__(self) -> None:
        if not callable(self.activation):
            raise TypeError(f"gated: activation = {self.activation!r}; it must be a function")

    def __call__(self, z: jax.Array) -> jax.Array:
        gate, up = jnp.split(z, 2, axis=1)
        return self.activation(gate) * up


def activated(u: jax.Array, shift: jax.Array | None, *, activation: Activation, keep: bool) -> Any:
    """Epilogue: the activation of z = u + shift, and u before it if it is to be kept."""
    hidden = activation(u if shift is None else u + shift[None, :])
    return (u, hidden) if keep else hidden


def activation_pullback(
    dhidden: jax.Array, u: jax.Array, shift: jax.Array | None, *, activation: Activation
) -> tuple[jax.Array, jax.Array]:
    """The activation of z = u + shift again, and the cotangent of z from the activation's; all float32."""
    hidden, pullback = jax.vjp(functools.partial(activated, shift=shift, activation=activation, keep=False), u)
    (dz,) = pullback(dhidden)
    return hidden, dz


def activation_backward(
    acc: jax.Array,
    u: jax.Array,
    t_scale: jax.Array,
    mean: Any = None,
    column_sums: Any = None,
    shift: Any = None,
    *,
    activation: Activation,
    dtype: Any = None,
) -> tuple[jax.Array, jax.Array, Sums]:
    """Epilogue of the hidden activation's cotangent: t, the activation again, and the sums of dz and t."""
    hidden, dz = activation_pullback(acc, u, shift, activation=activation)
    t, sums = cotangents(
        dz, u, t_scale, mean, column_sums, shift, round_t=lambda t: t.astype(dtype).astype(jnp.float32)
    )
    return t, hidden, sums


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


@dataclasses.dataclass(frozen=True)
class _FeedForward(Chain):
    """`mlp` of a norm of x (..., D), forward and backward: what it is beside its arrays."""

    activation: Activation
    adds_x: bool
    adds_other: bool
    dtype: Any
    out_dtype: Any
    hidden_sharding: Any
    keep_weights: bool
    implementation: str

    @property
    def kind(self) -> str:
        return "gated" if isinstance(self.activation, gated) else "activation"

    def products(
        self,
        norm: DeferredNorm,
        up: jax.Array,
        up_bias: jax.Array | None,
        down: jax.Array,
        down_bias: jax.Array | None,
        other: jax.Array | None,
        *,
        keep: bool,
    ) -> Any:
        """y, and for RMSNorm the row sums of its squares; beside them, if asked for, what `backward` takes."""
        (x, *arrays), of_z = norm_products.factors(norm, up, up_bias, self.dtype, keep_weights=self.keep_weights)
        *kept, hidden = multiply(
            with_rows_of(x, self.hidden_sharding),
            *arrays,
            epilogue=of_norm(named(f"norm_{self.kind}", activated, activation=self.activation, keep=keep)),
            out_dtypes=[self.dtype] * (1 + keep),
            implementation=self.implementation,
            halves=up.ndim == 3,
        )
        kept = [checkpoint_name(self._lies(u), MLP_NAME) for u in kept]
        has_sums = norm.mean is None
        cast = down.astype(self.dtype)
        outputs = multiply(
            self._lies(hidden),
            cast,
            norm.x if self.adds_x else other,
            down_bias,
            epilogue=add_residual_sumsq if has_sums else add_residual,
            out_dtypes=[self.out_dtype, jnp.float32] if has_sums else [self.out_dtype],
            implementation=self.implementation,
            like=norm.x,
        )
        kept_cast = cast if self.keep_weights else None
        return (outputs, (of_z, down, kept_cast, down_bias, *kept)) if keep else outputs

    def backward(self, kept: tuple[Any, ...], dys: list[Any]) -> tuple[Any, ...]:
        (of_z, down, cast, down_bias, u), dy = kept, dys[0]
        if dy is None:  # no gradient flows through the row sums
            return (None,) * 6
        dout = dy.astype(self.dtype)
        t_scale, mean, *of_columns = of_z.of_cotangents(self.dtype)
        of_rows = (None if x is None else with_rows_of(x, self.hidden_sharding) for x in (t_scale, mean))
        beside_dz = (*of_rows, *of_columns)
        present = Sums.structure(*beside_dz)
        options: dict[str, Any] = {"activation": self.activation, "dtype": self.dtype}
        t, hidden, *sums = multiply(
            with_rows_of(dout, self.hidden_sharding),
            down.astype(self.dtype) if cast is None else cast,
            u,
            *beside_dz,
            epilogue=named(f"{self.kind}_backward", activation_backward, **options),
            out_dtypes=[self.dtype] * 2 + [jnp.float32] * present.num_leaves,
            implementation=self.implementation,
            transpose_b=True,
            halves=of_z.w.ndim == 3,
        )
        t, hidden = self._lies(t), self._lies(hidden)
        (ddown,) = multiply(
            hidden,
            dout,
            out_dtypes=[down.dtype],
            implementation=self.implementation,
            transpose_a=True,
            k_axes=hidden.ndim - 1,
            like=down,
        )
        of_dz, dresidual = self._sums(present.unflatten(sums)), dy if self.adds_x else None
        dnorm, dup, dup_bias = norm_products.backward(of_z, t, of_dz, dresidual, implementation=self.implementation)
        ddown_bias = None
        if down_bias is not None:  # a pass over dy: the product that made it belongs to someone else
            ddown_bias = jnp.sum(dy.astype(jnp.float32), axis=range(dy.ndim - 1)).astype(down_bias.dtype)
        return dnorm, dup, dup_bias, ddown, ddown_bias, dy if self.adds_other else None

    def with_batch(self, size: Any) -> _FeedForward | None:
        return self if self.hidden_sharding is None else None

    def _sums(self, sums: Sums) -> Sums:
        rows = None if self.hidden_sharding is None else jax.P(*self.hidden_sharding[:-1])
        s, centring = (None if x is None else constrained(x, rows) for x in (sums.s, sums.centring))
        return sums._replace(s=s, centring=centring)

    def _lies(self, x: jax.Array) -> jax.Array:
        """x (..., F), or (..., 2, F) of a gate, as `hidden_sharding` says."""
        spec = self.hidden_sharding
        if spec is None or x.ndim == len(spec):
            return constrained(x, spec)
        return constrained(x, jax.P(*spec[:-1], None, spec[-1]))


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

    The backward pass is four products:

        dz = activation'(z) * (dy w_down^T), hidden = activation(z)     one, whose epilogue goes on to t = rstd * dz
        dw_down = hidden^T dy                                            one
        dx and dw_up from t, as in norm_products.py                      two

    Kept for it are x, its statistics, and u, z without what the biases add (named "mlpwi" for `jax.checkpoint`
    policies), rounded to the compute dtype.

    Args:
      norm: of x (..., D), the residual stream.
      w_up: (D, F); with a `gated` activation (D, 2F), gate in the first half and up in the second, or (D, 2, F), of
        which a mesh may cut F, or both apart, a pair of (D, F).
      w_down: (F, D), F a multiple of 8 for the kernel.
      up_bias: (F,) or (2F,), as w_up's columns.
      down_bias: (D,).
      activation: a function of float32 arrays, elementwise; or `gated(function)`. It may close over arrays, but not
        over what is differentiated.
      residual: what is added: True for x, whose cotangent is then added in the epilogue of the product that makes dx;
        False for nothing; or another array (..., D) or Stream.
      dtype: compute dtype, of the products' inputs; default the promotion of x and w_up.
      hidden_sharding: how the hidden activation (..., F) lies over the mesh of `jax.set_mesh`, and so do u and t: a
        constraint to XLA on automatic axes, a reshard on explicit ones. It takes no part in what is computed.
      keep_weights: whether the weights in the compute dtype, the norm's scale in w_up's, are kept for the backward pass
        and not made anew. Automatic mesh axes that cut them as FSDP's do then gather them once, for a copy's memory.
      implementation: as in `gemm`.

    Returns:
      y (..., D) in the residual's dtype, without one in x's; its row sums of squares (...,) float32, through which no
      gradient flows, or with a LayerNorm, whose statistic needs the whole row, None.

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
    if other is not None:
        other = separate_residual(other, name)
    chain = _FeedForward(
        activation,
        adds_x=residual is True,
        adds_other=other is not None,
        dtype=resolve_dtype(name, dtype, norm.x, up),
        out_dtype=norm.dtype if other is None else other.dtype,
        hidden_sharding=row_spec(hidden_sharding, norm),
        keep_weights=keep_weights,
        implementation=implementation,
    )
    arguments = [norm, up, up_bias, w_down, down_bias]
    rows = [*row_flags(arguments), None if other is None else True]
    y, *squares = run_chain(name, chain, [*arguments, other], rows)
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
      activation: a function, elementwise, of float32 arrays.
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
