"""The choice of what a product is lowered to on a GPU: the kernel with one of its tiles, or its XLA form, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from coda_jax import ffi
from coda_jax.lowering.addressing import unsupported_reason
from coda_jax.lowering.launch import problem_of
from coda_jax.lowering.on_devices import shard_of_types
from coda_jax.lowering.record import Shard, key_of, record, recorded
from coda_jax.lowering.xla_partitioner import WAY_OUT
from coda_jax.primitives.fallbacks import warn_once
from coda_jax.primitives.mesh_types import automatic_axes, partitioned_axes
from coda_jax.primitives.spec import GemmSpec
from coda_jax.tiles.arch import current, named_device
from coda_jax.tiles.config import KernelConfig
from coda_jax.tiles.table import attached_device, config_for


@dataclasses.dataclass(frozen=True)
class Selection:
    """The form that a product is lowered to on a GPU.

    Attributes:
      reason: why it takes the XLA form; None where it is the kernel.
      config: the kernel's; also None if it is known only when XLA has partitioned the program.
      origin: where the config comes from, as in `config_for`.
      over: the mesh axes over which each device runs it on its own shards.
      shards: the factors that a device multiplies, in every plan that is known; the rest describes the last one.
    """

    reason: str | None = None
    config: KernelConfig | None = None
    origin: str = ""
    over: tuple[str, ...] = ()
    shards: tuple[str, ...] = ()


def select(avals: Sequence[Any], spec: GemmSpec, num_devices: int = 1, *, anywhere: bool = False) -> Selection:
    """The form that this product is lowered to on the attached GPUs (on one of `arch.current` if there are none).

    Args:
      avals: types of the arguments.
      num_devices: how many XLA partitions the program over, if its types are on no mesh.
      anywhere: whether it may run on other devices than those attached, so that no table of tiles applies.

    Raises:
      ValueError: the user's config is none that a kernel of this product can have.
    """
    if spec.implementation == "xla":
        return Selection("implementation='xla'")
    if reason := machine_reason():
        return Selection(reason)
    route = route_of(avals, num_devices, for_export=anywhere)
    if route.reason is not None:
        return Selection(route.reason)
    if route.over:
        return _select_of_shards(avals, spec, route, anywhere)
    if reason := unsupported_reason(spec.matrices.flat_types(avals), spec.matrices.spec_of_matrices):
        return Selection(reason)
    problem = problem_of(avals, spec)
    try:
        return Selection(None, *config_for(problem, spec.config, None if anywhere else attached_device()))
    except ValueError as error:
        if spec.config is None:
            return Selection(str(error))
        if reason := select(avals, spec.replace(config=None), num_devices, anywhere=anywhere).reason:
            return Selection(reason)
        raise


def _select_of_shards(avals: Sequence[Any], spec: GemmSpec, route: Route, anywhere: bool) -> Selection:
    """The form of each device's product, from the types, or from what XLA asked when it compiled the program."""
    if route.is_automatic:
        plans = recorded(key_of(avals, spec))
        if not plans:
            return Selection(over=route.over)
        *_, last = plans
        reason = last.reason and f"on a device's part, {last.factors}, {last.reason}"
        return Selection(reason, last.config, last.origin, route.over, tuple(plan.factors for plan in plans))
    shards, shard_spec = shard_of_types(avals, spec)
    selection = select(shards[: len(shard_spec.batched)], shard_spec, anywhere=anywhere)
    return dataclasses.replace(selection, over=route.over, shards=(factors_of(shards, shard_spec),))


def factors_of(avals: Sequence[Any], spec: GemmSpec) -> str:
    """The text a @ b, with the types of a and b as matrices."""
    matrices = [jax.core.ShapedArray(x.shape, x.dtype) for x in spec.matrices.flat_types(avals)[:2]]
    transposed = (spec.transpose_a, spec.transpose_b)
    return " @ ".join(f"{x.str_short()}{'^T' if flag else ''}" for x, flag in zip(matrices, transposed, strict=True))


def machine_reason() -> str | None:
    if named_device() is not None:
        return None
    try:
        devices = jax.devices("cuda")
    except RuntimeError:  # export and ahead-of-time compilation: the machine that runs it compiles the kernels
        return None
    arch = current()
    other = {device.compute_capability for device in devices} - {arch.capability}
    if other:
        return f"the GPU has compute capability {min(other)}; the kernel needs {arch.capability} ({arch.name})"
    return ffi.unavailable_reason()


@dataclasses.dataclass(frozen=True)
class Route:
    """How a product is distributed over the devices.

    Attributes:
      over: the mesh axes over which it is sharded; none on one device, or where all axes are manual.
      is_automatic: whether they are automatic, not explicit.
      reason: why it cannot be sharded.
    """

    over: tuple[str, ...] = ()
    is_automatic: bool = False
    reason: str | None = None


def route_of(avals: Sequence[Any], num_devices: int, *, for_export: bool = False) -> Route:
    """The route of a product of arguments of these types to `num_devices` devices, if they are on no mesh."""
    shardings = [aval.sharding for aval in avals]
    over, automatic = partitioned_axes(*shardings), automatic_axes(*shardings)
    on_no_mesh = all(sharding.mesh.empty for sharding in shardings)
    if not over and not (on_no_mesh and num_devices > 1):
        return Route()
    if not automatic and not on_no_mesh:
        return Route(over)
    names = f"mesh axes {', '.join(over)}" if over else f"{num_devices} devices"
    why = None
    if for_export:
        why = "an exported program cannot carry how a call is split over automatic ones"
    elif not jax.config.jax_use_shardy_partitioner:
        why = "it does so without Shardy (jax_use_shardy_partitioner), whose rules say how a call is split"
    reason = why and f"XLA partitions it over {names}, and {why}; {WAY_OUT}"
    return Route(over or (f"{num_devices} devices",), True, reason)


def select_shard(
    arguments: Sequence[Any], spec: GemmSpec, *, anywhere: bool = False, key: str | None = None
) -> Selection:
    """The form of a product of arrays on one device; with a key it is recorded, as a shard of that product."""
    types = [jax.core.ShapedArray(x.shape, x.dtype) for x in arguments]
    selection = select(types, spec, anywhere=anywhere)
    if key is not None:
        record(key, Shard(factors_of(types, spec), selection.reason, selection.config, selection.origin))
    return selection


def report(avals: Sequence[Any], spec: GemmSpec, reason: str | None, *, strict: bool) -> None:
    """Says why a product of arguments of these types takes its XLA form.

    Raises:
      NotImplementedError: implementation="cuda".
      FallbackError: strict, and the form was not asked for.
    """
    types, pieces_of_a = typed(avals[: spec.matrices.num_factors]), len(spec.matrices.a)
    factors = " @ ".join(", ".join(of) for of in (types[:pieces_of_a], types[pieces_of_a:]))
    report_of(f"{spec.function} '{spec.name}'", factors, spec, reason, strict=strict)


def report_of(name: str, arguments: str, spec: Any, reason: str | None, *, strict: bool) -> None:
    """`report` of a call with this name and these types of arguments, and a spec of a kind of its own."""
    if spec.implementation == "cuda":
        raise NotImplementedError(f"{name}: implementation='cuda' was asked for, but {reason}")
    if spec.implementation != "xla":
        message = f"takes its XLA form: {reason}"
        told = f"{name}, {arguments}, {message}; coda.explain lists all, with what to change"
        warn_once(told, message, spec.site, strict=strict)


def typed(avals: Sequence[Any]) -> list[str]:
    """The types of arguments, for messages."""
    return [f"{np.dtype(x.dtype).name}{list(x.shape)}" for x in avals]
