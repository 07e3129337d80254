"""The interface to XLA's partitioner for a call that it shards over automatic mesh axes.

It calls back when it has decided how arrays are sharded, in terms of devices alone; this module translates these to
names of mesh axes. Where some axes are manual, as inside a shard_map over them, it describes the devices of one group:
the mesh of the other axes. The function of each device is written over the entire mesh, since its collectives name all
devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.sharding_impls import parse_flatten_op_sharding  # custom_partitioning's own knows no group of devices
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule, custom_partitioning
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from coda_jax.primitives.mesh_types import MeshAxes, mesh_axes_of

WAY_OUT = "inside a jax.shard_map over all axes, or over explicit axes, each device runs the kernel on its own part"


class ShardedArray(NamedTuple):
    """An array on the devices.

    Attributes:
      shape: unsharded.
      mesh_axes: for each of its axes the mesh axes that shard it.
    """

    shape: tuple[int, ...]
    mesh_axes: tuple[MeshAxes, ...]


class Partition(NamedTuple):
    """The sharding of a call.

    Attributes:
      arguments, results: their shardings; the partitioner reshards arrays that are sharded otherwise.
      each: the function that a device runs on its shards. All mesh axes are manual there.
    """

    arguments: Sequence[PartitionSpec]
    results: Sequence[PartitionSpec]
    each: Callable[..., list[jax.Array]]


# (arguments, results, sizes of the mesh axes that may shard them) -> Partition
Partitioner = Callable[[Sequence[ShardedArray], Sequence[ShardedArray], Mapping[str, int]], Partition]


def known_devices(ctx: mlir.LoweringRuleContext) -> bool:
    """True if the program that is lowered has devices; on an AbstractMesh it has none."""
    context = ctx.module_context.axis_context
    mesh = getattr(context, "mesh", None)
    if mesh is not None:
        return isinstance(mesh, Mesh) and not mesh.empty
    return getattr(context, "device_assignment", None) is not None


def devices_of(ctx: mlir.LoweringRuleContext) -> tuple[int, bool]:
    """The number of devices over which XLA partitions the program, if its types are on no mesh; if these are known."""
    context = ctx.module_context.axis_context
    # Nothing is partitioned further where all axes are manual, as inside a shard_map; else the types have a mesh.
    return getattr(context, "num_devices", 1), known_devices(ctx)


def partitioned_call(
    ctx: mlir.LoweringRuleContext,
    unsharded: Callable[..., list[jax.Array]],
    partition: Partitioner,
    rule: SdyShardingRule,
) -> Callable[..., list[jax.Array]]:
    """A function that the partitioner shards as `partition` says.

    Args:
      unsharded: the function on one device.
      rule: which axes of its arguments and results go together, for the partitioner's propagation.
    """
    mesh, manual = mesh_of_program(ctx), _manual_axes(ctx)
    # The partitioner numbers the devices of a group as the first result is sharded over them, and does not say how. So
    # the first result is a replicated scalar: then the devices are numbered in the order of the mesh.
    call = custom_partitioning(lambda *arguments: [jnp.float32(0), *unsharded(*arguments)])
    factor_sizes: dict[str, Any] = rule.factor_sizes
    with_scalar = SdyShardingRule(
        rule.operand_mappings,
        (ArrayMapping(), *rule.result_mappings),
        reduction_factors=rule.reduction_factors,
        need_replication_factors=rule.need_replication_factors,
        **factor_sizes,
    )
    call.def_partition(_Callback(mesh, manual, partition), sharding_rule=with_scalar, decode_shardings=False)
    return lambda *arguments: call(*arguments)[1:]


def with_own_attributes(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose operations keep their own frontend attributes in such a call, as `latency_metadata`.

    The partitioner gives the attributes of a call to each operation that replaces it, but not to operations inside a
    loop; and a loop of one iteration XLA dissolves later.
    """

    def once(*arguments: jax.Array) -> Any:
        _, stacked = jax.lax.scan(lambda _, __: (None, function(*arguments)), None, length=1)
        return jax.tree.map(lambda x: x[0], stacked)

    return once


