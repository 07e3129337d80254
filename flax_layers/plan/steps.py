"""The steps of `plan_costs`: the products and collectives of a layer and of the loss's head, on each device."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from coda_jax.costs import GemmShape, bare_us, causal_attention_ms


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of a Llama-like model. If it has experts, every layer has them.

    Attributes:
      features, hidden: D, and F of the feed-forward layer or of an expert.
      heads, key_value_heads, head: counts, and the width of a head.
      layers, vocabulary: counts.
      is_gated: whether the feed-forward layer has a gate, and so 2 F columns.
      experts, experts_per_token: counts, 0 without experts.
      shared: F of an expert that all tokens share; 0 without one.
    """

    features: int
    hidden: int
    heads: int
    key_value_heads: int
    head: int
    layers: int = 1
    vocabulary: int = 0
    is_gated: bool = True
    experts: int = 0
    experts_per_token: int = 0
    shared: int = 0

    @classmethod
    def of(cls, config: Any) -> Sizes:
        """The sizes from a config with Hugging Face's names, such as `flax_layers.LlamaConfig`.

        Raises:
          ValueError: a size is missing.
        """

        def size(*names: str, default: int | None = None) -> int:
            values = (
                config.get(name) if isinstance(config, Mapping) else getattr(config, name, None) for name in names
            )
            value = next((value for value in values if value is not None), default)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"plan_costs: the config has no {names[0]}, a count: {value!r}")
            return value

        def has(*names: str) -> bool:
            return any(config.get(n) if isinstance(config, Mapping) else getattr(config, n, None) for n in names)

        heads, features = size("num_attention_heads"), size("hidden_size")
        counts = ("num_experts", "num_local_experts", "n_routed_experts")
        shared, num_shared = "shared_expert_intermediate_size", "n_shared_experts"
        expert_width = ("moe_intermediate_size",) if has(*counts) else ()
        shared_width = size(shared) if has(*counts) and has(shared) else 0
        if has(*counts) and has(num_shared):  # each as wide as an expert
            shared_width = size(num_shared) * size("moe_intermediate_size")
        return cls(
            features=features,
            hidden=size(*expert_width, "intermediate_size"),
            heads=heads,
            key_value_heads=size("num_key_value_heads", default=heads),
            head=size("head_dim", default=features // heads),
            layers=size("num_hidden_layers", default=1),
            vocabulary=size("vocab_size"),
            experts=size(*counts) if has(*counts) else 0,
            experts_per_token=size("num_experts_per_tok") if has(*counts) else 0,
            shared=shared_width,
        )

    @property
    def products(self) -> tuple[tuple[str, int, int], ...]:
        """Name, K and N of a layer's weights; tensor parallelism shards K of "out" and "down", and N of all others."""
        packed = (self.heads + 2 * self.key_value_heads) * self.head
        gate_up, widths = "gate_up" if self.is_gated else "up", 1 + self.is_gated
        shared = (("shared gate_up", self.features, 2 * self.shared), ("shared down", self.shared, self.features))
        return (
            ("qkv", self.features, packed),
            ("out", self.heads * self.head, self.features),
            (gate_up, self.features, widths * self.hidden),
            ("down", self.hidden, self.features),
            *(shared if self.shared else ()),
        )

    @property
    def parameters(self) -> int:
        """The number of parameters in a layer's weights, without the norms' scales."""
        return self.parameters_of_experts + self.parameters_of_all_tokens

    @property
    def parameters_of_experts(self) -> int:
        """The number of parameters in a layer's experts, without a shared one."""
        return self.experts * sum(k * n for name, k, n in self.products if self.is_of_experts(name))

    @property
    def parameters_of_all_tokens(self) -> int:
        """The number of parameters in a layer's weights that multiply every token, the router's among them."""
        router = self.features * self.experts
        return router + sum(k * n for name, k, n in self.products if not self.is_of_experts(name))

    def is_of_experts(self, product: str) -> bool:
        """Whether each expert has its own weight of this name."""
        return self.experts > 0 and product in ("gate_up", "up", "down")


@dataclasses.dataclass(frozen=True)
class Step:
    """The products, attention, or a collective, of one layer or of the head.

    Attributes:
      part: "layer" or "head".
      phase: "forward" or "backward".
      what: "products", "attention", or the collective: "all-gather", "reduce-scatter", "all-reduce", "all-to-all".
      of: which arrays.
      over: the role whose devices take part; "" for what a device computes.
      bytes: of the array over all these devices, or on each device for an all-to-all; 0 for what a device computes.
      ms: milliseconds, alone.
      can_overlap: whether it can run at the same time as the products: gathers of weights and sums of gradients can,
        but products wait for sums of the stream.
      gbytes: the bus bandwidth assumed for `ms`, GB/s of a device; 0 for what a device computes.
    """

    part: str
    phase: str
    what: str
    of: str
    over: str
    bytes: int
    ms: float
    can_overlap: bool = True
    gbytes: float = 0.0

    @property
    def is_computed(self) -> bool:
        """Whether a device computes it alone: it is no collective."""
        return self.what in ("products", "attention")


@dataclasses.dataclass(frozen=True)
class Links:
    """The links between the devices.

    Attributes:
      bus_gbytes: bus bandwidth of a device inside its host, GB/s.
      network_gbytes: a device's share of its host's network, GB/s.
      gpus_per_host: a count.
    """

    bus_gbytes: float
    network_gbytes: float
    gpus_per_host: int

    def in_host(self, axes: Sequence[tuple[str, int]]) -> dict[str, int]:
        """By role, how many of the devices of one collective are in one host.

        Devices are numbered as those of a `jax.sharding.Mesh` are by default: devices that differ in the last axis
        alone have consecutive numbers, and a host has the next `gpus_per_host` devices.

        Args:
          axes: the mesh's roles and sizes, in its order.
        """
        counts: dict[str, int] = {}
        stride = 1
        for role, size in reversed(axes):
            counts[role] = counts.get(role, 1) * math.gcd(size, max(1, self.gpus_per_host // stride))
            stride *= size
        return counts

    def ring_gbytes(self, devices: int, in_host: int) -> float:
        """Bus bandwidth of a gather, a sum or a scatter over so many devices, `in_host` of them in each host.

        A host sends over the networks of all these devices together.
        """
        if devices <= in_host:
            return self.bus_gbytes
        return min(self.bus_gbytes, in_host * self.network_gbytes)

    def exchange_gbytes(self, devices: int, in_host: int) -> float:
        """Bus bandwidth of an all-to-all, in which each device sends to other hosts over its own network."""
        if devices <= in_host:
            return self.bus_gbytes
        return min(self.bus_gbytes, self.network_gbytes * (devices - 1) / (devices - in_host))


@dataclasses.dataclass(frozen=True)
class Planner:
    """The steps of a layer and of the head.

    Attributes:
      again: the products that run again in the backward pass.
      length: tokens of a sequence; None where attention is not counted.
      attends_again: whether attention's forward pass runs again in the backward pass.
    """

    sizes: Sizes
    tokens: int
    mesh: dict[str, int]
    sequence_parallel: bool
    device: str
    links: Links
    in_host: dict[str, int]
    tflops: float | None
    gradient_bytes: int
    stream_bytes: int
    remat: Any = None
    again: tuple[str, ...] = ()
    length: int | None = None
    attends_again: bool = False

    def layer(self) -> Iterator[Step]:
        count, sizes = len(self.sizes.products), self.sizes
        for phase in ("forward", "backward"):
            of = f"{count if phase == 'forward' else 2 * count + len(self.again)} products"
            yield Step("layer", phase, "products", of, "", 0, self._products(phase))
            if self.length is not None:
                yield Step("layer", phase, "attention", f"sequences of {self.length}", "", 0, self._attention(phase))
            yield from self._weights("layer", phase, sizes.parameters_of_all_tokens, "weights")
            if sizes.experts:
                expert_parameters = sizes.parameters_of_experts // self.experts_over
                yield from self._weights("layer", phase, expert_parameters, "experts", ("data",))
            yield from self._stream(phase)
            yield from self._exchange(phase)

    @property
    def experts_over(self) -> int:
        """The number of devices over which the experts are sharded."""
        return self.mesh.get("expert", 1)

    def head(self) -> Iterator[Step]:
        """The loss's head: its products, and those of its gradients, run in the forward pass. If tensor parallelism
        shards the vocabulary, the stream's gradient has an all-reduce.
        """
        sizes, tensor = self.sizes, self.mesh["tensor"]
        columns_of_device = sizes.vocabulary // tensor
        shapes = _three(self.tokens, sizes.features, columns_of_device)
        yield Step("head", "forward", "products", "3 products, with their gradients", "", 0, sum(map(self._ms, shapes)))
        for phase in ("forward", "backward"):
            yield from self._weights("head", phase, sizes.vocabulary * sizes.features, "vocabulary")
        if tensor > 1:
            yield self._collective(
                "head",
                "backward",
                "all-reduce",
                "dx",
                "tensor",
                self.stream_bytes * self.tokens * sizes.features,
                False,
            )

    def _products(self, phase: str) -> float:
        """Milliseconds of a layer's products on a device."""
        total, tensor = 0.0, self.mesh["tensor"]
        for name, k, n in self.sizes.products:
            k, n = (k // tensor, n) if name == "out" or name.endswith("down") else (k, n // tensor)
            if self.sizes.is_of_experts(name):
                groups = self.sizes.experts // self.experts_over
                forward, dx, dw = _three_of_groups(self.tokens * self.sizes.experts_per_token, k, n, groups)
            else:
                forward, dx, dw = _three(self.tokens, k, n)
            runs = (forward,) if phase == "forward" else (dx, dw, *((forward,) if name in self.again else ()))
            total += sum(map(self._ms, runs))
        return total

    def _attention(self, phase: str) -> float:
        """Milliseconds of causal attention to a device's heads, by `coda.attention`'s kernels."""
        assert self.length is not None
        sizes, length = self.sizes, self.length
        shape = self.tokens // length, length, sizes.heads // self.mesh["tensor"], sizes.head
        passes = [False] if phase == "forward" else [True, *[False] * self.attends_again]
        return sum(causal_attention_ms(*shape, is_backward=x) for x in passes)

    def _ms(self, shape: GemmShape) -> float:
        if self.tflops is not None:
            return 2 * shape.batch * shape.m * shape.n * shape.k / self.tflops / 1e9
        us = bare_us(shape, np.dtype(jnp.bfloat16), np.dtype(jnp.bfloat16), self.device)
        if us is None:
            raise ValueError(f"plan_costs: a device's part of a product is {shape}, which is not known; give tflops=")
        return us / 1e3

    def _weights(
        self, part: str, phase: str, parameters: int, of: str, replicated_over: tuple[str, ...] = ("data", "expert")
    ) -> Iterator[Step]:
        """Gathers of weights, in the backward pass only if layers have `remat`, and sums of their gradients.

        `replicated_over`: the roles whose devices have the same weights.
        """
        group_parameters = parameters // self.mesh["tensor"]
        if self.mesh["fsdp"] > 1 and (phase == "forward" or (part == "layer" and self.remat is not None)):
            yield self._collective(part, phase, "all-gather", of, "fsdp", 2 * group_parameters)
        if phase == "backward":
            gradients = self.gradient_bytes * group_parameters
            if self.mesh["fsdp"] > 1:
                yield self._collective(part, phase, "reduce-scatter", f"gradients of {of}", "fsdp", gradients)
            for role in replicated_over:
                if self.mesh.get(role, 1) > 1:
                    rest = gradients // self.mesh["fsdp"]
                    yield self._collective(part, phase, "all-reduce", f"gradients of {of}", role, rest)

    def _stream(self, phase: str) -> Iterator[Step]:
        """The stream's partial sums: after out and down; in the backward pass, of dx of qkv and of gate and up."""
        if self.mesh["tensor"] == 1:
            return
        sent = self.stream_bytes * self.tokens * self.sizes.features
        after = "out, down" if phase == "forward" else "dx of qkv, gate_up"
        if not self.sequence_parallel:
            yield self._collective("layer", phase, "all-reduce", after, "tensor", sent, False, 2)
            return
        before = "x of qkv, gate_up" if phase == "forward" else "dout of out, down"
        yield self._collective("layer", phase, "all-gather", before, "tensor", sent, False, 2)
        yield self._collective("layer", phase, "reduce-scatter", after, "tensor", sent, False, 2)
        if phase == "backward":
            yield self._collective("layer", phase, "all-gather", "x of qkv, gate_up, for dW", "tensor", sent, True, 2)

    def _exchange(self, phase: str) -> Iterator[Step]:
        """The exchange of rows with the devices of their experts; in the backward pass, of their cotangents."""
        if self.experts_over > 1:
            sent = self.stream_bytes * self.tokens * self.sizes.experts_per_token * self.sizes.features
            of = "rows to experts and back" if phase == "forward" else "cotangents of rows"
            yield self._collective("layer", phase, "all-to-all", of, "expert", sent, False, 2)

    def _collective(
        self, part: str, phase: str, what: str, of: str, over: str, sent: int, can_overlap: bool = True, times: int = 1
    ) -> Step:
        n, in_host = self.mesh[over], self.in_host[over]
        ways = 2 if what == "all-reduce" else 1
        gbytes = (self.links.exchange_gbytes if what == "all-to-all" else self.links.ring_gbytes)(n, in_host)
        ms = times * ways * sent * (n - 1) / n / gbytes / 1e6
        return Step(part, phase, what, of, over, times * sent, ms, can_overlap, gbytes)


def _three(m: int, k: int, n: int) -> tuple[GemmShape, GemmShape, GemmShape]:
    """A product, and the products that compute the cotangents of a, with b transposed, and of b, with a transposed."""
    return GemmShape(m, n, k), GemmShape(m, k, n, transpose_b=True), GemmShape(k, n, m)


def _three_of_groups(m: int, k: int, n: int, groups: int) -> tuple[GemmShape, GemmShape, GemmShape]:
    """The same for a product of m rows in so many equal groups."""
    rows = max(8, m // groups // 8 * 8)
    return (
        GemmShape(m, n, k, ragged="m", groups=groups),
        GemmShape(m, k, n, transpose_b=True, ragged="m", groups=groups),
        GemmShape(k, n, rows, batch=groups, ragged="k", groups=groups),
    )
