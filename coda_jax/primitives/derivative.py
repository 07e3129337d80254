"""A product that JAX can differentiate: the epilogue's derivative is JAX's own, the products are the primitive's."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding

from coda_jax.epilogue import ByGroup, Epilogue, NotTileLocalError, trace, types_of
from coda_jax.epilogue.dtypes import is_of_8_bits
from coda_jax.epilogue.group_reductions import GroupReductions, group_reductions, reduces_rows
from coda_jax.epilogue.groups import GroupOffsets, unmarked
from coda_jax.primitives.axes import (
    Dimension,
    FactorSizes,
    Pieces,
    as_array,
    as_matrix,
    as_pieces,
    concatenated,
    flat_rows,
)
from coda_jax.primitives.dtypes import check_gradient, compute_dtype, kept_dtype
from coda_jax.primitives.gemm_primitive import bind, bind_beside
from coda_jax.primitives.layout import laid_out
from coda_jax.primitives.matrices import ArrayAxes
from coda_jax.primitives.mesh_types import explicit_sharding, mesh_axes_of, partition_spec, vary, varying_axes
from coda_jax.primitives.product_arrays import (
    Parts,
    are_halves,
    as_parts,
    check_halves,
    check_order_of_rows,
    concatenated_axes,
    flat_product,
    flat_sharding,
    num_group_axes,
    num_product_axes,
    primitive_arguments,
    product_axes,
    row_mesh_axes,
    row_sizes,
    with_joined_halves,
    with_whole_groups,
)
from coda_jax.primitives.pullback import Pullback
from coda_jax.primitives.ragged import RowsInGroups, offsets_of_rows
from coda_jax.primitives.reverse_mode import Backward, OfBatch, Rule
from coda_jax.primitives.spec import CallOptions, GemmSpec
from coda_jax.primitives.split_prelude import BehindPrelude

PREACTIVATION_NAME = "coda_preactivation"


@dataclasses.dataclass(frozen=True)
class Options(CallOptions):
    """The options of a product; `residuals` as in `coda.gemm`, `apart` as in `ArrayAxes`."""

    residuals: str = "preactivation"
    apart: bool = False


def product(
    a: Parts,
    b: Parts,
    operands: Sequence[Parts | ByGroup],
    epilogue: Callable[..., Any] | None,
    out_dtypes: Callable[[Epilogue], Sequence[np.dtype]],
    options: Options,
    group_sizes: jax.Array | GroupOffsets | None = None,
    *,
    sums_groups: bool = True,
    has_derivative: bool = True,
) -> tuple[list[jax.Array], Epilogue]:
    """epilogue(a @ b, *operands), flat, and the traced epilogue, which sees matrices and vectors.

    The shapes that are allowed; M, N and K may each be several axes, K `options.k_axes`:

      a (*M, *K), or (*K, *M) with transpose_a     | b (*K, *N), or (*N, *K) with transpose_b
      a as above                                   | b (*K, 2, *N) with `options.halves`: all arrays with as many
                                                   |   columns have the axis of 2 too
      a as above                                   | b several arrays (K, N_i): pieces of N
      a several arrays (M, K_i): pieces of K       | b as many (K_i, N)

    With `options.ragged` M each of these b has an axis of groups in front, and the rows of each group are multiplied by
    its matrix. With K, and transpose_a, a (*K, *M) and b (*K, *N) are as above, and the result is the product of each
    group of K, (G, *M, *N); it has no epilogue. Rows in no group are zeros in all results and gradients.

    Args:
      a, b: the factors.
      operands: as the epilogue language has them; those with rows have either all axes of M or one; tiles may be as
        many arrays as N is. `laid_out` says how all of them are sharded over explicit mesh axes. `ByGroup(x)`: of each
        row that of its group.
      out_dtypes: gives the dtype of each flat output of a traced epilogue.
      group_sizes: (G,) int32, with `options.ragged` or beside operands by group: how many rows, in their order, each
        group has. Or `GroupOffsets`, as `group_offsets` makes them of the sizes.
      sums_groups: whether reductions over rows, beside ragged M, are of each group; else the results are what they
        reduce, for each row.
      has_derivative: False where nobody differentiates the product itself, as in a function with a rule of its own.

    Returns:
      Tiles with all axes of M and N, results of rows with those of M; columns' are (N,).
    """
    call, restorations = _Call(a, b, operands, epilogue, out_dtypes, options, group_sizes, sums_groups), []
    while isinstance(traced := _traced(call), _Rewritten):
        call = traced.call
        restorations.append(traced.restored)
    spec, arrays = traced.spec, primitive_arguments(traced.arrays, traced.rows, traced.spec)
    found = traced.epilogue
    if has_derivative:
        rule = _rule(found, traced.acc, traced.types, spec, traced.options)
        outputs = rule.function(arrays)(rule.zero(arrays), *arrays)
    else:
        outputs = bind(*arrays, spec=spec)
    for restored in reversed(restorations):
        outputs, found = restored(outputs, found)
    return outputs, found


Results = tuple[list[jax.Array], Epilogue]


class _Call(NamedTuple):
    """The arguments of `product`; `varying` are mesh axes over which all arrays vary that the product reads."""

    a: Parts
    b: Parts
    operands: Sequence[Parts | ByGroup]
    epilogue: Callable[..., Any] | None
    out_dtypes: Callable[[Epilogue], Sequence[np.dtype]]
    options: Options
    group_sizes: jax.Array | GroupOffsets | None
    sums_groups: bool = True
    varying: frozenset[str] = frozenset()


class _Rewritten(NamedTuple):
    """A call in the place of another, and the other's results from its results."""

    call: _Call
    restored: Callable[[list[jax.Array], Epilogue], Results]


