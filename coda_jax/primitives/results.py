"""Which axis of an epilogue's outputs the rows index."""

from __future__ import annotations

from typing import Any

from coda_jax.epilogue import Axis, Epilogue, Kind
from coda_jax.epilogue.flatten import Literal
from coda_jax.epilogue.values import same_size


def row_axes(epilogue: Epilogue, m: Any) -> tuple[int | None, ...]:
    """For each flat output the axis that the M rows index, or None. Sizes alone do not tell where M == N."""
    program, finish = epilogue.program, epilogue.program.finishing
    by_rows: dict[int, bool] = {}
    for variable, source, index in finish.inputs:
        if source == "reduction":
            by_rows[variable] = program.reductions[index].axis is Axis.ROW
        else:
            by_rows[variable] = program.operands[index].kind is Kind.COLUMN_VECTOR
    for equation in finish.equations:
        depends = any(by_rows[atom] for atom in equation.inputs if not isinstance(atom, Literal))
        by_rows.update(dict.fromkeys(equation.outputs, depends))

    axes: list[int | None] = [0] * program.num_outputs
    for output, atom in finish.outputs:
        shape = epilogue.out_avals[output].shape
        indexed = not isinstance(atom, Literal) and by_rows[atom]
        axes[output] = next((i for i, size in enumerate(shape) if indexed and same_size(size, m)), None)
    return tuple(axes)
