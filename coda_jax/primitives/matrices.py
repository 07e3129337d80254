"""The geometry of one product: how its arrays make matrices, and which axes of an array are which of the product's.

`Matrices` is made once from a `GemmSpec`, which keeps it as `spec.matrices`. axes.py has its terms for one array.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from coda_jax.epilogue import Along, Axis, Operand, Program, Reduction, TileStore, Width
from coda_jax.primitives.axes import (
    BATCH,
    UNSHARDED,
    Dimension,
    FactorSizes,
    MatrixAxes,
    MatrixAxis,
    Pieces,
    ProductAxes,
    ProductAxis,
    as_array,
    as_matrix,
    as_pieces,
    concatenated,
)
from coda_jax.primitives.mesh_types import explicit_cuts

if TYPE_CHECKING:
    from coda_jax.primitives.spec import GemmSpec


class ArrayAxes(NamedTuple):
    """How many axes each dimension of a product has in its arrays.

    Attributes:
      m, n, k: the numbers of axes; n that of the columns of one half, where halves are apart.
      halves: arrays with all columns of an epilogue that works on halves have the halves apart, (..., 2, N / 2).
      joined: the dimension, N or K, that is several arrays; None if none is. Every array with that dimension is given
        as the same number of pieces.
      pieces: that number.
      apart: whether a device multiplies the pieces of K one after the other, each product added to those before it, and
        does not concatenate them.
    """

    m: int = 1
    n: int = 1
    k: int = 1
    halves: bool = False
    joined: Dimension | None = None
    pieces: int = 1
    apart: bool = False

    @classmethod
    def of(cls, a_rank: int, b_rank: int, k_axes: int, halves: bool, program: Program) -> ArrayAxes:
        """From the numbers of the factors' axes; halves stay apart only for an epilogue that works on halves of N."""
        halves = halves and program.halves.count == 2 and not program.halves.head
        columns = b_rank - k_axes
        return cls(a_rank - k_axes, columns - (halves and program.halves.acc_halves == 2), k_axes, halves)

    def in_pieces(self, joined: Dimension, pieces: int, *, apart: bool) -> ArrayAxes:
        """The same where a dimension is so many arrays."""
        return self._replace(joined=joined, pieces=pieces, apart=apart and joined is Dimension.K)


