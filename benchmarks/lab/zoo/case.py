"""A model at some sizes, and what models are given: tokens, keys, types of parameters."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

DEVICES = 8


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes that models have in common, and the dtype that they compute in."""

    layers: int = 2
    batch: int = 8
    length: int = 1024
    vocabulary: int = 32000
    width: int = 2048
    hidden: int = 8192
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    dtype: Any = jnp.bfloat16


LARGE = Sizes()

SMALL = Sizes(
    batch=8,
    length=128,
    vocabulary=2048,
    width=128,
    hidden=256,
    heads=4,
    kv_heads=2,
    head_dim=32,
    dtype=jnp.float32,
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model at some sizes.

    Attributes:
      loss: of parameters and the arrays of a batch, by name.
      parameters: types.
      batch: arrays.
      has_aux: whether the loss returns something beside it.
      on: the mesh and the rules that it is traced under.
      shardings: of the parameters, and of the batch's arrays; None for one device.
    """

    loss: Callable[..., Any]
    parameters: Any
    batch: Mapping[str, np.ndarray]
    has_aux: bool = False
    on: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    shardings: tuple[Any, Any] | None = None


def tokens(sizes: Sizes, seed: int = 1) -> np.ndarray:
    """Tokens of which none is padding."""
    return np.random.default_rng(seed).integers(2, sizes.vocabulary, (sizes.batch, sizes.length), dtype=np.int32)


def padded(x: np.ndarray) -> np.ndarray:
    """The tokens with padding, 0, at the end of every other row."""
    ends = x.shape[1] - (np.arange(x.shape[0]) % 2) * (x.shape[1] // 4)
    return np.where(np.arange(x.shape[1]) < ends[:, None], x, 0)


def key() -> np.ndarray:
    """A key of random numbers."""
    return np.asarray([0, 7], np.uint32)


def types_of(tree: Any, dtype: Any = None) -> Any:
    """Types of arrays, those of floats with another dtype."""

    def leaf(x: Any) -> jax.ShapeDtypeStruct:
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        return jax.ShapeDtypeStruct(x.shape, dtype if is_float and dtype is not None else x.dtype)

    return jax.tree.map(leaf, tree)


def values(types: Any) -> Any:
    """Arrays: vectors near 1, and others that keep the variance."""
    rng = np.random.default_rng(0)

    def leaf(x: Any) -> np.ndarray:
        drawn = rng.normal(size=x.shape)
        inputs = np.prod(x.shape[:-1]) ** 0.5 if len(x.shape) == 2 else np.prod(x.shape) ** (1 / 3)
        drawn = 1 + drawn / 10 if len(x.shape) < 2 else drawn / max(float(inputs), 4)
        return np.asarray(drawn, x.dtype)

    return jax.tree.map(leaf, types)


def of_nnx(make: Callable[[nnx.Rngs], Any], dtype: Any = None) -> tuple[Any, Any]:
    """A module's graph and the types of its parameters."""
    graph, state, _ = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))), nnx.Param, ...)  # type: ignore[misc]
    return graph, types_of(state, dtype)


def of_linen(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The types of a module's parameters."""
    made = jax.eval_shape(
        lambda: module.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, *args, **kwargs)
    )
    return types_of(nn.meta.unbox(made["params"]))
