"""Calls of `coda.attention` as `coda.explain` tells them: the pairs that their masks need, costs, and reasons."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core

from coda_jax.attend import costs
from coda_jax.attend.cuda import Selected, selected
from coda_jax.attend.primitive import is_backward
from coda_jax.attend.score import Score
from coda_jax.attend.score.hiding import band
from coda_jax.attend.spec import AttentionSpec, MaskSpec


@dataclasses.dataclass(frozen=True)
class AttentionCall:
    """One kind of call of `coda.attention`: its forward or its backward pass.

    Sizes and costs are of one execution on one device; None if a size is symbolic, or if they are known only when XLA
    has partitioned the program.

    Attributes:
      is_backward: whether it is the backward pass.
      query, key, value: types of the arrays, unsharded.
      mask: which keys a query sees, in words, what else changes its probabilities, the score function's name, and,
        of the backward pass, why XLA makes gradients of what that reads, where they are asked for.
      reason: why it takes XLA's form; None if it is the Hopper kernels.
      over: the mesh axes over which each device runs it on its own part.
      flops: that the mask needs, as `coda_jax.attend.costs` counts them: documents are taken to be half of all pairs.
      pairs: the share of all pairs of queries and keys that the mask needs, counted so.
      skipped: the share of tiles of 128 x 128 in which a band, or a score without arrays, hides all pairs; None where
        arrays hide others, too.
      bytes_read, bytes_written: of its arguments and results, each once. The forward pass writes what is kept for the
        backward pass beside its arguments: y and the log-sum-exp.
      us: about how many microseconds the kernels take; None if it takes XLA's form.
    """

    is_backward: bool
    query: str
    key: str
    value: str
    mask: str
    reason: str | None
    over: tuple[str, ...] = ()
    flops: int | None = None
    pairs: float | None = None
    skipped: float | None = None
    bytes_read: int | None = None
    bytes_written: int | None = None
    us: float | None = None

    @property
    def tflops(self) -> float | None:
        """Expected TFLOP/s."""
        return self.flops / self.us / 1e6 if self.flops and self.us else None


def attention_call(equation: core.JaxprEqn, platform: str, num_devices: int) -> AttentionCall:
    """The call of an equation of attention's primitives."""
    avals: list[Any] = [v.aval for v in equation.invars]
    results: list[Any] = [v.aval for v in equation.outvars]
    spec, backward = equation.params["spec"], is_backward(equation.primitive)
    if platform in ("gpu", "cuda"):
        choice = selected(avals, results, spec, num_devices)
    else:
        choice = Selected(f"the platform is {platform}", (), avals, results)
    queries, keys = avals[0].shape[1], avals[1].shape[1]
    seen = costs.pairs(spec.mask, queries, keys)
    of_score = spec.score_arrays(avals)
    hides = spec.score
    if hides is not None and band(hides, [x.shape for x in of_score], queries, keys).is_likely_all:
        hides = None
    query, key, value = (jax.core.ShapedArray(x.shape, x.dtype).str_short() for x in avals[:3])
    call = AttentionCall(
        backward,
        query,
        key,
        value,
        in_words(spec.mask) + _score_in_words(spec, hides) + (_left_in_words(spec, of_score) if backward else ""),
        choice.reason,
        choice.over,
        pairs=None if seen is None else seen / max(queries * keys, 1),
        skipped=None if hides and of_score else costs.skipped(spec.mask, queries, keys, score=hides),
    )
    if choice.arguments is None or seen is None:
        return call
    share = seen * choice.arguments[0].shape[1] // max(queries, 1)  # of a device's queries
    flops = costs.flops(choice.arguments, share, is_backward=backward)
    is_timed = choice.reason is None and flops is not None
    return dataclasses.replace(
        call,
        flops=flops,
        bytes_read=_bytes(choice.arguments),
        bytes_written=_bytes(choice.results or ()),
        us=costs.nanoseconds(flops, is_backward=backward) / 1e3 if is_timed and flops is not None else None,
    )


def _bytes(types: Sequence[Any]) -> int | None:
    if not all(isinstance(size, int) for x in types for size in x.shape):
        return None
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in types)


def _score_in_words(spec: AttentionSpec, hides: Score | None) -> str:
    """The score's name, and whether it hides keys: "; score documents, which hides keys in tiles by its arrays"."""
    if spec.score is None:
        return ""
    how = ", which hides keys" if hides else ""
    return f"; score {spec.score.name}{how}{' in tiles by its arrays' if hides and spec.score.dtypes else ''}"


def _left_in_words(spec: AttentionSpec, arrays: Sequence[Any]) -> str:
    """Why XLA makes gradients of what the score reads: "; gradients by XLA where asked for: ..."."""
    reasons = {} if spec.score is None else spec.score.left_by_kernel([x.shape for x in arrays])
    return f"; gradients by XLA where asked for: {', '.join(dict.fromkeys(reasons.values()))}" if reasons else ""


def in_words(mask: MaskSpec) -> str:
    """The keys that a query sees, and what else changes its probabilities: "causal, ids, sinks"."""
    words = []
    if (mask.left, mask.right) == (None, 0):
        words.append("causal")
    elif (mask.left, mask.right) != (None, None):
        bounds = [f"from i - {mask.left}"] if mask.left is not None else []
        bounds += [f"to i + {mask.right}"] if mask.right is not None else []
        words.append(" ".join(bounds).replace("- -", "+ ").replace("+ -", "- "))
    words += [("an interval", "two intervals")[mask.intervals - 1]] if mask.intervals else []
    has = {
        "ids": mask.has_ids,
        "a dense mask": mask.has_mask,
        "a bias": mask.has_bias,
        "sinks": mask.has_sinks,
        f"dropout of {mask.dropout_rate:g}": mask.has_dropout,
    }
    return ", ".join([*words, *(name for name, flag in has.items() if flag)]) or "none"
