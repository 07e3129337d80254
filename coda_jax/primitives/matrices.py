"""Arrays of many axes, and several arrays, as the matrices of a product.

M, N and K may each be several axes of an array: (B, T, K) factors, (K, 2, F) halves. N or K may be several arrays, one
behind the other: the weights of query, key and value. All stay apart in the primitive, because a device mesh may cut
each of them; each device's parts are flattened, which moves nothing, and joined.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from coda_jax.epilogue import Along, Axis, Operand, Reduction, Width
from coda_jax.epilogue.values import same_shape, same_size
from coda_jax.primitives.mesh_types import cutting_evenly, explicit_cuts, explicit_sharding, without_axes
from coda_jax.primitives.spec import ArrayAxes, GemmSpec


class Group(NamedTuple):
    """The axes of an array that make up one axis of a matrix or a vector.

    Attributes:
      of: "m", "n" or "k"; "" for what is never cut.
      axes: how many.
      part: which part of a joined dimension.
    """

    of: str
    axes: int = 1
    part: int = 0


Groups = tuple[Group, ...]

WHOLE = Group("")


def argument_groups(spec: GemmSpec) -> list[Groups]:
    """Axes of each argument of the primitive, without a batch axis."""
    return [groups for of_one in argument_parts(spec) for groups in of_one]


def result_groups(spec: GemmSpec) -> list[Groups]:
    """Axes of each result of the primitive: the stores' parts, then the reductions'."""
    return [groups for of_one in _result_parts(spec) for groups in of_one]


def argument_parts(spec: GemmSpec) -> list[list[Groups]]:
    """Axes of a, b and each operand, for each of its parts."""
    m, n, k = Group("m", spec.axes.m), Group("n", _columns(spec, spec.program.halves.acc)), Group("k", spec.axes.k)
    a: Groups = (k, m) if spec.transpose_a else (m, k)
    b: Groups = (n, k) if spec.transpose_b else (k, n)
    whole = [a, b, *(_operand_groups(spec, operand) for operand in spec.program.operands)]
    return [_parts(groups, spec) for groups in whole]


def product_parts(spec: GemmSpec) -> list[Groups]:
    """Axes of acc, for each of its parts."""
    return _parts((Group("m", spec.axes.m), Group("n", _columns(spec, spec.program.halves.acc))), spec)


def _operand_groups(spec: GemmSpec, operand: Operand) -> Groups:
    groups = {Along.ROWS: Group("m", spec.axes.m), Along.COLUMNS: Group("n", _columns(spec, operand.width))}
    return tuple(WHOLE if axis is None else groups[axis] for axis in operand.axes)


def _result_parts(spec: GemmSpec) -> list[list[Groups]]:
    program, m = spec.program, Group("m", spec.axes.m)
    found: list[list[Groups]] = []
    for store in program.stores:
        if store.slice is None:
            found.append(_parts((m, Group("n", _columns(spec, store.width))), spec))
        elif spec.axes.joined == "n" and store.slice in program.sections:
            found.append([(m, Group("n", 1, program.sections.index(store.slice)))])
        else:
            found.append([(m, WHOLE)])
    for reduction in program.reductions:
        of_columns = (Group("n", _columns(spec, reduction.width)),)
        found.append([(m,)] if reduction.axis is Axis.ROW else _parts(of_columns, spec))
    return found


def num_stored(spec: GemmSpec) -> int:
    """How many arrays the stores are."""
    return sum(map(len, _result_parts(spec)[: len(spec.program.stores)]))


def reductions_of(spec: GemmSpec) -> list[Reduction]:
    """The program's, each as often as it has parts."""
    each = zip(spec.program.reductions, _result_parts(spec)[len(spec.program.stores) :], strict=True)
    return [reduction for reduction, of_one in each for _ in of_one]


def _columns(spec: GemmSpec, width: Width) -> int:
    """How many axes the columns of an array of this width are."""
    return 2 if spec.axes.halves and spec.program.halves.of(width) == 2 else spec.axes.n


def _parts(groups: Groups, spec: GemmSpec) -> list[Groups]:
    joined = spec.axes.joined
    if not joined or all(group.of != joined for group in groups):
        return [groups]
    return [
        tuple(group._replace(part=i) if group.of == joined else group for group in groups)
        for i in range(spec.axes.parts)
    ]


