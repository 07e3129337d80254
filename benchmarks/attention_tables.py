"""The report's tables of attention."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from benchmarks.markdown import grouped, table
from benchmarks.report_tables import Row, number

KINDS = {
    "causal": "causal rows",
    "documents": "packed rows",
    "window": "windows",
    "length": "short rows",
    "bias": "with a bias",
}
VARIANTS = {
    "coda": "`coda_jax.attention`",
    "coda_intervals": "the same, documents as `Intervals`",
    "coda_mask": "the same, documents as a boolean mask of all pairs",
    "coda_any_order": "the same, `deterministic=False`",
    "cudnn": "cuDNN by `jax.nn.dot_product_attention`",
    "cudnn_packed": "cuDNN's packed layout, private in JAX",
    "torch_cudnn": "torch, cuDNN",
    "torch_varlen": "torch, `varlen_attn`",
    "torch_flex": "torch, FlexAttention",
    "xla": "XLA",
}
PASSES = ("forward", "both")
RESULTS = ("y", "dq", "dk", "dv")


def attention(rows: Sequence[Row]) -> str:
    """The table of one kind of cases: a line a case and variant, the fastest first."""
    text = (
        "bfloat16, forward, and forward with the gradients of q, k and v. TFLOP/s count what the mask leaves: two "
        "products forward, five backward. *Pairs*: of a query and a key that the mask leaves, over those of causal "
        "rows. *Temporaries*: with the gradients. *Distance*: the largest of y's, dq's, dk's and dv's to float32.\n\n"
    )
    has_alone = any(row["alone_ms"] for row in rows)
    lines, failures = [], dict[str, str]()
    for of_case in grouped(rows, lambda row: row["case"]).values():
        by_variant = grouped(of_case, lambda row: row["variant"])
        passes = {name: {row["pass"]: row for row in of} for name, of in by_variant.items()}
        about = [of_case[0]["text"], f"{number(of_case[0], 'share'):.3f}"]
        for name in sorted(passes, key=lambda name: _slowness(passes[name])):
            cells = [cell for which in PASSES for cell in _times(passes[name].get(which), has_alone)]
            both = passes[name].get("both", {})
            distances = [float(both[one]) for one in RESULTS if both.get(one)]
            temporaries = f"{number(both, 'temporaries_mib'):.0f}" if both.get("temporaries_mib") else ""
            distance = f"{max(distances):.4f}" if distances else ""
            lines.append([*about, VARIANTS.get(name, name), *cells, temporaries, distance])
            about = ["", ""]
        failures |= {
            f"{row['text']}, {VARIANTS.get(row['variant'], row['variant'])}": row["failure"]
            for row in of_case
            if row["failure"]
        }
    times = [f"{which}{unit}" for which in ("forward", "with gradients") for unit in (", ms", ", TFLOP/s")]
    if has_alone:
        times = [*times[:2], "alone, ms", *times[2:], "alone, ms"]
    text += table(["", "pairs", "", *times, "temporaries, MiB", "distance"], lines)
    text += "".join(f"\n{of} failed: {textwrap.shorten(why, 140)}\n" for of, why in failures.items())
    included = {row["variant"]: row["includes"] for row in rows if row["includes"]}
    return text + "".join(f"\n{VARIANTS.get(name, name)}: {what}.\n" for name, what in included.items())


def _slowness(passes: dict[str, Row]) -> tuple[float, ...]:
    ms = [passes.get(which, {}).get("ms") for which in reversed(PASSES)]
    return tuple(float(one) if one else float("inf") for one in ms)


def _times(row: Row | None, has_alone: bool) -> list[str]:
    """Milliseconds and TFLOP/s of a pass, and milliseconds alone; "failed" where there are none."""
    if row is None or not row["ms"]:
        return ["failed" if row else "", *[""] * (1 + has_alone)]
    found = [f"{number(row, 'ms'):.3f}", f"{number(row, 'tflops'):.0f}"]
    return [*found, f"{number(row, 'alone_ms'):.3f}" if row["alone_ms"] else ""] if has_alone else found


def scores(rows: Sequence[Row]) -> str:
    """The table of score functions, sinks and dropout: a line each, columns by size."""
    text = "Causal, bfloat16: forward, and forward with the gradients of q, k, v and what is learned, ms.\n\n"
    by_size = grouped(rows, lambda row: tuple(row[name] for name in ("batch", "length", "heads", "key_heads", "width")))
    times = {
        size: {row["form"]: [f"{number(row, name):.2f}" for name in ("forward_ms", "both_ms")] for row in of}
        for size, of in by_size.items()
    }
    titles = ["{} x {}, {} and {} heads of {}".format(*size) for size in times]
    columns = [f"{title}: {which}" for title in titles for which in ("forward", "both")]
    forms = list(dict.fromkeys(row["form"] for row in rows))
    return text + table(["", *columns], [[form, *(x for of in times.values() for x in of[form])] for form in forms])
