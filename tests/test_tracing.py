"""How long a model takes to trace: all calls of Python and of C functions count, JAX's own among them."""

import sys
from itertools import count

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AxisType

import flax_layers as layers
from flax_layers import sharding


class TooManyError(Exception):
    pass


def calls(function, most=sys.maxsize):
    """How many Python and C functions function() enters; TooManyError as soon as it is more than `most`."""
    counter = count(1)

    def entered(frame, event, argument):
        if event.endswith("call") and next(counter) > most:
            raise TooManyError

    sys.setprofile(entered)
    try:
        function()
    finally:
        sys.setprofile(None)
    return next(counter) - 1


def tracing(number_of_layers, rules):
    """A function that traces value and gradient of a Llama's loss."""
    config = layers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=number_of_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = nnx.eval_shape(lambda: layers.Llama(config, rules=rules, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(model)

    def loss(state, tokens):
        return nnx.merge(graphdef, state).loss(tokens, tokens)

    tokens = jax.ShapeDtypeStruct((4, 8), jnp.int32)
    return lambda: jax.make_jaxpr(jax.value_and_grad(loss))(state, tokens)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [None, AxisType.Auto], ids=["one device", "mesh of automatic axes"])
def test_tracing_is_linear_in_the_number_of_layers(kind):
    """On jax 0.10 a question about an attribute that a tracer lacks walks all that was traced so far."""
    rules, mesh = None, jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:1])
    if kind is not None:
        rules = sharding.FSDP_TENSOR
        mesh = jax.make_mesh((2, 2), ("fsdp", "tensor"), axis_types=(kind,) * 2, devices=jax.devices("cpu")[:4])
    with jax.set_mesh(mesh):
        tracing(2, rules)()  # what is made once, whatever is traced
        of_16 = calls(tracing(16, rules))
        calls(tracing(32, rules), most=int(2.2 * of_16))
