"""Attention's two JAX primitives: their types, their batching, their form by XLA, and what joins them.

    attention_forward_p: q (B, T, H, D), k (B, S, K, D), v (B, S, K, Dv), mask arrays, the score's arrays, operands of
        the results -> y (B, T, H, Dv) in q's dtype, lse (B, H, T) float32, the results; y not where
        `Results.keeps_y` is False
    attention_backward_p: the same, y, lse, dy (B, T, H, Dv), dlse (B, H, T), operands of the maps of the gradients
        -> dq, dk, dv, or what `Gradients` makes of them; with sinks also delta (B, H, T) float32; the gradients of
        `AttentionSpec.score_gradients`

K divides H. lse is a row's log-sum-exp, by the natural logarithm; where a row sees nothing y is 0, and lse is -inf, or
its sink. delta is rowsum(dy y) - dlse, of which sinks have their gradient. The mask's arrays are those of `MaskArrays`,
the score's are (1 or B, 1 or H, 1 or T, 1 or S). float64 arrays, which XLA alone takes, have lse and delta in float64.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import dispatch  # prim_requires_devices_during_lowering has no public name
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core as jex_core
from jax.interpreters import ad, batching, mlir, partial_eval

from coda_jax.attend import blocks
from coda_jax.attend.gradients import Gradients, as_matrix, with_gradients
from coda_jax.attend.probabilities import sinks_cotangent
from coda_jax.attend.results import Results
from coda_jax.attend.spec import AttentionSpec
from coda_jax.epilogue import Epilogue
from coda_jax.epilogue.values import NotTileLocalError, same_size
from coda_jax.primitives.mesh_types import (
    explicit_axes,
    explicit_cuts,
    explicit_sharding,
    may_be_automatic,
    partition_spec,
    reshaped,
    vary,
    varying_axes,
    with_sharding,
)
from coda_jax.primitives.reverse_mode import Backward, differentiable
from coda_jax.tiles.arch import current

CONTEXT_NAME = "context"  # of y and lse, for policies of `jax.checkpoint` that keep arrays by name

attention_forward_p = jex_core.Primitive("coda_attention")
attention_backward_p = jex_core.Primitive("coda_attention_backward")
# The same where XLA may partition attention over automatic mesh axes, as `coda_gemm_auto_p` is of products.
attention_forward_auto_p = jex_core.Primitive("coda_attention")
attention_backward_auto_p = jex_core.Primitive("coda_attention_backward")
_AUTOMATIC = {attention_forward_p: attention_forward_auto_p, attention_backward_p: attention_backward_auto_p}


def forward_form(*arrays: jax.Array, spec: AttentionSpec, on_cpu: bool) -> list[jax.Array]:
    """`blocks.forward`, with the results of the spec made of its y."""
    arguments, operands = spec.split(arrays)
    y, lse = blocks.forward(*arguments, spec=spec.plain, on_cpu=on_cpu)
    return [y, lse] if spec.results is None else spec.results.beside(y, lse, operands)


def backward_form(*arrays: jax.Array, spec: AttentionSpec, on_cpu: bool) -> list[jax.Array]:
    """`blocks.backward`, with what the spec makes of its dq, dk and dv."""
    arguments, operands = spec.split(arrays)
    return with_gradients(blocks.backward(*arguments, spec=spec.plain, on_cpu=on_cpu), operands, spec.gradients)


FORMS: dict[jex_core.Primitive, Callable[..., list[jax.Array]]] = {  # by XLA
    attention_forward_p: forward_form,
    attention_forward_auto_p: forward_form,
    attention_backward_p: backward_form,
    attention_backward_auto_p: backward_form,
}
for _primitive in _AUTOMATIC.values():
    dispatch.prim_requires_devices_during_lowering.add(_primitive)


forward_primitives = frozenset({attention_forward_p, attention_forward_auto_p})
backward_primitives = frozenset({attention_backward_p, attention_backward_auto_p})


def is_backward(primitive: jex_core.Primitive) -> bool:
    """True if a primitive of `FORMS` is the backward pass."""
    return primitive in backward_primitives


def _bind(primitive: jex_core.Primitive, *arrays: jax.Array, spec: AttentionSpec) -> tuple[jax.Array, ...]:
    """The results of forward or backward pass, by the primitive that the arrays' types ask for."""
    is_auto = spec.implementation != "xla" and may_be_automatic(*arrays)
    return tuple((_AUTOMATIC[primitive] if is_auto else primitive).bind(*arrays, spec=spec))


