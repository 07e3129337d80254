"""Inlining: a jaxpr with nested calls becomes one straight list of equations over numbered variables."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex_core
from jax.extend import source_info_util

from coda_jax.epilogue import elementwise
from coda_jax.epilogue.dtypes import is_rounded
from coda_jax.epilogue.rounding import round_to
from coda_jax.jaxprs.bind import bind
from coda_jax.jaxprs.calls import CALLS, CUSTOM_DERIVATIVES, callee, opened
from coda_jax.jaxprs.inline import Body, Inliner


@dataclass(frozen=True, eq=False)
class Literal:
    """A constant of rank 0 in an equation. Compared by identity: the value may be NaN."""

    value: np.generic | np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return ()

    @property
    def dtype(self) -> np.dtype:
        return self.value.dtype


Atom = int | Literal


@dataclass(frozen=True)
class Equation:
    """`outputs = primitive(inputs, **params)`; inputs and outputs are variable numbers or literals."""

    primitive: jex_core.Primitive
    params: dict[str, Any]
    inputs: tuple[Atom, ...]
    outputs: tuple[int, ...]
    source_info: Any
    call: str = ""

    @property
    def name(self) -> str:
        return self.primitive.name

    def where(self) -> str:
        """The operation, its function and the user's line: "'sort' in 'median' at train.py:12:4 (f)"."""
        inside = f" in '{self.call}'" if self.call not in ("", self.name) else ""
        line = source_info_util.summarize(self.source_info)
        return f"'{self.name}'{inside}{' at ' if line else ''}{line}"


@dataclass
class Constants:
    """The arrays that a function closes over, each once, in the order of their first use."""

    arrays: list[Any] = field(default_factory=list)
    _index: dict[int, int] = field(default_factory=dict)

    def index(self, array: Any) -> int:
        if id(array) not in self._index:
            self._index[id(array)] = len(self.arrays)
            self.arrays.append(array)
        return self._index[id(array)]


@dataclass
class Flat:
    """Equations without nested calls.

    Variables 0 .. num_inputs-1 are the inputs; `constants[i]` is the variable of captured array i.
    """

    num_inputs: int
    avals: list[Any]
    equations: list[Equation] = field(default_factory=list)
    outputs: tuple[Atom, ...] = ()
    constants: dict[int, int] = field(default_factory=dict)

    def new(self, aval: Any) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def aval(self, atom: Atom) -> Any:
        return atom if isinstance(atom, Literal) else self.avals[atom]


def _inlined(eqn: Any) -> Any:
    """The jaxpr that a call equation calls."""
    called = callee(eqn)
    # From 0.12 on, JAX computes exp(-x * x), the derivative of erf, from the bits of x, for a last digit that a
    # kernel's exp does not have.
    operations = [inner.primitive.name for inner in opened(called)[0].eqns]
    has_floats = eqn.invars and jnp.issubdtype(eqn.invars[0].aval.dtype, jnp.floating)
    if "bitcast_convert_type" in operations and has_floats and str(called) == _erf_derivative(eqn.invars[0].aval):
        return jax.make_jaxpr(lambda x: lax.exp(-(x * x)))(eqn.invars[0].aval)
    return called


def _erf_derivative(aval: Any) -> str:
    """The function that JAX calls in the derivative of erf, as text."""
    derivative = jax.make_jaxpr(lambda x: jax.jvp(lax.erf, (x,), (x,))[1])(aval)
    calls = [eqn for eqn in derivative.jaxpr.eqns if eqn.primitive.name in CUSTOM_DERIVATIVES]
    return str(callee(calls[0])) if calls else ""


def flatten(jaxpr: Any, captured: Constants, *, inline_custom_derivatives: bool) -> Flat:
    """Inlines every nested call of the closed jaxpr and drops equations that no output needs.

    Constants, nested ones too, become variables, and their arrays are listed in `captured`. With
    `inline_custom_derivatives` False calls of custom_jvp and custom_vjp functions stay, so that the result can be
    differentiated.
    """
    flat = Flat(len(jaxpr.in_avals), list(jaxpr.in_avals))
    opens = CALLS | CUSTOM_DERIVATIVES if inline_custom_derivatives else CALLS

    def constant(array: Any) -> int:
        index = captured.index(array)
        if index not in flat.constants:
            flat.constants[index] = flat.new(jax.typeof(array))
        return flat.constants[index]

    def literal(atom: jex_core.Literal) -> Atom:
        value = np.asarray(atom.val, jax.typeof(atom.val).dtype)
        return constant(atom.val) if value.ndim else Literal(value)

    def body(jaxpr: Any, call: Any) -> tuple[jex_core.Jaxpr, Sequence[int], Any]:
        inner, consts = opened(jaxpr)
        return inner, list(map(constant, consts)), call

    # The body of a jitted function is traced once and may have the line of another caller. The line of the outermost
    # call is right.
    def enter(eqn: Any, call: Any) -> Body:
        return body(_inlined(eqn), eqn if call is None else call) if eqn.primitive.name in opens else None

    def apply(eqn: Any, inputs: list[Atom], call: Any) -> Sequence[int]:
        variables = tuple(flat.new(v.aval) for v in eqn.outvars)
        source = (eqn if call is None else call).source_info
        called = "" if call is None else str(call.params.get("name", call.primitive.name))
        flat.equations.append(Equation(eqn.primitive, eqn.params, tuple(inputs), variables, source, called))
        return variables

    outermost, constants, _ = body(jaxpr, None)
    flat.outputs = tuple(Inliner(apply, enter, literal).results(outermost, constants, range(flat.num_inputs)))
    drop_unused(flat)
    return flat