def flat(x: Any, groups: Groups, *, has_batch: bool = False) -> Any:
    """The matrix or vector; what has not these axes is one already."""
    counts = [group.axes for group in groups]
    first = has_batch + _has_row(x.shape[has_batch:], groups, sum(counts))
    if all(count == 1 for count in counts) or x.ndim != first + sum(counts):
        return x
    shape, rest = x.shape[:first], x.shape[first:]
    for count in counts:
        shape, rest = (*shape, math.prod(rest[:count])), rest[count:]
    return reshaped(x, shape, [*[1] * first, *counts])


def _has_row(shape: Sequence[Any], groups: Groups, axes: int) -> bool:
    """Whether a vector that is so many axes has one for its row in front of them: (1, N) of (N,)."""
    return len(groups) == 1 and len(shape) == 1 + axes and same_size(shape[0], 1)


def flat_rows(x: jax.Array, rows: Sequence[Any]) -> jax.Array:
    """An operand as the epilogue has it, with one axis for the rows; these are all its axes, if it has them."""
    if x.ndim <= max(len(rows), 1 + (len(rows) == 1)) or not same_shape(x.shape[: len(rows)], rows):
        return x
    return flat(x, (Group("m", len(rows)), Group("n", x.ndim - len(rows))))


def joined(parts: Sequence[jax.Array], groups: Sequence[Groups], flags: Sequence[bool] | None = None) -> jax.Array:
    """Matrices or vectors, or arrays whose last axes they are, one behind the other along what they are parts of.

    Args:
      flags: which have a batch axis.
    """
    if len(parts) == 1:
        return parts[0]
    place = next(i for i, group in enumerate(groups[1]) if group.part)
    if flags is not None and any(flags) and not all(flags):
        batch = next(x.shape[0] for x, flag in zip(parts, flags, strict=True) if flag)
        each = zip(parts, flags, strict=True)
        parts = [x if flag else jnp.broadcast_to(x, (batch, *x.shape)) for x, flag in each]
    return jnp.concatenate(parts, axis=place - len(groups[1]))


def flat_arguments(arguments: Sequence[Any], spec: GemmSpec) -> list[Any]:
    """a, b and the operands as matrices and vectors, behind a batch axis where there is one."""
    return flat_operands(arguments, spec.batched, argument_parts(spec))


def flat_operands(arrays: Sequence[Any], batched: Sequence[bool], parts: Sequence[Sequence[Groups]]) -> list[Any]:
    """Matrices and vectors of arrays that are those of `parts`."""
    rest, made = iter(zip(arrays, batched, strict=True)), []
    for of_one in parts:
        each = [next(rest) for _ in of_one]
        matrices = [flat(x, groups, has_batch=flag) for (x, flag), groups in zip(each, of_one, strict=True)]
        made.append(joined(matrices, of_one, [flag for _, flag in each]))
    return made


def flat_spec(spec: GemmSpec) -> GemmSpec:
    """The same product of matrices and vectors."""
    if spec.axes == ArrayAxes():
        return spec
    flags = iter(spec.batched)
    batched = tuple(True in [next(flags) for _ in of_one] for of_one in argument_parts(spec))
    return spec.replace(axes=ArrayAxes(), k_axes=1, halves=False, batched=batched)


def flat_types(types: Sequence[Any], spec: GemmSpec) -> list[Any]:
    """Types of `flat_arguments`, without shardings."""
    plain = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in types]
    if spec.axes == ArrayAxes():
        return plain
    return list(jax.eval_shape(lambda *arguments: flat_arguments(arguments, spec), *plain))


def joined_results(results: Sequence[jax.Array], spec: GemmSpec) -> list[jax.Array]:
    """Stores and reductions, those that are parts joined, with all their axes."""
    rest = iter(results)
    return [joined([next(rest) for _ in of_one], of_one) for of_one in _result_parts(spec)]


def flat_reductions(results: Sequence[jax.Array], spec: GemmSpec) -> list[jax.Array]:
    """The reductions among `joined_results`, as vectors."""
    has_batch, count = any(spec.batched), len(spec.program.stores)
    groups = [of_one[0] for of_one in _result_parts(spec)]
    return [flat(x, of_one, has_batch=has_batch) for x, of_one in zip(results[count:], groups[count:], strict=True)]


