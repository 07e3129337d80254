"""The data model of a checked score function."""

from __future__ import annotations

import dataclasses
from functools import cached_property

from coda_jax.epilogue.program import Node

# A score of this or less hides its key, as -inf does. Of larger ones float32 can subtract a row's maximum and, in the
# backward pass, its log-sum-exp: -1e30 and float32's least number, which programs write for -inf, hide too.
HIDDEN = -(2.0**96)


@dataclasses.dataclass(frozen=True, eq=False)
class Score:
    """A function of one score, of positions and of entries of arrays. Equal mathematics is equal.

    Nodes are those of an epilogue's program, with other leaves: "score", "row" and "column" (positions of the query and
    the key, int32), "operand" (index) and "literal".

    Attributes:
      name: of the user's function, for messages and readers.
      dtypes: of the arrays that it reads, each (1 or B, 1 or H, 1 or T, 1 or S).
      nodes: inputs before users.
      value: the node of s'.
      slope: the node of the derivative by s.
      slopes: (array, node): the derivatives by the arrays of floating dtypes.
      why_no_slope: why it has no derivative; None if it has.
    """

    name: str
    dtypes: tuple[str, ...]
    nodes: tuple[Node, ...]
    value: int
    slope: int
    slopes: tuple[tuple[int, int], ...]
    why_no_slope: str | None = None

    @cached_property
    def text(self) -> str:
        """All that it computes."""
        return "\n".join(
            [
                ", ".join(self.dtypes),
                *(f"v{i} = {node}" for i, node in enumerate(self.nodes)),
                f"value v{self.value}, slope v{self.slope}",
                *(f"slope by {array}: v{node}" for array, node in self.slopes),
            ]
        )

    @property
    def has_unit_slope(self) -> bool:
        """Whether the derivative by s is 1."""
        node = self.nodes[self.slope]
        return node.op == "literal" and node["value"] == 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Score) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:  # in a printed jaxpr
        return self.name
