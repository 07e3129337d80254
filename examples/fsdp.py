"""FSDP under plain jit: parameters, optimizer state and tokens cut over all devices by one mesh axis.

    JAX_NUM_CPU_DEVICES=8 python examples/fsdp.py     # eight devices of a CPU
    python examples/fsdp.py                           # all GPUs of a machine

XLA gathers each layer's parameters before they are used and sums their gradients over the devices; each device runs
the fused products on its own tokens. The losses are those of one device.
"""

from __future__ import annotations

import collections
import re

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from flax_layers import Llama, LlamaConfig

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}


def cut(x: jax.Array, mesh: jax.sharding.Mesh) -> jax.Array:
    """x cut by its first axis that the devices divide; without one, as a count of steps, it is everywhere."""
    axis = next((i for i, size in enumerate(x.shape) if size % mesh.size == 0), None)
    return jax.device_put(x, NamedSharding(mesh, P() if axis is None else P(*[None] * axis, "data")))


@nnx.jit
def step(model: Llama, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
    loss, gradient = nnx.value_and_grad(lambda model: model.loss(tokens[:, :-1], tokens[:, 1:]))(model)
    optimizer.update(model, gradient)
    return loss


def train(mesh: jax.sharding.Mesh, steps: int) -> tuple[list[float], Llama, nnx.Optimizer, jax.Array]:
    dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
    model = Llama(LlamaConfig(vocab_size=64, **SIZES), dtype=dtype, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)
    for module in (model, optimizer):
        nnx.update(module, jax.tree.map(lambda x: cut(x, mesh), nnx.state(module)))
    tokens = cut((jnp.arange(33) + jnp.arange(16)[:, None]) % 64, mesh)
    return [float(step(model, optimizer, tokens)) for _ in range(steps)], model, optimizer, tokens


def bytes_on_a_device(module: nnx.Module) -> int:
    arrays = jax.tree.leaves(nnx.state(module))
    return sum(x.addressable_shards[0].data.nbytes for x in arrays)


def mesh_of(devices: list[jax.Device]) -> jax.sharding.Mesh:
    return jax.make_mesh((len(devices),), ("data",), axis_types=(AxisType.Auto,), devices=devices)


def main(steps: int = 20) -> tuple[list[float], list[float]]:
    devices = jax.devices()
    losses, model, optimizer, tokens = train(mesh_of(devices), steps)
    alone, whole, *_ = train(mesh_of(devices[:1]), steps)
    print(f"{len(devices)} devices: loss {losses[0]:.4f} at first, {losses[-1]:.4f} after {steps} steps")
    print(f"one device: {alone[-1]:.4f} after {steps} steps")
    print(f"parameters on a device: {bytes_on_a_device(model):,} bytes of {bytes_on_a_device(whole):,}")

    compiled = step.lower(model, optimizer, tokens).compile().as_text()
    names = re.findall(r" (all-gather|all-reduce|reduce-scatter|all-to-all)(?:-start)?\(", compiled)
    print("collectives in the step:", ", ".join(f"{n} {name}" for name, n in collections.Counter(names).items()))
    return losses, alone


if __name__ == "__main__":
    main()
