"""Sends products on meshes of CPUs through the lowering for GPUs, XLA's form in the kernel's place on each device."""

import collections
import contextlib
import functools
import itertools
import math
import re
from typing import NamedTuple

import jax
import numpy as np
from jax._src.interpreters import mlir  # a rule that a test added must go away with it
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks import sharded_step
from benchmarks.sharded_step import COLLECTIVES
from coda_jax.lowering import cuda, select
from coda_jax.operators.head import row_function
from coda_jax.primitives.gemm_primitive import PRIMITIVES, xla_tiles


def mesh_of(kind, data=2, model=2):
    devices = jax.devices("cpu")[: data * model]
    assert len(devices) == data * model, "conftest.py asks for them"
    return jax.make_mesh((data, model), ("data", "model"), axis_types=(kind,) * 2, devices=devices)


def collectives(compiled):
    """Counts by kind."""
    return sharded_step.collectives(compiled.as_text())


class Move(NamedTuple):
    """A collective: what it moves, as one group of devices has it together, and over which mesh axes."""

    kind: str
    dtype: str
    axes: tuple
    size_bytes: int


def moves(lowered, mesh, folder):
    """The compiled program, and its collectives as XLA's partitioner made them: before any is combined or promoted.

    Returns:
      compiled; Counter of those of the library's calls and of what is moved for these in the compute dtype; Counter of
      XLA's own; those within a loop.
    """
    options = {"xla_dump_to": str(folder), "xla_dump_hlo_pass_re": "spmd-partitioning", "xla_dump_hlo_as_text": True}
    # It ends the process where a psum of bfloat16 stands in a shard_map over some axes, whatever is summed.
    options["xla_disable_hlo_passes"] = "all-reduce-promotion"
    compiled = lowered.compile(compiler_options=options)
    (path,) = folder.glob("*.after_spmd-partitioning.*.txt")
    calls, others, in_loops = collections.Counter(), collections.Counter(), []
    for line in path.read_text().splitlines():
        found = re.search(rf"= \(?(\w+)\[([\d,]*)\].*? ({'|'.join(COLLECTIVES)})(?:-start)?\(", line)
        if found is None:
            continue
        dtype, sizes, kind = found.groups()
        groups = _groups(line)
        item = 1 if dtype == "pred" else int(re.sub(r"\D", "", dtype)) // 8
        size = math.prod(map(int, filter(None, sizes.split(",")))) * item
        size *= len(groups[0]) if kind == "reduce-scatter" else 1
        move = Move(kind, dtype, _axes_of(groups, mesh), size)
        (calls if "coda_" in line or dtype == "bf16" else others)[move] += 1
        if re.search('op_name="[^"]*while', line):
            in_loops.append(move)
    return compiled, calls, others, in_loops


def _groups(line):
    """The groups of devices of a collective, in any of the ways in which XLA prints them."""
    if pairs := re.search(r"source_target_pairs=\{(\{[\d,{}]*\})\}", line):
        return [tuple(map(int, x.split(","))) for x in re.findall(r"\{([\d,]+)\}", pairs[1])]
    iota = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"
    if named := re.search(rf"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\({iota}\))? ?\{{([^}}]*)\}}", line):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        over = re.findall(r"'(\w+)'", named[4])
        devices = _iota(named[2] or str(math.prod(sizes.values())), named[3]).reshape([*sizes.values()])
        rest = [i for i, name in enumerate(sizes) if name not in over]
        devices = devices.transpose(*rest, *(i for i, name in enumerate(sizes) if name in over))
        return [tuple(x) for x in devices.reshape(-1, math.prod(sizes[name] for name in over))]
    if tiled := re.search(rf"replica_groups=\[(\d+),(\d+)\]<={iota}", line):
        return [tuple(x) for x in _iota(tiled[3], tiled[4]).reshape(int(tiled[1]), int(tiled[2]))]
    listed = re.search(r"replica_groups=\{(\{[\d,{}]*\})\}", line)
    return [tuple(map(int, x.split(","))) for x in re.findall(r"\{([\d,]+)\}", listed[1])]


def _iota(sizes, transposed):
    """The devices of an array of these sizes, with its axes in this order."""
    sizes = [*map(int, sizes.split(","))]
    devices = np.arange(math.prod(sizes)).reshape(sizes)
    return devices.transpose([*map(int, transposed.split(","))]) if transposed else devices


def _axes_of(groups, mesh):
    """The mesh axes over which these groups are; "part of an axis" where they are none."""
    ids, names = np.arange(mesh.size).reshape(mesh.devices.shape), mesh.axis_names
    of_group = {frozenset(map(int, group)) for group in groups}
    for count in range(1, len(names) + 1):
        for over in itertools.combinations(names, count):
            rest = [i for i, name in enumerate(names) if name not in over]
            made = ids.transpose(*rest, *(names.index(name) for name in over))
            if of_group == {frozenset(map(int, x)) for x in made.reshape(-1, math.prod(mesh.shape[n] for n in over))}:
                return tuple(name for name in over if mesh.shape[name] > 1)
    return ("part of an axis",)


@contextlib.contextmanager
def partitioned_on_cpus():
    """Yields a list of (spec, types of the arguments' parts, what a Hopper GPU would run), one for each lowering."""
    records = []

    def form_of(arguments, spec, *, strict, anywhere=False, yields=False, key=None):
        types = [jax.core.ShapedArray(x.shape, x.dtype) for x in arguments]
        selection = select.select_shard(arguments, spec, anywhere=anywhere, key=key)
        records.append((spec, types, selection))
        if selection.reason is not None and (strict or spec.implementation == "cuda"):
            select.report(arguments, spec, selection.reason, strict=strict)
        return functools.partial(xla_tiles, spec=spec)

    def lower(ctx, *arguments, spec):
        return cuda._lower(ctx, *arguments, spec=spec, form_of=form_of)

    jax.clear_caches()
    rules = dict.fromkeys(PRIMITIVES, lower) | {row_function.row_shards_p: row_function.lower}
    for primitive, rule in rules.items():
        mlir.register_lowering(primitive, rule, platform="cpu")
    try:
        yield records
    finally:
        for primitive in rules:
            del mlir._platform_specific_lowerings["cpu"][primitive]
        jax.clear_caches()


def run(function, arguments, specs, kind=AxisType.Auto, data=2, model=2, **options):
    """Results on a mesh; the parts that a device multiplied, by epilogue; collectives."""
    mesh = mesh_of(kind, data, model)
    with partitioned_on_cpus() as records, jax.set_mesh(mesh):
        placed = [
            jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec, *[None] * (x.ndim - len(spec)))))
            for x, spec in zip(arguments, specs, strict=True)
        ]
        compiled = jax.jit(function, **options).lower(*placed).compile()
        results = jax.device_get(compiled(*placed))
    assert records, "no device was asked for its part"
    parts = [(spec.name, *(x.shape for x in types[:2])) for spec, types, _ in records]
    return results, parts, collectives(compiled)
