"""How a product is sharded over the devices of a mesh: which mesh axes shard which of its axes.

A product has four dimensions that may be sharded: a batch, M, N and K. Each device computes the product of its shards
with the entire epilogue. Where K is sharded the devices' products are summed first, and the epilogue runs on the shard
of the sum that the device keeps; or, for an epilogue that is linear in acc, its results are summed. Row reductions are
finished over the mesh axes that shard N, column reductions over those that shard M.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from jax.sharding import PartitionSpec

from coda_jax.epilogue import Program
from coda_jax.epilogue.contraction_order import BLOCK
from coda_jax.primitives.axes import BATCH, Dimension, ProductAxes, ProductAxis
from coda_jax.primitives.mesh_types import MeshAxes, partition_spec
from coda_jax.primitives.spec import GemmSpec

# Mesh axes are given out in this order: one that shards a dimension shards none that follows.
_ORDER = (Dimension.K, Dimension.BATCH, Dimension.M, Dimension.N, Dimension.GROUP)


class Plan(NamedTuple):
    """The mesh axes that shard each axis of the product, the major one first.

    Attributes:
      shards: of the product of each device's shards; those of K are the mesh axes over which these products are summed.
      scatters: those of K's mesh axes that shard M and N of the sum, after the axes of M and N: a reduce-scatter.
    """

    shards: Mapping[ProductAxis, MeshAxes]
    scatters: Mapping[ProductAxis, MeshAxes]

    def over(self, dimension: Dimension) -> MeshAxes:
        """All mesh axes that shard a dimension, in the epilogue's operands and results."""
        each = itertools.chain(self.shards.items(), self.scatters.items())
        return tuple(name for axis, names in each if axis.dimension is dimension for name in names)

    def spec(self, axes: ProductAxes, *, is_factor: bool) -> PartitionSpec:
        """The sharding of an array with these axes: a factor, or an operand or result of the epilogue."""
        scatters = {} if is_factor else self.scatters
        return partition_spec([self.shards.get(axis, ()) + scatters.get(axis, ()) if axis else () for axis in axes])

    def argument_specs(self, spec: GemmSpec, ranks: Sequence[int]) -> tuple[PartitionSpec, ...]:
        """The shardings of a, b and the operands, which have so many axes."""
        matrices = spec.matrices
        axes = matrices.argument_axes(ranks)
        return tuple(self.spec(x, is_factor=i < matrices.num_factors) for i, x in enumerate(axes))

    def result_specs(self, spec: GemmSpec) -> tuple[PartitionSpec, ...]:
        """The shardings of the stores and the reductions."""
        return tuple(self.spec(axes, is_factor=False) for axes in spec.matrices.result_axes)


def units(spec: GemmSpec, sizes: Mapping[ProductAxis, int]) -> dict[ProductAxis, int]:
    """For each axis the number that must divide the size of a shard; 0 where the axis may not be sharded.

    Args:
      sizes: of the product's axes.
    """
    ragged_k = spec.ragged is Dimension.K  # K is then the rows that groups divide
    unit_of = {BATCH: 1} | {axis: int(not ragged_k) for axis in sizes if axis.dimension is Dimension.K}
    unit_of |= {axis: 0 for axis in sizes if axis.dimension is Dimension.GROUP}
    m_unit = 1 if ragged_k else row_unit(spec.program)
    stores = [store for store in spec.program.stores if store.contraction_order]
    m_unit = math.lcm(m_unit, BLOCK if any(store.transposed for store in stores) else 1)
    n_unit = math.lcm(_column_unit(spec), BLOCK if any(not store.transposed for store in stores) else 1)
    for dimension, unit in ((Dimension.M, m_unit), (Dimension.N, n_unit)):
        axes = sorted((axis for axis in sizes if axis.dimension is dimension), key=lambda axis: axis.number)
        inner = math.prod(sizes[axis] for axis in axes[1:])
        unit_of |= dict.fromkeys(axes, 1 if unit == 1 else 0)
        if axes and unit > 1:
            unit_of[axes[0]] = unit // math.gcd(unit, inner)
    return unit_of


def row_unit(program: Program) -> int:
    """The number that must divide the rows of a shard; 0 where M may not be sharded at all."""
    if any(node.op == "row" for node in program.nodes):
        return 0
    return math.lcm(1, *(operand.kind.row_unit(operand) for operand in program.operands))


