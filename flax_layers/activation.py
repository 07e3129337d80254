"""Activations by the names that Hugging Face's configurations give them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

Activation = Callable[[jax.Array], jax.Array]


def gelu_exact(x: jax.Array) -> jax.Array:
    """x Phi(x), Phi the normal distribution function."""
    return jax.nn.gelu(x, approximate=False)


def gelu_tanh(x: jax.Array) -> jax.Array:
    """x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2."""
    return jax.nn.gelu(x, approximate=True)


def squared_relu(x: jax.Array) -> jax.Array:
    """max(x, 0)^2."""
    return jnp.square(jax.nn.relu(x))


def soft_capped(x: jax.Array, *, soft_cap: float) -> jax.Array:
    """soft_cap tanh(x / soft_cap), of scores and logits in Gemma 2 (arXiv 2408.00118)."""
    return soft_cap * jnp.tanh(x / soft_cap)


@dataclasses.dataclass(frozen=True)
class ClippedSwiGLU:
    """(up + 1) gate sigmoid(alpha gate) of gate = min(gate, limit) and up in [-limit, limit]: gpt-oss's gate of both.

    `coda_jax.gated(ClippedSwiGLU(), of_both=True)` is an activation of experts.
    """

    limit: float = 7.0
    alpha: float = 1.702

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return (up + 1) * gate * jax.nn.sigmoid(self.alpha * gate)


ACTIVATIONS: dict[str, Activation] = {
    "gelu": gelu_exact,
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "relu": jax.nn.relu,
    "relu2": squared_relu,
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
}


def activation_of(activation: str | Activation) -> Activation:
    """The function of that name, or a function as it is.

    Raises:
      ValueError: an unknown name.
    """
    if not isinstance(activation, str):
        return activation
    if activation not in ACTIVATIONS:
        raise ValueError(f"{activation=} is unknown; give a function, or one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[activation]
