"""Whether two commits give the products of `kernel_cases` the same kernels: the proof of a refactoring.

`make kernels-diff A=<commit> B=<commit>` installs each commit in an environment of its own, all with the same versions
of NVRTC, JAX and Flax, runs this tree's `kernel_records` in both, and compares. Products are paired by case and by
their place in the program, never by name; where one program has more of them, by their types. It prints how many it
compared, and fails where anything differs:

* a case, a product, or a tile that one side alone can have;
* machine code, as nvdisasm prints it, labels and symbols aside, and its constants; registers; spilled bytes;
* attributes of the custom call, types of operands and results, what they are made by, which share memory;
* the launch: tensor maps, pointers, sizes, grid, cluster, shared memory;
* the tile that `coda.explain` tells, and who chose it.

No GPU is needed. The first comparison compiles about 900 kernels twice; what a later one has in common with it comes
from the cache in `--work`.
"""

from __future__ import annotations

import argparse
import collections
import difflib
import functools
import hashlib
import importlib.metadata
import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks.lab.machine_code import disassembly

ROOT = pathlib.Path(__file__).resolve().parents[2]
PINNED = ("jax", "jaxlib", "flax", "numpy", "nvidia-cuda-nvrtc")  # to the versions of this environment
RECORDER = (  # what is run on both commits, of the package benchmarks
    *("__init__.py", "epilogues.py", "lab/__init__.py", "lab/kernel_records.py", "lab/kernel_cases.py"),
    *("lab/machine_code.py", "lab/host_launch.py", "lab/host_launch.cc"),
)
SHOWN, DETAIL = 10, 300  # differences of a kind that are printed, one a case; characters of each


class Difference(NamedTuple):
    """One thing that is not the same on both sides; `kind` is what they are counted by."""

    kind: str
    where: str
    detail: str


def compare(a: dict[str, Any], b: dict[str, Any], image: Callable[[str], bytes]) -> Iterator[Difference]:
    """The differences between two records.

    Args:
      a, b: as `benchmarks.lab.kernel_records` writes them.
      image: from an image's name to its bytes.
    """

    @functools.cache
    def same_code(one: str, other: str) -> str:
        """Empty, or the first lines that differ."""
        if one == other:
            return ""
        lines = list(difflib.unified_diff(disassembly(image(one)), disassembly(image(other)), lineterm="", n=0))
        return f"{len(lines)} lines: {' | '.join(lines[3:9])}" if lines else ""

    for name in sorted(a["cases"].keys() ^ b["cases"].keys()):
        yield Difference("missing case", name, f"only in {'A' if name in a['cases'] else 'B'}")
    for name in sorted(a["cases"].keys() & b["cases"].keys()):
        one, other = a["cases"][name], b["cases"][name]
        if one is None or other is None:
            if one is not other:
                yield Difference("missing tile", name, f"only in {'B' if one is None else 'A'}")
            continue
        for place, x, y in _paired(one["products"], other["products"]):
            if x is not None and y is not None:
                yield from _compare_products(f"{name}, product {place}", x, y, same_code)
            else:
                side, product = ("A", x) if y is None else ("B", y)
                types = f"{', '.join(product['operands'])} to {', '.join(product['results'])}"
                yield Difference("missing product", f"{name}, product {place}", f"only in {side}: {types}")
        if one["returns"] != other["returns"]:
            yield Difference("how results are made", name, "")
    for name in sorted(a["explained"].keys() & b["explained"].keys()):
        if a["explained"][name] != b["explained"][name]:
            lines = difflib.ndiff(*([str(row) for row in side["explained"][name]] for side in (a, b)))
            yield Difference("tile", name, " | ".join(line for line in lines if line[0] in "+-"))


def _paired(one: Sequence[Any], other: Sequence[Any]) -> Iterator[tuple[int, Any, Any]]:
    """The products of two programs side by side, each pair with the place of the first; None where there is no other.

    Programs with as many products are paired by place, others by the products' types; products without another come
    first.
    """
    if len(one) == len(other):
        yield from ((place, x, y) for place, (x, y) in enumerate(zip(one, other, strict=True)))
        return
    types = [[(*product["operands"], "to", *product["results"]) for product in side] for side in (one, other)]
    pairs = []
    for kind, first, last, start, end in difflib.SequenceMatcher(None, *types, autojunk=False).get_opcodes():
        if kind == "equal":
            pairs += [(place, one[place], other[start + place - first]) for place in range(first, last)]
        else:
            yield from ((place, one[place], None) for place in range(first, last))
            yield from ((place, None, other[place]) for place in range(start, end))
    yield from pairs


