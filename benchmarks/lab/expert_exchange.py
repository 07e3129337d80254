"""`python -m benchmarks.lab.expert_exchange`: what the experts of a layer on several GPUs exchange, and its time.

Value and gradients of `expert_parallel` over one mesh axis of all GPUs of this host, by default with the sizes of
Qwen3-30B-A3B: --tokens a GPU, k of --experts each, at random. Variants are the receive buffer, with a place for all
rows or for so many times the T k rows of a device (--buffers), and how rows are sent: by `jax.lax.ragged_all_to_all`
or in blocks; each with its experts, and as an exchange alone. Printed are the compiled program's collectives with what
each is given on a device, MiB, the MiB of rows that leave the busiest device for another each time, temporaries, and
milliseconds by the wall clock, of programs back to back, interleaved, medians.

--described N compiles for N H100s that are described alone, and times nothing: no GPU is needed, but jax[cuda13].
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import coda_jax as coda
from benchmarks.hlo import hlo_computations
from benchmarks.lab.schedule import as_on_gpus, described_mesh
from benchmarks.sharded_step import COLLECTIVES, Scheme, interleaved, use_whole_gpus
from flax_layers import sharding
from flax_layers.moe import exchange
from flax_layers.moe.expert_parallel import expert_parallel

RULES: sharding.Plan = {"batch": "expert", "expert": "expert"}
TOKENS, REPLICATED = PartitionSpec("expert"), PartitionSpec()
KINDS = (*COLLECTIVES, "ragged-all-to-all")


class Variant(NamedTuple):
    """Rows of the receive buffer, in T k of a device, 0 for all; the way of sending; whether experts compute."""

    buffer: int
    blocks: bool
    computes: bool

    def __str__(self) -> str:
        buffer = f"{self.buffer} T k" if self.buffer else "all rows"
        return f"{'blocks' if self.blocks else 'ragged'}, {buffer}, {'experts' if self.computes else 'exchange alone'}"


def experts(
    computes: bool, rows: jax.Array, row_scale: jax.Array, group_sizes: jax.Array, gate_up: jax.Array, down: jax.Array
) -> jax.Array:
    if computes:
        return coda.expert_mlp(rows, gate_up, down, group_sizes, row_scale=row_scale)
    return (rows * row_scale[:, None]).astype(rows.dtype)


def step(variant: Variant) -> Callable[..., Any]:
    """Value and gradients of the layer's sum of squares."""

    def loss(x: jax.Array, weights: jax.Array, gate_up: jax.Array, down: jax.Array, ids: jax.Array) -> jax.Array:
        run = functools.partial(experts, variant.computes)
        y = expert_parallel(run, x, ids, weights, (gate_up, down), capacity_factor=variant.buffer or None)
        y = y[0] if isinstance(y, tuple) else y
        return jnp.sum(y.astype(jnp.float32) ** 2)

    def run(x: jax.Array, ids: jax.Array, weights: jax.Array, gate_up: jax.Array, down: jax.Array) -> Any:
        with sharding.axis_rules(RULES):
            return jax.value_and_grad(loss, (0, 1, 2, 3))(x, weights, gate_up, down, ids)

    return jax.jit(run)


def types(mesh: Mesh, options: argparse.Namespace) -> list[jax.ShapeDtypeStruct]:
    """x, ids, weights, gate_up and down."""
    tokens, width, hidden = options.tokens * mesh.size, options.width, options.hidden
    shapes = [(tokens, 1, width), (tokens, 1, options.k), (tokens, 1, options.k)]
    shapes += [(options.experts, width, 2, hidden), (options.experts, hidden, width)]
    dtypes = [jnp.bfloat16, jnp.int32, jnp.float32, jnp.bfloat16, jnp.bfloat16]
    sharded = NamedSharding(mesh, TOKENS)
    return [jax.ShapeDtypeStruct(*each, sharding=sharded) for each in zip(shapes, dtypes, strict=True)]


def arrays(mesh: Mesh, options: argparse.Namespace) -> tuple[list[jax.Array], float]:
    """The arrays of `types`, and the MiB of rows that leave the busiest device."""
    rng = np.random.default_rng(0)
    found = []
    for type_ in types(mesh, options):
        if type_.dtype == jnp.int32:
            scores = rng.random((*type_.shape[:2], options.experts), np.float32)
            ids = np.argpartition(scores, options.k, axis=-1)[..., : options.k].astype(np.int32)
            found.append(jax.device_put(ids, type_.sharding))
        else:
            make = functools.partial(jax.random.normal, shape=type_.shape, dtype=type_.dtype)
            found.append(
                jax.jit(lambda key, make=make: make(key) / 64, out_shardings=type_.sharding)(jax.random.key(0))
            )
    owners = (ids // (options.experts // mesh.size)).reshape(mesh.size, -1)
    leaving = max(int(np.sum(of_device != device)) for device, of_device in enumerate(owners))
    return found, leaving * options.width * 2 / 2**20


def collectives(text: str) -> list[str]:
    """The collectives of a compiled program, each with the dtype, shape and MiB of its first operand."""
    found = []
    for computation in hlo_computations(text):
        for operation in computation:
            if operation.operation.removesuffix("-start") in KINDS:
                given = operation.operands[0][1]
                shape = ",".join(map(str, given.shape))
                found.append(
                    f"{operation.operation.removesuffix('-start'):18} {given.dtype}[{shape}] {given.bytes / 2**20:.2f}"
                )
    return sorted(found)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("benchmarks.lab.expert_exchange", description=__doc__)
    sizes = {"tokens": 8192, "experts": 128, "k": 8, "width": 2048, "hidden": 768}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--buffers", default="0,2", help="rows of the receive buffer in T k, 0 for all (default 0,2)")
    parser.add_argument("--described", type=int, default=0, help="H100s to compile for")
    parser.add_argument("--rounds", type=int, default=12, help="measured rounds (default 12)")
    parser.add_argument("--burst", type=int, default=5, help="executions back to back (default 5)")
    options = parser.parse_args(arguments)
    scheme = Scheme("ep", {"expert": options.described or len(jax.devices())}, RULES)
    mesh = described_mesh(scheme) if options.described else scheme.mesh(AxisType.Auto)
    given, leaving = (types(mesh, options), None) if options.described else arrays(mesh, options)
    variants = [
        Variant(int(buffer), blocks, computes)
        for computes in (True, False)
        for blocks in (False, True)
        for buffer in options.buffers.split(",")
    ]
    calls = {}
    for variant in variants:
        way = exchange.send_in_blocks if variant.blocks else exchange.send_ragged
        on_gpus = as_on_gpus() if options.described else mock.patch.dict({})
        with jax.set_mesh(mesh), mock.patch.object(exchange, "send_ragged", way), on_gpus:
            compiled = step(variant).lower(*given).compile()
        print(f"{variant}: {compiled.memory_analysis().temp_size_in_bytes / 2**30:.2f} GiB of temporaries")
        print(*(f"    {line} MiB" for line in collectives(compiled.as_text())), sep="\n", flush=True)
        calls[str(variant)] = functools.partial(compiled, *given)
    if options.described:
        return 0
    print(f"rows that leave the busiest device, each time: {leaving:.1f} MiB")
    for name, ms in interleaved(calls, options.rounds, options.burst).items():
        print(f"{name:40} {ms:8.3f} ms", flush=True)
    return 0


if __name__ == "__main__":
    use_whole_gpus()
    sys.exit(main())