@dataclasses.dataclass(frozen=True, eq=False)
class Matrices:
    """The matrices and vectors that the arrays of one product make.

    Attributes:
      spec: of the product.
      a, b, operands: pieces of the arguments, without a batch axis.
      acc: pieces of the product itself.
      stores, reductions: pieces of the results.
    """

    spec: GemmSpec
    a: Pieces
    b: Pieces
    operands: Sequence[Pieces]
    acc: Pieces
    stores: Sequence[Pieces]
    reductions: Sequence[Pieces]

    @classmethod
    def of(cls, spec: GemmSpec) -> Matrices:
        program = spec.program
        m, n = MatrixAxis(Dimension.M, spec.axes.m), _columns(spec, program.halves.acc)
        k = MatrixAxis(Dimension.K, spec.axes.k)
        groups = (MatrixAxis(Dimension.GROUP),) * (spec.ragged is Dimension.M)  # each has its own matrix of b
        return cls(
            spec,
            a=_pieces((k, m) if spec.transpose_a else (m, k), spec),
            b=_pieces((*groups, n, k) if spec.transpose_b else (*groups, k, n), spec),
            operands=[_pieces(_operand_axes(spec, operand), spec) for operand in program.operands],
            acc=_pieces((*_groups_of_results(spec), m, n), spec),
            stores=[_store_pieces(spec, store) for store in program.stores],
            reductions=[
                _pieces({Axis.ROW: (m,), Axis.COLUMN: (_columns(spec, one.width),), Axis.ALL: ()}[one.axis], spec)
                for one in program.reductions
            ],
        )

    # --- the arrays one by one ---

    @cached_property
    def arguments(self) -> list[MatrixAxes]:
        """Axes of each argument of the primitive: a's arrays, b's, those of the operands."""
        return [*self.a, *self.b, *itertools.chain(*self.operands)]

    @cached_property
    def results(self) -> list[MatrixAxes]:
        """Axes of each result of the primitive: the stores' arrays, then the reductions'."""
        return [*itertools.chain(*self.stores), *itertools.chain(*self.reductions)]

    @property
    def num_factors(self) -> int:
        """The number of arrays that a and b are: where the operands begin among the arguments."""
        return len(self.a) + len(self.b)

    @cached_property
    def num_stores(self) -> int:
        """The number of arrays that the stores are: where the reductions begin among the results."""
        return sum(map(len, self.stores))

    @cached_property
    def reduction_of_result(self) -> list[Reduction]:
        """The program's reductions, each as often as it has pieces."""
        each = zip(self.spec.program.reductions, self.reductions, strict=True)
        return [reduction for reduction, pieces in each for _ in pieces]

    # --- the axes of arrays as axes of the product ---

    def argument_axes(self, ranks: Sequence[int]) -> list[ProductAxes]:
        """The product's axes in each argument, which has so many axes."""
        each = zip(self.arguments, self.spec.batched, ranks, strict=True)
        return [_aligned(self._product_axes(axes), has_batch, rank) for axes, has_batch, rank in each]

    @cached_property
    def result_axes(self) -> list[ProductAxes]:
        """The product's axes in the stores' arrays and then the reductions'."""
        batch: ProductAxes = (BATCH,) * any(self.spec.batched)
        return [batch + self._product_axes(axes) for axes in self.results]

    @cached_property
    def acc_axes(self) -> list[ProductAxes]:
        """The product's axes in acc's pieces, without a batch."""
        return [self._product_axes(axes) for axes in self.acc]

    def _product_axes(self, axes: MatrixAxes) -> ProductAxes:
        """The product's axis for each axis of an array; None for the axis of two halves."""
        ranks = self.spec.axes
        own = {Dimension.M: ranks.m, Dimension.N: ranks.n, Dimension.K: ranks.k, Dimension.GROUP: 1}
        product_axes: ProductAxes = ()
        for dimension, count, _ in axes:
            if dimension is None:
                product_axes += (None,) * count
            else:
                indices = range(own[dimension])
                product_axes += (None,) * (count - len(indices)) + tuple(ProductAxis(dimension, i) for i in indices)
        return product_axes

    # --- from arrays to matrices ---

    @cached_property
    def spec_of_matrices(self) -> GemmSpec:
        """The spec of this product as one of matrices and vectors."""
        spec = self.spec
        if spec.axes == ArrayAxes():
            return spec
        flags = iter(spec.batched)
        batched = tuple(True in [next(flags) for _ in pieces] for pieces in (self.a, self.b, *self.operands))
        return spec.replace(axes=ArrayAxes(), k_axes=1, halves=False, batched=batched)

    def flatten(self, arguments: Sequence[Any]) -> list[Any]:
        """a, b and the operands as matrices and vectors, after a batch axis where there is one."""
        return _flattened(arguments, self.spec.batched, [self.a, self.b, *self.operands])

    def flatten_pairs(self, arguments: Sequence[Any]) -> list[tuple[Any, Any]]:
        """Each piece of a with its piece of b, as matrices, after a batch axis where there is one."""
        each = zip(arguments, [*self.a, *self.b], self.spec.batched, strict=False)
        flat = [as_matrix(x, axes, has_batch=flag) for x, axes, flag in each]
        return list(zip(flat[: len(self.a)], flat[len(self.a) :], strict=True))

    def flatten_operands(self, operands: Sequence[Any]) -> list[Any]:
        """The operands alone, the arguments after the factors, as matrices and vectors."""
        return _flattened(operands, self.spec.batched[self.num_factors :], self.operands)

    def flatten_some(self, operands: Sequence[Any], is_there: Sequence[bool]) -> list[Any]:
        """Some of the operands, without a batch axis, as matrices and vectors."""
        pieces = list(itertools.compress(self.operands, is_there))
        return _flattened(operands, [False] * len(operands), pieces)

    def flatten_acc(self, accs: Sequence[jax.Array], *, has_batch: bool) -> jax.Array:
        """acc as a matrix."""
        (acc,) = _flattened(accs, [has_batch] * len(accs), [self.acc])
        return acc

    def flat_types(self, types: Sequence[Any]) -> list[Any]:
        """The types of what `flatten` returns, without shardings."""
        plain = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in types]
        if self.spec.axes == ArrayAxes():
            return plain
        return list(jax.eval_shape(lambda *arguments: self.flatten(arguments), *plain))

    # --- from matrices to arrays ---

    def factor_sizes(self, arguments: Sequence[Any]) -> FactorSizes:
        """The sizes of these arguments' axes."""
        sizes: dict[tuple[Dimension | None, int], tuple[tuple[Any, ...], tuple[tuple[str, ...], ...]]] = {}
        for x, axes, flag in zip(arguments, [*self.a, *self.b], self.spec.batched, strict=False):
            first, mesh_axes = int(flag), explicit_cuts(x)
            for dimension, count, piece in axes:
                sizes[dimension, piece] = x.shape[first : first + count], mesh_axes[first : first + count]
                first += count
        (m, m_mesh_axes), (n, n_mesh_axes) = sizes[Dimension.M, 0], sizes[Dimension.N, 0]
        ranks, m_mesh_axes = self.spec.axes, self.spec.row_mesh_axes or m_mesh_axes
        pieces = tuple(sizes[ranks.joined, i][0][0] for i in range(ranks.pieces)) if ranks.joined else ()
        return FactorSizes(m, n[-ranks.n :], m_mesh_axes, n_mesh_axes[-ranks.n :], pieces)

    def acc_sizes(self, accs: Sequence[Any], *, has_batch: bool) -> FactorSizes:
        """The sizes of acc's axes, on one device."""
        m, n = accs[0].shape[has_batch:][: self.spec.axes.m], accs[0].shape[-self.spec.axes.n :]
        return FactorSizes(m, n, ((),) * len(m), ((),) * len(n), tuple(x.shape[-1] for x in accs))

    def unflatten_results(self, results: Sequence[jax.Array], sizes: FactorSizes) -> list[jax.Array]:
        """The arrays of stores and reductions, with axes of these sizes."""
        has_batch = any(self.spec.batched)
        each = zip(results, [*self.stores, *self.reductions], strict=True)
        return [piece for x, pieces in each for piece in as_pieces(x, pieces, sizes, has_batch=has_batch)]

    def split_results(self, results: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        """The arrays of the stores, and those of the reductions."""
        return list(results[: self.num_stores]), list(results[self.num_stores :])

    def concatenated_results(self, results: Sequence[jax.Array]) -> list[jax.Array]:
        """Stores and reductions, each one array with all its axes."""
        rest = iter(results)
        return [concatenated([next(rest) for _ in pieces], pieces) for pieces in (*self.stores, *self.reductions)]

    def flat_reductions(self, reductions: Sequence[jax.Array]) -> list[jax.Array]:
        """Reductions, each one array with all its axes, as vectors."""
        has_batch, each = any(self.spec.batched), zip(reductions, self.reductions, strict=True)
        return [as_matrix(x, pieces[0], has_batch=has_batch) for x, pieces in each]

    # --- f's flat outputs ---

    def unflatten_outputs(self, outputs: Sequence[jax.Array], arguments: Sequence[Any]) -> list[jax.Array]:
        """f's outputs: tiles with the axes of these arguments' M and N, others with those of M."""
        has_batch, sizes = any(self.spec.batched), self.factor_sizes(arguments)
        each = zip(outputs, self._output_axes([x.ndim - has_batch for x in outputs]), strict=True)
        return [as_array(x, axes, sizes, has_batch=has_batch) for x, axes in each]

    def flatten_outputs(self, outputs: Sequence[Any], ranks: Sequence[int]) -> list[Any]:
        """Arrays or None, like a product's outputs without a batch, as f's outputs, which have `ranks` axes."""
        each = zip(outputs, self._output_axes(ranks), strict=True)
        return [None if x is None else as_matrix(x, axes) for x, axes in each]

    def _output_axes(self, ranks: Sequence[int]) -> list[MatrixAxes]:
        """Axes of each of f's flat outputs, which have these numbers of axes where f returns them."""
        program = self.spec.program
        tiles = {store.output: pieces[0] for store, pieces in zip(program.stores, self.stores, strict=True)}
        rows = MatrixAxis(Dimension.M, self.spec.axes.m)
        return [
            tiles.get(i, tuple(rows if axis in row_axes else UNSHARDED for axis in range(rank)))
            for i, (rank, row_axes) in enumerate(zip(ranks, program.row_axes, strict=True))
        ]


def _columns(spec: GemmSpec, width: Width) -> MatrixAxis:
    """The columns of an array of this width."""
    return MatrixAxis(Dimension.N, 2 if spec.axes.halves and spec.program.halves.of(width) == 2 else spec.axes.n)


def _groups_of_results(spec: GemmSpec) -> MatrixAxes:
    """The leading axis of results that each group has for itself."""
    return (MatrixAxis(Dimension.GROUP),) if spec.ragged is Dimension.K else ()


def _operand_axes(spec: GemmSpec, operand: Operand) -> MatrixAxes:
    along = {Along.ROWS: MatrixAxis(Dimension.M, spec.axes.m), Along.COLUMNS: _columns(spec, operand.width)}
    return tuple(UNSHARDED if axis is None else along[axis] for axis in operand.axes)


def _store_pieces(spec: GemmSpec, store: TileStore) -> Pieces:
    m, program = MatrixAxis(Dimension.M, spec.axes.m), spec.program

    def axes(columns: MatrixAxis) -> MatrixAxes:
        return (columns, m) if store.transposed else (m, columns)

    if store.slice is None:
        return _pieces((*_groups_of_results(spec), *axes(_columns(spec, store.width))), spec)
    if spec.axes.joined is Dimension.N and store.slice in program.sections:
        return [axes(MatrixAxis(Dimension.N, 1, program.sections.index(store.slice)))]
    return [axes(UNSHARDED)]


def _pieces(axes: MatrixAxes, spec: GemmSpec) -> Pieces:
    joined = spec.axes.joined
    if joined is None or all(axis.dimension is not joined for axis in axes):
        return [axes]
    return [
        tuple(axis._replace(piece=i) if axis.dimension is joined else axis for axis in axes)
        for i in range(spec.axes.pieces)
    ]


def _aligned(axes: ProductAxes, has_batch: bool, rank: int) -> ProductAxes:
    """`axes` for an array of this rank: further leading axes are never sharded, missing ones are left out."""
    matrix = rank - has_batch
    return (BATCH,) * has_batch + (((None,) * matrix + axes)[-matrix:] if matrix else ())


def _flattened(arrays: Sequence[Any], batched: Sequence[bool], matrices: Sequence[Pieces]) -> list[Any]:
    """The matrices and vectors that these pieces make."""
    rest, flat = iter(zip(arrays, batched, strict=True)), []
    for pieces in matrices:
        each = [next(rest) for _ in pieces]
        flat_pieces = [as_matrix(x, axes, has_batch=flag) for (x, flag), axes in zip(each, pieces, strict=True)]
        flat.append(concatenated(flat_pieces, pieces, [flag for _, flag in each]))
    return flat
