"""Jaxprs: which equation makes a variable, which equations read it; and the walk that opens calls."""

import jax
import jax.numpy as jnp
import pytest

from coda_jax.jaxprs.calls import callee, opened
from coda_jax.jaxprs.def_use import DefUse, definitions, free_variables
from coda_jax.jaxprs.evaluate import evaluate
from coda_jax.jaxprs.inline import Inliner


def function(x, y):
    a = jnp.sin(x)
    b = a * a
    c = b + y
    return c, a + 1.0, jnp.cos(y)


@pytest.fixture
def def_use():
    return DefUse(jax.make_jaxpr(function)(1.0, 2.0).jaxpr)


def names(equations):
    return [equation.primitive.name for equation in equations]


def test_makers_and_readers(def_use):
    sine, square, *_ = def_use.equations
    (x, y), (a,) = def_use.jaxpr.invars, sine.outvars
    assert def_use.maker(a) is sine and def_use.maker(x) is None
    assert (
        def_use.maker(square.invars[0]) is sine and def_use.maker(def_use.equations[3].invars[1]) is None
    )  # a literal
    assert names(def_use.readers(a)) == ["mul", "add"] and names(def_use.readers(y)) == ["add", "cos"]
    assert [def_use.number(equation) for equation in def_use.readers(a)] == [1, 3]
    assert names(def_use.read_by([y, a], "add")) == ["add", "add"]


def test_only_reader(def_use):
    sine, square, total, *_ = def_use.equations
    assert def_use.only_reader(square.outvars[0]) is total
    assert def_use.only_reader(sine.outvars[0]) is None  # two read it
    assert def_use.only_reader(total.outvars[0]) is None  # it is a result that no equation reads


def test_a_result_has_no_only_reader():
    found = DefUse(jax.make_jaxpr(lambda x: (y := jnp.sin(x), jnp.cos(y)))(1.0).jaxpr)
    assert found.only_reader(found.equations[0].outvars[0]) is None


def test_free_variables(def_use):
    _, square, total, *_ = def_use.equations
    _, y = def_use.jaxpr.invars
    assert free_variables([square, total]) == [square.invars[0], y]
    assert definitions([square, total]) == {*square.outvars, *total.outvars}


def test_slices(def_use):
    sine, square, total, shifted, cosine = def_use.equations
    (a,), (b,) = sine.outvars, square.outvars
    assert def_use.behind([b]) == {b, *total.outvars}
    assert def_use.needed([b]) == {id(equation) for equation in (sine, total, shifted, cosine)}  # without the square
    assert def_use.is_needed(a, [b]) and not def_use.is_needed(b, total.outvars)
    assert def_use.in_front_of({"add"}, {"mul"}) == {b, a, def_use.jaxpr.invars[1], def_use.jaxpr.invars[0]}


def test_an_inliner_opens_what_it_enters():
    """The context of an equation is the calls around it, from the outermost; a literal is a value of the walk's own."""
    closed = jax.make_jaxpr(jax.jit(lambda x: jax.jit(jnp.sin)(x) + jax.checkpoint(lambda y: y * 2.0)(x)))(1.0)
    seen = []

    def apply(equation, inputs, calls):
        seen.append((equation.primitive.name, *calls))
        return [f"{equation.primitive.name}({', '.join(inputs)})"]

    def enter(equation, calls):
        name = equation.params.get("name")
        return None if name is None else (*opened(callee(equation)), (*calls, name))

    inliner = Inliner(apply, enter, lambda literal: f"<{float(literal.val)}>")
    (found,) = inliner.results(closed.jaxpr, closed.consts, ["x"], ())
    outer = closed.jaxpr.eqns[0].params["name"]
    assert seen[0] == ("sin", outer, "sin") and [one[1:] for one in seen[1:]] == [(outer,)] * 2
    assert found == f"add(sin(x), {seen[1][0]}(x))"
    assert evaluate(closed.jaxpr, closed.consts, ["x"], lambda e, inputs: apply(e, map(str, inputs), ())) == [
        "add(sin(x), mul(x, 2.0))"
    ]
