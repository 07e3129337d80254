"""`coda.explain`: the lowering of a function's products, with reasons and costs, and the passes between them."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.extend import core

from coda_jax.attend.primitive import FORMS
from coda_jax.fusion.fuse import Fused
from coda_jax.jaxprs.graph import Graph, graphs_of
from coda_jax.jaxprs.traced import asked_shardings, needed, traced
from coda_jax.jaxprs.walk import equations_in
from coda_jax.lowering.kernel import readable_source
from coda_jax.lowering.launch import problem_of
from coda_jax.lowering.select import Selection, select
from coda_jax.primitives.fallbacks import coda_note_p
from coda_jax.primitives.gemm_primitive import PRIMITIVES
from coda_jax.primitives.plan_text import coda_plan_text_p
from coda_jax.tiles.arch import as_if_attached
from coda_jax.tiles.table import attached_device
from coda_jax.tools import text
from coda_jax.tools.advice import Advice, Calls, advise, remedy_of
from coda_jax.tools.attention import AttentionCall, attention_call
from coda_jax.tools.costs import Cost, cost_of, pass_us, shard_of
from coda_jax.tools.devices import DEFAULT_DEVICE, device_named
from coda_jax.tools.held import Memory, held, memory_of
from coda_jax.tools.left import Left, left_in
from coda_jax.tools.others import OtherProduct, find_attention, products_of_others
from coda_jax.tools.passes import Attention, Kept, LeftToXla, Pass, left_to_xla
from coda_jax.tools.unfused import Unfused, unfused


@dataclasses.dataclass(frozen=True)
class Product:
    """One kind of product in a function.

    Attributes:
      epilogue: its name, "gemm" for a bare product.
      a, b: types of the factors, `^T` if they are stored transposed.
      reason: why it takes XLA's form; None if it is the Hopper kernel.
      tile: rows and columns of the kernel's tiles, and what chose them; None if it takes XLA's form.
      source: the kernel's CUDA source, if it was asked for; None if it takes XLA's form.
      cost: of one execution, on one device's shards if the product is sharded over a mesh. None if a size is symbolic,
        or the shards are known only when XLA has partitioned the program.
      remedy: the change by which a product in XLA's form would become the kernel, if there is one.
    """

    epilogue: str
    a: str
    b: str
    reason: str | None
    tile: str | None = None
    source: str | None = None
    cost: Cost | None = None
    remedy: str | None = None


@dataclasses.dataclass(frozen=True)
class Totals:
    """Sums over a call of the function on one device; milliseconds are expected ones.

    Attributes:
      flops: of all coda_jax's products with known sizes.
      products_ms: of kernels whose time is known.
      untimed: how many products have no time: they take XLA's form, or nothing like them has been measured.
      roofline_ms: the least time of the timed products by the chip's data sheet.
      xla_ms: the least time of XLA's forms of the products that have both times.
      fused_ms: the time of these same products as kernels.
      passes_bytes, passes_ms: of the passes left to XLA between products; no time on several devices.
      kept_bytes: of the arrays kept for the backward pass.
      other_flops: of `Explanation.other_products`, if known. For several devices they are those of unsharded arrays, on
        all devices together, except inside a shard_map.
      attention_flops: of `Explanation.attention_calls`, if known.
      attention_ms: of those that are kernels, if known.
    """

    flops: int
    products_ms: float
    untimed: int
    roofline_ms: float
    xla_ms: float
    fused_ms: float
    passes_bytes: int
    passes_ms: float | None
    kept_bytes: int
    other_flops: int = 0
    attention_flops: int = 0
    attention_ms: float = 0.0


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The products of a function and the passes between them, printed as tables; below them the kernels' sources, if
    these were asked for.

    Attributes:
      products: how often each is executed in one call. The body of a scan counts for each step, that of a while loop
        once, as do all branches of a cond.
      others: how many products are not coda_jax's: `attention_products`, and all of `other_products`.
      notes: notes of blocks and operators, such as why a map is a pass of XLA's, and how often each occurs.
      device: the kind of device of the times; None on another platform.
      passes: XLA's passes between products, by the function's jaxpr; see `coda_jax.tools.passes`.
      attention: calls of `jax.nn.dot_product_attention`, each counted as one kernel.
      kept: the arrays kept for the backward pass, with their counts.
      advice: changes that a user could make.
      blocks: the plans of blocks and fused functions in words: which map is computed in which epilogue, and why others
        are not; and how often each runs.
      num_devices: the number of devices that the program runs on. For several, passes and kept arrays are unsharded
        ones, of all devices together, except inside a shard_map.
      other_products: products that are neither coda_jax's nor attention's, and how often each is executed, such as
        those of an optimizer, of a router, or of layers in plain JAX.
      attention_products: the number of products inside `attention`; on a machine with a GPU, cuDNN's calls have none.
      memory: the memory that the function holds, by its jaxpr; for several devices, that of unsharded arrays.
      attention_calls: calls of `coda.attention`, forward and backward passes, and how often each is executed.
    """

    products: dict[Product, int]
    others: int
    notes: dict[str, int] = dataclasses.field(default_factory=dict)
    device: str | None = None
    passes: dict[Pass, int] = dataclasses.field(default_factory=dict)
    attention: dict[Attention, int] = dataclasses.field(default_factory=dict)
    kept: dict[Kept, int] = dataclasses.field(default_factory=dict)
    advice: tuple[Advice, ...] = ()
    num_devices: int = 1
    blocks: dict[str, int] = dataclasses.field(default_factory=dict)
    other_products: dict[OtherProduct, int] = dataclasses.field(default_factory=dict)
    attention_products: int = 0
    memory: Memory = dataclasses.field(default_factory=lambda: Memory(0, 0))
    attention_calls: dict[AttentionCall, int] = dataclasses.field(default_factory=dict)

    @property
    def kernels(self) -> int:
        """How many of the products are Hopper kernels."""
        return sum(count for product, count in self.products.items() if product.reason is None)

    @property
    def totals(self) -> Totals:
        """Sums over one call."""
        costs = [(product.cost, count) for product, count in self.products.items()]
        known = [(cost, count) for cost, count in costs if cost is not None]
        timed = [(cost, count, cost.us) for cost, count in known if cost.us is not None]
        both = [(count, us, cost.xla_us) for cost, count, us in timed if cost.xla_us is not None]
        passes_bytes = sum(one.bytes * count for one, count in self.passes.items())
        passes_us = pass_us(passes_bytes, self.device) if self.num_devices == 1 else None
        return Totals(
            flops=sum(cost.flops * count for cost, count in known),
            products_ms=sum(us * count for _, count, us in timed) / 1e3,
            untimed=sum(self.products.values()) - sum(count for _, count, _ in timed),
            roofline_ms=sum((cost.roofline_us or 0.0) * count for cost, count, _ in timed) / 1e3,
            xla_ms=sum(xla_us * count for count, _, xla_us in both) / 1e3,
            fused_ms=sum(us * count for count, us, _ in both) / 1e3,
            passes_bytes=passes_bytes,
            passes_ms=None if passes_us is None else passes_us / 1e3,
            kept_bytes=sum(one.bytes * count for one, count in self.kept.items()),
            other_flops=sum((one.flops or 0) * count for one, count in self.other_products.items()),
            attention_flops=sum((one.flops or 0) * count for one, count in self.attention_calls.items()),
            attention_ms=sum((one.us or 0.0) * count for one, count in self.attention_calls.items()) / 1e3,
        )

    def as_dict(self) -> dict[str, Any]:
        """The same for a program to read: dicts, lists, strings, numbers and None, as `json.dumps` accepts them."""

        def rows(counted: Mapping[Any, int]) -> list[dict[str, Any]]:
            return [{"count": count, **dataclasses.asdict(one)} for one, count in counted.items()]

        products = rows(self.products)
        for row, product in zip(products, self.products, strict=True):
            if product.cost is not None:
                row["cost"] |= {"roofline_share": product.cost.share, "tflops": product.cost.tflops}
        passes = rows(self.passes)
        for row, one in zip(passes, self.passes, strict=True):
            row["us"] = pass_us(one.bytes, self.device)
        attention_calls = rows(self.attention_calls)
        for row, call in zip(attention_calls, self.attention_calls, strict=True):
            row["tflops"] = call.tflops
        return {
            "device": self.device,
            "num_devices": self.num_devices,
            "kernels": self.kernels,
            "products": products,
            "others": self.others,
            "other_products": rows(self.other_products),
            "attention_products": self.attention_products,
            "passes": passes,
            "attention": rows(self.attention),
            "attention_calls": attention_calls,
            "kept": rows(self.kept),
            "memory": dataclasses.asdict(self.memory),
            "notes": [{"count": count, "note": note} for note, count in self.notes.items()],
            "blocks": [{"count": count, "plan": plan} for plan, count in self.blocks.items()],
            "advice": [dataclasses.asdict(one) for one in self.advice],
            "totals": dataclasses.asdict(self.totals),
        }

    def plot(self, where: Any) -> Any:
        """Plots a bar for each product, with the chip's limit and the time of XLA's form; and the roofline.

        Args:
          where: the path of the image file, or two matplotlib axes, for the bars and for the roofline.

        Returns:
          The matplotlib figure.

        Raises:
          ImportError: matplotlib is not installed.
          ValueError: no product has a time.
        """
        from coda_jax.tools import plot

        return plot.explanation(self, where)

    def __str__(self) -> str:
        return text.explanation(self)


