"""A list of layers on a mesh: one after another in the forward and in the backward pass, and nothing else changes."""

import collections
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import flax_layers as layers
from coda_jax.jaxprs.walk import equations_of, inner_jaxprs
from flax_layers import layer_stack, lora, sharding
from flax_layers.layer_stack import run_layers

COUNT = 3
CONFIG = layers.LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=COUNT, num_attention_heads=2
)
TOKENS = jax.random.randint(jax.random.key(0), (4, 9), 0, 64)

pytestmark = pytest.mark.skipif(not layer_stack._BARRIER_LEAVES_ZEROS, reason="barriers of an older jax")


def mesh(size=4):
    return jax.make_mesh((size,), ("fsdp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:size])


def llama(**options):
    return layers.Llama(CONFIG, rules=sharding.FSDP, rngs=nnx.Rngs(0), **options)


def step_of(model, kind=nnx.Param):
    graphdef, params, others = nnx.split(model, kind, ...)
    return jax.value_and_grad(lambda params: nnx.merge(graphdef, params, others).loss(TOKENS, TOKENS)), params


def barriers(function, *arguments):
    """The shapes that go through each barrier."""
    found = []

    def visit(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "optimization_barrier":
                found.append(collections.Counter(x.aval.shape for x in eqn.outvars))
            for inner in inner_jaxprs(eqn):
                visit(inner)

    visit(jax.make_jaxpr(function)(*arguments).jaxpr)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("remat", [None, "save_attention"])
def test_a_layer_s_gradients_go_before_the_one_below_it(remat):
    """Two barriers between two layers: the stream with the next one's weights; its cotangent with their gradients."""
    weights = collections.Counter(x.shape for x in jax.tree.leaves(nnx.state(llama().layers[1], nnx.Param)))

    def together():
        return [shapes for shapes in barriers(*step_of(llama(remat=remat))) if not weights - shapes]

    assert not together()
    with jax.set_mesh(mesh(1)):  # nothing is gathered
        assert not together()
    with jax.set_mesh(mesh()):
        found = together()
    assert len(found) == 2 * (COUNT - 1)
    assert all((*TOKENS.shape, CONFIG.hidden_size) in shapes for shapes in found)


class Unequal(nnx.Module):
    """The i-th of layers that their widths tell apart, 8 for the first."""

    def __init__(self, i):
        self.up, self.down = nnx.Param(jnp.ones((4, 8 * i + 8))), nnx.Param(jnp.ones((8 * i + 8, 4)))

    def __call__(self, x, shift=0.0):
        return x + jnp.tanh(x @ self.up[...] + shift) @ self.down[...]


@pytest.mark.parametrize("remat", [None, "full"])
def test_weights_of_the_next_layer_wait_for_what_enters_this_one(remat):
    """Forward; backward the gradients of the next one for the cotangent that leaves this one."""
    graphdef, params = nnx.split(nnx.List(map(Unequal, range(COUNT))))

    def loss(params, x):
        return jnp.sum(run_layers(nnx.merge(graphdef, params), x, remat=remat))

    events = []

    def visit(jaxpr):
        for eqn in jaxpr.eqns:
            name, shapes = eqn.primitive.name, [x.aval.shape for x in (*eqn.invars, *eqn.outvars)]
            if name == "optimization_barrier" and (3, 4) in shapes and len(shapes) == 6:
                events.append(("turn", max(map(max, shapes)) // 8 - 1))
            if name == "dot_general":
                events.append(("layer", max(map(max, shapes)) // 8 - 1))
            for inner in inner_jaxprs(eqn):
                visit(inner)

    with jax.set_mesh(mesh()):
        visit(jax.make_jaxpr(jax.grad(loss, (0, 1)))(params, jnp.ones((3, 4))).jaxpr)
    forward = [("turn", 1), ("layer", 0), ("turn", 2), ("layer", 1), ("layer", 2)]
    backward = [("layer", 1), ("turn", 2), ("layer", 0), ("turn", 1)]
    assert [event for event, _ in itertools.groupby(events)] == forward + backward


@pytest.mark.parametrize(("rules", "axis"), [(sharding.FSDP, "fsdp"), (sharding.DATA, "data")])
def test_remat_does_not_pin_weights_that_are_gathered(rules, axis):
    """Weights are not pinned under FSDP: their gather for what is computed again must not wait for the cotangent."""
    of_several = jax.make_mesh((4,), (axis,), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    found = []

    def visit(jaxpr):
        for eqn in jaxpr.eqns:
            if (pinned := eqn.params.get("prevent_cse")) is not None:
                found.append(pinned)
            for inner in inner_jaxprs(eqn):
                visit(inner)

    with jax.set_mesh(of_several):
        function, params = step_of(layers.Llama(CONFIG, rules=rules, remat="full", rngs=nnx.Rngs(0)))
        visit(jax.make_jaxpr(function)(params).jaxpr)
    assert found and all((False in pinned) == (axis == "fsdp") and True in pinned for pinned in found)


def test_remat_pins_what_is_no_weight():
    """A layer's input and its options are pinned: their cotangents have to be there before it is computed again."""
    graphdef, params = nnx.split(nnx.List(map(Unequal, range(COUNT))))

    def run(params, x, shift):
        return run_layers(nnx.merge(graphdef, params), x, remat="full", shift=shift)

    with sharding.axis_rules(sharding.FSDP), jax.set_mesh(mesh()):
        jaxpr = jax.make_jaxpr(run)(params, jnp.ones((3, 4)), jnp.ones(()))
    pinned = [eqn.params["prevent_cse"] for eqn in jaxpr.jaxpr.eqns if "prevent_cse" in eqn.params]
    assert pinned == [(False, False, True, True)] * COUNT


@pytest.mark.slow
def test_values_are_the_same():
    function, params = step_of(llama())
    want = jax.jit(function)(params)
    with jax.set_mesh(mesh()):
        function, params = step_of(llama())
        got = jax.jit(function)(params)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6)


@pytest.mark.slow
def test_frozen_weights_have_no_gradients():
    """As many weights' gradients as without a mesh: barriers do not ask for the gradients of what is not trained.

    There are no more products either; over a mesh those that are added are one.
    """

    def products():
        model = llama()
        lora.add_lora(model, 4, rngs=nnx.Rngs(1))
        function, params = step_of(model, nnx.LoRAParam)
        every = (e for e, _ in equations_of(function, params)[0] if e.primitive.name == "coda_gemm")
        return [[x.aval.shape for x in equation.outvars] for equation in every]

    def gradients(results):
        """Of matrices, which have neither tokens nor one row."""
        return collections.Counter(x for shapes in results for x in shapes if len(x) == 2 and x[0] > 1)

    want = products()
    with jax.set_mesh(mesh()):
        found = products()
    assert gradients(found) == gradients(want) and 0 < len(found) <= len(want)
    assert gradients(want).keys().isdisjoint([(32, 96), (32, 32), (48, 32)])  # the layers' kernels


class Counting(nnx.Module):
    """Writes into variables of its own."""

    def __init__(self, rngs):
        self.weight = nnx.Param(jnp.ones((4, 4)))
        self.calls = nnx.BatchStat(jnp.zeros((), jnp.int32))
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        self.calls[...] += 1
        return self.dropout(x @ self.weight[...])


def test_state_written_by_layers_is_kept():
    @nnx.jit
    def step(stack, x):
        return nnx.value_and_grad(lambda stack: jnp.sum(run_layers(stack, x) ** 2))(stack)

    def run():
        stack = nnx.List([Counting(nnx.Rngs(i)) for i in range(COUNT)])
        values = [step(stack, jnp.ones((4, 4)))[0] for _ in range(2)]
        assert [int(layer.calls[...]) for layer in stack] == [2] * COUNT
        return values

    want = run()
    assert want[0] != want[1]  # another mask
    with jax.set_mesh(mesh()):
        assert run() == want
