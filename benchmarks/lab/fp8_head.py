"""`python -m benchmarks.lab.fp8_head`: what a language-model head loses whose forward product has factors of 8 bits.

    z = x w^T,  dz = (softmax(z) - onehot) / N,  dx = dz w,  dw = dz^T x

The errors of dx and dw, as parts of their norms, against float32 of the same x and w: with everything in bfloat16, with
x and w rounded to float8_e4m3fn for z alone, each by one scale, and with dz in float8_e5m2 besides, where all three
products have 8 bits. Of a head at its initial weights with `--vocabulary` tokens, and of a model of bytes that is
trained first, as in `benchmarks.loss_curve`. Prints a table.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax

import coda_jax as coda
from benchmarks import loss_curve
from flax_layers import Llama, LlamaConfig

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
TOKENS, WIDTH = 2048, 2048  # of the head at its initial weights
VARIANTS = ("bfloat16", "e4m3 forward", "e4m3 forward, e5m2 backward")


@functools.partial(jax.jit, static_argnames="variant")
def cotangents(x: jax.Array, w: jax.Array, labels: jax.Array, *, variant: str) -> tuple[jax.Array, jax.Array]:
    """dx and dw of x (N, D), w (V, D) and labels (N,), float32; `variant` is one of `VARIANTS`, or "float32"."""
    is_exact, has_8_bits = variant == "float32", variant.startswith("e4m3")
    x, w = (a if is_exact else to_bfloat16(a) for a in (x, w))
    x_forward, w_forward = (rounded(a, E4M3) if has_8_bits else a for a in (x, w))
    with jax.default_matmul_precision("highest"):  # of factors that are rounded already
        dz = jax.nn.softmax(x_forward @ w_forward.T) - jax.nn.one_hot(labels, w.shape[0])
        if variant.endswith("backward"):
            dz, x, w = rounded(dz, E5M2), x_forward, w_forward
        elif not is_exact:
            dz = to_bfloat16(dz)
        return dz @ w, dz.T @ x


def to_bfloat16(x: jax.Array) -> jax.Array:
    """x as the nearest values of bfloat16, in float32; XLA drops a conversion there and back."""
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """x as the nearest values of 8 bits by a scale that is a power of two, in float32."""
    scale = jnp.exp2(jnp.floor(jnp.log2(float(jnp.finfo(dtype).max) / jnp.max(jnp.abs(x)))))
    return coda.saturate(x * scale, dtype).astype(jnp.float32) / scale


def errors(x: jax.Array, w: jax.Array, labels: jax.Array) -> dict[str, tuple[float, ...]]:
    """Each variant's distance from float32, |dx - exact| / |exact|, and the same of dw."""
    exact = cotangents(x, w, labels, variant="float32")
    return {
        variant: tuple(
            float(jnp.linalg.norm(found - of) / jnp.linalg.norm(of))
            for found, of in zip(cotangents(x, w, labels, variant=variant), exact, strict=True)
        )
        for variant in VARIANTS
    }


def initial(vocabulary: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x, w and labels of a head before the first step."""
    keys = jax.random.split(jax.random.key(0), 3)
    x, w = jax.random.normal(keys[0], (TOKENS, WIDTH)), 0.02 * jax.random.normal(keys[1], (vocabulary, WIDTH))
    return x, w, jax.random.randint(keys[2], (TOKENS,), 0, vocabulary)


def trained(config: LlamaConfig, steps: int, batch: int, length: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x, w and labels of a model of bytes after so many steps in bfloat16."""
    sys.path.insert(0, str(loss_curve.EXAMPLES))
    import stdlib_text

    text = jnp.asarray(stdlib_text.load()[0])
    model = Llama(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3, weight_decay=0.1), wrt=nnx.Param)

    @nnx.jit
    def step(model: Llama, optimizer: nnx.Optimizer[Llama], index: jax.Array) -> jax.Array:
        tokens, labels = loss_curve.windows(text, index, batch, length)
        loss, gradients = nnx.value_and_grad(lambda model: model.loss(tokens, labels))(model)
        optimizer.update(model, gradients)
        return loss

    for index in range(steps):
        loss = step(model, optimizer, jnp.int32(index))
    print(f"trained for {steps} steps: a loss of {float(loss):.3f} nats a byte")
    tokens, labels = loss_curve.windows(text, steps, batch, length)
    stream = coda.Stream.of(model.embed(tokens))
    for layer in model.layers:
        stream = layer(stream)
    x = model.norm(stream).array().astype(jnp.float32)
    return x.reshape(-1, x.shape[-1]), model.head.kernel[...].T, labels.reshape(-1)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lab.fp8_head", description=__doc__.splitlines()[0])
    parser.add_argument("--vocabulary", type=int, default=128256, help="of the head at its initial weights")
    parser.add_argument("--steps", type=int, default=2000, help="of training (default 2000)")
    parser.add_argument("--width", type=int, default=512, help="of the trained model, a multiple of 64 (default 512)")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    options = parser.parse_args(arguments)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=options.width,
        intermediate_size=options.width * 11 // 4,
        num_hidden_layers=options.layers,
        num_attention_heads=options.width // 64,
        max_position_embeddings=options.length,
    )
    heads = {
        f"initial, {options.vocabulary} x {WIDTH}": initial(options.vocabulary),
        f"trained, 256 x {options.width}": trained(config, options.steps, options.batch, options.length),
    }
    print("| head | products | error of dx | of dw |\n|---|---|---|---|")
    for head, inputs in heads.items():
        for variant, (dx, dw) in errors(*inputs).items():
            print(f"| {head} | {variant} | {dx:.4f} | {dw:.4f} |")


if __name__ == "__main__":
    main()
