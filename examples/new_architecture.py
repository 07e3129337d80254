"""A new architecture from the modules of flax_layers: attention and feed-forward layer side by side, Gemma's details.

    python examples/new_architecture.py [--steps n]

x + attention(norm(x)) + mlp(norm(x)), one norm for both, as PaLM and GPT-J have it; a GELU gate, embeddings that are
scaled and tied, logits that are capped, as Gemma 2 has them. An order that flax_layers does not have is a
function of the same layers: docs/layers.md. It ends with what each product of a training step is lowered to on a
Hopper GPU.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec

if find_spec("optax") is None:
    raise SystemExit('new_architecture.py needs optax: pip install optax, or in a clone pip install ".[train,hf]"')

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import coda_jax as coda
from flax_layers import Attention, Embed, GatedMLP, ParallelBlock, RMSNorm


def parallel_block(width: int, hidden: int, heads: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> ParallelBlock:
    """A block of one norm, which both layers read."""
    return ParallelBlock(
        RMSNorm(width, rngs=rngs),
        Attention(width, heads, num_kv_heads=1, dtype=dtype, rngs=rngs),
        GatedMLP(width, hidden, activation="gelu_pytorch_tanh", dtype=dtype, rngs=rngs),
    )


class Model(nnx.Module):
    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.embed = Embed(vocabulary, width, dtype=dtype, rngs=rngs)
        self.layers = nnx.List(parallel_block(width, 4 * width, heads, dtype=dtype, rngs=rngs) for _ in range(layers))
        self.norm = RMSNorm(width, rngs=rngs)

    @coda.fuse
    def loss(self, tokens: jax.Array, labels: jax.Array) -> jax.Array:
        embedding = self.embed.embedding[...]
        x = self.embed(tokens) * embedding.shape[1] ** 0.5
        for layer in self.layers:
            x = layer(x)
        options = {"transpose_w": True, "soft_cap": 30.0, "dtype": x.dtype}
        return coda.linear_cross_entropy(self.norm(x), embedding, labels, **options)[0]


@nnx.jit(donate_argnames=("model", "optimizer"))
def step(model: Model, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
    loss, gradient = nnx.value_and_grad(lambda model: model.loss(tokens[:, :-1], tokens[:, 1:]))(model)
    optimizer.update(model, gradient)
    return loss


def main(steps: int = 60) -> tuple[list[float], coda.Explanation]:
    model = Model(64, 64, layers=2, heads=2, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)
    tokens = (jnp.arange(33) + jnp.arange(8)[:, None]) % 64  # rows that count
    losses = [float(step(model, optimizer, tokens)) for _ in range(steps)]
    print(f"loss {losses[0]:.2f} at first, {losses[-1]:.2f} after {steps} steps")

    graph, state = nnx.split(model)
    gradient = jax.grad(lambda state: nnx.merge(graph, state).loss(tokens[:, :-1], tokens[:, 1:]))
    explanation = coda.explain(gradient, state, platform="cuda")
    print(explanation)
    return losses, explanation


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    main(parser.parse_args().steps)
