"""Experts on a mesh under plain `jit`: each device sorts its own tokens, and experts are where the rules put them.

Where rules are in force (`flax_layers.sharding`) a layer's experts run in one `jax.shard_map` over all mesh axes, in
which every product is a kernel on its device's shards. The role of a mesh axis there follows from the names whose axes
it shards by the rules:

    tokens      "batch", or "length": each device sorts the rows of its own tokens. Parameters that such an axis shards
                as well, FSDP's, are gathered in the compute dtype, and their gradients scattered in their own.
    experts     "expert": rows are sent to the devices of their experts and back (`flax_layers.moe.exchange`). Such an
                axis usually shards the tokens, too. Where it does not, each of its devices computes a share of the
                tokens that they all have, and they gather the results.
    F           "mlp": each device has a shard of every expert's hidden features, and results are summed over the axis,
                in the compute dtype. Where it shards "length" as well, each device keeps its shard of the sum. A
                parameter without F, as a bias of the sums, is zeros on all devices of the axis but the first.

XLA alone would sort and gather over the tokens of all devices.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from coda_jax.extend import constrained, vary
from flax_layers.axis_names import Axes, Name
from flax_layers.moe.exchange import exchanged_experts
from flax_layers.moe.routing import sorted_experts
from flax_layers.sharding import STREAM, activation_spec, mesh_axes, spec_of

MeshAxes = tuple[str, ...]
# The names of the axes of experts' parameters, (E, D, 2, F) and (E, F, D), and of their biases, (E, 2, F) and (E, D).
GATE_UP: Axes = ("expert", "embed", None, "mlp")
DOWN: Axes = ("expert", ("mlp", "fan_in"), "embed")
GATE_UP_BIAS: Axes = ("expert", None, "mlp")
DOWN_BIAS: Axes = ("expert", "embed")


def expert_parallel(
    experts: Callable[..., jax.Array],
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    parameters: Sequence[jax.Array],
    *,
    axes: Sequence[Axes] = (GATE_UP, DOWN),
    capacity_factor: float | None = None,
    compute_dtype: Any = None,
    dtype: Any = None,
) -> Any:
    """`sorted_experts`, over the mesh of `jax.set_mesh` as the rules in force say; on one device where none are.

    Inside a `jax.shard_map` over some mesh axes it runs over the others, without gradients: JAX does not differentiate
    a map in a map.

    Args:
      experts: called as experts(rows (R, D), row_scale (R,) float32, group_sizes (E',), *parameters) -> (R, D) with the
        E' experts of one device; see `exchanged_experts`. Where F is sharded, it is called with a shard of F, and its
        results are summed: they must be sums over F.
      x: (..., D), as (B, T, D).
      ids: (..., k) integers, the experts of each token.
      weights: (..., k) float32.
      parameters: arrays (E, ...).
      axes: the names of each parameter's axes, "expert" the first; see `flax_layers.axis_names`.
      capacity_factor: rows of a device's receive buffer, in multiples of the T k rows of its own tokens: as many as it
        receives if all experts are chosen equally often. Others are dropped, as `exchanged_experts` says. Default is
        room for all. Where no mesh axis shards the experts nothing is received, and nothing dropped.
      compute_dtype: of gathered parameters, and of sums over devices; default the promotion of x's and theirs.
      dtype: of the result; default that of what `experts` returns.

    Returns:
      (..., D); with capacity_factor also () int32, how many rows all devices have dropped.

    Raises:
      ValueError: shapes that do not fit; a capacity_factor that is not positive; mesh axes that do not divide the
        experts evenly.
    """
    num_experts = parameters[0].shape[0]
    if any(p.shape[0] != num_experts for p in parameters) or len(parameters) != len(axes):
        raise ValueError(
            f"parameters of {num_experts} experts, with {len(axes)} names: {[p.shape for p in parameters]}"
        )
    options = {"num_experts": num_experts, "dtype": dtype}
    if capacity_factor is not None and not capacity_factor > 0:
        raise ValueError(f"{capacity_factor=}; it must be positive, or None for a place for all rows")
    if (plan := _plan(x, parameters, axes)) is None:
        y = _on_device(sorted_experts, experts, x, ids, weights, parameters, **options)
        return y if capacity_factor is None else (y, jnp.int32(0))

    run = functools.partial(_run, experts, plan, capacity_factor, compute_dtype, options)
    tokens = PartitionSpec(*plan.tokens, None)
    specs = (tokens, tokens, tokens, *(p.spec for p in plan.parameters))
    arguments = [constrained(z, spec) for z, spec in zip((x, ids, weights, *parameters), specs, strict=True)]
    results = PartitionSpec(*plan.results, None)
    outs = results if capacity_factor is None else (results, PartitionSpec())
    return jax.shard_map(run, in_specs=specs, out_specs=outs, axis_names=set(_free_axes()))(*arguments)


class _Parameter(NamedTuple):
    """The shards of a parameter that devices are given, and how they are gathered.

    Attributes:
      spec: of the shard that each device is given.
      gathered: for each of its axes the mesh axes over which it is gathered.
      once: the mesh axes over which it is added up, and so counts on the first device alone.
    """

    spec: PartitionSpec
    gathered: tuple[MeshAxes, ...]
    once: MeshAxes


class _Plan(NamedTuple):
    """The roles of the mesh axes.

    Attributes:
      tokens: the entries of x's PartitionSpec but the last one.
      results: those of the result's PartitionSpec.
      scattered: the axis along which each device keeps a shard of the result's sum.
      experts: the mesh axes that shard the experts.
      idle: those of them that do not shard the tokens.
      summed: the mesh axes that shard F, over which results are summed.
      varying: all mesh axes over which devices have different arrays.
      parameters: one for each parameter.
    """

    tokens: tuple[MeshAxes | None, ...]
    results: tuple[MeshAxes | None, ...]
    scattered: int | None
    experts: MeshAxes
    idle: MeshAxes
    summed: MeshAxes
    varying: frozenset[str]
    parameters: tuple[_Parameter, ...]


def _plan(x: jax.Array, parameters: Sequence[jax.Array], axes: Sequence[Axes]) -> _Plan | None:
    """The plan; None where no rules are in force, no mesh is, or no mesh axis is free."""
    names = (*(None,) * (x.ndim - len(STREAM)), *STREAM)[-x.ndim :]
    stream, free = activation_spec(x.shape, *names), _free_axes()
    if stream is None or not free:
        return None
    parameter_entries = [_entries(spec_of(each, shape=p.shape), free) for p, each in zip(parameters, axes, strict=True)]
    experts = _expert_axes(parameters, parameter_entries, {_entries(spec_of(each), free)[0] for each in axes})
    stream_entries = _entries(stream, free)[:-1]
    batch = mesh_axes(entry for name, entry in zip(names, stream_entries, strict=False) if name != "length")
    # Sequence parallelism shards the length by the axis that shards F, whose devices need the same tokens here.
    summed = _without(_hidden_axes(parameter_entries, axes), batch)
    tokens = [_without(entry, summed) for entry in stream_entries]
    token_axes = frozenset(mesh_axes(tokens))
    results, scattered = list(tokens), None
    for i, entry in enumerate(stream_entries):
        if summed and entry == (*tokens[i], *summed):
            results[i], scattered = entry, i
    return _Plan(
        tuple(entry or None for entry in tokens),
        tuple(entry or None for entry in results),
        scattered,
        experts,
        _without(experts, token_axes),
        summed,
        token_axes.union(experts, summed),
        tuple(
            _parameter(entries, each, experts, summed, token_axes)
            for entries, each in zip(parameter_entries, axes, strict=True)
        ),
    )


def _without(axes: MeshAxes, others: Collection[str]) -> MeshAxes:
    return tuple(axis for axis in axes if axis not in others)


def _expert_axes(
    parameters: Sequence[jax.Array], parameter_entries: Sequence[tuple[MeshAxes, ...]], allowed: set[MeshAxes]
) -> MeshAxes:
    """The mesh axes that shard the experts of all parameters."""
    if len(allowed) != 1 or {entries[0] for entries in parameter_entries} != allowed:
        raise ValueError(
            f"the rules cut experts, of parameters of shapes {[p.shape for p in parameters]}, by mesh axes "
            f"{sorted(allowed)}: these must be the same for all, and divide the number of experts evenly"
        )
    return next(iter(allowed))


def _hidden_axes(parameter_entries: Sequence[tuple[MeshAxes, ...]], axes: Sequence[Axes]) -> MeshAxes:
    """The mesh axes that shard F of all parameters which have it, in their order."""
    hidden_entries = [
        entry
        for entries, each in zip(parameter_entries, axes, strict=True)
        for entry, name in zip(entries, each, strict=True)
        if _is_f(name)
    ]
    return (
        tuple(axis for axis in hidden_entries[0] if all(axis in entry for entry in hidden_entries))
        if hidden_entries
        else ()
    )


def _parameter(
    sharded: tuple[MeshAxes, ...], names: Axes, experts: MeshAxes, summed: MeshAxes, token_axes: frozenset[str]
) -> _Parameter:
    """The plan of a parameter; XLA gathers over mesh axes that shard neither F nor tokens."""
    entries: list[MeshAxes] = [experts]
    gathered: list[MeshAxes] = [()]
    for name, entry in zip(names[1:], sharded[1:], strict=True):
        kept = summed if _is_f(name) else ()
        over = tuple(axis for axis in entry if axis in token_axes)
        entries.append((*kept, *over))  # those that stay come first: the gathered shards are one piece of F
        gathered.append(over)
    once = () if any(map(_is_f, names)) else summed
    return _Parameter(PartitionSpec(*(entry or None for entry in entries)), tuple(gathered), once)


def _is_f(name: Name) -> bool:
    return "mlp" in (name if isinstance(name, tuple) else (name,))


def _entries(spec: PartitionSpec, free: MeshAxes) -> tuple[MeshAxes, ...]:
    """The mesh axes of each entry that are not manual."""
    return tuple(tuple(axis for axis in mesh_axes([entry]) if axis in free) for entry in spec)


def _free_axes() -> MeshAxes:
    """The mesh axes that no shard_map around this has made manual."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(
        axis for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind is not AxisType.Manual
    )


def _run(
    experts: Callable[..., jax.Array],
    plan: _Plan,
    capacity_factor: float | None,
    compute_dtype: Any,
    options: dict[str, Any],
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    *parameters: jax.Array,
) -> Any:
    """The result of a device, from its tokens and its shards of the parameters."""
    x, weights, *shards = vary(plan.varying, x, weights, *parameters)
    dtypes = [jnp.promote_types(x.dtype, p.dtype) if compute_dtype is None else compute_dtype for p in shards]
    each = zip(shards, plan.parameters, dtypes, strict=True)
    gathered = [_on_the_first(_gathered(p, way.gathered, dtype), way.once) for p, way, dtype in each]
    own, own_ids, own_weights = [_share(each, plan.idle) if plan.idle else each for each in (x, ids, weights)]
    run: Any = sorted_experts
    if plan.experts:
        limit = None if capacity_factor is None else math.ceil(capacity_factor * own_ids.size)
        run = functools.partial(exchanged_experts, axis_name=plan.experts, receive_rows=limit)
    y = _on_device(run, experts, own, own_ids, own_weights, gathered, **options)
    y, dropped = y if plan.experts and capacity_factor is not None else (y, jnp.int32(0))
    if plan.idle:
        y = _join(y, plan.idle, x.shape[:-1])
    if plan.summed:
        y = _summed(y.astype(jnp.result_type(*dtypes)), plan).astype(y.dtype)
    if capacity_factor is None:
        return y
    return y, lax.psum(dropped, tuple(sorted(jax.typeof(dropped).manual_axis_type.varying)))


def _on_the_first(x: jax.Array, axes: MeshAxes) -> jax.Array:
    """A parameter on the first device along these axes, and zeros on the others; without axes on all."""
    return jnp.where(lax.axis_index(axes) == 0, x, jnp.zeros((), x.dtype)) if axes else x


def _on_device(
    run: Any,
    experts: Callable[..., jax.Array],
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    parameters: Sequence[jax.Array],
    **options: Any,
) -> Any:
    """`sorted_experts` or `exchanged_experts` of tokens (..., D)."""
    flat = (z.reshape(-1, z.shape[-1]) for z in (x, ids, weights))
    y = run(lambda *rows: experts(*rows, *parameters), *flat, **options)
    y, *dropped = y if isinstance(y, tuple) else (y,)
    y = y.reshape(x.shape)
    return (y, *dropped) if dropped else y


def _share(x: jax.Array, axes: MeshAxes) -> jax.Array:
    """This device's share (T', n), padded with zeros, of tokens (..., n) that all devices along these axes have."""
    flat = x.reshape(-1, x.shape[-1])
    devices = lax.axis_size(axes)
    size = max(-(-flat.shape[0] // devices), 1)  # XLA gathers no arrays without rows
    flat = jnp.pad(flat, ((0, devices * size - flat.shape[0]), (0, 0)))
    return lax.dynamic_slice_in_dim(flat, lax.axis_index(axes) * size, size)


def _join(y: jax.Array, axes: MeshAxes, shape: tuple[int, ...]) -> jax.Array:
    """The results (*shape, D) of the shares (T', D) of all devices."""
    return lax.all_gather(y, axes, tiled=True, to="invarying")[: math.prod(shape)].reshape(*shape, y.shape[-1])


def _summed(y: jax.Array, plan: _Plan) -> jax.Array:
    if plan.scattered is None:
        return lax.psum(y, plan.summed)
    return lax.psum_scatter(y, plan.summed, scatter_dimension=plan.scattered, tiled=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gathered(x: jax.Array, axes: tuple[MeshAxes, ...], dtype: Any) -> jax.Array:
    """A parameter, gathered along its axes in `dtype`; its gradient is summed and scattered in its own dtype."""
    if not any(axes):
        return x
    x = x.astype(dtype)
    for dimension, names in enumerate(axes):
        x = lax.all_gather(x, names, axis=dimension, tiled=True) if names else x
    return x


def _gathered_forward(x: jax.Array, axes: tuple[MeshAxes, ...], dtype: Any) -> tuple[jax.Array, Any]:
    return _gathered(x, axes, dtype), jnp.zeros((0,), x.dtype)


def _gathered_backward(
    axes: tuple[MeshAxes, ...], dtype: Any, empty_x: jax.Array, cotangent: jax.Array
) -> tuple[jax.Array]:
    cotangent = cotangent.astype(empty_x.dtype)
    for dimension, names in enumerate(axes):
        if names:
            cotangent = lax.psum_scatter(cotangent, names, scatter_dimension=dimension, tiled=True)
    return (cotangent,)


_gathered.defvjp(_gathered_forward, _gathered_backward)
