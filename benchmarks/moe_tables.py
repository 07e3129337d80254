"""The report's tables of mixtures of experts."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from benchmarks.markdown import grouped, table
from benchmarks.report_tables import Row, number

FAILED = "failed"


def experts(rows: Sequence[Row]) -> str:
    """The tables of one shape: the experts' MLPs, the layer, and each product alone."""
    first = rows[0]
    text = (
        f"{first['rows']} rows, {first['experts']} experts, {first['hidden']} x {first['intermediate']}, bfloat16; ms. "
        "*Sizes*: of the groups, equal, drawn at random, or one with half of the rows. *Tiles*: along the rows, summed "
        "over the groups. *Speed*: of whole tiles, over that of our batched product on equal groups in the same run; "
        "of a layer's gradients that has other passes, a scatter among them. In the place of a time: the temporaries "
        "that XLA would need.\n\n"
    )
    names = [name for name in dict.fromkeys(row["variant"] for row in rows) if not name.startswith("coda_batched_")]
    for title, is_product in (("", False), ("\nEach product alone:\n\n", True)):
        of_title = [row for row in rows if row["part"].startswith(("experts", "layer")) != is_product]
        present = [name for name in names if any(row["variant"] == name for row in of_title)]
        lines = []
        for (part, kind), of in grouped(of_title, lambda row: (row["part"], row["kind"])).items():
            by_name = {row["variant"]: row for row in of}
            ours = next((by_name[name] for name in ("coda_mlp", "coda") if name in by_name), {})
            speed = f"{number(ours, 'tile_speed'):.3f}" if ours.get("tile_speed") else ""
            lines.append(
                [part, kind, ours.get("tiles", ""), speed, *(_shown_time(by_name.get(name)) for name in present)]
            )
        if lines:
            text += title + table(["part", "sizes", "tiles", "speed", *(f"`{name}`" for name in present)], lines)
    failed = {row["variant"]: row["failure"] for row in rows if _shown_time(row) == FAILED}
    text += "".join(f"\n`{name}` failed: {textwrap.shorten(why, 140)}\n" for name, why in failed.items())
    included = {row["variant"]: row["includes"] for row in rows if row["includes"]}
    return text + "".join(f"\n`{name}`: {what}.\n" for name, what in included.items())


def _shown_time(row: Row | None) -> str:
    if row is None:
        return ""
    if row["ms"]:
        return f"{number(row, 'ms'):.3f}"
    return f"{number(row, 'temporaries_gib'):.1f} GiB" if row["failure"] == "does not fit" else FAILED