def attend(*arrays: jax.Array, spec: AttentionSpec) -> tuple[jax.Array, jax.Array]:
    """y (B, T, H, Dv) and lse (B, H, T) of a primitive's arrays, with their derivatives of any order.

    The first derivative runs `attention_backward_p`, and further ones XLA's form of it.
    """

    def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return _bind(attention_forward_p, *arrays, spec=spec)

    def forward(*arrays: jax.Array) -> tuple[Any, Any]:
        _check_slopes(spec)
        y, lse = (checkpoint_name(x, CONTEXT_NAME) for x in attend(*arrays, spec=spec))
        return (y, lse), (arrays, y, lse)

    def backward(kept: Any, cotangents: Any) -> tuple[Any, ...]:
        arrays, y, lse = kept
        all_arrays = *arrays, y, lse, *cotangents
        places = range(len(arrays))
        in_kernel, by_xla = _with_gradients(arrays, spec)
        dq, dk, dv, *others = _gradients(*all_arrays, spec=in_kernel)
        found: list[Any] = [dq, dk, dv, *(None,) * (len(arrays) - 3)]
        if spec.mask.has_sinks:
            place = spec.mask_arrays(places).sinks
            found[place] = _sinks_cotangent(arrays[place], lse, others.pop(0))
        for place, x in zip(in_kernel.gradient_arrays(places), others, strict=True):
            found[place] = x
        for form, of_form in _differentiated(by_xla):  # apart, so that nothing is computed for which nobody asks
            by_array = _cotangents(*all_arrays, spec=by_xla, on_cpu=_has_cpu_alone(), form=form, places=of_form)
            for place, x in zip(of_form, by_array, strict=True):
                found[place] = x
        return tuple(found)

    y, lse = differentiable("attention", run, forward, backward)(*vary(varying_axes(*arrays), *arrays))
    return y, lse


def attend_with_results(
    arrays: Sequence[jax.Array],
    operands: Sequence[jax.Array],
    epilogue: Epilogue,
    *,
    spec: AttentionSpec,
    results: Results,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """y and lse as `attend` gives them, and epilogue(y, *operands), which the forward kernel makes beside y.

    Its derivative is that of both, one after the other.

    Args:
      epilogue: of y as a matrix (B T, H Dv), float32.
      spec: without results.
      results: of the epilogue's program. Where they do not keep y, it is zeros, which nobody reads.
    """
    (batch, rows, heads, _), width = arrays[0].shape, arrays[2].shape[-1]
    shape, count = (batch, rows, heads, width), len(arrays)
    beside_spec = dataclasses.replace(spec, results=results)

    def separate(*arguments: jax.Array) -> tuple[jax.Array, ...]:
        y, lse = attend(*arguments[:count], spec=spec)
        acc = y.astype(jnp.float32).reshape(batch * rows, heads * width)
        return y, lse, *epilogue.call(acc, *arguments[count:])

    def run(*arguments: jax.Array) -> tuple[jax.Array, ...]:
        made = _bind(attention_forward_p, *arguments, spec=beside_spec)
        y = made[0] if results.keeps_y else jnp.zeros(shape, arguments[0].dtype)
        lse, *beside = made[int(results.keeps_y) :]
        outputs = zip(results.outputs(beside, arguments[count:], shape), epilogue.out_avals, strict=True)
        return y, lse, *(x.astype(of.dtype) for x, of in outputs)

    def forward(*arguments: jax.Array) -> tuple[Any, Any]:
        return jax.vjp(separate, *arguments)

    def backward(pullback: Any, cotangents: Any) -> tuple[Any, ...]:
        found: tuple[Any, ...] = pullback(tuple(cotangents))
        return found

    y, lse, *outputs = differentiable("attention", run, forward, backward)(*arrays, *operands)
    return [y, lse], outputs


def _gradients(*arrays: jax.Array, spec: AttentionSpec) -> tuple[jax.Array, ...]:
    """The results of the backward pass, with their own derivative."""

    def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return _bind(attention_backward_p, *arrays, spec=spec)

    def forward(*arrays: jax.Array) -> tuple[Any, Any]:
        return _gradients(*arrays, spec=spec), arrays

    gradients: tuple[jax.Array, ...] = differentiable("attention", run, forward, _OfGradients(spec))(*arrays)
    return gradients


class _OfGradients(Backward):
    """The derivative of the backward pass, by XLA; of gradients of a score's arrays, of those that something reads."""

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec

    def __call__(self, arrays: Any, cotangents: Any) -> tuple[Any, ...]:
        first = len(cotangents) - len(self.spec.score_gradients)
        of_score = dict(zip(self.spec.score_gradients, cotangents[first:], strict=True))
        read = {number: x for number, x in of_score.items() if x is not None}
        spec = dataclasses.replace(self.spec, score_gradients=tuple(read))
        types = _backward_types(*map(jax.typeof, arrays), spec=spec)
        each = zip((*cotangents[:first], *read.values()), types, strict=True)
        cotangents = tuple(ad.instantiate_zeros(ad.Zero(of)) if x is None else x for x, of in each)
        second_form = functools.partial(
            _traced_form, spec=spec, primitive=attention_backward_p, on_cpu=_has_cpu_alone()
        )
        places = [i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.floating)]

        def form(*differentiated: jax.Array) -> tuple[jax.Array, ...]:
            given = dict(zip(places, differentiated, strict=True))
            return tuple(second_form(*(given.get(i, x) for i, x in enumerate(arrays))))

        _, pullback = jax.vjp(form, *(arrays[i] for i in places))
        found = dict(zip(places, pullback(cotangents), strict=True))
        return tuple(found.get(i) for i in range(len(arrays)))

    def of_batch(self, size: Any, kept: Any, cotangents: Any, batched: tuple[Any, Any]) -> None:
        return None


