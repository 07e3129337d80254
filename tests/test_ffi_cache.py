"""The cache on disk that processes share: what is kept, what is believed, what is removed, and where it lies."""

import os
import pathlib
import re
import signal
import stat
import time

import pytest

from coda_jax import ffi
from coda_jax.tiles.arch import SM90
from tests.compiler_cases import child, empty_compiler, entries, finish, preloaded, source
from tests.nvrtc import needs_nvrtc

pytestmark = needs_nvrtc

# The call that FAILS names fails on the cache's files.
STALE = r"""
#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static int fails(const char* call, const char* path) {
  const char* named = getenv("FAILS");
  if (named == NULL || strcmp(call, named) != 0 || strstr(path, "-nvrtc") == NULL) return 0;
  errno = ESTALE;
  return 1;
}
static int fails_on(const char* call, int file) {
  char link[64], path[4096] = "";
  snprintf(link, sizeof(link), "/proc/self/fd/%d", file);
  return readlink(link, path, sizeof(path) - 1) > 0 && fails(call, path);
}
#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
ssize_t read(int file, void* data, size_t size) { return fails_on("read", file) ? -1 : REAL(read)(file, data, size); }
ssize_t write(int file, const void* data, size_t size) {
  return fails_on("write", file) ? -1 : REAL(write)(file, data, size);
}
int rename(const char* from, const char* to) { return fails("rename", to) ? -1 : REAL(rename)(from, to); }
int open(const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  const int mode = va_arg(rest, int);
  va_end(rest);
  return fails("open", path) ? -1 : ((int (*)(const char*, int, int))dlsym(RTLD_NEXT, "open"))(path, flags, mode);
}
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    yield from empty_compiler(tmp_path / "cache", monkeypatch)


def test_second_process_reads_the_first_ones_entry(cache):
    first = ffi.compile(source(2), "gemm[test]", SM90.target)
    cache()
    second = ffi.compile(source(2), "gemm[test]", SM90.target)
    assert second.cached
    assert (second.cubin, second.log, second.seconds) == (first.cubin, first.log, first.seconds)


@pytest.mark.parametrize("where", ["magic", "checksum", "cubin", "log", "sizes"])
def test_damaged_entry_is_rebuilt(cache, where):
    first = ffi.compile(source(2), "gemm[test]", SM90.target)
    folder = cache()
    (entry,) = entries(folder)
    data = bytearray(entry.read_bytes())
    data[{"magic": 0, "checksum": 9, "cubin": 96 + len(first.cubin) // 2, "log": -3, "sizes": 74}[where]] ^= 0x10
    entry.write_bytes(data)
    rebuilt = ffi.compile(source(2), "gemm[test]", SM90.target)
    assert not rebuilt.cached
    assert rebuilt.cubin == first.cubin
    cache()
    assert ffi.compile(source(2), "gemm[test]", SM90.target).cached


@pytest.mark.parametrize("keep", [0, 7, 95, 97, -1])
def test_truncated_entry_is_rebuilt(cache, keep):
    first = ffi.compile(source(2), "gemm[test]", SM90.target)
    folder = cache()
    (entry,) = entries(folder)
    entry.write_bytes(entry.read_bytes()[:keep])
    rebuilt = ffi.compile(source(2), "gemm[test]", SM90.target)
    assert not rebuilt.cached
    assert rebuilt.cubin == first.cubin


def test_least_recently_used_entries_are_evicted(cache):
    folder = cache()
    ffi.compile(source(0), "gemm[test]", SM90.target)
    bytes_each = entries(folder)[0].stat().st_size
    ffi.compile(source(1), "gemm[test]", SM90.target)
    ffi.compile(source(2), "gemm[test]", SM90.target)
    for age, number in ((300, 0), (200, 1), (100, 2)):
        (entry,) = folder.glob(ffi.kernel_key(source(number), SM90.target) + "*")
        os.utime(entry, (time.time() - age, time.time() - age))
    cache(cache_limit_bytes=3 * bytes_each + bytes_each // 2)
    assert ffi.compile(source(0), "gemm[test]", SM90.target).cached  # a use: number 1 is now the oldest
    ffi.compile(source(3), "gemm[test]", SM90.target)
    left = {path.name.partition("-")[0] for path in entries(folder)}
    assert left == {ffi.kernel_key(source(number), SM90.target) for number in (0, 2, 3)}


def test_only_files_of_ours_are_removed(cache):
    """By name and by how they begin: the folder may have a user's files in it."""
    folder = cache()
    folder.mkdir()
    ours, age = "0123456789abcdef" * 4 + "-nvrtc13.0", time.time() - 7200
    kept = [
        "mine.kernel",
        "a.1.0.temporary",
        ours + ".txt",
        ours + ".0123456789abcde.temporary",
        "A" + ours[1:] + ".kernel",
        ours[1:] + ".kernel",
    ]
    for name in [*kept, ours + ".kernel"]:  # the last has an entry's name alone
        (folder / name).write_bytes(b"a text that the user has written")
    gone = {
        ours.replace("0", "1") + ".kernel": b"codajax1 as an older version begins",
        ours + ".1.0.temporary": b"",  # as an older version named them
        ours + ".1.1.temporary": b"codaj",
        ours + ".0123456789abcdef.temporary": b"codaj",
    }
    for name, begin in gone.items():
        (folder / name).write_bytes(begin)
    for path in folder.iterdir():
        os.utime(path, (age, age))
    fresh = folder / (ours + ".0123456789abcde0.temporary")
    fresh.write_bytes(b"codaj")
    (folder / (ours.replace("0", "2") + ".kernel")).mkdir()
    cache(cache_limit_bytes=1)
    ffi.compile(source(2), "gemm[test]", SM90.target)
    left = {path.name for path in folder.iterdir() if path.is_file()}
    assert left == {*kept, ours + ".kernel", fresh.name}


