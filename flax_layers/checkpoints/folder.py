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

# The next save there removes folders of killed saves; a process may still be writing into a younger one.
_LEFTOVER_SECONDS = 24 * 3600
_COMPARED_BYTES = 2**20  # settings are smaller, parameters need not be compared
_MOST_LINKED = 4096
# Files that are written here: a leftover may have the only copy of these.
_OURS = re.compile(r".*\.safetensors|.*\.index\.json|((generation|adapter)_)?config\.json")


def write_folder(path: Path, write: Callable[[Path], None], *, key: str, former: Sequence[str] = ()) -> None:
    """Writes files into a folder, so that later readers find all of the new ones or all of the former ones.

    This holds for a process that is killed too: all files are written into a hidden folder and are on the disk before
    one renaming puts them in their place. A new folder is renamed as one. In an existing one a file is renamed, if only
    one differs from its namesake. If several do, a copy of the folder, with hard links to its other files, is exchanged
    with it, where the system can do that: Linux, on most local file systems, unless it is the working directory of this
    process. Elsewhere `key` is removed before the others are put there, and put there last: a process that is killed in
    between leaves a folder that cannot be read.

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
        with _hidden(path, path.parent) as hidden:
            write(hidden)
            _reach_disk(*hidden.iterdir(), hidden)
            os.rename(hidden, path)
        _reach_disk(path.parent)
        return
    with _hidden(path, path) as hidden:
        write(hidden)
        names = sorted(file.name for file in hidden.iterdir())
        _reach_disk(*hidden.iterdir(), hidden)
        changed = [name for name in names if not _is_same(hidden / name, path / name)]
        if len(changed) == 1:
            os.replace(hidden / changed[0], path / changed[0])
        elif changed and not _swapped(path, hidden, {*names, *former}):
            (path / key).unlink(missing_ok=True)
            _reach_disk(path)
            for name in sorted(changed, key=lambda name: name == key):
                os.replace(hidden / name, path / name)
            if key not in changed:
                os.replace(hidden / key, path / key)
        _reach_disk(path)
        for name in former:
            if name not in names and (path / name).is_file():
                (path / name).unlink()


@contextmanager
def _hidden(path: Path, parent: Path) -> Iterator[Path]:
    """A hidden folder of this call, removed at the end."""
    hidden = parent / f".{path.name}.{uuid.uuid4().hex}"
    hidden.mkdir()
    try:
        yield hidden
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def _is_same(new: Path, file: Path) -> bool:
    """Whether a small file has the content of another one."""
    size = new.stat().st_size
    return (
        size <= _COMPARED_BYTES
        and file.is_file()
        and file.stat().st_size == size
        and file.read_bytes() == new.read_bytes()
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


def _swapped(path: Path, hidden: Path, names: set[str]) -> bool:
    """Whether the folder was exchanged with one that has the files of `hidden` and its own others but `names`."""
    twin = path.parent / f"{hidden.name}.twin"
    others = names | {hidden.name}
    unfinished = {file.name for file in path.iterdir() if _hidden_name(path).fullmatch(file.name)}
    try:
        if not (_linked(hidden, twin, set()) and _linked(path, twin, others | unfinished) and _exchanged(path, twin)):
            return False
        _reach_disk(path.parent)
        _bring_late_files(twin, path, others)
        return True
    finally:
        if twin.is_dir() and _is_dispensable(twin):
            shutil.rmtree(twin, ignore_errors=True)


def _linked(folder: Path, twin: Path, excluded: set[str]) -> bool:
    """Whether all entries of a folder but the excluded ones are in its twin now, files as hard links."""
    try:
        if Path.cwd().is_relative_to(folder):  # the process would go on in the former folder
            return False
        twin.mkdir(exist_ok=True)
        shutil.copymode(folder, twin)
        before, after = folder.stat(), twin.stat()
        if (before.st_uid, before.st_gid, before.st_dev) != (after.st_uid, after.st_gid, after.st_dev):
            return False
        folders = []
        for number, (file, is_folder) in enumerate(_tree(folder, excluded)):
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


def _tree(folder: Path, excluded: set[str]) -> Iterator[tuple[Path, bool]]:
    """All paths in a folder but the excluded entries, and whether each is a folder; folders precede their contents."""
    for file in sorted(folder.iterdir()):
        if file.name not in excluded:
            is_folder = file.is_dir() and not file.is_symlink()
            yield file, is_folder
            if is_folder:
                yield from _tree(file, set())


def _exchanged(a: Path, b: Path) -> bool:
    """Whether two folders have changed places, in one step."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None) if sys.platform == "linux" else None
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return rename is not None and rename(here, os.fsencode(a), here, os.fsencode(b), exchange) == 0


def _bring_late_files(former: Path, path: Path, excluded: set[str]) -> None:
    """Moves files and folders that other processes put into the former folder and that are in no other one."""
    folders = []
    for file, is_folder in list(_tree(former, excluded)):
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
    """A pattern of names of hidden folders of this folder; with "?" also those without its name."""
    return re.compile(rf"\.({re.escape(path.name)}\.){is_named}[0-9a-f]{{32}}(\.twin)?")


def _remove_leftovers(path: Path) -> None:
    """Removes hidden folders that a killed process left a day ago or earlier, if they are dispensable."""
    for folder, pattern in ((path.parent, _hidden_name(path)), (path, _hidden_name(path, "?"))):
        for leftover in list(folder.iterdir()) if folder.is_dir() else []:
            if not pattern.fullmatch(leftover.name) or leftover.is_symlink() or not leftover.is_dir():
                continue
            if time.time() - leftover.stat().st_mtime > _LEFTOVER_SECONDS and _is_dispensable(leftover):
                shutil.rmtree(leftover, ignore_errors=True)


def _is_dispensable(leftover: Path) -> bool:
    """Whether all files of a leftover are parameters, settings, or links to files that other folders have."""
    return all(
        is_folder or file.lstat().st_nlink > 1 or _OURS.fullmatch(file.name) is not None
        for file, is_folder in _tree(leftover, set())
    )
