"""The prelude of an epilogue: what it computes of its vectors and scalars alone, which XLA does once before the kernel.

    coda.gemm(x, w, sums, scale, epilogue=lambda acc, sums, scale: acc * jax.lax.rsqrt(sums / 4096 + 1e-6) * scale)

computes a reciprocal square root for each element, but only one for each row is different. `hoisted` gives the same
product with rsqrt(sums / 4096 + 1e-6) as an operand in the place of `sums`. This happens before the primitive is bound,
so that JAX differentiates it: the derivative's epilogue is shorter, too.

XLA's kernel for a vector takes some microseconds, as long as a cheap operation on every element of a product of common
size. So a prelude of fewer than `LEAST` instructions stays in the epilogue.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from coda_jax.epilogue import elementwise
from coda_jax.epilogue.dtypes import FLOATS
from coda_jax.epilogue.flatten import Atom, Constants, Equation, Flat, Literal, bind_equation, flatten, run
from coda_jax.epilogue.operand import Operand
from coda_jax.epilogue.trace import Epilogue
from coda_jax.epilogue.user_code import default_types
from coda_jax.epilogue.values import same_shape, same_size
from coda_jax.jaxprs.calls import CUSTOM_DERIVATIVES, callee

LEAST = 4  # instructions for an element: fewer than those of a sigmoid, a square root, a division, an exponential
_KEEPS_AXES = frozenset(("copy", "copy_p", "stop_gradient", "convert_element_type", "add_any"))
_MOVES_AXES = frozenset(("broadcast_in_dim", "reshape", "squeeze"))


class Hoisted(NamedTuple):
    """An epilogue and its operands, with the prelude taken out.

    Attributes:
      epilogue: a function of acc, the operands that it still reads, and the new ones.
      kept: the numbers of the operands that it still reads.
      new_operands: the results of the prelude.
    """

    epilogue: Callable[..., Any]
    kept: list[int]
    new_operands: list[jax.Array]


@dataclass(frozen=True)
class _Vector:
    """A value that varies along one axis at most.

    Attributes:
      axis: that one, in the epilogue; None for a scalar.
      along_rows: whether this axis is the rows.
      shape: of the value's array before the kernel.
    """

    axis: int | None
    along_rows: bool
    shape: tuple[Any, ...]


def hoisted(epilogue: Epilogue, operands: Sequence[Any], captured: Sequence[Any]) -> Hoisted | None:
    """The same epilogue without its arithmetic on vectors and scalars; None if that is less than `LEAST` instructions.

    Args:
      epilogue: traced.
      operands: its arrays; None for an operand that has to stay, such as one in several arrays.
      captured: the arrays that the function closed over.
    """
    flat = epilogue.flat
    if any(same_size(size, 1) for size in flat.avals[0].shape):
        return None
    vectors = _Vectors(flat, _leaves(epilogue, operands, captured))
    roots = vectors.worth_making()
    if not roots:
        return None
    values = _arrays(flat, operands, captured)
    with default_types():
        new_operands = vectors.arrays(
            roots, {variable: _as_seen(epilogue, variable, x) for variable, x in values.items()}
        )
    replaced = {variable: roots.index(first) for variable, first in vectors.equals.items() if first in roots}
    needed = _needed(flat, replaced)
    kept = [i for i in range(len(operands)) if i + 1 in needed]

    def rest(acc: jax.Array, *arguments: jax.Array) -> list[jax.Array]:
        seen = {0: acc, **{i + 1: x for i, x in zip(kept, arguments, strict=False)}}
        seen |= {variable: captured[index] for index, variable in flat.constants.items()}
        seen |= {v: vectors.in_epilogue(v, arguments[len(kept) + i]) for v, i in replaced.items() if v in needed}
        left = [one for one in flat.equations if _is_left(one, needed, replaced)]
        return run(left, seen, flat.outputs, is_traced=True)

    user_names = epilogue.program.user_names
    assert user_names is not None
    if not captured:
        shapes = tuple(None if x is None else x.shape for x in operands)
        rest.traced = epilogue.parts.setdefault(("rest", shapes), {})  # type: ignore[attr-defined]
    _name(rest, epilogue, [*map(user_names.operand, kept), *(f"hoisted_{i}" for i in range(len(new_operands)))])
    return Hoisted(rest, kept, new_operands)


def _leaves(epilogue: Epilogue, operands: Sequence[Any], captured: Sequence[Any]) -> dict[int, _Vector]:
    """The variables that are vectors or scalars in memory."""
    vectors = {}
    kinds: Sequence[Operand] = epilogue.program.operands
    for variable, x in _arrays(epilogue.flat, operands, captured).items():
        operand = kinds[_index(epilogue.flat, variable, len(operands))]
        tags = operand.kind.tags(operand, len(epilogue.flat.avals[variable].shape))
        axes = [axis for axis, tag in enumerate(tags) if tag is not None]
        if len(axes) <= 1 and operand.kind.mark is None:
            vectors[variable] = _Vector(axes[0] if axes else None, operand.has_rows, tuple(x.shape))
    return vectors


def _arrays(flat: Flat, operands: Sequence[Any], captured: Sequence[Any]) -> dict[int, Any]:
    arrays = {variable: x for variable, x in enumerate(operands, 1) if x is not None}
    return arrays | {variable: captured[index] for index, variable in flat.constants.items()}


def _index(flat: Flat, variable: int, count: int) -> int:
    """The number of a variable's operand."""
    captured = {constant: index for index, constant in flat.constants.items()}
    return count + captured[variable] if variable in captured else variable - 1


