"""The diffs of examples/adopting: they are small, and what compares both copies finds a wrong gradient."""

import subprocess
import sys

import numpy as np
import pytest

from tests.adopting import FOLDER, program

DIFFS = sorted(FOLDER.glob("*.diff"))
NO_NETWORK = ("No matching distribution found", "Could not find a version", "No module named pip")


@pytest.fixture(scope="module")
def run():
    return program()


def test_each_package_has_a_diff(run):
    assert [path.stem for path in DIFFS] == sorted(run["PACKAGES"])


@pytest.mark.parametrize("path", DIFFS, ids=lambda path: path.stem)
def test_a_diff_is_small_and_says_of_what_it_is(run, path):
    head, _, body = path.read_text().partition("--- a/")
    name, _, version = run["PACKAGES"][path.stem].requirements[0].partition("==")
    assert head.startswith(f"{name} {version}, Apache-2.0")
    assert 0 < run["changed_lines"]("--- a/" + body) <= run["MOST_LINES"] == 20


def test_lines_are_counted_as_changed(run):
    diff = "--- a/x\n+++ b/x\n@@ -1,3 +1,4 @@\n x\n-y\n+z\n+z\n x\n+\n"
    assert run["changed_lines"](diff) == 3


def steps(run, **changed):
    """In float32 and in bfloat16; one of both has an error of 0.5 % in the gradient of w."""
    rng = np.random.default_rng(0)
    exact, error = rng.normal(size=64), rng.normal(size=64)
    of = {"in_float32": 0.0, "in_bfloat16": 0.005, "lie": ((64,), None), "temporaries": 8} | changed
    make = run["Step"]
    return [
        make({"w": exact + of[name] * error}, {"w": of["lie"]}, of["temporaries"])
        for name in ("in_float32", "in_bfloat16")
    ]


def fails(run, **changed):
    return [line for line, allowed in run["table"](steps(run), steps(run, **changed), 2) if not allowed]


def test_equal_copies_pass(run):
    assert fails(run) == []


@pytest.mark.parametrize(
    "changed",
    [
        {"in_float32": 0.001},
        {"in_bfloat16": 0.03},
        {"in_bfloat16": -0.02},
        {"lie": ((8, 8), None)},
        {"lie": ((64,), "fsdp")},
        {"temporaries": 11},
    ],
    ids=str,
)
def test_differing_copies_fail(run, changed):
    (line,) = fails(run, **changed)
    assert line.startswith(("w ", "1 parameters", "temporaries"))


def test_a_gradient_that_is_nearer_to_float32_passes(run):
    far = steps(run, in_bfloat16=0.07)
    near = steps(run, in_bfloat16=-0.04)
    assert all(allowed for _, allowed in run["table"](far, near))
    assert not all(allowed for _, allowed in run["table"](near, far))


def test_a_gradient_may_be_a_little_further_from_float32_where_the_original_is_far(run):
    assert all(allowed for _, allowed in run["table"](steps(run, in_bfloat16=0.1), steps(run, in_bfloat16=-0.12)))
    assert not all(allowed for _, allowed in run["table"](steps(run), steps(run, in_bfloat16=-0.008)))


def test_temporaries_may_have_the_sums_of_a_product(run):
    assert fails(run, temporaries=10) == []


@pytest.mark.slow
def test_tunix_takes_the_diff():
    """The tunix of the package index takes the diff; without the index there is nothing to test."""
    command = [sys.executable, str(FOLDER / "run.py"), "tunix"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    except subprocess.TimeoutExpired:
        pytest.skip("the package index, or this machine, is too slow")
    if any(reason in done.stderr for reason in (*NO_NETWORK, "'pip', 'install'", "'patch'")):
        pytest.skip("no package index, or no patch")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
