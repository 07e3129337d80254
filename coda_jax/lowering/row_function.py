"""Functions of rows that XLA's partitioner splits as a whole: each device runs them on its own rows.

A loop over chunks of rows would otherwise be split chunk by chunk, with collectives in every step.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax._src import dispatch  # prim_requires_devices_during_lowering has no public name
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend import core as jex_core
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec

from coda_jax import ffi
from coda_jax.jaxprs.walk import equations
from coda_jax.lowering.mesh_plan import Axes, axes_of
from coda_jax.lowering.on_devices import digest_of
from coda_jax.lowering.record import key_of
from coda_jax.lowering.select import report, route_of, select_part
from coda_jax.lowering.xla_partitioner import Laid, Split, call_that_is_split, devices_of
from coda_jax.primitives.fallbacks import is_strict
from coda_jax.primitives.gemm_primitive import PRIMITIVES
from coda_jax.primitives.mesh_types import may_be_automatic
from coda_jax.primitives.spec import GemmSpec
from coda_jax.tiles.table import chosen_by

row_shards_p = jex_core.Primitive("coda_row_shards")
row_shards_p.multiple_results = True
dispatch.prim_requires_devices_during_lowering.add(row_shards_p)


class Result(NamedTuple):
    """What a function of rows gives, beside an array with a row for each of its arguments' rows.

    Attributes:
      is_sum: whether it is a sum over the rows instead.
      columns: its axis that is cut where the columns are; -1: none.
      is_part: whether a device that has some of the columns gives a part of a sum over these.
      moved_as: the dtype in which the devices' parts of a sum over the rows are added; None for its own.
    """

    is_sum: bool = False
    columns: int = -1
    is_part: bool = False
    moved_as: Any = None


def on_row_shards(
    f: Callable[..., Any],
    *arguments: Any,
    rows: Sequence[Any],
    columns: Sequence[Any],
    results: Sequence[Result],
    of_part: Callable[[Axes, int], Callable[..., Any]],
) -> list[jax.Array]:
    """f(*arguments), its results flat, which on automatic mesh axes each device computes of its own rows.

    Mesh axes that do not cut the rows may cut columns: an axis of some arguments that have no rows.

    Args:
      f: a function that closes over no array. It may be called on a part of the rows.
      *arguments: pytrees of arrays.
      rows: for each argument a prefix of it: whether arrays have the rows as their first axis. The others are whole on
        each device, but for their columns.
      columns: for each argument a prefix of it: the axis of the columns, or -1.
      results: what each is.
      of_part: gives f for a part of the columns: of the mesh axes that cut them, and the number of parts.
    """
    leaves, tree = jax.tree.flatten(arguments)
    unflatten: Callable[..., Any] = tree.unflatten  # type: ignore[attr-defined]
    if not may_be_automatic(*leaves):
        return jax.tree.leaves(f(*arguments))
    flags, axes = (jax.tree.leaves(jax.tree.broadcast(tuple(of), arguments)) for of in (rows, columns))

    def flat(*leaves: jax.Array, cut: tuple[Axes, int] | None = None) -> list[jax.Array]:
        return jax.tree.leaves((of_part(*cut) if cut else f)(*unflatten(leaves)))

    # The jaxpr is the function of all rows: what one device runs, and what readers of the program see.
    jaxpr = jax.make_jaxpr(flat)(*leaves)
    places = Places(tuple(flags), tuple(axes), tuple(results))
    made: list[jax.Array] = row_shards_p.bind(*leaves, jaxpr=jaxpr, f=flat, places=places)
    return made


class Places(NamedTuple):
    """Of flat arguments which have the rows, and the axes of their columns; and what each result is."""

    rows: tuple[bool, ...]
    columns: tuple[int, ...]
    results: tuple[Result, ...]


def _whole(*leaves: jax.Array, jaxpr: jex_core.ClosedJaxpr, **_: Any) -> list[jax.Array]:
    results: list[jax.Array] = jex_core.jaxpr_as_fun(jaxpr)(*leaves)
    return results


def lower(ctx: mlir.LoweringRuleContext, *leaves: Any, **params: Any) -> Any:
    def whole(*leaves: jax.Array) -> list[jax.Array]:
        return _whole(*leaves, **params)

    f: Callable[..., list[jax.Array]] = params["f"]
    avals: Sequence[Any] = ctx.avals_in
    num_devices, has_devices = devices_of(ctx)
    route = route_of(avals, num_devices, for_export=ctx.module_context.lowering_parameters.for_export)
    if not route.is_automatic or route.reason is not None or not has_devices:
        return mlir.lower_fun(whole, multiple_results=True)(ctx, *leaves)
    places: Places = params["places"]
    strict = is_strict()  # now: XLA's partitioner calls back later, and on threads of its own

    def split(arguments: Sequence[Laid], results: Sequence[Laid], sizes: Mapping[str, int]) -> Split:
        rows, columns = _axes_of(places, arguments, results, sizes)
        of_arguments = [
            PartitionSpec(rows or None) if has_rows else _with_columns(axis, columns)
            for has_rows, axis in zip(places.rows, places.columns, strict=True)
        ]
        of_results = [
            _scattered(x, rows, sizes, of_one.columns, columns) if of_one.is_sum else PartitionSpec(rows or None)
            for x, of_one in zip(results, places.results, strict=True)
        ]
        cut = (columns, math.prod(sizes[name] for name in columns)) if columns else None

        def each(*leaves: jax.Array) -> list[jax.Array]:
            jaxpr = jax.make_jaxpr(functools.partial(f, cut=cut))(*leaves)
            _record(params["jaxpr"], jaxpr)
            if strict:
                _refuse_fallbacks(jaxpr)
            made = jex_core.jaxpr_as_fun(jaxpr)(*leaves)
            moved = _as_moved(made, places.results) if rows else made
            found = []
            for x, part, of_one, spec in zip(moved, made, places.results, of_results, strict=True):
                if of_one.is_sum:
                    x = _summed(x, rows, spec)
                found.append((lax.psum(x, columns) if of_one.is_part and columns else x).astype(part.dtype))
            return found

        return Split(of_arguments, of_results, each)

    avals_out: Sequence[Any] = ctx.avals_out
    rule = _rule([aval.ndim for aval in avals], [aval.ndim for aval in avals_out], places)
    call = call_that_is_split(ctx, whole, split, rule)

    def marked(*leaves: jax.Array) -> list[jax.Array]:
        program = re.sub("0x[0-9a-f]+", "", str(params["jaxpr"]))  # without addresses
        with set_xla_metadata(coda_row_shards=digest_of(program, places, is_strict(), ffi.headers_hash(), chosen_by())):
            return call(*leaves)

    return mlir.lower_fun(marked, multiple_results=True)(ctx, *leaves)


def _record(whole: Any, part: Any) -> None:
    """Puts on record what a device multiplies: its function has the products of the whole one, in their order."""
    products, of_part = products_of(whole.jaxpr), products_of(part.jaxpr)
    if len(products) == len(of_part):  # else it is another function of a part, and nothing is known
        for (avals, spec), (avals_of_part, spec_of_part) in zip(products, of_part, strict=True):
            select_part(avals_of_part, spec_of_part, key=key_of(avals, spec))


def _refuse_fallbacks(part: Any) -> None:
    """Raises what the lowering of a device's part would in strict mode."""
    for avals, spec in products_of(part.jaxpr):
        if spec.implementation == "auto" and (reason := select_part(avals, spec).reason) is not None:
            report(spec, reason, strict=True)


