"""`python -m benchmarks.sharded_step`: a Llama's training step on all GPUs of this host, fused and plain.

Value and gradient of the loss of a Llama-3-1B, or with --model 8b of a Llama-3-8B, under plain `jit`, parameters and
tokens sharded by data parallelism, FSDP, tensor parallelism without and with sequence parallelism and, on four GPUs or
more, FSDP with tensor parallelism; and on one GPU. The variants of one scheme have the same shardings and constraints,
and run interleaved; their losses and gradients are compared before anything is timed. Times are the wall clock's of
steps back to back, medians. Efficiency is the throughput a GPU beside that of the same variant on one GPU. A profile of
one step says how long the first GPU computed, how long its collectives ran, and how much of that no computation hid.
Writes benchmarks/results/<device>_sharded_step.csv, or _sharded_step_8b.csv; and _sharded_kernels.csv, the classes of
kernels of that step, with those that ran beside a collective.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding

from benchmarks import hlo, plain_llama, results, timing
from benchmarks.beside import by_class, kernels, overlap
from benchmarks.train_step import check, compile_all, kernel_class
from benchmarks.variants import LLAMA_3_1B, LLAMA_3_8B, TINY, VARIANTS, Parameters, Setting, Variant, form_of
from coda_jax.lowering import launch
from coda_jax.tiles import arch
from flax_layers import LlamaConfig, sharding

MODELS = {"1b": LLAMA_3_1B, "8b": LLAMA_3_8B}
POSSIBLE = [name for name, variant in VARIANTS.items() if not variant.packed]
DEFAULTS = ("coda", "coda_recompute", "xla", "xla_scan_remat")
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


class Scheme(NamedTuple):
    """How a step is spread: sizes of the mesh's axes, and the rules of `flax_layers.sharding`."""

    name: str
    sizes: dict[str, int]
    rules: sharding.Plan

    @property
    def devices(self) -> int:
        return math.prod(self.sizes.values())

    def mesh(self, kind: AxisType = AxisType.Auto, devices: Sequence[Any] | None = None) -> Mesh:
        """The mesh of the first devices."""
        axes = tuple(self.sizes)
        of_mesh = (jax.devices() if devices is None else devices)[: self.devices]
        return jax.make_mesh(tuple(self.sizes.values()), axes, (kind,) * len(axes), devices=of_mesh)

    def setting(self, config: LlamaConfig, param_dtype: Any) -> Setting:
        """The setting that the scheme's variants have in common."""
        separate_qkv = "tensor" in self.sizes  # heads of one kernel cannot be cut
        return Setting(config, jnp.bfloat16, jnp.dtype(param_dtype), separate_qkv, rules=self.rules or None)

    def rows(self, batch: int) -> int:
        """The number of rows of tokens, with `batch` for each part of the data axis."""
        return batch * self.devices // self.sizes.get("tensor", 1)

    def shardings(self, parameters: Any, mesh: Mesh) -> Any:
        """How the parameters of a fused or a plain Llama lie, as the rules say."""
        return sharding.parameter_shardings(parameters, mesh, self.rules, axes=plain_llama.AXES)

    def placed(self, parameters: Any, mesh: Mesh) -> Any:
        """These parameters, lying so."""
        return jax.tree.map(jax.device_put, parameters, self.shardings(parameters, mesh))

    def tokens(self, mesh: Mesh, *, cuts_length: bool = True) -> NamedSharding:
        """How tokens lie."""
        return sharding.array_sharding(mesh, self.rules, "batch", "length" if cuts_length else None)


