"""The report's table of training steps of several architectures."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.markdown import grouped, table
from benchmarks.report_tables import Row, number


def steps(rows: Sequence[Row]) -> str:
    """A line for each way in which a form is written, beside the way of plain JAX that keeps as much."""
    lines = []
    for form, of in grouped([row for row in rows if row["kind"] == "step"], lambda row: row["form"]).items():
        ways = {row["variant"].removeprefix(f"{form}_"): row for row in of}
        for way, row in ways.items():
            if row["failure"]:
                lines.append([form, f"`{way}`", row["failure"]])
                continue
            plain = ways["xla_recompute" if way.endswith("recompute") else "xla"]
            columns = ("ms", *(("alone_ms",) if row.get("alone_ms") else ()), "temporaries_gib")
            ratios = " / ".join(_ratio(number(row, column), number(plain, column)) for column in columns)
            of_row = [f"{number(row, column):.2f}" for column in ("ms", "beyond_ms", "temporaries_gib")]
            of_row.insert(1, f"{number(row, 'alone_ms'):.2f}" if row.get("alone_ms") else "")
            lines.append([form, f"`{way}`", *of_row, ratios, f"{number(row, 'gradient_distance'):.4f}"])
    first = rows[0]
    about = ", ".join(
        f"{name} {first[name]}" for name in ("batch", "length", "layers", "width", "hidden", "vocabulary")
    )
    header = ["form", "way", "ms", "alone", "of it passes", "GiB", "ms / alone / GiB of plain's", "gradients"]
    return (
        f"{about}. `ms` is the profiler's, interleaved; `alone` the clock's, back to back; GiB are of temporaries; "
        f"`gradients` says how far they are from plain JAX's.\n\n{table(header, lines)}"
    )


def _ratio(x: float, of: float) -> str:
    """Empty where the second is nothing, as the memory of small sizes is when it is rounded to GiB."""
    return f"{x / of:.3f}" if of else ""
