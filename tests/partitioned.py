"""Sends products on meshes of CPUs through the lowering for GPUs, XLA's form in the kernel's place on each device."""

import contextlib
import re

import jax
from jax._src.interpreters import mlir  # a rule that a test added must go away with it

from coda_jax.primitives import lowering, row_shards
from coda_jax.primitives.gemm_primitive import PRIMITIVES, xla_tiles

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


def mesh_of(kind, data=2, model=2):
    devices = jax.devices("cpu")[: data * model]
    assert len(devices) == data * model, "conftest.py asks for them"
    return jax.make_mesh((data, model), ("data", "model"), axis_types=(kind,) * 2, devices=devices)


def collectives(compiled):
    """Counts by kind."""
    text = compiled.as_text()
    found = {kind: len(re.findall(rf" {kind}(?:-start)?\(", text)) for kind in COLLECTIVES}
    return {kind: count for kind, count in found.items() if count}


@contextlib.contextmanager
def partitioned_on_cpus():
    """Yields a list of (spec, types of the arguments' parts, what a Hopper GPU would run), one for each lowering."""
    records = []

    def tiles(*arguments, spec, strict, anywhere=False, yields=False):
        types = [jax.core.ShapedArray(x.shape, x.dtype) for x in arguments]
        selection = lowering.select(types, spec, anywhere=anywhere)
        records.append((spec, types, selection))
        if selection.reason is not None and (strict or spec.implementation == "cuda"):
            lowering.report(spec, selection.reason, strict=strict)
        return xla_tiles(*arguments, spec=spec)

    def lower(ctx, *arguments, spec):
        return lowering._lower(ctx, *arguments, spec=spec, tiles=tiles)

    jax.clear_caches()
    rules = dict.fromkeys(PRIMITIVES, lower) | {row_shards.row_shards_p: row_shards.lower}
    for primitive, rule in rules.items():
        mlir.register_lowering(primitive, rule, platform="cpu")
    try:
        yield records
    finally:
        for primitive in rules:
            del mlir._platform_specific_lowerings["cpu"][primitive]
        jax.clear_caches()
