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
from coda_jax.primitives.gemm_primitive import PRIMITIVES
from coda_jax.primitives.lowering import devices_of, route_of, select_part
from coda_jax.primitives.mesh_types import may_be_automatic
from coda_jax.primitives.notes import is_strict
from coda_jax.primitives.partition import Axes, axes_of
from coda_jax.primitives.partitioned import digest_of
from coda_jax.primitives.partitioner import Laid, Split, call_that_is_split
from coda_jax.primitives.plans import key_of
from coda_jax.primitives.spec import GemmSpec
from coda_jax.tiles.table import chosen_by

row_shards_p = jex_core.Primitive("coda_row_shards")
row_shards_p.multiple_results = True
dispatch.prim_requires_devices_during_lowering.add(row_shards_p)


class Columns(NamedTuple):
    """What may be cut beside the rows: an axis of one argument, and of the result that goes with it.

    Attributes:
      argument: its number; an array.
      result: that of its cotangent, or None.
      axis: of both.
      function: gives f for a part: of the mesh axes that cut it, and the number of parts.
    """

    argument: int
    result: int | None
    axis: int
    function: Callable[[Axes, int], Callable[..., Any]]


def on_row_shards(
    f: Callable[..., Any], *arguments: Any, rows: Sequence[Any], sums: Sequence[bool], columns: Columns
) -> list[jax.Array]:
    """f(*arguments), its results flat, which on automatic mesh axes each device computes of its own rows.

    Args:
      f: a function that closes over no array. It may be called on a part of the rows.
      *arguments: pytrees of arrays.
      rows: for each argument a prefix of it: whether arrays have the rows as their first axis. The others are whole on
        each device.
      sums: for each result, whether it is a sum over rows; else its first axis has the rows.
      columns: what mesh axes that do not cut the rows may cut.
    """
    leaves, tree = jax.tree.flatten(arguments)
    unflatten: Callable[..., Any] = tree.unflatten  # type: ignore[attr-defined]
    flags = jax.tree.leaves(jax.tree.broadcast(tuple(rows), arguments))
    if not may_be_automatic(*leaves):
        return jax.tree.leaves(f(*arguments))

    def flat(*leaves: jax.Array, cut: tuple[Axes, int] | None = None) -> list[jax.Array]:
        return jax.tree.leaves((columns.function(*cut) if cut else f)(*unflatten(leaves)))

    # The jaxpr is the function of all rows: what one device runs, and what readers of the program see.
    jaxpr = jax.make_jaxpr(flat)(*leaves)
    leaf = len(jax.tree.leaves(arguments[: columns.argument]))
    places = Places(tuple(flags), tuple(sums), leaf, columns.result, columns.axis)
    results: list[jax.Array] = row_shards_p.bind(*leaves, jaxpr=jaxpr, f=flat, places=places)
    return results


class Places(NamedTuple):
    """Which arrays have rows, are sums over them, or have the columns; `Columns` of flat arguments."""

    rows: tuple[bool, ...]
    sums: tuple[bool, ...]
    argument: int
    result: int | None
    axis: int


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

    def split(arguments: Sequence[Laid], results: Sequence[Laid], sizes: Mapping[str, int]) -> Split:
        axes, columns = _axes_of(places, arguments, results, sizes)
        of_arguments = [PartitionSpec(axes or None) if has_rows else PartitionSpec() for has_rows in places.rows]
        of_arguments[places.argument] = PartitionSpec(*[None] * places.axis, columns or None)
        of_results = []
        for i, (x, is_sum) in enumerate(zip(results, places.sums, strict=True)):
            own = (places.axis, columns) if i == places.result else (0, ())
            of_results.append(_scattered(x, axes, sizes, *own) if is_sum else PartitionSpec(axes or None))
        cut = (columns, math.prod(sizes[name] for name in columns)) if columns else None

        def each(*leaves: jax.Array) -> list[jax.Array]:
            jaxpr = jax.make_jaxpr(functools.partial(f, cut=cut))(*leaves)
            _record(params["jaxpr"], jaxpr)
            made = zip(jex_core.jaxpr_as_fun(jaxpr)(*leaves), places.sums, of_results, strict=True)
            return [_summed(x, axes, spec) if is_sum else x for x, is_sum, spec in made]

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
    products, of_part = _products(whole.jaxpr), _products(part.jaxpr)
    if len(products) == len(of_part):  # else it is another function of a part, and nothing is known
        for (avals, spec), (avals_of_part, spec_of_part) in zip(products, of_part, strict=True):
            select_part(avals_of_part, spec_of_part, key=key_of(avals, spec))


def _products(jaxpr: Any) -> list[tuple[list[Any], GemmSpec]]:
    """Types of the arguments and the spec of each."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive in PRIMITIVES:
            found.append(([v.aval for v in equation.invars], equation.params["spec"]))
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                found += _products(getattr(inner, "jaxpr", inner))
    return found


def _axes_of(
    places: Places, arguments: Sequence[Laid], results: Sequence[Laid], sizes: Mapping[str, int]
) -> tuple[Axes, Axes]:
    """The mesh axes that cut the rows, of the first array that has them cut; and those that cut the columns."""
    with_rows = [x for x, flag in zip(arguments, places.rows, strict=True) if flag]
    with_rows += [x for x, is_sum in zip(results, places.sums, strict=True) if not is_sum]
    rows = next((axes for x in with_rows if (axes := _dividing(x.cuts[0], x.shape[0], sizes))), ())
    whole = arguments[places.argument]
    others = tuple(axis for axis in whole.cuts[places.axis] if axis not in rows)
    return rows, _dividing(others, whole.shape[places.axis], sizes)


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
    if columns:
        cuts[column_axis] = columns
    return PartitionSpec(*(cut or None for cut in cuts))


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

    def mapping(rank: int, has_rows: bool, column_axis: int | None = None) -> ArrayMapping:
        names = ["rows"] * has_rows
        for axis in range(has_rows, rank):
            if axis == column_axis:
                names.append("columns")
            else:
                whole.append(f"whole_{len(whole)}")
                names.append(whole[-1])
        return ArrayMapping(*names)

    def free(i: int, rank: int) -> ArrayMapping:
        names = [f"free_{i}_{axis}" for axis in range(rank)]
        if i == places.result:
            names[places.axis] = "columns"
        return ArrayMapping(*names)

    arguments = tuple(
        mapping(rank, flag, places.axis if i == places.argument else None)
        for i, (rank, flag) in enumerate(zip(ranks, places.rows, strict=True))
    )
    results = tuple(
        free(i, rank) if is_sum else mapping(rank, True)
        for i, (rank, is_sum) in enumerate(zip(result_ranks, places.sums, strict=True))
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
