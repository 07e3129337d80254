"""How a product is split over the devices of a mesh: which mesh axes cut which of its dimensions.

A product has four dimensions that may be cut: a batch, m, n and k. Each device computes the product of its parts, with
the whole epilogue. Where k is cut the parts are summed first, and the epilogue runs on the sum, on the part of it that
the device keeps. Row reductions are finished over the axes that cut n, column reductions over those that cut m.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from coda_jax.epilogue import Axis, Kind, Operand, Program
from coda_jax.primitives.spec import GemmSpec

Axes = tuple[str, ...]
Dims = tuple[str | None, ...]  # of an array: for each axis "batch", "m", "n" or "k"; None where it is never cut


class Plan(NamedTuple):
    """The mesh axes that cut each dimension, the major one first.

    Attributes:
      batch, m, n, k: of the product of each device's parts; k has the axes over which these products are summed.
      scatter_m, scatter_n: those of k that cut m and n of the sum, behind the axes of m and n: a reduce-scatter.
    """

    batch: Axes = ()
    m: Axes = ()
    n: Axes = ()
    k: Axes = ()
    scatter_m: Axes = ()
    scatter_n: Axes = ()

    @property
    def rows(self) -> Axes:
        """What cuts m of the epilogue's operands and results."""
        return self.m + self.scatter_m

    @property
    def columns(self) -> Axes:
        """What cuts n of the epilogue's operands and results."""
        return self.n + self.scatter_n

    def spec(self, dims: Dims, *, of_factor: bool) -> PartitionSpec:
        """Of an array with these dimensions: a factor of the product, or an operand or result of the epilogue."""
        m, n = (self.m, self.n) if of_factor else (self.rows, self.columns)
        axes: dict[str | None, Axes] = {"batch": self.batch, "m": m, "n": n, "k": self.k}
        return PartitionSpec(*(axes.get(dim) or None for dim in dims))

    def argument_specs(self, spec: GemmSpec, ranks: Sequence[int]) -> tuple[PartitionSpec, ...]:
        dims = argument_dims(spec, ranks)
        return tuple(self.spec(of_one, of_factor=i < 2) for i, of_one in enumerate(dims))

    def result_specs(self, spec: GemmSpec) -> tuple[PartitionSpec, ...]:
        return tuple(self.spec(of_one, of_factor=False) for of_one in result_dims(spec))


def argument_dims(spec: GemmSpec, ranks: Sequence[int]) -> list[Dims]:
    """The dimensions of a, b and the operands, which have so many axes each."""
    a: Dims = ("k", "m") if spec.transpose_a else ("m", "k")
    b: Dims = ("n", "k") if spec.transpose_b else ("k", "n")
    dims = [a, b, *map(_operand_dims, spec.program.operands)]
    return [_aligned(*of_one) for of_one in zip(dims, spec.batched, ranks, strict=True)]


def _aligned(dims: Dims, has_batch: bool, rank: int) -> Dims:
    """For an array of this rank: axes in front of `dims` are never cut, dimensions that it lacks are left out."""
    matrix = rank - has_batch
    return ("batch",) * has_batch + (((None,) * matrix + dims)[-matrix:] if matrix else ())


def _operand_dims(operand: Operand) -> Dims:
    match operand.kind:
        case Kind.ROW_VECTOR:
            return ("n",)
        case Kind.COLUMN_VECTOR:
            return ("m", None)
        case Kind.TILE:
            return ("m", "n")
        case Kind.HEAD_TABLE:
            return (None if operand.period else "m", None)
    return ()  # scalars, and vectors of a head


def result_dims(spec: GemmSpec) -> list[Dims]:
    """The dimensions of the stores and then the reductions."""
    program = spec.program
    stores: list[Dims] = [("m", None if store.slice else "n") for store in program.stores]
    reductions: list[Dims] = [("m",) if reduction.axis is Axis.ROW else ("n",) for reduction in program.reductions]
    return [("batch",) * any(spec.batched) + dims for dims in stores + reductions]


