"""Checkpoints of a training run: atomic, resumed by default, refused when the run's settings have changed."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
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
    """The checkpoints of one run: its state (a pytree of arrays) and its history (JSON), the last two kept.

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
        self._manager = ocp.CheckpointManager(
            folder.resolve() / "checkpoints",
            options=ocp.CheckpointManagerOptions(max_to_keep=2, cleanup_tmp_directories=True),
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

    def save(self, step: int, state: Any, history: list[dict[str, float]]) -> None:
        """Starts to write a checkpoint, when the one before is written; the files follow while training goes on.

        Raises:
          RunFolderError: one of the two cannot be written, for instance because the disk is full.
        """
        with self._writing():
            self._manager.wait_until_finished()
        # The next step donates the state's buffers: what is still being written must not be among them.
        state = jax.tree.map(jnp.copy, state)
        self._saving = step
        with self._writing():
            self._manager.save(
                step, args=ocp.args.Composite(state=ocp.args.StandardSave(state), history=ocp.args.JsonSave(history))
            )

    def restore(self, like: Any) -> tuple[Any, list[dict[str, float]]]:
        """The last checkpoint's state, shaped and placed as `like`, a tree of jax.ShapeDtypeStruct, and its history."""
        restored = self._manager.restore(
            self.latest_step,
            args=ocp.args.Composite(state=ocp.args.StandardRestore(like), history=ocp.args.JsonRestore()),
        )
        return restored.state, restored.history

    def close(self) -> None:
        """Waits for what is being written.

        Raises:
          RunFolderError: it cannot be written.
        """
        with self._writing():
            self._manager.wait_until_finished()
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
