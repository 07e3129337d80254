"""`python -m benchmarks.loss_curve`: training on real text, fused in bfloat16 against plain JAX in float32.

Plain JAX in bfloat16 is the control: how far it is from float32 is bfloat16's doing, and what the fused curve is
farther than that is fusing's. The same parameters, batches and optimizer, that of examples/train_lm.py with gradients
clipped; the sources of Python's standard library as bytes. Writes benchmarks/results/<device>_loss_curve.csv and .png,
and prints the largest and the mean gap of each curve to float32's.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
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
MAX_NORM = 1.0  # of the gradient of all parameters
EXACT = "plain_float32"  # what the others are compared with

Loss = Callable[[Any, jax.Array, jax.Array], jax.Array]


def losses(
    loss: Loss,
    params: Any,
    text: jax.Array,
    optimizer: optax.GradientTransformation,
    *,
    steps: int,
    batch: int,
    length: int,
) -> np.ndarray:
    """The training losses of all steps, in nats a byte."""

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


def curves(
    config: LlamaConfig, text: np.ndarray, optimizer: optax.GradientTransformation, **sizes: int
) -> dict[str, np.ndarray]:
    """The losses of each variant, from the same float32 parameters in the same shapes, which Muon depends on."""
    model = Llama(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(model, nnx.Param)

    def fused(params: Any, tokens: jax.Array, labels: jax.Array) -> jax.Array:
        return nnx.merge(graphdef, params).loss(tokens, labels)

    def plain(dtype: Any) -> Loss:
        def loss(params: Any, tokens: jax.Array, labels: jax.Array) -> jax.Array:
            separate = plain_llama.from_fused(nnx.to_pure_dict(params), config)
            with jax.default_matmul_precision("highest" if dtype == jnp.float32 else "default"):
                return plain_llama.loss(separate, tokens, labels, config=config, dtype=dtype)

        return loss

    variants = {"fused_bfloat16": fused, "plain_bfloat16": plain(jnp.bfloat16), EXACT: plain(jnp.float32)}
    data = jnp.asarray(text)
    return {name: losses(loss, params, data, optimizer, **sizes) for name, loss in variants.items()}


def plot(found: Mapping[str, np.ndarray], gaps: Mapping[str, np.ndarray], path: pathlib.Path) -> None:
    figure, (above, below) = plt.subplots(2, sharex=True, figsize=(7, 6), height_ratios=[2, 1])
    steps = np.arange(1, len(found[EXACT]) + 1)
    for (name, curve), style in zip(found.items(), ("-", "-.", "--"), strict=True):
        above.plot(steps, curve, style, label=name.replace("_", " "), linewidth=1)
    for name, gap in gaps.items():
        label = f"{name.replace('_', ' ')}: mean {np.abs(gap).mean():.4f}, largest {np.abs(gap).max():.4f}"
        below.plot(steps, gap, linewidth=1, label=label)
    above.set(ylabel="training loss, nats a byte")
    below.set(xlabel="step", ylabel="minus plain float32")
    for axes in (above, below):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = results.parser("benchmarks.loss_curve", __doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU runs in seconds")
    options = parser.parse_args(arguments)
    sys.path.insert(0, str(EXAMPLES))
    import stdlib_text
    import trainer
    from train_lm import DEFAULTS

    width, layers, batch, length = (64, 1, 4, 64) if options.tiny else (512, 8, 16, 1024)
    heads = width // 64 if width > 64 else 2
    config = LlamaConfig(
        vocab_size=stdlib_text.VOCAB_SIZE,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=length,
    )
    settings = dataclasses.replace(DEFAULTS["gpu"], steps=options.steps)
    optimizer = optax.chain(optax.clip_by_global_norm(MAX_NORM), trainer.make_optimizer(settings))
    text, _ = stdlib_text.load()
    found = curves(config, text, optimizer, steps=options.steps, batch=batch, length=length)
    exact = found[EXACT]
    gaps = {name: curve - exact for name, curve in found.items() if name != EXACT}
    at_end = {name: round(float(curve[-WINDOW:].mean()), 4) for name, curve in found.items()}
    print(f"{options.steps} steps of {batch} x {length} bytes, first loss {exact[0]:.3f}, last {WINDOW}: {at_end}")
    about: dict[str, Any] = {"learning_rate": settings.learning_rate, "max_norm": MAX_NORM, "commit": options.commit}
    for name, gap in gaps.items():
        size = np.abs(gap)
        print(
            f"{name} against {EXACT}: largest gap {size.max():.4f} at step {size.argmax() + 1}, mean {size.mean():.4f}"
        )
        about |= {f"{name}_largest_gap": float(size.max()), f"{name}_mean_gap": float(size.mean())}
    columns = {**found, **{f"{name}_gap": gap for name, gap in gaps.items()}}
    rows = [
        {"step": step + 1, **{name: float(column[step]) for name, column in columns.items()}}
        for step in range(options.steps)
    ]
    path = results.write("_loss_curve", ["step", *columns], rows, folder=options.out, **about)
    plot(found, gaps, path.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
