"""What a function says of itself when it is lowered for a GPU: why a chain of products was lost, say.

A note is an identity on an array, so that it travels with the program: through jit, grad, vmap and remat, to
`coda.explain` and to the lowering. There it is warned of once, at the user's line; elsewhere it is nothing.
"""

from __future__ import annotations

import warnings
from typing import Any

import jax
from jax.extend import core as jex_core
from jax.interpreters import ad, batching, mlir

from coda_jax.epilogue.call_site import call_site


class FallbackWarning(UserWarning):
    """On a GPU a product takes its XLA form, or a chain is not one; the message names the rule and the value."""


coda_note_p = jex_core.Primitive("coda_note")
_reported: set[str] = set()


def noted(x: jax.Array, operator: str, reason: str) -> jax.Array:
    """x; lowered for a GPU, it warns once that `operator` does what `reason` says."""
    out: jax.Array = coda_note_p.bind(x, message=f"{operator}: {reason}", site=call_site())
    return out


def warn_once(message: str, reason: str, site: Any) -> None:
    """A FallbackWarning at the user's line, unless there has been one for this reason."""
    if reason not in _reported:
        _reported.add(reason)
        warnings.warn_explicit(message, FallbackWarning, site.file, site.line)


def _lower_cuda(ctx: mlir.LoweringRuleContext, x: Any, *, message: str, site: Any) -> list[Any]:
    warn_once(message, message, site)
    return [x]


coda_note_p.def_impl(lambda x, **_: x)
coda_note_p.def_abstract_eval(lambda x, **_: x)
ad.deflinear2(coda_note_p, lambda ct, _, **__: [ct])
batching.primitive_batchers[coda_note_p] = lambda xs, axes, **params: (coda_note_p.bind(*xs, **params), axes[0])
mlir.register_lowering(coda_note_p, lambda _, x, **__: [x])
mlir.register_lowering(coda_note_p, _lower_cuda, platform="cuda")