def _column_unit(spec: GemmSpec) -> int:
    """The number that must divide the columns of a shard; 0 where N may not be sharded at all.

    A shard of consecutive columns does not have the same share of each half, or of each slice. It does where the halves
    have an axis of their own, or the slices are the pieces of N.
    """
    program = spec.program
    slices = {store.slice for store in program.stores if store.slice}
    if any(node.op == "column" for node in program.nodes):
        return 0
    if program.columns and not (spec.axes.joined is Dimension.N and slices <= set(program.sections)):
        return 0
    if program.halves.count == 1 or (spec.axes.halves and not program.halves.head):
        return 1
    return program.halves.head if program.halves.acc_halves == program.halves.count else 0


def plan(
    spec: GemmSpec,
    shapes: Sequence[Sequence[int]],
    arguments: Sequence[Sequence[MeshAxes]],
    results: Sequence[Sequence[MeshAxes]],
    mesh_sizes: Mapping[str, int],
) -> Plan:
    """The plan that follows how arguments and results are sharded; XLA reshards arrays that are sharded otherwise.

    K is sharded by the mesh axes that shard it in both factors. A mesh axis that shards it in one alone shards
    parameters (FSDP), which are gathered. M and N are sharded as is asked of the results, else as the factors are, by
    mesh axes that the results do not ask for elsewhere.

    Args:
      shapes: of the arguments, unsharded.
      arguments: for each argument and each of its axes, the mesh axes that shard it.
      results: the same for each store and reduction.
      mesh_sizes: of the mesh axes.
    """
    matrices = spec.matrices
    axes = matrices.argument_axes([len(shape) for shape in shapes])
    sizes = axis_sizes(axes, shapes)
    first, last = len(matrices.a), matrices.num_factors
    in_a, in_b = (_first(axes[i:j], arguments[i:j]) for i, j in ((0, first), (first, last)))
    asked = _first(matrices.result_axes, results)
    elsewhere = {name for names in asked.values() for name in names}
    preferred = {
        axis: tuple(name for name in names if name not in elsewhere) for axis, names in _first(axes, arguments).items()
    } | asked
    for axis in sizes:
        if axis.dimension is Dimension.K:
            preferred[axis] = tuple(name for name in in_a.get(axis, ()) if name in in_b.get(axis, ()))

    fitting = _Sizes(sizes, units(spec, sizes), mesh_sizes).fitting
    shards: dict[ProductAxis, MeshAxes] = {}
    scatters: dict[ProductAxis, MeshAxes] = {}
    used: MeshAxes = ()
    for axis in sorted(sizes, key=lambda axis: (_ORDER.index(axis.dimension), axis.number)):
        shards[axis] = fitting(axis, preferred.get(axis, ()), used)
        used += shards[axis]
    summed = {name for axis, names in shards.items() if axis.dimension is Dimension.K for name in names}
    used = ()
    for axis in (axis for axis in shards if axis.dimension in (Dimension.M, Dimension.N)):
        scatters[axis] = fitting(axis, [name for name in asked.get(axis, ()) if name in summed], used, shards[axis])
        used += scatters[axis]
    return Plan(shards, scatters)


class _Sizes(NamedTuple):
    """Sizes of the product's axes, the units that their shards must be multiples of, and sizes of mesh axes."""

    axes: Mapping[ProductAxis, int]
    units: Mapping[ProductAxis, int]
    mesh: Mapping[str, int]

    def fitting(self, axis: ProductAxis, names: Iterable[str], used: MeshAxes, before: MeshAxes = ()) -> MeshAxes:
        """The mesh axes that can shard this axis, after `before`: not used yet, and with shards of whole units."""
        fit: MeshAxes = ()
        for name in names:
            unit = self.units[axis] * math.prod(self.mesh[x] for x in (*before, *fit, name))
            if name not in (*used, *fit) and unit and self.axes[axis] % unit == 0:
                fit += (name,)
        return fit


def _first(axes: Iterable[ProductAxes], shards: Iterable[Sequence[MeshAxes]]) -> dict[ProductAxis, MeshAxes]:
    """For each axis of the product the mesh axes of the first array that is sharded there."""
    first: dict[ProductAxis, MeshAxes] = {}
    for array_axes, array_names in zip(axes, shards, strict=True):
        for axis, names in zip(array_axes, array_names, strict=True):
            if axis and names:
                first.setdefault(axis, names)
    return first


def axis_sizes(axes: Sequence[ProductAxes], shapes: Sequence[Sequence[int]]) -> dict[ProductAxis, int]:
    """The sizes of the product's axes, for pieces their greatest common divisor; any argument may have the batch."""
    sizes: dict[ProductAxis, int] = {}
    for array_axes, shape in zip(axes, shapes, strict=True):
        for axis, size in zip(array_axes, shape, strict=True):
            if axis and sizes.setdefault(axis, size) != size:
                sizes[axis] = math.gcd(sizes[axis], size)
    return sizes
