"""How a product is split over the devices of a mesh: which mesh axes cut which of its dimensions.

A product has four dimensions that may be cut: a batch, m, n and k. Each device computes the product of its parts, with
the whole epilogue. Where k is cut the parts are summed first, and the epilogue runs on the sum, on the part of it that
the device keeps; or, of an epilogue that is linear in acc, its results are summed. Row reductions are finished over the
axes that cut n, column reductions over those that cut m.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from coda_jax.epilogue import Program
from coda_jax.primitives.matrices import Groups, argument_groups, argument_parts, product_parts, result_groups
from coda_jax.primitives.spec import GemmSpec

Axes = tuple[str, ...]
# Of an array: for each axis "batch", "m0", "m1", "n0", "k0", ...; None if it is never cut. All arrays that N or K is
# joined of have its name, and are cut by the same mesh axes.
Dims = tuple[str | None, ...]


class Plan(NamedTuple):
    """The mesh axes that cut each dimension, the major one first.

    Attributes:
      cuts: of the product of each device's parts; those of k have the axes over which these products are summed.
      scatters: those of k's axes that cut m and n of the sum, behind the axes of m and n: a reduce-scatter.
    """

    cuts: Mapping[str, Axes]
    scatters: Mapping[str, Axes]

    def over(self, dimension: str) -> Axes:
        """All axes that cut "m", "n" or "k", in the epilogue's operands and results."""
        found = (self.cuts, self.scatters)
        return tuple(axis for of in found for name, axes in of.items() if name[0] == dimension for axis in axes)

    def spec(self, dims: Dims, *, of_factor: bool) -> PartitionSpec:
        """Of an array with these dimensions: a factor of the product, or an operand or result of the epilogue."""
        scatters = {} if of_factor else self.scatters
        each = (self.cuts.get(dim or "", ()) + scatters.get(dim or "", ()) for dim in dims)
        return PartitionSpec(*(axes or None for axes in each))

    def argument_specs(self, spec: GemmSpec, ranks: Sequence[int]) -> tuple[PartitionSpec, ...]:
        dims = argument_dims(spec, ranks)
        _, last = _of_factors(spec)
        return tuple(self.spec(of_one, of_factor=i < last) for i, of_one in enumerate(dims))

    def result_specs(self, spec: GemmSpec) -> tuple[PartitionSpec, ...]:
        return tuple(self.spec(of_one, of_factor=False) for of_one in result_dims(spec))


def argument_dims(spec: GemmSpec, ranks: Sequence[int]) -> list[Dims]:
    """The dimensions of a, b and the operands, which have so many axes each."""
    each = zip(argument_groups(spec), spec.batched, ranks, strict=True)
    return [_aligned(_dims(groups, spec), has_batch, rank) for groups, has_batch, rank in each]


def result_dims(spec: GemmSpec) -> list[Dims]:
    """The dimensions of the stores and then the reductions."""
    batch: Dims = ("batch",) * any(spec.batched)
    return [batch + _dims(groups, spec) for groups in result_groups(spec)]


def product_dims(spec: GemmSpec) -> list[Dims]:
    """The dimensions of acc's parts, without a batch."""
    return [_dims(groups, spec) for groups in product_parts(spec)]


def _dims(groups: Groups, spec: GemmSpec) -> Dims:
    """The dimension of each axis. Halves that lie apart are never cut."""
    own = {"m": spec.axes.m, "n": spec.axes.n, "k": spec.axes.k}
    dims: Dims = ()
    for of, count, _ in groups:
        named = own.get(of, 0)
        dims += (None,) * (count - named) + tuple(f"{of}{i}" for i in range(named))
    return dims


def _aligned(dims: Dims, has_batch: bool, rank: int) -> Dims:
    """For an array of this rank: axes in front of `dims` are never cut, dimensions that it lacks are left out."""
    matrix = rank - has_batch
    return ("batch",) * has_batch + (((None,) * matrix + dims)[-matrix:] if matrix else ())


def units(spec: GemmSpec, sizes: Mapping[str, int]) -> dict[str, int]:
    """What a part of each dimension must be a multiple of; 0 where it may not be cut.

    Args:
      sizes: of the dimensions.
    """
    found = {"batch": 1} | {dim: 1 for dim in sizes if dim[0] == "k"}
    for letter, unit in (("m", row_unit(spec.program)), ("n", _column_unit(spec))):
        dims = sorted(dim for dim in sizes if dim[0] == letter)
        inner = math.prod(sizes[dim] for dim in dims[1:])
        found |= dict.fromkeys(dims, 1 if unit == 1 else 0)
        if dims and unit > 1:
            found[dims[0]] = unit // math.gcd(unit, inner)
    return found


def row_unit(program: Program) -> int:
    """What a part's rows must be a multiple of; 0 where m may not be cut at all."""
    if any(node.op == "row" for node in program.nodes):
        return 0
    return math.lcm(1, *(operand.kind.row_unit(operand) for operand in program.operands))


