"""A stack of equal layers: one after another, or one scan over their stacked parameters, with or without remat.

On several devices nothing in a list of layers says when a layer's weights are gathered, or when its gradients are
summed over the devices. XLA's scheduler then gathers the weights of many layers before the first product, leaves most
sums to the end of the step, and runs remat's computations before them: all of these are in memory at once. So under a
mesh (`jax.set_mesh`) the layers take turns, by optimization barriers: the weights of a layer are gathered while the
layer before it is computed, and its gradients are summed while the backward pass of that layer runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from flax_layers.axis_metadata import name_layer, name_stack
from flax_layers.config_checks import UNLIKE, check_alike
from flax_layers.packing import shared_segments
from flax_layers.remat import Remat, policy_of
from flax_layers.sharding import width_is_cut

# In older versions a barrier makes cotangents of all its operands: frozen weights would have gradients.
_BARRIER_LEAVES_ZEROS = jax.__version_info__ >= (0, 11, 1)


def stack(layers: Sequence[nnx.Module]) -> Any:
    """One module with the structure of each layer, whose arrays are those of all, stacked along a new first axis.

    Args:
      layers: at least one; all of one structure.

    Raises:
      ValueError: no layers, or layers that differ in structure, in a setting or in the shape of an array.
    """
    if not layers:
        raise ValueError("stack wants at least one layer")
    graphdefs, states = zip(*map(nnx.split, layers), strict=True)
    shapes = [[jnp.shape(x) for x in jax.tree.leaves(state)] for state in states]
    for i, graphdef in enumerate(graphdefs):
        if graphdef != graphdefs[0] or shapes[i] != shapes[0]:
            check_alike([dict(_settings(layer)) for layer in layers])
            raise ValueError(f"{UNLIKE}: layer {i} differs in structure from layer 0")
    return name_stack(nnx.merge(graphdefs[0], jax.tree.map(lambda *arrays: jnp.stack(arrays), *states)))


def _settings(module: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The fixed properties of a module, by dotted path: classes, settings, and the shapes of arrays."""
    yield path, type(module)
    for name, value in vars(module).items():
        below = f"{path}.{name}" if path else name
        if name.startswith("_pytree"):
            continue
        if isinstance(value, nnx.Variable):
            yield below, type(value)
            yield f"{below}.shape", jnp.shape(value[...])
        elif isinstance(value, nnx.Pytree):
            yield from _settings(value, below)
        elif isinstance(value, jax.Array):
            yield f"{below}.shape", value.shape
        else:
            yield below, value


def unstack(layers: nnx.Module) -> nnx.List:
    """The layers that `stack` was given."""
    graphdef, state = nnx.split(layers)
    count = jax.tree.leaves(state)[0].shape[0]
    modules = (nnx.merge(graphdef, jax.tree.map(lambda x, i=i: x[i], state)) for i in range(count))
    return nnx.List(map(name_layer, modules))


def run_layers(
    layers: Any,
    stream: jax.Array,
    *,
    remat: Remat = None,
    remat_layers: int | None = None,
    statistics: bool = False,
    **options: Any,
) -> Any:
    """The stream after all layers.

    Args:
      layers: nnx.List of modules, each called as layer(stream, **options); or one module made by `stack`, which is
        scanned. What the layers write into variables of their own is lost under remat and under a scan.
      stream: what enters.
      remat: as in `flax_layers.remat.policy_of`, applied to each layer.
      remat_layers: to how many of them, the first; default all. Only of a list.
      statistics: whether each is called with statistics=True and so returns (stream, a pytree or None).
      options: for every layer; of `segment_ids` the layers' own blocks share the `Segments`, which are made once.

    Returns:
      The stream; with `statistics` a pair of it and of the layers' pytrees but None, stacked along a new first axis.
    """
    policy = policy_of(remat)
    if "segment_ids" in options:
        each = layers if isinstance(layers, nnx.List) else [layers]
        options["segment_ids"] = shared_segments(options["segment_ids"], each)
    if isinstance(layers, nnx.List):
        stream, collected = _one_by_one(
            layers, stream, policy, len(layers) if remat_layers is None else remat_layers, statistics, options
        )
        return (stream, _stacked(collected)) if statistics else stream
    graphdef, states = nnx.split(layers)
    function = _function_of(graphdef, statistics)
    if policy is not None:
        # The body cannot share computations with the backward pass, so the barriers against that are not needed.
        function = jax.checkpoint(function, policy=policy, prevent_cse=False)

    def one_layer(stream: Any, state: Any) -> tuple[Any, Any]:
        return function(state, stream, options)

    left, collected = lax.scan(one_layer, stream, states)
    return (left, collected) if statistics else left


def _stacked(trees: list[Any]) -> Any:
    """Pytrees of one structure as one, without those that are None; None if all are."""
    present = [tree for tree in trees if tree is not None]
    return jax.tree.map(lambda *arrays: jnp.stack(arrays), *present) if present else None


def _function_of(graphdef: Any, statistics: bool) -> Callable[[Any, Any, dict[str, Any]], tuple[Any, Any]]:
    """A layer as a function of its variables, what enters and options; it returns the stream and the statistics."""

    def call(state: Any, stream: Any, options: dict[str, Any]) -> tuple[Any, Any]:
        return _called(nnx.merge(graphdef, state), stream, statistics, options)

    return call


def _called(layer: Any, stream: Any, statistics: bool, options: dict[str, Any]) -> tuple[Any, Any]:
    """The stream after a layer, and the layer's statistics or None."""
    if not statistics:
        return layer(stream, **options), None
    left: tuple[Any, Any] = layer(stream, statistics=True, **options)
    return left


def _one_by_one(
    layers: nnx.List, stream: jax.Array, policy: Any, remat_layers: int, statistics: bool, options: dict[str, Any]
) -> tuple[jax.Array, list[Any]]:
    collected: list[Any] = []
    take_turns = _BARRIER_LEAVES_ZEROS and jax.sharding.get_abstract_mesh().size > 1
    parameters = [nnx.state(layer, nnx.Param) for layer in layers] if take_turns else []
    shards_width = take_turns and width_is_cut()
    checkpoints: dict[Any, Callable[..., tuple[Any, Any]]] = {}  # equal layers have one, which JAX traces once
    for i, layer in enumerate(layers):
        if take_turns and i + 1 < len(layers):
            stream, parameters[i + 1] = lax.optimization_barrier((stream, parameters[i + 1]))
        current = _holding(layer, parameters[i]) if take_turns else layer
        if policy is None or i >= remat_layers:
            stream, counted = _called(current, stream, statistics, options)
        else:
            graphdef, state = nnx.split(current)
            if graphdef not in checkpoints:
                # A barrier on all saved arrays until the cotangent is there would keep weights from being gathered
                # earlier.
                pinned, function = (not shards_width, True, True), _function_of(graphdef, statistics)
                checkpoints[graphdef] = jax.checkpoint(function, policy=policy, prevent_cse=pinned)
            stream, counted = checkpoints[graphdef](state, stream, options)
        collected.append(counted)
    return stream, collected


def _holding(layer: nnx.Module, parameters: Any) -> nnx.Module:
    """The layer with these parameters; its other variables are the layer's own."""
    graphdef, _, *others = nnx.split(layer, nnx.Param, ...)
    return nnx.merge(graphdef, parameters, *others)
