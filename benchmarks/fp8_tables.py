"""The report's tables of products in fp8."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.markdown import geometric_mean, grouped, table
from benchmarks.report_tables import Row, number, sizes

# Part -> what is compared: at one clock, and alone where that was measured.
TITLES = {
    "products": "Bare products with bfloat16 results, TFLOP/s",
    "results": "Over the bare product of the same run",
    "mlp": "Value and gradients of an MLP with a GELU, ms",
}
COLUMNS = {"products": ("tflops", "alone_tflops"), "results": ("ms", "alone_ms"), "mlp": ("ms", "alone_ms")}


def products(rows: Sequence[Row]) -> str:
    """The bare products, what quantised results add to them, and a model that trains."""
    text = (
        "Inputs are e4m3 but for names that end in bf16. `coda` adds sums over more than 4096 of k up to a second "
        "accumulator every 512, `coda_unpromoted` does not; `xla` and `torch_fast` are cuBLAS without exact sums, "
        "`torch_slow` with them.\n"
    )
    for part, of_part in grouped(rows, lambda row: row["part"]).items():
        for column, when in zip(COLUMNS[part], ("at one clock", "alone"), strict=True):
            if all(row.get(column) for row in of_part):
                text += f"\n{TITLES[part]}, {when}:\n\n{_table(of_part, column, _CELLS[part])}"
        if part == "products":
            text += _gains(of_part)
    return text


def _table(rows: Sequence[Row], column: str, cell: Callable[[float, float], str]) -> str:
    """A line for each shape; a cell is of a variant's number and of the first variant's."""
    names = list(dict.fromkeys(row["variant"] for row in rows))
    lines = []
    for of_shape in grouped(rows, lambda row: tuple(row[name] for name in ("name", *"mnk"))).values():
        values = {row["variant"]: number(row, column) for row in of_shape}
        first = values[names[0]]
        cells = [cell(values[name], first) if name in values else "" for name in names]
        lines.append([of_shape[0]["name"], sizes(of_shape[0]), *cells])
    return table(["", "M, N, K", *(f"`{name}`" for name in names)], lines)


_CELLS: dict[str, Callable[[float, float], str]] = {
    "products": lambda value, _: f"{value:.0f}",
    "results": lambda value, bare: f"{value:.3f} ms" if value == bare else f"{100 * (value / bare - 1):+.1f} %",
    "mlp": lambda value, _: f"{value:.2f}",
}


def _gains(rows: Sequence[Row]) -> str:
    """Ours over bfloat16, and the others over ours: geometric means."""
    shapes = [{row["variant"]: row for row in of} for of in grouped(rows, lambda row: (row["name"], row["k"])).values()]
    text = "\n"
    for column, when in zip(COLUMNS["products"], ("at one clock", "alone"), strict=True):
        if not all(row.get(column) for row in rows):
            continue
        for ours in ("coda", "coda_unpromoted"):
            speeds = [number(of.get(ours, of["coda"]), column) for of in shapes]
            over = {
                name: geometric_mean([x / number(of[name], column) for x, of in zip(speeds, shapes, strict=True)])
                for name in ("coda_bf16", "xla", "torch_fast", "torch_slow")
                if all(name in of for of in shapes)
            }
            shown = ", ".join(f"{ratio:.3f} of `{name}`" for name, ratio in over.items())
            text += f"* `{ours}` has in the mean, {when}: {shown}.\n"
    return text