def explain(
    function: Callable[..., Any],
    *args: Any,
    platform: str | None = None,
    device: str | None = None,
    source: bool = False,
    **kwargs: Any,
) -> Explanation:
    """The lowering of each product of function(*args, **kwargs), its reason, and its cost. Nothing is compiled or run.

    Args:
      function: traceable by JAX; jitted or not.
      *args, **kwargs: its arguments, arrays or `jax.ShapeDtypeStruct`s, and modules and optimizers of flax.nnx: the
        final values of their variables are among the results.
      platform: "cuda", to see on any machine what a Hopper GPU would run, or "cpu"; default the one JAX uses, and
        "cuda" if a device is named.
      device: the kind of GPU to explain for, by JAX's name or a part of it, "H200" or "H100"; default the attached one.
        Without one, times are an H200's, and tiles are those of an exported program, from no table.
      source: also show each kernel's CUDA source, with the epilogue's function, its file and line, and its parameters
        by their names. The compiled source, also in CODA_JAX_DUMP_DIR, has `column_vector_0` in the place of `rstd`, so
        that functions with the same mathematics share a kernel.

    Raises:
      ValueError: another platform, or a device of which no times are known.

    Example: `print(coda.explain(jax.grad(loss), params, batch, device="H200"))`, and of one product
    `print(coda.explain(coda.gemm, a, b, platform="cuda", source=True))`
    """
    return explained(function, args, kwargs, platform, device, source)[0]


