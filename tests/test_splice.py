"""Jaxprs that are put together of equations and of traced functions."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from coda_jax.jaxprs.splice import Splice


def test_an_equation_is_replaced_and_the_others_stay():
    constant = np.arange(3.0, dtype=np.float32)
    closed = jax.make_jaxpr(lambda x, y: jnp.tanh(jnp.sin(x) * y) + constant)(jnp.ones(3), jnp.ones(3))
    splice = Splice(closed)
    for equation in closed.jaxpr.eqns:
        if equation.primitive.name == "mul":
            rest = splice.put(lambda values: [sum(values.values()), jnp.ones(2)], equation.invars, equation.outvars)
        else:
            splice.keep(equation)
    x, y = jnp.asarray([0.1, 0.2, 0.3]), jnp.asarray([3.0, 4.0, 5.0])
    (found,) = core.jaxpr_as_fun(splice.rewritten())(x, y)
    np.testing.assert_allclose(found, jnp.tanh(jnp.sin(x) + y) + constant, rtol=1e-6)
    assert [x.aval.shape for x in rest] == [(2,)]
    kept = [e for e in splice.rewritten().eqns if e.primitive.name in ("sin", "tanh")]
    assert [str(e.source_info.traceback) for e in kept] == [
        str(e.source_info.traceback) for e in closed.eqns if e.primitive.name in ("sin", "tanh")
    ]


def test_the_cast_of_a_number_is_evaluated_as_jax_does():
    closed = jax.make_jaxpr(lambda x: jnp.where(x > 0, x, -jnp.inf))(jnp.ones(3))
    (call,) = (e for e in closed.jaxpr.eqns if "jaxpr" in e.params)
    inner, splice = call.params["jaxpr"], Splice(closed)
    values = dict(zip(inner.jaxpr.invars, call.invars, strict=True))
    names = []
    for equation in inner.jaxpr.eqns:
        inputs = [x if isinstance(x, core.Literal) else values[x] for x in equation.invars]
        values.update(zip(equation.outvars, splice.take(equation, inputs), strict=True))
        names.append(equation.primitive.name)
    found = [e.primitive.name for e in splice.closed(splice.inputs).eqns]
    assert "convert_element_type" in names and found == [x for x in names if x != "convert_element_type"]


def test_an_effect_is_of_the_new_variable():
    def function(x):
        ref = jax.new_ref(x)
        ref[...] = 2 * x
        return ref[...]

    closed = jax.make_jaxpr(function)(jnp.ones(3))
    splice = Splice(closed)
    for equation in closed.jaxpr.eqns:
        splice.keep(equation)
    (found,) = core.jaxpr_as_fun(splice.rewritten())(jnp.ones(3))
    np.testing.assert_array_equal(found, 2 * jnp.ones(3))
    made = {x for e in splice.rewritten().eqns for x in (*e.invars, *e.outvars) if not isinstance(x, core.Literal)}
    assert all(x.input in made for e in splice.rewritten().eqns for x in e.effects if hasattr(x, "input"))
