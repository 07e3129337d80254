"""A stack of equal layers: one after another, or one scan over their stacked parameters, with or without remat."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from coda_jax import Stream
from flax_layers.remat import Remat, policy_of


def stack(layers: Sequence[nnx.Module]) -> Any:
    """One module with the structure of each layer, whose arrays are those of all, stacked along a new first axis.

    Args:
      layers: at least one; all of one structure.

    Raises:
      ValueError: no layers, or layers of different structures.
    """
    if not layers:
        raise ValueError("stack wants at least one layer")
    graphdefs, states = zip(*map(nnx.split, layers), strict=True)
    for i, graphdef in enumerate(graphdefs):
        if graphdef != graphdefs[0]:
            raise ValueError(f"layer {i} differs in structure from layer 0: only equal layers can be scanned")
    return nnx.merge(graphdefs[0], jax.tree.map(lambda *arrays: jnp.stack(arrays), *states))


def unstack(layers: nnx.Module) -> nnx.List:
    """The layers that `stack` was given."""
    graphdef, state = nnx.split(layers)
    count = jax.tree.leaves(state)[0].shape[0]
    return nnx.List(nnx.merge(graphdef, jax.tree.map(lambda x, i=i: x[i], state)) for i in range(count))


def run_layers(
    layers: Any, stream: Stream, *, remat: Remat = None, remat_layers: int | None = None, **options: Any
) -> Stream:
    """The stream after all layers.

    Args:
      layers: nnx.List of modules, each called as layer(stream, **options); or one module made by `stack`, which is
        scanned. What the layers write into variables of their own is lost under remat and under a scan.
      stream: what enters.
      remat: as in `flax_layers.remat.policy_of`, applied to each layer.
      remat_layers: to how many of them, the first; default all. Only of a list.
      options: for every layer.
    """
    policy = policy_of(remat)
    scanned = not isinstance(layers, nnx.List)

    def call(graphdef: Any, state: Any, stream: Stream, options: dict[str, Any]) -> Stream:
        out: Stream = nnx.merge(graphdef, state)(stream, **options)
        return out

    def layer_function(graphdef: Any) -> Any:
        function = partial(call, graphdef)
        # A scan's body cannot share computations with the backward pass, so the barriers against that are not needed.
        return function if policy is None else jax.checkpoint(function, policy=policy, prevent_cse=not scanned)

    if not scanned:
        for i, layer in enumerate(layers):
            if policy is None or (remat_layers is not None and i >= remat_layers):
                stream = layer(stream, **options)
            else:
                graphdef, state = nnx.split(layer)
                stream = layer_function(graphdef)(state, stream, options)
        return stream
    graphdef, states = nnx.split(layers)
    function = layer_function(graphdef)
    return lax.scan(lambda stream, state: (function(state, stream, options), None), stream.with_statistic(), states)[0]
