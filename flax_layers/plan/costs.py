"""`plan_costs`: the products and collectives of a transformer's layer on each device, from its sizes alone.

Nothing is traced. With model width D, width Q of query, key and value, width H of the heads and F hidden features, a
layer has four products, (D, Q), (H, D), (D, 2 F) and (F, D), and two more for each in the backward pass. With T tokens
on a device, t devices of tensor parallelism and P parameters in the layer,

| collective                                                       | bytes          |
|------------------------------------------------------------------|----------------|
| FSDP: each weight gathered, forward                              | 2 P / t        |
| FSDP: gradients reduced and scattered                            | 4 P / t        |
| data parallelism: gradients reduced                              | 4 P / t        |
| tensor: the stream's partial sums, twice forward, twice backward | 2 T D each     |

in bfloat16 and with float32 gradients. In a layer with experts, the last two products have T k rows, with k experts a
token, in equal groups. An axis "expert" shards the experts, and the tokens of all other products: T k D bfloat16 rows
are sent to the devices of their experts, and back, and so are their cotangents. Gathered weights are kept, as in a list
of layers without `remat`; with `remat`, and in a scan, they are gathered again for each layer's backward pass. Sequence
parallelism has a gather and a reduce-scatter in the place of each all-reduce, and gathers the stream once more for the
weights' gradients. With n devices a gather or a reduce-scatter takes bytes (n - 1) / n / bandwidth, an all-reduce twice
that. "Efficiently Scaling Transformer Inference" (arXiv 2211.05102) counts so, too.

The bandwidth is the bus bandwidth of nccl-tests (doc/PERFORMANCE.md there), that of the narrowest link of a ring. In a
host it is `bus_gbytes`. For n devices, k < n of them in each host, it is min(bus_gbytes, k network_gbytes), as a host
sends over the network of k devices. In an all-to-all each device sends bytes (n - k) / n over its own network. Devices
are in the order of the mesh, the last axis innermost, and each host has the next `gpus_per_host` of them.

`memory.py` has the memory of a device. A chip's memory is the number in its data sheet, as GiB: 80 for an H100,
141 for an H200; nvidia-smi shows 79.6 and 140.4.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from coda_jax.costs import DEFAULT_DEVICE, columns, device_named, fits, fraction_note, gib_of_chip
from flax_layers.plan.memory import gib_of, kept_names, made_again
from flax_layers.plan.steps import Links, Planner, Sizes, Step

ROLES = ("data", "fsdp", "tensor", "expert")
# Other names of the roles.
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
      sizes, tokens, mesh, sequence_parallel, device, bus_gbytes: as given to `plan_costs`, the mesh by roles.
      tflops: of the products; None if their times are the cost model's.
      steps: of one layer, then of the loss's head.
      network_gbytes, gpus_per_host: as given.
      in_host: by role, how many of the devices of one collective are in one host.
      param_dtype, gradient_dtype, optimizer_dtype, optimizer_states: of the arrays that are kept, as given.
      remat, length: as given.
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
    length: int | None = None

    def ms(self, phase: str, what: str | None = None, *, part: str = "layer", over: str | None = None) -> float:
        """Milliseconds in a phase of products, attention or a collective, `what`; of all collectives if it is None."""
        return sum(
            step.ms
            for step in self.steps
            if (step.part, step.phase) == (part, phase)
            and (step.what == what if what else not step.is_computed)
            and over in (None, step.over)
        )

    def layer_ms(self, phase: str) -> float:
        """Milliseconds with full overlap: the longer of what is computed and what may overlap it, plus all the rest."""
        return _overlapped([step for step in self.steps if (step.part, step.phase) == ("layer", phase)])

    @property
    def step_ms(self) -> float:
        """The milliseconds of all layers and the head with full overlap; of attention only if `length` is given."""
        layers_ms = self.layer_ms("forward") + self.layer_ms("backward")
        head = [[s for s in self.steps if (s.part, s.phase) == ("head", phase)] for phase in ("forward", "backward")]
        return self.sizes.layers * layers_ms + sum(map(_overlapped, head))

    @property
    def tokens_per_second(self) -> float:
        """The tokens per second of all devices, by `step_ms`."""
        devices = self.mesh["data"] * self.mesh["fsdp"] * self.mesh.get("expert", 1)
        return self.tokens * devices / self.step_ms * 1e3

    def hidden_above(self, phase: str) -> int | None:
        """Tokens on a device from which what is computed hides all overlapping collectives; None if there are none."""
        beside = sum(s.ms for s in self.steps if (s.part, s.phase) == ("layer", phase) and _hides(s))
        computed = self.ms(phase, "products") + self.ms(phase, "attention")
        return math.ceil(self.tokens * beside / computed) if beside else None

    @property
    def gib(self) -> dict[str, float]:
        """GiB on a device: parameters, gradients, the optimizer's state, the activations and gathered weights that
        layers keep for the backward pass, and the arrays of the loss's head.
        """
        return gib_of(self)

    @property
    def gib_of_chip(self) -> int | None:
        """The device's memory; None if it is not known."""
        return gib_of_chip(self.device)

    @property
    def fits(self) -> bool | None:
        """Whether the sum of `gib` fits into the device's memory; None if that memory is not known, or if the sum is
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
        """Plots a layer's products, forward and backward, the collectives that overlap them, and those that do not.

        Args:
          where: the path of the image file, or a matplotlib axes.

        Returns:
          The matplotlib figure.

        Raises:
          ImportError: matplotlib is not installed.
        """
        from flax_layers.plan import plot

        return plot.plan(self, where)

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
            beside = "" if step.is_computed else "products" if step.can_overlap else "nothing"
            megabytes = f"{step.bytes / 1e6:.0f}" if step.bytes else ""
            gbytes = f"{step.gbytes:.0f}" if step.gbytes else ""
            rows.append(
                (step.part, step.phase, step.what, step.of, step.over, megabytes, gbytes, f"{step.ms:.2f}", beside)
            )
        lines += columns(rows, (5, 6, 7))
        for phase in ("forward", "backward"):
            above = self.hidden_above(phase)
            hidden = f"; hidden from {above} tokens a device on" if above else ""
            attention = "" if self.length is None else f"attention {self.ms(phase, 'attention'):.2f}, "
            lines.append(
                f"a layer {phase}: products {self.ms(phase, 'products'):.2f} ms, {attention}"
                f"collectives {self.ms(phase):.2f}, at best {self.layer_ms(phase):.2f}{hidden}"
            )
        lines.append(
            f"a step at best {self.step_ms:.0f} ms, {self.tokens_per_second:.0f} tokens a second of all devices; "
            f"{'attention and ' if self.length is None else ''}what is elementwise left out"
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
        memory = self.gib
        dtypes = {
            "parameters": self.param_dtype,
            "gradients": self.gradient_dtype,
            "optimizer": f"{self.optimizer_states} x {self.optimizer_dtype}",
            "head": "a chunk, the weight, its gradient",
        }
        in_bfloat16 = np.dtype(jnp.bfloat16).name
        each = ", ".join(f"{name} {size:.1f} ({dtypes.get(name, in_bfloat16)})" for name, size in memory.items())
        all_of_it = f"GiB a device: {each}; {sum(memory.values()):.1f} in all"
        if self.gib_of_chip is None:
            return all_of_it
        if self.fits is False:
            return f"{all_of_it}\nit does not fit: {sum(memory.values()):.1f} GiB, and the chip has {self.gib_of_chip}"
        unknown = "" if self.fits else ", not known whether it fits"
        setting = fraction_note(sum(memory.values()), self.gib_of_chip)
        return f"{all_of_it}, of {self.gib_of_chip} that the chip has{unknown}{setting and f'; {setting}'}"


def _hides(step: Step) -> bool:
    return not step.is_computed and step.can_overlap


def _overlapped(steps: list[Step]) -> float:
    computed = sum(step.ms for step in steps if step.is_computed)
    beside = sum(step.ms for step in steps if _hides(step))
    return max(computed, beside) + sum(step.ms for step in steps if not (step.is_computed or step.can_overlap))


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
    length: int | None = None,
) -> PlanCosts:
    """The products and collectives of a Llama-like layer per device under FSDP, tensor, expert and data parallelism.

    Weights are sent in bfloat16. Attention is counted where `length` says how long sequences are; the embedding and
    elementwise operations are not.

    Args:
      config: with Hugging Face's names, as in `flax_layers.LlamaConfig` and a model's config.json.
      tokens: of one device. Under tensor parallelism the devices of a group have the same tokens.
      mesh: a `jax.sharding.Mesh` or `AbstractMesh`, or sizes by axis: {"fsdp": 8}. The order counts: a host has
        neighbours, which differ in the last axes.
      axes: roles by axis, "data", "fsdp", "tensor" or "expert", for axes with other names: {"x": "fsdp"}.
      sequence_parallel: whether the stream between sub-layers is sharded by tokens over the tensor axis.
      device: as for `coda.explain`; default an H200.
      bus_gbytes: bus bandwidth of a device inside a host in GB/s, as nccl-tests measures it. The default is an
        assumption for the NVLink of a host of eight; two H100s reached 206 to 234, and 100 to 130 beside products.
      tflops: of the products; by default their times are the cost model's, without epilogues.
      gradient_dtype: in which weights' gradients are summed over devices, and kept.
      stream_dtype: of the stream's partial sums, under tensor parallelism.
      network_gbytes: GB/s of a device into its host's network. The default is 400 Gb/s, as in the data sheet of
        NVIDIA's DGX H100: eight ConnectX-7 of up to 400 Gb/s for eight GPUs.
      gpus_per_host: devices that NVLink connects.
      param_dtype: in which parameters are kept.
      optimizer_dtype, optimizer_states: of an optimizer's state, and how many arrays it has for each parameter: two for
        Adam, one for Muon or momentum.
      remat: what layers keep, as in `flax_layers`: None, which is all; "full", "save_qkv" or "save_attention"; or a
        tuple of names of arrays. The backward pass then runs some products again, and attention, and gathers weights
        once more; sums of the stream that run again are not counted.
      length: tokens of a sequence, for causal attention by the kernels of `coda.attention`, at their expected rates.

    Raises:
      ValueError: a size that is missing or does not divide, an unknown role, device or policy, sequence parallelism
        without a tensor axis.

    Example: `print(plan_costs(LlamaConfig(...), tokens=16384, mesh={"fsdp": 8}))`
    """
    sizes, axes_of_roles = Sizes.of(config), _axes_of_roles(mesh, axes or {})
    roles = dict.fromkeys(("data", "fsdp", "tensor"), 1)
    for role, size in axes_of_roles:
        roles[role] = roles.get(role, 1) * size
    kind = device_named(device) if device else DEFAULT_DEVICE
    positive = {
        "tokens": tokens,
        "length": length,
        "bus_gbytes": bus_gbytes,
        "tflops": tflops,
        "network_gbytes": network_gbytes,
    }
    for name, value in {**positive, "gpus_per_host": gpus_per_host}.items():
        if value is not None and value <= 0:
            raise ValueError(f"plan_costs: {name}={value}; it must be positive")
    if length is not None and tokens % length:
        raise ValueError(f"plan_costs: {tokens=} are no whole sequences of {length=}")
    if optimizer_states < 0:
        raise ValueError(f"plan_costs: {optimizer_states=}; it must be at least 0")
    _check_divided(sizes, tokens, roles, sequence_parallel)
    widths = np.dtype(gradient_dtype).itemsize, np.dtype(stream_dtype).itemsize
    links = Links(bus_gbytes, network_gbytes, gpus_per_host)
    in_host = roles | links.in_host(axes_of_roles)
    kept = remat if remat is None or isinstance(remat, str) or not isinstance(remat, Iterable) else tuple(remat)
    planner = Planner(
        sizes,
        tokens,
        roles,
        sequence_parallel,
        kind,
        links,
        in_host,
        tflops,
        *widths,
        kept,
        made_again(sizes, kept),
        length,
        attends_again=kept is not None and "context" not in kept_names(kept),
    )
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
        length=length,
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
    roles = []
    for name, size in sizes.items():
        role = axes.get(name) or _ALSO.get(name, name)
        if role not in ROLES:
            raise ValueError(
                f"plan_costs: axis {name!r} has the role {role!r}; axes= gives it one of {', '.join(ROLES)}"
            )
        if size < 1:
            raise ValueError(f"plan_costs: axis {name!r} has {size} devices")
        roles.append((role, size))
    return roles
