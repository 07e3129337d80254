"""Types on a mesh: the manual axes that an array varies over inside shard_map, and shardings over explicit axes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax._src.mesh import get_concrete_mesh  # jax.sharding.get_mesh raises under jit
from jax.sharding import AxisType

MeshAxes = tuple[str, ...]


def varying_axes(*arrays: Any) -> frozenset[str]:
    """The manual mesh axes of an enclosing shard_map over which any of the arrays varies."""
    axes: frozenset[str] = frozenset()
    for x in arrays:
        axes |= frozenset(jax.typeof(x).manual_axis_type.varying)
    return axes


def vary(axes: frozenset[str], *arrays: Any) -> list[Any]:
    """The arrays, all varying over `axes`, so that every cotangent has its argument's type."""
    missing = [tuple(sorted(axes - varying_axes(x))) for x in arrays]
    return [jax.lax.pcast(x, names, to="varying") if names else x for x, names in zip(arrays, missing, strict=True)]


def partitioned_axes(*shardings: Any) -> tuple[str, ...]:
    """The mesh axes of more than one device over which XLA may partition arrays of these shardings.

    These are the explicit axes that a sharding names, and all automatic ones.
    """
    names: dict[str, None] = {}
    for sharding in shardings:
        mesh = sharding.mesh
        named = {name for entry in sharding.spec for name in (entry if isinstance(entry, tuple) else (entry,))}
        for name, size, kind in zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True):
            if size > 1 and (kind is AxisType.Auto or (kind is AxisType.Explicit and name in named)):
                names[name] = None
    return tuple(names)


def may_be_automatic(*arrays: Any) -> bool:
    """True if XLA may partition arrays of these types: a mesh axis is automatic, or no mesh is known."""
    meshes = [mesh for x in arrays if not (mesh := jax.typeof(x).sharding.mesh).empty]
    context = jax.sharding.get_abstract_mesh()
    if not context.empty and get_concrete_mesh().empty:
        return False  # no devices: the program is lowered for a mesh of another machine
    return any(mesh.empty or _automatic(mesh) for mesh in meshes or [context])


def sizes_in_use() -> tuple[int, ...]:
    """The sizes of the axes of the mesh in use over which arrays may be sharded: of several devices, and not manual."""
    mesh = jax.sharding.get_abstract_mesh()
    each = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    return tuple(size for size, kind in each if size > 1 and kind is not AxisType.Manual)


def _automatic(mesh: Any) -> bool:
    return any(kind is AxisType.Auto and size > 1 for size, kind in zip(mesh.axis_sizes, mesh.axis_types, strict=True))


def automatic_axes(*shardings: Any) -> tuple[str, ...]:
    """The automatic mesh axes of more than one device of these shardings."""
    names: dict[str, None] = {}
    for mesh in (sharding.mesh for sharding in shardings):
        for name, size, kind in zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True):
            if size > 1 and kind is AxisType.Auto:
                names[name] = None
    return tuple(names)


def explicit_sharding(x: Any) -> Any:
    """The sharding that x, an array or a type, has on a mesh with explicit axes; None if no axis is explicit.

    An x whose type has no mesh is replicated over the mesh in use.
    """
    sharding = x.sharding if _is_type(x) else jax.typeof(x).sharding
    if sharding is None:
        return None
    if sharding.mesh.empty:
        sharding = jax.sharding.NamedSharding(jax.sharding.get_abstract_mesh(), jax.P(*[None] * x.ndim))
    return sharding if explicit_axes(sharding.mesh) else None


def explicit_cuts(x: Any) -> tuple[tuple[str, ...], ...]:
    """For each axis of an array, the explicit mesh axes that shard it."""
    # Never hasattr(x, "sharding"): for the message of a miss jax 0.10 walks all equations that a tracer's trace has.
    sharding = x.sharding if _is_type(x) else jax.typeof(x).sharding
    explicit = explicit_axes(sharding.mesh) if sharding is not None else ()
    if not explicit:
        return ((),) * x.ndim
    return tuple(tuple(name for name in names if name in explicit) for names in mesh_axes_of(sharding.spec, x.ndim))


def _is_type(x: Any) -> bool:
    return isinstance(x, jax.core.ShapedArray | jax.ShapeDtypeStruct)


def mesh_axes_of(spec: Any, rank: int) -> tuple[MeshAxes, ...]:
    """For each axis of an array, the mesh axes that a PartitionSpec shards it by."""
    entries = (*spec, *(None,) * rank)[:rank]
    return tuple(entry if isinstance(entry, tuple) else (entry,) if isinstance(entry, str) else () for entry in entries)


def partition_spec(mesh_axes: Sequence[MeshAxes]) -> jax.P:
    """The PartitionSpec of an array from the mesh axes that shard each of its axes: `mesh_axes_of` the other way."""
    return jax.P(*(names or None for names in mesh_axes))


