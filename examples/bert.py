"""BERT from the modules of flax_layers: a norm behind each sum, attention in both directions, masked tokens to tell.

    python examples/bert.py [--steps n]

The encoder and the masked-language-modelling head of "BERT" (arXiv 1810.04805), and `from_hf`, which takes the state
dict of transformers' BertForMaskedLM. A tiny one learns to tell masked tokens in pairs of sequences, of which the first
counts up and the second down. It ends with what each product of a training step is lowered to on a Hopper GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

if find_spec("optax") is None:
    raise SystemExit('bert.py needs optax: pip install optax, or in a clone pip install ".[train,hf]"')

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import coda_jax as coda
from flax_layers import ACTIVATIONS, MLP, Attention, Embed, LayerNorm, Linear, PostNormBlock


class BertConfig(NamedTuple):
    """Sizes, by the names of transformers' BertConfig, which may stand in the place of this one; no dropout."""

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12


class Bert(nnx.Module):
    """Encoder and head; dtype is that of products and of what flows between them, parameters are float32."""

    def __init__(self, config: BertConfig, *, dtype: Any = None, rngs: nnx.Rngs):
        width, init = config.hidden_size, nnx.initializers.normal(0.02)
        linear = {"kernel_init": init, "use_bias": True, "dtype": dtype, "rngs": rngs}
        # Query, key and value apart, as checkpoints have them.
        heads = {"num_heads": config.num_attention_heads, "is_causal": False, "rope_theta": None, "separate_qkv": True}
        hidden = {"hidden_features": config.intermediate_size, "activation": config.hidden_act}

        embed = partial(Embed, features=width, embedding_init=init, dtype=dtype, rngs=rngs)
        norm = partial(LayerNorm, width, epsilon=config.layer_norm_eps, rngs=rngs)
        self.token_embed, self.position_embed = embed(config.vocab_size), embed(config.max_position_embeddings)
        self.type_embed, self.embed_norm = embed(config.type_vocab_size), norm()
        self.layers = nnx.List(
            PostNormBlock(Attention(width, **heads, **linear), norm(), MLP(width, **hidden, **linear), norm())
            for _ in range(config.num_hidden_layers)
        )
        self.head, self.head_norm = Linear(width, width, **linear), norm()
        self.bias = nnx.Param(jnp.zeros(config.vocab_size))
        self.activation = ACTIVATIONS[config.hidden_act]

    def encoded(self, tokens: jax.Array, types: jax.Array, *, positions: Any = None, **masks: Any) -> jax.Array:
        """The last layer's output, (B, T, D), for tokens and types (B, T): 0 in the first of a pair, 1 in the second.

        masks are Attention's: beside padding mask (B, 1, 1, T), False for it, or segment_ids (B, T) with an id of its
        own. Pairs packed into one row have segment_ids too, and positions (B, T).
        """
        positions = jnp.arange(tokens.shape[1]) if positions is None else positions
        x = self.embed_norm(self.token_embed(tokens) + self.position_embed(positions) + self.type_embed(types))
        for layer in self.layers:
            x = layer(x, **masks)
        return x

    def projected(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """h (..., D + 8), of what the last layer makes, and w (V, D + 8): the logits are h w^T."""
        h = self.head_norm(self.activation(self.head(x)))
        # A bias is one more column of w, beside 1 in h; seven are 0, for rows are multiples of 16 bytes.
        ones = jnp.broadcast_to(jnp.eye(1, 8, dtype=h.dtype), (*h.shape[:-1], 8))
        columns = jnp.pad(self.bias[...][:, None], ((0, 0), (0, 7)))
        w = jnp.concatenate([self.token_embed.embedding[...], columns], axis=1)
        return jnp.concatenate([h, ones], axis=-1), w

    def logits(self, x: jax.Array) -> jax.Array:
        h, w = self.projected(x)
        return coda.gemm(h, w.astype(h.dtype), transpose_b=True)  # (..., V)

    def loss(self, x: jax.Array, labels: jax.Array) -> jax.Array:
        """Mean cross-entropy of `logits` with labels (...) other than -100, without an array of all logits."""
        h, w = self.projected(x)
        return coda.linear_cross_entropy(h, w, labels, transpose_w=True, dtype=h.dtype)[0]


HF_MODULES = {
    "token_embed": "bert.embeddings.word_embeddings",
    "position_embed": "bert.embeddings.position_embeddings",
    "type_embed": "bert.embeddings.token_type_embeddings",
    "embed_norm": "bert.embeddings.LayerNorm",
    "attention.query": "attention.self.query",  # of a layer, as the next seven
    "attention.key": "attention.self.key",
    "attention.value": "attention.self.value",
    "attention.out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "mlp.up": "intermediate.dense",
    "mlp.down": "output.dense",
    "mlp_norm": "output.LayerNorm",
    "head": "cls.predictions.transform.dense",
    "head_norm": "cls.predictions.transform.LayerNorm",
    "": "cls.predictions",
}


def hf_name(path: tuple[Any, ...]) -> str:
    """The name in the state dict of the parameter at this path; kernels are transposed there."""
    layer, path = (f"bert.encoder.layer.{path[1]}.", path[2:]) if path[0] == "layers" else ("", path)
    return f"{layer}{HF_MODULES['.'.join(path[:-1])]}.{'bias' if path[-1] == 'bias' else 'weight'}"


def from_hf(arrays: Mapping[str, Any], config: Any, *, dtype: Any = None) -> Bert:
    """A Bert of the state dict of BertForMaskedLM, tensors or arrays; the decoder is tied to the embedding."""
    model = Bert(config, dtype=dtype, rngs=nnx.Rngs(0))
    for path, parameter in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        array = np.asarray(arrays[hf_name(path)])
        array = array.T if path[-1] == "kernel" else array
        if array.shape != parameter.shape:
            raise ValueError(f"{hf_name(path)} has shape {array.shape}, the config says {parameter.shape}")
        parameter[...] = jnp.asarray(array, parameter.dtype)
    return model


PAD, BEGIN, END, MASK, FIRST, VOCABULARY = 0, 1, 2, 3, 4, 32
ROWS, LENGTH, MASKED = 32, 32, 4


def batch(rng: np.random.Generator) -> list[jax.Array]:
    """Pairs of many lengths: tokens and types (ROWS, LENGTH); which tokens are masked, and labels (ROWS, MASKED)."""
    (a, b), place = rng.integers(6, 14, (2, ROWS, 1)), np.arange(LENGTH)
    up, down = (FIRST + (rng.integers(99, size=(ROWS, 1)) + way * place) % (VOCABULARY - FIRST) for way in (1, -1))
    parts = [place == 0, place <= a, place == a + 1, place < a + b + 2, place == a + b + 2]
    tokens = np.select(parts, [BEGIN, up, END, down, END], PAD)
    types = (place > a + 1) & (tokens != PAD)
    masked = np.argsort(np.where(tokens >= FIRST, rng.random(tokens.shape), 1))[:, :MASKED]
    labels, kind = np.take_along_axis(tokens, masked, axis=1), rng.random(masked.shape)
    # BERT's way: 8 of 10 are masked, one is any other token, one stays.
    hidden = np.select([kind < 0.8, kind < 0.9], [MASK, rng.integers(FIRST, VOCABULARY, masked.shape)], labels)
    np.put_along_axis(tokens, masked, hidden, axis=1)
    return [jnp.asarray(x, jnp.int32) for x in (tokens, types, masked, labels)]


@coda.fuse
def loss_of(model: Bert, tokens: jax.Array, types: jax.Array, masked: jax.Array, labels: jax.Array) -> jax.Array:
    x = model.encoded(tokens, types, mask=(tokens != PAD)[:, None, None, :])
    return model.loss(jnp.take_along_axis(x, masked[..., None], axis=1), labels)  # the head has masked tokens alone


@nnx.jit(donate_argnames=("model", "optimizer"))
def step(model: Bert, optimizer: nnx.Optimizer, *data: jax.Array) -> jax.Array:
    loss, gradient = nnx.value_and_grad(loss_of)(model, *data)
    optimizer.update(model, gradient)
    return loss


def main(steps: int = 200) -> tuple[list[float], coda.Explanation]:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    model = Bert(BertConfig(vocab_size=VOCABULARY, **sizes), dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    optimizer, rng = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param), np.random.default_rng(0)
    losses = [float(step(model, optimizer, *batch(rng))) for _ in range(steps)]
    print(f"loss {losses[0]:.2f} at first, {losses[-1]:.2f} after {steps} steps")
    explanation = coda.explain(nnx.grad(loss_of), model, *batch(rng), platform="cuda")
    print(explanation)
    return losses, explanation


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    main(parser.parse_args().steps)
