"""`python -m benchmarks.loss_curve`: training on real text, fused in bfloat16 against plain JAX in float32.

The same parameters, batches and optimizer, the sources of Python's standard library as bytes. Writes
benchmarks/results/<device>_loss_curve.csv and .png, and prints the largest gap between the two curves.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from flax import nnx

from benchmarks import plain_llama, results
from flax_layers import Llama, LlamaConfig

matplotlib.use("Agg")
import matplotlib.pyplot as plt

EXAMPLES = pathlib.Path(__file__).resolve().parents[1] / "examples"
WINDOW = 10  # steps whose mean is printed


def losses(
    loss: Callable[[Any, jax.Array, jax.Array], jax.Array],
    params: Any,
    text: jax.Array,
    *,
    steps: int,
    batch: int,
    length: int,
) -> np.ndarray:
    """The training losses of all steps, in nats a byte."""
    optimizer = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 2e-3, max(1, steps // 10), steps), b2=0.95)

    @jax.jit
    def step(params: Any, state: Any, index: jax.Array) -> Any:
        starts = jax.random.randint(jax.random.fold_in(jax.random.key(0), index), (batch,), 0, text.size - length)
        windows = text[starts[:, None] + jnp.arange(length + 1)].astype(jnp.int32)
        value, gradient = jax.value_and_grad(loss)(params, windows[:, :-1], windows[:, 1:])
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    state, found = optimizer.init(params), []
    for index in range(steps):
        params, state, value = step(params, state, jnp.int32(index))
        found.append(value)
    return np.asarray(jnp.stack(found))


def both(config: LlamaConfig, text: np.ndarray, **sizes: int) -> dict[str, np.ndarray]:
    """The fused losses in bfloat16 and the plain ones in float32, from the same float32 parameters."""
    model = Llama(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(model, nnx.Param)
    plain = plain_llama.from_fused(nnx.to_pure_dict(params), config)

    def fused_loss(params: Any, tokens: jax.Array, labels: jax.Array) -> jax.Array:
        return nnx.merge(graphdef, params).loss(tokens, labels)

    def plain_loss(params: Any, tokens: jax.Array, labels: jax.Array) -> jax.Array:
        with jax.default_matmul_precision("highest"):
            return plain_llama.loss(params, tokens, labels, config=config, dtype=jnp.float32)

    data = jnp.asarray(text)
    return {
        "fused bfloat16": losses(fused_loss, params, data, **sizes),
        "plain float32": losses(plain_loss, plain, data, **sizes),
    }


def plot(found: dict[str, np.ndarray], path: pathlib.Path) -> None:
    figure, (above, below) = plt.subplots(2, sharex=True, figsize=(7, 6), height_ratios=[3, 1])
    for (name, curve), style in zip(found.items(), ("-", "--"), strict=True):
        above.plot(np.arange(1, len(curve) + 1), curve, style, label=name)
    fused, exact = found.values()
    below.plot(np.arange(1, len(fused) + 1), fused - exact, color="black", linewidth=1)
    above.set(ylabel="training loss, nats a byte")
    below.set(xlabel="step", ylabel="difference")
    above.legend()
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loss_curve", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU runs in seconds")
    parser.add_argument("--out", type=pathlib.Path, default=results.FOLDER, help="folder of the CSV and the plot")
    parser.add_argument("--commit", default=results.commit(), help="written into the results")
    options = parser.parse_args(arguments)
    sys.path.insert(0, str(EXAMPLES))
    import stdlib_text

    width, layers, sizes = (64, 2, (4, 64)) if options.tiny else (512, 8, (16, 1024))
    config = LlamaConfig(
        vocab_size=stdlib_text.VOCAB_SIZE,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=width // 64 if width > 64 else 2,
        max_position_embeddings=sizes[1],
    )
    text, _ = stdlib_text.load()
    found = both(config, text, steps=options.steps, batch=sizes[0], length=sizes[1])
    fused, exact = found.values()
    gap = np.abs(fused - exact)
    at_end = {name: round(float(curve[-WINDOW:].mean()), 4) for name, curve in found.items()}
    print(f"{options.steps} steps of {sizes[0]} x {sizes[1]} bytes, first loss {exact[0]:.3f}, last {WINDOW}: {at_end}")
    print(f"largest gap {gap.max():.4f} at step {gap.argmax() + 1}, mean {gap.mean():.4f}")
    rows = [
        {"step": i + 1, "fused": float(a), "plain": float(b)} for i, (a, b) in enumerate(zip(fused, exact, strict=True))
    ]
    path = results.write("_loss_curve", ["step", "fused", "plain"], rows, folder=options.out, commit=options.commit)
    plot(found, path.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
