"""examples/checkpoints.py: whatever a killed run leaves, or a full disk stops, the last whole checkpoint is there."""

import contextlib
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

from checkpoints import Checkpoints, RunFolderError  # noqa: E402

SETTINGS = {"seed": 0}
LIKE = {
    "x": jax.ShapeDtypeStruct((100_000,), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))
}
CHANGES = ("os.rename", "os.mkdir", "os.rmdir", "os.remove", "shutil.rmtree")  # of a folder, as Python tells of them


def state(step):
    return {"x": jax.random.normal(jax.random.key(step), LIKE["x"].shape)}  # which no file system makes smaller


def save(checkpoints, step):
    checkpoints.save(step, state(step), [{"step": step}])


def restored(folder):
    """The step of the last checkpoint, which is whole."""
    checkpoints = Checkpoints(folder, SETTINGS)
    if checkpoints.latest_step is None:
        return 0
    found, history = checkpoints.restore(LIKE)
    (step,) = (entry["step"] for entry in history)
    assert step == checkpoints.latest_step
    np.testing.assert_array_equal(found["x"], state(step)["x"])
    save(checkpoints, step + 1)
    checkpoints.close()
    assert sorted(int(path.name) for path in (folder / "checkpoints").iterdir())[-1] == step + 1
    return step


@pytest.mark.slow
def test_a_run_killed_at_any_moment_has_a_whole_checkpoint(tmp_path):
    """Copies of the folder before each of its changes are what a process leaves that is killed then."""
    folder, copies, saved = tmp_path / "run", [], []

    def hook(event, arguments):
        if is_watched and event in CHANGES and str(arguments[0]).startswith(str(folder)):
            copies.append((tmp_path / f"copy{len(copies)}", max(saved, default=0)))
            with contextlib.suppress(shutil.Error, FileNotFoundError):  # of files that are written now
                shutil.copytree(folder, copies[-1][0])

    is_watched = True
    sys.addaudithook(hook)
    checkpoints = Checkpoints(folder, SETTINGS)
    for step in range(1, 5):
        save(checkpoints, step)
        checkpoints._manager.wait_until_finished()
        saved.append(step)
    checkpoints.close()
    is_watched = False
    found = [(restored(copy), finished) for copy, finished in copies if copy.exists()]
    assert len(found) > 20 and {step for step, _ in found} == {0, 1, 2, 3, 4}
    assert all(finished <= step <= finished + 1 for step, finished in found), found
    assert not list(tmp_path.glob("copy*/checkpoints/*tmp*"))  # what was being written is gone


def test_the_best_by_validation_stays(tmp_path):
    """Beside the last two; also for the next process, and what is not a number is not the best."""
    checkpoints = Checkpoints(tmp_path, SETTINGS)
    for step, validation in enumerate([np.nan, 3.0, 1.0, np.nan, 2.0, 1.5], 1):
        checkpoints.save(step, state(step), [{"step": 1, "validation": 0.0}, {"step": step, "validation": validation}])
    checkpoints.wait()
    assert checkpoints.best_step == 3
    checkpoints.close()
    (tmp_path / ".lock").unlink()  # this process still has it
    checkpoints = Checkpoints(tmp_path, SETTINGS)
    assert (checkpoints.best_step, checkpoints.latest_step) == (3, 6)
    assert sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir()) == [3, 5, 6]
    found, history = checkpoints.restore(LIKE, 3)
    assert history[-1]["step"] == 3
    np.testing.assert_array_equal(found["x"], state(3)["x"])
    checkpoints.close()


@pytest.fixture(params=["file system", "file"])
def limited(request, tmp_path):
    """A folder, and what makes it one with room for two checkpoints of `LIKE` and a part of one; or for no file of it.

    The second call ends it.
    """
    folder = tmp_path / "limited"
    folder.mkdir()
    if request.param == "file":
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        limits = iter([(100_000, before[1]), before])
        yield folder, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, next(limits))
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        return

    def mount(*options):
        return subprocess.run(["mount", *options, str(folder)], capture_output=True).returncode

    if os.geteuid() != 0 or mount("-t", "tmpfs", "-o", "size=1000k", "tmpfs"):
        pytest.skip("only root can make a small file system")
    options = iter([(), ("-o", "remount,size=8m")])
    yield folder, lambda: mount(*more) if (more := next(options)) else None
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_is_told_and_the_last_whole_checkpoint_stays(limited, tmp_path):
    folder, limit = limited
    checkpoints = Checkpoints(folder / "run", SETTINGS)
    for step in (1, 2):
        save(checkpoints, step)
        checkpoints._manager.wait_until_finished()
    limit()
    with pytest.raises(RunFolderError, match=r"step 3 .*(No space left|File too large).* that of step 2; make room"):
        save(checkpoints, 3)
        save(checkpoints, 4)  # step 3 is written meanwhile
    limit()
    shutil.copytree(folder / "run", tmp_path / "copy")  # as after this process
    assert list(folder.glob("run/checkpoints/*tmp*"))
    assert restored(tmp_path / "copy") == 2
    assert not list(tmp_path.glob("copy/checkpoints/*tmp*"))


def test_a_disk_that_is_full_from_the_beginning(tmp_path):
    """Not even the settings fit."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(RunFolderError, match=r"cannot be written: .*File too large"):
            Checkpoints(tmp_path, SETTINGS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
