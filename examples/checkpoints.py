"""Checkpoints of a training run: atomic, resumed by default, refused when the run's settings have changed.

The best one by validation stays, however long the run goes on.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import device_mesh
import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

SETTINGS_FILE = "settings.json"


class RunFolderError(Exception):
    """The run's folder cannot be used; the message says why and what to do."""


class Checkpoints:
    """The checkpoints of one run: its state (a pytree of arrays) and its history (JSON).

    The last two are kept, and the one whose history ends with the lowest "validation".

    Orbax writes a checkpoint into a temporary folder and renames it, so a run killed at any moment finds its last
    complete one; what it was writing is removed when it resumes. Of several processes each writes what its own devices
    have, replicas once; the folder must be one that all of them see. What is restored lies as the restoring run wants
    it, on its mesh or on one device.

    Args:
      folder: the run's folder, created if needed.
      settings: JSON-able settings that the state depends on; a run that was started with others is not resumed.

    Raises:
      RunFolderError: the folder cannot be written, is in use by another process, or holds a run with other settings.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]):
        device_mesh.in_first_process(lambda: self._claim(folder), RunFolderError)
        self._folder, self._saving = folder, 0
        # Orbax logs each thread that a failed write ends; RunFolderError tells it once.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        kept = ocp.checkpoint_managers
        best = kept.BestN(get_metric_fn=_validation, reverse=True, n=1, keep_checkpoints_without_metrics=False)
        self._manager = ocp.CheckpointManager(
            folder.resolve() / "checkpoints",
            options=ocp.CheckpointManagerOptions(
                best_fn=_validation,
                best_mode="min",
                preservation_policy=kept.AnyPreservationPolicy([kept.LatestN(2), best]),
                cleanup_tmp_directories=True,
            ),
        )
        device_mesh.in_first_process(lambda: self._settle(folder, settings), RunFolderError)

    def _claim(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(folder / ".lock", os.O_WRONLY | os.O_CREAT)  # held until the process ends, however it ends
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunFolderError(f"another process is training in {folder}; give another --out") from None
        except OSError as error:
            raise RunFolderError(f"{folder} cannot be written: {error}") from None

    def _settle(self, folder: Path, settings: dict[str, Any]) -> None:
        """Compares the settings with the folder's, or writes them there."""
        path = folder / SETTINGS_FILE
        if self.latest_step is not None:
            try:
                saved = json.loads(path.read_text())
            except (OSError, ValueError) as error:
                raise RunFolderError(f"{folder} has checkpoints, but {path} cannot be read: {error}") from None
            _check_settings(folder, saved, settings)
        else:
            part = path.with_suffix(".part")
            try:
                part.write_text(json.dumps(settings, indent=1) + "\n")
                os.replace(part, path)
            except OSError as error:
                raise RunFolderError(f"{folder} cannot be written: {error}") from None

    @property
    def latest_step(self) -> int | None:
        """The step of the last complete checkpoint, None for a run that has none."""
        return self._manager.latest_step()

    @property
    def best_step(self) -> int | None:
        """The step of the checkpoint with the lowest validation; the last one where none has any."""
        best = self._manager.best_step()
        return self.latest_step if best is None else best

    def save(self, step: int, state: Any, history: list[dict[str, float]]) -> None:
        """Starts to write a checkpoint, when the one before is written; the files follow while training goes on.

        Raises:
          RunFolderError: one of the two cannot be written, for instance because the disk is full.
        """
        self.wait()
        # The next step donates the state's buffers: what is still being written must not be among them.
        state = jax.tree.map(jnp.copy, state)
        self._saving = step
        with self._writing():
            self._manager.save(
                step,
                args=ocp.args.Composite(state=ocp.args.StandardSave(state), history=ocp.args.JsonSave(history)),
                metrics={key: history[-1][key] for key in ("validation",) if key in history[-1]} or None,
            )

    def wait(self) -> None:
        """Until all is written.

        Raises:
          RunFolderError: it cannot be written.
        """
        with self._writing():
            self._manager.wait_until_finished()

    def restore(self, like: Any, step: int | None = None) -> tuple[Any, list[dict[str, float]]]:
        """State and history of a checkpoint, by default the last one.

        The state is shaped and placed as `like`, a tree of jax.ShapeDtypeStruct.
        """
        restored = self._manager.restore(
            self.latest_step if step is None else step,
            args=ocp.args.Composite(state=ocp.args.StandardRestore(like), history=ocp.args.JsonRestore()),
        )
        return restored.state, restored.history

    def close(self) -> None:
        """Waits as `wait` does, and ends."""
        self.wait()
        self._manager.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # Orbax raises what its threads did: of the system, of TensorStore, of JAX
            whole = max(self._manager.all_steps(read=True), default=None)
            raise RunFolderError(
                f"the checkpoint of step {self._saving} cannot be written to {self._folder}: {error}. "
                + ("There is none before it" if whole is None else f"The last whole one is that of step {whole}")
                + "; make room there, and the same command goes on from it"
            ) from error


def _validation(metrics: dict[str, float]) -> float:
    """A run that diverged has NaN, which is not the lowest."""
    value = metrics["validation"]
    return math.inf if math.isnan(value) else value


def _check_settings(folder: Path, saved: dict[str, Any], settings: dict[str, Any]) -> None:
    changed = [
        f"{name}: {saved.get(name)} there, {settings.get(name)} now"
        for name in sorted({*saved, *settings})
        if saved.get(name) != settings.get(name)
    ]
    if changed:
        raise RunFolderError(
            f"{folder} holds a run with other settings ({'; '.join(changed)}). "
            "Give the same settings to resume it, another --out to start beside it, or delete the folder to start over."
        )