class _Traced(NamedTuple):
    """A call that is one product of the primitive.

    Attributes:
      epilogue: traced.
      arrays: of each argument, with those that the epilogue closes over; each may be several.
      rows: the sizes of the axes of M.
      acc, types: the types of the product and of what follows b, as the epilogue sees them.
      spec: of the product.
      options: with the sharding that the arrays decide.
    """

    epilogue: Epilogue
    arrays: list[list[jax.Array]]
    rows: tuple[Any, ...]
    acc: Any
    types: tuple[Any, ...]
    spec: GemmSpec
    options: Options


def _traced(call: _Call) -> _Traced | _Rewritten:
    """The call with its epilogue traced; another where that shows that the product has to be called otherwise."""
    a, b, operands, epilogue, out_dtypes, options, group_sizes, sums_groups, varying = call
    arrays = [as_parts(unmarked(x)) for x in (a, b, *operands)]
    by_group = [i for i, x in enumerate(operands) if isinstance(x, ByGroup)]
    offsets = offsets_of_rows(group_sizes, arrays, options, has_operands=bool(by_group))
    is_one_factor, along = len(arrays[0]) == 1, concatenated_axes(arrays, options)
    if options.ragged is not None:
        arrays = with_whole_groups(arrays, options)
    arrays, options = laid_out(arrays, along, options, by_group)
    varying |= varying_axes(*itertools.chain(*arrays))
    rows = row_sizes(arrays[0][0], options)

    def matrices(*arrays: Sequence[jax.Array]) -> list[jax.Array]:
        a, b, *operands = (
            pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis)
            for pieces, axis in zip(arrays, along, strict=True)
        )
        return [flat_product(a, b, options), *(flat_rows(x, rows) for x in operands)]

    leaves, tree = jax.tree.flatten(arrays)
    arrays = jax.tree.unflatten(tree, vary(varying, *leaves))
    acc, *types = types_of(matrices, *arrays, key=("matrices", options, along, rows))
    marked = [ByGroup(x) if i in by_group else x for i, x in enumerate(types)]
    traced, captured = trace(epilogue, acc, marked, offsets)
    if options.symmetric:
        traced = traced.symmetric()
    if not varying_axes(*captured) <= varying:
        return _Rewritten(call._replace(varying=varying | varying_axes(*captured)), lambda *results: results)
    check_order_of_rows(traced, options)
    if behind := BehindPrelude.of(traced, arrays[2:], captured, operands, options):
        rewritten = _Call(a, b, behind.operands, behind.epilogue, behind.dtypes(out_dtypes), options, None)
        return _Rewritten(rewritten, lambda outputs, inner: (outputs, behind.as_given(inner)))
    if offsets is not None and options.ragged is Dimension.M and reduces_rows(traced.program):
        groups = GroupReductions.of(epilogue, traced, captured)
        dtypes = functools.partial(groups.dtypes, out_dtypes(traced))
        rewritten = _Call(a, b, operands, groups.row_epilogue, dtypes, options, GroupOffsets(offsets))
        reduced = functools.partial(groups.reduced, offsets=offsets) if sums_groups else lambda outputs: outputs
        return _Rewritten(rewritten, lambda outputs, _: (reduced(outputs), traced))
    if is_one_factor and are_halves(arrays[1], traced.program):
        stacked = jnp.stack(arrays[1], num_group_axes(options) + (0 if options.transpose_b else options.k_axes))
        rewritten = _Call(
            a, stacked, operands, epilogue, out_dtypes, dataclasses.replace(options, halves=True), group_sizes
        )
        return _Rewritten(
            rewritten, lambda outputs, inner: (with_joined_halves(outputs, len(rows), inner.program), inner)
        )
    arrays += [[jnp.asarray(x)] for x in captured]  # JAX captures a Python number as it is
    types += [jax.typeof(x) for (x,) in arrays[len(arrays) - len(captured) :]]
    check_halves(traced, arrays[1][0], options)
    b_rank = arrays[1][0].ndim - num_group_axes(options)
    axes = ArrayAxes.of(arrays[0][0].ndim, b_rank, options.k_axes, options.halves, traced.program)
    if len(arrays[1]) > 1:
        axes = axes.in_pieces(Dimension.N if is_one_factor else Dimension.K, len(arrays[1]), apart=options.apart)
    spec = GemmSpec.of(
        dataclasses.replace(options, out_sharding=flat_sharding(arrays[0][0], arrays[1][0], options)),
        traced.program,
        out_dtypes(traced),
        options.function if epilogue is None else traced.name,
        axes,
    )
    flags = (False,) * len(spec.matrices.arguments)
    spec = spec.replace(batched=flags, row_mesh_axes=row_mesh_axes(rows, options))
    return _Traced(traced, arrays, rows, acc, tuple(types), spec, options)


