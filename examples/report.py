"""The loss curve of a finished run."""

from __future__ import annotations

from pathlib import Path

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
