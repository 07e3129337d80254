"""Tables in Markdown, and what their cells are made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

T, Key = TypeVar("T"), TypeVar("Key", bound=Hashable)


def table(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = ["| " + " | ".join(line) + " |\n" for line in (columns, *lines)]
    return "".join([rows[0], "|---" * len(columns) + "|\n", *rows[1:]])


def percent(share: float) -> str:
    """Signed, one digit; a plain zero where it rounds to one."""
    shown = f"{100 * share:+.1f} %"
    return "0.0 %" if shown in ("+0.0 %", "-0.0 %") else shown


def geometric_mean(of: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, of)) / len(of))


def grouped(rows: Iterable[T], key: Callable[[T], Key]) -> dict[Key, list[T]]:
    """Rows by their key, in the order of their first."""
    found: dict[Key, list[T]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found
