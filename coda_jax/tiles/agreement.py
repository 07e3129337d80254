"""Agreement between the processes of a job about what tiles are chosen by, so that all lower the same program.

The first process says what it goes by, through JAX's coordination service, and the others compare it with theirs.
"""

from __future__ import annotations

import functools
import pathlib
import warnings

import jax
from jax._src import distributed  # the client of the coordination service has no public name

TIMEOUT_SECONDS = 60
_KEY = "coda_jax/what_tiles_are_chosen_by"


def may_consult(path: pathlib.Path | None, own: str) -> bool:
    """Whether the user's table at `path` may choose tiles in this process: always where it is the only one.

    Where the first process does not say what it goes by, or there is no coordination service, no user's table has a
    say, and a warning tells it.

    Args:
      own: names what this process goes by: the table's content, and other settings.

    Raises:
      RuntimeError: the first process has another table, or other settings.
    """
    return jax.process_count() == 1 or _is_agreed(path, own)


@functools.cache  # once a process, as tables are read
def _is_agreed(path: pathlib.Path | None, own: str) -> bool:
    if (client := distributed.global_state.client) is None:
        return _no_table(path, "JAX has no coordination service here, which would compare it between processes")
    if jax.process_index() == 0:
        client.key_value_set(_KEY, own, allow_overwrite=True)
        return True
    try:
        first = client.blocking_key_value_get(_KEY, TIMEOUT_SECONDS * 1000)
    except jax.errors.JaxRuntimeError:
        return _no_table(path, f"the first process chose no tile within {TIMEOUT_SECONDS} seconds")
    if first != own:
        raise RuntimeError(
            f"process {jax.process_index()} of {jax.process_count()} chooses tiles by another table, or another "
            f"CODA_JAX_TILES_BY, than the first one: here {path or 'no table'}, {own}. All processes must lower "
            "the same program: let CODA_JAX_TUNED name the same table in all, or none"
        )
    return True


def _no_table(path: pathlib.Path | None, reason: str) -> bool:
    if path is not None:
        warnings.warn(f"the table of tuned tiles {path} is not consulted: {reason}", stacklevel=2)
    return False
