"""`python -m benchmarks.lab.schedule`: what XLA makes of a training step for any number of H100s, without a GPU.

XLA's GPU compiler needs to know a chip, not to have one: it compiles the steps of `benchmarks.sharded_step` for a mesh
of described devices. Counts of collectives and bytes of temporaries are those of the same program on GPUs. The order of
the program is printed a letter an operation, and how much of what collectives move has no kernel beside it: bytes whose
collective is done before a product or attention begins.

    P product   A, B attention, its backward pass   G..g all-gather   S..s reduce-scatter   R..r all-reduce   W loop

jax[cuda13] must be installed (Linux; no driver is needed): `make EXTRA=cuda lab-schedule` sees to it, in an environment
that it makes itself. Or, in one that has it:

    python -m benchmarks.lab.schedule --schemes fsdp --variants coda,xla --devices 8
    python -m benchmarks.lab.schedule --model 8b --devices 64 --variants coda_recompute,xla_scan_remat --text hlo
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import pathlib
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import Mesh

from benchmarks import hlo
from benchmarks.sharded_step import DEFAULTS, MODELS, Scheme, collectives, schemes, use_whole_gpus
from benchmarks.variants import VARIANTS, Parameters, step
from coda_jax.tiles.arch import as_if_attached

DEVICE = "NVIDIA H100 80GB HBM3"
# What XLA's compiler asks about a chip (its GpuTargetConfigProto), from NVIDIA's data sheet and CUDA's documentation.
# `rate_infos` are operations a clock of a multiprocessor's units, by the number of XLA's type: XLA takes them for the
# time of elementwise code and of products; 16 is bfloat16, 10 float16, 11 float32, 12 float64, the rest integers.
_SCALAR = {4: (64, 1), 8: (64, 1), 10: (128, 2), 11: (128, 1), 12: (64, 1), 16: (128, 2)}
_MATRIX = {2: 1024, 6: 1024, 10: 512, 11: 256, 12: 32, 16: 512}
_CHIP = """
gpu_device_info {
  name: "NVIDIA H100 80GB HBM3" device_vendor: "NVIDIA Corporation"
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98 threads_per_warp: 32
  threads_per_block_limit: 1024 threads_per_core_limit: 2048
  registers_per_block_limit: 65536 registers_per_core_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  device_memory_size: 84942979072 memory_bandwidth: 3352320000000 l2_cache_size: 52428800 ecc_enabled: true
  device_address_bits: 64 pcie_bandwidth: 34359738368 collective_memory_granularity: 2097152
  device_interconnect_info { active_links: 18 }
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" dnn_version: "9.10.0"
  scalar_unit_description { %s }
  matrix_unit_description { %s }
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 } device_description_str: "NVIDIA H100 80GB HBM3"
"""


def chip() -> str:
    """The description of an H100, a text proto."""
    scalar = (
        f"rate_infos {{ key: {key} value {{ clock_rate_ghz: 1.98 units_per_core: {units} ops_per_clock: {ops} }} }}"
        for key, (units, ops) in _SCALAR.items()
    )
    matrix = (
        f"rate_infos {{ key: {key} value {{ clock_rate_ghz: 1.83 units_per_core: 4 ops_per_clock: {ops} }} }}"
        for key, ops in _MATRIX.items()
    )
    return _CHIP % (" ".join(scalar), " ".join(matrix))


def described_mesh(scheme: Scheme) -> Mesh:
    """The scheme's mesh, of devices that are described alone.

    Raises:
      RuntimeError: no CUDA plugin of JAX.
    """
    try:
        found = topologies.get_topology_desc(
            "h100", platform="cuda", target_config=chip(), topology=f"1x1x{scheme.devices}"
        )
    except (RuntimeError, NotImplementedError, ValueError) as error:
        raise RuntimeError(f"JAX's CUDA plugin describes no devices: pip install 'jax[cuda13]' ({error})") from error
    return scheme.mesh(devices=found.devices)


@contextlib.contextmanager
def as_on_gpus() -> Iterator[None]:
    """JAX and the layers choose as with H100s: cuDNN's attention, and tiles of this chip."""
    attention = "jax._src.cudnn.fused_attention_stablehlo"
    with (
        mock.patch("jax.default_backend", lambda: "gpu"),
        mock.patch(f"{attention}.check_compute_capability", lambda capability: capability <= "9.0"),
        mock.patch(f"{attention}.is_cuda_compute_capability_equal", lambda capability: capability == "9.0"),
        mock.patch(f"{attention}.check_cudnn_version", lambda: 91000),
        as_if_attached(DEVICE),
    ):
        yield


def compiled(scheme: Scheme, name: str, options: argparse.Namespace) -> Any:
    """A variant's step; nothing of its size is allocated."""
    config = MODELS[options.model]
    config = dataclasses.replace(config, num_hidden_layers=options.layers or config.num_hidden_layers)
    mesh, variant = described_mesh(scheme), VARIANTS[name]
    setting = scheme.setting(config, jnp.bfloat16)
    parameters = jax.eval_shape(lambda: Parameters(setting).of(variant))
    shardings = scheme.shardings(parameters, mesh)
    placed = jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), parameters, shardings)
    tokens = jax.ShapeDtypeStruct((scheme.rows(options.batch), options.length), jnp.int32, sharding=scheme.tokens(mesh))
    with as_on_gpus(), jax.set_mesh(mesh):
        function = step(name, variant, setting, gradient_shardings=shardings)
        return function.lower(placed, tokens, tokens).compile(compiler_options=variant.compiler_options)


