"""A head's statistics as differentiable functions of arrays on any mesh.

`statistics` computes the logits again in its backward pass. `weighted_sum`, whose cotangent is a number, forms the
gradients in its forward pass, while a chunk's logits are there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from coda_jax.lowering.row_function import Result, on_row_shards
from coda_jax.operators.deferred_norm import DeferredNorm, row_flags
from coda_jax.operators.head.arrays import Kernel, Statistics, Tokens
from coda_jax.operators.head.loss_head import LossHead
from coda_jax.primitives.dtypes import kept_dtype
from coda_jax.primitives.mesh_types import explicit_axes, explicit_cuts, placed, vary, varying_axes
from coda_jax.primitives.reverse_mode import differentiable

Value = Callable[..., jax.Array]  # of each token's statistics and coefficients, elementwise


def statistics(
    head: LossHead, name: str, tokens: Tokens, kernel: Kernel, labels: jax.Array, mask: jax.Array | None = None
) -> Statistics:
    """`LossHead.statistics` with its derivative, named as the operator."""
    result: Statistics = _on_explicit_shards(partial(_statistics, name=name), head, tokens, kernel, labels, mask)
    return result


def weighted_sum(
    head: LossHead,
    name: str,
    value: Value,
    tokens: Tokens,
    kernel: Kernel,
    labels: jax.Array,
    weights: jax.Array,
    *coefficients: jax.Array,
) -> jax.Array:
    """sum(weights * value(statistics, *coefficients)); its gradients are formed in the forward pass.

    Coefficients are (), or (M,) as the weights are, and receive their gradient. `value` closes over no array.
    """
    f = partial(_weighted_sum, name=name, value=value)
    return jnp.sum(_on_explicit_shards(f, head, tokens, kernel, labels, weights, *coefficients))


# ---- on one device's shard over explicit axes


def _statistics(head: LossHead, *arguments: Any, name: str) -> Statistics:
    def run(tokens: Tokens, kernel: Kernel, labels: jax.Array, mask: jax.Array | None) -> Statistics:
        each: Any = Result()
        has_more = (head.has_total, head.has_entropy, head.has_best, bool(head.rank))
        results = Statistics(each, each, *(each if is_asked else None for is_asked in has_more))
        stats: Statistics = _on_devices(head, "statistics", (tokens, kernel, labels, mask), results)
        return stats

    def forward(*arguments: Any) -> tuple[Statistics, Any]:
        stats = _statistics(head, *arguments, name=name)
        return stats, (arguments, stats)

    def backward(kept: Any, cotangents: Statistics) -> tuple[Any, ...]:
        (tokens, kernel, labels, mask), stats = kept
        pullback = _pullback if mask is None else _masked_pullback
        dtokens, dkernel = pullback(head, tokens, kernel, labels, mask, stats, cotangents, name=name)
        return *_argument_cotangents(head, tokens, kernel, dtokens, dkernel), None, None

    result: Statistics = differentiable(name, run, forward, backward)(*arguments)
    return result


def _pullback(head: LossHead, *arguments: Any, name: str) -> tuple[Tokens, Kernel]:
    gradients: tuple[Tokens, Kernel] = _on_devices(head, "pullback", arguments, _gradients(head, *arguments[:2]))
    return gradients


def _masked_pullback(head: LossHead, *arguments: Any, name: str) -> tuple[Tokens, Kernel]:
    """`_pullback`, with the derivative of a loop over all chunks: JAX has no reverse mode of a loop over some."""
    over_all = dataclasses.replace(head, all_chunks=True)
    run, like = (partial(_pullback, one, name=name) for one in (head, over_all))
    gradients: tuple[Tokens, Kernel] = _derived_as(like, name, run, arguments, fixed=(2, 3))
    return gradients


def _derived_as(
    like: Callable[..., Any], name: str, run: Callable[..., Any], arguments: tuple[Any, ...], *, fixed: tuple[int, ...]
) -> Any:
    """run(*arguments) with the derivative of `like`, another function with the same results.

    Args:
      fixed: numbers of the arguments that are not differentiated, as labels.
    """

    def backward(arguments: Any, cotangents: Any) -> tuple[Any, ...]:
        def varied_function(*varied: Any) -> Any:
            remaining = iter(varied)
            return like(*(x if i in fixed else next(remaining) for i, x in enumerate(arguments)))

        _, pullback = jax.vjp(varied_function, *(x for i, x in enumerate(arguments) if i not in fixed))
        differentiated = iter(pullback(cotangents))
        return tuple(None if i in fixed else next(differentiated) for i in range(len(arguments)))

    return differentiable(name, run, lambda *arguments: (run(*arguments), arguments), backward)(*arguments)


def _weighted_sum(head: LossHead, *arguments: Any, name: str, value: Value) -> jax.Array:
    """The sum over a device's tokens, (1,)."""

    def run(
        tokens: Tokens, kernel: Kernel, labels: jax.Array, weights: jax.Array, *coefficients: jax.Array
    ) -> jax.Array:
        stats = _statistics(head, tokens, kernel, labels, None, name=name)
        return jnp.sum(weights * value(stats, *coefficients), keepdims=True)

    def forward(*arguments: Any) -> tuple[jax.Array, Any]:
        tokens, kernel, _, weights, *_ = arguments
        values, *gradients = _values_and_gradients(head, *arguments, name=name, value=value)
        return jnp.sum(weights * values, keepdims=True), (tokens, kernel, values, gradients)

    def backward(kept: Any, dsum: jax.Array) -> tuple[Any, ...]:
        tokens, kernel, values, (dcoefficients, (dtokens, dkernel)) = kept
        dtokens, dkernel = jax.tree.map(lambda x: jnp.expand_dims(dsum, range(1, x.ndim)) * x, (dtokens, dkernel))
        return (
            *_argument_cotangents(head, tokens, kernel, dtokens, dkernel),
            None,
            dsum * values,
            *(dsum * x for x in dcoefficients),
        )

    result: jax.Array = differentiable(name, run, forward, backward)(*arguments)
    return result