def explained(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    platform: str | None = None,
    device: str | None = None,
    source: bool = False,
    *,
    static_numbers: bool = False,
) -> tuple[Explanation, dict[Left, int]]:
    """`explain`, and why its passes are no kernel's: one for each pass of one reason, line and size, with its count.

    Args:
      static_numbers: whether Python's numbers among the arguments stay what they are.
    """
    if platform not in (None, "cpu", "gpu", "cuda"):
        raise ValueError(f"{platform=}; it must be 'cuda', 'gpu', 'cpu' or None")
    named = None if device is None else device_named(device)
    if named is not None and platform == "cpu":
        raise ValueError(f"{platform=} with {device=}; a device is a GPU")
    platform = platform or ("cuda" if named else jax.default_backend())
    told = named or attached_device() or DEFAULT_DEVICE if platform in ("gpu", "cuda") else None
    products, notes = collections.Counter[Product](), collections.Counter[str]()
    blocks, attention_calls = collections.Counter[str](), collections.Counter[AttentionCall]()
    remedies: dict[str, str] = {}
    known: dict[Hashable, Product] = {}
    trace = traced(function, args, kwargs, static_numbers=static_numbers or isinstance(function, Fused))
    jaxpr = needed(trace)
    calls = Calls(jaxpr)
    calls_of_equations, num_devices = equations_in(jaxpr, (args, kwargs, asked_shardings(function, args, kwargs)))
    for equation, times in calls_of_equations:
        if equation.primitive in PRIMITIVES:
            with as_if_attached(named):
                product = _product_once(known, equation, platform, num_devices, source, told)
            products[product] += times
            calls.add(product, equation)
        elif equation.primitive in FORMS:
            with as_if_attached(named):
                attention_calls[attention_call(equation, platform, num_devices)] += times
        elif equation.primitive is coda_note_p:
            notes[equation.params["message"]] += times
            remedies[equation.params["message"]] = equation.params["remedy"]
        elif equation.primitive is coda_plan_text_p:
            blocks[equation.params["text"]] += times
    graphs = graphs_of(jaxpr)
    find_attention(graphs)
    left = [left_to_xla(graph) for graph in graphs]
    passes, attention, kept, between, reasons = _left_to_xla(graphs, left)
    others, in_attention = products_of_others(graphs, told)
    found = Explanation(
        products=dict(products),
        others=sum(others.values()) + in_attention,
        notes=dict(notes),
        device=told,
        passes=passes,
        attention=attention,
        kept=kept,
        advice=advise(products, calls, between, graphs, notes, remedies, told),
        num_devices=num_devices,
        blocks=dict(blocks),
        other_products=others,
        attention_products=in_attention,
        memory=memory_of(trace, held(graphs, [each.moved for each in left])),
        attention_calls=dict(attention_calls),
    )
    return found, reasons


