"""The rule by which JAX lowers a product for CUDA: on one device the kernel, on several what each of them runs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.interpreters import mlir

from coda_jax.lowering.launch import kernel_tiles
from coda_jax.lowering.on_devices import Form, device_form, lower_automatic, lower_explicit
from coda_jax.lowering.record import key_of
from coda_jax.lowering.select import Route, machine_reason, report, route_of, select_shard
from coda_jax.lowering.xla_partitioner import WAY_OUT, devices_of, with_own_attributes
from coda_jax.primitives.fallbacks import is_strict
from coda_jax.primitives.gemm_primitive import PRIMITIVES, lower_xla, outputs_of, xla_tiles
from coda_jax.primitives.spec import GemmSpec


def form_of(
    arguments: Sequence[Any],
    spec: GemmSpec,
    *,
    strict: bool,
    anywhere: bool = False,
    yields: bool = False,
    key: str | None = None,
) -> Form:
    """The form of a product of such arrays on one device: the kernel, or XLA's with a warning; strict, an error."""
    selection = select_shard(arguments, spec, anywhere=anywhere, key=key)
    if selection.config is not None:
        kernel = functools.partial(kernel_tiles, spec=spec, config=selection.config, yields=yields)
        return kernel if key is None else with_own_attributes(kernel)
    report(arguments, spec, selection.reason, strict=strict)
    return functools.partial(xla_tiles, spec=spec, in_8_bits=spec.implementation != "xla")


def is_of_several(ctx: mlir.LoweringRuleContext) -> bool:
    """True if the program runs on several devices, so that there may be collectives beside its kernels."""
    context: Any = ctx.module_context.axis_context
    meshes = [aval.sharding.mesh for aval in ctx.avals_in]  # type: ignore[attr-defined]
    sizes = [mesh.size for mesh in (*meshes, getattr(context, "mesh", None)) if mesh is not None]
    return max(getattr(context, "num_devices", 1), *sizes) > 1


def routed(ctx: mlir.LoweringRuleContext, implementation: str | None) -> tuple[Route, str | None]:
    """The route of a call that is lowered; and why it takes XLA's form, whatever its shards are."""
    num_devices, has_devices = devices_of(ctx)
    route = route_of(ctx.avals_in, num_devices, for_export=is_exported(ctx))
    if route.is_automatic and not has_devices and route.reason is None:
        reason = f"XLA partitions it over {', '.join(route.over)}, whose devices no lowering knows; {WAY_OUT}"
        route = dataclasses.replace(route, reason=reason)
    return route, "implementation='xla'" if implementation == "xla" else machine_reason() or route.reason


def is_exported(ctx: mlir.LoweringRuleContext) -> bool:
    """True if the program that is lowered may run on other devices than those attached."""
    return bool(ctx.module_context.lowering_parameters.for_export)


def _lower(ctx: mlir.LoweringRuleContext, *arguments: Any, spec: GemmSpec, form_of: Any = form_of) -> Any:
    anywhere = is_exported(ctx)
    route, why_not = routed(ctx, spec.implementation)
    if why_not is not None:
        report(ctx.avals_in, spec, why_not, strict=is_strict())
        return lower_xla(ctx, *arguments, spec=spec)
    # Now: XLA's partitioner calls back later, and on threads of its own.
    form_of = functools.partial(form_of, strict=is_strict(), anywhere=anywhere, yields=is_of_several(ctx))
    if route.over:
        if route.is_automatic:
            form_of = functools.partial(form_of, key=key_of(ctx.avals_in, spec))
        lower = lower_automatic if route.is_automatic else lower_explicit
        return lower(ctx, *arguments, spec=spec, form_of=form_of)

    def on_one_device(*arguments: jax.Array) -> list[jax.Array]:
        stores, reductions = device_form(arguments, spec, form_of)(*arguments)
        return outputs_of([*stores, *reductions], arguments, spec)

    return mlir.lower_fun(on_one_device, multiple_results=True)(ctx, *arguments)


for _primitive in PRIMITIVES:
    mlir.register_lowering(_primitive, _lower, platform="cuda")
