"""A head's statistics, and weighted sums of functions of them, differentiable, of arrays on any mesh.

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

from coda_jax.operators.deferred_norm import DeferredNorm, row_flags
from coda_jax.operators.head.arrays import Kernel, Statistics, Tokens
from coda_jax.operators.head.loss_head import LossHead
from coda_jax.operators.head.row_function import Result, on_row_shards
from coda_jax.primitives.dtypes import kept_dtype
from coda_jax.primitives.mesh_types import explicit_axes, explicit_cuts, vary, varying_axes, with_sharding
from coda_jax.primitives.reverse_mode import Rule

Value = Callable[..., jax.Array]  # of each token's statistics and coefficients, elementwise


def statistics(
    head: LossHead, name: str, tokens: Tokens, kernel: Kernel, labels: jax.Array, mask: jax.Array | None = None
) -> Statistics:
    """`LossHead.statistics` with its derivative, named as the operator."""
    stats: Statistics = _on_explicit_shards(partial(_statistics_rule, name), head, tokens, kernel, labels, mask)
    return stats


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
    rule_of = partial(_sum_rule, name, value)
    return jnp.sum(_on_explicit_shards(rule_of, head, tokens, kernel, labels, weights, *coefficients))


# ---- the functions and their derivatives


def _statistics_rule(name: str, head: LossHead) -> Rule:
    """The statistics of tokens, kernel, labels and mask."""

    def forward(*arguments: Any) -> tuple[Statistics, Any]:
        # By the rule, which is the derivative of kept statistics too.
        stats = rule.function(arguments)(rule.zero(arguments), *arguments)
        return stats, (arguments, stats)

    def backward(kept: Any, cotangents: Statistics) -> tuple[Any, ...]:
        (tokens, kernel, labels, mask), stats = kept
        gradients = on_row_shards(
            LossHead.pullback,
            head,
            **_places(head, tokens, kernel, labels, mask, stats, cotangents),
            name=name,
            results=_gradients(head, tokens, kernel),
            # JAX has no reverse mode of a loop over some chunks.
            twin=None if mask is None else dataclasses.replace(head, all_chunks=True),
        )
        return *_argument_cotangents(head, tokens, kernel, *gradients), None, None

    rule = Rule(name, partial(_forward_statistics, name, head), forward, backward)
    return rule


def _sum_rule(name: str, value: Value, head: LossHead) -> Rule:
    """The sum over a device's tokens, (1,), of tokens, kernel, labels, weights and coefficients."""

    def run(
        _: jax.Array, tokens: Tokens, kernel: Kernel, labels: jax.Array, weights: jax.Array, *coefficients: jax.Array
    ) -> jax.Array:
        stats = _forward_statistics(name, head, None, tokens, kernel, labels, None)
        return jnp.sum(weights * value(stats, *coefficients), keepdims=True)

    def forward(*arguments: Any) -> tuple[jax.Array, Any]:
        tokens, kernel, _, weights, *coefficients = arguments
        by_logits = head.logit_head()
        values, *gradients = on_row_shards(
            partial(LossHead.values_and_gradients, value=value),
            head,
            **_places(head, *arguments),
            name=name,
            results=(Result(), (Result(),) * len(coefficients), _gradients(head, tokens, kernel)),
            twin=None if by_logits is head else by_logits,
        )
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

    return Rule(name, run, forward, backward)


def _forward_statistics(name: str, head: LossHead, _: Any, *arguments: Any) -> Statistics:
    """`LossHead.statistics` of tokens, kernel, labels and mask, behind the zero that a `Rule` passes."""
    each: Any = Result()
    has_more = (head.has_total, head.has_entropy, head.has_best, bool(head.rank))
    results = Statistics(each, each, *(each if is_asked else None for is_asked in has_more))
    stats: Statistics = on_row_shards(
        LossHead.statistics, head, **_places(head, *arguments), name=name, results=results
    )
    return stats


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


def _places(head: LossHead, tokens: Tokens, kernel: Kernel, *others: Any) -> dict[str, Any]:
    """Arguments of `on_row_shards`: the arrays, and what is sharded of each."""
    cast = jax.tree.map(lambda x: x.astype(head.dtype), kernel)  # here, so that it is gathered in the compute dtype
    return {
        "arguments": (tokens, cast, *others),
        "rows": (_row_flags(tokens), False, *(True for _ in others)),
        "columns": (-1, Kernel(*_vocabulary_axes(head, kernel)), *(-1 for _ in others)),
    }


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


# ---- over explicit mesh axes


def _on_explicit_shards(
    rule_of: Callable[[LossHead], Rule], head: LossHead, tokens: Tokens, kernel: Kernel, *others: Any
) -> Any:
    """A head's rule, on each device's shard if explicit mesh axes shard tokens or the vocabulary.

    A chunk of all tokens would be the tokens of a few devices. Over axes that shard neither everything is replicated:
    arrays that they shard otherwise, as along W's D, are gathered. An array () is one number for all tokens, which each
    device repeats for its own.
    """
    w_axis, b_axis = _vocabulary_axes(head, kernel)
    rows, vocabulary = explicit_cuts(tokens.x)[0], explicit_cuts(kernel.w)[w_axis]
    columns = tuple(axis for axis in vocabulary if axis not in rows)
    arguments = (tokens, kernel, *others)
    sharded = [leaf for leaf in jax.tree.leaves(arguments) if any(explicit_cuts(leaf))]
    mesh = jax.typeof(sharded[0] if sharded else tokens.x).sharding.mesh
    shards = math.prod(size for name, size in zip(mesh.axis_names, mesh.axis_sizes, strict=True) if name in columns)
    shard_head = head.on_shard(columns, shards) if columns else head
    if not sharded:
        return _on_shard(rule_of, shard_head, *arguments)
    by_rows = jax.P(rows or None)
    by_columns = [jax.P(*[None] * axis, columns or None) for axis in (w_axis, b_axis or 0)]
    specs = (
        jax.tree.map(lambda x, has_rows: by_rows if has_rows and x.ndim else jax.P(), tokens, _row_flags(tokens)),
        jax.tree.unflatten(jax.tree.structure(kernel), by_columns[: len(jax.tree.leaves(kernel))]),
        *(None if x is None else by_rows if x.ndim else jax.P() for x in others),
    )
    arguments = jax.tree.map(lambda x, spec: with_sharding(x, jax.sharding.NamedSharding(mesh, spec)), arguments, specs)
    if not rows and not columns:
        return _on_shard(rule_of, shard_head, *arguments)
    on_shards = jax.shard_map(
        partial(_on_shard, rule_of, shard_head),
        mesh=mesh,
        in_specs=specs,
        out_specs=by_rows,
        axis_names=set(explicit_axes(mesh)),
    )
    return on_shards(*arguments)


def _on_shard(rule_of: Callable[[LossHead], Rule], head: LossHead, *arguments: Any) -> Any:
    """The rule of a shard's head; all arguments vary over the same mesh axes there, and a number is repeated."""
    axes = varying_axes(*jax.tree.leaves(arguments)) - set(head.axes)
    tokens, *others = jax.tree.map(lambda x: vary(axes, x)[0], arguments)
    # Each device has a term of a token's cotangent, which is their sum: the derivative of this `vary` sums them.
    tokens = jax.tree.map(lambda x: vary(axes | set(head.axes), x)[0], tokens)
    rows = tokens.x.shape[:1]
    arguments = jax.tree.map(lambda x: x if x.ndim else jnp.broadcast_to(x, rows), (tokens, *others))
    rule = rule_of(head)
    return rule.function(arguments)(rule.zero(arguments), *arguments)
