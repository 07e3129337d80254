"""GRPO on a toy: a policy learns to answer with an even token, from rewards alone.

    python examples/grpo.py [--steps n]

For each prompt a group of answers is sampled; an answer's advantage is its reward less the group's mean, over the
group's spread. The loss is the clipped ratio of new to old probabilities. `coda.token_logprobs` gives them without an
array of logits, and works on the answers' tokens alone: a mask leaves the prompts out.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec

if find_spec("optax") is None:
    raise SystemExit('grpo.py needs optax: pip install optax, or in a clone pip install ".[train,hf]"')

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import coda_jax as coda
from flax_layers import Llama, LlamaConfig, generate
from flax_layers.layer_stack import run_layers

VOCABULARY, PROMPTS, GROUP, LENGTH, ANSWER = 16, 8, 16, 4, 4
CLIP = 0.2


@coda.fuse
def logprobs(model: Llama, tokens: jax.Array) -> jax.Array:
    """Log-probabilities (B, T - 1) of tokens (B, T) behind the first; 0 in the prompt."""
    x = model.norm(run_layers(model.layers, model.embed(tokens[:, :-1])))
    is_answer = jnp.broadcast_to(jnp.arange(1, tokens.shape[1]) >= LENGTH, tokens[:, 1:].shape)
    return coda.token_logprobs(x, model.head.kernel[...], tokens[:, 1:], mask=is_answer, dtype=x.dtype)


def rewards(tokens: jax.Array) -> jax.Array:
    """The share of an answer's tokens that are even, (B,)."""
    return jnp.mean(tokens[:, LENGTH:] % 2 == 0, axis=1, dtype=jnp.float32)


def advantages(reward: jax.Array) -> jax.Array:
    groups = reward.reshape(PROMPTS, GROUP)
    centred = groups - groups.mean(axis=1, keepdims=True)
    return (centred / (groups.std(axis=1, keepdims=True) + 1e-4)).reshape(-1)


@nnx.jit(donate_argnames=("model", "optimizer"))
def step(model: Llama, optimizer: nnx.Optimizer, tokens: jax.Array, old: jax.Array, advantage: jax.Array) -> jax.Array:
    def loss_of(model: Llama) -> jax.Array:
        ratio = jnp.exp(logprobs(model, tokens) - old)
        clipped = jnp.clip(ratio, 1 - CLIP, 1 + CLIP)
        gain = jnp.minimum(ratio * advantage[:, None], clipped * advantage[:, None])
        return -jnp.mean(gain[:, LENGTH - 1 :])

    loss, gradient = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradient)
    return loss


def main(steps: int = 40) -> list[float]:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
    model = Llama(LlamaConfig(vocab_size=VOCABULARY, **sizes), dtype=dtype, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(2e-3), wrt=nnx.Param)
    old_logprobs = nnx.jit(logprobs)
    means = []
    for number in range(steps):
        keys = jax.random.split(jax.random.fold_in(jax.random.key(0), number), 2)
        prompts = jnp.repeat(jax.random.randint(keys[0], (PROMPTS, LENGTH), 0, VOCABULARY), GROUP, axis=0)
        answers = generate(model, prompts, max_new_tokens=ANSWER, temperature=1.0, key=keys[1]).tokens
        tokens = jnp.concatenate([prompts, answers], axis=1)
        reward = rewards(tokens)
        old, advantage = old_logprobs(model, tokens), advantages(reward)
        for _ in range(2):  # in the second one the policy is no longer that of the samples
            step(model, optimizer, tokens, old, advantage)
        means.append(float(reward.mean()))
        if number % 10 == 0 or number == steps - 1:
            print(f"step {number}: mean reward {means[-1]:.2f}")
    return means


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    main(parser.parse_args().steps)