def _values_and_gradients(head: LossHead, *arguments: Any, name: str, value: Value) -> Any:
    """`LossHead.values_and_gradients`, whose own derivative is that of the head that keeps logits."""

    def computed_by(head: LossHead) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            tokens, kernel, *others = arguments
            results = (Result(), (Result(),) * len(others[2:]), _gradients(head, tokens, kernel))
            return _on_devices(head, "values_and_gradients", arguments, results, value)

        return run

    by_logits = head.logit_head()
    if by_logits is head:
        return computed_by(head)(*arguments)
    return _derived_as(computed_by(by_logits), name, computed_by(head), arguments, fixed=(2,))


def _argument_cotangents(
    head: LossHead, tokens: Tokens, kernel: Kernel, dtokens: Any, dkernel: Kernel
) -> tuple[Tokens, Kernel]:
    """The arguments' cotangents, from that of the projected array and those of the kernel, float32."""
    formed, through_norm = jax.vjp(head.normalize, tokens.h)
    (dh,) = through_norm(dtokens.h.astype(formed.dtype))
    dinner = None if tokens.inner is None else dtokens.inner.astype(tokens.inner.dtype)
    no_scale = None if tokens.scale is None else jnp.zeros_like(tokens.scale)
    dscale = no_scale if dtokens.scale is None else dtokens.scale
    return Tokens(dh, dinner, dscale, dtokens.cap), jax.tree.map(lambda x, dx: dx.astype(x.dtype), kernel, dkernel)


# ---- on the devices of a mesh


def _on_devices(head: LossHead, method: str, arguments: tuple[Any, ...], results: Any, *first: Any) -> Any:
    """head.method(*first, *arguments), run by each device of a mesh; `results` has the kind of each returned array."""
    tokens, kernel, *others = arguments
    cast = jax.tree.map(lambda x: x.astype(head.dtype), kernel)  # here, so that it is gathered in the compute dtype
    kinds, structure = jax.tree.flatten(results, is_leaf=lambda x: isinstance(x, Result))

    def bound_method(head: LossHead) -> Callable[..., Any]:
        return partial(getattr(head, method), *first)

    outputs = on_row_shards(
        bound_method(head),
        *(tokens, cast, *others),
        rows=(_row_flags(tokens), False, *(True for _ in others)),
        columns=(-1, Kernel(*_vocabulary_axes(head, kernel)), *(-1 for _ in others)),
        results=kinds,
        sharded_f=lambda *columns: bound_method(head.on_shard(*columns)),
    )
    return jax.tree.unflatten(structure, outputs)