def _compare_products(
    where: str, x: dict[str, Any], y: dict[str, Any], same_code: Callable[[str, str], str]
) -> Iterator[Difference]:
    kernels = x["kernel"], y["kernel"]
    if code := same_code(*(kernel["image"] for kernel in kernels)):
        yield Difference("machine code", where, code)
    for field in ("registers", "spilled_bytes"):
        if kernels[0][field] != kernels[1][field]:
            yield Difference(field, where, f"{kernels[0][field]} -> {kernels[1][field]}")
    for field, kind in (
        ("operands", "types of operands"),
        ("results", "types of results"),
        ("makers", "how operands are made"),
        ("aliases", "which operands and results share memory"),
    ):
        if x[field] != y[field]:
            yield Difference(kind, where, f"{x[field]} -> {y[field]}")
    for field, kind in (("attributes", "attributes"), ("launch", "launch")):
        changed = [
            name for name in sorted(x[field].keys() | y[field].keys()) if x[field].get(name) != y[field].get(name)
        ]
        if changed:
            details = (f"{name} {x[field].get(name)} -> {y[field].get(name)}" for name in changed)
            yield Difference(kind, where, "; ".join(details))


def counts(records: dict[str, Any]) -> tuple[int, int, int]:
    """Cases that have kernels, products in them, and how many different kernels these are."""
    cases = [case for case in records["cases"].values() if case]
    images = [product["kernel"]["image"] for case in cases for product in case["products"]]
    return len(cases), len(images), len(set(images))


def _record(commit: str, work: pathlib.Path, small: bool) -> pathlib.Path:
    """The folder with a commit's records, made unless it is there."""
    sha = _run("git", "-C", ROOT, "rev-parse", "--verify", f"{commit}^{{commit}}").strip()[:12]
    versions = [f"{name}=={importlib.metadata.version(name)}" for name in PINNED]
    files = [(ROOT / "benchmarks" / name).read_bytes() for name in RECORDER]
    home = work / sha / _digest(sys.version_info, versions)
    out = home / f"records-{_digest(files, small)}"
    if (out / "records.json").exists():
        return out
    tree, python = home / "tree", home / "venv" / "bin" / "python"
    if not (home / "installed").exists():
        print(f"{commit} ({sha}): installing with {', '.join(versions)}", flush=True)
        tree.mkdir(parents=True, exist_ok=True)
        _run("git", "-C", ROOT, "archive", "--output", home / "tree.tar", sha)
        _run("tar", "-xf", home / "tree.tar", "-C", tree)
        _run(sys.executable, "-m", "venv", home / "venv")
        _run(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", tree, *versions, "pyelftools")
        (home / "installed").touch()
    package = out / "recorder" / "benchmarks"
    for name in RECORDER:
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "benchmarks" / name, package / name)
    settings = {name: value for name, value in os.environ.items() if not name.startswith(("CODA_JAX", "PYTHON"))}
    settings |= {
        "PYTHONPATH": str(package.parent),
        "JAX_PLATFORMS": "cpu",
        "CODA_JAX_CACHE_DIR": str(work / "cache"),
        "CODA_JAX_TUNED": "",
        "CODA_JAX_QUIET": "1",
    }
    print(f"{commit} ({sha}): recording, see {out / 'log'}", flush=True)
    with (out / "log").open("w") as log:
        command = [str(python), "-m", "benchmarks.lab.kernel_records", str(out), *(["--small"] if small else [])]
        done = subprocess.run(command, cwd=out, env=settings, stdout=log, stderr=subprocess.STDOUT)
    if done.returncode:
        raise SystemExit(f"{commit} ({sha}) could not be recorded:\n{(out / 'log').read_text()[-4000:]}")
    return out


def _digest(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def _run(*command: Any) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stderr}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("a", metavar="A", help="a commit")
    parser.add_argument("b", metavar="B", help="another")
    parser.add_argument("--small", action="store_true", help="the subset that CI compares")
    parser.add_argument("--work", type=pathlib.Path, default=ROOT / "build" / "kernels_diff", help="what is kept")
    arguments = parser.parse_args()
    work = arguments.work.resolve()
    folders = [_record(commit, work, arguments.small) for commit in (arguments.a, arguments.b)]
    a, b = (json.loads((folder / "records.json").read_text()) for folder in folders)

    def image(name: str) -> bytes:
        return next(p for p in (f / "images" / f"{name}.cubin" for f in folders) if p.exists()).read_bytes()

    found = collections.defaultdict(list)
    for difference in compare(a, b, image):
        found[difference.kind].append(difference)
    for side, records in (("A", a), ("B", b)):
        print("{}: {} cases, {} products, {} kernels".format(side, *counts(records)))
    for kind, differences in found.items():
        print(f"{kind}: {len(differences)} differ, such as")
        of_cases = {difference.where.split(",")[0]: difference for difference in reversed(differences)}
        for difference in sorted(of_cases.values())[:SHOWN]:
            print(f"  {difference.where}: {difference.detail[:DETAIL]}")
    print("the same" if not found else f"{sum(map(len, found.values()))} differences")
    raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
