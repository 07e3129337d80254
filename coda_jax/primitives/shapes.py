"""Arrays of many axes as the matrices of a product.

M, N and K may each be several axes of an array: (B, T, K) factors, (K, 2, F) halves. They stay apart in the primitive,
because a device mesh may cut each of them; each device's part is flattened, which moves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from coda_jax.epilogue import Axis, Kind, Operand, Width
from coda_jax.epilogue.values import same_shape
from coda_jax.primitives.mesh_types import explicit_cuts, explicit_sharding
from coda_jax.primitives.spec import ArrayAxes, GemmSpec

Groups = tuple[
    tuple[str, int], ...
]  # for each axis of a matrix or a vector, what it is and how many axes it is made of


def argument_groups(spec: GemmSpec) -> list[Groups]:
    """Of a, b and the operands, without a batch axis: "m", "n", "k", or "" for what is of one device."""
    m, k = ("m", spec.axes.m), ("k", spec.axes.k)
    n = ("n", _columns(spec, spec.program.acc_width))
    a: Groups = (k, m) if spec.transpose_a else (m, k)
    b: Groups = (n, k) if spec.transpose_b else (k, n)
    return [a, b, *(_operand_groups(spec, operand) for operand in spec.program.operands)]


def product_groups(spec: GemmSpec) -> Groups:
    """Of acc."""
    return ("m", spec.axes.m), ("n", _columns(spec, spec.program.acc_width))


def _operand_groups(spec: GemmSpec, operand: Operand) -> Groups:
    m = ("m", spec.axes.m)
    match operand.kind:
        case Kind.ROW_VECTOR:
            return (("n", _columns(spec, operand.width)),)
        case Kind.COLUMN_VECTOR:
            return (m, ("", 1))
        case Kind.TILE:
            return (m, ("n", _columns(spec, operand.width)))
        case Kind.HEAD_TABLE:
            return (("", 1) if operand.period else m, ("", 1))
    return ()  # scalars, and vectors of a head


def result_groups(spec: GemmSpec) -> list[Groups]:
    """Of the stores and then the reductions."""
    m = ("m", spec.axes.m)
    stores: list[Groups] = [
        (m, ("", 1) if store.slice else ("n", _columns(spec, store.width))) for store in spec.program.stores
    ]
    return stores + [
        (m,) if reduction.axis is Axis.ROW else (("n", _columns(spec, reduction.width)),)
        for reduction in spec.program.reductions
    ]


def _columns(spec: GemmSpec, width: Width) -> int:
    """How many axes the columns of an array of this width are."""
    return 2 if spec.axes.halves and spec.program.ways_of(width) == 2 else spec.axes.n


def flat(x: Any, groups: Groups, *, has_batch: bool = False) -> Any:
    """The matrix or vector; what has not these axes, as a row vector (1, N), is one already."""
    counts = [count for _, count in groups]
    if all(count == 1 for count in counts) or x.ndim != has_batch + sum(counts):
        return x
    shape, rest = x.shape[:has_batch], x.shape[has_batch:]
    for count in counts:
        shape, rest = (*shape, math.prod(rest[:count])), rest[count:]
    return _reshaped(x, shape, [*[1] * has_batch, *counts])


def flat_rows(x: jax.Array, rows: Sequence[Any]) -> jax.Array:
    """An operand as the epilogue has it, with one axis for the rows; these are all its axes, if it has them."""
    if x.ndim <= max(len(rows), 1 + (len(rows) == 1)) or not same_shape(x.shape[: len(rows)], rows):
        return x
    return flat(x, (("m", len(rows)), ("n", x.ndim - len(rows))))


def flat_arguments(arguments: Sequence[Any], spec: GemmSpec) -> list[Any]:
    """a, b and the operands as matrices and vectors, behind a batch axis where there is one."""
    each = zip(arguments, argument_groups(spec), spec.batched, strict=True)
    return [flat(x, groups, has_batch=flag) for x, groups, flag in each]


def flat_types(types: Sequence[Any], spec: GemmSpec) -> list[Any]:
    """Types of `flat_arguments`, without shardings."""
    plain = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in types]
    if spec.axes == ArrayAxes():
        return plain
    return list(jax.eval_shape(lambda *arguments: flat_arguments(arguments, spec), *plain))


def flat_results(results: Sequence[jax.Array], spec: GemmSpec) -> list[jax.Array]:
    """Stores and reductions as matrices and vectors."""
    has_batch = any(spec.batched)
    return [flat(x, groups, has_batch=has_batch) for x, groups in zip(results, result_groups(spec), strict=True)]


class FactorAxes(NamedTuple):
    """The axes of a that are rows and those of b that are columns, of one half where halves lie apart.

    Attributes:
      m, n: sizes.
      m_cuts, n_cuts: the explicit mesh axes that cut each.
    """

    m: tuple[Any, ...]
    n: tuple[Any, ...]
    m_cuts: tuple[tuple[str, ...], ...]
    n_cuts: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, arguments: Sequence[Any], spec: GemmSpec) -> FactorAxes:
        found: dict[str, tuple[tuple[Any, ...], tuple[tuple[str, ...], ...]]] = {}
        for x, groups, flag in zip(arguments[:2], argument_groups(spec), spec.batched, strict=False):
            first, cuts = int(flag), explicit_cuts(x)
            for letter, count in groups:
                found[letter] = x.shape[first : first + count], cuts[first : first + count]
                first += count
        (m, m_cuts), (n, n_cuts) = found["m"], found["n"]
        return cls(m, n[-spec.axes.n :], m_cuts, n_cuts[-spec.axes.n :])

    @classmethod
    def of_product(cls, acc: Any, spec: GemmSpec, *, has_batch: bool) -> FactorAxes:
        """From acc with all its axes, on one device."""
        m, n = acc.shape[has_batch:][: spec.axes.m], acc.shape[-spec.axes.n :]
        return cls(m, n, ((),) * len(m), ((),) * len(n))


def shaped(x: jax.Array, groups: Groups, factors: FactorAxes, *, has_batch: bool = False) -> jax.Array:
    """A matrix or vector with the axes that go with the factors'; what has them already, as it is."""
    counts = [count for _, count in groups]
    if all(count == 1 for count in counts) or x.ndim != has_batch + len(groups):
        return x
    shape, cuts = list(x.shape[:has_batch]), list(explicit_cuts(x))
    split: list[tuple[str, ...]] = cuts[:has_batch]
    for (letter, count), size, cut in zip(groups, x.shape[has_batch:], cuts[has_batch:], strict=True):
        if count == 1:
            shape, split = [*shape, size], [*split, cut]
            continue
        sizes, of_factor = (factors.m, factors.m_cuts) if letter == "m" else (factors.n, factors.n_cuts)
        halves = count - len(sizes)
        shape += [*[2] * halves, *sizes]
        split += [*[()] * halves, *(tuple(axis for axis in axes if axis in cut) for axes in of_factor)]
    return _reshaped(x, tuple(shape), cuts=split)