def products_of(jaxpr: jex_core.Jaxpr) -> list[tuple[list[Any], GemmSpec]]:
    """Types of the arguments and the spec of each product."""
    found = (equation for equation, _ in equations(jaxpr) if equation.primitive in PRIMITIVES)
    return [([v.aval for v in equation.invars], equation.params["spec"]) for equation in found]


def _axes_of(
    places: Places, arguments: Sequence[Laid], results: Sequence[Laid], sizes: Mapping[str, int]
) -> tuple[Axes, Axes]:
    """The mesh axes that cut the rows, of the first array that has them cut; and those that cut the columns."""
    with_rows = [x for x, flag in zip(arguments, places.rows, strict=True) if flag]
    with_rows += [x for x, of_one in zip(results, places.results, strict=True) if not of_one.is_sum]
    rows = next((axes for x in with_rows if (axes := _dividing(x.cuts[0], x.shape[0], sizes))), ())
    whole, axis = next((x, axis) for x, axis in zip(arguments, places.columns, strict=True) if axis >= 0)
    others = tuple(name for name in whole.cuts[axis] if name not in rows)
    return rows, _dividing(others, whole.shape[axis], sizes)


def _with_columns(axis: int, columns: Axes) -> PartitionSpec:
    return PartitionSpec(*[None] * axis, columns or None) if axis >= 0 else PartitionSpec()


