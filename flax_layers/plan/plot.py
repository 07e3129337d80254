"""The plot of `plan_costs`: a timeline of a layer's products and collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from coda_jax.costs import BESIDE, OURS, canvas, legend

if TYPE_CHECKING:
    from flax_layers.plan.costs import PlanCosts
    from flax_layers.plan.steps import Step

_ALONE = "#c1440e"
_PLAIN = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}


def plan(costs: PlanCosts, where: Any) -> Any:
    """See `PlanCosts.plot`."""
    rows = [(phase, step, start) for phase in ("forward", "backward") for step, start in _in_time(costs, phase)]
    with canvas(where, rows=len(rows) + 2, columns=1) as (figure, (axes,)):
        labels: dict[int, str] = {}
        ends: dict[str, tuple[int, int, float]] = {}
        for i, (phase, step, start) in enumerate(rows):
            y = i + (phase == "backward")  # a row apart
            color, meaning = (
                (OURS, "products" if costs.length is None else "products, attention")
                if step.is_computed
                else (BESIDE, "runs beside products")
                if step.can_overlap
                else (_ALONE, "the products wait for it")
            )
            axes.barh(y, step.ms, 0.7, left=start, color=color, label=meaning)
            axes.text(start + step.ms, y, f" {step.ms:.2f}", va="center", fontsize=9, bbox=_PLAIN, zorder=3)
            labels[y] = f"{phase}: {_computed(step)}" if step.is_computed else f"{step.what} of {step.of}, {step.over}"
            first, last, end = ends.get(phase, (y, y, 0.0))
            ends[phase] = min(first, y), max(last, y), max(end, start + step.ms)
        for phase, (first, last, end) in ends.items():
            axes.plot([end, end], [first - 0.45, last + 0.45], color="black", linewidth=1.2, linestyle=":")
            axes.text(
                end, last + 0.55, f"{phase} at best {end:.2f} ms ", ha="right", va="top", fontsize=9, weight="bold"
            )
        axes.set_yticks(list(labels), list(labels.values()), fontsize=9)
        axes.set_ylim(len(rows) + 1.2, -0.7)
        axes.set_xlim(0, 1.3 * max(end for *_, end in ends.values()))
        left_out = ", attention left out" if costs.length is None else ""
        axes.set_xlabel(f"milliseconds of one layer on each device{left_out}")
        mesh = " × ".join(f"{size} {role}" for role, size in costs.mesh.items() if size > 1) or "1 device"
        axes.set_title(
            f"{mesh}{', sequence parallel' if costs.sequence_parallel else ''}: {costs.tokens} tokens a device, "
            f"{costs.device}, {costs.bus_gbytes:.0f} GB/s in a host, {costs.network_gbytes:g} beyond",
            fontsize=10,
        )
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        legend(axes, loc="upper right")
    return figure


def _computed(step: Step) -> str:
    return step.of if step.what == "products" else f"{step.what}, {step.of}"


def _in_time(costs: PlanCosts, phase: str) -> list[tuple[Step, float]]:
    """The steps of a layer's phase, and when each starts at best. Overlapping collectives start with the products, one
    after the other; the collectives for which products wait are shown after both, though they run between products.
    """
    steps = [step for step in costs.steps if (step.part, step.phase) == ("layer", phase)]
    placed: list[tuple[Step, float]] = []
    computed = at = 0.0
    for step in steps:
        if step.is_computed:
            placed.append((step, computed))
            computed += step.ms
    for step in steps:
        if not step.is_computed and step.can_overlap:
            placed.append((step, at))
            at += step.ms
    at = max(at, computed)
    for step in steps:
        if not step.can_overlap:
            placed.append((step, at))
            at += step.ms
    return placed
