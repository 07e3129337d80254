"""`coda.plan_costs`: what a layer of a transformer computes and sends on each device, before anybody rents one.

Sizes alone decide it, so nothing is traced. A layer has four products, of D model width, Q the width of query, key and
value, H the heads' width and F hidden features: (D, Q), (H, D), (D, 2 F) and (F, D); going back each has two more. With
T tokens on a device, t devices of tensor parallelism and P parameters in the layer,

| collective                                                       | bytes          |
|------------------------------------------------------------------|----------------|
| FSDP: each weight gathered, forward                              | 2 P / t        |
| FSDP: gradients reduced and scattered                            | 4 P / t        |
| data parallelism: gradients reduced                              | 4 P / t        |
| tensor: the stream's partial sums, twice forward, twice backward | 2 T D each     |

in bfloat16 and with float32 gradients. Of a layer with experts the last two products are of T k rows, k experts a
token, in equal groups. An axis "expert" cuts the experts and, for all else, the tokens: T k D bfloat16 rows go to the
devices of their experts, and back, and so do their cotangents. What is gathered is kept, as in a list of layers without
`remat`; with it, and in a scan, it is gathered again for each layer's backward pass. Sequence parallelism has a gather
and a reduce-scatter in the place of each all-reduce, and gathers the stream once more for the weights' gradients. With
n devices a gather or a reduce-scatter of so many bytes takes bytes (n - 1) / n / bandwidth, an all-reduce twice that.
This is how "Efficiently Scaling Transformer Inference" (arXiv 2211.05102) counts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from coda_jax.tools.devices import DEFAULT_DEVICE, device_named
from coda_jax.tools.plan_steps import Planner, Sizes, Step
from coda_jax.tools.text import columns

ROLES = ("data", "fsdp", "tensor", "expert")
# What meshes call their axes elsewhere.
_ALSO = {
    "model": "tensor",
    "tp": "tensor",
    "tensor_parallel": "tensor",
    "dp": "data",
    "batch": "data",
    "replica": "data",
}


@dataclasses.dataclass(frozen=True)
class PlanCosts:
    """What `plan_costs` found, printed as a table.

    Attributes:
      sizes, tokens, mesh, sequence_parallel, device, bus_gbytes: what was asked, the mesh by roles.
      tflops: of the products; None where the cost model says how long each takes.
      steps: of one layer, then of the loss's head.
    """

    sizes: Sizes
    tokens: int
    mesh: dict[str, int]
    sequence_parallel: bool
    device: str
    bus_gbytes: float
    tflops: float | None
    steps: tuple[Step, ...]

    def ms(self, phase: str, what: str | None = None, *, part: str = "layer", over: str | None = None) -> float:
        """Milliseconds in a phase of products, of one collective, or unless `what` is given of all collectives."""
        return sum(
            step.ms
            for step in self.steps
            if (step.part, step.phase) == (part, phase)
            and (step.what == what if what else step.what != "products")
            and over in (None, step.over)
        )

    def layer_ms(self, phase: str) -> float:
        """With everything hidden that can be: the longer of products and what overlaps, and after them what cannot."""
        return _overlapped([step for step in self.steps if (step.part, step.phase) == ("layer", phase)])

    @property
    def step_ms(self) -> float:
        """Of all layers and the head, without attention, with everything hidden that can be."""
        of_layer = self.layer_ms("forward") + self.layer_ms("backward")
        head = [[s for s in self.steps if (s.part, s.phase) == ("head", phase)] for phase in ("forward", "backward")]
        return self.sizes.layers * of_layer + sum(map(_overlapped, head))

    @property
    def tokens_per_second(self) -> float:
        """Of all devices, by `step_ms`."""
        devices = self.mesh["data"] * self.mesh["fsdp"] * self.mesh.get("expert", 1)
        return self.tokens * devices / self.step_ms * 1e3

    def hidden_above(self, phase: str) -> int | None:
        """Tokens on a device from which products hide what can be hidden; None where there is nothing to hide."""
        beside = sum(s.ms for s in self.steps if (s.part, s.phase) == ("layer", phase) and _hides(s))
        products = self.ms(phase, "products")
        return math.ceil(self.tokens * beside / products) if beside else None

    @property
    def gib(self) -> dict[str, float]:
        """GiB on a device: parameters and gradients in float32, and what layers keep for going back, activations and
        gathered weights. An optimizer's state, two more copies of the parameters for Adam, is not among them.
        """
        sizes, mesh = self.sizes, self.mesh
        of_layer = sizes.parameters_of_all_tokens + sizes.parameters_of_experts / mesh.get("expert", 1)
        parameters = sizes.layers * of_layer + sizes.vocabulary * sizes.features * 2
        apart = 4 * parameters / mesh["fsdp"] / mesh["tensor"]
        packed = (sizes.heads + 2 * sizes.key_value_heads) * sizes.head
        hidden = (sizes.experts_per_token or 1) * sizes.hidden + sizes.shared
        cut = packed + sizes.heads * sizes.head + (1 + sizes.is_gated) * hidden
        stream = (2 + sizes.experts_per_token) * sizes.features / (mesh["tensor"] if self.sequence_parallel else 1)
        kept = 2 * self.tokens * (stream + cut / mesh["tensor"]) * sizes.layers
        gathered = 2 * sizes.layers * of_layer / mesh["tensor"] if mesh["fsdp"] > 1 else 0.0
        each = {"parameters": apart, "gradients": apart, "activations": kept, "gathered": gathered}
        return {name: size / 2**30 for name, size in each.items()}

    def as_dict(self) -> dict[str, Any]:
        """The same for a program to read."""
        return dataclasses.asdict(self) | {
            "gib": self.gib,
            "layer_ms": {phase: self.layer_ms(phase) for phase in ("forward", "backward")},
            "hidden_above": {phase: self.hidden_above(phase) for phase in ("forward", "backward")},
            "step_ms": self.step_ms,
            "tokens_per_second": self.tokens_per_second,
        }

    def plot(self, where: Any) -> Any:
        """A picture: of a layer, forward and backward, products beside what can run with them, and what cannot.

        Args:
          where: the path of a picture to write, or a matplotlib axes.

        Returns:
          The matplotlib figure.

        Raises:
          ImportError: there is no matplotlib.
        """
        from coda_jax.tools import plot_plan

        return plot_plan.plan(self, where)

    def __str__(self) -> str:
        mesh = " x ".join(f"{size} {role}" for role, size in self.mesh.items() if size > 1) or "1 device"
        rate = f"{self.tflops:.0f} TFLOP/s" if self.tflops else "products by the cost model"
        lines = [
            f"{self.device}, {mesh}{', sequence parallel' if self.sequence_parallel else ''}, "
            f"{self.tokens} tokens a device, {rate}, {self.bus_gbytes:.0f} GB/s of bus bandwidth"
        ]
        rows = [("part", "phase", "what", "of", "over", "MB", "ms", "beside")]
        for step in self.steps:
            beside = "" if step.what == "products" else "products" if step.can_overlap else "nothing"
            moved = f"{step.bytes / 1e6:.0f}" if step.bytes else ""
            rows.append((step.part, step.phase, step.what, step.of, step.over, moved, f"{step.ms:.2f}", beside))
        lines += columns(rows, (5, 6))
        for phase in ("forward", "backward"):
            above = self.hidden_above(phase)
            hidden = f"; hidden from {above} tokens a device on" if above else ""
            lines.append(
                f"a layer {phase}: products {self.ms(phase, 'products'):.2f} ms, collectives {self.ms(phase):.2f}, "
                f"at best {self.layer_ms(phase):.2f}{hidden}"
            )
        lines.append(
            f"a step at best {self.step_ms:.0f} ms, {self.tokens_per_second:.0f} tokens a second of all devices; "
            "attention and what is elementwise left out"
        )
        memory = ", ".join(f"{name} {size:.1f}" for name, size in self.gib.items())
        lines.append(f"GiB a device: {memory}; an optimizer's state comes to that")
        return "\n".join(lines)


def _hides(step: Step) -> bool:
    return step.what != "products" and step.can_overlap


def _overlapped(steps: list[Step]) -> float:
    products = sum(step.ms for step in steps if step.what == "products")
    beside = sum(step.ms for step in steps if _hides(step))
    return max(products, beside) + sum(step.ms for step in steps if step.what != "products" and not step.can_overlap)


def plan_costs(
    config: Any,
    *,
    tokens: int,
    mesh: Any,
    axes: Mapping[str, str] | None = None,
    sequence_parallel: bool = False,
    device: str | None = None,
    bus_gbytes: float = 350.0,
    tflops: float | None = None,
    gradient_dtype: Any = jnp.float32,
    stream_dtype: Any = jnp.bfloat16,
) -> PlanCosts:
    """What a Llama-like layer computes and sends on each device under FSDP, tensor, expert and data parallelism.

    Weights travel in bfloat16. Attention, which the devices have to compute in each scheme, is not counted, nor are the
    embedding and what is elementwise.

    Args:
      config: with Hugging Face's names, as `flax_layers.LlamaConfig` and a model's config.json have.
      tokens: that a device has. Under tensor parallelism the devices of a group have the same ones.
      mesh: a `jax.sharding.Mesh` or `AbstractMesh`, or sizes by axis: {"fsdp": 8}.
      axes: roles by axis, "data", "fsdp", "tensor" or "expert", for axes that are called otherwise: {"x": "fsdp"}.
      sequence_parallel: whether the stream between sub-layers is cut by tokens over the tensor axis.
      device: as `coda.explain` takes it; default an H200.
      bus_gbytes: bus bandwidth of a device in GB/s, as nccl-tests tells it. The default is assumed for the NVLink of a
        host of eight; two H100s reached 206 to 234, beside products 100 to 130; between hosts it is their network's.
      tflops: that the products reach; by default the cost model says for each how long it takes, without its epilogue.
      gradient_dtype: in which weights' gradients are summed over devices.
      stream_dtype: in which the stream's partial sums are, under tensor parallelism.

    Raises:
      ValueError: a size that is missing or does not divide, an unknown role or device, sequence parallelism without a
        tensor axis.

    Example: `print(coda.plan_costs(LlamaConfig(...), tokens=16384, mesh={"fsdp": 8}))`
    """
    sizes, roles = Sizes.of(config), _roles(mesh, axes or {})
    kind = device_named(device) if device else DEFAULT_DEVICE
    if tokens < 1 or bus_gbytes <= 0 or (tflops is not None and tflops <= 0):
        raise ValueError(f"plan_costs: {tokens=}, {bus_gbytes=}, {tflops=}; they must be positive")
    if sequence_parallel and roles["tensor"] == 1:
        raise ValueError("plan_costs: sequence_parallel=True wants a tensor axis")
    for name, size in (
        ("heads", sizes.heads),
        ("key_value_heads", sizes.key_value_heads),
        ("hidden", sizes.hidden),
        *([("tokens", tokens)] if sequence_parallel else []),
    ):
        if size % roles["tensor"]:
            raise ValueError(
                f"plan_costs: {name} = {size} is not divided by {roles['tensor']} devices of the tensor axis"
            )
    over = roles.get("expert", 1)
    if over > 1 and sizes.experts == 0:
        raise ValueError(f"plan_costs: the expert axis has {over} devices, and the config has no experts")
    if sizes.experts % over:
        raise ValueError(f"plan_costs: {sizes.experts} experts are not divided by {over} devices of the expert axis")
    widths = np.dtype(gradient_dtype).itemsize, np.dtype(stream_dtype).itemsize
    planner = Planner(sizes, tokens, roles, sequence_parallel, kind, bus_gbytes, tflops, *widths)
    steps = (*planner.layer(), *planner.head())
    return PlanCosts(sizes, tokens, roles, sequence_parallel, kind, bus_gbytes, tflops, steps)


def _roles(mesh: Any, axes: Mapping[str, str]) -> dict[str, int]:
    """Devices by role."""
    sizes = {str(name): int(size) for name, size in dict(getattr(mesh, "shape", mesh)).items()}
    if unknown := sorted(axes.keys() - sizes.keys()):
        raise ValueError(f"plan_costs: axes names {unknown[0]!r}; the mesh has {', '.join(sizes)}")
    found = dict.fromkeys(("data", "fsdp", "tensor"), 1)
    for name, size in sizes.items():
        role = axes.get(name) or _ALSO.get(name, name)
        if role not in ROLES:
            raise ValueError(
                f"plan_costs: axis {name!r} has the role {role!r}; axes= gives it one of {', '.join(ROLES)}"
            )
        if size < 1:
            raise ValueError(f"plan_costs: axis {name!r} has {size} devices")
        found[role] = found.get(role, 1) * size
    return found