def row_unit(program: Program) -> int:
    """What a part's rows must be a multiple of; 0 where m may not be cut at all."""
    if any(node.op == "row" for node in program.nodes):
        return 0
    return math.lcm(1, *(operand.period for operand in program.operands if operand.period))


def column_unit(program: Program) -> int:
    """What a part's columns must be a multiple of; 0 where n may not be cut at all.

    Halves of N lie apart from each other, and so do slices: no part of N has the same share of each.
    """
    if any(node.op == "column" for node in program.nodes) or program.columns:
        return 0
    if program.ways == 1:
        return 1
    return program.head if program.acc_ways == program.ways else 0


def plan(
    spec: GemmSpec,
    shapes: Sequence[Sequence[int]],
    arguments: Sequence[Sequence[Axes]],
    results: Sequence[Sequence[Axes]],
    sizes: Mapping[str, int],
) -> Plan:
    """Follows how arguments and results lie; what it does not take as it lies, XLA moves.

    k is cut by the axes that cut it in both factors: an axis that cuts it in one alone is one that keeps parameters
    apart (FSDP), and they are gathered. m and n are cut as the results are asked for, else as the factors lie.

    Args:
      shapes: of the arguments, whole.
      arguments: for each argument and each of its axes, the mesh axes that cut it.
      results: the same for each store and reduction.
      sizes: of the mesh axes.
    """
    dims = argument_dims(spec, [len(shape) for shape in shapes])
    whole = _sizes(dims, shapes)
    of_a, of_b = (_first(dims[i : i + 1], arguments[i : i + 1]) for i in range(2))
    asked = _first(result_dims(spec), results)
    lie = _first(dims, arguments) | asked

    def fitting(axes: Iterable[str], dim: str, unit: int, taken: Axes, before: Axes = ()) -> Axes:
        """Those of `axes`, not taken for another dimension, that cut this one into whole units."""
        fit: Axes = ()
        for axis in axes:
            parts = math.prod(sizes[name] for name in (*before, *fit, axis))
            if axis not in (*taken, *fit) and unit and whole[dim] % (parts * unit) == 0:
                fit += (axis,)
        return fit

    rows, columns = row_unit(spec.program), column_unit(spec.program)
    k = fitting([axis for axis in of_a.get("k", ()) if axis in of_b.get("k", ())], "k", 1, ())
    batch = fitting(lie.get("batch", ()), "batch", 1, k)
    m = fitting(lie.get("m", ()), "m", rows, k + batch)
    n = fitting(lie.get("n", ()), "n", columns, k + batch + m)
    scatter_m = fitting([axis for axis in asked.get("m", ()) if axis in k], "m", rows, (), m)
    scatter_n = fitting([axis for axis in asked.get("n", ()) if axis in k], "n", columns, scatter_m, n)
    return Plan(batch, m, n, k, scatter_m, scatter_n)


def _first(dims: Iterable[Dims], cuts: Iterable[Sequence[Axes]]) -> dict[str, Axes]:
    """For each dimension what cuts the first array that is cut there."""
    found: dict[str, Axes] = {}
    for of_array, cut in zip(dims, cuts, strict=True):
        for dim, axes in zip(of_array, cut, strict=True):
            if dim and axes:
                found.setdefault(dim, axes)
    return found


def _sizes(dims: Sequence[Dims], shapes: Sequence[Sequence[int]]) -> dict[str, int]:
    """The sizes of m, n and k, and of the batch, which any argument may have."""
    sizes: dict[str, int] = {}
    for of_array, shape in zip(reversed(dims), reversed(shapes), strict=True):
        sizes |= {dim: size for dim, size in zip(of_array, shape, strict=True) if dim}
    return sizes


def axes_of(spec: Any, rank: int) -> tuple[Axes, ...]:
    """For each axis of an array, the mesh axes that a PartitionSpec cuts it by."""
    entries = (*spec, *(None,) * rank)[:rank]
    return tuple(entry if isinstance(entry, tuple) else (entry,) if isinstance(entry, str) else () for entry in entries)