class FactorAxes(NamedTuple):
    """The axes of a that are rows and those of b that are columns, of one half where halves lie apart.

    Attributes:
      m, n: sizes.
      m_cuts, n_cuts: the explicit mesh axes that cut each.
      parts: sizes of what N or K is joined of.
    """

    m: tuple[Any, ...]
    n: tuple[Any, ...]
    m_cuts: tuple[tuple[str, ...], ...]
    n_cuts: tuple[tuple[str, ...], ...]
    parts: tuple[Any, ...]

    @classmethod
    def of(cls, arguments: Sequence[Any], spec: GemmSpec) -> FactorAxes:
        factors = [groups for of_one in argument_parts(spec)[:2] for groups in of_one]
        found: dict[tuple[str, int], tuple[tuple[Any, ...], tuple[tuple[str, ...], ...]]] = {}
        for x, groups, flag in zip(arguments, factors, spec.batched, strict=False):
            first, cuts = int(flag), explicit_cuts(x)
            for of, count, part in groups:
                found[of, part] = x.shape[first : first + count], cuts[first : first + count]
                first += count
        (m, m_cuts), (n, n_cuts) = found["m", 0], found["n", 0]
        parts = tuple(found[spec.axes.joined, i][0][0] for i in range(spec.axes.parts)) if spec.axes.joined else ()
        return cls(m, n[-spec.axes.n :], m_cuts, n_cuts[-spec.axes.n :], parts)

    @classmethod
    def of_product(cls, parts: Sequence[Any], spec: GemmSpec, *, has_batch: bool) -> FactorAxes:
        """From acc, or its parts, with all axes, on one device."""
        m, n = parts[0].shape[has_batch:][: spec.axes.m], parts[0].shape[-spec.axes.n :]
        return cls(m, n, ((),) * len(m), ((),) * len(n), tuple(x.shape[-1] for x in parts))


def shaped(x: jax.Array, groups: Groups, factors: FactorAxes, *, has_batch: bool = False) -> jax.Array:
    """A matrix or vector with the axes that go with the factors'; what has them already, as it is."""
    counts = [group.axes for group in groups]
    first = has_batch + _has_row(x.shape[has_batch:], groups, 1)
    if all(count == 1 for count in counts) or x.ndim != first + len(groups):
        return x
    shape, cuts = list(x.shape[:first]), list(explicit_cuts(x))
    split: list[tuple[str, ...]] = cuts[:first]
    for (of, count, _), size, cut in zip(groups, x.shape[first:], cuts[first:], strict=True):
        if count == 1:
            shape, split = [*shape, size], [*split, cut]
            continue
        sizes, of_factor = (factors.m, factors.m_cuts) if of == "m" else (factors.n, factors.n_cuts)
        halves = count - len(sizes)
        shape += [*[2] * halves, *sizes]
        split += [*[()] * halves, *(tuple(axis for axis in axes if axis in cut) for axes in of_factor)]
    return reshaped(x, tuple(shape), cuts=split)


def shaped_parts(
    x: jax.Array, of_one: Sequence[Groups], factors: FactorAxes, *, has_batch: bool = False
) -> Iterator[jax.Array]:
    """The arrays of a matrix or vector that is of one or of parts."""
    if len(of_one) == 1:
        yield shaped(x, of_one[0], factors, has_batch=has_batch)
        return
    axis = next(i for i, group in enumerate(of_one[1]) if group.part) - len(of_one[1])
    first = 0
    for groups, size in zip(of_one, factors.parts, strict=True):
        part = jax.lax.slice_in_dim(x, first, first + size, axis=x.ndim + axis)
        first += size
        yield shaped(part, groups, factors, has_batch=has_batch)


def shaped_results(results: Sequence[jax.Array], factors: FactorAxes, spec: GemmSpec) -> list[jax.Array]:
    """The stores' and reductions' parts, with the axes that go with these factors'."""
    has_batch = any(spec.batched)
    each = zip(results, _result_parts(spec), strict=True)
    return [part for x, of_one in each for part in shaped_parts(x, of_one, factors, has_batch=has_batch)]


