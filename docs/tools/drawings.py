"""`PYTHONPATH=docs python -m tools.drawings`: the drawings of the page on the kernel, into docs/static.

They are made from what the library says of itself, where it can.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

import coda_jax as coda
from coda_jax.tiles.arch import SM90
from tools import pages

BLUE, GREEN, ORANGE, GRAY = "#4c78a8", "#59a14f", "#f28e2b", "#d9d9d9"


WAY = [
    ("coda.gemm", "checks shapes and dtypes, in plain words"),
    ("epilogue/trace", "your function as a jaxpr; each value: which rows and columns does it depend on?"),
    ("epilogue/program", "the epilogue as a graph of one element's operations, and its reductions"),
    ("the primitive", "jit, grad, vmap, scan, shard_map, export; XLA's form on a CPU"),
    ("lowering/select", "kernel or XLA? which tile? by a table, else by a cost model"),
    ("epilogue/emit", "the graph as a CUDA struct"),
    ("ffi/compiler", "NVRTC, in parallel, once: the image is kept on disk"),
    ("ffi/handler", "tensor maps of the arrays; one launch"),
    ("the kernel", "the mainloop, your epilogue on its accumulator"),
]  # of a call


# ---- boxes and arrows


def chain(steps: Sequence[tuple[str, str]] = WAY, width: float = 9.0) -> Figure:
    """Boxes one below the other, each with a name and what happens there."""
    figure, axes = plt.subplots(figsize=(width, 0.62 * len(steps)))
    for i, (name, text) in enumerate(steps):
        y = len(steps) - 1 - i
        axes.add_patch(
            FancyBboxPatch((0.02, y + 0.12), 0.36, 0.62, "round,pad=0.01", facecolor="#e8eef6", edgecolor=BLUE)
        )
        axes.text(0.2, y + 0.43, name, ha="center", va="center", family="monospace", fontsize=9)
        axes.text(0.42, y + 0.43, text, va="center", fontsize=9.5)
        if i:
            axes.annotate("", (0.2, y + 0.78), (0.2, y + 1.08), arrowprops={"arrowstyle": "->", "color": BLUE})
    axes.set(xlim=(0, 1.35), ylim=(0, len(steps)))
    axes.axis("off")
    figure.tight_layout(pad=0.2)
    return figure


# ---- who works when


@dataclasses.dataclass(frozen=True)
class Span:
    """A piece of work of one consumer: from when to when, its tile, and whether it is the epilogue."""

    consumer: int
    start: float
    end: float
    tile: int
    is_epilogue: bool


def pingpong(tiles: int, products: float, epilogue: float) -> list[Span]:
    """Consumers take turns at tiles: one's products begin when the other's are issued and its own epilogue is done."""
    spans, tensor_cores, free = [], 0.0, [0.0, 0.0]
    for tile in range(tiles):
        consumer = tile % 2
        start = max(tensor_cores, free[consumer])
        tensor_cores = start + products
        free[consumer] = tensor_cores + epilogue
        spans += [Span(consumer, start, tensor_cores, tile, False)]
        spans += [Span(consumer, tensor_cores, free[consumer], tile, True)]
    return spans


def cooperative(tiles: int, products: float, epilogue: float) -> list[Span]:
    """Both consumers have half of every tile."""
    spans, at = [], 0.0
    for tile in range(tiles):
        for consumer in range(2):
            spans.append(Span(consumer, at, at + products, tile, False))
            spans.append(Span(consumer, at + products, at + products + epilogue, tile, True))
        at += products + epilogue
    return spans


def timelines(products: float = 8.0, epilogue: float = 5.0) -> Figure:
    """Both schedules on the same work: pingpong on tiles of 128 x 128, cooperative on half as many of 128 x 256."""
    schedules = {
        "pingpong, six tiles of 128 x 128": pingpong(6, products, epilogue),
        "cooperative, three tiles of 128 x 256": cooperative(3, 2 * products * 0.95, epilogue),
    }
    figure, panels = plt.subplots(len(schedules), 1, figsize=(9, 3.4), sharex=True)
    for axes, (title, spans) in zip(panels, schedules.items(), strict=True):
        for span in spans:
            color = ORANGE if span.is_epilogue else BLUE
            axes.barh(
                1 - span.consumer, span.end - span.start, left=span.start, height=0.7, color=color, edgecolor="white"
            )
            middle = (span.start + span.end) / 2
            axes.text(middle, 1 - span.consumer, str(span.tile), ha="center", va="center", color="white", fontsize=9)
        axes.set_yticks([1, 0], ["consumer 0", "consumer 1"])
        axes.set_title(title, loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("time (drawn for an epilogue of five eighths of a tile's products; numbers are tiles)")
    handles = [Rectangle((0, 0), 1, 1, color=color) for color in (BLUE, ORANGE)]
    figure.legend(handles, ["products (tensor cores)", "epilogue"], loc="upper right", fontsize=9, ncols=2)
    figure.tight_layout()
    return figure


# ---- shared memory


def constants_of(source: str) -> dict[str, int]:
    """The numbers of a generated kernel's Config."""
    config = source[source.index("struct Config") :]
    return {name: int(value) for name, value in re.findall(r"(\w+) = (\d+)[,;]", config)}