@dataclasses.dataclass(frozen=True)
class _Callback:
    """The callback of the partitioner: it gets shardings in terms of devices, and returns how the call is sharded."""

    mesh: Mesh
    manual: frozenset[str]
    partition: Partitioner

    def __call__(self, _: Any, arguments: Sequence[Any], results: Sequence[Any]) -> tuple[Any, ...]:
        arrays = [*arguments, *results]
        over, mesh_axes = _read(self.mesh, self.manual, arrays)
        sharded = [ShardedArray(tuple(x.shape), names) for x, names in zip(arrays, mesh_axes, strict=True)]
        group = AbstractMesh(*_sizes_and_names(over, self.manual))
        partition = self.partition(sharded[: len(arguments)], sharded[len(arguments) + 1 :], dict(group.shape))

        def each(*shards: jax.Array) -> list[jax.Array]:
            with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
                return [jnp.float32(0), *partition.each(*shards)]

        def placed(specs: Sequence[PartitionSpec]) -> list[NamedSharding]:
            return [NamedSharding(group, spec) for spec in specs]

        return over, each, placed([PartitionSpec(), *partition.results]), tuple(placed(partition.arguments))

    def __reduce__(self) -> Any:
        raise NotImplementedError(
            "a compiled program whose calls XLA splits over automatic mesh axes cannot be serialised: it asks the "
            f"library how; {WAY_OUT}, and the program can be"
        )


def mesh_of_program(ctx: mlir.LoweringRuleContext) -> Mesh:
    """The mesh of the devices of the program that is lowered."""
    context: Any = ctx.module_context.axis_context
    if (mesh := getattr(context, "mesh", None)) is not None:
        return mesh
    devices = np.array(context.device_assignment)
    if (abstract := context.abstract_mesh) is not None:
        return Mesh(devices.reshape(abstract.axis_sizes), abstract.axis_names)
    return Mesh(devices, ("devices",))  # arrays whose shardings name no mesh


def _manual_axes(ctx: mlir.LoweringRuleContext) -> frozenset[str]:
    return frozenset(getattr(ctx.module_context.axis_context, "manual_axes", ()))


def _read(mesh: Mesh, manual: frozenset[str], arrays: Sequence[Any]) -> tuple[Mesh, list[tuple[MeshAxes, ...]]]:
    """The mesh whose axes say how all these arrays are sharded, and the mesh axes of each.

    Raises:
      NotImplementedError: no mesh of these devices does.
    """
    for over in _meshes(mesh, manual):
        group = AbstractMesh(*_sizes_and_names(over, manual))
        try:
            return over, [_mesh_axes(x, group) for x in arrays]
        # The sharding is by a factor of a mesh axis; for a minor factor JAX raises AssertionError.
        except (AssertionError, KeyError, ValueError, StopIteration, NotImplementedError):
            continue
    shardings = ", ".join(str(x.sharding) for x in arrays)
    raise NotImplementedError(f"no axes of the mesh {dict(mesh.shape)} shard arrays as {shardings}")


def _mesh_axes(x: Any, group: AbstractMesh) -> tuple[MeshAxes, ...]:
    rank = len(x.shape)
    (spec,) = parse_flatten_op_sharding(x.sharding._to_xla_hlo_sharding(rank), group)
    return mesh_axes_of(spec, rank)


def _meshes(mesh: Mesh, manual: frozenset[str]) -> Iterator[Mesh]:
    """The mesh, then those with each axis split into axes of prime sizes: a sharding may be by a factor of an axis."""
    yield mesh
    for descending in (False, True):
        names: list[str] = []
        sizes: list[int] = []
        for name, size in mesh.shape.items():
            primes = [size] if name in manual else sorted(_primes(size), reverse=descending) or [1]
            sizes += primes
            names += [name] if len(primes) == 1 else [f"{name}_{i}" for i in range(len(primes))]
        yield Mesh(mesh.devices.reshape(sizes), tuple(names))


def _primes(size: int) -> Iterator[int]:
    factor = 2
    while size > 1:
        if size % factor == 0:
            size //= factor
            yield factor
        else:
            factor += 1


def _sizes_and_names(mesh: Mesh, manual: frozenset[str]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Sizes and names of the axes that are not manual."""
    free = [(size, name) for name, size in mesh.shape.items() if name not in manual]
    return tuple(size for size, _ in free), tuple(name for _, name in free)
