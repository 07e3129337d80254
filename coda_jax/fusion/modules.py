"""Modules of flax.nnx among a function's arguments, which it may change in place."""

from __future__ import annotations

import sys
from typing import Any

import jax


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