def test_folder_that_cannot_be_written_is_said_once(tmp_path, monkeypatch, capfd):
    blocker = tmp_path / "file"
    blocker.write_text("not a folder")
    for folder in (str(blocker / "cache"), "/proc/none", ""):
        monkeypatch.setenv("CODA_JAX_CACHE_DIR", folder)
        for _ in range(2):  # as two processes
            ffi._configure()
            for factor in (2, 3):
                assert not ffi.compile(source(factor), "gemm[test]", SM90.target).cached
            err = capfd.readouterr().err  # CODA_JAX_QUIET is set
            assert err.count("\n") == bool(folder)
            assert not folder or ("coda_jax: compiled kernels are not kept" in err and os.path.dirname(folder) in err)
    monkeypatch.undo()
    ffi._configure()


def test_a_new_folder_is_its_users_alone(cache):
    folder = cache()
    ffi.compile(source(2), "gemm[test]", SM90.target)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o775)  # an existing one stays as it is
    ffi.compile(source(3), "gemm[test]", SM90.target)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o775
    cache()
    assert ffi.compile(source(3), "gemm[test]", SM90.target).cached


def link(entry: pathlib.Path) -> None:
    target = entry.with_name("elsewhere")
    entry.rename(target)
    entry.symlink_to(target)


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda entry: entry.chmod(0o664), "others may write it"),
        (lambda entry: entry.chmod(0o646), "others may write it"),
        (link, "it is a link"),
        (lambda entry: (entry.unlink(), entry.mkdir()), "it is no regular file"),
        pytest.param(lambda entry: os.chown(entry, 12345, -1), "it belongs to another user", marks=as_root),
    ],
)
def test_entry_that_another_user_may_have_written_is_not_used(cache, capfd, spoil, why):
    ffi.compile(source(2), "gemm[test]", SM90.target)
    ffi.compile(source(3), "gemm[test]", SM90.target)
    folder = cache()
    for entry in entries(folder):
        spoil(entry)
    assert not ffi.compile(source(2), "gemm[test]", SM90.target).cached
    assert not ffi.compile(source(3), "gemm[test]", SM90.target).cached
    warning, *more = [line for line in capfd.readouterr().err.splitlines() if "is not used" in line]
    assert re.fullmatch(
        rf"coda_jax: {folder}/[0-9a-f]{{64}}-nvrtc\S+ is not used, its kernel compiles again: {why}", warning
    )
    assert not more


@pytest.mark.slow
def test_pipe_in_an_entrys_place_is_not_waited_for(tmp_path):
    code = f"""
        from coda_jax import ffi
        print(ffi.compile({source(2)!r}, "gemm[test]", "sm_90a").cached)
    """
    finish(child(code, tmp_path))
    (entry,) = entries(tmp_path)
    entry.unlink()
    os.mkfifo(entry)
    out, err = finish(child(code, tmp_path))
    assert out == "False\n"
    assert err.endswith("compiles again: it is no regular file\n")