def shaped_outputs(outputs: Sequence[jax.Array], arguments: Sequence[Any], spec: GemmSpec) -> list[jax.Array]:
    """f's flat outputs: tiles with the axes that go with these arguments', all others with those of the rows."""
    has_batch, factors = any(spec.batched), FactorAxes.of(arguments, spec)
    each = zip(outputs, _output_groups(spec, [x.ndim - has_batch for x in outputs]), strict=True)
    return [shaped(x, groups, factors, has_batch=has_batch) for x, groups in each]


def flat_outputs(outputs: Sequence[Any], ranks: Sequence[int], spec: GemmSpec) -> list[Any]:
    """Arrays, or None, like the outputs of a product without a batch, as f gives them, with so many axes."""
    each = zip(outputs, _output_groups(spec, ranks), strict=True)
    return [None if x is None else flat(x, groups) for x, groups in each]


def _output_groups(spec: GemmSpec, ranks: Sequence[int]) -> list[Groups]:
    """Axes of each of f's flat outputs, which have these numbers of axes where f makes them."""
    each = zip(spec.program.stores, _result_parts(spec), strict=False)
    tiles = {store.output: of_one[0] for store, of_one in each}
    made: list[Groups] = []
    for i, (rank, row_axes) in enumerate(zip(ranks, spec.program.row_axes, strict=True)):
        groups = tuple(Group("m", spec.axes.m) if axis in row_axes else WHOLE for axis in range(rank))
        made.append(tiles.get(i, groups))
    return made


def axes_of_heads(x: jax.Array, head_dim: int) -> tuple[str, ...]:
    """The explicit mesh axes that cut x (..., H Dh) in whole heads."""
    axes = explicit_cuts(x)[-1]
    return cutting_evenly(axes, jax.typeof(x).sharding.mesh, x.shape[-1] // head_dim) if axes else ()


def in_heads(x: jax.Array, head_dim: int) -> jax.Array:
    """x (..., H Dh) as (..., H, Dh); it is gathered over explicit mesh axes that do not cut it in whole heads."""
    kept = axes_of_heads(x, head_dim)
    x = without_axes(x, x.ndim - 1, frozenset(explicit_cuts(x)[-1]) - frozenset(kept))
    return reshaped(x, (*x.shape[:-1], x.shape[-1] // head_dim, head_dim), cuts=(*explicit_cuts(x), ()))


def halves_joined(x: jax.Array) -> jax.Array:
    """x (..., 2, F) as (..., 2F), whose columns the explicit mesh axes cut that cut F."""
    *lead, _, features = explicit_cuts(x)
    x = without_axes(x, x.ndim - 2, frozenset(explicit_cuts(x)[-2]))
    return reshaped(x, (*x.shape[:-2], 2 * x.shape[-1]), cuts=(*lead, features))


def halves_apart(x: jax.Array) -> jax.Array:
    """x (..., 2F) as (..., 2, F), whose F the explicit mesh axes cut that cut the columns, if they do so evenly."""
    *lead, columns = explicit_cuts(x)
    features = x.shape[-1] // 2
    kept = cutting_evenly(columns, jax.typeof(x).sharding.mesh, features) if columns else ()
    return reshaped(x, (*x.shape[:-1], 2, features), cuts=(*lead, (), kept))


def merged_sharding(sharding: Any, counts: Sequence[int]) -> Any:
    """Over explicit mesh axes, where so many axes of an array are merged to one each."""
    entries = iter((*sharding.spec, *(None,) * (sum(counts) - len(sharding.spec))))
    taken = [[next(entries) for _ in range(count)] for count in counts]
    names = [[n for entry in of for n in (entry if isinstance(entry, tuple) else (entry,)) if n] for of in taken]
    return jax.sharding.NamedSharding(sharding.mesh, jax.P(*(tuple(of) or None for of in names)))


def reshaped(
    x: jax.Array,
    shape: Sequence[Any],
    merged: Sequence[int] = (),
    cuts: Sequence[tuple[str, ...]] = (),
) -> jax.Array:
    """x.reshape(shape); over explicit mesh axes cut as `cuts` says, or as so many merged axes were together."""
    sharding = explicit_sharding(x)
    if sharding is None:
        return jax.lax.reshape(x, shape)
    if merged:
        return jax.lax.reshape(x, shape, out_sharding=merged_sharding(sharding, merged))
    spec = jax.P(*(cut or None for cut in cuts))
    return jax.lax.reshape(x, shape, out_sharding=jax.sharding.NamedSharding(sharding.mesh, spec))
