"""Reductions over rows in groups: XLA reduces the rows of each group, from values that the epilogue returns instead.

With rows in groups, an output that is a sum, maximum or minimum over the rows has a value for each group. The kernel
reduces entire tiles, which may have rows of several groups. So the epilogue returns the values of each row, and XLA
reduces them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from coda_jax.epilogue.dtypes import FLOATS
from coda_jax.epilogue.flatten import Atom, Equation, Flat, Literal
from coda_jax.epilogue.groups import RowGroups
from coda_jax.epilogue.program import Axis, Program, ReductionOp
from coda_jax.epilogue.reductions import REDUCTIONS
from coda_jax.epilogue.trace import Epilogue
from coda_jax.epilogue.values import NotTileLocalError, same_shape, same_size
from coda_jax.jaxprs.bind import bind

_OF_ROWS = (ReductionOp.SUM, ReductionOp.MAX, ReductionOp.MIN)
_KEPT = frozenset({"broadcast_in_dim", "convert_element_type", "copy", "reshape", "squeeze"})  # after the reduction


class GroupReduction(NamedTuple):
    """An output that is a reduction over the rows.

    Attributes:
      op: sum, maximum or minimum.
      values: the variables whose sum is reduced, of one shape, whose first axis is the rows.
      over_columns: whether the columns are reduced, too.
      shape: of the output, for one group.
    """

    op: ReductionOp
    values: tuple[int, ...]
    over_columns: bool
    shape: tuple[Any, ...]


def reduces_rows(program: Program) -> bool:
    """True if an output depends on several rows."""
    return any(reduction.axis is not Axis.ROW for reduction in program.reductions) or program.finishing.mixes_rows


def group_reductions(epilogue: Epilogue) -> dict[int, GroupReduction]:
    """The outputs, by their number, that are reductions over the rows, or sums of such sums."""
    flat = epilogue.flat
    makers = {output: equation for equation in flat.equations for output in equation.outputs}
    reductions = {i: _reduction(flat, makers, atom, flat.aval(atom).shape) for i, atom in enumerate(flat.outputs)}
    return {i: reduction for i, reduction in reductions.items() if reduction is not None}


def _reduction(flat: Flat, makers: Mapping[int, Equation], atom: Atom, shape: tuple[Any, ...]) -> GroupReduction | None:
    """A value of this final shape as a reduction over the rows; None if it is none."""
    if not isinstance(atom, int) or atom not in makers:
        return None
    equation, rows = makers[atom], flat.avals[0].shape[0]
    op, value = REDUCTIONS.get(equation.name), equation.inputs[0]
    if equation.name in ("add", "add_any"):
        first, second = (_reduction(flat, makers, x, shape) for x in equation.inputs)
        return _sum_of(flat, first, second) if first and second else None
    aval = flat.aval(value)
    if equation.name in _KEPT or (op and not any(_reduced(equation, aval, rows))):
        return _reduction(flat, makers, value, shape)
    axes = tuple(equation.params.get("axes", ()))
    is_plain = op in _OF_ROWS and aval.ndim <= 2 and axes == tuple(range(len(axes))) and aval.dtype.name in FLOATS
    if op is None or not is_plain or isinstance(value, Literal) or not same_size(aval.shape[0], rows):
        return None
    return GroupReduction(op, (value,), len(axes) == 2, shape[1:] if len(shape) == aval.ndim else shape)


def _sum_of(flat: Flat, first: GroupReduction, second: GroupReduction) -> GroupReduction | None:
    """The sum of two reductions as one; None if they differ in more than their values."""
    shapes = [flat.aval(one.values[0]).shape for one in (first, second)]
    is_sum = first.op is second.op is ReductionOp.SUM and same_shape(*shapes)
    return first._replace(values=first.values + second.values) if is_sum and first[2:] == second[2:] else None


def _reduced(equation: Equation, aval: Any, rows: Any) -> list[bool]:
    """For each axis that a reduction removes, whether it has several values or is the rows."""
    sizes = [aval.shape[axis] for axis in equation.params["axes"]]
    return [not same_size(size, 1) or same_size(size, rows) for size in sizes]


@dataclasses.dataclass(frozen=True)
class GroupReductions:
    """An epilogue of which XLA computes the outputs that are reductions over the rows, from values of each row.

    Attributes:
      epilogue: traced.
      captured: the arrays that it closes over.
      reductions: of its outputs, by their number.
      row_epilogue: f(acc, *operands), flat, with float32 values of each row in the place of the reductions.
    """

    epilogue: Epilogue
    captured: Sequence[Any]
    reductions: Mapping[int, GroupReduction]
    row_epilogue: Callable[..., list[Any]]

    @classmethod
    def of(cls, f: Callable[..., Any] | None, epilogue: Epilogue, captured: Sequence[Any]) -> GroupReductions:
        """The group reductions of f, which was traced as `epilogue`."""
        reductions = group_reductions(epilogue)
        if not reductions:
            raise _refused(epilogue)

        def row_epilogue(*arguments: Any) -> list[Any]:
            return _row_outputs(epilogue.flat, arguments, captured, reductions)

        row_epilogue.__name__, row_epilogue.__wrapped__ = epilogue.name, f  # type: ignore[attr-defined]
        return cls(epilogue, captured, reductions, row_epilogue)

    def dtypes(self, out_dtypes: Sequence[np.dtype], row_epilogue: Epilogue) -> list[np.dtype]:
        """The dtypes of the outputs of `row_epilogue`, traced, from those of the epilogue's outputs.

        Raises:
          NotTileLocalError: an output still depends on several rows.
        """
        if reduces_rows(row_epilogue.program):
            raise _refused(self.epilogue)
        return [np.dtype(np.float32) if i in self.reductions else dtype for i, dtype in enumerate(out_dtypes)]

    def reduced(self, outputs: Sequence[jax.Array], offsets: jax.Array) -> list[jax.Array]:
        """The epilogue's outputs, from those of `row_epilogue`."""
        each = zip(outputs, self.epilogue.out_avals, strict=True)
        return [
            _by_group(self.reductions[i], x, offsets).astype(aval.dtype) if i in self.reductions else x
            for i, (x, aval) in enumerate(each)
        ]


