"""Traces a user's function: with 32-bit types by default, and with messages where Python needs a tracer's value.

An epilogue is traced, evaluated and differentiated as if `jax_enable_x64` were off. Values without an explicit dtype
(from Python's numbers and NumPy's float64 ones, indices, counts, means) are float32 or int32, so that the program and
its values and types are the same in both settings. An explicit int64 becomes int32, and JAX warns. An explicit float64,
by astype or dtype=, is refused, as are arrays of a dtype that operands may not have.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from coda_jax.epilogue.call_site import line_of
from coda_jax.epilogue.dtypes import DTYPES, listed
from coda_jax.epilogue.values import NotTileLocalError, with_article

_FLOAT64 = "Explicitly requested dtype float64"  # how JAX's warning begins
_BRANCH = "The truth value of an array with more than one element"  # and its error
_filtering = threading.RLock()  # an epilogue may itself call a product


@contextlib.contextmanager
def default_types() -> Iterator[None]:
    """A context in which arrays have 32 bits unless a dtype is given."""
    if not jax.config.jax_enable_x64:
        yield
        return
    with jax.enable_x64(False):
        yield


@contextlib.contextmanager
def _float64_is_an_error() -> Iterator[None]:
    with _filtering, warnings.catch_warnings():
        warnings.filterwarnings("error", _FLOAT64)
        yield


def make_jaxpr(f: Callable[..., Any], avals: Sequence[Any], name: str, kind: str = "epilogue") -> Any:
    """The closed jaxpr of the epilogue f, called `name`, within `default_types`. Its `kind` is for messages.

    With jax_enable_x64 it changes Python's warning filters while it traces. Threads share these before Python 3.14, so
    only one traces at a time: two that overlap could leave the filters changed for ever.

    Raises:
      NotTileLocalError: f asks for the value of an array, or for float64 where `jax_enable_x64` would give it.
    """
    refuses_float64 = jax.config.jax_enable_x64
    try:
        with default_types(), _float64_is_an_error() if refuses_float64 else contextlib.nullcontext():
            return jax.make_jaxpr(f)(*avals)
    except UserWarning as error:
        if not str(error).startswith(_FLOAT64):
            raise
        raise NotTileLocalError(
            f"{kind} '{name}': {line_of(error)} asks for float64; {with_article(kind)} computes in "
            f"{listed(DTYPES, 'and')}."
        ) from error
    except (
        jax.errors.ConcretizationTypeError,
        jax.errors.TracerArrayConversionError,
        jax.errors.TracerIntegerConversionError,
        ValueError,
    ) as error:
        if isinstance(error, ValueError) and not str(error).startswith(_BRANCH):
            raise
        raise NotTileLocalError(f"{kind} '{name}': {line_of(error)} {_asked(error, kind)}") from error


def _asked(error: Exception, kind: str) -> str:
    """Says how Python used a traced value, and what to write instead."""
    if isinstance(error, jax.errors.TracerBoolConversionError | ValueError):
        return (
            "branches on a traced value (if, while, and, or, not, assert, max(), min()), which is another for each "
            "element. Use jnp.where, &, |, ~, jnp.maximum and jnp.minimum."
        )
    if isinstance(error, jax.errors.TracerArrayConversionError):
        return "calls a function of NumPy on a traced value. Use that of jax.numpy (jnp.exp for np.exp)."
    return (
        "asks for the number that a traced value is (float(), int(), range(), or an index), which is another "
        f"for each element. Use astype, or close over a number that is known when the {kind} is traced."
    )
