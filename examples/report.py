"""What a finished run shows: the loss curve, and what its operators were lowered to."""

from __future__ import annotations

import collections
import re
from pathlib import Path
from typing import Any

import jax
import matplotlib

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


def lowering(step: Any, *args: Any) -> str:
    """Which of the jitted step's products became Hopper kernels, and which XLA's, read from the lowered program."""
    text = step.lower(*args).as_text()
    kernels = collections.Counter(re.findall(r"@coda_gemm\b.*?name = \"([^\"]*)\"", text))
    products = len(re.findall(r"\bstablehlo\.dot_general\b", text))
    lines = [f"lowered for {jax.default_backend()}: {sum(kernels.values())} coda_gemm kernels, {products} XLA products"]
    lines += [f"  {count:4} x coda_gemm {name}" for name, count in sorted(kernels.items())]
    return "\n".join(lines)
