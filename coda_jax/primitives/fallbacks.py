"""Messages that a function gives when it is lowered for a GPU, for instance why a map of a block is a pass of XLA's.

A note is an identity on an array, so that it travels with the program: through jit, grad, vmap and remat, to
`coda.explain` and to the lowering, which warns at the user's line, once for a line and a reason; on other platforms it
does nothing. In strict mode a note, and a product that takes its XLA form, is an error.

Environment, read when this module is imported:

* ``CODA_JAX_STRICT=1``: strict mode is on wherever `strict` does not turn it off.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import jax
from jax.extend import core as jex_core
from jax.interpreters import ad, batching, mlir

from coda_jax.epilogue.call_site import CallSite, call_site


class FallbackWarning(UserWarning):
    """On a GPU a product takes its XLA form, or a map of a block a pass; the message names the rule and the value."""


class FallbackError(NotImplementedError):
    """The error that replaces a `FallbackWarning` in strict mode."""


def _strict_by_default() -> bool:
    setting = os.environ.get("CODA_JAX_STRICT") or "0"
    if setting not in ("0", "1"):
        raise ValueError(f"CODA_JAX_STRICT={setting!r}; it must be 0 or 1")
    return setting == "1"


_strict = jax.make_user_context(_strict_by_default())  # in the keys of JAX's caches of traces and programs


@contextlib.contextmanager
def strict(enabled: bool = True) -> Iterator[None]:
    """In this context, in this thread, what would be a `FallbackWarning` raises a `FallbackError`, each time.

    It applies when a program is lowered for a GPU: at the first call of a jitted function, or by `.lower()` of a
    traced one. A function that was jitted outside is traced and lowered again inside. A program that was compiled
    ahead of time, or exported, outside is not affected, and implementation="xla" is no fallback.

    Args:
      enabled: False permits fallbacks again, inside a strict context or under ``CODA_JAX_STRICT=1``.

    Example: `with coda.strict(): train_step(model, optimizer, tokens)`; also a decorator, `@coda.strict()`.
    """
    with _strict(enabled):
        yield


def is_strict() -> bool:
    """True if a program that is traced or lowered now, in this thread, must not fall back."""
    return bool(_strict.value)


coda_note_p = jex_core.Primitive("coda_note")
_reported: set[tuple[str, str, int]] = set()
_reporting = threading.Lock()


def with_fallback_note(x: jax.Array, operator: str, reason: str, remedy: str = "") -> jax.Array:
    """x unchanged; where it is lowered for a GPU, a warning, once, that `operator` does what `reason` says.

    Args:
      remedy: what a user could change, for `coda.explain`'s advice.
    """
    out: jax.Array = coda_note_p.bind(x, message=f"{operator}: {reason}", remedy=remedy, site=call_site())
    return out


def warn_once(message: str, reason: str, site: CallSite, *, strict: bool) -> None:
    """A FallbackWarning at the user's line, unless there has been one there for this reason.

    Raises:
      FallbackError: in strict mode, each time.
    """
    if strict:
        raise FallbackError(f"{site.file}:{site.line}: {message} (strict mode: coda.strict, CODA_JAX_STRICT)")
    with _reporting:  # programs are lowered in several threads
        where = reason, site.file, site.line
        if where in _reported:
            return
        _reported.add(where)
    warnings.warn_explicit(message, FallbackWarning, site.file, site.line)


def _run(x: Any, *, message: str, site: CallSite, **_: Any) -> Any:
    """The note outside jit, where x is on a device already."""
    if isinstance(x, jax.Array) and any(device.platform == "gpu" for device in x.devices()):
        warn_once(message, message, site, strict=is_strict())
    return x


def _lower_cuda(ctx: mlir.LoweringRuleContext, x: Any, *, message: str, site: CallSite, **_: Any) -> list[Any]:
    warn_once(message, message, site, strict=is_strict())
    return [x]


coda_note_p.def_impl(_run)
coda_note_p.def_abstract_eval(lambda x, **_: x)
ad.deflinear2(coda_note_p, lambda ct, _, **__: [ct])
batching.primitive_batchers[coda_note_p] = lambda xs, axes, **params: (coda_note_p.bind(*xs, **params), axes[0])
mlir.register_lowering(coda_note_p, lambda _, x, **__: [x])
mlir.register_lowering(coda_note_p, _lower_cuda, platform="cuda")
