"""The comparison of two commits' kernels: what it must see, and the small cases against what is on record.

Where a change of the kernels is meant: `python -m tests.test_kernels_diff` writes tests/kernels.json anew.
"""

import copy
import hashlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import pytest

from benchmarks.lab.kernels_diff import compare
from benchmarks.lab.machine_code import constants, disassembly, without_names
from tests.nvrtc import needs_nvrtc
from tests.requirements import RECORD, missing_versions_of_record, versions

pytestmark = needs_nvrtc
ROOT = RECORD.parents[1]


def run(*arguments):
    """Returns what Python prints in a process of its own, in which libcuda.so.1 is a stand-in."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "CODA_JAX_TUNED": "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def recorded(directory):
    """The records of the small cases."""
    run("-m", "benchmarks.lab.kernel_records", directory, "--small")
    return json.loads((directory / "records.json").read_text())


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    directory = tmp_path_factory.mktemp("records")
    return recorded(directory), directory / "images"


def image_of(directory):
    return lambda name: (directory / f"{name}.cubin").read_bytes()


def kinds(made, change):
    """The kinds of differences between the records and what `change` makes of a copy of them."""
    records, images = made
    other = copy.deepcopy(records)
    change(other)
    return {difference.kind for difference in compare(records, other, image_of(images))}


def a_product(records):
    name = next(name for name in records["cases"] if name.startswith("residual_sumsq"))
    return records["cases"][name]["products"][0]


@pytest.mark.slow
def test_records_are_the_same_as_themselves(made):
    assert not kinds(made, lambda records: None)
    records, _ = made
    assert sum(len(case["products"]) for case in records["cases"].values() if case) >= 30


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("missing case", lambda records: records["cases"].popitem()),
        ("missing product", lambda records: next(iter(records["cases"].values()))["products"].pop()),
        ("tile", lambda records: next(iter(records["explained"].values()))[0].__setitem__(2, "64 x 64 (config)")),
        ("how operands are made", lambda records: a_product(records)["makers"].reverse()),
        ("types of operands", lambda records: a_product(records)["operands"].append("float32[1]")),
        ("registers", lambda records: a_product(records)["kernel"].update(registers=1)),
        ("spilled_bytes", lambda records: a_product(records)["kernel"].update(spilled_bytes=1)),
        ("types of results", lambda records: a_product(records)["results"].append("float32[1]")),
        ("which operands and results share memory", lambda records: a_product(records).update(aliases="[0]")),
        ("how results are made", lambda records: next(iter(records["cases"].values()))["returns"].reverse()),
        ("attributes", lambda records: a_product(records)["attributes"].update(transpose_b=False)),
        ("launch", lambda records: a_product(records)["launch"].update(grid=1)),
    ],
)
def test_every_kind_of_difference_is_seen(made, kind, change):
    assert kinds(made, change) == {kind}


def a_record(*products):
    """A record of one case, whose products (operands, registers) have one image."""
    about = {"results": [], "makers": [], "aliases": "", "attributes": {}, "launch": {}}
    each = [
        {**about, "operands": list(operands), "kernel": {"image": "", "registers": registers, "spilled_bytes": 0}}
        for operands, registers in products
    ]
    return {"cases": {"case": {"products": each, "returns": []}}, "explained": {}}


@pytest.mark.parametrize("more", [0, 1, 2])
def test_products_beside_one_that_one_side_lacks_are_compared(more):
    """They are paired by their types then; what comes behind the one that is missing is no difference."""
    one = [(("a", "b"), 1), (("b", "c"), 2)]
    other = [*one[:more], (("a", "d"), 9), *one[more:]]
    for first, second, side in ((one, other, "B"), (other, one, "A")):
        (found,) = compare(a_record(*first), a_record(*second), None)
        assert found == ("missing product", f"case, product {more}", f"only in {side}: a, d to ")
    changed = [(operands, registers + 1) for operands, registers in other]
    found = [difference.kind for difference in compare(a_record(*one), a_record(*changed), None)]
    assert found == ["missing product", "registers", "registers"]


@pytest.mark.slow
def test_a_tile_that_one_side_lacks_is_seen(made):
    def change(records):
        name = next(name for name, case in records["cases"].items() if case and "in tile_m" in name)
        records["cases"][name] = None

    assert kinds(made, change) == {"missing tile"}


@pytest.mark.slow
def test_other_machine_code_is_seen(made):
    records, _ = made
    images = [product["kernel"]["image"] for case in records["cases"].values() if case for product in case["products"]]
    other = next(image for image in images if image != a_product(records)["kernel"]["image"])
    assert kinds(made, lambda records: a_product(records)["kernel"].update(image=other)) == {"machine code"}


@pytest.mark.slow
def test_other_constants_are_seen(made):
    """A digit of 2 / pi, which the reduction of large angles reads by an index, is part of the kernel."""
    records, images = made
    image = image_of(images)(a_product(records)["kernel"]["image"])
    (table,) = constants(image)
    digit = image.index(bytes.fromhex(table))
    other = image[:digit] + bytes([image[digit] ^ 1]) + image[digit + 1 :]
    assert disassembly(image) != disassembly(other)


def test_labels_and_symbols_are_no_difference():
    text = "{label}:\n  BRA `({label}) ; // a comment\n  CALL `({symbol}) ;\n  FADD R0, R1, {register} ;"
    one = text.format(label=".L_x_3", symbol="_ZN4coda4gemmE", register="R2")
    assert without_names(one) == without_names(text.format(label=".L_x_7", symbol="_ZN4coda1gE", register="R2"))
    assert without_names(one) != without_names(text.format(label=".L_x_3", symbol="_ZN4coda4gemmE", register="R3"))


SWAPPED = """
from coda_jax.lowering import kernel
original = kernel._pointers
def swapped(*arguments, **options):
    pointers = original(*arguments, **options)
    return [*pointers[:-2], pointers[-1], pointers[-2]] if len(pointers) > 1 else pointers
