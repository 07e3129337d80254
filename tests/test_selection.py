"""The tests that a run chooses: samples and slices together see every test, a sample takes a file's quickest."""

import json
from types import SimpleNamespace

import pytest

from tests import conftest

NAMES = [f"tests/test_x.py::{name}[{i}]" for name in ("test_a", "test_b") for i in range(30)] + [
    "tests/test_y.py::test"
]
SLOW = {name for name in NAMES if "test_b" in name and int(name.split("[")[1][:-1]) < 20}


@pytest.fixture(autouse=True)
def record(tmp_path, monkeypatch):
    """A record without a test, in the place of the one of these tests."""
    path = tmp_path / "seconds.json"
    path.write_text("{}")
    monkeypatch.setattr(conftest, "RECORD", path)
    return path


def chosen(monkeypatch, smoke=(), **settings):
    """The names of the tests that run with CODA_JAX_TEST_<name>=value, where those named in `smoke` are marked so."""
    for name in ("SAMPLE", "SLICE"):
        monkeypatch.setenv(f"CODA_JAX_TEST_{name}", settings.get(name, ""))
    items = [Item(name, name in SLOW, name.split("::")[1].split("[")[0] in smoke) for name in NAMES]
    dropped = []
    config = SimpleNamespace(hook=SimpleNamespace(pytest_deselected=lambda items: dropped.extend(items)))
    conftest.pytest_collection_modifyitems(config, items)
    assert len(items) + len(dropped) == len(NAMES) or not dropped
    return [item.nodeid for item in items]


class Item:
    def __init__(self, nodeid, is_slow, is_smoke):
        self.nodeid, self.markers = nodeid, {"slow": is_slow, "smoke": is_smoke}

    def get_closest_marker(self, name):
        return self if self.markers[name] else None


def test_slices_are_a_partition(monkeypatch):
    slices = [chosen(monkeypatch, SLICE=f"{i}/8") for i in range(8)]
    assert sorted(name for one in slices for name in one) == sorted(NAMES)
    assert all(slices)


def test_samples_have_each_test_that_is_not_slow(monkeypatch):
    samples = [chosen(monkeypatch, SAMPLE=f"{i}/3") for i in range(3)]
    assert {name for one in samples for name in one} == {*NAMES} - SLOW
    for one in samples:
        assert {name.split("[")[0] for name in one} == {name.split("[")[0] for name in NAMES}
        assert len(one) < len(NAMES) / 2


def test_a_sample_is_of_the_quickest_tests_of_a_file(monkeypatch, record):
    """As many of a file as take a few seconds together are in it, at least one; and all that are marked smoke."""

    def tests(**seconds):
        record.write_text(json.dumps({"tests/test_x.py": seconds, "tests/test_y.py": {"test": 100}}))
        names = chosen(monkeypatch, SAMPLE="0/30", smoke=smoke)
        return {name.removeprefix("tests/test_x.py::").split("[")[0] for name in names if "test_x" in name}

    smoke = ()
    assert tests(test_a=0.1, test_b=0.1) == {"test_a", "test_b"}
    assert tests(test_a=90, test_b=0.1) == {"test_b"}
    assert tests(test_a=90, test_b=91) == {"test_a"}
    smoke = ("test_a",)
    assert tests(test_a=90, test_b=0.1) == {"test_a", "test_b"}
    assert tests(test_a=90, test_b=91) == {"test_a", "test_b"}
    assert "tests/test_y.py::test" in chosen(monkeypatch, SAMPLE="0/30")


def test_a_sample_beside_a_slice(monkeypatch):
    both = chosen(monkeypatch, SAMPLE="1/3", SLICE="2/8")
    assert {*both} == {*chosen(monkeypatch, SAMPLE="1/3"), *chosen(monkeypatch, SLICE="2/8")}
    assert chosen(monkeypatch) == NAMES


@pytest.mark.parametrize("wrong", ["3", "a/b", "1/0"])
def test_a_setting_that_is_no_fraction(wrong, monkeypatch):
    with pytest.raises((ValueError, ZeroDivisionError)):
        chosen(monkeypatch, SLICE=wrong)
