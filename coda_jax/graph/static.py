"""Arguments of a block that are no arrays."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Static:
    """A value that is one leaf to JAX, whatever it holds; the key of one that is not hashable is the object itself."""

    value: Any

    def __hash__(self) -> int:
        try:
            return hash(self.value)
        except TypeError:
            return id(self.value)

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Static) and (self.value is other.value or _equal(self.value, other.value))


def _equal(a: Any, b: Any) -> bool:
    try:
        return hash(a) == hash(b) and bool(a == b)
    except TypeError:
        return False
