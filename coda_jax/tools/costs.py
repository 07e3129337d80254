"""The cost of a product: its bytes and FLOPs, its expected time, and how near that is to the chip's limit."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from coda_jax.epilogue import types_of
from coda_jax.epilogue.dtypes import FACTORS
from coda_jax.lowering.launch import problem_of
from coda_jax.lowering.on_devices import BARE, shard_of_types
from coda_jax.primitives.dtypes import result_dtype
from coda_jax.primitives.gemm_primitive import xla_tiles
from coda_jax.primitives.spec import GemmSpec
from coda_jax.tiles import arch
from coda_jax.tiles.config import KernelConfig
from coda_jax.tiles.constants import CONSTANTS
from coda_jax.tiles.cost_model import GemmShape
from coda_jax.tiles.table import Problem, expected_nanoseconds
from coda_jax.tiles.traffic import has_logsumexp


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of one execution of a product on one device.

    Attributes:
      flops: 2 M N K; of a symmetric product M (M + 1) K.
      bytes_read, bytes_written: of a, b and the epilogue's operands, and of its results, each once.
      us: the kernel's expected microseconds, by the cost model; None if the product takes XLA's form, or nothing like
        it has been measured on this device.
      xla_us: the least microseconds of XLA's form: the bare product, and one pass that reads it, in 16 bits, and the
        epilogue's operands, and writes the results. None where the cost model has no time, as for a log-sum-exp.
      roofline_us: the least microseconds by the chip's data sheet; None for an unknown chip.
      bound: "compute" or "memory", whichever takes longer by the data sheet.
    """

    flops: int
    bytes_read: int
    bytes_written: int
    us: float | None = None
    xla_us: float | None = None
    roofline_us: float | None = None
    bound: str | None = None

    @property
    def bytes(self) -> int:
        """Bytes read and written."""
        return self.bytes_read + self.bytes_written

    @property
    def share(self) -> float | None:
        """The share of the roofline: the least time by the chip's data sheet over the expected time."""
        return self.roofline_us / self.us if self.us and self.roofline_us else None

    @property
    def tflops(self) -> float | None:
        """Expected TFLOP/s."""
        return self.flops / self.us / 1e6 if self.us else None


def cost_of(avals: Sequence[Any], spec: GemmSpec, config: KernelConfig | None, device: str | None) -> Cost | None:
    """The cost of the product of arguments of these types; None if a size is symbolic.

    Args:
      config: of its kernel; None if it takes XLA's form.
      device: the kind of device to give times for; None for no times.
    """
    plain = [jax.core.ShapedArray(aval.shape, aval.dtype) for aval in avals]
    if not all(isinstance(size, int) for aval in plain for size in aval.shape):
        return None
    spec = spec.replace(out_sharding=None)
    results = types_of(functools.partial(_written, spec=spec), *plain)
    problem = problem_of(plain, spec)
    m, n, k, batch = (problem.shape.m, problem.shape.n, problem.shape.k, problem.shape.batch)
    read, written = (sum(math.prod(x.shape) * x.dtype.itemsize for x in xs) for xs in (plain, results))
    flops = 2 * m * n * k * batch if not spec.symmetric else m * (m + 1) * k * batch
    chip = arch.chip_of(device) if device else None
    if chip is None or device not in CONSTANTS:
        return Cost(flops, read, written)
    compute_us = flops / chip.tflops_of(problem.shape.element_bytes) / 1e6
    memory_us = (read + written) / chip.tbytes / 1e6
    nanoseconds = config and expected_nanoseconds(problem, config, device)
    return Cost(
        flops,
        read,
        written,
        nanoseconds / 1e3 if nanoseconds else None,
        _xla_us(problem, read + written, device),
        max(compute_us, memory_us),
        "compute" if compute_us >= memory_us else "memory",
    )


def _written(*arguments: jax.Array, spec: GemmSpec) -> list[jax.Array]:
    """Tiles and sums, which a kernel writes; the work that finishes these was traced for the rows of all devices."""
    tiles, sums = xla_tiles(*arguments, spec=spec)
    return [*tiles, *sums]


def shard_of(avals: Sequence[Any], spec: GemmSpec) -> tuple[Sequence[Any], GemmSpec] | None:
    """The product of one device's shards, by the shardings of the types; None with automatic mesh axes."""
    if not all(aval.sharding.mesh.empty or aval.sharding.mesh.are_all_axes_explicit for aval in avals):
        return None
    if all(aval.sharding.mesh.empty for aval in avals):
        return None
    shards, shard_spec = shard_of_types(avals, spec)
    return shards[: len(shard_spec.batched)], shard_spec


def pass_us(traffic: int, device: str | None) -> float | None:
    """Microseconds of a pass over so many bytes; None for an unknown device."""
    chip = arch.chip_of(device) if device else None
    return traffic / (arch.of(device).copy_share * chip.tbytes) / 1e6 if chip else None


def bare_us(shape: GemmShape, dtype: np.dtype, out_dtype: np.dtype, device: str) -> float | None:
    """Expected microseconds of a product without an epilogue on this device; None if the cost model has no time."""
    if (
        any(not isinstance(size, int) or size <= 0 for size in (shape.m, shape.n, shape.k))
        or (shape.n | shape.k) * shape.element_bytes % 16
    ):
        return None
    bare = Problem(shape, BARE, dtype, (np.dtype(out_dtype),), False, (False, False))
    nanoseconds = expected_nanoseconds(bare, bare.config(None, device), device)
    return nanoseconds / 1e3 if nanoseconds else None


def _xla_us(problem: Problem, traffic: int, device: str) -> float | None:
    """`Cost.xla_us`."""
    program, shape = problem.program, problem.shape
    if np.dtype(problem.dtype).name not in FACTORS or has_logsumexp(program):
        return None
    is_bare, acc_dtype = program == BARE, result_dtype(problem)
    bare = bare_us(shape, problem.dtype, problem.out_dtypes[0] if is_bare else acc_dtype, device)
    if bare is None or is_bare:
        return bare
    factors = shape.element_bytes * shape.batch * shape.k * (shape.m + shape.n)
    acc = acc_dtype.itemsize * shape.batch * shape.m * shape.n
    return bare + (pass_us(max(0, traffic - factors) + acc, device) or 0.0)
