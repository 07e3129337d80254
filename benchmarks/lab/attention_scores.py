"""`python -m benchmarks.lab.attention_scores`: what NVRTC makes of score functions in attention, without a GPU.

For each function and width of heads a row of a table in Markdown: seconds of NVRTC, registers of a thread as the kernel
asks for them, and bytes that a thread spills, stores and loads together, of the forward and of the backward kernel, and
of the latter with the gradients of operands, causal, in bfloat16. The first rows are those without a score.

    python -m benchmarks.lab.attention_scores --names "soft cap,ALiBi" --widths 64,128
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp

from benchmarks.lab.machine_code import resource_usage
from coda_jax import ffi
from coda_jax.attend import kernel
from coda_jax.attend.score import trace
from coda_jax.attend.spec import AttentionSpec, MaskSpec
from coda_jax.tiles.arch import SM90

B, H, K, T = 1, 8, 2, 4096
KERNELS = ("attention", "attention, backward")
WITH_GRADIENTS = "attention, backward, gradients of operands"


class Function(NamedTuple):
    """A score function, with the shapes and dtypes of its operands."""

    score: Callable[..., jax.Array]
    operands: tuple[jax.ShapeDtypeStruct, ...] = ()


def _positions(s: jax.Array) -> tuple[jax.Array, jax.Array]:
    row, key = (jax.lax.broadcasted_iota(jnp.int32, s.shape, axis) for axis in (2, 3))
    return row, key


def soft_cap(s: jax.Array) -> jax.Array:
    return 50 * jnp.tanh(s / 50)


def alibi(s: jax.Array) -> jax.Array:
    row, key = _positions(s)
    return s - jnp.exp2(-8 * jnp.arange(1, H + 1) / H)[:, None, None] * (row - key)


def alibi_of_slopes(s: jax.Array, slopes: jax.Array) -> jax.Array:
    row, key = _positions(s)
    return s - slopes[:, None, None] * jnp.abs(row - key)


def decay(s: jax.Array, gates: jax.Array) -> jax.Array:
    return s + gates[..., None] - gates[:, :, None]


def prefix(s: jax.Array, lengths: jax.Array) -> jax.Array:
    row, key = _positions(s)
    return jnp.where((key <= row) | (key < lengths[:, None, None, None]), s, -jnp.inf)


def documents(s: jax.Array, ids: jax.Array) -> jax.Array:
    row, key = _positions(s)
    return jnp.where((ids[:, None, :, None] == ids[:, None, None]) & (row >= key), s, -jnp.inf)


def window_2d(s: jax.Array) -> jax.Array:
    row, key = _positions(s)
    near = (jnp.abs(row // 64 - key // 64) <= 3) & (jnp.abs(row % 64 - key % 64) <= 3)
    return jnp.where(near, s, -jnp.inf)


def distance_by_row(s: jax.Array, weights: jax.Array) -> jax.Array:
    row, key = _positions(s)
    return s - weights[..., None] * jnp.log1p(jnp.abs(row - key).astype(jnp.float32))


def gate(s: jax.Array, gates: jax.Array) -> jax.Array:
    return s * jnp.tanh(gates)[:, None, None]


def causal(s: jax.Array) -> jax.Array:
    row, key = _positions(s)
    return jnp.where(row >= key, s, -jnp.inf)


def t5_buckets(s: jax.Array, table: jax.Array) -> jax.Array:
    """T5's bias: a table (32, H) of 32 buckets of distances, wider where they are far."""
    distance = jnp.arange(s.shape[3]) - jnp.arange(s.shape[2])[:, None]
    near = jnp.abs(distance)
    far = 8 + (jnp.log(jnp.maximum(near, 1) / 8) / jnp.log(16) * 8).astype(jnp.int32)
    bucket = jnp.where(near < 8, near, jnp.minimum(far, 15)) + 16 * (distance > 0)
    return s + table[bucket].transpose(2, 0, 1)


def _array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


FUNCTIONS: dict[str, Function | None] = {
    "none": None,
    "soft cap": Function(soft_cap),
    "ALiBi": Function(alibi),
    "ALiBi, learned slopes": Function(alibi_of_slopes, (_array(H),)),
    "decay": Function(decay, (_array(B, H, T),)),
    "prefix-LM": Function(prefix, (_array(B, dtype=jnp.int32),)),
    "documents": Function(documents, (_array(B, T, dtype=jnp.int32),)),
    "2-D window": Function(window_2d),
    "distance, weights by row": Function(distance_by_row, (_array(B, H, T),)),
    "tanh gate": Function(gate, (_array(H),)),
    "causal by where": Function(causal),
    "T5 buckets": Function(t5_buckets, (_array(32, H),)),
}


def sources(function: Function | None, width: int) -> dict[str, str]:
    """The texts of the kernels with a score, by their names."""
    found: dict[str, str] = {}

    def launched(arrays: Sequence[Any], results: Sequence[Any], call: ffi.LaunchCall, *_: Any) -> list[jax.Array]:
        found[call.name] = call.source
        return [jnp.zeros(x.shape, x.dtype) for x in results]

    def run(q: jax.Array, k: jax.Array, lse: jax.Array, *operands: jax.Array) -> None:
        score, read = (None, ()) if function is None else trace(function.score, operands, (B, H, T, T))
        spec = AttentionSpec(MaskSpec(right=0), width**-0.5, score=score)
        kernel.forward(q, k, k, *read, spec=spec)
        backward = (q, k, k, *read, q, lse, q, lse)
        if score is not None and (gradients := score.sums_of_kernel([x.shape for x in read])):
            kernel.backward(*backward, spec=dataclasses.replace(spec, score_gradients=gradients))
            found[WITH_GRADIENTS] = found[KERNELS[1]]
        kernel.backward(*backward, spec=spec)

    of_heads = [_array(B, T, heads, width, dtype=jnp.bfloat16) for heads in (H, K)]
    with mock.patch.object(kernel, "_launched", launched):
        jax.eval_shape(run, *of_heads, _array(B, H, T), *(() if function is None else function.operands))
    return {name: found[name] for name in (*KERNELS, WITH_GRADIENTS) if name in found}


def measured(text: str, name: str) -> tuple[str, str, str]:
    """Seconds, registers and spilled bytes of a kernel."""
    done = ffi.compile(text, name, SM90.target)
    usage = resource_usage(done.log)
    return f"{done.seconds:.1f}", str(usage.registers), str(usage.spilled_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", default=",".join(name.replace(",", ";") for name in FUNCTIONS))
    parser.add_argument("--widths", default="64,128,256")
    options = parser.parse_args()
    columns = ("forward: seconds", "backward: seconds", "with gradients of operands: seconds")
    print(f"| score | heads of | {' | '.join(f'{x} | registers | spilled' for x in columns)} |")
    print("|---" * 11 + "|")
    for name in (name.replace(";", ",") for name in options.names.split(",")):
        for width in map(int, options.widths.split(",")):
            texts = sources(FUNCTIONS[name], width)
            cells = [cell for kernel_name, text in texts.items() for cell in measured(text, kernel_name)]
            cells += ["-"] * (9 - len(cells))
            print(f"| {name} | {width} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
