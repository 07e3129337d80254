"""`python -m benchmarks.loss_curve`: training on real text, fused in bfloat16 against plain JAX in float32.

Plain JAX in bfloat16 is the control: how far it is from float32 is bfloat16's doing, and what the fused curve is
farther than that is fusing's. The same parameters, batches and optimizer, that of examples/train_lm.py with gradients
clipped; the sources of Python's standard library as bytes. Writes benchmarks/results/<device>_loss_curve.csv and .png,
and prints the largest and the mean gap of each curve to float32's.

With --fp8 the products of layers are in fp8, ours by a recipe with delayed scales and plain JAX's by Flax's fp8_ops.
Both are compared with plain JAX in bfloat16, and the files' names end with _fp8.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from flax import nnx

import coda_jax as coda
from benchmarks import plain_fp8, plain_llama, results
from flax_layers import Llama, LlamaConfig, fp8

matplotlib.use("Agg")
import matplotlib.pyplot as plt

EXAMPLES = pathlib.Path(__file__).resolve().parents[1] / "examples"
WINDOW = 10  # steps whose mean is printed
MAX_NORM = 1.0  # of the gradient of all parameters

Loss = Callable[[Any, Any, jax.Array, jax.Array], jax.Array]


class Variant(NamedTuple):
    """How a loss is computed.

    Attributes:
      loss: of parameters, maxima of steps before, tokens and labels.
      maxima: before the first step; None for none.
      next: the maxima of the next step, of this step's and of their gradient.
    """

    loss: Loss
    maxima: Any = None
    next: Callable[[Any, Any], Any] = lambda maxima, gradient: gradient


def windows(text: jax.Array, index: jax.Array | int, batch: int, length: int) -> tuple[jax.Array, jax.Array]:
    """Tokens and labels of a step."""
    starts = jax.random.randint(jax.random.fold_in(jax.random.key(0), index), (batch,), 0, text.size - length)
    found = text[starts[:, None] + jnp.arange(length + 1)].astype(jnp.int32)
    return found[:, :-1], found[:, 1:]


def losses(
    variant: Variant,
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
    def step(params: Any, maxima: Any, state: Any, index: jax.Array) -> Any:
        tokens, labels = windows(text, index, batch, length)
        value, gradients = jax.value_and_grad(variant.loss, (0, 1))(params, maxima, tokens, labels)
        gradient, of_maxima = gradients
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), variant.next(maxima, of_maxima), state, value

    state, maxima, found = optimizer.init(params), variant.maxima, []
    for index in range(steps):
        params, maxima, state, value = step(params, maxima, state, jnp.int32(index))
        found.append(value)
    return np.asarray(jnp.stack(found))


def fused(config: LlamaConfig, recipe: coda.fp8.Recipe | None, example: tuple[jax.Array, jax.Array]) -> Variant:
    """The fused model in bfloat16, or in fp8 by a recipe whose first scales are of these tokens and labels."""
    model = Llama(config, fp8=recipe, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    if recipe is not None:
        fp8.calibrate(model, lambda model: model.loss(*example))
    graphdef, _, histories = nnx.split(model, nnx.Param, fp8.History)

    def loss(params: Any, histories: Any, tokens: jax.Array, labels: jax.Array) -> jax.Array:
        return nnx.merge(graphdef, params, histories).loss(tokens, labels)

    return Variant(loss, histories, functools.partial(jax.tree.map, coda.fp8.next_history))


def plain(config: LlamaConfig, dtype: Any, *, in_fp8: bool = False) -> Variant:
    """The plain model, with Flax's fp8 where that is asked for."""
    multiply = plain_fp8.MULTIPLICATIONS["flax" if in_fp8 else None]

    def loss(params: Any, states: Any, tokens: jax.Array, labels: jax.Array) -> jax.Array:
        separate = plain_llama.from_fused(nnx.to_pure_dict(params), config)
        separate["layers"] = [p | {"fp8": of} for p, of in zip(separate["layers"], states, strict=True)]
        with jax.default_matmul_precision("highest" if dtype == jnp.float32 else "default"):
            return plain_llama.loss(separate, tokens, labels, config=config, dtype=dtype, multiply=multiply)

    return Variant(loss, [plain_fp8.flax_state() if in_fp8 else {} for _ in range(config.num_hidden_layers)])


