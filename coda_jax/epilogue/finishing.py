"""Equations over finished reductions, which XLA runs after the kernel, and the axes of their results that are rows."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from coda_jax.epilogue import elementwise
from coda_jax.epilogue.analysis import Analysis
from coda_jax.epilogue.flatten import Atom, Equation, Literal
from coda_jax.epilogue.program import Axis, Finish, Reduction
from coda_jax.epilogue.values import ROW, same_shape, same_size


def finishing(analysis: Analysis, outputs: list[tuple[int, Atom]]) -> tuple[Finish, list[Reduction]]:
    """The equations that `outputs` (output number, variable) need, canonically numbered, and their reductions."""
    needed = {atom for _, atom in outputs if isinstance(atom, int)}
    kept: list[Equation] = []
    for equation in reversed(analysis.sequence):
        if needed.intersection(equation.outputs):
            kept.append(equation)
            needed.update(atom for atom in equation.inputs if isinstance(atom, int))
    sources = [(variable, *source) for variable, source in analysis.sources.items() if variable in needed]
    reductions = sorted({index for _, source, index in sources if source == "reduction"})
    numbers: dict[int, int] = {}
    inputs: list[tuple[int, str, int]] = []
    rows: dict[Atom, frozenset[int]] = {}
    for variable, source, index in sources:
        rows[variable] = _row_axes_of_source(analysis, variable, source, index)
        numbers[variable] = len(numbers)
        inputs.append((numbers[variable], source, reductions.index(index) if source == "reduction" else index))

    def read(atom: Atom) -> Atom:
        return atom if isinstance(atom, Literal) else numbers[atom]

    lines = [f"f{variable} = {source} {index}" for variable, source, index in inputs]
    equations: list[Equation] = []
    for equation in kept[::-1]:
        arguments = tuple(map(read, equation.inputs))
        for variable in equation.outputs:
            numbers[variable] = len(numbers)
            rows[variable] = _row_axes(analysis, equation, rows, analysis.flat.aval(variable).shape)
        results = tuple(numbers[variable] for variable in equation.outputs)
        equations.append(replace(equation, inputs=arguments, outputs=results, source_info=None, call=""))
        avals = ", ".join(f"f{numbers[v]}:{_aval_text(analysis.flat.avals[v])}" for v in equation.outputs)
        called = f"{equation.name}({', '.join(map(_atom_text, arguments))})"
        lines.append(f"{avals} = {called} {_params_text(equation.params)}".rstrip())
    finished = tuple((output, read(atom)) for output, atom in outputs)
    lines += [f"output {output} = {_atom_text(atom)}" for output, atom in finished]
    row_axes = tuple(tuple(sorted(rows.get(atom, ()))) for _, atom in outputs)
    mixes = _mixes_rows(kept[::-1], rows, outputs)
    finish = Finish(tuple(inputs), tuple(equations), finished, row_axes, mixes, "\n".join(lines))
    return finish, [analysis.reductions[index] for index in reductions]


# Operations that keep rows apart, beside elementwise ones.
_BY_ROW = frozenset({"broadcast_in_dim", "convert_element_type", "copy", "reshape", "select_n", "squeeze", "transpose"})


def _mixes_rows(
    equations: Sequence[Equation], rows: Mapping[Atom, frozenset[int]], outputs: Sequence[tuple[int, Atom]]
) -> bool:
    """True if an equation over values with rows, finished reductions among them, may combine several rows.

    Args:
      equations: in order.
      rows: the axes of their variables, and of what they read, that are rows.
      outputs: as of `finishing`.
    """
    behind = {atom for atom, axes in rows.items() if axes}  # what is made of rows
    for equation in equations:
        if behind.intersection(atom for atom in equation.inputs if isinstance(atom, int)):
            is_by_row = equation.name in _BY_ROW or equation.name in elementwise.OPERATIONS
            if not is_by_row and not _reduces_others(equation, rows):
                return True
            behind.update(equation.outputs)
    return any(atom in behind and not rows[atom] for _, atom in outputs)


def _reduces_others(equation: Equation, rows: Mapping[Atom, frozenset[int]]) -> bool:
    """True for a reduction over axes beside that of the rows."""
    axes = rows.get(equation.inputs[0], frozenset())
    return equation.name.startswith("reduce_") and bool(axes) and axes.isdisjoint(equation.params.get("axes", axes))


def _row_axes_of_source(analysis: Analysis, variable: int, source: str, index: int) -> frozenset[int]:
    """The axes of a finished reduction, or of an operand as f sees it, that are indexed by the rows."""
    if source == "reduction":
        return frozenset([0] if analysis.reductions[index].axis is Axis.ROW else [])
    operand, rank = analysis.operands[index], len(analysis.flat.aval(variable).shape)
    return frozenset(axis for axis, tag in enumerate(operand.kind.tags(operand, rank)) if tag == ROW)


def _row_axes(
    analysis: Analysis, equation: Equation, rows: Mapping[Atom, frozenset[int]], shape: Sequence[Any]
) -> frozenset[int]:
    """The axes of a result of `equation`, of this shape, that are indexed by the rows, from those of its inputs.

    Sizes alone do not tell: M may be equal to N, or 1.
    """
    inputs = [(rows.get(atom, frozenset()), analysis.flat.aval(atom).shape) for atom in equation.inputs]
    if not any(axes for axes, _ in inputs):
        return frozenset()
    (axes, source), params = inputs[0], equation.params
    match equation.name:
        case "broadcast_in_dim":
            places = params["broadcast_dimensions"]
            return frozenset(places[axis] for axis in axes if same_size(source[axis], shape[places[axis]]))
        case "transpose":
            return frozenset(params["permutation"].index(axis) for axis in axes)
        case "squeeze":
            return _without(axes, params["dimensions"])
        case "reshape":
            return frozenset(place for axis in axes for place in _reshaped(axis, source, shape))
        case name if name.startswith(("reduce_", "arg")) and "axes" in params:
            return _without(axes, params["axes"])
    have_one_shape = all(source == () or same_shape(source, shape) for _, source in inputs)
    if have_one_shape or equation.name in elementwise.OPERATIONS:
        return frozenset(axis for axes, source in inputs for axis in axes if same_size(source[axis], shape[axis]))
    return frozenset([axis for axis, size in enumerate(shape) if same_size(size, analysis.m)][:1])


def _without(axes: frozenset[int], dropped: Sequence[int]) -> frozenset[int]:
    """The new positions of axes when others are dropped."""
    return frozenset(axis - sum(other < axis for other in dropped) for axis in axes if axis not in dropped)


def _reshaped(axis: int, source: Sequence[Any], shape: Sequence[Any]) -> list[int]:
    """The position of an axis after a reshape that keeps it; empty if the axis is split or merged."""
    before = math.prod(source[:axis])
    places = [
        place
        for place, size in enumerate(shape)
        if same_size(size, source[axis]) and same_size(math.prod(shape[:place]), before)
    ]
    return places[:1]


def _aval_text(aval: Any) -> str:
    return f"{aval.dtype}[{','.join(map(_dimension_text, aval.shape))}]"


def _dimension_text(dimension: Any) -> str:
    """A dimension as text. A symbolic one has the id of its scope, as its name is unique only there."""
    return str(dimension) if isinstance(dimension, int) else f"{dimension}@{id(dimension.scope):x}"


def _atom_text(atom: Atom) -> str:
    return f"{atom.dtype} {np.asarray(atom.value).tobytes().hex()}" if isinstance(atom, Literal) else f"f{atom}"


def _params_text(params: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in sorted(params.items()))
