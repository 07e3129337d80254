"""The memory that XLA takes for a gradient under `coda.fuse`, beside that of plain JAX."""

import jax
import jax.numpy as jnp
import pytest

import coda_jax as coda
from coda_jax.jaxprs.walk import equations
from tests.test_fuse_residuals import normal

LAYERS, TOKENS, WIDTH, HIDDEN = 4, 16, 64, 256


def temporaries(f, *args):
    """The bytes that XLA takes beside arguments and results."""
    return jax.jit(f).lower(*args).compile().memory_analysis().temp_size_in_bytes


def test_layers_in_a_loop_are_read_where_they_lie():
    """The layers' weights, of three axes, take more bytes than all activations."""
    x, head = normal(TOKENS, WIDTH), normal(WIDTH, WIDTH, seed=1)
    layers = {"up": normal(LAYERS, WIDTH, HIDDEN, seed=2), "down": normal(LAYERS, HIDDEN, WIDTH, seed=3)}

    @jax.checkpoint
    def layer(x, w):
        return x + jax.nn.silu(x @ w["up"]) @ w["down"], None

    def loss(weights, x):
        layers, head = weights
        return jnp.sum(jnp.tanh(jax.lax.scan(layer, x, layers)[0] @ head))

    weights = layers, head
    plain, fused = (temporaries(jax.grad(f), weights, x) for f in (loss, coda.fuse(loss)))
    assert fused < 1.05 * plain < sum(w.nbytes for w in layers.values())


@pytest.mark.parametrize("is_checkpoint", [False, True], ids=["", "checkpoint"])
def test_a_step_has_no_barrier(is_checkpoint):
    """XLA would store behind it a layer's slice of the float32 weights beside what it is cast to, bfloat16."""
    x, head = normal(TOKENS, WIDTH).astype(jnp.bfloat16), normal(WIDTH, WIDTH, seed=1)
    layers = normal(LAYERS, WIDTH, WIDTH, seed=2)

    def layer(x, w):
        return x + jax.nn.silu(x @ w.astype(x.dtype)), None

    def loss(weights, x):
        layers, head = weights
        step = jax.checkpoint(layer) if is_checkpoint else layer
        return jnp.sum(jnp.tanh(jax.lax.scan(step, x, layers)[0] @ head.astype(x.dtype)).astype(jnp.float32))

    every = [e for e, _ in equations(jax.make_jaxpr(jax.grad(coda.fuse(loss)))((layers, head), x).jaxpr)]
    barriers = [e for e in every if e.primitive.name == "optimization_barrier"]
    behind = [v.aval.shape for e in barriers for v in e.invars if v.aval.dtype == jnp.float32]
    assert head.shape == layers.shape[1:]
    assert behind.count(head.shape) == 1  # the head, which is cast again


def test_kept_vectors_are_read_behind_the_barrier():
    """XLA would scale a weight for both passes at once, and keep it, where both read one vector."""
    x, w = (
        normal(*shape, seed=i).astype(jnp.bfloat16) for i, shape in enumerate([(2, TOKENS, WIDTH), (WIDTH, HIDDEN)])
    )
    scale = jnp.linspace(0.5, 1.5, WIDTH, dtype=jnp.bfloat16)

    def loss(weights, x):
        scale, w = weights
        x = jnp.tanh(x @ w) @ w.T
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6) * scale.astype(jnp.float32)
        return jnp.sum(jnp.tanh(normed.astype(x.dtype) @ w).astype(jnp.float32))

    gradient = jax.grad(coda.fuse(loss, defer_norms=True))
    jaxpr = jax.make_jaxpr(gradient)((scale, w), x).jaxpr
    (barrier,) = (e for e, _ in equations(jaxpr) if e.primitive.name == "optimization_barrier")
    assert sorted(v.aval.size for v in barrier.invars if v.aval.size <= w.size) == [WIDTH, w.size]