kernel._pointers = swapped
"""
OTHER_TILE = """
import dataclasses
from coda_jax.tiles import arch
arch.ARCHITECTURES = (dataclasses.replace(arch.SM90, tiles={(64, 256): (False,)}),)
"""


ONE_CASE = """
import json, sys
from pathlib import Path
from unittest import mock
from benchmarks.lab import kernel_records
from benchmarks.lab.kernel_cases import EPILOGUES, _product
cases = {"every_vector": _product(EPILOGUES["every_vector"], 4096, 4096, 4096)}
with mock.patch.object(kernel_records, "cases", lambda: cases):
    print(json.dumps(kernel_records.record(False, Path(sys.argv[1]))))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutation", "expected"), [(SWAPPED, {"attributes", "launch"}), (OTHER_TILE, {"tile", "machine code", "launch"})]
)
def test_mutations_of_the_library_are_seen(tmp_path, mutation, expected):
    """Two pointers swapped, and a tile that is not chosen any more."""
    printed = [run("-c", program, tmp_path) for program in (ONE_CASE, mutation + ONE_CASE)]
    records = [json.loads(text.splitlines()[-1]) for text in printed]
    assert expected <= {difference.kind for difference in compare(*records, image_of(tmp_path))}


def digests(made):
    """The digests of each product of the small cases: of machine code, registers, spills, attributes and launch."""
    records, images = made
    code = {}
    found = {}
    for name, case in records["cases"].items():
        rows = []
        for product in case["products"] if case else ():
            kernel = product["kernel"]
            if kernel["image"] not in code:
                code[kernel["image"]] = disassembly(image_of(images)(kernel["image"]))
            parts = [code[kernel["image"]], kernel["registers"], kernel["spilled_bytes"]]
            parts += [product["attributes"], product["launch"]]
            rows.append(hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16])
        found[name] = rows
    return found


@pytest.mark.slow
def test_kernels_are_those_on_record(made):
    """A kernel that is changed unseen fails here; one that is changed on purpose comes with a new record."""
    if reason := missing_versions_of_record():
        pytest.skip(reason)
    found, expected = digests(made), json.loads(RECORD.read_text())["kernels"]
    assert found.keys() == expected.keys()
    changed = [name for name in found if found[name] != expected[name]]
    assert not changed, f"the kernels of {len(changed)} cases changed, such as {changed[:3]}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        records = recorded(pathlib.Path(folder))
        kernels = digests((records, pathlib.Path(folder, "images")))
        found = {"versions": versions(), "kernels": kernels}
        RECORD.write_text(json.dumps(found, indent=1) + "\n")