def axes_of_dimension(x: Any, dimension: int) -> frozenset[str]:
    """The explicit mesh axes that shard this axis of an array; none where it has fewer axes."""
    mesh_axes = explicit_cuts(x)
    return frozenset(mesh_axes[dimension] if dimension < x.ndim else ())


def without_axes(x: jax.Array, dimension: int, axes: frozenset[str]) -> jax.Array:
    """x with this axis sharded over none of these explicit mesh axes."""
    if not axes & axes_of_dimension(x, dimension):
        return x
    sharding = jax.typeof(x).sharding
    entries = [*sharding.spec]
    names = entries[dimension] if isinstance(entries[dimension], tuple) else (entries[dimension],)
    entries[dimension] = tuple(name for name in names if name not in axes) or None
    return jax.sharding.reshard(x, jax.sharding.NamedSharding(sharding.mesh, jax.P(*entries)))


def cutting_evenly(axes: Sequence[str], mesh_sizes: Mapping[str, int], *sizes: Any) -> MeshAxes:
    """The mesh axes that together divide all of these sizes evenly, the major one first."""
    fit: MeshAxes = ()
    for axis in axes:
        shards = math.prod(mesh_sizes[name] for name in (*fit, axis))
        if all(isinstance(size, int) and size % shards == 0 for size in sizes):
            fit = (*fit, axis)
    return fit


def with_same_sharding(arrays: Sequence[jax.Array], dimension: int | None) -> list[jax.Array]:
    """The arrays, all sharded as the first that is sharded: to be concatenated along `dimension`, or stacked if None.

    JAX asks this of explicit mesh axes, and only these count. Mesh axes that do not divide each array evenly along the
    dimension shard none of them there.
    """
    mesh_axes = [explicit_cuts(x) for x in arrays]
    if all(names == mesh_axes[0] for names in mesh_axes):
        return list(arrays)
    first = next(i for i, names in enumerate(mesh_axes) if any(names))
    mesh, target = jax.typeof(arrays[first]).sharding.mesh, [*mesh_axes[first]]
    if dimension is not None:
        target[dimension] = cutting_evenly(target[dimension], mesh.shape, *(x.shape[dimension] for x in arrays))
    sharding = jax.sharding.NamedSharding(mesh, partition_spec(target))
    return [with_sharding(x, sharding) for x in arrays]


def with_sharding(x: Any, sharding: Any) -> Any:
    """x resharded to `sharding`; x itself where it has this sharding, and where either is None."""
    if x is None or sharding is None or jax.typeof(x).sharding == sharding:
        return x
    return jax.sharding.reshard(x, sharding)


def constrained(x: jax.Array, spec: Any) -> jax.Array:
    """x, sharded over the mesh in use by a PartitionSpec: constrained on automatic axes, resharded on explicit ones.

    Manual axes are ignored. Without a mesh, or for None, x is returned unchanged.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if spec is None or mesh.empty:
        return x
    x = with_sharding(x, sharding_over_explicit(spec))
    if AxisType.Auto in mesh.axis_types:
        x = jax.lax.with_sharding_constraint(x, _spec_over(spec, mesh, AxisType.Auto))
    return x


def sharding_over_explicit(spec: Any) -> Any:
    """The sharding of a PartitionSpec over the explicit axes of the mesh in use; None where there are none."""
    mesh = jax.sharding.get_abstract_mesh()
    if spec is None or not explicit_axes(mesh):
        return None
    return jax.sharding.NamedSharding(mesh, _spec_over(spec, mesh, AxisType.Explicit))


def _spec_over(spec: Any, mesh: Any, kind: AxisType) -> Any:
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    each = mesh_axes_of(spec, len(spec))
    return partition_spec([tuple(name for name in names if kinds.get(name) is kind) for names in each])


def explicit_axes(mesh: Any) -> tuple[str, ...]:
    """Names of a mesh's explicit axes."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind in kinds if kind is AxisType.Explicit)


def merged_sharding(sharding: Any, counts: Sequence[int]) -> Any:
    """The sharding of an array whose axes are merged: each entry of `counts` is the number of axes that become one."""
    each = iter(mesh_axes_of(sharding.spec, sum(counts)))
    merged = [tuple(itertools.chain(*itertools.islice(each, count))) for count in counts]
    return jax.sharding.NamedSharding(sharding.mesh, partition_spec(merged))


def reshaped(
    x: jax.Array,
    shape: Sequence[Any],
    merged: Sequence[int] = (),
    cuts: Sequence[MeshAxes] = (),
) -> jax.Array:
    """x.reshape(shape), sharded over explicit mesh axes as `cuts` says, or by `merged_sharding` of `merged`."""
    sharding = explicit_sharding(x)
    if sharding is None:
        return jax.lax.reshape(x, shape)
    if merged:
        return jax.lax.reshape(x, shape, out_sharding=merged_sharding(sharding, merged))
    return jax.lax.reshape(x, shape, out_sharding=jax.sharding.NamedSharding(sharding.mesh, partition_spec(cuts)))
