"""Whole models inside shard_map: the loss and its gradient are those of one device.

In float32: XLA for CPUs ends the process at some bfloat16 sums over a part of a mesh's axes.
"""

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import flax_layers as layers
from tests.tiny_models import GPT2, LLAMA

MODELS = {
    "llama": lambda: layers.Llama(LLAMA, rngs=nnx.Rngs(0)),
    "scan": lambda: layers.Llama(LLAMA, scan_layers=True, remat="save_attention", rngs=nnx.Rngs(0)),
    "gpt2": lambda: layers.GPT2(GPT2, rngs=nnx.Rngs(0)),
}
# How large the axes are, their type, and over which of them the shard_map is.
MESHES = {
    "explicit": ((4, 1), AxisType.Explicit, {"data", "model"}),
    "auto": ((4, 1), AxisType.Auto, {"data", "model"}),
    "partly auto": ((2, 2), AxisType.Auto, {"data"}),
    "partly explicit": ((2, 2), AxisType.Explicit, {"data"}),
}


CASES = [  # every model, and every mesh; their other pairs are slow
    pytest.param(MODELS[model], *MESHES[mesh], id=f"{model}-{mesh}", marks=[pytest.mark.slow] * (i > 0 and j > 0))
    for i, model in enumerate(MODELS)
    for j, mesh in enumerate(MESHES)
]


@pytest.mark.parametrize("model, sizes, kind, manual", CASES)
def test_loss_and_gradient(model, sizes, kind, manual):
    graph, params = nnx.split(model())
    tokens = jax.random.randint(jax.random.key(1), (8, 9), 0, 64)

    def loss(params, tokens):
        return nnx.merge(graph, params).loss(tokens[:, :-1], tokens[:, 1:])

    def of_shard(params, tokens):
        return jax.lax.pmean(loss(params, tokens), "data")

    want = jax.jit(jax.value_and_grad(loss))(params, tokens)
    with jax.set_mesh(jax.make_mesh(sizes, ("data", "model"), axis_types=(kind,) * 2, devices=jax.devices()[:4])):
        sharded = jax.shard_map(of_shard, in_specs=(P(), P("data")), out_specs=P(), axis_names=manual)
        arguments = jax.device_put(params, P()), jax.device_put(tokens, P("data"))
        got = jax.jit(jax.value_and_grad(sharded))(*arguments)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), got, want)
