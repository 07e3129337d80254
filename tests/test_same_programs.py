"""Programs are the same in every process: several hosts compile one program, and a cache of compiled ones finds it.

`python -m tests.test_same_programs 3 step` is such a process: it prints digests of programs that it lowers. The number
disturbs all that must not matter: what lies in memory, and the order of a set of variables or of values, whose
hashes are others. PYTHONHASHSEED does so for a set of names.
"""

import hashlib
import json
import os
import random
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import coda_jax as coda
import flax_layers as layers
from coda_jax.fusion.units import Unit
from coda_jax.graph.calls import Call
from coda_jax.graph.values import Function, Value
from flax_layers import sharding
from tests.test_expert_parallel import SCHEMES, arrays, mesh_of, of_mesh, placed
from tests.tiny_models import LLAMA

D, ROWS = 16, 16


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape) / shape[-2] ** 0.5, jnp.bfloat16)


W = {name: normal(2, D, D, seed=i) for i, name in enumerate(("a", "b", "c"))}
X = normal(ROWS, D, seed=3)


def scan(w, x):
    """A loop that carries and stacks several arrays."""

    def step(carry, w):
        x, total, count = carry
        gate, up = x @ w["a"], x @ w["b"]
        x = x + (jax.nn.silu(gate) * up) @ w["c"]
        return (x, total + jnp.sum(x, axis=0), count + 1), (jnp.max(gate, axis=1), up[0], jnp.min(x))

    (x, total, count), (most, first, least) = jax.lax.scan(step, (x, jnp.zeros(D), 0.0), w)
    return x @ w["a"][0] * (total + first.sum(0)).astype(x.dtype) + (most.sum() + least.sum() * count).astype(x.dtype)


def sort(w, x):
    """Equations with several results, beside each other."""
    y = x @ w["a"][0]
    keys, others, last = jax.lax.sort((y, jnp.tanh(y), x * y), num_keys=1)
    most, indices = jax.lax.top_k(others, D)
    first, second = jnp.split(jnp.cumsum(last, 0), 2, axis=0)
    q, r = jnp.linalg.qr((most + keys).astype(jnp.float32))
    y = (keys + most + last) @ w["b"][0] * jnp.concatenate([second, first])
    return (y + indices.astype(x.dtype)) @ w["c"][0] + (q @ r).astype(x.dtype)


