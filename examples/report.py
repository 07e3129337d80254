"""What a finished run shows: the loss curve, and what its operators were lowered to."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import matplotlib
from jax.extend import core

from coda_jax.primitives.gemm_cuda import fallback_reason

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


def lowering(jaxpr: core.ClosedJaxpr, compiled: Any) -> str:
    """A table of the coda.gemm calls of a traced function: how many, which, and what each was lowered to and why.

    Args:
      jaxpr: of the function, jax.jit(f).trace(...).jaxpr.
      compiled: the same function compiled; the kernels in it are counted.
    """
    products, others = collections.Counter[tuple[str, str, str]](), 0
    for equation in _equations(jaxpr.jaxpr):
        if equation.primitive.name == "coda_gemm":
            avals = [v.aval for v in equation.invars]
            a, b = (f"{x.dtype}[{','.join(map(str, x.shape))}]" for x in avals[:2])
            sides = ("^T" if equation.params[f"transpose_{name}"] else "" for name in "ab")
            call = " @ ".join(name + side for name, side in zip((a, b), sides, strict=True))
            on_gpu = jax.default_backend() == "gpu"
            reason = fallback_reason(avals, equation.params) if on_gpu else "no GPU here"
            products[equation.params["name"], call, f"XLA: {reason}" if reason else "Hopper kernel"] += 1
        others += equation.primitive.name == "dot_general"
    kernels = compiled.as_text().count('custom_call_target="coda_gemm"')
    lines = [f"{'count':>5}  {'epilogue':32} {'product':52} lowered to"]
    lines += [f"{n:5}  {name:32} {call:52} {target}" for (name, call, target), n in products.items()]
    lines.append(f"{others:5}  products of XLA's own: attention, optimizer")
    lines.append(f"{kernels:5}  kernels of {sum(products.values())} coda.gemm products in the compiled training step")
    return "\n".join(lines)


def _equations(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: isinstance(x, core.Jaxpr | core.ClosedJaxpr)):
            if isinstance(inner, core.ClosedJaxpr):
                yield from _equations(inner.jaxpr)
            elif isinstance(inner, core.Jaxpr):
                yield from _equations(inner)
