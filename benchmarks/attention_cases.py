"""The cases of `benchmarks.attention`: sizes, masks, the lengths of documents, and the flops that a mask needs."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np

KINDS = ("causal", "documents", "window", "length", "bias")  # a file of results and a section of the report each
SIGMA = 1.0  # of the logarithms of documents' lengths


@dataclasses.dataclass(frozen=True)
class Case:
    """An attention layer: q (B, T, H, D), k (B, T, K, D), v (B, T, K, E), and its mask.

    Attributes:
      name: begins with one of `KINDS` in the cases of record.
      batch, length: B and T.
      heads, key_heads: H and K.
      width: D.
      value_width: E; None for D.
      is_causal: whether a query sees no key behind it.
      window: keys that a query sees at most, its own among them; only of causal cases.
      mean: of the documents' lengths, where each attends to itself alone; None for one document a row.
      seed: by which the lengths are drawn.
      has_bias: whether an array of all pairs of each head, (1, H, T, T) in bfloat16, is added to the scores.
    """

    name: str
    length: int
    heads: int
    key_heads: int
    width: int
    batch: int = 2
    value_width: int | None = None
    is_causal: bool = True
    window: int | None = None
    mean: float | None = None
    seed: int = 0
    has_bias: bool = False

    def __post_init__(self) -> None:
        if self.window is not None and not self.is_causal:
            raise ValueError(f"{self.name}: a window of {self.window} without a causal mask is not counted")

    @property
    def kind(self) -> str:
        return self.name.split("_")[0]

    @functools.cached_property
    def documents(self) -> tuple[tuple[int, ...], ...]:
        """The lengths of each row's documents."""
        if self.mean is None:
            return ((self.length,),) * self.batch
        return lengths(self.batch, self.length, self.mean, self.seed)

    def segment_ids(self) -> np.ndarray:
        """The number of each token's document in its row, (B, T) int32."""
        return np.stack([np.repeat(np.arange(len(row), dtype=np.int32), row) for row in self.documents])

    def visible(self, row: int) -> np.ndarray:
        """Whether a query (T) of a row of the batch sees a key (T), bool."""
        query, key = np.ogrid[: self.length, : self.length]
        ids = self.segment_ids()[row]
        seen = ids[:, None] == ids[None, :]
        if self.is_causal:
            seen &= key <= query
        if self.window is not None:
            seen &= key > query - self.window
        return seen

    @property
    def pairs(self) -> int:
        """How many pairs of a query and a key the mask leaves, of all rows, of one head."""
        return sum(self._pairs(length) for row in self.documents for length in row)

    def _pairs(self, length: int) -> int:
        if not self.is_causal:
            return length * length
        window = min(length, self.window or length)
        return window * (window + 1) // 2 + (length - window) * window

    @property
    def share(self) -> float:
        """The pairs over those of causal attention in whole rows."""
        return self.pairs / (self.batch * self.length * (self.length + 1) / 2)

    def flops(self, has_gradient: bool) -> int:
        """The flops of the pairs that the mask leaves: two products forward, and five more backward."""
        value_width = self.value_width or self.width
        multiplied = self.width + value_width  # the scores, and what they weigh
        if has_gradient:  # the scores again, dq and dk; the cotangent of the weights, and dv
            multiplied += 3 * self.width + 2 * value_width
        return 2 * self.heads * self.pairs * multiplied

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of q, k, v and the cotangent of the result."""
        rows, value_width = (self.batch, self.length), self.value_width or self.width
        of_heads = ((self.heads, self.width), (self.key_heads, self.width))
        of_values = ((self.key_heads, value_width), (self.heads, value_width))
        return tuple((*rows, *sizes) for sizes in (*of_heads, *of_values))

    @property
    def text(self) -> str:
        """The case in words."""
        widths = str(self.width) if self.value_width is None else f"{self.width}, values of {self.value_width}"
        heads = f"{self.heads} heads" + ("" if self.heads == self.key_heads else f" and {self.key_heads} of keys")
        mask = ["causal" if self.is_causal else "not causal"]
        mask += [] if self.window is None else [f"window {self.window}"]
        mask += [] if self.mean is None else [f"documents of mean {self.mean:.0f}"]
        mask += ["a bias of all pairs"] if self.has_bias else []
        return f"{self.batch} x {self.length}, {heads} of {widths}, {', '.join(mask)}"


def lengths(batch: int, length: int, mean: float, seed: int) -> tuple[tuple[int, ...], ...]:
    """The lengths of documents in each row: lognormal of this mean, the last one cut at the end of its row."""
    chance, rows = np.random.default_rng(seed), []
    for _ in range(batch):
        row: list[int] = []
        while left := length - sum(row):
            drawn = chance.lognormal(math.log(mean) - SIGMA**2 / 2, SIGMA)
            row.append(min(max(round(drawn), 1), left))
        rows.append(tuple(row))
    return tuple(rows)


def _of_length(length: int, width: int, is_causal: bool) -> Case:
    name = f"length_{length}_d{width}" + ("" if is_causal else "_full")
    return Case(name, length, 32, 8, width, batch=16384 // length, is_causal=is_causal)


_64, _128 = (8192, 32, 8, 64), (8192, 32, 8, 128)
# Rows of these seeds need about what rows of such documents need in the mean: 0.21 of the causal pairs, and 0.086.
CASES = [
    Case("causal_d64", *_64),
    Case("causal_d128", *_128),
    Case("causal_d256", 8192, 8, 4, 256, batch=1),
    Case("causal_one_key_head_d128", 8192, 4, 1, 128, batch=1),
    Case("causal_d192_values_128", 8192, 16, 16, 192, batch=1, value_width=128),
    Case("documents_d64", *_64, mean=1000, seed=24),
    Case("documents_d128", *_128, mean=1000, seed=24),
    Case("documents_short_d64", *_64, mean=300, seed=22),
    Case("documents_short_d128", *_128, mean=300, seed=22),
    Case("window_d64", *_64, window=1024),
    Case("window_documents_d64", *_64, window=1024, mean=1000, seed=24),
    *(
        _of_length(length, width, is_causal)
        for length in (256, 512, 2048)
        for width in (64, 128)
        for is_causal in (True, False)
    ),
    *(Case(f"bias_d{width}", 2048, 32, 8, width, batch=8, is_causal=False, has_bias=True) for width in (64, 128)),
]
TINY = [
    Case("causal_tiny", 48, 4, 2, 16, value_width=8),
    Case("documents_tiny", 48, 4, 2, 16, mean=12, seed=1),
    Case("window_documents_tiny", 48, 4, 1, 16, window=8, mean=20, seed=1),
    Case("length_48_full", 48, 2, 2, 16, batch=3, is_causal=False),
    Case("bias_tiny", 48, 4, 2, 16, has_bias=True),
]


def described(case: Case) -> Sequence[str]:
    """Lines that tell a case: its mask, and what that needs."""
    forward, both = (case.flops(has_gradient) / 1e12 for has_gradient in (False, True))
    needed = f"{case.share:.4f} of the causal pairs, {forward:.4f} TFLOP forward, {both:.4f} with the gradients"
    found = [f"{case.name}: {case.text}", f"    {needed}"]
    if case.mean is not None:
        found += [f"    row {i}: documents of {', '.join(map(str, row))}" for i, row in enumerate(case.documents)]
    return found
