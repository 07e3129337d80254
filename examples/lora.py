"""Fine-tunes a Llama with low-rank adapters on packed sequences, and writes them as a folder of Hugging Face's PEFT.

    python examples/lora.py [folder]

A base model learns to count by 1; its adapters learn to count by 3, with the base's kernels frozen. Sequences of many
lengths are packed into rows without padding: `segment_ids` tells attention and the loss where each ends. Needs optax,
and safetensors to write the folder.
"""

from __future__ import annotations

import argparse
import tempfile
from importlib.util import find_spec
from pathlib import Path

if missing := [name for name in ("optax", "safetensors") if find_spec(name) is None]:
    names = " ".join(missing)
    raise SystemExit(f'lora.py needs {names}: pip install {names}, or in a clone pip install ".[train,hf]"')

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from flax_layers import Llama, LlamaConfig, add_lora, generate, merge_lora
from flax_layers.checkpoints import load_peft_folder, save_peft_folder

VOCABULARY, ROWS, LENGTH = 32, 16, 48
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}


def packed(rng: np.random.Generator, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows (ROWS, LENGTH + 1) of sequences that count by `step`, one behind the other, and their segment ids."""
    tokens, segment_ids = (np.zeros((ROWS, LENGTH + 1), np.int32) for _ in range(2))
    for row, ids in zip(tokens, segment_ids, strict=True):
        start = 0
        while start < len(row):
            end = start + rng.integers(4, 12)
            end = end if end + 2 <= len(row) else len(row)  # no sequence of one token, which has no label
            row[start:end] = (rng.integers(VOCABULARY) + step * np.arange(end - start)) % VOCABULARY
            ids[start:end] = start  # any integer that its neighbours do not have
            start = end
    return tokens, segment_ids


def train(model: Llama, wrt: type[nnx.Variable], rng: np.random.Generator, step: int, steps: int) -> float:
    """The last loss of a training of the variables of this type."""
    optimizer = nnx.Optimizer(model, optax.adam(5e-3), wrt=wrt)

    @nnx.jit(donate_argnames=("model", "optimizer"))
    def update(model: Llama, optimizer: nnx.Optimizer, tokens: jax.Array, segment_ids: jax.Array) -> jax.Array:
        def loss(model: Llama) -> jax.Array:
            # The label of a segment's last token is another sequence's, and does not count.
            return model.loss(tokens[:, :-1], tokens[:, 1:], segment_ids=segment_ids[:, :-1], positions="restart")

        value, gradient = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, wrt))(model)
        optimizer.update(model, gradient)
        return value

    for _ in range(steps):
        value = update(model, optimizer, *map(jnp.asarray, packed(rng, step)))
    return float(value)


def counted(model: Llama) -> list[int]:
    return generate(model, jnp.array([[1, 4, 7]]), max_new_tokens=4).tokens[0].tolist()


def main(folder: Path) -> list[int]:
    rng = np.random.default_rng(0)
    dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
    model = Llama(LlamaConfig(vocab_size=VOCABULARY, **SIZES), dtype=dtype, rngs=nnx.Rngs(0))
    print(f"base, counts by 1: loss {train(model, nnx.Param, rng, 1, 150):.3f}")
    graph, state = nnx.split(model)
    base = nnx.merge(graph, jax.tree.map(jnp.copy, state))  # the steps below donate the model's arrays

    add_lora(model, 8, rngs=nnx.Rngs(1))
    print(f"adapters, count by 3: loss {train(model, nnx.LoRAParam, rng, 3, 300):.3f}")
    save_peft_folder(model, folder)  # base_model= tells PEFT which base they are of
    print(f"after 1, 4, 7: {counted(model)}; written: {', '.join(sorted(path.name for path in folder.iterdir()))}")

    load_peft_folder(base, folder)  # into the base, as anybody who has it would
    merge_lora(base)
    print(f"read and merged: {counted(base)}")
    return counted(base)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, help="of the adapters; default: a temporary one")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        main(given.folder or Path(temporary))
