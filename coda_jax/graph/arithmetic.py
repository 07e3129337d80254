"""The arithmetic operators of values."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any


class Arithmetic:
    """The operators of arrays, for a class that has `_with`."""

    def _with(self, operation: Callable[..., Any], *other: Any, swapped: bool = False) -> Any:
        """operation(self, other), or operation(other, self) if swapped; operation(self) without another."""
        raise NotImplementedError

    def __add__(self, other: Any) -> Any:
        return self._with(operator.add, other)

    def __radd__(self, other: Any) -> Any:
        return self._with(operator.add, other, swapped=True)

    def __sub__(self, other: Any) -> Any:
        return self._with(operator.sub, other)

    def __rsub__(self, other: Any) -> Any:
        return self._with(operator.sub, other, swapped=True)

    def __mul__(self, other: Any) -> Any:
        return self._with(operator.mul, other)

    def __rmul__(self, other: Any) -> Any:
        return self._with(operator.mul, other, swapped=True)

    def __truediv__(self, other: Any) -> Any:
        return self._with(operator.truediv, other)

    def __rtruediv__(self, other: Any) -> Any:
        return self._with(operator.truediv, other, swapped=True)

    def __neg__(self) -> Any:
        return self._with(operator.neg)