def pull_back_with(
    arrays: Sequence[jax.Array],
    operands: Sequence[jax.Array],
    epilogues: Sequence[Epilogue],
    *,
    spec: AttentionSpec,
    gradients: Gradients,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """The outputs of the epilogues of dq, dk and dv, as `Gradients.outputs` has them, and delta where there are sinks.

    The backward kernels make it. Its derivative is that of both, one after the other.

    Args:
      arrays: those of the backward primitive.
      epilogues: of dq, dk and dv as matrices (B T, H D), float32.
      spec: without gradients.
      gradients: of the epilogues' programs.
    """
    (batch, rows), count = arrays[0].shape[:2], len(arrays)
    tiles = [len(gradients.tiles_of(i)) for i in range(3)]
    made_spec = dataclasses.replace(spec, gradients=gradients)
    tile_types = [
        epilogues[members[0]].out_avals[gradients.tiles_of(members[0]).index(tile)]
        for tile, members in enumerate(gradients.members)
    ]
    other_types = [x for i, epilogue in enumerate(epilogues) for x in epilogue.out_avals[tiles[i] :]]
    dtypes = [x.dtype for x in (*tile_types, *other_types)]

    def separate(*arguments: jax.Array) -> tuple[jax.Array, ...]:
        found = _gradients(*arguments[:count], spec=spec)
        each = [
            epilogue.call(as_matrix(x).astype(jnp.float32), *gradients.operands_of(i, arguments[count:]))
            for i, (epilogue, x) in enumerate(zip(epilogues, found, strict=False))
        ]
        others = (x for i, outputs in enumerate(each) for x in outputs[tiles[i] :])
        return *gradients.join(each), *others, *found[3:]

    def run(*arguments: jax.Array) -> tuple[jax.Array, ...]:
        made = _bind(attention_backward_p, *arguments, spec=made_spec)
        of_gradients = len(gradients.result_dtypes)
        outputs = gradients.outputs(made[:of_gradients], arguments[count:], batch * rows)
        return *(x.astype(dtype) for x, dtype in zip(outputs, dtypes, strict=True)), *made[of_gradients:]

    def forward(*arguments: jax.Array) -> tuple[Any, Any]:
        return jax.vjp(separate, *arguments)

    def backward(pullback: Any, cotangents: Any) -> tuple[Any, ...]:
        found: tuple[Any, ...] = pullback(tuple(cotangents))
        return found

    outputs = differentiable("attention", run, forward, backward)(*arrays, *operands)
    return list(outputs[: len(dtypes)]), list(outputs[len(dtypes) :])


def _by_xla(function: Callable[..., Any], types: Sequence[Any], arrays: Sequence[jax.Array]) -> Any:
    """function(*arrays), whose results have these types; XLA's partitioner divides it over explicit mesh axes too."""
    axes = explicit_axes(jax.sharding.get_abstract_mesh())
    if not axes:
        return function(*arrays)
    placements = [x.sharding.spec for x in types]
    return jax.sharding.auto_axes(function, axes=axes, out_sharding=placements)(*arrays)


def xla_form(
    *arrays: jax.Array, spec: AttentionSpec, primitive: jex_core.Primitive, on_cpu: bool = False
) -> list[jax.Array]:
    """The results of a primitive by XLA, in blocks for a CPU or for other platforms."""
    types = _TYPES[primitive](*map(jax.typeof, arrays), spec=spec)
    form = functools.partial(FORMS[primitive], spec=spec, on_cpu=on_cpu)
    results: list[jax.Array] = _by_xla(form, types, arrays)
    return results


_traced_form = jax.jit(xla_form, static_argnames=("spec", "primitive", "on_cpu"))  # equal calls are traced once


def _differentiated(spec: AttentionSpec) -> list[tuple[Callable[..., Any], tuple[int, ...]]]:
    """The functions of blocks that give gradients of arrays beside q, k and v, and which arrays these are."""
    places = range(spec.count)
    found: list[tuple[Callable[..., Any], tuple[int, ...]]] = []
    if spec.mask.has_bias:
        found.append((blocks.bias_cotangents, (spec.mask_arrays(places).bias,)))
    if spec.score_gradients:
        found.append((blocks.score_cotangents, tuple(spec.gradient_arrays(places))))
    return found


def _with_gradients(arrays: Sequence[jax.Array], spec: AttentionSpec) -> tuple[AttentionSpec, AttentionSpec]:
    """The specs with the gradients of the score's arrays that the backward pass makes, and with the others."""
    if spec.score is None:
        return spec, spec
    in_kernel = spec.score.sums_of_kernel([x.shape for x in spec.score_arrays(arrays)])
    others = tuple(array for array, _ in spec.score.slopes if array not in in_kernel)
    return dataclasses.replace(spec, score_gradients=in_kernel), dataclasses.replace(spec, score_gradients=others)


@functools.partial(jax.jit, static_argnames=("spec", "on_cpu", "form", "places"))
def _cotangents(
    *arrays: jax.Array, spec: AttentionSpec, on_cpu: bool, form: Callable[..., Any], places: tuple[int, ...]
) -> list[jax.Array]:
    """The gradients of the arrays at these places, by a function of blocks, from what the backward pass takes."""
    types = [jax.typeof(arrays[place]) for place in places]
    found: list[jax.Array] = _by_xla(functools.partial(form, spec=spec, on_cpu=on_cpu), types, arrays)
    return found


def _check_slopes(spec: AttentionSpec) -> None:
    if spec.score is not None and spec.score.why_no_slope is not None:
        raise NotTileLocalError(f"score '{spec.score.name}' has no derivative here: {spec.score.why_no_slope}")


@jax.jit
def _sinks_cotangent(sinks: jax.Array, lse: jax.Array, delta: jax.Array) -> jax.Array:
    def form(*arrays: jax.Array) -> list[jax.Array]:
        return [sinks_cotangent(*arrays)]

    (result,) = _by_xla(form, [jax.typeof(sinks)], (sinks, lse, delta))
    of_sinks: jax.Array = result
    return of_sinks


def _has_cpu_alone() -> bool:
    """Whether what is computed beside the primitives, whose lowerings know their platform, is for a CPU."""
    return jax.default_backend() == "cpu"


def _forward_types(q: Any, k: Any, v: Any, *_: Any, spec: AttentionSpec) -> list[Any]:
    axes, shape = explicit_cuts(q), (*q.shape[:3], v.shape[-1])
    types = [_type_like(q, shape, q.dtype, (*axes[:3], ())), _type_of_rows(q)]
    if spec.results is None:
        return types
    cuts = {4: (axes[0], axes[1], axes[2], ()), 0: ()}
    for i, (of, dtype) in enumerate(zip(spec.results.shapes(shape), spec.results.result_dtypes, strict=True)):
        is_transposed = i < len(spec.results.dtypes) and spec.results.program.stores[i].transposed
        of_axes = (axes[2], (), axes[0], axes[1]) if is_transposed else cuts[len(of)]
        types.append(_type_like(q, of, dtype, of_axes))
    return types if spec.results.keeps_y else types[1:]


def _type_of_rows(q: Any) -> Any:
    """The type of lse and delta."""
    batch, length, heads, _ = q.shape
    axes = explicit_cuts(q)
    return _type_like(q, (batch, heads, length), jnp.promote_types(q.dtype, jnp.float32), (axes[0], axes[2], axes[1]))


def _type_like(q: Any, shape: Sequence[Any], dtype: Any, mesh_axes: Sequence[tuple[str, ...]]) -> Any:
    """A type on q's mesh, which these axes of it shard."""
    sharding = q.sharding.update(spec=partition_spec(mesh_axes))
    return q.update(shape=tuple(shape), dtype=dtype, weak_type=False, sharding=sharding)


def _backward_types(*arrays: Any, spec: AttentionSpec) -> list[Any]:
    q, k, v = arrays[:3]
    of_sinks = [_type_of_rows(q)] if spec.mask.has_sinks else []
    of_score = [x.update(weak_type=False) for x in spec.gradient_arrays(arrays)]
    if spec.gradients is None:
        return [*(x.update(weak_type=False) for x in (q, k, v)), *of_sinks, *of_score]
    each = zip(spec.gradients.shapes(q.shape, v.shape), spec.gradients.result_dtypes, strict=True)
    return [*(_type_like(q, shape, dtype, ((),) * len(shape)) for shape, dtype in each), *of_sinks, *of_score]


_TYPES = {x: _backward_types if is_backward(x) else _forward_types for x in FORMS}


def types_of(primitive: jex_core.Primitive, *avals: Any, spec: AttentionSpec) -> list[Any]:
    """The types of a primitive's results."""
    return _TYPES[primitive](*avals, spec=spec)


def _batch(
    arrays: Sequence[jax.Array], dims: Sequence[int | None], *, spec: AttentionSpec, primitive: jex_core.Primitive
) -> tuple[list[jax.Array], list[int]]:
    """More sequences: the new axis and B become one. What lacks the new axis is repeated, but for what B shares too."""
    if spec.plain is not spec:
        return _batch_apart(arrays, dims, spec=spec, primitive=primitive)
    each = list(zip(arrays, dims, strict=True))
    size, cuts = next((x.shape[dim], explicit_cuts(x)[dim]) for x, dim in each if dim is not None)
    batch = arrays[0].shape[int(dims[0] == 0)]
    places = range(len(arrays))
    of_mask, of_score, gradients = spec.mask_arrays(places), spec.score_arrays(places), spec.gradient_arrays(places)
    may_be_one = {of_mask.mask, of_mask.bias, of_mask.sinks, *of_score} - {*gradients}
    merged, sums = [], [False] * len(spec.score_gradients)
    for i, (x, dim) in enumerate(each):
        if dim is None and i in may_be_one and same_size(x.shape[0], 1):
            merged.append(x)  # one for all
            continue
        if i in gradients:
            sums[gradients.index(i)] = same_size(x.shape[0 if dim is None else int(dim == 0)], 1)
        x = x[None] if dim is None else jnp.moveaxis(x, dim, 0)
        x = _cut(jnp.broadcast_to(x, (size, batch, *x.shape[2:])), cuts)
        merged.append(reshaped(x, (size * batch, *x.shape[2:]), merged=(2, *(1,) * (x.ndim - 2))))
    q_cuts = explicit_cuts(merged[0])[0]
    batch_cuts = tuple(name for name in q_cuts if name not in cuts)
    outputs = []
    results = primitive.bind(*merged, spec=spec)
    for x in results:
        rest = [tuple(name for name in names if name not in q_cuts) for names in explicit_cuts(x)[1:]]
        outputs.append(reshaped(x, (size, batch, *x.shape[1:]), cuts=(cuts, batch_cuts, *rest)))
    first = len(results) - len(sums)
    for i, is_sum in enumerate(sums, first):  # of an array that the sequences of an element share
        outputs[i] = jnp.sum(outputs[i], axis=1, keepdims=True) if is_sum else outputs[i]
    return outputs, [0] * len(outputs)


def _batch_apart(
    arrays: Sequence[jax.Array], dims: Sequence[int | None], *, spec: AttentionSpec, primitive: jex_core.Primitive
) -> tuple[list[jax.Array], list[int]]:
    """A batch of which XLA makes what is made of y or of the gradients: each has maxima of its own."""
    one = functools.partial(form_apart, spec=spec, primitive=primitive)
    outputs = jax.vmap(one, in_axes=tuple(dims))(*arrays)
    return list(outputs), [0] * len(outputs)


def form_apart(*arrays: jax.Array, spec: AttentionSpec, primitive: jex_core.Primitive) -> list[jax.Array]:
    """The results of a primitive of which XLA makes what is made of y, or of dq, dk and dv."""
    arguments, operands = spec.split(arrays)
    found = primitive.bind(*arguments, spec=spec.plain)
    if spec.results is None:
        return with_gradients(found, operands, spec.gradients)
    y, lse = found
    return spec.results.beside(y, lse, operands)


def _cut(x: jax.Array, cuts: tuple[str, ...]) -> jax.Array:
    """x, whose first axis these explicit mesh axes shard, and no other."""
    if not cuts:
        return x
    others = [tuple(name for name in names if name not in cuts) for names in explicit_cuts(x)[1:]]
    sharding = explicit_sharding(x).update(spec=partition_spec([cuts, *others]))
    cut: jax.Array = with_sharding(x, sharding)
    return cut


def _lower(
    ctx: mlir.LoweringRuleContext, *arrays: Any, spec: AttentionSpec, primitive: jex_core.Primitive
) -> Sequence[Any]:
    if spec.implementation == "cuda":
        platforms = "/".join(ctx.platforms or ctx.module_context.platforms)
        raise NotImplementedError(
            f"attention: implementation='cuda' was asked for on platform {platforms}; the kernels run on NVIDIA "
            f"{current().name} GPUs. Use None or 'xla' here."
        )
    return lower_xla(ctx, *arrays, spec=spec, primitive=primitive)


def lower_xla(
    ctx: mlir.LoweringRuleContext, *arrays: Any, spec: AttentionSpec, primitive: jex_core.Primitive
) -> Sequence[Any]:
    """Lowers a primitive to its form by XLA, on whatever platform."""
    on_cpu = tuple(ctx.platforms or ctx.module_context.platforms) == ("cpu",)
    form = functools.partial(_traced_form, spec=spec, primitive=primitive, on_cpu=on_cpu)
    lowered: Sequence[Any] = mlir.lower_fun(form, multiple_results=True)(ctx, *arrays)
    return lowered


def _bind_flat(*arrays: jax.Array, spec: AttentionSpec, primitive: jex_core.Primitive) -> list[jax.Array]:
    if not any(isinstance(x, jax.core.Tracer) for x in arrays):  # jit is disabled, or looks for a NaN
        return xla_form(*arrays, spec=spec, primitive=primitive)
    results: list[jax.Array] = primitive.bind(*arrays, spec=spec)
    return results


def _without_unused(used: Sequence[bool], *others: Any) -> tuple[list[bool], Any]:
    """Drops a pass whose results nobody reads, and the gradients of the score's arrays that nobody reads."""
    equation = others[-1]  # jax 0.12 puts in front of it which inputs are live
    if not any(used):
        return [False] * len(equation.invars), None
    spec: AttentionSpec = equation.params["spec"]
    first = len(used) - len(spec.score_gradients)
    kept = tuple(number for number, is_used in zip(spec.score_gradients, used[first:], strict=True) if is_used)
    if kept != spec.score_gradients:
        each = enumerate(zip(equation.outvars, used, strict=True))
        outputs = [x for i, (x, is_used) in each if is_used or i < first]
        equation = equation.replace(outvars=outputs, params={"spec": dataclasses.replace(spec, score_gradients=kept)})
    return [True] * len(equation.invars), equation


_run = jax.jit(_bind_flat, static_argnames=("spec", "primitive"))  # one for all calls outside jit

for _primitive in FORMS:
    _primitive.multiple_results = True
    _primitive.def_abstract_eval(_TYPES[_primitive])
    partial_eval.dce_rules[_primitive] = _without_unused
    _primitive.def_impl(functools.partial(_run, primitive=_primitive))
    batching.primitive_batchers[_primitive] = functools.partial(_batch, primitive=_primitive)
    mlir.register_lowering(_primitive, functools.partial(_lower, primitive=_primitive))
