"""Fine-tunes a model of a Hugging Face folder, with loss on the answers alone, and writes the folder of the result.

    python examples/finetune.py [--model folder] [--out folder] [--steps n]

Without --model it first makes a tiny Llama and writes it as `save_pretrained` of transformers would: config.json and
model.safetensors. The task is to reverse short sequences. Needs optax, and safetensors for the folders.
"""

from __future__ import annotations

import argparse
import tempfile
from importlib.util import find_spec
from pathlib import Path

if missing := [name for name in ("optax", "safetensors") if find_spec(name) is None]:
    names = " ".join(missing)
    raise SystemExit(f'finetune.py needs {names}: pip install {names}, or in a clone pip install ".[train,hf]"')

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from flax_layers import Llama, LlamaConfig, generate
from flax_layers.checkpoints import load_hf_folder, save_hf_folder

LENGTH, BATCH = 4, 64
SEPARATOR, FIRST = 1, 2  # tokens; from FIRST on they are data


def make_folder(path: Path) -> None:
    """A model that nobody has trained, in the form of a checkpoint from elsewhere."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=16, num_key_value_heads=2, max_position_embeddings=64, **sizes)
    save_hf_folder(Llama(config, rngs=nnx.Rngs(0)), path)


def examples(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Prompts with their answers, (count, 2 LENGTH + 1), and labels, which are -100 in the prompt."""
    prompt = rng.integers(FIRST, 12, (count, LENGTH))
    tokens = np.concatenate([prompt, np.full((count, 1), SEPARATOR), prompt[:, ::-1]], axis=1)
    labels = np.where(np.arange(2 * LENGTH) < LENGTH, -100, tokens[:, 1:])
    return tokens.astype(np.int32), labels.astype(np.int32)


@nnx.jit(donate_argnames=("model", "optimizer"))
def step(model: Llama, optimizer: nnx.Optimizer, tokens: jax.Array, labels: jax.Array) -> jax.Array:
    loss, gradient = nnx.value_and_grad(lambda model: model.loss(tokens[:, :-1], labels))(model)
    optimizer.update(model, gradient)
    return loss


def right_answers(model: Llama, rng: np.random.Generator) -> float:
    """The share of sequences that are reversed without an error."""
    tokens, _ = examples(rng, 128)
    made = generate(model, tokens[:, : LENGTH + 1], max_new_tokens=LENGTH).tokens
    return float(np.mean(np.all(np.asarray(made) == tokens[:, LENGTH + 1 :], axis=1)))


def main(model_folder: Path | None, out: Path, steps: int) -> float:
    if model_folder is None:
        model_folder = out / "untrained"
        make_folder(model_folder)
    # Parameters stay float32, as the optimizer wants them; products are in bfloat16 where kernels can run.
    dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
    model = load_hf_folder(model_folder, dtype=dtype)
    rng = np.random.default_rng(0)
    print(f"{model_folder}: {right_answers(model, rng):.0%} of the answers are right")

    schedule = optax.warmup_cosine_decay_schedule(0.0, 5e-3, steps // 10, steps)
    optimizer = nnx.Optimizer(model, optax.adamw(schedule), wrt=nnx.Param)
    for number in range(1, steps + 1):
        loss = step(model, optimizer, *map(jnp.asarray, examples(rng, BATCH)))
        if number % 100 == 0:
            print(f"step {number}: loss {loss:.3f} on the answers")

    save_hf_folder(model, out / "trained")
    share = right_answers(load_hf_folder(out / "trained", dtype=dtype), rng)
    print(f"{out / 'trained'}: {share:.0%} of the answers are right")
    return share


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a folder with config.json and safetensors; default: makes one")
    parser.add_argument("--out", type=Path, help="where the result goes; default: a temporary folder")
    parser.add_argument("--steps", type=int, default=500)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        main(given.model, given.out or Path(temporary), given.steps)