def _dividing(axes: Axes, size: int, sizes: Mapping[str, int]) -> Axes:
    """Those of the axes that cut this size evenly."""
    fit: Axes = ()
    for axis in axes:
        if size % math.prod(sizes[name] for name in (*fit, axis)) == 0:
            fit += (axis,)
    return fit


def _scattered(x: Laid, axes: Axes, sizes: Mapping[str, int], column_axis: int, columns: Axes) -> PartitionSpec:
    """How a sum over `axes` lies: cut by those of them that are to cut it, and its columns by theirs."""
    wanted = [tuple(axis for axis in of_one if axis in axes) for of_one in x.cuts]
    cuts = [_dividing(cut, size, sizes) for cut, size in zip(wanted, x.shape, strict=True)]
    if columns and column_axis >= 0:
        cuts[column_axis] = columns
    return PartitionSpec(*(cut or None for cut in cuts))


def _as_moved(made: Sequence[jax.Array], results: Sequence[Result]) -> Sequence[jax.Array]:
    """In the dtypes in which they move, before anything goes on: a sum in its own would live beside what follows."""
    cast = [
        x if of_one.moved_as is None else x.astype(of_one.moved_as) for x, of_one in zip(made, results, strict=True)
    ]
    are_same = all(x.dtype == part.dtype for x, part in zip(cast, made, strict=True))
    return made if are_same else lax.optimization_barrier(cast)


def _summed(x: jax.Array, axes: Axes, spec: PartitionSpec) -> jax.Array:
    kept = [tuple(axis for axis in of_one if axis in axes) for of_one in axes_of(spec, x.ndim)]
    for dimension, of_one in enumerate(kept):
        if of_one:
            x = lax.psum_scatter(x, of_one, scatter_dimension=dimension, tiled=True)
    rest = tuple(axis for axis in axes if not any(axis in of_one for of_one in kept))
    return lax.psum(x, rest) if rest else x


def _rule(ranks: Sequence[int], result_ranks: Sequence[int], places: Places) -> SdyShardingRule:
    """The rows go together, and so do the columns; what else arrays have stays whole; a sum may lie as is wanted."""
    whole: list[str] = []

    def mapping(rank: int, has_rows: bool, column_axis: int = -1) -> ArrayMapping:
        names = ["rows"] * has_rows
        for axis in range(has_rows, rank):
            if axis == column_axis:
                names.append("columns")
            else:
                whole.append(f"whole_{len(whole)}")
                names.append(whole[-1])
        return ArrayMapping(*names)

    def free(i: int, rank: int, column_axis: int) -> ArrayMapping:
        names = [f"free_{i}_{axis}" for axis in range(rank)]
        if column_axis >= 0:
            names[column_axis] = "columns"
        return ArrayMapping(*names)

    arguments = tuple(map(mapping, ranks, places.rows, places.columns))
    results = tuple(
        free(i, rank, of_one.columns) if of_one.is_sum else mapping(rank, True)
        for i, (rank, of_one) in enumerate(zip(result_ranks, places.results, strict=True))
    )
    return SdyShardingRule(arguments, results, need_replication_factors=tuple(whole))


row_shards_p.def_impl(lambda *leaves, **params: jax.jit(functools.partial(_whole, **params))(*leaves))
row_shards_p.def_abstract_eval(lambda *_, jaxpr, **__: jaxpr.out_avals)
ad.primitive_jvps[row_shards_p] = lambda primals, tangents, **params: jax.jvp(
    functools.partial(_whole, **params), tuple(primals), tuple(ad.instantiate_zeros(t) for t in tangents)
)


def _batch(leaves: Sequence[Any], axes: Sequence[Any], **params: Any) -> tuple[list[jax.Array], list[int]]:
    results = jax.vmap(functools.partial(_whole, **params), in_axes=tuple(axes))(*leaves)
    return results, [0] * len(results)


batching.primitive_batchers[row_shards_p] = _batch
mlir.register_lowering(row_shards_p, mlir.lower_fun(_whole, multiple_results=True))
mlir.register_lowering(row_shards_p, lower, platform="cuda")