def _refused(epilogue: Epilogue) -> NotTileLocalError:
    return NotTileLocalError(
        f"epilogue '{epilogue.name}': an output is computed from a reduction over rows. Beside groups a sum, maximum "
        "or minimum over rows (axis 0) of floats is of each group, (G, N), and can only be returned as it is; compute "
        "what follows from it outside"
    )


def _row_outputs(
    flat: Flat, arguments: Sequence[Any], captured: Sequence[Any], reductions: Mapping[int, GroupReduction]
) -> list[Any]:
    """The outputs of equations, with the values to be reduced in the place of the reductions."""
    values: dict[int, Any] = dict(enumerate(arguments))
    values |= {variable: captured[index] for index, variable in flat.constants.items()}

    def read(atom: Atom) -> Any:
        return atom.value if isinstance(atom, Literal) else values[atom]

    for equation in flat.equations:
        results = bind(equation.primitive, [read(atom) for atom in equation.inputs], equation.params)
        values.update(zip(equation.outputs, results, strict=True))
    outputs = list(map(read, flat.outputs))
    for i, (op, reduced, over_columns, _) in reductions.items():
        x = functools.reduce(jnp.add, [values[value].astype(jnp.float32) for value in reduced])
        outputs[i] = op.reduce(x, axis=1) if over_columns else x
    return outputs


def _by_group(reduction: GroupReduction, x: jax.Array, offsets: jax.Array) -> jax.Array:
    """The reduction of the rows of each group of x (M, ...), (G, ...) float32: 0 or an infinity for an empty group."""
    x = x.reshape(-1, math.prod(reduction.shape))
    rows, groups = RowGroups.of(offsets, x.shape[0]), offsets.shape[0] - 1
    reduced = _sum(x, rows, groups) if reduction.op is ReductionOp.SUM else _extreme(reduction.op, x, rows, groups)
    return reduced.reshape(groups, *reduction.shape)


def _sum(x: jax.Array, rows: RowGroups, groups: int) -> jax.Array:
    return jax.ops.segment_sum(rows.masked(x), rows.group_index, groups, indices_are_sorted=True)


def _extreme(op: ReductionOp, x: jax.Array, rows: RowGroups, groups: int) -> jax.Array:
    """A maximum or minimum of each group. Equal extremes share the cotangent equally, as in JAX's own reductions."""
    segment = jax.ops.segment_max if op is ReductionOp.MAX else jax.ops.segment_min

    @jax.custom_vjp
    def extreme(x: jax.Array, rows: RowGroups) -> jax.Array:
        inside = jnp.where(rows.is_in[:, None], x, op.neutral)
        return segment(inside, rows.group_index, groups, indices_are_sorted=True)

    def places(x: jax.Array, rows: RowGroups) -> tuple[jax.Array, jax.Array]:
        value = extreme(x, rows)
        return value, rows.masked(x == rows.for_each_row(value))

    def nowhere(x: jax.Array, rows: RowGroups) -> tuple[jax.Array, jax.Array]:
        return jnp.full_like(x, op.neutral, shape=(groups, x.shape[1])), jnp.zeros_like(x, bool)

    def forward(x: jax.Array, rows: RowGroups) -> tuple[jax.Array, Any]:
        # In a branch, x is in memory. Elsewhere XLA may compute it twice with different rounding, and then no element
        # would be equal to the extreme.
        value, is_found = lax.cond(rows.is_in.any(), places, nowhere, x, rows)
        return value, (is_found, rows)

    def backward(kept: Any, cotangent: jax.Array) -> tuple[jax.Array, None]:
        is_found, rows = kept
        share = cotangent / jnp.maximum(_sum(is_found.astype(jnp.float32), rows, groups), 1)
        return jnp.where(is_found, rows.for_each_row(share), 0.0), None

    extreme.defvjp(forward, backward)
    return extreme(x, rows)