def _rule(epilogue: Epilogue, acc: Any, types: Sequence[Any], spec: GemmSpec, options: Options) -> Rule:
    """The primitive and its derivative, of arguments (a, b, *operands, *captured); it closes over no array."""

    @functools.cache
    def pullback(absent: frozenset[int] = frozenset()) -> Pullback:
        return Pullback.of(epilogue, acc, types, absent)

    matrices = spec.matrices

    def forward(*arguments: jax.Array) -> tuple[list[jax.Array], Any]:
        kept, again, index = None, rule, None
        if pullback().needs_acc and options.residuals == "preactivation":
            dtype = kept_dtype(compute_dtype(arguments[0], arguments[len(matrices.a)]))
            index = next((i for i in epilogue.program.acc_outputs() if spec.out_dtypes[i] == dtype), None)
            if index is None:
                with_acc, index = epilogue.with_acc(), len(spec.out_dtypes)
                extended = spec.replace(program=with_acc.program, out_dtypes=(*spec.out_dtypes, dtype))
                again = _rule(with_acc, acc, types, extended, options)
        outputs = again.function(arguments)(again.zero(arguments), *arguments)
        if index is not None:
            kept, outputs = checkpoint_name(outputs[index], PREACTIVATION_NAME), outputs[: len(spec.out_dtypes)]
        factors, operands = arguments[: matrices.num_factors], arguments[matrices.num_factors :]
        needs = [needed for needed, pieces in zip(pullback().needs, matrices.operands, strict=True) for _ in pieces]
        offsets = None if spec.ragged is None else operands[-1]
        return outputs, (factors, kept, list(itertools.compress(operands, needs)), offsets)

    rule = Rule(
        f"{spec.function} '{spec.name}'",
        functools.partial(bind_beside, spec=spec),
        forward,
        _ProductBackward(epilogue, spec, options, pullback),
    )
    return rule


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

    def check(self, arguments: Sequence[Any], is_differentiated: Sequence[bool]) -> None:
        num_a, factors = len(self.spec.matrices.a), self.spec.matrices.num_factors
        for i, (x, differentiated) in enumerate(zip(arguments[:factors], is_differentiated, strict=False)):
            if differentiated:
                check_gradient(f"{self.spec.function} '{self.spec.name}'", "a" if i < num_a else "b", x)

    def __call__(self, kept: Any, cotangents: Any) -> tuple[jax.Array | None, ...]:
        dacc, darguments = self._epilogue_cotangents(kept, cotangents)
        return (*self._factor_cotangents(kept, dacc), *darguments)

    def of_batch(self, size: Any, kept: Any, cotangents: Any, batched: tuple[Any, Any]) -> OfBatch | None:
        """A batch of a with one b: da is a product of all rows, db one that sums over them."""
        matrices = self.spec.matrices
        a_batched, *b_batched = batched[0][0]
        if self.options.transpose_a or self.options.ragged or len(matrices.a) > 1 or not a_batched or any(b_batched):
            return None
        axes = jax.tree.map(lambda has_batch: 0 if has_batch else None, batched)
        batched_epilogue = jax.vmap(self._epilogue_cotangents, in_axes=axes, axis_size=size)

        def backward(kept: Any, cotangents: Any) -> tuple[jax.Array | None, ...]:
            dacc, darguments = batched_epilogue(kept, cotangents)
            return (*self._factor_cotangents(kept, dacc), *darguments)

        num_operands = len(matrices.arguments) - matrices.num_factors
        return OfBatch(backward, kept, cotangents, [True, *[False] * len(b_batched), *[True] * num_operands])

    def _epilogue_cotangents(self, kept: Any, cotangents: Sequence[Any]) -> tuple[jax.Array, list[jax.Array | None]]:
        """The cotangents of acc, with all its axes, and of the operands' arrays."""
        (factors, kept_acc, needed, offsets), options, matrices = kept, self.options, self.spec.matrices
        a, b = self._concatenated(factors)
        if options.ragged is Dimension.K:  # without an epilogue
            return cotangents[0].astype(compute_dtype(a, b)), [None]
        pullback = self.pullback(frozenset(i for i, x in enumerate(cotangents) if x is None))
        arguments = pullback.needed(self.pullback(), matrices.flatten_some(needed, self.pullback().needs))
        cotangents = matrices.flatten_outputs(cotangents, [len(x.shape) for x in self.epilogue.out_avals])
        axes, sizes = product_axes(a, b, options), matrices.factor_sizes(factors)

        def at(acc: jax.Array | None) -> tuple[jax.Array, list[jax.Array | None]]:
            if offsets is None:
                return pullback(acc, arguments, cotangents)
            rows = RowsInGroups(offsets, math.prod(sizes.m))
            return rows.pulled_back(pullback, self.epilogue.program, acc, arguments, cotangents)

        if pullback.needs_acc and kept_acc is None:
            dacc, darguments = _recomputed(pullback, at, a, b, arguments, cotangents, options, offsets)
        else:
            dacc, darguments = at(None if kept_acc is None else as_matrix(kept_acc, axes))
        dacc = as_array(dacc.astype(compute_dtype(a, b)), axes, sizes)
        each = zip(darguments, matrices.operands, strict=True)
        return dacc, [piece for x, pieces in each for piece in _as_pieces(x, pieces, sizes)]

    def _factor_cotangents(self, kept: Any, dacc: jax.Array) -> list[jax.Array | None]:
        """The cotangents of the factors' arrays; of those of 8 bits, which have none, None."""
        factors, *_, offsets = kept
        if is_of_8_bits(factors[0].dtype):
            return [None] * len(factors)
        matrices, cotangents = self.spec.matrices, _factors(*self._concatenated(factors), dacc, self.options, offsets)
        sizes, each = matrices.factor_sizes(factors), zip(cotangents, (matrices.a, matrices.b), strict=True)
        return [piece for x, pieces in each for piece in _as_pieces(x, pieces, sizes)]

    def _concatenated(self, factors: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
        a, b = self.spec.matrices.a, self.spec.matrices.b
        return concatenated(factors[: len(a)], a), concatenated(factors[len(a) :], b)


def _as_pieces(x: jax.Array | None, pieces: Pieces, sizes: FactorSizes) -> list[Any]:
    return [None] * len(pieces) if x is None else list(as_pieces(x, pieces, sizes))


def _factors(
    a: jax.Array, b: jax.Array, dacc: jax.Array, options: Options, offsets: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Cotangents of a and b, each one product in its argument's layout, written in its dtype straight from float32."""
    rows, columns = num_product_axes(a, b, options)
    plain = functools.partial(_plain, options=options, offsets=offsets)
    ragged_m, ragged_k = Dimension.M if options.ragged else None, Dimension.K if options.ragged else None
    if options.ragged is Dimension.K:  # dacc is (G, M, N), and a and b have a group's rows each
        da = plain(b, dacc, dtype=a.dtype, like=a, k_axes=columns, transpose_b=True, ragged=ragged_m)
        return da, plain(a, dacc, dtype=b.dtype, like=b, k_axes=rows, ragged=ragged_m)
    multiply_to_a = functools.partial(plain, dtype=a.dtype, like=a, k_axes=columns, ragged=ragged_m)
    multiply_to_b = functools.partial(plain, dtype=b.dtype, like=b, k_axes=rows, ragged=ragged_k)
    if options.transpose_a:  # (K, M) = b @ dacc.T
        da = multiply_to_a(b, dacc, transpose_a=options.transpose_b, transpose_b=True)
    else:  # (M, K) = dacc @ b.T
        da = multiply_to_a(dacc, b, transpose_b=not options.transpose_b)
    if options.transpose_b:  # (N, K) = dacc.T @ a
        db = multiply_to_b(dacc, a, transpose_a=True, transpose_b=options.transpose_a)
    else:  # (K, N) = a.T @ dacc
        db = multiply_to_b(a, dacc, transpose_a=not options.transpose_a)
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
    ragged: Dimension | None = None,
    offsets: jax.Array | None = None,
) -> jax.Array:
    """A bare product; it is sharded as `like` where mesh axes are explicit, but for rows and groups of a ragged one."""
    sharding = options.out_sharding if like is None else explicit_sharding(like)
    if ragged is not None and like is not None and sharding is not None:
        cuts = mesh_axes_of(sharding.spec, like.ndim)
        kept = cuts[1:] if ragged is Dimension.K else ((),) * (a.ndim - k_axes) + cuts[a.ndim - k_axes :]
        sharding = NamedSharding(sharding.mesh, partition_spec(kept))
    plain = Options(
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        implementation=options.implementation,
        k_axes=k_axes,
        ragged=ragged,
        out_sharding=sharding,
    )
    groups = None if ragged is None or offsets is None else GroupOffsets(offsets)
    (out,), _ = product(a, b, (), None, lambda _: (dtype,), plain, groups)
    return out


def _recomputed(
    pullback: Pullback,
    at: Callable[[jax.Array], tuple[jax.Array, list[jax.Array | None]]],
    a: jax.Array,
    b: jax.Array,
    arguments: Sequence[jax.Array],
    cotangents: Sequence[jax.Array],
    options: Options,
    offsets: jax.Array | None,
) -> tuple[jax.Array, list[jax.Array | None]]:
    """The pullback at the product computed again: in its epilogue if tile-local, else from the rounded product.

    Args:
      at: the pullback as a function of acc.
    """
    again = dataclasses.replace(options, config=None, input_output_aliases=(), symmetric=False)
    dtype = compute_dtype(a, b)

    def at_rounded_product() -> tuple[jax.Array, list[jax.Array | None]]:
        given = {name: getattr(options, name) for name in ("transpose_a", "transpose_b", "k_axes", "ragged")}
        acc = _plain(a, b, kept_dtype(dtype), options, offsets=offsets, **given)
        return at(as_matrix(acc, product_axes(a, b, options)))

    reads_groups = options.ragged is not None and pullback.needs[-1]
    if not pullback.is_uniform or reads_groups:
        return at_rounded_product()
    try:
        outputs, traced = product(
            a,
            b,
            [*arguments, *pullback.as_operands(cotangents)],
            pullback.as_epilogue(),
            lambda epilogue: pullback.out_dtypes(epilogue, dtype),
            again,
            None if offsets is None else GroupOffsets(offsets),
            sums_groups=False,
        )
    except NotTileLocalError:  # the derivative of a maximum or a log-sum-exp needs the finished one
        return at_rounded_product()
    if offsets is not None:  # what all rows share
        sums, types = group_reductions(traced), traced.out_avals
        outputs = [_sum_of_rows(x, types[i].shape) if i in sums else x for i, x in enumerate(outputs)]
    return outputs[0], pullback.restored(outputs[1:])  # in the shapes of arrays or of matrices


def _sum_of_rows(x: jax.Array, shape: tuple[Any, ...]) -> jax.Array:
    return x.reshape(-1, math.prod(shape)).sum(axis=0).reshape(shape)
