"""A language model in plain Flax, and the one line that fuses its training step.

    python examples/fuse_your_model.py [--steps n]

Nothing of the model knows of coda_jax. The same steps are taken with and without the line; then a report says what of
the model runs in kernels on a Hopper GPU, what stays XLA's, and why.
"""

import argparse
from importlib.util import find_spec

if find_spec("optax") is None:
    raise SystemExit('fuse_your_model.py needs optax: pip install optax, or in a clone pip install ".[train,hf]"')

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import coda_jax as coda

WIDTH, HEADS, VOCABULARY = 64, 4, 256


class Block(nnx.Module):
    def __init__(self, rngs):
        options = {"dtype": jnp.bfloat16, "rngs": rngs}  # of the computation; parameters are float32
        self.first_norm, self.second_norm = nnx.LayerNorm(WIDTH, **options), nnx.LayerNorm(WIDTH, **options)
        self.query, self.key, self.value, self.out = (nnx.Linear(WIDTH, WIDTH, **options) for _ in range(4))
        self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, **options), nnx.Linear(4 * WIDTH, WIDTH, **options)

    def __call__(self, x):  # (B, T, D)
        h = self.first_norm(x)
        q, k, v = (one(h).reshape(*h.shape[:2], HEADS, -1) for one in (self.query, self.key, self.value))
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.reshape(h.shape))
        return x + self.down(nnx.gelu(self.up(self.second_norm(x))))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, dtype=jnp.bfloat16, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.norm = nnx.LayerNorm(WIDTH, dtype=jnp.bfloat16, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss(model, tokens):  # (B, T + 1)
    logits = model(tokens[:, :-1]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def losses(function, tokens, steps):
    """The loss of each step of a model that begins anew."""
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)

    @nnx.jit(donate_argnames=("model", "optimizer"))
    def step(model, optimizer, tokens):
        value, gradient = nnx.value_and_grad(function)(model, tokens)
        optimizer.update(model, gradient)
        return value

    return [float(step(model, optimizer, tokens)) for _ in range(steps)]


def main(steps):
    tokens = (jnp.arange(33) + jnp.arange(8)[:, None]) % VOCABULARY  # rows that count
    plain, fused = losses(loss, tokens, steps), losses(coda.fuse(loss), tokens, steps)
    for number in range(0, steps, 5):
        print(f"step {number}: loss {plain[number]:.4f}, fused {fused[number]:.4f}")
    report = coda.fuse.report(loss, Model(nnx.Rngs(0)), tokens)
    print(report)
    return plain, fused, report


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    main(parser.parse_args().steps)
