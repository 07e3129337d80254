"""The options of the function that this thread traces for `coda.fuse`: in a trace some operators are primitives."""

from __future__ import annotations

from typing import Any

import jax

PLAIN = "plain"  # in the place of options: nothing is fused
ENCLOSING: Any = jax.make_user_context(None)  # the options of the function that is traced; of JAX's traces' keys


def is_fused() -> bool:
    """True in a function that `coda.fuse` traces."""
    return ENCLOSING.value not in (None, PLAIN)
