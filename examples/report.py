"""The report of a finished run: its loss curve, and what its step ran as."""

from __future__ import annotations

import collections
import re
from pathlib import Path

import matplotlib

import coda_jax as coda

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def plot(history: list[dict[str, float]], bigram: float, path: Path) -> None:
    """Training and validation bits per byte over steps, with the bigram model as a line."""
    figure, axes = plt.subplots(figsize=(7, 4.5))
    steps = [h["step"] for h in history]
    axes.plot(steps, [h["train"] for h in history], "o-", label="training (mean since the point before)")
    axes.plot(steps, [h["validation"] for h in history], "o-", label="validation")
    axes.axhline(bigram, color="gray", linestyle="--", label="byte bigram, validation")
    axes.set(xlabel="step", ylabel="bits per byte", title="A small Llama on the Python standard library")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def what_ran(explanation: coda.Explanation, kernels: int, parts: int = 1) -> str:
    """The kernels of a step that have an epilogue, with what runs in it, and why other products are XLA's.

    Args:
      explanation: of the step, which goes through its products once for each part of a batch.
      kernels: calls of kernels in the compiled step, which has them once, in a loop over the parts.
      parts: of a batch.
    """
    plans = "\n".join(explanation.blocks)
    inside = dict(re.findall(r"^ *(\S+)  \(.*?: (.+); stores", plans, re.MULTILINE))
    fused, reasons = collections.Counter[str](), collections.Counter[str]()
    for product, count in explanation.products.items():
        if product.reason is not None:
            reasons[product.reason] += count // parts
        elif product.epilogue != "gemm":
            fused[product.epilogue] += count // parts
    lines = [f"{count:>5}  {name:21}  {inside.get(name, '')}".rstrip() for name, count in fused.items()]
    if lines:
        lines.insert(0, f"count  {'fused kernel':21}  in its epilogue")
    lines += [f"XLA's form ran for {count} products: {reason}" for reason, count in reasons.items()]
    products = sum(explanation.products.values()) // parts
    return "\n".join([*lines, f"{kernels} kernels of {products} products in the compiled step"])
