"""Agreement between the processes of a job on the table that chooses tiles, so that all lower the same program.

JAX's coordination service keeps one verdict for all processes, which never changes. The first process writes the digest
of its table, and the others compare it with theirs. If the first one is late, a process that has waited long enough
writes that no user's table counts, and the first process follows that, too.
"""

from __future__ import annotations

import contextlib
import functools
import pathlib
import warnings
from typing import Any

import jax
from jax._src import distributed  # the client of the coordination service has no public name

TIMEOUT_SECONDS = 60
_KEY = "coda_jax/what_tiles_are_chosen_by"
_NO_TABLE = "no user's table, "  # the verdict of a process that has waited begins so, followed by its settings


def may_consult(path: pathlib.Path | None, own: str, settings: str = "") -> bool:
    """Whether the user's table at `path` may choose tiles in this process: always if this is the only process.

    If the first process is late to write its verdict, or there is no coordination service, no process uses a user's
    table, and a warning says so.

    Args:
      own: identifies the table's content, and `settings`, in this process.
      settings: further settings that must agree, even without a table.

    Raises:
      RuntimeError: the first process has another table, or other settings; or the service does not answer.
    """
    return jax.process_count() == 1 or _is_agreed(path, own, settings)


@functools.cache  # once a process, as tables are read
def _is_agreed(path: pathlib.Path | None, own: str, settings: str) -> bool:
    if (client := distributed.global_state.client) is None:
        return _no_table(path, "JAX has no coordination service here, which would compare it between processes")
    try:
        verdict = _verdict(client, own, settings)
    except jax.errors.JaxRuntimeError as error:
        raise RuntimeError(
            "what tiles are chosen by cannot be compared between processes, which must lower the same program: JAX's "
            f"coordination service does not answer: {error}"
        ) from error
    if verdict == own:
        return True
    if verdict == _NO_TABLE + settings:
        return _no_table(path, f"the first process chose no tile while another one waited {TIMEOUT_SECONDS} seconds")
    raise RuntimeError(
        f"process {jax.process_index()} of {jax.process_count()} chooses tiles by another table, or another "
        f"CODA_JAX_TILES_BY, than {'the others' if jax.process_index() == 0 else 'the first one'}: here "
        f"{path or 'no table'}, {own}; there {verdict}. All processes must lower the same program: let CODA_JAX_TUNED "
        "name the same table in all, or none"
    )


def _verdict(client: Any, own: str, settings: str) -> str:
    """The verdict of all processes: the one written first. It is read after writing, as another may have come first.

    Raises:
      jax.errors.JaxRuntimeError: the service does not answer.
    """
    if jax.process_index() > 0:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            return str(client.blocking_key_value_get(_KEY, TIMEOUT_SECONDS * 1000))
        own = _NO_TABLE + settings
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # ALREADY_EXISTS, or the read fails too
        client.key_value_set(_KEY, own)
    return str(client.blocking_key_value_get(_KEY, TIMEOUT_SECONDS * 1000))


def _no_table(path: pathlib.Path | None, reason: str) -> bool:
    if path is not None:
        warnings.warn(f"the table of tuned tiles {path} is not consulted: {reason}", stacklevel=2)
    return False
