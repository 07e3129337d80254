"""The rule by which JAX lowers attention for CUDA: on one device the kernels, on several what each of them runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend import core as jex_core
from jax.interpreters import mlir

from coda_jax.attend import costs, kernel
from coda_jax.attend.on_mesh import Form, lower_automatic, lower_explicit, parts_of_types
from coda_jax.attend.primitive import FORMS, attention_backward_p, form_apart, is_backward, lower_xla, types_of
from coda_jax.attend.spec import AttentionSpec
from coda_jax.jaxprs.evaluate import bound, evaluate
from coda_jax.jaxprs.walk import equations
from coda_jax.lowering.cuda import is_of_several, routed
from coda_jax.lowering.record import key_of, record, recorded
from coda_jax.lowering.select import machine_reason, report_of, route_of, typed
from coda_jax.lowering.xla_partitioner import with_own_attributes
from coda_jax.primitives.fallbacks import is_strict
from coda_jax.primitives.mesh_types import vary, varying_axes

_LAUNCH = "ffi_call"  # the primitive of a custom call


def form_of(
    arrays: Sequence[Any],
    spec: AttentionSpec,
    seen: int | None,
    *,
    primitive: jex_core.Primitive,
    strict: bool,
    yields: bool = False,
    key: str | None = None,
) -> Form:
    """The form of attention of such arrays on one device: the kernel, or XLA's with a warning; strict, an error.

    Args:
      seen: how many pairs of each head see each other; None if it is not known.
      yields: as the kernel has it: whether the program runs on several devices, so that collectives need SMs.
      key: under which it is recorded, where the partitioner puts it in the place of a call.
    """
    types = [jax.core.ShapedArray(x.shape, x.dtype) for x in arrays]
    reason = unsupported_reason(types, spec)
    if key is not None:
        record(key, Part(reason, tuple(types), tuple(types_of(primitive, *types, spec=spec))))
    if reason is not None:
        report(types, spec, reason, strict=strict)
        return functools.partial(FORMS[primitive], spec=spec, on_cpu=False)
    run = functools.partial(
        _timed,
        function=functools.partial(
            kernel.backward if is_backward(primitive) else kernel.forward, spec=spec, yields=yields
        ),
        nanoseconds=_nanoseconds(types, seen, primitive),
    )
    return run if key is None else with_own_attributes(run)


def unsupported_reason(avals: Sequence[Any], spec: AttentionSpec) -> str | None:
    """Why the kernels cannot compute attention of such arguments, forward or backward; None if they can."""
    return kernel.unsupported_reason(avals[: spec.count], spec)


class Part(NamedTuple):
    """A device's part of attention that XLA has partitioned.

    Attributes:
      reason: why it takes XLA's form; None where it is the kernels.
      arguments, results: types of the device's arrays.
    """

    reason: str | None
    arguments: tuple[Any, ...]
    results: tuple[Any, ...]


class Selected(NamedTuple):
    """The form that attention is lowered to on the attached GPUs, on one of `arch.current` if there are none.

    Attributes:
      reason: why it takes XLA's form; None where it is the kernels.
      over: the mesh axes over which each device runs it on its own part.
      arguments, results: types of a device's arrays, in the last plan that is known; None where they are known only
        when XLA has partitioned the program.
    """

    reason: str | None
    over: tuple[str, ...] = ()
    arguments: Sequence[Any] | None = None
    results: Sequence[Any] | None = None


def selected(avals: Sequence[Any], results: Sequence[Any], spec: AttentionSpec, num_devices: int = 1) -> Selected:
    """The form of attention of arguments and results of these types.

    Args:
      num_devices: how many XLA partitions the program over, if its types are on no mesh.
    """
    route = route_of(avals, num_devices)
    reason = "implementation='xla'" if spec.implementation == "xla" else machine_reason() or route.reason
    reason = reason or unsupported_reason(avals, spec)
    if route.over and spec.gradients is not None:  # they are passes there
        avals, spec = spec.split(avals)[0], spec.plain
        results = types_of(attention_backward_p, *avals, spec=spec)
    if route.is_automatic:
        *_, last = (None, *recorded(key_of(avals, spec)))
        return Selected(reason, route.over) if last is None else Selected(reason or last.reason, route.over, *last[1:])
    if route.over:
        return Selected(reason, route.over, *parts_of_types(avals, results, spec))
    return Selected(reason, (), avals, results)


def report(avals: Sequence[Any], spec: AttentionSpec, reason: str | None, *, strict: bool) -> None:
    """Says why attention of arguments of these types takes its XLA form.

    Raises:
      NotImplementedError: implementation="cuda".
      FallbackError: strict, and the form was not asked for.
    """
    named = zip(("query", "key", "value"), typed(avals[:3]), strict=True)
    report_of("attention", ", ".join(f"{name} {type_}" for name, type_ in named), spec, reason, strict=strict)


def _nanoseconds(types: Sequence[Any], seen: int | None, primitive: jex_core.Primitive) -> int | None:
    backward = is_backward(primitive)
    needed = costs.flops(types, seen, is_backward=backward)
    return None if needed is None else costs.nanoseconds(needed, is_backward=backward)


def _timed(*arrays: jax.Array, function: Callable[..., list[jax.Array]], nanoseconds: int | None) -> list[jax.Array]:
    """function(*arrays), of which XLA's scheduler is told how long it takes: what runs beside it starts in time."""
    closed = jax.make_jaxpr(function)(*arrays)
    launches = [len(one.outvars) for one, _ in equations(closed.jaxpr) if one.primitive.name == _LAUNCH]
    # What takes one of several results of a call gets what is said of the call, and XLA counts it again.
    operations = sum(1 + (results if results > 1 else 0) for results in launches)

    def apply(equation: jex_core.JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
        if equation.primitive.name != _LAUNCH:
            return bound(equation, inputs)
        told = {"latency_metadata": nanoseconds // operations} if nanoseconds else {}
        with set_xla_metadata(**told):
            return bound(equation, inputs)

    # A custom call's results are typed as varying over no mesh axis.
    return vary(varying_axes(*arrays), *evaluate(closed.jaxpr, closed.consts, arrays, apply))


def _lower(
    ctx: mlir.LoweringRuleContext,
    *arrays: Any,
    spec: AttentionSpec,
    primitive: jex_core.Primitive,
    form_of: Any = form_of,
) -> Any:
    route, why_not = routed(ctx, spec.implementation)
    if why_not is not None:
        report(ctx.avals_in, spec, why_not, strict=is_strict())
        return lower_xla(ctx, *arrays, spec=spec, primitive=primitive)
    if route.over and spec.gradients is not None:  # columns of one matrix are no heads that a mesh may shard
        form = functools.partial(form_apart, spec=spec, primitive=primitive)
        lowered: Sequence[Any] = mlir.lower_fun(form, multiple_results=True)(ctx, *arrays)
        return lowered
    # Now: XLA's partitioner calls back later, and on threads of its own.
    form_of = functools.partial(form_of, primitive=primitive, strict=is_strict(), yields=is_of_several(ctx))
    if route.over:
        if route.is_automatic:
            form_of = functools.partial(form_of, key=key_of(ctx.avals_in, spec))
        lower = lower_automatic if route.is_automatic else lower_explicit
        return lower(ctx, *arrays, spec=spec, primitive=primitive, form_of=form_of)
    avals: Sequence[Any] = ctx.avals_in
    queries, keys = avals[0].shape[1], avals[1].shape[1]
    seen = costs.pairs(spec.mask, queries, keys)

    def on_one_device(*arrays: jax.Array) -> list[jax.Array]:
        return form_of(arrays, spec, seen)(*arrays)

    return mlir.lower_fun(on_one_device, multiple_results=True)(ctx, *arrays)


for _primitive in FORMS:
    mlir.register_lowering(_primitive, functools.partial(_lower, primitive=_primitive), platform="cuda")