def _left_to_xla(
    graphs: Iterable[Graph], left: Iterable[LeftToXla]
) -> tuple[dict[Pass, int], dict[Attention, int], dict[Kept, int], dict[Unfused, int], dict[Left, int]]:
    """The work that all graphs of a function leave to XLA; arrays that a loop's body keeps count once."""
    passes, attention, kept = collections.Counter[Pass](), collections.Counter[Attention](), collections.Counter[Kept]()
    between, reasons = collections.Counter[Unfused](), collections.Counter[Left]()
    for graph, (graph_passes, calls, kept_in_graph, _) in zip(graphs, left, strict=True):
        for one in graph_passes:
            passes[one.of] += graph.times
        for call, count in calls.items():
            attention[call] += count * graph.times
        kept.update(kept_in_graph)
        for unmade, count in unfused(graph, graph_passes).items():
            between[unmade] += count * graph.times
        for one_left, count in left_in(graph, graph_passes).items():
            reasons[one_left] += count * graph.times
    return dict(passes), dict(attention), dict(kept), dict(between), dict(reasons)


def _product_once(
    known: dict[Hashable, Product],
    equation: core.JaxprEqn,
    platform: str,
    num_devices: int,
    with_source: bool,
    device: str | None,
) -> Product:
    """As `_product`; `known` are those of one call, which differ by their names alone, as in the layers of a model."""
    spec = equation.params["spec"]
    is_named = with_source or spec.config is not None  # the source has the name, and so may an error
    key = spec if is_named else spec.replace(name=""), tuple(x.aval for x in equation.invars)
    if key not in known:
        known[key] = _product(equation, platform, num_devices, with_source, device)
    return dataclasses.replace(known[key], epilogue=spec.name)


def _product(
    equation: core.JaxprEqn,
    platform: str,
    num_devices: int,
    with_source: bool,
    device: str | None,
) -> Product:
    """The product of an equation, with times of this kind of device."""
    avals: list[Any] = [v.aval for v in equation.invars]
    spec = equation.params["spec"]
    matrices = [jax.core.ShapedArray(x.shape, x.dtype) for x in spec.matrices.flat_types(avals)[:2]]
    a, b = (
        f"{(aval if aval.ndim == matrix.ndim else matrix).str_short()}{'^T' if transposed else ''}"
        for aval, matrix, transposed in zip(avals, matrices, (spec.transpose_a, spec.transpose_b), strict=False)
    )
    product = Product(spec.name, a, b, None)
    if platform not in ("gpu", "cuda"):
        reason = f"the platform is {platform}"
        return dataclasses.replace(product, reason=reason, cost=cost_of(avals, spec, None, None))
    try:
        choice = select(avals, spec, num_devices)
    except ValueError as error:  # a config that does not fit, which the lowering raises
        choice = Selection(str(error))
    shard = shard_of(avals, spec) if choice.over else (avals, spec)
    types, shard_spec = shard or (avals, spec)
    cost = cost_of(types, shard_spec, choice.config, device) if shard else None
    if choice.reason is not None:
        remedy = remedy_of(types, shard_spec, choice.reason)
        return dataclasses.replace(product, reason=choice.reason, cost=cost, remedy=remedy)
    shards = f" {' or '.join(choice.shards)}" if choice.shards else ""
    each = f", on each device's part{shards} over {', '.join(choice.over)}" if choice.over else ""
    if choice.config is None:
        tile = f"its tile chosen once XLA has partitioned the program{each}"
        return dataclasses.replace(product, tile=tile)
    source = readable_source(problem_of(avals, spec), choice.config) if with_source and not choice.over else None
    tile = f"{choice.config.name} ({choice.origin}){each}"
    return dataclasses.replace(product, tile=tile, source=source, cost=cost)