def test_entry_under_another_kernels_name_is_not_used(cache):
    """Whoever may write the folder can rename a user's own entries."""
    ffi.compile(source(2), "gemm[test]", SM90.target)
    expected = ffi.compile(source(3), "gemm[test]", SM90.target).cubin
    folder = cache()
    (two,) = folder.glob(ffi.kernel_key(source(2), SM90.target) + "*")
    (three,) = folder.glob(ffi.kernel_key(source(3), SM90.target) + "*")
    two.rename(three)
    compiled = ffi.compile(source(3), "gemm[test]", SM90.target)
    assert not compiled.cached
    assert compiled.cubin == expected


def test_entry_that_claims_to_be_larger_than_the_cache_is_not_read(cache):
    ffi.compile(source(2), "gemm[test]", SM90.target)
    folder = cache()
    (entry,) = entries(folder)
    os.truncate(entry, 1 << 42)  # reading it would take all memory
    assert not ffi.compile(source(2), "gemm[test]", SM90.target).cached


def test_whatever_the_file_system_answers_is_a_miss(tmp_path):
    """As a network's file system does where several processes start at once."""
    code = """
        import os
        from coda_jax import ffi
        text = 'extern "C" __global__ void coda_gemm(float* x) { x[0] *= %d.5f; }'
        for i, (call, is_there) in enumerate([("open", True), ("read", True), ("write", False), ("rename", False)]):
            for fails in ["", call, call, ""] if is_there else [call, call]:
                os.environ["FAILS"] = fails
                ffi._configure()
                print(f"{fails}:{ffi.compile(text % i, 'gemm[test]', 'sm_90a').cached}")
    """
    out, err = finish(child(code, tmp_path, **preloaded(tmp_path, STALE)))
    missed = {call: [f"{call}:False"] * 2 for call in ("open", "read", "write", "rename")}
    then = [":False", *missed["open"], ":True", ":False", *missed["read"], ":True", *missed["write"], *missed["rename"]]
    assert out.split() == then, err
    lines = ["coda_jax: compiled kernels are not kept (CODA_JAX_CACHE_DIR): " in line for line in err.splitlines()]
    assert lines == [True] * 6  # as of six processes: each but the two that could not read
    assert not list(tmp_path.glob("*.temporary"))


# The first TAKEN temporary files are there already; the disk is full while FULL is there. Prints their names.
LEFTOVERS = r"""
#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
static int taken = -1;
int open(const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  const int mode = va_arg(rest, int);
  va_end(rest);
  if (strstr(path, ".temporary") != NULL) {
    if (taken < 0) taken = atoi(getenv("TAKEN"));
    printf("%s\n", path);
    fflush(stdout);
    if (taken > 0) {
      taken--;
      errno = EEXIST;
      return -1;
    }
  }
  return ((int (*)(const char*, int, int))dlsym(RTLD_NEXT, "open"))(path, flags, mode);
}
ssize_t write(int file, const void* data, size_t size) {
  char link[64], path[4096] = "";
  snprintf(link, sizeof(link), "/proc/self/fd/%d", file);
  const char* full = getenv("FULL");
  if (full != NULL && readlink(link, path, sizeof(path) - 1) > 0 && strstr(path, ".temporary") != NULL &&
      access(full, F_OK) == 0) {
    errno = ENOSPC;
    return -1;
  }
  return REAL(write)(file, data, size);
}
"""


def test_names_that_others_have_taken_keep_no_kernel_from_being_kept(cache):
    """Processes of several containers have one number, and each counts from 0; what a killed one wrote is left."""
    ffi.compile(source(2), "gemm[test]", SM90.target)
    folder = cache()
    (entry,) = entries(folder)
    for number in range(1000):
        (folder / f"{entry.stem}.{os.getpid()}.{number}.temporary").touch()
    entry.unlink()
    ffi.compile(source(2), "gemm[test]", SM90.target)
    assert entries(folder) == [entry]


