"""Merges the maximum of all rows' or columns' maxima into one maximum of all elements."""

import math
from typing import Any

from coda_jax.epilogue.flatten import Atom, Equation, Flat, drop_unused
from coda_jax.epilogue.values import same_size

_MOVES = ("broadcast_in_dim", "reshape", "squeeze")


def _elements(flat: Flat, atom: Atom) -> Any:
    return math.prod(flat.aval(atom).shape)


def merge_maxima(flat: Flat) -> None:
    """Replaces jnp.max(jnp.max(x, axis)) by jnp.max(x), if nothing else reads the inner maximum."""
    made_by = {variable: equation for equation in flat.equations for variable in equation.outputs}
    read = [atom for equation in flat.equations for atom in equation.inputs] + list(flat.outputs)

    def inner_maximum(equation: Equation) -> Equation | None:
        """The maximum that this equation alone reads, directly or after axes of size 1 change."""
        (x,) = equation.inputs
        maker = made_by.get(x) if isinstance(x, int) else None
        if maker is None or read.count(x) != 1:
            return None
        if maker.name == "reduce_max":
            return maker
        if maker.name not in _MOVES or not same_size(_elements(flat, maker.inputs[0]), _elements(flat, x)):
            return None
        return inner_maximum(maker)

    equations: list[Equation] = []
    for equation in flat.equations:
        is_of_all = equation.name == "reduce_max" and flat.avals[equation.outputs[0]].shape == ()
        inner = inner_maximum(equation) if is_of_all else None
        while inner is not None:
            x = inner.inputs[0]
            params = {**inner.params, "axes": tuple(range(len(flat.aval(x).shape)))}
            equation = Equation(inner.primitive, params, (x,), equation.outputs, equation.source_info, equation.call)
            inner = inner_maximum(equation)
        equations.append(equation)
    flat.equations = equations
    drop_unused(flat)
