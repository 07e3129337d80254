"""Packs documents of many lengths into rows without padding, and shows that each is trained as if it were alone.

    python examples/packing.py

`segment_ids` tells attention and the loss where a document ends. The packed loss is compared with that of the
documents one by one, which are padded to the longest.
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flax_layers import Llama, LlamaConfig

IGNORED = -100


def pack(documents: list[np.ndarray], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows (R, length + 1) of documents, and segment ids: first fit, the longest first; what is left over is padding.

    Padding has the id 0 and token 0; a document's id is its place in the row, from 1 on.
    """
    rows: list[list[np.ndarray]] = []
    for document in sorted(documents, key=len, reverse=True):
        if not 2 <= len(document) <= length + 1:
            raise ValueError(f"a document of {len(document)} tokens; rows take 2 to {length + 1}")
        fits = (row for row in rows if sum(map(len, row)) + len(document) <= length + 1)
        row = next(fits, None)
        if row is None:
            rows.append(row := [])
        row.append(document)
    tokens, segment_ids = (np.zeros((len(rows), length + 1), np.int32) for _ in range(2))
    for i, row in enumerate(rows):
        start = 0
        for number, document in enumerate(row, start=1):
            tokens[i, start : start + len(document)] = document
            segment_ids[i, start : start + len(document)] = number
            start += len(document)
    return tokens, segment_ids


@nnx.jit
def packed_loss(model: Llama, tokens: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Mean over all labels of all documents. Labels of a document's last token and of padding do not count."""
    labels = jnp.where(segment_ids[:, 1:] == 0, IGNORED, tokens[:, 1:])
    return model.loss(tokens[:, :-1], labels, segment_ids=segment_ids[:, :-1], positions="restart")


@nnx.jit
def padded_loss(model: Llama, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    """The same of documents (count, T), one a row."""
    labels = jnp.where(jnp.arange(1, tokens.shape[1]) < lengths[:, None], tokens[:, 1:], IGNORED)
    return model.loss(tokens[:, :-1], labels)


def main() -> tuple[float, float]:
    rng = np.random.default_rng(0)
    documents = [rng.integers(1, 32, rng.integers(3, 65)).astype(np.int32) for _ in range(24)]
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
    model = Llama(LlamaConfig(vocab_size=32, **sizes), dtype=dtype, rngs=nnx.Rngs(0))

    tokens, segment_ids = pack(documents, 64)
    packed = float(packed_loss(model, tokens, segment_ids))

    lengths = np.array(list(map(len, documents)), np.int32)
    padded_tokens = np.zeros((len(documents), 65), np.int32)
    for row, document in zip(padded_tokens, documents, strict=True):
        row[: len(document)] = document
    padded = float(padded_loss(model, padded_tokens, lengths))

    used = lengths.sum()
    print(f"packed: {len(tokens)} rows, {used / tokens.size:.0%} of them used; loss {packed:.5f}")
    print(f"padded: {len(documents)} rows, {used / padded_tokens.size:.0%} of them used; loss {padded:.5f}")
    return packed, padded


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    main()