def curves(
    config: LlamaConfig, text: np.ndarray, optimizer: optax.GradientTransformation, *, in_fp8: bool, **sizes: int
) -> dict[str, np.ndarray]:
    """The losses of each variant, from the same float32 parameters in the same shapes, which Muon depends on.

    The last is the one that the others are compared with.
    """
    data = jnp.asarray(text)
    example = windows(data, 0, sizes["batch"], sizes["length"])
    variants = {
        "fused_bfloat16": fused(config, None, example),
        "plain_bfloat16": plain(config, jnp.bfloat16),
        "plain_float32": plain(config, jnp.float32),
    }
    if in_fp8:
        del variants["plain_float32"]
        variants = {
            "fused_fp8": fused(config, coda.fp8.Recipe(scaling="delayed"), example),
            "plain_fp8": plain(config, jnp.bfloat16, in_fp8=True),
            **variants,
        }
    params = nnx.state(Llama(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)), nnx.Param)
    found = {}
    for name, one in variants.items():
        found[name] = losses(one, params, data, optimizer, **sizes)
        print(f"{name}: the last {WINDOW} losses {found[name][-WINDOW:].mean():.4f} in the mean", flush=True)
    return found


def plot(found: Mapping[str, np.ndarray], gaps: Mapping[str, np.ndarray], path: pathlib.Path) -> None:
    figure, (above, below) = plt.subplots(2, sharex=True, figsize=(7, 6), height_ratios=[2, 1])
    *_, exact = found
    steps = np.arange(1, len(found[exact]) + 1)
    for (name, curve), style in zip(found.items(), itertools.cycle(("-", "-.", "--", ":"))):
        above.plot(steps, curve, style, label=name.replace("_", " "), linewidth=1)
    for name, gap in gaps.items():
        label = f"{name.replace('_', ' ')}: mean {np.abs(gap).mean():.4f}, largest {np.abs(gap).max():.4f}"
        below.plot(steps, gap, linewidth=1, label=label)
    above.set(ylabel="training loss, nats a byte")
    below.set(xlabel="step", ylabel=f"minus {exact.replace('_', ' ')}")
    for axes in (above, below):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = results.parser("benchmarks.loss_curve", __doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=512, help="of the model, a multiple of 64 (default 512)")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--fp8", action="store_true", help="the layers' products in fp8, against bfloat16")
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU runs in seconds")
    options = parser.parse_args(arguments)
    sys.path.insert(0, str(EXAMPLES))
    import stdlib_text
    import trainer
    from train_lm import DEFAULTS

    width, layers, batch, length = (64, 1, 4, 64) if options.tiny else (options.width, options.layers, 16, 1024)
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
    sizes = {"steps": options.steps, "batch": batch, "length": length}
    found = curves(config, text, optimizer, in_fp8=options.fp8, **sizes)
    *others, reference = found
    exact = found[reference]
    gaps = {name: found[name] - exact for name in others}
    at_end = {name: round(float(curve[-WINDOW:].mean()), 4) for name, curve in found.items()}
    print(f"{options.steps} steps of {batch} x {length} bytes, first loss {exact[0]:.3f}, last {WINDOW}: {at_end}")
    about: dict[str, Any] = {"learning_rate": settings.learning_rate, "max_norm": MAX_NORM, "commit": options.commit}
    about |= {"width": width, "layers": layers}
    for name, gap in gaps.items():
        size = np.abs(gap)
        largest = f"{size.max():.4f} at step {size.argmax() + 1}"
        print(
            f"{name} against {reference}: largest gap {largest}, mean {size.mean():.4f}, mean {gap.mean():+.4f} signed"
        )
        about |= {f"{name}_largest_gap": float(size.max()), f"{name}_mean_gap": float(size.mean())}
    columns = {**found, **{f"{name}_gap": gap for name, gap in gaps.items()}}
    rows = [
        {"step": step + 1, **{name: float(column[step]) for name, column in columns.items()}}
        for step in range(options.steps)
    ]
    suffix = "_loss_curve" + "_fp8" * options.fp8
    path = results.write(suffix, ["step", *columns], rows, folder=options.out, **about)
    plot(found, gaps, path.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
