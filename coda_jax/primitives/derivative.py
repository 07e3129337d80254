"""A product that JAX can differentiate: the epilogue's derivative is JAX's own, the products are the primitive's."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from coda_jax.epilogue import ByGroup, Epilogue, NotTileLocalError, Program, trace, types_of
from coda_jax.epilogue.groups import unmarked
from coda_jax.epilogue.values import same_shape
from coda_jax.primitives.axes import (
    UNSHARDED,
    Dimension,
    FactorSizes,
    MatrixAxes,
    MatrixAxis,
    Pieces,
    as_array,
    as_matrix,
    as_pieces,
    concatenated,
    flat_rows,
)
from coda_jax.primitives.dtypes import compute_dtype, kept_dtype
from coda_jax.primitives.gemm_primitive import accumulate, bind
from coda_jax.primitives.layout import laid_out
from coda_jax.primitives.matrices import ArrayAxes
from coda_jax.primitives.mesh_types import (
    axes_of_dimension,
    explicit_sharding,
    merged_sharding,
    vary,
    varying_axes,
    without_axes,
)
from coda_jax.primitives.pullback import Pullback
from coda_jax.primitives.reverse_mode import Backward, OfBatch, differentiable
from coda_jax.primitives.spec import CallOptions, GemmSpec

PREACTIVATION_NAME = "coda_preactivation"


@dataclasses.dataclass(frozen=True)
class Options(CallOptions):
    """The options of a product; `residuals` as in `coda.gemm`."""

    residuals: str = "preactivation"


Parts = jax.Array | Sequence[jax.Array]  # an array, or the pieces of one, concatenated along one dimension


def product(
    a: Parts,
    b: Parts,
    operands: Sequence[Parts],
    epilogue: Callable[..., Any] | None,
    out_dtypes: Callable[[Epilogue], Sequence[np.dtype]],
    options: Options,
    group_sizes: jax.Array | None = None,
) -> tuple[list[jax.Array], Epilogue]:
    """epilogue(a @ b, *operands), flat, and the traced epilogue, which sees matrices and vectors.

    The shapes that are allowed; M, N and K may each be several axes, K `options.k_axes`:

      a (*M, *K), or (*K, *M) with transpose_a     | b (*K, *N), or (*N, *K) with transpose_b
      a as above                                   | b (*K, 2, *N) with `options.halves`: all arrays with as many
                                                   |   columns have the axis of 2 too
      a as above                                   | b several arrays (K, N_i): pieces of N
      a several arrays (M, K_i): pieces of K       | b as many (K_i, N)

    Args:
      a, b: the factors.
      operands: as the epilogue language has them; those with rows have either all axes of M or one; tiles may be as
        many arrays as N is. `laid_out` says how all of them are sharded over explicit mesh axes. `ByGroup(x)`: of each
        row that of its group.
      out_dtypes: gives the dtype of each flat output of a traced epilogue.
      group_sizes: (G,) int32, beside operands by group: how many rows, in their order, each group has.

    Returns:
      Tiles with all axes of M and N, results of rows with those of M; columns' are (N,).
    """
    arrays = [_parts(unmarked(x)) for x in (a, b, *operands)]
    by_group = [i for i, x in enumerate(operands) if isinstance(x, ByGroup)]
    if group_sizes is not None:
        group_sizes = without_axes(group_sizes, 0, axes_of_dimension(group_sizes, 0))
    of_n = len(arrays[0]) == 1
    columns = [-1 if options.transpose_b != of_n else 0, *[-1] * len(operands)]  # where b and operands are concatenated
    along = (0 if options.transpose_a else -1, *columns)
    arrays, options = laid_out(arrays, along, options, by_group)
    varying = varying_axes(*itertools.chain(*arrays))
    rows = _rows(arrays[0][0], options)

    def matrices(*arrays: Sequence[jax.Array]) -> list[jax.Array]:
        a, b, *operands = (
            pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis)
            for pieces, axis in zip(arrays, along, strict=True)
        )
        return [_flat_product(a, b, options), *(flat_rows(x, rows) for x in operands)]

    while True:
        leaves, tree = jax.tree.flatten(arrays)
        arrays = jax.tree.unflatten(tree, vary(varying, *leaves))
        acc, *types = types_of(matrices, *arrays)
        marked = [ByGroup(x) if i in by_group else x for i, x in enumerate(types)]
        traced, captured = trace(epilogue, acc, marked, group_sizes)
        if varying_axes(*captured) <= varying:
            break
        varying |= varying_axes(*captured)
    if of_n and _are_halves(arrays[1], traced.program):
        of_b = jnp.stack(arrays[1], 0 if options.transpose_b else options.k_axes)
        options = dataclasses.replace(options, halves=True)
        outputs, traced = product(a, of_b, operands, epilogue, out_dtypes, options, group_sizes)
        return [_with_joined_halves(x, len(rows)) for x in outputs], traced
    arrays += [[jnp.asarray(x)] for x in captured]  # JAX captures a Python number as it is
    types += [jax.typeof(x) for (x,) in arrays[len(arrays) - len(captured) :]]
    _check_halves(traced, arrays[1][0], options)
    axes = ArrayAxes.of(arrays[0][0].ndim, arrays[1][0].ndim, options.k_axes, options.halves, traced.program)
    if len(arrays[1]) > 1:
        axes = axes._replace(joined=Dimension.N if of_n else Dimension.K, pieces=len(arrays[1]))
    spec = GemmSpec.of(
        dataclasses.replace(options, out_sharding=_flat_sharding(arrays[0][0], arrays[1][0], options)),
        traced.program,
        out_dtypes(traced),
        "gemm" if epilogue is None else traced.name,
        axes,
    )
    spec = spec.replace(batched=(False,) * len(spec.matrices.arguments))
    return _differentiable(traced, acc, tuple(types), spec, options)(*_arguments(arrays, rows, spec)), traced


def _parts(x: Parts) -> list[jax.Array]:
    return list(x) if isinstance(x, tuple | list) else [x]  # type: ignore[list-item]


def _are_halves(arrays: Sequence[jax.Array], program: Program) -> bool:
    """True if two arrays are the halves of N that the epilogue works on."""
    same = len(arrays) == 2 and same_shape(arrays[0].shape, arrays[1].shape)
    return same and program.halves.of_n == 2


def _with_joined_halves(x: jax.Array, row_axes: int) -> jax.Array:
    return x.reshape(*x.shape[:row_axes], -1) if x.ndim == row_axes + 2 else x


def _rows(a: jax.Array, options: Options) -> tuple[Any, ...]:
    return a.shape[options.k_axes :] if options.transpose_a else a.shape[: a.ndim - options.k_axes]


def _arguments(arrays: Sequence[Sequence[jax.Array]], rows: Sequence[Any], spec: GemmSpec) -> list[jax.Array]:
    """The primitive's arguments, with the axes that go with the factors'."""
    arguments = [x for pieces in arrays[:2] for x in pieces]
    sizes = spec.matrices.factor_sizes(arguments)
    for operand, pieces in zip(arrays[2:], spec.matrices.operands, strict=True):
        # Beside one row a tile is a row vector, and has no rows of its own.
        has_rows = any(axis.dimension is Dimension.M for axis in pieces[0])
        matrices = operand if has_rows else [flat_rows(x, rows) for x in operand]
        if len(matrices) == len(pieces):
            arguments += [as_array(x, axes, sizes) for x, axes in zip(matrices, pieces, strict=True)]
        else:  # one array beside several, or several beside one
            along_columns: list[MatrixAxes] = [(UNSHARDED,), (MatrixAxis(Dimension.N, 1, 1),)]
            arguments += as_pieces(concatenated(matrices, along_columns), pieces, sizes)
    return arguments


def _check_halves(epilogue: Epilogue, b: jax.Array, options: Options) -> None:
    """Raises where columns are several axes, and the epilogue works on halves of them that none of these is."""
    columns = b.shape[: b.ndim - options.k_axes] if options.transpose_b else b.shape[options.k_axes :]
    halves = epilogue.program.halves
    if halves.count == 1 or len(columns) == 1 or (options.halves and halves.of_n == 2):
        return
    raise ValueError(
        f"gemm: b has columns {columns}, and epilogue '{epilogue.name}' works on "
        f"{f'heads of {halves.head} columns' if halves.head else 'halves'}; they must be one axis, or for halves of "
        "the product (2, N / 2)"
    )


def _flat_product(a: jax.Array, b: jax.Array, options: Options) -> jax.Array:
    """acc (M, N)."""
    (m, n), k = _product_axes(a, b, options), MatrixAxis(Dimension.K, options.k_axes)
    return accumulate(
        as_matrix(a, (k, m) if options.transpose_a else (m, k)),
        as_matrix(b, (n, k) if options.transpose_b else (k, n)),
        transpose_a=options.transpose_a,
        transpose_b=options.transpose_b,
        out_sharding=_flat_sharding(a, b, options),
    )


def _product_axes(a: jax.Array, b: jax.Array, options: Options) -> MatrixAxes:
    """The axes of a @ b."""
    return MatrixAxis(Dimension.M, a.ndim - options.k_axes), MatrixAxis(Dimension.N, b.ndim - options.k_axes)


def _flat_sharding(a: jax.Array, b: jax.Array, options: Options) -> Any:
    counts = (a.ndim - options.k_axes, b.ndim - options.k_axes)
    return None if options.out_sharding is None else merged_sharding(options.out_sharding, counts)


def _differentiable(
    epilogue: Epilogue, acc: Any, types: Sequence[Any], spec: GemmSpec, options: Options
) -> Callable[..., Any]:
    """The differentiable function of (a, b, *operands, *captured); it closes over no array.

    Args:
      acc, types: types of the product and of what follows b, as the epilogue sees them.
    """

    @functools.cache
    def pullback(absent: frozenset[int] = frozenset()) -> Pullback:
        return Pullback.of(epilogue, acc, types, absent)

    matrices = spec.matrices

    def forward(*arguments: jax.Array) -> tuple[list[jax.Array], Any]:
        kept = None
        if pullback().needs_acc and options.residuals == "preactivation":
            dtype = kept_dtype(compute_dtype(arguments[0], arguments[len(matrices.a)]))
            index = next((i for i in epilogue.program.acc_outputs() if spec.out_dtypes[i] == dtype), None)
            if index is None:
                with_acc = epilogue.with_acc()
                extended = spec.replace(program=with_acc.program, out_dtypes=(*spec.out_dtypes, dtype))
                *outputs, kept = _differentiable(with_acc, acc, types, extended, options)(*arguments)
            else:
                outputs = run(*arguments)
                kept = outputs[index]
            kept = checkpoint_name(kept, PREACTIVATION_NAME)
        else:
            outputs = run(*arguments)
        factors, operands = arguments[: matrices.num_factors], arguments[matrices.num_factors :]
        needs = [needed for needed, pieces in zip(pullback().needs, matrices.operands, strict=True) for _ in pieces]
        return outputs, (factors, kept, list(itertools.compress(operands, needs)))

    run = differentiable(
        f"gemm '{spec.name}'",
        functools.partial(bind, spec=spec),
        forward,
        _ProductBackward(epilogue, spec, options, pullback),
    )
    return run


@dataclasses.dataclass(frozen=True)
class _ProductBackward(Backward):
    """The derivative of a product: from its factors, the kept acc and the arguments that `pullback()` reads.

    Attributes:
      epilogue, spec, options: of the product.
      pullback: gives the epilogue's derivative, without the outputs of these numbers.
    """

    epilogue: Epilogue
    spec: GemmSpec
    options: Options
    pullback: Callable[..., Pullback]

    def __call__(self, kept: Any, cotangents: Any) -> tuple[jax.Array | None, ...]:
        dacc, darguments = self._of_epilogue(kept, cotangents)
        return (*self._of_factors(kept[0], dacc), *darguments)

    def of_batch(self, size: Any, kept: Any, cotangents: Any, batched: tuple[Any, Any]) -> OfBatch | None:
        """A batch of a with one b: da is a product of all rows, db one that sums over them."""
        matrices = self.spec.matrices
        of_a, *of_b = batched[0][0]
        if self.options.transpose_a or len(matrices.a) > 1 or not of_a or any(of_b):
            return None
        axes = jax.tree.map(lambda has_batch: 0 if has_batch else None, batched)
        of_epilogue = jax.vmap(self._of_epilogue, in_axes=axes, axis_size=size)

        def backward(kept: Any, cotangents: Any) -> tuple[jax.Array | None, ...]:
            dacc, darguments = of_epilogue(kept, cotangents)
            return (*self._of_factors(kept[0], dacc), *darguments)

        num_operands = len(matrices.arguments) - matrices.num_factors
        return OfBatch(backward, kept, cotangents, [True, *[False] * len(of_b), *[True] * num_operands])

    def _of_epilogue(self, kept: Any, cotangents: Sequence[Any]) -> tuple[jax.Array, list[jax.Array | None]]:
        """The cotangents of acc, with all its axes, and of the operands' arrays."""
        (factors, kept_acc, needed), options, matrices = kept, self.options, self.spec.matrices
        a, b = self._concatenated(factors)
        pullback = self.pullback(frozenset(i for i, x in enumerate(cotangents) if x is None))
        arguments = pullback.needed(self.pullback(), matrices.flatten_some(needed, self.pullback().needs))
        cotangents = matrices.flatten_outputs(cotangents, [len(x.shape) for x in self.epilogue.out_avals])
        product_axes, sizes = _product_axes(a, b, options), matrices.factor_sizes(factors)
        if pullback.needs_acc and kept_acc is None:
            dacc, darguments = _recomputed(pullback, a, b, arguments, cotangents, options)
        else:
            acc = None if kept_acc is None else as_matrix(kept_acc, product_axes)
            dacc, darguments = pullback(acc, arguments, cotangents)
        dacc = as_array(dacc.astype(compute_dtype(a, b)), product_axes, sizes)
        each = zip(darguments, matrices.operands, strict=True)
        return dacc, [piece for x, pieces in each for piece in _as_pieces(x, pieces, sizes)]

    def _of_factors(self, factors: Sequence[jax.Array], dacc: jax.Array) -> list[jax.Array]:
        """The cotangents of the factors' arrays."""
        matrices, cotangents = self.spec.matrices, _factors(*self._concatenated(factors), dacc, self.options)
        sizes, each = matrices.factor_sizes(factors), zip(cotangents, (matrices.a, matrices.b), strict=True)
        return [piece for x, pieces in each for piece in _as_pieces(x, pieces, sizes)]

    def _concatenated(self, factors: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
        a, b = self.spec.matrices.a, self.spec.matrices.b
        return concatenated(factors[: len(a)], a), concatenated(factors[len(a) :], b)


def _as_pieces(x: jax.Array | None, pieces: Pieces, sizes: FactorSizes) -> list[Any]:
    return [None] * len(pieces) if x is None else list(as_pieces(x, pieces, sizes))


def _factors(a: jax.Array, b: jax.Array, dacc: jax.Array, options: Options) -> tuple[jax.Array, jax.Array]:
    """Cotangents of a and b, each one product in its argument's layout, written in its dtype straight from float32."""
    rows, columns = a.ndim - options.k_axes, b.ndim - options.k_axes
    of_a = functools.partial(_plain, dtype=a.dtype, options=options, like=a, k_axes=columns)
    of_b = functools.partial(_plain, dtype=b.dtype, options=options, like=b, k_axes=rows)
    if options.transpose_a:  # (K, M) = b @ dacc.T
        da = of_a(b, dacc, transpose_a=options.transpose_b, transpose_b=True)
    else:  # (M, K) = dacc @ b.T
        da = of_a(dacc, b, transpose_b=not options.transpose_b)
    if options.transpose_b:  # (N, K) = dacc.T @ a
        db = of_b(dacc, a, transpose_a=True, transpose_b=options.transpose_a)
    else:  # (K, N) = a.T @ dacc
        db = of_b(a, dacc, transpose_a=not options.transpose_a)
    return da, db


def _plain(
    a: jax.Array,
    b: jax.Array,
    dtype: np.dtype,
    options: Options,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    k_axes: int = 1,
    like: jax.Array | None = None,
) -> jax.Array:
    """A bare product; it is sharded as `like` where mesh axes are explicit."""
    plain = Options(
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        implementation=options.implementation,
        k_axes=k_axes,
        out_sharding=options.out_sharding if like is None else explicit_sharding(like),
    )
    (out,), _ = product(a, b, (), None, lambda _: (dtype,), plain)
    return out


def _recomputed(
    pullback: Pullback,
    a: jax.Array,
    b: jax.Array,
    arguments: Sequence[jax.Array],
    cotangents: Sequence[jax.Array],
    options: Options,
) -> tuple[jax.Array, list[jax.Array | None]]:
    """The pullback at the product computed again: in its epilogue if tile-local, else from the rounded product."""
    again = dataclasses.replace(options, config=None, input_output_aliases=())
    dtype = compute_dtype(a, b)

    def at_rounded_product() -> tuple[jax.Array, list[jax.Array | None]]:
        flags, k_axes = (options.transpose_a, options.transpose_b), options.k_axes
        acc = _plain(a, b, kept_dtype(dtype), options, transpose_a=flags[0], transpose_b=flags[1], k_axes=k_axes)
        return pullback(as_matrix(acc, _product_axes(a, b, options)), arguments, cotangents)

    if not pullback.is_uniform:
        return at_rounded_product()
    try:
        outputs, _ = product(
            a,
            b,
            [*arguments, *pullback.as_operands(cotangents)],
            pullback.as_epilogue(),
            lambda epilogue: pullback.out_dtypes(epilogue, dtype),
            again,
        )
    except NotTileLocalError:  # the derivative of a maximum or a log-sum-exp needs the finished one
        return at_rounded_product()
    return outputs[0], pullback.restored(outputs[1:])  # in the shapes of arrays or of matrices
