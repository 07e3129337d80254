"""A graph of products of rows in groups: an expert feed-forward, as coda.expert_mlp has it."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coda_jax as coda
from coda_jax.epilogue.code_size import instructions
from coda_jax.graph.derivative import cotangents_of
from coda_jax.graph.evaluate import evaluate
from coda_jax.graph.function import graph_of
from coda_jax.graph.plan import Plan
from coda_jax.graph.values import ForEachRow, Leaf, Product, make_map
from coda_jax.jaxprs.walk import equations_of
from coda_jax.primitives.gemm_primitive import PRIMITIVES
from tests.gemm_cases import assert_close
from tests.test_graph_derivative import swiglu

pytestmark = pytest.mark.usefixtures("quick_to_compile")
ROWS, GROUPS, D, F = 48, 4, 16, 24
DIFFERENTIATED = (0, 1, 2, 4)


def experts(x, up, down, sizes, weights):
    hidden = make_map(swiglu, Product(x, up, groups=sizes))
    scaled = make_map(jnp.multiply, hidden, weights)  # a factor of a row goes through the product
    return Product(scaled, down, groups=sizes)


def with_expert_mlp(x, up, down, sizes, weights):
    return coda.expert_mlp(x, up, down, sizes, row_scale=weights[:, 0])


def arguments(sizes=(20, 0, 13, 11)):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = ((ROWS, D), (GROUPS, D, 2 * F), (GROUPS, F, D), (ROWS, 1))
    x, up, down, weights = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
    return x, up / D**0.5, down / F**0.5, jnp.array(sizes, jnp.int32), weights


def total(f):
    return lambda *args: sum(jnp.sum(jnp.sin(x.astype(jnp.float32))) for x in jax.tree.leaves(f(*args)))


@pytest.fixture(scope="module")
def graph():
    return graph_of(experts, arguments(), dtype=jnp.float32, name="experts")


@pytest.mark.smoke
@pytest.mark.parametrize("sizes", [(20, 0, 13, 11), (12, 12, 12, 12), (0, 0, 0, 48), (0, 0, 0, 0)], ids=str)
def test_values_and_gradients(graph, sizes):
    """Also where rows are in no group."""
    args = arguments(sizes)
    assert_close(jax.jit(graph)(*args), [with_expert_mlp(*args)], 1e-5)
    found, want = (jax.jit(jax.grad(total(f), DIFFERENTIATED))(*args) for f in (graph, with_expert_mlp))
    assert_close(found, want, 1e-4)


def test_the_plain_form(graph):
    args = arguments()
    known = dict(zip(graph.leaves, args, strict=True))
    assert_close(evaluate(graph.outputs, known, jnp.float32), [with_expert_mlp(*args)], 1e-5)
    dout = Leaf((ROWS, D), jnp.float32)
    found = cotangents_of(graph.outputs, [dout], list(graph.leaves))
    assert found[3] is None
    known[dout] = jnp.cos(with_expert_mlp(*args))
    made = evaluate([x for x in found if x is not None], known, jnp.float32)
    assert_close(made, list(jax.grad(total(with_expert_mlp), DIFFERENTIATED)(*args)), 1e-4)


def test_its_products_are_those_of_expert_mlp(graph):
    args = arguments()

    def summary(f):
        equations, _ = equations_of(jax.grad(total(f), DIFFERENTIATED), *args)
        specs = [equation.params["spec"] for equation, _ in equations if equation.primitive in PRIMITIVES]
        kinds = (collections.Counter(operand.kind.word for operand in spec.program.operands) for spec in specs)
        return [
            (
                instructions(spec.program),
                spec.ragged,
                spec.transpose_a,
                spec.transpose_b,
                operand_kinds,
                len(spec.program.stores),
            )
            for spec, operand_kinds in zip(specs, kinds, strict=True)
        ]

    (up, down, *backward), (expected_up, expected_down, *expected_backward) = summary(graph), summary(with_expert_mlp)
    assert backward == expected_backward and len(backward) == 4
    assert up[0] + down[0] == expected_up[0] + expected_down[0]  # the weight is multiplied a product earlier
    assert [x.shape for x in graph.derivative().kept] == [(ROWS, 2 * F)]


def test_sums_over_rows_are_of_all_groups():
    """A pass of its own: in the epilogue they would be sums of each group."""
    x, up, sizes = Leaf((ROWS, D), jnp.float32), Leaf((GROUPS, D, F), jnp.float32), Leaf((GROUPS,), jnp.int32)
    z = Product(x, up, groups=sizes)
    of_columns, of_rows = make_map(lambda z: (jnp.sum(z, axis=0), jnp.sum(z, axis=1)), z)
    plan = Plan([of_columns, of_rows])
    assert plan.by_xla == [of_columns] and set(plan.steps[0].stores) == {z, of_rows}


def test_a_vector_of_each_group_is_an_operand_beside_its_groups_alone():
    """Beside other groups, or none, a pass takes the rows."""
    shapes = ((ROWS, D), (GROUPS, D, F), (GROUPS, F), (D, F))
    arrays = [jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes)]
    arrays += [jnp.array(sizes, jnp.int32) for sizes in ((20, 0, 13, 15), (8, 8, 9, 23))]

    def shifted(x, up, bias, plain, sizes, others):
        rows = ForEachRow(bias, sizes, ROWS)
        own, other, none = (Product(x, up, groups=sizes), Product(x, up, groups=others), Product(x, plain))
        return [make_map(lambda z, b: jnp.tanh(z + b), z, rows) for z in (own, other, none)]

    graph = graph_of(shifted, arrays, dtype=jnp.float32)
    read = [[isinstance(x, ForEachRow) for x in graph.plan.operands(i)] for i in range(3)]
    assert read == [[True], [], []] and len([x for x in graph.plan.by_xla if x.is_tile]) == 2
    known = dict(zip(graph.leaves, arrays, strict=True))
    want = evaluate(graph.outputs, known, jnp.float32)
    assert_close(jax.jit(graph)(*arrays), want, 1e-5)
    rows = jnp.repeat(arrays[2], arrays[4], axis=0, total_repeat_length=ROWS)
    assert_close(want[2], jnp.tanh(arrays[0] @ arrays[3] + rows), 1e-5)

    def plain(*given):
        return evaluate(graph.outputs, dict(zip(graph.leaves, given, strict=True)), jnp.float32)

    found, expected = (jax.jit(jax.grad(total(f), (0, 1, 2, 3)))(*arrays) for f in (graph, plain))
    assert_close(found, expected, 1e-4)


def test_mistakes():
    x, up, sizes = Leaf((ROWS, D), jnp.float32), Leaf((GROUPS, D, F), jnp.float32), Leaf((GROUPS,), jnp.int32)
    with pytest.raises(ValueError, match=r"\(48, 16\) and \(48, 16\); they must be a matrix and one for each group"):
        Product(x, x, groups=sizes)
    with pytest.raises(ValueError, match="must be both matrices"):
        Product(x, up)
    assert np.all(np.array(Product(x, x, transpose_a=True, groups=sizes).shape) == (GROUPS, D, D))