def kernels() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Epilogues, and the types of their products."""

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    def gemm(epilogue: Callable[..., Any] | None) -> Callable[..., Any]:
        return jax.jit(lambda *x: coda.gemm(*x, epilogue=epilogue))

    def residual(acc: jax.Array, x: jax.Array) -> Any:
        y = acc + x
        return y, jnp.sum(y * y, axis=1)

    def gated(acc: jax.Array) -> Any:
        gate, up = jnp.split(acc, 2, axis=1)
        return acc, jax.nn.silu(gate) * up

    a, b = array(16384, 2048), array(2048, 2048)
    return {
        "bare": (gemm(None), (a, b)),
        "residual, row sums": (gemm(residual), (a, b, array(16384, 2048))),
        "SwiGLU, z kept": (gemm(gated), (a, array(2048, 16384))),
        "bare, K = 8192": (gemm(None), (array(16384, 8192), array(8192, 2048))),
    }


def shared_memory() -> Figure:
    """Who has how much of a multiprocessor's shared memory, in the kernels that the library would compile."""
    figure, axes = plt.subplots(figsize=(9, 2.8))
    for y, (function, types) in enumerate(kernels().values()):
        (product,) = coda.explain(function, *types, platform="cuda", source=True).products
        assert product.source and product.tile
        of = constants_of(product.source)
        stage = SM90.row_bytes * (of["tile_m"] + of["tile_n"])
        for i in range(of["stages"]):
            axes.barh(-y, stage / 1024, left=i * stage / 1024, height=0.6, color=BLUE, edgecolor="white")
        rest = of["shared_bytes"] - of["stages"] * stage
        axes.barh(-y, rest / 1024, left=of["stages"] * stage / 1024, height=0.6, color=ORANGE, edgecolor="white")
        axes.text(
            229,
            -y,
            f"{product.tile.split(' (')[0]}: {of['stages']} stages of {stage // 1024} KiB",
            va="center",
            fontsize=9,
        )
    axes.axvline(227, color="black", linestyle=":", linewidth=1)
    axes.set_yticks([-y for y in range(len(kernels()))], list(kernels()))
    axes.set(xlim=(0, 330), xlabel="KiB; the dotted line is all that a block can have", xticks=range(0, 257, 32))
    axes.spines[["top", "right"]].set_visible(False)
    handles = [Rectangle((0, 0), 1, 1, color=color) for color in (BLUE, ORANGE)]
    axes.legend(
        handles,
        ["stages of a and b", "epilogue's rings, barriers"],
        loc="upper center",
        bbox_to_anchor=(0.35, 1.22),
        ncols=2,
        fontsize=9,
        frameon=False,
    )
    figure.tight_layout()
    return figure


# ---- the accumulator in registers


def lane_of(row: int, column: int) -> int:
    """The lane of a warp that holds an element of its 16 rows of the accumulator (wgmma m64nNk16)."""
    return 4 * (row % 8) + column % 8 // 2


def fragment(columns: int = 16, lane: int = 6) -> Figure:
    """The lanes of a warp's 16 rows; those of one lane are marked."""
    figure, axes = plt.subplots(figsize=(9, 5))
    for row in range(16):
        for column in range(columns):
            owner = lane_of(row, column)
            color = ORANGE if owner == lane else plt.cm.Blues(0.12 + 0.5 * (owner % 4) / 4)
            axes.add_patch(Rectangle((column, 15 - row), 1, 1, facecolor=color, edgecolor="white"))
            axes.text(column + 0.5, 15.5 - row, str(owner), ha="center", va="center", fontsize=8)
    axes.set(
        xlim=(0, columns), ylim=(0, 16), xticks=[c + 0.5 for c in range(0, columns, 2)], xlabel="column of the tile"
    )
    axes.set_xticklabels(range(0, columns, 2))
    axes.set_yticks([15.5 - r for r in range(0, 16, 4)], [f"row {r}" for r in range(0, 16, 4)])
    _no_frame(axes)
    figure.tight_layout()
    return figure


def _no_frame(axes: Axes) -> None:
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


def main() -> None:
    """Writes the same bytes for the same drawing."""
    plt.rcParams["svg.hashsalt"] = "coda_jax"
    drawings = {"way": chain, "shared_memory": shared_memory, "timelines": timelines, "fragment": fragment}
    for name, draw in drawings.items():
        path = pages.DOCS / "static" / f"kernel_{name}.svg"
        figure = draw()
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
        print(f"written: {path}")


if __name__ == "__main__":
    main()
