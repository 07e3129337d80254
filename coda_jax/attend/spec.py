"""The one parameter of attention's primitives: all that defines a call except its arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from coda_jax.attend.gradients import Gradients
from coda_jax.attend.results import Results
from coda_jax.attend.score.program import Score, Table
from coda_jax.epilogue.call_site import CallSite

_NOWHERE = CallSite("", 0)


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """How the kernels compute attention.

    Attributes:
      deterministic: whether the backward pass adds in one order, so that equal arguments give equal bits.
    """

    deterministic: bool = True


class MaskArrays(NamedTuple):
    """The arrays that say what probabilities are, each None where its `MaskSpec` has none.

    B sequences of T queries and S keys; H heads.

    Attributes:
      intervals: (B, 2 * intervals, T) int32: the first and the last key that a query sees, of the first interval and
        then of the second; first = S and last = -1 where it sees none (first = 0 where S is 0), else both are in
        0 .. S - 1.
      query_ids, key_ids: (B, T) and (B, S) int32.
      mask: (1 or B, 1 or H, 1 or T, 1 or S) bool.
      bias: the same shape, of a floating dtype.
      sinks: (1 or B, H), of a floating dtype: exp(sink) is a term of the sum of each row of scores.
      row_bits: (B, H, T) int32: random bits of each row, of which those of its probabilities are made.
    """

    intervals: Any = None
    query_ids: Any = None
    key_ids: Any = None
    mask: Any = None
    bias: Any = None
    sinks: Any = None
    row_bits: Any = None

    @property
    def present(self) -> tuple[Any, ...]:
        """The arrays that there are, as the primitives take them."""
        return tuple(x for x in self if x is not None)


@dataclasses.dataclass(frozen=True)
class MaskSpec:
    """The keys that a query sees, and what else changes its probabilities. Query i sees key j where all of this holds.

    Attributes:
      left, right: i - left <= j <= i + right; None is no bound. Either may be negative.
      intervals: 0, 1 or 2: how many intervals of keys each query has in an array; it sees the keys of all of them.
        With any, left and right are None.
      has_ids: whether queries and keys have ids, which must be equal.
      has_mask: whether there is a mask of all pairs.
      has_bias: whether there is a bias, which is added to scores and hides no key but by -inf.
      has_sinks: whether rows have a term of their heads in their sums.
      dropout_rate: the part of the probabilities that is dropped when all sums are made, in [0, 1).
    """

    left: int | None = None
    right: int | None = None
    intervals: int = 0
    has_ids: bool = False
    has_mask: bool = False
    has_bias: bool = False
    has_sinks: bool = False
    dropout_rate: float = 0.0

    @property
    def has_dropout(self) -> bool:
        """Whether probabilities are dropped."""
        return self.dropout_rate > 0

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the fields of `MaskArrays` that there are."""
        has = {
            "intervals": self.intervals > 0,
            "query_ids": self.has_ids,
            "key_ids": self.has_ids,
            "mask": self.has_mask,
            "bias": self.has_bias,
            "sinks": self.has_sinks,
            "row_bits": self.has_dropout,
        }
        return tuple(name for name in MaskArrays._fields if has[name])

    def arrays(self, arrays: Sequence[Any]) -> MaskArrays:
        """The arrays of a call, or other values of which there is one for each, by name."""
        return MaskArrays(**dict(zip(self.fields, arrays, strict=True)))


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """A call of attention. Equal specs and equal argument types lower to the same program.

    Attributes:
      mask: which keys a query sees.
      scale: of the products of queries and keys, before the score function and the bias; more than 0.
      implementation: None, "cuda" or "xla".
      config: how the kernels compute it; None for the default.
      score: the function of scores; None for the identity. It comes before the bias.
      site: the user's line, for messages.
      results: what the forward pass makes of y; None for nothing.
      score_gradients: the numbers of the score's arrays of which the backward pass gives the gradients, too.
      gradients: what the backward pass makes of dq, dk and dv in their place; None for nothing.
    """

    mask: MaskSpec
    scale: float
    implementation: str | None = None
    config: AttentionConfig | None = None
    score: Score | None = None
    site: CallSite = _NOWHERE
    results: Results | None = None
    score_gradients: tuple[int, ...] = ()
    gradients: Gradients | None = None

    @property
    def plain(self) -> AttentionSpec:
        """The same without what is made of y, or of dq, dk and dv."""
        return self if self._made is None else dataclasses.replace(self, results=None, gradients=None)

    @property
    def _made(self) -> Results | Gradients | None:
        return self.gradients if self.results is None else self.results

    def split(self, arguments: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Arguments of a primitive without the operands of what is made of its results, and these."""
        count = len(arguments) - (0 if self._made is None else self._made.count)
        return list(arguments[:count]), list(arguments[count:])

    @property
    def count(self) -> int:
        """How many arrays the forward pass takes: q, k and v, those of the mask, and those of the score."""
        return 3 + len(self.mask.fields) + (0 if self.score is None else len(self.score.dtypes))

    def mask_arrays(self, arrays: Sequence[Any]) -> MaskArrays:
        """The mask's of a primitive's arrays, or of values of which there is one for each, by name."""
        return self.mask.arrays(arrays[3 : 3 + len(self.mask.fields)])

    def score_arrays(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """The score's of a primitive's arrays, each (1 or B, 1 or H, 1 or T, 1 or S)."""
        return arrays[3 + len(self.mask.fields) : self.count]

    def gradient_arrays(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """The score's of a primitive's arrays of which the backward pass gives the gradients."""
        of_score = self.score_arrays(arrays)
        return [of_score[number] for number in self.score_gradients]

    @property
    def gradient_tables(self) -> list[Table | None]:
        """The tables of the arrays of which the backward pass gives the gradients; None of another array."""
        return [] if self.score is None else [self.score.table_of.get(number) for number in self.score_gradients]

    def __str__(self) -> str:  # in a printed jaxpr
        hidden = ("site", *(name for name in ("results", "gradients", "score_gradients") if not getattr(self, name)))
        names = [field.name for field in dataclasses.fields(self) if field.name not in hidden]
        return f"({', '.join(f'{name}={getattr(self, name)}' for name in names)})"