class Operation(NamedTuple):
    """A letter; what a collective moves, in bytes of its results; its name or, of its end, its beginning's."""

    letter: str
    size: int = 0
    name: str = ""


_BEGINS = {"all-gather": "G", "reduce-scatter": "S", "all-reduce": "R", "all-to-all": "X", "collective-permute": "X"}
_LINE = re.compile(r"\s+(?:ROOT )?%([\w.\-]+) = (.*?) ([\w\-]+)\((.*)$")
_ATTENTION = {hlo.ATTENTION: "A", hlo.ATTENTION_BACKWARD: "B"}
_BYTES = {"bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4, "pred": 1, "f64": 8}


def operations(text: str) -> dict[str, list[Operation]]:
    """The operations that matter here of each computation of a compiled program, in the order of its schedule."""
    found: dict[str, list[Operation]] = {}
    current: list[Operation] = []
    for line in text.splitlines():
        if begins := re.match(r"(?:ENTRY )?%([\w.\-]+) \(.*\{$", line):
            current = found.setdefault(begins[1], [])
        elif matched := _LINE.match(line):
            name, shape, opcode, rest = matched.groups()
            kind, _, part = opcode.rpartition("-")
            if opcode in _BEGINS or (kind in _BEGINS and part == "start"):
                letter = _BEGINS[kind if part == "start" else opcode]
                current.append(Operation(letter, _size(shape), name if part == "start" else ""))
            elif kind in _BEGINS and part == "done":
                current.append(Operation(_BEGINS[kind].lower(), 0, rest.split(")")[0].lstrip("%")))
            elif opcode == "custom-call" and (target := re.search(r'custom_call_target="([^"]*)"', rest)):
                if kernel := hlo.kernel_of(opcode, target[1], rest):
                    current.append(Operation(_ATTENTION.get(kernel, "P")))
            elif opcode == "fusion" and re.search("dynamic-slice-fusion|gemm_fusion", rest):
                current.append(Operation("P"))
            elif opcode == "while":
                current.append(Operation("W"))
    return {name: those for name, those in found.items() if any(one.letter in "GSRXW" for one in those)}


def _size(shape: str) -> int:
    """Bytes of the last array of a type, or of the last tuple of arrays: a collective's results."""
    last = re.findall(r"\(([^()]*)\)|(\w+\[[\d,]*\])", shape)[-1]
    arrays = re.findall(r"(\w+)\[([\d,]*)\]", last[0] or last[1])
    return sum(_BYTES.get(dtype, 4) * math.prod(int(n) for n in sizes.split(",") if n) for dtype, sizes in arrays)


def bare_bytes(those: Sequence[Operation]) -> tuple[int, int]:
    """Bytes that collectives move, and of these those with no product, attention or loop beside them."""
    total = bare = 0
    waiting: dict[str, int] = {}  # what has begun with nothing beside it so far
    for one in those:
        if one.letter in "GSRX":
            total += one.size
            bare += one.size
            if one.name:
                waiting[one.name] = one.size
        elif one.letter in "PABW":
            bare -= sum(waiting.values())
            waiting.clear()
        else:
            waiting.pop(one.name, None)
    return total, bare


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.lab.schedule", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=2, help="how many (default 2)")
    parser.add_argument("--schemes", default="fsdp", help="of one, dp, fsdp, tp, sp, fsdp_tp (default fsdp)")
    parser.add_argument("--variants", default=",".join(DEFAULTS), help=f"of {', '.join(VARIANTS)}")
    parser.add_argument("--model", default="1b", choices=MODELS, help="a Llama 3, default 1b")
    parser.add_argument("--layers", type=int, help="instead of the model's own number")
    parser.add_argument("--batch", type=int, default=2, help="rows of tokens for each part of the data axis")
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--text", type=pathlib.Path, help="folder for the programs' texts")
    options = parser.parse_args(arguments)
    possible = {scheme.name: scheme for scheme in schemes(options.devices)}
    asked, names = options.schemes.split(","), options.variants.split(",")
    for given, known, what in ((asked, possible, "--schemes"), (names, VARIANTS, "--variants")):
        if unknown := [name for name in given if name not in known]:
            parser.error(f"{what}: {unknown[0]} is none of {', '.join(known)}")
    for scheme in (possible[name] for name in asked):
        for name in names:
            program = compiled(scheme, name, options)
            text, memory = program.as_text(), program.memory_analysis()
            kernels = hlo.count_ours(text)
            print(
                f"{scheme.name} {scheme.devices} {name}: temporaries {memory.temp_size_in_bytes / 2**30:.2f} GiB, "
                f"arguments {memory.argument_size_in_bytes / 2**30:.2f}, kernels {kernels}, {collectives(text)}"
            )
            for computation, those in operations(text).items():
                total, bare = bare_bytes(those)
                if total < 2**20:  # a sum of vectors, in a program of its own
                    continue
                print(f"  {computation}: {total / 2**20:.0f} MiB moved, {bare / 2**20:.0f} with nothing beside")
                letters = "".join(one.letter for one in those)
                print(*(f"    {letters[i : i + 110]}" for i in range(0, len(letters), 110)), sep="\n", flush=True)
            if options.text:
                options.text.mkdir(parents=True, exist_ok=True)
                (options.text / f"{scheme.name}_{scheme.devices}_{name}.txt").write_text(text)
    return 0


def prepare() -> None:
    """Before JAX looks for devices: its plugin is not to ask for a driver, and XLA gets the flags of `sharded_step`."""
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    use_whole_gpus()


if __name__ == "__main__":
    prepare()
    sys.exit(main())
