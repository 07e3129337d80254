"""How long a model takes to trace: all calls of Python and of C functions count, JAX's own among them."""

import gc
import sys
from itertools import count

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AxisType

import coda_jax as coda
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


def looped(w, x):
    return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=2)[0]


def dropped(w, x, key):
    return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x @ w, 0) @ w


def total(f):
    return lambda *args: jnp.sum(jnp.square(f(*args)))


TRACES = {  # functions of (w, x), each another one at each call
    "grad(fuse)": lambda: jax.grad(coda.fuse(total(looped))),
    "fuse(grad)": lambda: coda.fuse(jax.grad(total(looped))),
    "fuse of keys": lambda: lambda w, x: jax.grad(coda.fuse(total(dropped)))(w, x, jax.random.key(0)),
    "block": lambda: jax.grad(total(lambda w, x: coda.block(lambda x, w: (x @ w).map(jnp.tanh) @ w)(x, w))),
    "gemm": lambda: jax.grad(total(lambda w, x: coda.gemm(x, w, epilogue=jnp.tanh))),
}


def is_left_by_a_trace(trace, times):
    """How many objects are alive for each trace more, once a first few have filled all caches."""

    def alive():
        for _ in range(4):  # what holds a cycle of JAX's is collected one time later
            gc.collect()
        return len(gc.get_objects())

    for _ in range(3):
        trace()
    before = alive()
    for _ in range(times):
        trace()
    return (alive() - before) / times


@pytest.mark.parametrize("times", [10, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", TRACES)
def test_a_trace_leaves_nothing(kind, times):
    types = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 8), (4, 8))]
    assert is_left_by_a_trace(lambda: jax.make_jaxpr(TRACES[kind]())(*types), times) < 3


@pytest.mark.slow
def test_a_trace_of_a_model_leaves_nothing():
    assert is_left_by_a_trace(tracing(1, None), 20) < 3


DOORS = {"grad(fuse)": lambda f: jax.grad(coda.fuse(f)), "fuse(grad)": lambda f: coda.fuse(jax.grad(f))}


def fusing(door, number_of_layers):
    """A function that traces the gradient of a chain of layers, by this door."""

    def f(w, x):
        for _ in range(number_of_layers):
            x = x + jnp.tanh(x @ w)
        return jnp.sum(x)

    types = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 8), (4, 8))]
    return lambda: jax.make_jaxpr(DOORS[door](f))(*types)


@pytest.mark.parametrize("door", DOORS)
def test_fusing_is_linear_in_the_number_of_layers(door):
    fusing(door, 2)()
    of_16 = calls(fusing(door, 16))
    calls(fusing(door, 32), most=int(2.2 * of_16))


def test_equal_layers_share_what_they_compute_in_8_bits():
    """A layer more traces neither epilogues nor scales: 45 thousand calls on jax 0.10, and 150 thousand with these."""

    def chain(number):
        def f(w, x):
            for one in w:
                x = x + jnp.tanh(x @ one)
            return jnp.sum(x)

        types = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((number, 128, 128), (256, 128))]
        return lambda: jax.make_jaxpr(jax.grad(coda.fuse(f, fp8=coda.fp8.Recipe())))(*types)

    chain(2)()
    assert calls(chain(8)) - calls(chain(4)) < 4 * 75_000


def test_a_checkpoint_that_layers_share_is_traced_once():
    layer = jax.checkpoint(lambda x, w: x + jnp.tanh(jnp.tanh(x @ w) @ w), prevent_cse=False)

    def gradient_of(number_of_layers):
        def f(w, x):
            for one in w:
                x = layer(x, one)
            return jnp.sum(x)

        types = (
            [jax.ShapeDtypeStruct((8, 8), jnp.float32)] * number_of_layers,
            jax.ShapeDtypeStruct((4, 8), jnp.float32),
        )
        return lambda: jax.make_jaxpr(jax.grad(coda.fuse(f)))(*types)

    gradient_of(2)()
    of_4 = calls(gradient_of(4))
    calls(gradient_of(16), most=2 * of_4)


@pytest.mark.slow
@pytest.mark.parametrize("door", DOORS)
def test_more_layers_than_python_nests_calls_are_fused(door):
    """No walk of a graph is recursive: Python's limit is a thousand calls."""
    fusing(door, 1400)()
