"""A block compared with its own lines run as plain JAX, with JAX's derivative."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from coda_jax.epilogue.dtypes import FLOAT32
from coda_jax.graph.block import Block, is_array
from coda_jax.graph.judged import judged, names_of_arguments
from coda_jax.graph.judged import wrong as wrong_ones
from coda_jax.graph.stated import Stated, relative_error
from coda_jax.graph.values import is_float

_FACTOR, _FLOOR, _STATED = 2.0, 2e-5, 1e-3


def check(block: Any, *args: Any, **kwargs: Any) -> dict[str, float]:
    """Compares block(*args, **kwargs) and its gradients with the block's lines run as plain JAX, in float32.

    Also every `pullback=` and `inverse=` of its maps, at the arrays that these see, with JAX's derivative and with what
    is inverted. It runs outside of jit: give small arrays.

    Args:
      block: what `coda.block` made.
      args, kwargs: those of the block.

    Returns:
      The relative error |result - exact| / |exact| of each array, by the array's name.

    Raises:
      TypeError: block is no result of `coda.block`.
      AssertionError: an error is more than twice the largest that the lines themselves have in the block's dtype; of
        an array that is 0 in truth, more than roundings of the others' size; a pullback or an inverse is off by more
        than 1e-3. The message names them.
    """
    if not isinstance(block, Block):
        raise TypeError(f"check: block is {type(block).__name__}; it must be what coda.block returns")
    stated: list[Stated] = []
    leaves, tree = jax.tree.flatten((args, kwargs))
    numbers = [i for i, x in enumerate(leaves) if is_array(x) and is_float(x.dtype)]
    exact = _values_and_gradients(block.in_plain_jax(FLOAT32, stated), _in_float32(leaves), tree, numbers)
    own = _values_and_gradients(block.in_plain_jax(None, []), leaves, tree, numbers)
    fused = _values_and_gradients(block, leaves, tree, numbers)
    errors = _errors(fused, exact)
    each = [judged(name, fused[name], own[name], x) for name, x in exact.items()]
    zeros = {one.name for one in each if one.is_zero and one.own}  # in truth; they have no relative error
    own_errors = (error for name, error in _errors(own, exact).items() if name not in zeros)
    bound = _FACTOR * max(own_errors, default=0.0) + _FLOOR
    wrong = {name: error for name, error in errors.items() if name not in zeros and not error <= bound}
    wrong |= {one.name: errors[one.name] for one in wrong_ones(each) if one.name in zeros}
    for one in stated:
        errors |= (map_errors := one.errors())
        wrong |= {name: error for name, error in map_errors.items() if not error <= _STATED}
    if wrong:
        told = "; ".join(f"{name} is off by {error:.1e}" for name, error in wrong.items())
        raise AssertionError(f"check of block '{block.name}': {told}. Its own lines are off by {bound / _FACTOR:.1e}")
    return errors


def _in_float32(leaves: Sequence[Any]) -> list[Any]:
    return [x.astype(FLOAT32) if is_array(x) and is_float(x.dtype) else x for x in leaves]


def _values_and_gradients(f: Any, leaves: Sequence[Any], tree: Any, numbers: Sequence[int]) -> dict[str, Any]:
    """The outputs, and the cotangents of the floating arguments for random ones of the outputs."""
    paths_of_outputs: list[Any] = []

    def floating_outputs(floats: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        by_number = dict(zip(numbers, floats, strict=True))
        args, kwargs = jax.tree.unflatten(tree, [by_number.get(i, x) for i, x in enumerate(leaves)])
        outputs = jax.tree_util.tree_leaves_with_path(f(*args, **kwargs))
        paths_of_outputs[:] = [path for path, _ in outputs]
        return [x for _, x in outputs if is_float(x.dtype)], [x for _, x in outputs]

    floats, pullback, outputs = jax.vjp(floating_outputs, [leaves[i] for i in numbers], has_aux=True)
    keys = jax.random.split(jax.random.key(0), len(floats))
    cotangents = [jax.random.normal(key, x.shape).astype(x.dtype) for key, x in zip(keys, floats, strict=True)]
    (gradients,) = pullback(cotangents)
    arguments = names_of_arguments(jax.tree.unflatten(tree, leaves))
    each = zip(paths_of_outputs, outputs, strict=True)
    named = {f"output{jax.tree_util.keystr(path)}": x for path, x in each}
    gradient_names = (f"gradient of {arguments[i]}" for i in numbers)
    return named | dict(zip(gradient_names, gradients, strict=True))


def _errors(results: Mapping[str, Any], exact: Mapping[str, Any]) -> dict[str, float]:
    return {name: relative_error(results[name], x) for name, x in exact.items()}
