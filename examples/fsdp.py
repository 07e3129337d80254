"""FSDP under plain jit: parameters, optimizer state and tokens cut over all devices by one mesh axis.

    JAX_NUM_CPU_DEVICES=8 python examples/fsdp.py     # eight devices of a CPU
    python examples/fsdp.py                           # all GPUs of a machine

XLA gathers each layer's parameters before they are used and sums their gradients over the devices; each device runs
the fused products on its own tokens. The losses are those of one device.
"""

from __future__ import annotations

import argparse
import collections
import re
from importlib.util import find_spec

if find_spec("optax") is None:
    raise SystemExit('fsdp.py needs optax: pip install optax, or in a clone pip install ".[train,hf]"')

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AxisType

from flax_layers import Llama, LlamaConfig, sharding

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}


@nnx.jit(donate_argnames=("model", "optimizer"))
def step(model: Llama, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
    loss, gradient = nnx.value_and_grad(lambda model: model.loss(tokens[:, :-1], tokens[:, 1:]))(model)
    optimizer.update(model, gradient)
    return loss


def train(mesh: jax.sharding.Mesh, steps: int) -> tuple[list[float], Llama, nnx.Optimizer, jax.Array]:
    dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
    config = LlamaConfig(vocab_size=64, **SIZES)
    with jax.set_mesh(mesh):
        # Each device makes its own part; the optimizer's state lies as the parameters do.
        model = sharding.create(lambda: Llama(config, rules=sharding.FSDP, dtype=dtype, rngs=nnx.Rngs(0)))
        optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)
        tokens = (jnp.arange(33) + jnp.arange(16)[:, None]) % 64
        tokens = jax.device_put(tokens, sharding.array_sharding(mesh, model.rules, "batch", None))
        return [float(step(model, optimizer, tokens)) for _ in range(steps)], model, optimizer, tokens


def bytes_on_a_device(module: nnx.Module) -> int:
    arrays = jax.tree.leaves(nnx.state(module))
    return sum(x.addressable_shards[0].data.nbytes for x in arrays)


def mesh_of(devices: list[jax.Device]) -> jax.sharding.Mesh:
    return jax.make_mesh((len(devices),), ("fsdp",), axis_types=(AxisType.Auto,), devices=devices)


def main(steps: int = 20) -> tuple[list[float], list[float]]:
    devices = jax.devices()
    losses, model, optimizer, tokens = train(mesh_of(devices), steps)
    alone, whole, *_ = train(mesh_of(devices[:1]), steps)
    print(f"{len(devices)} devices: loss {losses[0]:.4f} at first, {losses[-1]:.4f} after {steps} steps")
    print(f"one device: {alone[-1]:.4f} after {steps} steps")
    print(f"parameters on a device: {bytes_on_a_device(model):,} bytes of {bytes_on_a_device(whole):,}")

    with jax.set_mesh(tokens.sharding.mesh):
        compiled = step.lower(model, optimizer, tokens).compile().as_text()
    names = re.findall(r" (all-gather|all-reduce|reduce-scatter|all-to-all)(?:-start)?\(", compiled)
    print("collectives in the step:", ", ".join(f"{n} {name}" for name, n in collections.Counter(names).items()))
    return losses, alone


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    main(parser.parse_args().steps)
