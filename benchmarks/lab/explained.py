"""`make lab-explained`: what `coda.explain` expects beside what was measured, of all records of `benchmarks/results`.

It needs no GPU: it reads the CSV files of epilogues and of training steps, and explains the same functions.
"""

from __future__ import annotations

import collections
import csv
import dataclasses
import functools
import pathlib
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

import coda_jax as coda
from benchmarks import plain_llama
from benchmarks.programs import PROGRAMS
from benchmarks.variants import LLAMA_3_1B, VARIANTS, Setting, layer_kernel, step
from flax_layers import Llama

RESULTS = pathlib.Path(__file__).parents[1] / "results"
DEVICES = {"nvidia_h200": "NVIDIA H200", "nvidia_h100_80gb_hbm3": "NVIDIA H100 80GB HBM3"}
# The kernels of a block, and of some runs, by the names that they had in others, which tell what they do.
_RENAMED = {
    "row_scale_gated": "norm_gated",
    "scale_backward": "weight_backward",
    "loss_exponentials": "loss_sums",
    "scale_rows": "gemm",
    "LlamaBlock_0": "row_scale_rotary",
    "LlamaBlock_1": "add_residual_sumsq",
    "LlamaBlock_2": "norm_gated",
    "LlamaBlock_3": "add_residual_sumsq",
    "LlamaBlock_backward_0": "gated_backward",
    "LlamaBlock_backward_2": "norm_backward",
    "LlamaBlock_backward_3": "weight_backward",
    "LlamaBlock_backward_6": "norm_backward",
    "LlamaBlock_backward_7": "weight_backward",
}


def _class_of(epilogue: str) -> str:
    name = layer_kernel(epilogue)
    return _RENAMED.get(name, name)


class Epilogue(NamedTuple):
    """A product with an epilogue: microseconds expected and measured, as a kernel and in XLA's form."""

    program: str
    k: int
    us: float
    measured_us: float
    xla_us: float | None
    measured_xla_us: float


class Step(NamedTuple):
    """A training step: milliseconds of products by epilogue, of passes between them, and GiB kept for going back.

    Temporaries are all that XLA has beside arguments and results.
    """

    ms: dict[str, float]
    measured_ms: dict[str, float]
    passes_ms: float
    measured_passes_ms: float
    kept_gib: float
    temporaries_gib: float


def _rows(path: pathlib.Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def epilogues(name: str) -> Iterator[Epilogue]:
    """The products with an epilogue of a device's record."""
    for row in _rows(RESULTS / f"{name}.csv"):
        if row["kind"] == "epilogue":
            m, n, k = (int(row[size]) for size in "mnk")
            case = PROGRAMS[row["program"]]
            types = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((m, k), (k, n))]
            function = functools.partial(coda.gemm, epilogue=case.epilogue, out_dtype=case.out_dtype(m, n))
            (product,) = coda.explain(function, *types, *case.operand_types(m, n), device=DEVICES[name]).products
            yield Epilogue(
                row["program"], k, product.cost.us, float(row["kernel"]), product.cost.xla_us, float(row["xla"])
            )


@functools.cache
def arguments_of(variant: str, layers: int = LLAMA_3_1B.num_hidden_layers) -> tuple[Any, ...]:
    """The step of a variant and the types of its arguments."""
    of, config = VARIANTS[variant], dataclasses.replace(LLAMA_3_1B, num_hidden_layers=layers)
    types = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
    scan = {"scan_layers": of.scan} if of.fused else {}
    params = nnx.state(nnx.eval_shape(lambda: Llama(config, **types, **scan, rngs=nnx.Rngs(0))), nnx.Param)
    if not of.fused:
        params = jax.eval_shape(lambda state: plain_llama.from_fused(nnx.to_pure_dict(state), config), params)
    tokens = jax.ShapeDtypeStruct((2, 8192), jnp.int32)
    return step(variant, of, Setting(config, **types)), params, tokens, tokens


def training_step(name: str, variant: str, *, traced_as: str | None = None) -> Step:
    """A variant in a device's record.

    Args:
      traced_as: another variant with the same products and the same arrays, that is traced sooner.
    """
    found = coda.explain(*arguments_of(traced_as or variant), device=DEVICES[name])
    rows = [row for row in _rows(RESULTS / f"{name}_train_step.csv") if row["variant"] == variant]
    (whole,) = (row for row in rows if row["kind"] == "step")
    expected, measured = collections.Counter[str](), collections.Counter[str]()
    for product, count in found.products.items():
        expected[_class_of(product.epilogue)] += count * product.cost.us / 1e3
    for row in rows:
        if row["class"].startswith("coda: "):
            measured[_class_of(row["class"].removeprefix("coda: "))] += float(row["ms"])
    kept = found.totals.kept_bytes / 2**30
    passes = found.totals.passes_ms, float(whole["beyond_ms"])
    return Step(dict(expected), dict(measured), *passes, kept, float(whole["temporaries_gib"]))


def main() -> int:
    """The command."""
    for name, device in DEVICES.items():
        print(f"\n{device}\n{'epilogue':18}{'K':>7}{'expected':>10}{'measured':>10}{'':>6}{'XLA >':>9}{'measured':>10}")
        for one in sorted(epilogues(name), key=lambda one: one.us / one.measured_us):
            xla = (
                ""
                if one.xla_us is None
                else f"{one.xla_us:9.0f}{one.measured_xla_us:10.0f}{one.xla_us / one.measured_xla_us:6.2f}"
            )
            print(f"{one.program:18}{one.k:7}{one.us:10.0f}{one.measured_us:10.0f}{one.us / one.measured_us:6.2f}{xla}")
        for variant in ("coda", "coda_recompute", "xla"):
            found = training_step(name, variant)
            print(f"\n{variant:18}{'':7}{'expected':>10}{'measured':>10}")
            lines = {epilogue: (ms, found.measured_ms.get(epilogue, 0.0)) for epilogue, ms in found.ms.items()}
            if found.ms:
                lines["products, ms"] = sum(found.ms.values()), sum(found.measured_ms.values())
            lines["passes, ms"] = found.passes_ms, found.measured_passes_ms
            lines["kept; temporaries"] = found.kept_gib, found.temporaries_gib
            for label, (expected, measured) in lines.items():
                ratio = f"{expected / measured:6.2f}" if measured else ""
                print(f"{label:25}{expected:10.1f}{measured:10.1f}{ratio}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
