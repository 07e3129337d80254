"""Sends products on CPUs through the lowering for GPUs, XLA's form in the kernel's place on each device."""

import contextlib

import jax
from jax._src.interpreters import mlir  # a rule that a test added must go away with it

from coda_jax.primitives import lowering, row_shards
from coda_jax.primitives.gemm_primitive import PRIMITIVES, xla_tiles


@contextlib.contextmanager
def partitioned_on_cpus():
    """Yields a list of (spec, types of the arguments' parts, what a Hopper GPU would run), one for each lowering."""
    records = []

    def tiles(*arguments, spec, strict, anywhere=False):
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
