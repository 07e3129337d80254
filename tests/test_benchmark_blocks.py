"""The benchmark of blocks runs from end to end, on a CPU and small sizes."""

import csv

import pytest

from benchmarks import block_tables, blocks

SIZES = {"batch": 2, "length": 24, "layers": 2, "width": 64, "hidden": 96, "vocabulary": 256}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "ways"),
    [("llama", "block,operators,xla"), ("gptj", "block,xla"), ("olmo2", "block,block_recompute,xla,xla_recompute")],
)
def test_steps(tmp_path, form, ways):
    given = [f"--{name}={size}" for name, size in SIZES.items()]
    options = [f"--forms={form}", f"--ways={ways}", "--repeats=1", "--commit=none", f"--out={tmp_path}"]
    assert blocks.main([*given, *options]) == 0
    with next(tmp_path.glob("*_blocks.csv")).open() as file:
        rows = [row for row in csv.DictReader(file) if row["kind"] == "step"]
    assert [row["variant"] for row in rows] == [f"{form}_{way}" for way in ways.split(",")]
    assert all(float(row["ms"]) > 0 and float(row["gradient_distance"]) < 0.1 for row in rows)
    assert f"| {form} | `block` |" in block_tables.steps(rows)


def test_the_table():
    def row(way, ms, memory, failure="", alone=""):
        of = {"kind": "step", "form": "one", "variant": f"one_{way}", "failure": failure, "ms": ms, "beyond_ms": "1"}
        beside = {"temporaries_gib": memory, "gradient_distance": "0.02", "alone_ms": alone}
        return of | beside | {k: str(v) for k, v in SIZES.items()}

    shown = block_tables.steps(
        [row("block", "90", "1"), row("xla", "100", "4"), row("block_recompute", "", "", "wrong: 1")]
    )
    assert "| one | `block` | 90.00 |  | 1.00 | 1.00 | 0.900 / 0.250 | 0.0200 |" in shown
    assert "| one | `block_recompute` | wrong: 1 |" in shown
    shown = block_tables.steps([row("block", "90", "1", alone="80"), row("xla", "100", "4", alone="160")])
    assert "| 90.00 | 80.00 | 1.00 | 1.00 | 0.900 / 0.500 / 0.250 |" in shown