def drop_unused(flat: Flat) -> None:
    """Removes equations whose outputs nothing needs. Those without outputs have side effects and stay."""
    needed = {atom for atom in flat.outputs if isinstance(atom, int)}
    kept: list[Equation] = []
    for equation in reversed(flat.equations):
        if not equation.outputs or needed.intersection(equation.outputs):
            kept.append(equation)
            needed.update(atom for atom in equation.inputs if isinstance(atom, int))
    flat.equations = kept[::-1]


def keep_used_constants(flats: Sequence[Flat], captured: Constants) -> list[Any]:
    """The captured arrays that some equation or output reads, renumbered in `flats`."""
    read: set[int] = set()
    for flat in flats:
        atoms = {*flat.outputs, *(atom for equation in flat.equations for atom in equation.inputs)}
        read |= {index for index, variable in flat.constants.items() if variable in atoms}
    order = sorted(read)
    for flat in flats:
        flat.constants = {order.index(i): variable for i, variable in flat.constants.items() if i in read}
    return [captured.arrays[index] for index in order]


def call(flat: Flat, arguments: Sequence[Any], captured: Sequence[Any]) -> list[Any]:
    """Runs the equations with XLA; operations on 16-bit floats round as they do in a kernel."""
    values: dict[int, Any] = dict(enumerate(arguments))
    values.update({variable: captured[index] for index, variable in flat.constants.items()})
    return run(flat.equations, values, flat.outputs)


def run(
    equations: Sequence[Equation], values: dict[int, Any], outputs: Sequence[Atom], *, is_traced: bool = False
) -> list[Any]:
    """The outputs of equations over variables, from the values of those that are inputs.

    Args:
      is_traced: whether an epilogue is traced: then casts stay casts, for the language has no arithmetic that rounds.
    """
    bind_one = _bind_again if is_traced else bind_equation

    def read(atom: Atom) -> Any:
        return atom.value if isinstance(atom, Literal) else values[atom]

    for equation in equations:
        results = bind_one(equation, [read(atom) for atom in equation.inputs])
        values.update(zip(equation.outputs, results, strict=True))
    return [read(atom) for atom in outputs]


def bind_equation(equation: Equation, inputs: Sequence[Any]) -> Sequence[Any]:
    """Evaluates one equation as a kernel does: in float32, rounded once to a 16-bit type."""

    def rounded(x: Any) -> bool:
        return is_rounded(x.dtype)

    name, params = equation.name, equation.params
    if name in CUSTOM_DERIVATIVES:
        return _bind_custom(equation, inputs)
    if name == "convert_element_type" and is_rounded(params["new_dtype"]):
        return [elementwise.apply(name, list(inputs), {"dtype": np.dtype(params["new_dtype"]).name})]
    operation = elementwise.OPERATIONS.get(name)
    widened = name == "reduce_sum" or (operation is not None and not operation.exact)
    widened = widened and params.get("out_dtype") is None
    if not widened or not any(map(rounded, inputs)):
        return bind(equation.primitive, inputs, equation.params)
    dtype = next(x.dtype for x in inputs if rounded(x))
    widened_inputs = [lax.convert_element_type(x, jnp.float32) if rounded(x) else x for x in inputs]
    (out,) = bind(equation.primitive, widened_inputs, params)
    return [round_to(out, dtype) if out.dtype == jnp.float32 else out]


def _bind_again(equation: Equation, inputs: Sequence[Any]) -> Sequence[Any]:
    """The equation as it was traced, of other inputs."""
    is_custom = equation.name in CUSTOM_DERIVATIVES
    return bind(equation.primitive, _differentiable(equation, inputs) if is_custom else inputs, equation.params)


def _differentiable(equation: Equation, inputs: Sequence[Any]) -> list[Any]:
    """The inputs of a call of a custom_jvp or custom_vjp function, without derivatives of arrays that it closes over.

    JAX raises where such an array of a custom_vjp function is differentiated. Here all of them are arguments.
    """
    closed_over = equation.params.get("num_consts", 0) if equation.name != "custom_jvp_call" else 0
    return [*map(lax.stop_gradient, inputs[:closed_over]), *inputs[closed_over:]]


def _bind_custom(equation: Equation, inputs: Sequence[Any]) -> Sequence[Any]:
    """A call of a custom_jvp or custom_vjp function: its value by `call`, its derivative by its own rule."""
    inputs = _differentiable(equation, inputs)
    constants = Constants()
    body = flatten(callee(equation), constants, inline_custom_derivatives=False)
    if not any(is_rounded(aval.dtype) for aval in body.avals):
        return bind(equation.primitive, inputs, equation.params)

    def value(*inputs: Any) -> list[Any]:
        return call(body, inputs, constants.arrays)

    def plain(*inputs: Any) -> Sequence[Any]:
        return list(bind(equation.primitive, inputs, equation.params))

    if equation.name == "custom_jvp_call":
        with_jvp = jax.custom_jvp(value)
        with_jvp.defjvp(lambda primals, tangents: (value(*primals), jax.jvp(plain, primals, tangents)[1]))
        return with_jvp(*inputs)
    with_vjp = jax.custom_vjp(value)
    with_vjp.defvjp(lambda *inputs: (value(*inputs), jax.vjp(plain, *inputs)[1]), lambda pullback, ct: pullback(ct))
    return with_vjp(*inputs)