@pytest.mark.slow
def test_a_temporary_file_that_is_there_is_left_alone(tmp_path):
    """Another name is tried; two processes of one number never have the same."""
    code = f"""
        from coda_jax import ffi
        ffi.compile({source(2)!r}, "gemm[test]", "sm_90a")
    """
    environment = preloaded(tmp_path, LEFTOVERS, TAKEN="3")
    names = []
    for _ in range(2):
        out, err = finish(child(code, tmp_path, **environment))
        (entry,) = entries(tmp_path)
        entry.unlink()
        assert err == ""
        names += out.split()
    assert len(names) == len(set(names)) == 8, names
    assert all(re.fullmatch(r".*-nvrtc[0-9.]+\.[0-9a-f]{16}\.temporary", name) for name in names), names


@pytest.mark.slow
def test_leftovers_go_where_they_fill_the_disk(tmp_path):
    code = f"""
        from coda_jax import ffi
        ffi.compile({source(2)!r}, "gemm[test]", "sm_90a")
    """
    leftover = tmp_path / ("0123456789abcdef" * 4 + "-nvrtc13.0.0123456789abcdef.temporary")
    environment = preloaded(tmp_path, LEFTOVERS, TAKEN="0", FULL=str(leftover))
    leftover.write_bytes(b"codaj")
    _, err = finish(child(code, tmp_path, **environment))  # another process may be writing it
    assert "compiled kernels are not kept (CODA_JAX_CACHE_DIR): " in err and "No space left" in err
    assert leftover.exists() and not entries(tmp_path)
    os.utime(leftover, (time.time() - 7200,) * 2)
    _, err = finish(child(code, tmp_path, **environment))
    assert err == "" and len(entries(tmp_path)) == 1 and not leftover.exists()


@pytest.mark.parametrize("setting", ["~/kernels", "kernels"])
def test_folder_stays_where_it_was(tmp_path, setting):
    code = f"""
        import os
        from coda_jax import ffi
        os.chdir("/")
        ffi.compile({source(2)!r}, "gemm[test]", "sm_90a")
        print(ffi.cache_directory())
    """
    environment = {"CODA_JAX_CACHE_DIR": setting, "CODA_JAX_DUMP_DIR": setting + "/dump", "HOME": str(tmp_path)}
    out, err = finish(child(code, tmp_path, cwd=tmp_path, **environment))
    assert out == f"{tmp_path}/kernels\n", err
    assert len(entries(tmp_path / "kernels")) == 1
    assert len(list((tmp_path / "kernels/dump").glob("*.cubin"))) == 1
    assert err == ""


def test_default_folder_follows_the_platform(monkeypatch):
    monkeypatch.delenv("CODA_JAX_CACHE_DIR")
    monkeypatch.setenv("HOME", "/home/user")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert ffi.cache_directory() == "/somewhere/coda_jax"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert ffi.cache_directory() == "/home/user/.cache/coda_jax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert ffi.cache_directory() == "/home/user/.cache/coda_jax"


RACE = """
    import sys
    from coda_jax import ffi
    sys.stdin.readline()
    for i in range(6):
        text = f'extern "C" __global__ void coda_gemm(float* x) {{ x[0] *= {i}.5f; }}'
        compiled = ffi.compile(text, "gemm[race]", "sm_90a")
        assert compiled.cubin.startswith(b"\\x7fELF")
    print("done")
"""


@pytest.mark.slow
def test_processes_race_for_the_same_entries(tmp_path):
    processes = [child(RACE, tmp_path) for _ in range(4)]
    for process in processes:  # all have started by the time the first goes on
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        out, err = finish(process)
        assert out == "done\n", err
    assert len(entries(tmp_path)) == 6
    assert not list(tmp_path.glob("*.temporary"))


@pytest.mark.slow
def test_killed_process_leaves_no_bad_entry(tmp_path, cache):
    code = """
        from coda_jax import ffi
        print("ready", flush=True)
        for i in range(10**6):
            ffi.compile(f'extern "C" __global__ void coda_gemm(float* x) {{ x[0] *= {i}.5f; }}', "gemm[kill]", "sm_90a")
    """
    for wait in (0.05, 0.16, 0.27):
        process = child(code, tmp_path / "cache")
        assert process.stdout.readline() == "ready\n"
        time.sleep(wait)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    cache()
    for i in range(12):
        text = f'extern "C" __global__ void coda_gemm(float* x) {{ x[0] *= {i}.5f; }}'
        assert ffi.compile(text, "gemm[kill]", SM90.target).cubin.startswith(b"\x7fELF")
