"""Reductions over rows beside groups of them: of each group, by XLA, from what the epilogue gives in their place.

A product of groups has no sum over all rows. An output that is a sum, maximum or minimum over the rows is one of each
group's rows. The kernel reduces a tile, which may have rows of several groups. So the epilogue gives what is reduced,
for each row, and `reduced_by_group` reduces it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from coda_jax.epilogue.dtypes import FLOATS
from coda_jax.epilogue.finishing import mixes_rows
from coda_jax.epilogue.flatten import Atom, Equation, Flat, Literal
from coda_jax.epilogue.groups import RowGroups
from coda_jax.epilogue.program import Axis, Program, ReductionOp
from coda_jax.epilogue.reductions import REDUCTIONS
from coda_jax.epilogue.trace import Epilogue
from coda_jax.epilogue.values import NotTileLocalError, same_size
from coda_jax.jaxprs.bind import bind

_OF_ROWS = (ReductionOp.SUM, ReductionOp.MAX, ReductionOp.MIN)
_KEPT = frozenset({"broadcast_in_dim", "convert_element_type", "copy", "reshape", "squeeze"})  # after the reduction


class GroupReduction(NamedTuple):
    """An output that is a reduction over the rows.

    Attributes:
      op: of it.
      value: the variable that is reduced, whose first axis is the rows.
      over_columns: whether it is reduced over the columns too.
      shape: of the output, for one group.
    """

    op: ReductionOp
    value: int
    over_columns: bool
    shape: tuple[Any, ...]


def reduces_rows(program: Program) -> bool:
    """True if an output depends on several rows."""
    return any(reduction.axis is Axis.COLUMN for reduction in program.reductions) or mixes_rows(program)


def group_reductions(epilogue: Epilogue) -> dict[int, GroupReduction]:
    """The outputs, by their number, that are reductions over the rows and nothing else."""
    makers = {output: equation for equation in epilogue.flat.equations for output in equation.outputs}
    found = {i: _reduction(epilogue.flat, makers, atom) for i, atom in enumerate(epilogue.flat.outputs)}
    return {i: reduction for i, reduction in found.items() if reduction is not None}


def _reduction(flat: Flat, makers: Mapping[int, Equation], output: Atom) -> GroupReduction | None:
    atom, rows = output, flat.avals[0].shape[0]
    while isinstance(atom, int) and atom in makers:
        equation = makers[atom]
        if equation.name in _KEPT:
            atom = equation.inputs[0]
            continue
        op, value = REDUCTIONS.get(equation.name), equation.inputs[0]
        if op not in _OF_ROWS or isinstance(value, Literal):
            return None
        aval, shape, axes = flat.aval(value), tuple(flat.aval(output).shape), tuple(equation.params["axes"])
        if aval.ndim > 2 or axes != tuple(range(len(axes))) or not same_size(aval.shape[0], rows):
            return None
        if aval.dtype.name not in FLOATS:
            return None
        kept = shape[1:] if len(shape) == aval.ndim else shape
        return GroupReduction(op, value, len(axes) == 2, kept)
    return None


def check_group_reductions(
    epilogue: Epilogue, reductions: Mapping[int, GroupReduction], *, is_rest: bool = False
) -> None:
    """Raises where these are not all of an epilogue that depends on several rows, or where `is_rest` still does."""
    if not reductions or (is_rest and reduces_rows(epilogue.program)):
        raise NotTileLocalError(
            f"epilogue '{epilogue.name}': an output is computed from a reduction over rows. Beside groups a sum, "
            "maximum or minimum over rows (axis 0) of floats is of each group, (G, N), and can only be returned as it "
            "is; compute what follows from it outside"
        )


def without_group_reductions(
    f: Callable[..., Any] | None,
    epilogue: Epilogue,
    captured: Sequence[Any],
    reductions: Mapping[int, GroupReduction],
) -> Callable[..., list[Any]]:
    """f(acc, *operands), flat, with float32 values for each row in the place of these outputs.

    Args:
      epilogue, captured: f traced.
    """
    flat = epilogue.flat

    def of_rows(*arguments: Any) -> list[Any]:
        values: dict[int, Any] = dict(enumerate(arguments))
        values |= {variable: captured[index] for index, variable in flat.constants.items()}

        def read(atom: Atom) -> Any:
            return atom.value if isinstance(atom, Literal) else values[atom]

        for equation in flat.equations:
            results = bind(equation.primitive, [read(atom) for atom in equation.inputs], equation.params)
            values.update(zip(equation.outputs, results, strict=True))
        outputs = list(map(read, flat.outputs))
        for i, (op, value, over_columns, _) in reductions.items():
            x = values[value].astype(jnp.float32)
            outputs[i] = op.reduce(x, axis=1) if over_columns else x
        return outputs

    of_rows.__name__, of_rows.__wrapped__ = epilogue.name, f  # type: ignore[attr-defined]
    return of_rows


def reduced_by_group(reduction: GroupReduction, x: jax.Array, offsets: jax.Array) -> jax.Array:
    """The reduction of the rows of each group of x (M, ...), (G, ...) float32. Of no rows it is 0, or an infinity."""
    rows, groups = RowGroups.of(offsets, x.shape[0]), offsets.shape[0] - 1
    x = x.reshape(x.shape[0], -1)
    reduced = _sum(x, rows, groups) if reduction.op is ReductionOp.SUM else _extreme(reduction.op, x, rows, groups)
    return reduced.reshape(groups, *reduction.shape)


def _sum(x: jax.Array, rows: RowGroups, groups: int) -> jax.Array:
    return jax.ops.segment_sum(rows.masked(x), rows.of_row, groups, indices_are_sorted=True)


def _extreme(op: ReductionOp, x: jax.Array, rows: RowGroups, groups: int) -> jax.Array:
    """A maximum or minimum; of equal ones each has the same share of the cotangent, as in JAX's own of an array."""
    segment = jax.ops.segment_max if op is ReductionOp.MAX else jax.ops.segment_min

    @jax.custom_vjp
    def extreme(x: jax.Array, rows: RowGroups) -> jax.Array:
        inside = jnp.where(rows.is_in[:, None], x, op.neutral)
        return segment(inside, rows.of_row, groups, indices_are_sorted=True)

    def places(x: jax.Array, rows: RowGroups) -> tuple[jax.Array, jax.Array]:
        found = extreme(x, rows)
        return found, rows.masked(x == rows.for_each_row(found))

    def nowhere(x: jax.Array, rows: RowGroups) -> tuple[jax.Array, jax.Array]:
        return jnp.full_like(x, op.neutral, shape=(groups, x.shape[1])), jnp.zeros_like(x, bool)

    def forward(x: jax.Array, rows: RowGroups) -> tuple[jax.Array, Any]:
        # In a branch x is there. Elsewhere XLA may compute it twice, and unlike, and then none is equal to the extreme.
        found, is_found = lax.cond(rows.is_in.any(), places, nowhere, x, rows)
        return found, (is_found, rows)

    def backward(kept: Any, cotangent: jax.Array) -> tuple[jax.Array, None]:
        is_found, rows = kept
        share = cotangent / jnp.maximum(_sum(is_found.astype(jnp.float32), rows, groups), 1)
        return jnp.where(is_found, rows.for_each_row(share), 0.0), None

    extreme.defvjp(forward, backward)
    return extreme(x, rows)