def _column_unit(spec: GemmSpec) -> int:
    """What a part's columns must be a multiple of; 0 where n may not be cut at all.

    Halves of N lie apart from each other, and so do slices: no part of N has the same share of each, but where halves
    have an axis of their own, or slices are what N is joined of.
    """
    program = spec.program
    slices = {store.slice for store in program.stores if store.slice}
    if any(node.op == "column" for node in program.nodes):
        return 0
    if program.columns and not (spec.axes.joined == "n" and slices <= set(program.sections)):
        return 0
    if program.halves.count == 1 or (spec.axes.halves and not program.halves.head):
        return 1
    return program.halves.head if program.halves.of_acc == program.halves.count else 0


def plan(
    spec: GemmSpec,
    shapes: Sequence[Sequence[int]],
    arguments: Sequence[Sequence[Axes]],
    results: Sequence[Sequence[Axes]],
    sizes: Mapping[str, int],
) -> Plan:
    """Follows how arguments and results lie; what it does not take as it lies, XLA moves.

    k is cut by the axes that cut it in both factors: an axis that cuts it in one alone is one that keeps parameters
    apart (FSDP), and they are gathered. m and n are cut as the results are asked for, else as the factors lie, by axes
    that the results do not ask for elsewhere.

    Args:
      shapes: of the arguments, whole.
      arguments: for each argument and each of its axes, the mesh axes that cut it.
      results: the same for each store and reduction.
      sizes: of the mesh axes.
    """
    dims = argument_dims(spec, [len(shape) for shape in shapes])
    whole = dimension_sizes(dims, shapes)
    first, last = _of_factors(spec)
    of_a, of_b = (_first(dims[i:j], arguments[i:j]) for i, j in ((0, first), (first, last)))
    asked = _first(result_dims(spec), results)
    elsewhere = {axis for axes in asked.values() for axis in axes}
    lie = _first(dims, arguments)
    wanted = {dim: tuple(axis for axis in axes if axis not in elsewhere) for dim, axes in lie.items()} | asked
    for dim in (dim for dim in whole if dim[0] == "k"):
        wanted[dim] = tuple(axis for axis in of_a.get(dim, ()) if axis in of_b.get(dim, ()))

    fitting = _Sizes(whole, units(spec, whole), sizes).fitting
    cuts: dict[str, Axes] = {}
    scatters: dict[str, Axes] = {}
    taken: Axes = ()
    for dim in sorted(whole, key=lambda dim: ("kbmn".index(dim[0]), dim)):  # what cuts one cuts none behind it
        cuts[dim] = fitting(dim, wanted.get(dim, ()), taken)
        taken += cuts[dim]
    summed = {axis for dim, axes in cuts.items() if dim[0] == "k" for axis in axes}
    taken = ()
    for dim in (dim for dim in cuts if dim[0] in "mn"):
        scatters[dim] = fitting(dim, [axis for axis in asked.get(dim, ()) if axis in summed], taken, cuts[dim])
        taken += scatters[dim]
    return Plan(cuts, scatters)


def _of_factors(spec: GemmSpec) -> tuple[int, int]:
    """Where a's arrays end, and b's."""
    of_a, of_b = map(len, argument_parts(spec)[:2])
    return of_a, of_a + of_b


class _Sizes(NamedTuple):
    """Sizes of dimensions, what their parts must be multiples of, and sizes of mesh axes."""

    whole: Mapping[str, int]
    units: Mapping[str, int]
    mesh: Mapping[str, int]

    def fitting(self, dim: str, axes: Iterable[str], taken: Axes, before: Axes = ()) -> Axes:
        """Those of `axes`, not taken for another dimension, that cut this one, behind `before`, into whole units."""
        fit: Axes = ()
        for axis in axes:
            unit = self.units[dim] * math.prod(self.mesh[name] for name in (*before, *fit, axis))
            if axis not in (*taken, *fit) and unit and self.whole[dim] % unit == 0:
                fit += (axis,)
        return fit


def _first(dims: Iterable[Dims], cuts: Iterable[Sequence[Axes]]) -> dict[str, Axes]:
    """For each dimension what cuts the first array that is cut there."""
    found: dict[str, Axes] = {}
    for of_array, cut in zip(dims, cuts, strict=True):
        for dim, axes in zip(of_array, cut, strict=True):
            if dim and axes:
                found.setdefault(dim, axes)
    return found


def dimension_sizes(dims: Sequence[Dims], shapes: Sequence[Sequence[int]]) -> dict[str, int]:
    """The sizes of the dimensions, of parts their greatest common divisor; any argument may have the batch."""
    sizes: dict[str, int] = {}
    for of_array, shape in zip(dims, shapes, strict=True):
        for dim, size in zip(of_array, shape, strict=True):
            if dim and sizes.setdefault(dim, size) != size:
                sizes[dim] = math.gcd(sizes[dim], size)
    return sizes


def axes_of(spec: Any, rank: int) -> tuple[Axes, ...]:
    """For each axis of an array, the mesh axes that a PartitionSpec cuts it by."""
    entries = (*spec, *(None,) * rank)[:rank]
    return tuple(entry if isinstance(entry, tuple) else (entry,) if isinstance(entry, str) else () for entry in entries)