def schemes(count: int) -> list[Scheme]:
    """On one device and on `count`."""
    found = [Scheme("one", {"data": 1}, {})]
    if count > 1:
        found += [
            Scheme("dp", {"data": count}, sharding.DATA),
            Scheme("fsdp", {"fsdp": count}, sharding.FSDP),
            Scheme("tp", {"tensor": count}, sharding.TENSOR),
            Scheme("sp", {"tensor": count}, sharding.SEQUENCE),
        ]
    if count > 2 and count % 2 == 0:
        found.append(Scheme("fsdp_tp", {"fsdp": count // 2, "tensor": 2}, sharding.FSDP_TENSOR))
    return found


class _Placed(Parameters):
    """The parameters of which every form is sharded over a mesh as a scheme says."""

    def __init__(self, setting: Setting, scheme: Scheme, mesh: Mesh):
        super().__init__(setting)
        self._scheme, self._mesh = scheme, mesh
        self._placed: dict[Any, Any] = {}

    def of(self, variant: Variant) -> Any:
        key = form_of(variant)
        if key not in self._placed:
            self._placed[key] = self._scheme.placed(super().of(variant), self._mesh)
        return self._placed[key]

    def release(self) -> None:
        """Gives up the arrays that no variant runs on, whole ones: of a large model no device has room for both."""
        self._forms.clear()
        del self.model


def _shardings(parameters: Any) -> Any:
    return jax.tree.map(lambda x: x.sharding, parameters)


def each_once(yields: str) -> list[int]:
    """The values that `--yields` names."""
    return list(dict.fromkeys(map(int, yields.split(","))))


def yielding(nanoseconds: int) -> contextlib.AbstractContextManager[Any]:
    """Thread blocks of products that are compiled inside end after so long; 0: at the product's end."""
    changed = dataclasses.replace(arch.SM90, yield_nanoseconds=nanoseconds)
    return mock.patch.object(arch, "ARCHITECTURES", (changed,))


def silent() -> contextlib.AbstractContextManager[Any]:
    """Products that are compiled inside do not tell XLA's scheduler how long they take."""
    return mock.patch.object(launch, "expected_nanoseconds", lambda *_: None)


def interleaved(calls: Mapping[str, Callable[[], Any]], rounds: int, burst: int) -> dict[str, float]:
    """Milliseconds of each by the wall clock, `burst` of them back to back; the first round is not measured."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name in random.sample(list(calls), len(calls)):
            start = time.perf_counter()
            for _ in range(burst):
                result = calls[name]()
            jax.block_until_ready(result)
            found[name].append((time.perf_counter() - start) / burst * 1e3)
    return {name: statistics.median(times[1:]) for name, times in found.items()}


def collectives(text: str) -> dict[str, int]:
    """Counts by kind in a compiled program."""
    counts = {kind: len(re.findall(rf" {kind}(?:-start)?\(", text)) for kind in COLLECTIVES}
    return {kind: count for kind, count in counts.items() if count}


def measure(scheme: Scheme, names: Sequence[str], options: Any) -> list[dict[str, Any]]:
    """A row for each variant."""
    config = TINY if options.tiny else MODELS[options.model]
    config = dataclasses.replace(config, num_hidden_layers=options.layers or config.num_hidden_layers)
    mesh = scheme.mesh()
    shape = (scheme.rows(options.batch), 24 if options.tiny else options.length)
    tokens = jax.device_put(jax.random.randint(jax.random.key(1), shape, 0, config.vocab_size), scheme.tokens(mesh))
    labels = jax.device_put(jnp.roll(tokens, -1, axis=1), scheme.tokens(mesh))
    parameters = _Placed(scheme.setting(config, options.param_dtype), scheme, mesh)

    with jax.set_mesh(mesh):
        settings = [(yielding(x), f" {x}" * (len(options.yields) > 1)) for x in options.yields]
        settings += [(silent(), " silent")] * options.silent
        measured = []
        for setting, suffix in settings:
            left = [name for name in names if not measured or VARIANTS[name].fused]
            with setting:
                compiled = compile_all(left, parameters, tokens, labels, shardings=_shardings)
            for one in compiled:
                one.name += suffix * one.variant.fused
            measured += compiled
        parameters.release()
        check(measured, parameters, loss_rtol=3e-3, gradient_rtol=0.1)
        good = [one for one in measured if not one.failure]
        times = interleaved({one.name: one.call for one in good}, options.repeats, options.burst)
        profiles = {one.name: kernels(one.call) for one in good}
    found = []
    for one in measured:
        text = one.compiled.as_text()
        row: dict[str, Any] = {"model": "tiny" if options.tiny else options.model, "scheme": scheme.name}
        row |= {"devices": scheme.devices, "variant": one.name}
        row |= {"batch": shape[0], "length": shape[1], "layers": config.num_hidden_layers}
        row |= {"kernels": hlo.count_ours(text), "collectives": collectives(text)}
        row |= {f"{name}_gib": round(size, 3) for name, size in one.memory_gib().items()}
        row |= {"loss": one.loss, "gradient_distance": one.distance, "compile_s": round(one.compile_seconds, 1)}
        row["failure"] = one.failure
        if one.name in times:
            ms = times[one.name]
            row |= {"ms": ms, "tokens_per_second_a_device": shape[0] * shape[1] / scheme.devices / ms * 1e3}
            if profile := profiles[one.name]:
                row |= {f"{name}_ms": value for name, value in overlap(profile)._asdict().items()}
                row["classes"] = by_class(profile, functools.partial(kernel_class, operations=one.epilogues))
        found.append(row)
    return found


def _of_classes(row: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each class of a step's kernels, which it takes out of the step's row."""
    about = {name: row[name] for name in ("scheme", "devices", "variant")}
    return [about | {"class": name, **of._asdict()} for name, of in row.pop("classes", {}).items()]


def with_efficiency(rows: Sequence[dict[str, Any]]) -> None:
    """Adds to each row its throughput a device beside that of the same variant on one."""
    rate = "tokens_per_second_a_device"
    alone = {row["variant"]: row[rate] for row in rows if row["devices"] == 1 and rate in row}
    for row in rows:
        if rate in row and row["variant"] in alone:
            row["efficiency"] = row[rate] / alone[row["variant"]]


# Title, column of the file, format.
SHOWN = [
    ("scheme", "scheme", "<8"),
    ("n", "devices", ">3"),
    ("variant", "variant", "<16"),
    ("ms", "ms", ">9.1f"),
    ("tokens/s", "tokens_per_second_a_device", ">10.0f"),
    ("eff.", "efficiency", ">7.3f"),
    ("compute", "compute_ms", ">9.1f"),
    ("moved", "collective_ms", ">9.1f"),
    ("exposed", "exposed_ms", ">9.1f"),
    ("temp", "temporaries_gib", ">8.2f"),
    ("peak", "peak_gib", ">8.2f"),
    ("own", "kernels", ">5"),
    ("loss", "loss", ">9.4f"),
    ("grad", "gradient_distance", ">8.4f"),
    ("s", "compile_s", ">7.1f"),
]


def heading() -> str:
    return " ".join(f"{title:{format.split('.')[0]}}" for title, _, format in SHOWN)


def show(row: Mapping[str, Any]) -> str:
    cells = (f"{row.get(name, float('nan')):{format}}" for _, name, format in SHOWN)
    return f"{' '.join(cells)}  {row['collectives']} {row['failure']}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 1 if a variant's results are wrong."""
    parser = results.parser("benchmarks.sharded_step", __doc__)
    parser.add_argument("--variants", default=",".join(DEFAULTS), help=f"of {', '.join(POSSIBLE)}")
    parser.add_argument("--schemes", help="some of one, dp, fsdp, tp, sp, fsdp_tp; default all that the GPUs allow")
    parser.add_argument("--repeats", type=int, default=5, help="measured rounds (default 5)")
    parser.add_argument("--burst", type=int, default=3, help="steps back to back in a round (default 3)")
    parser.add_argument("--batch", type=int, default=2, help="rows of tokens for each part of the data axis")
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--layers", type=int, help="instead of the model's own number")
    parser.add_argument("--param-dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--model", default="1b", choices=MODELS, help="a Llama 3, default 1b")
    parser.add_argument("--yields", default=str(arch.SM90.yield_nanoseconds), help="values of `Arch.yield_nanoseconds`")
    parser.add_argument("--silent", action="store_true", help="also fused variants that tell XLA no latencies")
    parser.add_argument("--tiny", action="store_true", help="a model that a CPU runs in seconds")
    options = parser.parse_args(arguments)
    names, options.yields = options.variants.split(","), each_once(options.yields)
    if unknown := [name for name in names if name not in POSSIBLE]:
        parser.error(f"--variants: {unknown[0]} is none of {', '.join(POSSIBLE)}")
    possible = {scheme.name: scheme for scheme in schemes(len(jax.devices()))}
    asked = options.schemes.split(",") if options.schemes else list(possible)
    if unknown := [name for name in asked if name not in possible]:
        parser.error(f"--schemes: {unknown[0]} is none of {', '.join(possible)} on {len(jax.devices())} devices")

    print(f"{heading()}   [{timing.clock()}]", flush=True)
    found: list[dict[str, Any]] = []
    classes: list[dict[str, Any]] = []
    for name in asked:
        rows = measure(possible[name], names, options)
        found += rows
        with_efficiency(found)
        for row in rows:
            print(show(row), flush=True)
            classes += _of_classes(row)
    print(f"[{timing.clock()}]")
    flags = {"xla_flags": os.environ.get("XLA_FLAGS", ""), "nccl_max_ctas": os.environ.get("NCCL_MAX_CTAS", "")}
    of_model = "" if options.model == "1b" else f"_{options.model}"
    for suffix, rows in (("_sharded_step", found), ("_sharded_kernels", classes)):
        if rows:
            columns = list(dict.fromkeys(name for row in rows for name in row))
            results.write(suffix + of_model, columns, rows, folder=options.out, commit=options.commit, **flags)
    return int(any(row["failure"].startswith("wrong") for row in found))


def use_whole_gpus() -> None:
    """Settings that must be made before JAX starts its GPUs: memory, and collectives beside computation."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    flags = os.environ.get("XLA_FLAGS", "")
    for flag in ("latency_hiding_scheduler", "pipelined_all_gather", "pipelined_reduce_scatter"):
        if flag not in flags:
            flags += f" --xla_gpu_enable_{flag}=true"
    os.environ["XLA_FLAGS"] = flags


if __name__ == "__main__":
    use_whole_gpus()
    sys.exit(main())
