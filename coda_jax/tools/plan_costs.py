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

The bandwidth is the bus bandwidth of nccl-tests (doc/PERFORMANCE.md there), that of the narrowest link of a ring. In a
host it is `bus_gbytes`. Of n devices of which each host has k < n it is min(bus_gbytes, k network_gbytes): what a host
sends leaves it by the network of k devices. An all-to-all sends bytes (n - k) / n by a device's own network. Devices
are those of a mesh in its order, the last axis innermost, so that each host has the next `gpus_per_host` of them.

A device's memory is in `plan_memory.py`. A chip's memory is that of its data sheet, taken as GiB: 80 of an H100, 141 of
an H200, of which nvidia-smi tells 79.6 and 140.4.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from coda_jax.tools.devices import DEFAULT_DEVICE, device_named, fits, fraction_note, gib_of_chip
from coda_jax.tools.plan_memory import gib_of, made_again
from coda_jax.tools.plan_steps import Links, Planner, Sizes, Step
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
    """The costs that `plan_costs` found, printed as a table.

    Attributes:
      sizes, tokens, mesh, sequence_parallel, device, bus_gbytes: what was asked, the mesh by roles.
      tflops: of the products; None where the cost model says how long each takes.
      steps: of one layer, then of the loss's head.
      network_gbytes, gpus_per_host: what was asked.
      in_host: by role, of the devices that take part in its collectives how many one host has.
      param_dtype, gradient_dtype, optimizer_dtype, optimizer_states: what is assumed to be kept.
      remat: what was asked.
    """

    sizes: Sizes
    tokens: int
    mesh: dict[str, int]
    sequence_parallel: bool
    device: str
    bus_gbytes: float
    tflops: float | None
    steps: tuple[Step, ...]
    network_gbytes: float = 50.0
    gpus_per_host: int = 8
    in_host: dict[str, int] = dataclasses.field(default_factory=dict, compare=False)
    param_dtype: str = "float32"
    gradient_dtype: str = "float32"
    optimizer_dtype: str = "float32"
    optimizer_states: int = 2
    remat: str | tuple[str, ...] | None = None

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
        """The milliseconds of all layers and the head, without attention, with everything hidden that can be."""
        of_layer = self.layer_ms("forward") + self.layer_ms("backward")
        head = [[s for s in self.steps if (s.part, s.phase) == ("head", phase)] for phase in ("forward", "backward")]
        return self.sizes.layers * of_layer + sum(map(_overlapped, head))

    @property
    def tokens_per_second(self) -> float:
        """The tokens per second of all devices, by `step_ms`."""
        devices = self.mesh["data"] * self.mesh["fsdp"] * self.mesh.get("expert", 1)
        return self.tokens * devices / self.step_ms * 1e3

    def hidden_above(self, phase: str) -> int | None:
        """Tokens on a device from which products hide what can be hidden; None where there is nothing to hide."""
        beside = sum(s.ms for s in self.steps if (s.part, s.phase) == ("layer", phase) and _hides(s))
        products = self.ms(phase, "products")
        return math.ceil(self.tokens * beside / products) if beside else None

    @property
    def gib(self) -> dict[str, float]:
        """GiB on a device: parameters, gradients, the optimizer's state, what layers keep for going back, which are
        activations and gathered weights, and what the loss's head holds.
        """
        return gib_of(self)

    @property
    def gib_of_chip(self) -> int | None:
        """The device's memory; None where it is not known."""
        return gib_of_chip(self.device)

    @property
    def fits(self) -> bool | None:
        """Whether the device's memory has the sum of `gib`; None where that memory is not known, and where the sum is
        within a factor of 1.15 of it.
        """
        return fits(sum(self.gib.values()), self.gib_of_chip)

    def as_dict(self) -> dict[str, Any]:
        """The same for a program to read."""
        return dataclasses.asdict(self) | {
            "gib": self.gib,
            "gib_in_all": sum(self.gib.values()),
            "gib_of_chip": self.gib_of_chip,
            "fits": self.fits,
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
            f"{self.tokens} tokens a device, {rate}, {self.bus_gbytes:.0f} GB/s of bus bandwidth in a host of "
            f"{self.gpus_per_host}, {self.network_gbytes:g} of network a GPU",
            *self._beyond_hosts(),
        ]
        rows = [("part", "phase", "what", "of", "over", "MB", "GB/s", "ms", "beside")]
        for step in self.steps:
            beside = "" if step.what == "products" else "products" if step.can_overlap else "nothing"
            moved = f"{step.bytes / 1e6:.0f}" if step.bytes else ""
            gbytes = f"{step.gbytes:.0f}" if step.gbytes else ""
            rows.append((step.part, step.phase, step.what, step.of, step.over, moved, gbytes, f"{step.ms:.2f}", beside))
        lines += columns(rows, (5, 6, 7))
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
        return "\n".join([*lines, self._memory()])

    def _beyond_hosts(self) -> list[str]:
        over = [
            f"{role}, over {size // self.in_host[role]} hosts, {self.in_host[role]} of each"
            for role, size in self.mesh.items()
            if self.in_host and size > self.in_host[role]
        ]
        return [f"collectives that leave a host: {'; '.join(over)}"] if over else []

    def _memory(self) -> str:
        found = self.gib
        dtypes = {
            "parameters": self.param_dtype,
            "gradients": self.gradient_dtype,
            "optimizer": f"{self.optimizer_states} x {self.optimizer_dtype}",
            "head": "a chunk, the weight, its gradient",
        }
        in_bfloat16 = np.dtype(jnp.bfloat16).name
        each = ", ".join(f"{name} {size:.1f} ({dtypes.get(name, in_bfloat16)})" for name, size in found.items())
        all_of_it = f"GiB a device: {each}; {sum(found.values()):.1f} in all"
        if self.gib_of_chip is None:
            return all_of_it
        if self.fits is False:
            return f"{all_of_it}\nit does not fit: {sum(found.values()):.1f} GiB, and the chip has {self.gib_of_chip}"
        unknown = "" if self.fits else ", not known whether it fits"
        setting = fraction_note(sum(found.values()), self.gib_of_chip)
        return f"{all_of_it}, of {self.gib_of_chip} that the chip has{unknown}{setting and f'; {setting}'}"


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
    network_gbytes: float = 50.0,
    gpus_per_host: int = 8,
    param_dtype: Any = jnp.float32,
    optimizer_dtype: Any = jnp.float32,
    optimizer_states: int = 2,
    remat: str | Iterable[str] | None = None,
) -> PlanCosts:
    """The products and collectives of a Llama-like layer per device under FSDP, tensor, expert and data parallelism.

    Weights travel in bfloat16. Attention, which the devices have to compute in each scheme, is not counted, nor are the
    embedding and what is elementwise.

    Args:
      config: with Hugging Face's names, as `flax_layers.LlamaConfig` and a model's config.json have.
      tokens: that a device has. Under tensor parallelism the devices of a group have the same ones.
      mesh: a `jax.sharding.Mesh` or `AbstractMesh`, or sizes by axis: {"fsdp": 8}. The order counts: a host has
        neighbours, which differ in the last axes.
      axes: roles by axis, "data", "fsdp", "tensor" or "expert", for axes that are called otherwise: {"x": "fsdp"}.
      sequence_parallel: whether the stream between sub-layers is cut by tokens over the tensor axis.
      device: as `coda.explain` takes it; default an H200.
      bus_gbytes: bus bandwidth of a device inside a host in GB/s, as nccl-tests tells it. The default is assumed for
        the NVLink of a host of eight; two H100s reached 206 to 234, beside products 100 to 130.
      tflops: that the products reach; by default the cost model says for each how long it takes, without its epilogue.
      gradient_dtype: in which weights' gradients are summed over devices, and kept.
      stream_dtype: in which the stream's partial sums are, under tensor parallelism.
      network_gbytes: GB/s of a device into its host's network. The default is 400 Gb/s, as the data sheet of NVIDIA's
        DGX H100 has it: eight ConnectX-7 of up to 400 Gb/s for eight GPUs.
      gpus_per_host: devices that NVLink connects.
      param_dtype: in which parameters are kept.
      optimizer_dtype, optimizer_states: of an optimizer's state, and how many arrays it has for each parameter: two of
        Adam, one of Muon or of momentum.
      remat: what layers keep, as those of `flax_layers` take it: None, which is all; "full", "save_qkv" or
        "save_attention"; or a tuple of names of arrays. The backward pass then has the products that run again, and
        gathers weights once more; attention and sums of the stream that run again are not counted.

    Raises:
      ValueError: a size that is missing or does not divide, an unknown role, device or policy, sequence parallelism
        without a tensor axis.

    Example: `print(coda.plan_costs(LlamaConfig(...), tokens=16384, mesh={"fsdp": 8}))`
    """
    sizes, axes_of_roles = Sizes.of(config), _axes_of_roles(mesh, axes or {})
    roles = dict.fromkeys(("data", "fsdp", "tensor"), 1)
    for role, size in axes_of_roles:
        roles[role] = roles.get(role, 1) * size
    kind = device_named(device) if device else DEFAULT_DEVICE
    given = {"tokens": tokens, "bus_gbytes": bus_gbytes, "tflops": tflops, "network_gbytes": network_gbytes}
    for name, value in {**given, "gpus_per_host": gpus_per_host}.items():
        if value is not None and value <= 0:
            raise ValueError(f"plan_costs: {name}={value}; it must be positive")
    if optimizer_states < 0:
        raise ValueError(f"plan_costs: {optimizer_states=}; it must be at least 0")
    _check_divided(sizes, tokens, roles, sequence_parallel)
    widths = np.dtype(gradient_dtype).itemsize, np.dtype(stream_dtype).itemsize
    links = Links(bus_gbytes, network_gbytes, gpus_per_host)
    in_host = roles | links.in_host(axes_of_roles)
    kept = remat if remat is None or isinstance(remat, str) or not isinstance(remat, Iterable) else tuple(remat)
    again = made_again(sizes, kept)
    planner = Planner(sizes, tokens, roles, sequence_parallel, kind, links, in_host, tflops, *widths, kept, again)
    return PlanCosts(
        sizes,
        tokens,
        roles,
        sequence_parallel,
        kind,
        bus_gbytes,
        tflops,
        steps=(*planner.layer(), *planner.head()),
        network_gbytes=network_gbytes,
        gpus_per_host=gpus_per_host,
        in_host=in_host,
        param_dtype=np.dtype(param_dtype).name,
        gradient_dtype=np.dtype(gradient_dtype).name,
        optimizer_dtype=np.dtype(optimizer_dtype).name,
        optimizer_states=optimizer_states,
        remat=kept,
    )


def _check_divided(sizes: Sizes, tokens: int, roles: Mapping[str, int], sequence_parallel: bool) -> None:
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


def _axes_of_roles(mesh: Any, axes: Mapping[str, str]) -> list[tuple[str, int]]:
    """The roles of a mesh's axes and their devices, in its order."""
    sizes = {str(name): int(size) for name, size in dict(getattr(mesh, "shape", mesh)).items()}
    if unknown := sorted(axes.keys() - sizes.keys()):
        raise ValueError(f"plan_costs: axes names {unknown[0]!r}; the mesh has {', '.join(sizes)}")
    found = []
    for name, size in sizes.items():
        role = axes.get(name) or _ALSO.get(name, name)
        if role not in ROLES:
            raise ValueError(
                f"plan_costs: axis {name!r} has the role {role!r}; axes= gives it one of {', '.join(ROLES)}"
            )
        if size < 1:
            raise ValueError(f"plan_costs: axis {name!r} has {size} devices")
        found.append((role, size))
    return found
