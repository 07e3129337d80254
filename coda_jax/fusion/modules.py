"""Modules of flax.nnx that a function may change in place: those among its arguments, and those that it closes over."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any

import jax


def is_change_outside(error: Exception) -> bool:
    """True for what Flax raises where a function that is traced changes a module that is none of its arguments."""
    errors: Any = sys.modules.get("flax.errors")
    return errors is not None and isinstance(error, errors.TraceContextError)


def changes_shared(arguments: Any, changed: Collection[int]) -> bool:
    """True if one of the leaves with these numbers is of a variable that occurs several times among the arguments.

    As a pytree each occurrence is a variable of its own, so that a trace does not see at one what changed at another.
    """
    nnx: Any = sys.modules.get("flax.nnx")
    if nnx is None or not changed:
        return False
    leaf = 0
    is_changed: dict[int, list[bool]] = {}  # each variable's occurrences
    for x in jax.tree.leaves(arguments, is_leaf=lambda x: isinstance(x, nnx.Variable)):
        count = len(jax.tree.leaves(x))
        if isinstance(x, nnx.Variable):
            is_changed.setdefault(id(x), []).append(any(i in changed for i in range(leaf, leaf + count)))
        leaf += count
    return any(len(flags) > 1 and any(flags) for flags in is_changed.values())


def update_modules(arguments: Any, after: Any) -> None:
    """Gives the modules among the arguments the variables of those in the same places of `after`."""
    nnx: Any = sys.modules.get("flax.nnx")  # whoever has its modules has imported it
    if nnx is None:
        return

    def is_node(x: Any) -> bool:
        return isinstance(x, nnx.Module | nnx.Pytree | nnx.Variable)

    for node, other in zip(*(jax.tree.leaves(x, is_leaf=is_node) for x in (arguments, after)), strict=True):
        if isinstance(node, nnx.Variable):
            node.set_value(other.get_value())
        elif is_node(node):
            nnx.update(node, nnx.state(other))
