"""State of layers that train in 8 bits with delayed scaling: histories, their update, and what went out of range.

A layer with `fp8=coda.fp8.Recipe(scaling="delayed")` has a `History` for each of its products. Histories are no
parameters: optimisers, weight decay and norms of gradients do not see them. They are differentiated: their gradients
are the maxima of the step, from which `update` makes the next histories:

    recipe = coda.fp8.Recipe(scaling="delayed")
    model = Llama(config, fp8=recipe, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    fp8.calibrate(model, lambda model: model.loss(tokens, labels))
    ...
    loss, gradients = nnx.value_and_grad(loss_of, argnums=nnx.DiffState(0, fp8.DIFFERENTIATED))(model)
    optimizer.update(model, fp8.update(model, gradients))

An evaluation and `generate` read histories and change none. In linen (`flax_layers.linen`) they are the collection
`COLLECTION`, and `next_histories` takes such collections.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

import coda_jax as coda

__all__ = ["COLLECTION", "DIFFERENTIATED", "History", "Recipes", "calibrate", "next_histories", "saturated", "update"]

_Tree = TypeVar("_Tree")


class History(nnx.Variable[Any]):
    """Maxima of a product's input and of its result's cotangent, float32 (2, H): the last step first, 0 for no step."""


DIFFERENTIATED = (nnx.Param, History)  # for nnx.DiffState: any of both
COLLECTION = "fp8_history"  # of linen's variables
nnx.register_variable_name(COLLECTION, History)

Recipes: TypeAlias = coda.fp8.Recipe | Sequence[coda.fp8.Recipe | None] | None
"""The recipes of a model's layers: one for all, or one for each, None for those in the compute dtype."""


def history_of(recipe: coda.fp8.Recipe | None) -> Any:
    """A new history, where the recipe has one."""
    if recipe is None or recipe.scaling == "current":
        return nnx.data(None)
    return History(jnp.zeros((2, recipe.history), jnp.float32))


def layer_recipes(fp8: Recipes | str, count: int) -> Sequence[coda.fp8.Recipe | None]:
    """The recipe of each of `count` layers.

    Raises:
      TypeError: a string.
      ValueError: there are more, or fewer.
    """
    if fp8 is None or isinstance(fp8, coda.fp8.Recipe):
        return [fp8] * count
    if isinstance(fp8, str):
        raise TypeError(f"{fp8=} must be a coda.fp8.Recipe or None, or a sequence of them")
    if len(fp8) != count:
        raise ValueError(f"fp8: {len(fp8)} recipes for {count} layers; it must be one for all, or one for each")
    return fp8


def next_histories(histories: _Tree, gradients: _Tree) -> _Tree:
    """The histories of the next step.

    Args:
      histories: pytree of arrays (..., 2, H), as the collection of a linen module's variables.
      gradients: those of the histories, of the same structure.
    """
    result: _Tree = jax.tree.map(coda.fp8.next_history, histories, gradients)
    return result


def update(model: nnx.Module, gradients: nnx.State[Any, Any]) -> nnx.State[Any, Any]:
    """Writes the next histories into the model.

    Args:
      model: with histories or without.
      gradients: of `DIFFERENTIATED`, as nnx.value_and_grad returns them; also sums of those of microbatches.

    Returns:
      The gradients without those of histories, for an optimiser.

    Raises:
      ValueError: there are no gradients of the model's histories.
    """
    history_gradients, others = nnx.split_state(gradients, History, ...)
    histories = nnx.state(model, History)
    if dict(nnx.to_flat_state(history_gradients)).keys() != dict(nnx.to_flat_state(histories)).keys():
        raise ValueError(
            "fp8.update: there are no gradients of the model's histories. Differentiate with "
            "argnums=nnx.DiffState(0, flax_layers.fp8.DIFFERENTIATED)"
        )
    nnx.update(model, next_histories(histories, history_gradients))
    return others


def calibrate(model: nnx.Module, loss: Callable[[Any], jax.Array]) -> None:
    """Fills the model's histories by a step with current scales, which reads none: before the first step of training.

    Args:
      model: whose histories are written.
      loss: of the model, a scalar.
    """
    recipes = [(module, module.fp8) for _, module in _rounding(model)]
    try:
        for module, recipe in recipes:
            module.fp8 = dataclasses.replace(recipe, scaling="current")
        gradients = nnx.grad(loss, argnums=nnx.DiffState(0, DIFFERENTIATED))(model)
    finally:
        for module, recipe in recipes:
            module.fp8 = recipe
    update(model, gradients)


def saturated(model: nnx.Module, gradients: nnx.State[Any, Any]) -> dict[str, jax.Array]:
    """Tells which tensors of a step were clipped because they were out of the range of their scale.

    Args:
      model: before `update`.
      gradients: as `update` takes them. A sum of those of microbatches tells whether any of them was clipped; of
        histories of one step it tells whether the sum of their maxima is out of range.

    Returns:
      By the path of a history, booleans (2,): its product's input, and the result's cotangent; (L, 2) for scanned
      layers.
    """
    history_gradients = dict(nnx.to_flat_state(nnx.filter_state(gradients, History)))
    found = {}
    for path, module in _rounding(model):
        for name in ("fp8_history", "gate_up_history"):
            history = getattr(module, name, None)
            if history is None or (*path, name) not in history_gradients:
                continue
            gradient = history_gradients[*path, name][...]
            is_clipped = (
                gradient[..., 1] > 0 if gradient.shape[-1] > 1 else _is_beyond(history[...], gradient, module.fp8)
            )
            found[".".join(map(str, (*path, name)))] = is_clipped
    return found


def _is_beyond(history: jax.Array, gradient: jax.Array, recipe: coda.fp8.Recipe) -> jax.Array:
    """Whether maxima are beyond the range, for histories (..., 2, 1), whose gradients hold nothing else."""
    largest = jnp.array([float(jnp.finfo(x).max) for x in (recipe.dtype, recipe.gradient_dtype)])
    scales = [coda.fp8.history_scale(history[..., i, :], recipe, is_cotangent=bool(i)) for i in range(2)]
    return gradient[..., 0] * jnp.stack(scales, axis=-1) > largest


def _rounding(model: nnx.Module) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The modules that have a recipe, with their paths."""
    for path, module in nnx.iter_modules(model):
        if getattr(module, "fp8", None) is not None:
            yield path, module
