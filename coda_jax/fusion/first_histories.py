"""The histories of a function's products in 8 bits before its first step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from coda_jax.epilogue.dtypes import FLOAT32
from coda_jax.fusion.fuse import Fused, fuse, loss_form
from coda_jax.graph.rounded import Recipe
from coda_jax.jaxprs.traced import of_arrays


def init(f: Callable[..., Any], /, *args: Any, fp8: Recipe | None = None, **kwargs: Any) -> dict[str, jax.Array]:
    """Empty histories of the products that `coda.fuse(f, fp8=...)` rounds to 8 bits: its argument `fp8_histories`.

        step = coda.fuse(loss, fp8=recipe)
        histories = coda.fp8.init(step, params, batch)
        both = jax.value_and_grad(lambda p, h: step(p, batch, fp8_histories=h), argnums=(0, 1))
        value, (gradients, histories) = both(params, histories)

    A history holds the largest magnitudes of a product's first factor and of its result's cotangent in the steps
    before, the latest first, 0 where there is none. Its gradient is no derivative but the next step's history. Of
    several batches, or devices, the next history is the largest of each element, not a sum: two calls in one loss have
    histories of their own.

    Args:
      f: the function, or what `fuse` made of it.
      args, kwargs: its arguments: arrays, or jax.ShapeDtypeStructs.
      fp8: the recipe, if f is not fused; default `Recipe(scaling="delayed")`.

    Returns:
      A dictionary, each history by the path of its product's weight among the arguments, "params['up']", or by the
      program's line where the weight is none of these; other products of the same weight have a number behind, " #2".
      float32 (2, H), in a scan over layers (L, 2, H). As a pytree of arrays it is checkpointed as any other.

    Raises:
      TypeError: f is fused without fp8, or with it and beside another fp8.
      ValueError: f asks for values of arrays, or holds its own gradient.
    """
    fused, found = _fused("init", f, fp8), dict[str, tuple[int, ...]]()

    def traced(*args: Any, **kwargs: Any) -> None:
        found.update(fused.history_shapes(*args, **kwargs))

    function, arrays = of_arrays(traced, args, kwargs, static_numbers=True)
    jax.eval_shape(function, *arrays, **(kwargs if function is traced else {}))
    return {name: jnp.zeros(shape, FLOAT32) for name, shape in found.items()}


def calibrate(
    f: Callable[..., Any],
    histories: Mapping[str, jax.Array],
    /,
    *args: Any,
    fp8: Recipe | None = None,
    **kwargs: Any,
) -> dict[str, jax.Array]:
    """Histories after a step with current scales, which reads none: before the first step of training.

    With empty histories scales are 1 in the first step, in which small cotangents are rounded to 0.

    Args:
      f: a loss, or what `fuse` made of it; also of (loss, others).
      histories: as `init` gives them.
      args, kwargs: arguments of f, arrays.
      fp8: as in `init`.

    Raises:
      TypeError: as `init`; f returns no loss.
      ValueError: as `init`; other histories than f's.
    """
    fused = _fused("calibrate", f, fp8).with_current_scales()

    def loss(histories: Mapping[str, jax.Array]) -> Any:
        results = fused(*args, fp8_histories=histories, **kwargs)
        if not loss_form(results):
            raise TypeError(f"fp8.calibrate: {fused.name} returns {jax.tree.map(jax.typeof, results)}, and no loss")
        return results[0] if isinstance(results, tuple) else results

    return dict(jax.grad(loss)(histories))


def _fused(name: str, f: Callable[..., Any], fp8: Recipe | None) -> Fused:
    if not isinstance(f, Fused):
        fused: Fused = fuse(f, fp8=Recipe(scaling="delayed") if fp8 is None else fp8)
        return fused
    if f.options.fp8 is None:
        raise TypeError(f"fp8.{name}: fuse({f.name}) has no fp8; it must have a recipe, coda.fuse(f, fp8=...)")
    if fp8 not in (None, f.options.fp8):
        raise TypeError(f"fp8.{name}: fp8 = {fp8} beside fuse({f.name}), which has {f.options.fp8}")
    return f