def split(w, x):
    """Parts of one product, masks and sums, each of which several read."""
    a, b, c = jnp.split(x @ jnp.concatenate([w["a"][0], w["b"][0], w["c"][0]], 1), 3, axis=1)
    rms = jax.lax.rsqrt(jnp.mean(jnp.square(a.astype(jnp.float32)), 1, keepdims=True) + 1e-3).astype(x.dtype)
    mask = (x > 0) & (jnp.cumsum(x, 0) < 1)
    y = jnp.where(mask, jax.nn.gelu(a * rms), b) @ w["a"][1] + (c * b) @ w["b"][1]
    mean, most = jnp.mean(y, 0), jnp.max(y, 1, keepdims=True)
    q, k, v = (z.reshape(1, ROWS, 2, D // 2) for z in (y * rms, b - most, c + mean))
    return jax.nn.dot_product_attention(q, k, v).reshape(ROWS, D) @ w["c"][1] + y


def branches(w, x):
    """A loop of an unknown number of steps, branches and a checkpoint, with several results each."""

    def step(carry):
        i, x, y = carry
        return i + 1, jnp.tanh(x @ w["a"][0]), y + x

    _, y, z = jax.lax.while_loop(lambda carry: carry[0] < 2, step, (0, x, x * 2))
    y, z = jax.lax.stop_gradient((y, z))
    u, v = jax.lax.cond(jnp.sum(y) > 0, lambda x: (x @ w["b"][0], x), lambda x: (x, x @ w["c"][0]), x)
    block = jax.checkpoint(lambda u, v: (jax.nn.silu(u @ w["a"][1]) * v, jnp.tanh(v @ w["b"][1])))
    u, v = block(u + y, v + z)
    return (u * v) @ w["c"][1]


def losses(w, x):
    """Two losses of one array of logits."""
    logits = (jnp.tanh(x @ w["b"][0]) @ jnp.tile(w["a"][0], (1, 64))).astype(jnp.float32)
    logprobs, labels = jax.nn.log_softmax(logits), jnp.arange(ROWS) % 7
    one = jnp.take_along_axis(logprobs, labels[:, None], axis=1)[:, 0]
    return one * 2 + jnp.sum(jax.nn.one_hot(labels + 1, logits.shape[1]) * logprobs, axis=1)


def square(f):
    return lambda w, x: jnp.sum(jnp.square(f(w, x).astype(jnp.float32)))


DOORS = {
    "grad(fuse)": lambda f: jax.grad(coda.fuse(square(f)), argnums=(0, 1)),
    "fuse(grad)": lambda f: coda.fuse(jax.grad(square(f), argnums=(0, 1))),
}


def step():
    """Values and gradients of a model of flax_layers."""
    graph, state = nnx.split(nnx.eval_shape(lambda: layers.Llama(LLAMA, rngs=nnx.Rngs(0))))

    def loss(state, tokens):
        return nnx.merge(graph, state).loss(tokens, tokens)

    return jax.jit(jax.value_and_grad(loss)).trace(state, jax.ShapeDtypeStruct((2, 8), jnp.int32))


def experts():
    """Experts over a mesh of three axes, with how many rows had no place anywhere."""
    sizes, rules, tokens = SCHEMES["all"]
    mesh, given = mesh_of(sizes), arrays(*tokens)

    def run(*given):
        with sharding.axis_rules(rules):
            return of_mesh(*given, capacity_factor=1.0)

    with jax.set_mesh(mesh):
        return jax.jit(run).trace(*placed(mesh, rules, given))


FUSED = {
    f"{f.__name__}, {door}": lambda f=f, door=door: jax.jit(DOORS[door](f)).trace(W, X)
    for f in (scan, sort, split, branches, losses)
    for door in DOORS
}
PROGRAMS = FUSED | {"step": step, "experts": experts}
QUICK = ["scan, fuse(grad)", "experts"]


def disturb(number):
    """Gives variables and values other addresses and hashes than in a process of another number."""
    generator = random.Random(number)
    garbage = [bytearray(generator.randrange(16, 400)) for _ in range(20000)]
    for _ in range(10000):
        garbage.pop(generator.randrange(len(garbage)))
    variable = type(jax.make_jaxpr(jnp.sin)(1.0).jaxpr.invars[0])
    for kind in (variable, Value, Function, Call, Unit):
        kind.__hash__ = lambda self: hash((id(self), number))
    return garbage


def main():
    number, *names = sys.argv[1:]
    garbage = disturb(int(number))
    digests = {}
    for name in names:
        traced = PROGRAMS[name]()
        for platform in ("cpu", "cuda"):
            text = traced.lower(lowering_platforms=(platform,)).as_text()
            digests[f"{name}, {platform}"] = hashlib.sha256(text.encode()).hexdigest()
    print(json.dumps(digests))
    assert garbage


def digests_of(names, processes):
    """The output of each of so many processes, which run at one time."""
    command = [sys.executable, "-m", "tests.test_same_programs"]
    started = [
        subprocess.Popen(
            [*command, str(number), *names],
            env={**os.environ, "PYTHONHASHSEED": str(number)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(1, 2 * processes, 2)
    ]
    texts = [process.communicate(timeout=1800)[0] for process in started]
    assert not any(process.returncode for process in started)
    return [json.loads(text.splitlines()[-1]) for text in texts]


@pytest.mark.parametrize("names, processes", [(QUICK, 2), pytest.param(list(PROGRAMS), 4, marks=pytest.mark.slow)])
def test_processes_lower_the_same_programs(names, processes):
    first, *others = digests_of(names, processes)
    assert len(first) == 2 * len(names)
    for other in others:
        assert other == first


if __name__ == "__main__":
    main()
