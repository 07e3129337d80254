"""Profiles a training step: what is lowered to what, compiled memory, time a step, and a trace to look into.

    python examples/profile_step.py [--out folder] [--width 256] [--layers 2] [--tokens 512]

The trace is in JAX's format: open it with Perfetto or XProf. On a GPU kernels are named by their epilogue in XLA's
metadata. A kernel that is launched early overlaps the one before it, so times of single kernels do not add up.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

if find_spec("optax") is None:
    raise SystemExit('profile_step.py needs optax: pip install optax, or in a clone pip install ".[train,hf]"')

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import coda_jax as coda
from flax_layers import Llama, LlamaConfig


def make(width: int, layers: int, tokens: int):
    """A step function of a state, and its arguments."""
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers}
    config = LlamaConfig(vocab_size=1024, num_attention_heads=width // 64, **sizes)
    graph, params = nnx.split(Llama(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    optimizer = optax.adamw(1e-3)

    def step(params, state, tokens):
        def loss_of(params):
            return nnx.merge(graph, params).loss(tokens[:, :-1], tokens[:, 1:])

        loss, gradient = jax.value_and_grad(loss_of)(params)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, loss

    data = jax.random.randint(jax.random.key(0), (2, tokens // 2 + 1), 0, 1024)
    return step, (params, optimizer.init(params), data)


def main(out: Path, width: int = 256, layers: int = 2, tokens: int = 512, steps: int = 5) -> list[Path]:
    step, arguments = make(width, layers, tokens)
    print(coda.explain(step, *arguments, platform="cuda"))  # what a Hopper GPU runs

    began = time.perf_counter()
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*arguments).compile()
    print(f"\ncompiled in {time.perf_counter() - began:.1f} s for {jax.devices()[0].device_kind}")
    if (memory := compiled.memory_analysis()) is not None:
        print(f"temporaries {memory.temp_size_in_bytes / 2**20:.1f} MiB")
    calls = compiled.as_text().count('custom_call_target="coda_gemm"')
    print(f"{calls} calls of coda_jax's kernels")

    times = []
    *state, data = arguments
    *state, _ = jax.block_until_ready(compiled(*state, data))  # the first run loads kernels
    with jax.profiler.trace(str(out)):
        for number in range(steps):
            with jax.profiler.StepTraceAnnotation("step", step_num=number):
                began = time.perf_counter()
                *state, _ = jax.block_until_ready(compiled(*state, data))
                times.append(time.perf_counter() - began)
    print(f"a step: median {1e3 * statistics.median(times):.1f} ms, least {1e3 * min(times):.1f} ms")
    written = sorted(path for path in out.rglob("*") if path.is_file())
    print("written:", *(path.name for path in written))
    return written


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder of the trace; default: a temporary one")
    for name, default in (("width", 256), ("layers", 2), ("tokens", 512)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        main(given.out or Path(temporary), given.width, given.layers, given.tokens)