def merged_sharding(sharding: Any, counts: Sequence[int]) -> Any:
    """Over explicit mesh axes, where so many axes of an array are merged to one each."""
    entries = iter((*sharding.spec, *(None,) * (sum(counts) - len(sharding.spec))))
    taken = [[next(entries) for _ in range(count)] for count in counts]
    names = [[n for entry in of for n in (entry if isinstance(entry, tuple) else (entry,)) if n] for of in taken]
    return jax.sharding.NamedSharding(sharding.mesh, jax.P(*(tuple(of) or None for of in names)))


def _reshaped(
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


def shaped_arguments(arguments: Sequence[jax.Array], spec: GemmSpec) -> list[jax.Array]:
    """The arguments, matrices and vectors or not, with the axes that go with the factors'."""
    factors = FactorAxes.of(arguments, spec)
    return [shaped(x, groups, factors) for x, groups in zip(arguments, argument_groups(spec), strict=True)]


def shaped_results(results: Sequence[jax.Array], factors: FactorAxes, spec: GemmSpec) -> list[jax.Array]:
    """Stores and reductions with the axes that go with these factors'."""
    has_batch = any(spec.batched)
    each = zip(results, result_groups(spec), strict=True)
    return [shaped(x, groups, factors, has_batch=has_batch) for x, groups in each]


def shaped_outputs(outputs: Sequence[jax.Array], arguments: Sequence[Any], spec: GemmSpec) -> list[jax.Array]:
    """f's flat outputs: tiles with the axes that go with these arguments', all others with those of the rows."""
    has_batch, factors = any(spec.batched), FactorAxes.of(arguments, spec)
    each = zip(outputs, _output_groups(spec, [x.ndim - has_batch for x in outputs]), strict=True)
    return [shaped(x, groups, factors, has_batch=has_batch) for x, groups in each]


def flat_outputs(outputs: Sequence[jax.Array], ranks: Sequence[int], spec: GemmSpec) -> list[jax.Array]:
    """Arrays like the outputs of a product without a batch, as f gives them, with so many axes."""
    return [flat(x, groups) for x, groups in zip(outputs, _output_groups(spec, ranks), strict=True)]


def _output_groups(spec: GemmSpec, ranks: Sequence[int]) -> list[Groups]:
    """Of f's flat outputs, which f gives so many axes."""
    tiles = {store.output: groups for store, groups in zip(spec.program.stores, result_groups(spec), strict=False)}
    made: list[Groups] = []
    for i, (rank, row_axes) in enumerate(zip(ranks, spec.program.row_axes, strict=True)):
        groups = tuple(("m", spec.axes.m) if axis in row_axes else ("", 1) for axis in range(rank))
        made.append(tiles.get(i, groups))
    return made
