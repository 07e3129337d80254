"""Folders whose files belong together, as parameters and their settings do: all of them are written, or none."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

# Folders of a save that was killed go at the next save there; a younger one may be of a process that is still writing.
_LEFTOVER_SECONDS = 24 * 3600
_COMPARED_BYTES = 2**20  # settings are smaller, parameters need not be compared
_MOST_LINKED = 4096
# What a leftover may have alone: files that are written here.
_OURS = re.compile(r".*\.safetensors|.*\.index\.json|((generation|adapter)_)?config\.json")


def write_folder(path: Path, write: Callable[[Path], None], *, key: str, former: Sequence[str] = ()) -> None:
    """Writes files into a folder, so that whoever reads it later finds all of the new ones or all of the former ones.

    This holds for a process that is killed too: all files are written into a hidden folder and are on the disk before
    one renaming puts them in their place. A new folder is renamed as a whole. In an existing one a file is renamed, if
    only one differs from its namesake. If several do, a copy of the folder, of hard links to its other files, changes
    places with it, where the system can do that: Linux, on most local file systems, unless it is the folder in which
    this process works. Elsewhere `key` is taken away before the others are put there, and put there last: a process
    that is killed in between leaves a folder that cannot be read.

    Args:
      path: the folder, resolved; its other files stay.
      write: writes the files into the folder that it is given.
      key: the file without which nobody reads the folder.
      former: names of files that are removed, the last one after the others.

    Raises:
      NotADirectoryError: a path of a file.
    """
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"{path} is a file; give the path of a folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(path)
    if not path.exists():
        with _hidden(path, path.parent) as made:
            write(made)
            _reach_disk(*made.iterdir(), made)
            os.rename(made, path)
        _reach_disk(path.parent)
        return
    with _hidden(path, path) as made:
        write(made)
        names = sorted(file.name for file in made.iterdir())
        _reach_disk(*made.iterdir(), made)
        changed = [name for name in names if not _is_same(made / name, path / name)]
        if len(changed) == 1:
            os.replace(made / changed[0], path / changed[0])
        elif changed and not _swapped(path, made, {*names, *former}):
            (path / key).unlink(missing_ok=True)
            _reach_disk(path)
            for name in sorted(changed, key=lambda name: name == key):
                os.replace(made / name, path / name)
            if key not in changed:
                os.replace(made / key, path / key)
        _reach_disk(path)
        for name in former:
            if name not in names and (path / name).is_file():
                (path / name).unlink()


@contextmanager
def _hidden(path: Path, parent: Path) -> Iterator[Path]:
    """A hidden folder of this call, removed at the end."""
    made = parent / f".{path.name}.{uuid.uuid4().hex}"
    made.mkdir()
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _is_same(made: Path, file: Path) -> bool:
    """Whether a small file has the content of another one."""
    size = made.stat().st_size
    return (
        size <= _COMPARED_BYTES
        and file.is_file()
        and file.stat().st_size == size
        and file.read_bytes() == made.read_bytes()
    )


def _reach_disk(*paths: Path) -> None:
    """Returns when files, or the entries of folders, are on the disk."""
    for path in paths:
        opened = os.open(path, os.O_RDONLY)
        try:
            os.fsync(opened)
        except OSError:
            if not path.is_dir():  # some file systems have no fsync of folders
                raise
        finally:
            os.close(opened)


def _swapped(path: Path, made: Path, names: set[str]) -> bool:
    """Whether the folder changed places with one that has the files of `made`, and all others but `names`."""
    twin = path.parent / f"{made.name}.twin"
    others = names | {made.name}
    unfinished = {file.name for file in path.iterdir() if _hidden_name(path).fullmatch(file.name)}
    try:
        if not (_linked(made, twin, set()) and _linked(path, twin, others | unfinished) and _exchanged(path, twin)):
            return False
        _reach_disk(path.parent)
        _bring_late_files(twin, path, others)
        return True
    finally:
        if twin.is_dir() and _is_dispensable(twin):
            shutil.rmtree(twin, ignore_errors=True)


def _linked(folder: Path, twin: Path, but: set[str]) -> bool:
    """Whether all entries of a folder but these are in its twin now, files as hard links."""
    try:
        if Path.cwd().is_relative_to(folder):  # the process would go on in the former folder
            return False
        twin.mkdir(exist_ok=True)
        shutil.copymode(folder, twin)
        before, after = folder.stat(), twin.stat()
        if (before.st_uid, before.st_gid, before.st_dev) != (after.st_uid, after.st_gid, after.st_dev):
            return False
        folders = []
        for number, (file, is_folder) in enumerate(_tree(folder, but)):
            if number == _MOST_LINKED:
                return False
            place = twin / file.relative_to(folder)
            if is_folder:
                place.mkdir()
                folders.append((file, place))
            else:
                os.link(file, place, follow_symlinks=False)
        for file, place in folders:  # only now, since their times change with each entry
            shutil.copystat(file, place)
        _reach_disk(twin)
        return True
    except OSError:
        return False


def _tree(folder: Path, but: set[str]) -> Iterator[tuple[Path, bool]]:
    """All that is in a folder, without the entries `but`, and whether each is a folder, which comes before its own."""
    for file in sorted(folder.iterdir()):
        if file.name not in but:
            is_folder = file.is_dir() and not file.is_symlink()
            yield file, is_folder
            if is_folder:
                yield from _tree(file, set())


def _exchanged(a: Path, b: Path) -> bool:
    """Whether two folders have changed places, in one step."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None) if sys.platform == "linux" else None
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return rename is not None and rename(here, os.fsencode(a), here, os.fsencode(b), exchange) == 0


def _bring_late_files(former: Path, path: Path, but: set[str]) -> None:
    """Moves what other processes put into the former folder and was not linked: no other folder has it."""
    folders = []
    for file, is_folder in list(_tree(former, but)):
        place = path / file.relative_to(former)
        if is_folder:
            if not place.is_dir():
                place.mkdir()
                folders.append((file, place, file.stat()))
        elif file.lstat().st_nlink == 1:
            os.replace(file, place)
    for file, place, before in folders:
        shutil.copymode(file, place)
        os.utime(place, ns=(before.st_atime_ns, before.st_mtime_ns))


def _hidden_name(path: Path, is_named: str = "") -> re.Pattern[str]:
    """Names of hidden folders of this folder; with "?" also those without its name, as inside of it they once were."""
    return re.compile(rf"\.({re.escape(path.name)}\.){is_named}[0-9a-f]{{32}}(\.twin)?")


def _remove_leftovers(path: Path) -> None:
    """Removes hidden folders that a killed process left a day ago or earlier, and nothing that is there alone."""
    for folder, pattern in ((path.parent, _hidden_name(path)), (path, _hidden_name(path, "?"))):
        for made in list(folder.iterdir()) if folder.is_dir() else []:
            if not pattern.fullmatch(made.name) or made.is_symlink() or not made.is_dir():
                continue
            if time.time() - made.stat().st_mtime > _LEFTOVER_SECONDS and _is_dispensable(made):
                shutil.rmtree(made, ignore_errors=True)


def _is_dispensable(leftover: Path) -> bool:
    """Whether a leftover has no file that nobody else has, but parameters and settings."""
    return all(
        is_folder or file.lstat().st_nlink > 1 or _OURS.fullmatch(file.name) is not None
        for file, is_folder in _tree(leftover, set())
    )