def _as_seen(epilogue: Epilogue, variable: int, x: Any) -> jax.Array:
    return lax.convert_element_type(x, epilogue.flat.avals[variable].dtype)


def _needed(flat: Flat, replaced: Container[int]) -> set[int]:
    """The variables that are still read if these are replaced by operands."""
    needed = {atom for atom in flat.outputs if isinstance(atom, int)}
    for equation in reversed(flat.equations):
        if _is_left(equation, needed, replaced):
            needed.update(atom for atom in equation.inputs if isinstance(atom, int))
    return needed


def _is_left(equation: Equation, needed: set[int], replaced: Container[int]) -> bool:
    return any(variable in needed and variable not in replaced for variable in equation.outputs)


def _name(f: Callable[..., Any], epilogue: Epilogue, operands: Sequence[str]) -> None:
    """Gives f the name of the epilogue's function, and its parameters the operands' names, if these are identifiers."""
    f.__name__ = epilogue.name
    names = ["acc", *operands]
    if len(set(names)) == len(names) and all(map(str.isidentifier, names)):
        parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in names]
        f.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]


class _Vectors:
    """The variables of equations that are vectors or scalars, and their costs."""

    def __init__(self, flat: Flat, leaves: dict[int, _Vector]):
        self.flat = flat
        self.vectors: dict[int, _Vector] = dict(leaves)
        self.makers: dict[int, Equation] = {}
        self.costs: dict[int, int] = {}  # instructions of the variable's own operation
        self.equals: dict[int, int] = {}  # the first variable with the same operation and inputs
        self._first: dict[Any, int] = {}
        for equation in flat.equations:
            self._equation(equation)

    def _equation(self, equation: Equation) -> None:
        if len(equation.outputs) != 1 or any(isinstance(x, int) and x not in self.vectors for x in equation.inputs):
            return
        (out,) = equation.outputs
        cost = _cost(equation)
        vector = (
            self._moved(equation) if equation.name in _MOVES_AXES else None if cost is None else self._one(equation)
        )
        if vector is None or not any(isinstance(x, int) for x in equation.inputs):
            return
        self.vectors[out], self.makers[out], self.costs[out] = vector, equation, cost or 0
        how = out if equation.name in CUSTOM_DERIVATIVES else (equation.name, str(equation.params))
        self.equals[out] = self._first.setdefault((how, *map(self._key, equation.inputs)), out)

    def _key(self, atom: Atom) -> Any:
        if isinstance(atom, Literal):
            return str(atom.dtype), atom.value.tobytes()
        root = self._root(atom)
        return self.equals.get(root, root)

    def _one(self, equation: Equation) -> _Vector | None:
        """The result of an elementwise operation; None if its inputs differ in their axes or shapes."""
        inputs = [self.vectors[x] for x in equation.inputs if isinstance(x, int)]
        along = list(dict.fromkeys(x for x in inputs if x.axis is not None))
        if len(along) > 1 and any(x.axis != along[0].axis or not same_shape(x.shape, along[0].shape) for x in along):
            return None
        if any(x.along_rows != along[0].along_rows for x in along):
            return None
        vector = along[0] if along else inputs[0] if inputs else None
        if vector is not None and equation.name in CUSTOM_DERIVATIVES:  # its function runs with the shapes of its trace
            avals = [self.flat.aval(x) for x in (*equation.inputs, *equation.outputs)]
            if vector.axis is None:
                vector = replace(vector, shape=())
            if not all(same_shape(aval.shape, vector.shape) for aval in avals if aval.shape):
                return None
        return vector

    def _moved(self, equation: Equation) -> _Vector | None:
        (x, *more) = equation.inputs
        if more or not isinstance(x, int):
            return None
        vector, shape = self.vectors[x], self.flat.aval(x).shape
        if vector.axis is None:
            return vector
        params, out = equation.params, self.flat.avals[equation.outputs[0]].shape
        if equation.name == "broadcast_in_dim":
            axis = params["broadcast_dimensions"][vector.axis]
        elif equation.name == "squeeze":
            axis = vector.axis - sum(one < vector.axis for one in params["dimensions"])
        else:
            long = [axis for axis, size in enumerate(shape) if not same_size(size, 1)]
            after = [axis for axis, size in enumerate(out) if not same_size(size, 1)]
            if params.get("dimensions") is not None or len(long) != len(after) or vector.axis not in long:
                return None
            axis = after[long.index(vector.axis)]
        return replace(vector, axis=axis) if same_size(out[axis], shape[vector.axis]) else None

    def _root(self, variable: int) -> int:
        """The variable before its axes were changed."""
        while variable in self.makers and self.makers[variable].name in _MOVES_AXES:
            (source,) = self.makers[variable].inputs
            assert isinstance(source, int)
            variable = source
        return variable

    def _behind(self, variable: int) -> set[int]:
        """The variables that this one is computed from, itself among them."""
        reached: set[int] = set()
        open_ = [variable]
        while open_:
            one = open_.pop()
            if one in self.makers and one not in reached:
                reached.add(one)
                open_ += [x for x in self.makers[one].inputs if isinstance(x, int)]
        return reached

    def worth_making(self) -> list[int]:
        """The vectors of at least `LEAST` instructions that an operation on more than vectors reads."""
        variables: dict[int, None] = {}
        for equation in self.flat.equations:
            if equation.outputs and equation.outputs[0] in self.makers:
                continue
            for x in equation.inputs:
                if isinstance(x, int) and x in self.makers:
                    variables[self.equals.get(root := self._root(x), root)] = None
        return [
            x
            for x in variables
            if self.flat.avals[x].dtype.name in FLOATS and sum(self.costs[one] for one in self._behind(x)) >= LEAST
        ]

    def arrays(self, variables: Sequence[int], values: dict[int, jax.Array]) -> list[jax.Array]:
        """The arrays of these variables, from those of the leaves."""
        needed = set().union(*map(self._behind, variables))
        for equation in self.flat.equations:
            if needed.isdisjoint(equation.outputs):
                continue
            (out,) = equation.outputs
            inputs: list[Any] = [values[x] if isinstance(x, int) else x.value for x in equation.inputs]
            values[out] = inputs[0] if equation.name in _MOVES_AXES else self._computed(equation, inputs)
        return [values[x] for x in variables]

    def _computed(self, equation: Equation, inputs: list[Any]) -> jax.Array:
        vector = self.vectors[equation.outputs[0]]
        shapes = [vector.shape] * len(inputs)
        if equation.name in CUSTOM_DERIVATIVES:  # its function was traced with its own shapes
            shapes = [self.flat.aval(atom).shape for atom in equation.inputs]
        each = zip(inputs, shapes, strict=True)
        (out,) = bind_equation(equation, [_broadcast(jnp.asarray(x), shape) for x, shape in each])
        return out

    def in_epilogue(self, variable: int, x: jax.Array) -> jax.Array:
        """The variable in its shape in the epilogue, from the operand there."""
        vector, aval = self.vectors[variable], self.flat.avals[variable]
        x = lax.convert_element_type(x, aval.dtype)
        if vector.axis is None:
            return jnp.broadcast_to(x.reshape(()), aval.shape)
        x = lax.squeeze(x, [1] if vector.along_rows else range(x.ndim - 1))
        return lax.broadcast_in_dim(x, aval.shape, (vector.axis,))


def _broadcast(x: jax.Array, shape: tuple[Any, ...]) -> jax.Array:
    """A scalar broadcast to `shape`; a vector has this shape already."""
    return x if same_shape(x.shape, shape) else jnp.broadcast_to(x.reshape(()), shape)


def _cost(equation: Equation) -> int | None:
    """Instructions of an elementwise operation; None for another operation."""
    if equation.name in CUSTOM_DERIVATIVES:
        body = flatten(callee(equation), Constants(), inline_custom_derivatives=True)
        costs = [0 if one.name in _MOVES_AXES else _cost(one) for one in body.equations]
        return None if body.constants or None in costs else sum(cost or 0 for cost in costs)
    if equation.name in _KEEPS_AXES:
        return int(equation.name == "add_any")
    operation = elementwise.OPERATIONS.get(equation.name)
    if operation is None:
        return None
    return 1 + equation.params["y"].bit_length() if equation.name == "integer_pow" else operation.instructions
