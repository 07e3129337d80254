"""Files that belong together: a process that is killed at any point leaves all of the former ones or all of the new."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flax_layers.checkpoints import folder

# Writes new files, and kills itself before the call with this number of those that change the file system.
KILLED = """
import importlib.util, os, signal, sys
from pathlib import Path

spec = importlib.util.spec_from_file_location("folder", sys.argv[1])
folder = importlib.util.module_from_spec(spec)
spec.loader.exec_module(folder)
path, content, exchange = Path(sys.argv[2]), sys.argv[3], sys.argv[4] == "exchange"
if not exchange:
    folder._exchanged = lambda a, b: False
calls = 0

def counted(function):
    def call(*arguments, **options):
        global calls
        calls += 1
        if calls == limit:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)
    return call

folder._exchanged = counted(folder._exchanged)
os.fsync = lambda opened: None  # for speed: what a process wrote is there when it is killed
for name in ("mkdir", "link", "replace", "rename", "unlink", "rmdir", "fsync"):
    setattr(os, name, counted(getattr(os, name)))

def write(made):
    for name in ("config.json", "model.safetensors"):
        (made / name).write_text(content)

for limit in range(1, 1000):  # each in a process of its own
    if (child := os.fork()) == 0:
        calls = 0
        folder.write_folder(path, write, key="config.json", former=("a.safetensors", "model.safetensors.index.json"))
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    names = sorted(file for file in os.listdir(path) if not file.startswith(".")) if path.exists() else None
    files = {name: (path / name).read_text() for name in names or () if not (path / name).is_dir()}
    print(__import__("json").dumps([status, files, (path / "logs" / "a.txt").exists()]))
    if status == 0:
        break
"""


def states(path, content, exchange="exchange"):
    command = [sys.executable, "-c", KILLED, folder.__file__, str(path), content, exchange]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(found) > 5 and all(status == 9 for status, *_ in found[:-1]) and found[-1][0] == 0
    return found


def fill(path, content="old", config="old"):
    path.mkdir()
    for name in ("a.safetensors", "model.safetensors.index.json", "model.safetensors", "tokenizer.json"):
        (path / name).write_text(content)
    (path / "config.json").write_text(config)
    (path / "logs").mkdir()
    (path / "logs" / "a.txt").write_text("")


def test_killed_while_a_new_folder_is_written(tmp_path):
    for _, files, _ in states(tmp_path / "model", "new"):
        assert files in ({}, {"config.json": "new", "model.safetensors": "new"})


@pytest.mark.parametrize("config", ["old", "new"])
def test_killed_over_another_model(tmp_path, config):
    """In one step, by which the folder or, if the settings stay, the parameters alone are others; nothing else goes."""
    fill(path := tmp_path / "model", config=config)
    found = states(path, "new")
    for _, files, has_logs in found:
        assert files["tokenizer.json"] == "old" and has_logs
        both = {files[name] for name in ("config.json", "model.safetensors")}
        assert both <= {"new"} or (files["config.json"] == config and both == {config, "old"})
        if files["model.safetensors"] == "old":
            assert files["a.safetensors"] == files["model.safetensors.index.json"] == "old"
    assert sorted(found[-1][1]) == ["config.json", "model.safetensors", "tokenizer.json"]


def test_killed_where_folders_cannot_be_exchanged(tmp_path):
    """New parameters never stand beside old settings: in between there are no settings."""
    fill(path := tmp_path / "model")
    found = states(path, "new", "no exchange")
    for _, files, has_logs in found:
        assert files["tokenizer.json"] == "old" and has_logs
        assert files.get("config.json") in (None, files["model.safetensors"])
    assert found[-1][1] == {"config.json": "new", "model.safetensors": "new", "tokenizer.json": "old"}


def write(made):
    for name in ("config.json", "model.safetensors"):
        (made / name).write_text("new")


def test_leftovers_of_a_day_go(tmp_path):
    """A killed process's leftovers go after a day; a folder that is younger, of another name, or there alone stays."""
    path, hexadecimal = tmp_path / "model", "0" * 31
    fill(path)
    old = [tmp_path / f".model.{hexadecimal}0", path / f".model.{hexadecimal}1", path / f".{hexadecimal}2"]
    old.append(tmp_path / f".model.{hexadecimal}3.twin")
    young, alone = tmp_path / f".model.{hexadecimal}4", tmp_path / f".model.{hexadecimal}5.twin"
    other = [tmp_path / f".other.{hexadecimal}6", tmp_path / ".model.backup"]
    for made in (*old, young, alone, *other):
        made.mkdir()
        (made / "model.safetensors").write_text("half")
    (alone / "notes.txt").write_text("of a user")
    for made in (*old, alone, *other):
        os.utime(made, (0, 0))
    folder.write_folder(path, write, key="config.json")
    assert not any(made.exists() for made in old)
    assert all(made.exists() for made in (young, alone, *other))
    assert sorted(path.iterdir()) == sorted([*path.glob("*.*"), path / "logs"])
    assert not list(path.glob(".*"))


def test_files_reach_the_disk_before_they_are_renamed(tmp_path, monkeypatch):
    calls = []
    for name in ("fsync", "replace", "rename"):
        real = getattr(os, name)

        def record(first, *rest, name=name, real=real):
            calls.append((name, os.readlink(f"/proc/self/fd/{first}") if name == "fsync" else str(first)))
            return real(first, *rest)

        monkeypatch.setattr(os, name, record)
    real_exchange = folder._exchanged
    monkeypatch.setattr(folder, "_exchanged", lambda a, b: (calls.append(("rename", str(b))), real_exchange(a, b))[1])
    fill(tmp_path / "old")
    for name in ("old", "new"):
        calls.clear()
        folder.write_folder(tmp_path / name, write, key="config.json")
        renamed = next(i for i, call in enumerate(calls) if call[0] == "rename")
        assert {Path(file).name for _, file in calls[:renamed]} >= {"config.json", "model.safetensors"}
        assert ("fsync", str(tmp_path)) in calls[renamed:]


def test_a_file_that_comes_while_the_folder_is_linked(tmp_path, monkeypatch):
    fill(path := tmp_path / "model")
    real_exchange = folder._exchanged

    def late(a, b):
        (path / "late.txt").write_text("late")
        (path / "more").mkdir()
        (path / "more" / "late.txt").write_text("late")
        return real_exchange(a, b)

    monkeypatch.setattr(folder, "_exchanged", late)
    folder.write_folder(path, write, key="config.json")
    assert (path / "late.txt").read_text() == (path / "more" / "late.txt").read_text() == "late"
    assert [file.name for file in tmp_path.iterdir()] == ["model"]


def test_the_working_folder_stays_the_same_one(tmp_path, monkeypatch):
    fill(path := tmp_path / "model")
    monkeypatch.chdir(path)
    folder.write_folder(path, write, key="config.json")
    assert Path("config.json").read_text() == "new" and Path.cwd() == path


def test_a_path_of_a_file(tmp_path):
    (tmp_path / "model").write_text("")
    with pytest.raises(NotADirectoryError, match="is a file; give the path of a folder"):
        folder.write_folder(tmp_path / "model", write, key="config.json")