def _gradients(head: LossHead, tokens: Tokens, kernel: Kernel) -> Any:
    """The kind of each gradient. Where W is sharded, each device's token gradients are partial sums.

    The kernel's gradients are float32, and are sent as bfloat16 where it is bfloat16, as the gradients of other weights
    are; not as float16, since a sum that is not yet divided by the number of tokens exceeds its range.
    """
    partial_sum: Any = Result(is_partial=True)
    w_result, b_result = (
        None if x is None else Result(True, axis, sent_as=kept_dtype(x.dtype))
        for x, axis in zip(kernel, _vocabulary_axes(head, kernel), strict=True)
    )
    dinner = None if tokens.inner is None else partial_sum
    dkernel: Any = Kernel(w_result, b_result)  # type: ignore[arg-type]
    dscale, dcap = (partial_sum if is_asked else None for is_asked in (head.scale_has_gradient, tokens.cap is not None))
    return Tokens(partial_sum, dinner, dscale, dcap), dkernel


def _vocabulary_axes(head: LossHead, kernel: Kernel) -> tuple[Any, Any]:
    return 0 if head.transpose_w else 1, None if kernel.b is None else 1


def _row_flags(tokens: Tokens) -> Any:
    """Whether each array has a row for each token."""
    flags: Any = jax.tree.map(lambda _: True, tokens)
    return flags._replace(h=row_flags(tokens.h)) if isinstance(tokens.h, DeferredNorm) else flags


def _on_explicit_shards(f: Callable[..., Any], head: LossHead, tokens: Tokens, kernel: Kernel, *others: Any) -> Any:
    """f(head, tokens, kernel, *others), on each device's shard if explicit mesh axes shard tokens or the vocabulary.

    A chunk of all tokens would be the tokens of a few devices. Over axes that shard neither everything is replicated:
    arrays that they shard otherwise, as along W's D, are gathered. An array () is one number for all tokens, which each
    device repeats for its own.
    """
    x = tokens.h.x if isinstance(tokens.h, DeferredNorm) else tokens.h
    w_axis, b_axis = _vocabulary_axes(head, kernel)
    rows, vocabulary = explicit_cuts(x)[0], explicit_cuts(kernel.w)[w_axis]
    columns = tuple(axis for axis in vocabulary if axis not in rows)
    arguments = (tokens, kernel, *others)
    sharded = [leaf for leaf in jax.tree.leaves(arguments) if any(explicit_cuts(leaf))]
    mesh = jax.typeof(sharded[0] if sharded else x).sharding.mesh
    shards = math.prod(size for name, size in zip(mesh.axis_names, mesh.axis_sizes, strict=True) if name in columns)
    shard_head = head.on_shard(columns, shards) if columns else head

    def run(*arguments: Any) -> Any:
        axes = varying_axes(*jax.tree.leaves(arguments)) - set(columns)
        tokens, *others = jax.tree.map(lambda x: vary(axes, x)[0], arguments)
        # Each device has a term of a token's cotangent, which is their sum: the derivative of this `vary` sums them.
        tokens = jax.tree.map(lambda x: vary(axes | set(columns), x)[0], tokens)
        count = (tokens.h.x if isinstance(tokens.h, DeferredNorm) else tokens.h).shape[0]
        return f(shard_head, *jax.tree.map(lambda x: x if x.ndim else jnp.broadcast_to(x, (count,)), (tokens, *others)))

    if not sharded:
        return run(*arguments)
    by_rows, by_columns = (
        jax.P(rows or None),
        [jax.P(*[None] * axis, columns or None) for axis in (w_axis, b_axis or 0)],
    )
    specs = (
        jax.tree.map(lambda x, has_rows: by_rows if has_rows and x.ndim else jax.P(), tokens, _row_flags(tokens)),
        jax.tree.unflatten(jax.tree.structure(kernel), by_columns[: len(jax.tree.leaves(kernel))]),
        *(None if x is None else by_rows if x.ndim else jax.P() for x in others),
    )
    arguments = jax.tree.map(lambda x, spec: placed(x, jax.sharding.NamedSharding(mesh, spec)), arguments, specs)
    if not rows and not columns:
        return run(*arguments)
    on_shards = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=by_rows, axis_names=set(explicit_axes(mesh)))
    return on_shards(*arguments)
