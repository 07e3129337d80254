"""`coda.compare`: the costs of two functions side by side, such as a step in plain JAX and one with the library."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax

from coda_jax.jaxprs.traced import traced
from coda_jax.tiles.table import attached_device
from coda_jax.tools.devices import NEAR as NEAR
from coda_jax.tools.devices import fits, fraction_note, gib_of_chip
from coda_jax.tools.explain import Explanation, explain
from coda_jax.tools.held import Memory
from coda_jax.tools.text import columns

Function = Callable[..., Any]
_GIB = 2**30
_MOST_NAMED = 4  # products without a time
# The least and the most of measured over expected milliseconds of the passes of a plain Llama-3-1B's step, unrolled,
# scanned and with remat, on an H200 and an H100. They are too far apart for a single number.
PLAIN_PASSES = 0.81, 1.42


@dataclasses.dataclass(frozen=True)
class Figures:
    """One function's column of a comparison. Times are expected ones, of one call on one device.

    Attributes:
      products: the number of products, without attention's.
      kernels: how many of them are kernels of the library.
      gflop: of the products with known sizes.
      products_ms: of the products with a time; one that is not the library's has the time of the library's kernel
        without an epilogue.
      untimed_products: how many have no time.
      passes: passes left to XLA between products.
      passes_mb: that these read and write.
      passes_ms: the least and the most; equal where the estimate is one number. None on several devices. If a
        function's FLOPs are mostly plain JAX's, they are the estimate times the measured range, `PLAIN_PASSES`.
      attention: calls of attention.
      attention_ms: of `coda.attention`'s kernels, about.
      untimed_attention: how many calls have no time.
      kept_gib: kept for the backward pass.
      arguments_gib, results_gib: of all leaves, each once; arguments that are returned count only as arguments.
      reused_gib: of results in the memory of donated arguments.
      temporaries_gib: held at once beside these, an estimate; see `coda_jax.tools.held`.
      xla_temporaries_gib: the same by XLA's analysis of the compiled function; None if it was not compiled.
      gib: all memory that is held at once, with XLA's figures if there are any.
      fits: whether the chip has so much. None if its memory is not known, if the function runs on several devices and
        was not compiled, and if an estimate is within a factor of 1.15 of the chip's memory.
    """

    products: int
    kernels: int
    gflop: float
    products_ms: float
    untimed_products: int
    passes: int
    passes_mb: float
    passes_ms: tuple[float, float] | None
    attention: int
    attention_ms: float
    untimed_attention: int
    kept_gib: float
    arguments_gib: float
    results_gib: float
    reused_gib: float
    temporaries_gib: float
    xla_temporaries_gib: float | None
    gib: float
    fits: bool | None

    @property
    def ms(self) -> tuple[float, float] | None:
        """The least and the most of products and attention with a time, and passes; what is untimed is left out."""
        if self.passes_ms is None:
            return None
        kernels_ms = self.products_ms + self.attention_ms
        return kernels_ms + self.passes_ms[0], kernels_ms + self.passes_ms[1]

    @property
    def temporaries_ratio(self) -> float | None:
        """Estimated over XLA's temporaries; None if XLA's are not known, or zero."""
        return self.temporaries_gib / self.xla_temporaries_gib if self.xla_temporaries_gib else None


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The costs of two functions side by side; printed as two columns.

    Attributes:
      plain, ours: the explanation of each by `coda.explain`.
      plain_compiled, ours_compiled: the memory of one device by XLA's analysis of the function compiled for the
        attached GPU; None if it was not compiled.
    """

    plain: Explanation
    ours: Explanation
    plain_compiled: Memory | None = None
    ours_compiled: Memory | None = None

    @property
    def device(self) -> str | None:
        """The kind of GPU of the figures."""
        return self.ours.device

    @property
    def gib_of_chip(self) -> int | None:
        """The device's memory by its data sheet; None if it is not known."""
        return gib_of_chip(self.device)

    @property
    def columns(self) -> tuple[Figures, Figures]:
        """The figures of the plain function, and ours."""
        return _figures(self.plain, self.plain_compiled), _figures(self.ours, self.ours_compiled)

    @property
    def _ms_alike(self) -> tuple[tuple[float, float] | None, ...]:
        """The milliseconds of each column, as `Figures.ms`, without what has no time in the other.

        Attention counts if it has a time in both. A product is the other's if it has as many operations.
        """
        sides, columns = (self.plain, self.ours), self.columns
        has_attention = not any(one.untimed_attention for one in columns)
        found: list[tuple[float, float] | None] = []
        for side, other, one in zip(sides, reversed(sides), columns, strict=True):
            left_out = _us_of(side, _flops_without_time(other)) / 1e3 + (0.0 if has_attention else one.attention_ms)
            found.append(None if one.ms is None else (one.ms[0] - left_out, one.ms[1] - left_out))
        return tuple(found)

    def as_dict(self) -> dict[str, Any]:
        """The figures for a program to read: dicts, lists, strings, numbers and None, as `json.dumps` accepts them.

        All products and passes have `comparison.plain.as_dict()` and `comparison.ours.as_dict()`.
        """
        figures: dict[str, Any] = {"device": self.device, "gib_of_chip": self.gib_of_chip}
        for name, one in zip(("plain", "ours"), self.columns, strict=True):
            each = dataclasses.asdict(one) | {"ms": one.ms, "temporaries_ratio": one.temporaries_ratio}
            figures[name] = {key: list(x) if isinstance(x, tuple) else x for key, x in each.items()}
        return figures

    def __str__(self) -> str:
        both = self.columns
        alike = dict(zip(map(id, both), self._ms_alike, strict=True))
        chip = "" if self.gib_of_chip is None else f", of {self.gib_of_chip} that the chip has"
        compiled = any(one.xla_temporaries_gib is not None for one in both)
        rows: list[tuple[str, Callable[[Figures], str]]] = [
            ("products", lambda x: str(x.products)),
            ("  kernels of the library's", lambda x: str(x.kernels)),
            ("  GFLOP", lambda x: _short(x.gflop)),
            ("  ms", lambda x: _short(x.products_ms) if x.products > x.untimed_products else "-"),
            ("passes left to XLA", lambda x: str(x.passes)),
            ("  MB", lambda x: _short(x.passes_mb)),
            ("  ms", lambda x: _range(x.passes_ms)),
            ("attention, calls", lambda x: str(x.attention)),
            ("  ms", lambda x: _short(x.attention_ms) if x.attention > x.untimed_attention else "-"),
            ("ms in all that has a time in both", lambda x: _range(alike[id(x)])),
            ("no time known", _untimed),
            ("kept for the backward pass, GiB", lambda x: _short(x.kept_gib)),
            ("arguments, GiB", lambda x: _short(x.arguments_gib)),
            ("results, GiB", lambda x: _short(x.results_gib) + _reused(x)),
            ("temporaries, GiB, estimate", lambda x: _short(x.temporaries_gib)),
            *([("temporaries, GiB, XLA's", _xla_temporaries)] if compiled else []),
            (f"GiB in all{chip}", lambda x: f"{_short(x.gib)}{_FITS[x.fits] if chip else ''}"),
        ]
        table = [("", "plain", "ours"), *((name, *map(told, both)) for name, told in rows)]
        return "\n".join([f"expected on an {self.device}", *columns(table, ()), *self._notes()])

    def _notes(self) -> list[str]:
        both = self.columns
        notes = [
            "ms are expected ones, by the cost model; of products that are not the library's, those of its kernel "
            "without an epilogue"
        ]
        if any(one.passes_ms and one.passes_ms[0] < one.passes_ms[1] for one in both):
            least, most = PLAIN_PASSES
            notes.append(
                "passes of plain JAX are an estimate: in a Llama-3-1B's step XLA took "
                f"{least} to {most} of the expected time for them"
            )
        notes.append("what a scan copies of its slices and stacked results is in no time")
        notes.append(
            "what is kept, as the jaxpr has it, is a part of the temporaries: 0.39 to 1.01 of XLA's in a "
            "Llama-3-1B's steps"
        )
        for name, explained in (("plain", self.plain), ("ours", self.ours)):
            if named := _named_without_time(explained):
                notes.append(f"no time is known, {name}: {named}")
        if any(one.xla_temporaries_gib is None for one in both):
            notes.append("temporaries are estimated from the jaxpr: 0.91 to 1.09 of XLA's in a Llama-3-1B's steps")
        if (devices := max(self.plain.num_devices, self.ours.num_devices)) > 1:
            notes.append(f"passes, kept and estimated memory are those of {devices} devices together")
        needed = max((one.gib for one in both if one.fits is not False), default=0.0)
        if setting := fraction_note(needed, self.gib_of_chip):
            notes.append(setting)
        return [f"* {note}" for note in notes]


_FITS = {True: ", fits", False: ", does not fit", None: ", not known whether it fits"}


def compare(
    plain: Function | tuple[Function, Any],
    ours: Function | tuple[Function, Any],
    *args: Any,
    device: str | None = None,
    compiled: bool | None = None,
    **kwargs: Any,
) -> Comparison:
    """The costs of two functions on a GPU, side by side, such as a step in plain JAX and the same with the library.

    It is not a form of `coda.explain`, whose second positional argument is the first one of the explained function,
    and may itself be callable.

    Args:
      plain, ours: traceable by JAX, jitted or not; or a pair of such a function and its positional arguments, as
        `(step, (params, batch))`, if the two have different parameters.
      *args: arguments of each that is no pair, arrays or `jax.ShapeDtypeStruct`s.
      device: the kind of GPU, "H200" or "H100"; default the attached one, or an H200 if there is none.
      compiled: whether to compile both and ask XLA for their memory. This needs an attached GPU of this kind, and is
        the default if there is one. XLA's temporaries for a CPU are not a GPU's, so elsewhere there are only estimates.
      **kwargs: keyword arguments of both.

    Raises:
      ValueError: a device of which no times are known; `args` although both are pairs; or `compiled=True` without a GPU
        of this kind.
      TypeError: a pair whose second element is no tuple or list.

    Example: `print(coda.compare((plain_step, (plain_params, batch)), (step, (params, batch)), device="H100"))`
    """
    if args and isinstance(plain, tuple) and isinstance(ours, tuple):
        raise ValueError("each function has arguments of its own: nobody takes *args")
    sides = [_side("plain", plain, args), _side("ours", ours, args)]
    first, second = (
        explain(function, *arguments, platform="cuda", device=device, **kwargs) for function, arguments in sides
    )
    is_here = jax.default_backend() == "gpu" and attached_device() == first.device
    if compiled and not is_here:
        raise ValueError(f"{compiled=}: XLA tells the memory of an {first.device} only where one is attached")
    by_xla: list[Memory | None] = [None, None]
    if is_here and compiled is not False:
        by_xla = [_by_xla(function, arguments, kwargs) for function, arguments in sides]
    return Comparison(first, second, *by_xla)


def _side(name: str, side: Function | tuple[Function, Any], args: tuple[Any, ...]) -> tuple[Function, tuple[Any, ...]]:
    """A function and its arguments."""
    if not isinstance(side, tuple):
        return side, args
    if len(side) != 2 or not callable(side[0]) or not isinstance(side[1], tuple | list):
        raise TypeError(f"{name} is a tuple; it must be a function and a tuple of its arguments, (step, (params, x))")
    return side[0], tuple(side[1])


def _by_xla(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Memory | None:
    """The function's memory by XLA, which compiles it for JAX's default device; None if XLA gives none."""
    analysis: Any = traced(function, args, kwargs).lower().compile().memory_analysis()
    if analysis is None:
        return None
    return Memory(
        analysis.argument_size_in_bytes,
        analysis.output_size_in_bytes,
        analysis.alias_size_in_bytes,
        analysis.temp_size_in_bytes,
    )


def _figures(explained: Explanation, compiled: Memory | None) -> Figures:
    totals, memory, others = explained.totals, explained.memory, explained.other_products
    attention_calls = explained.attention_calls
    timed = [(one.us, count) for one, count in others.items() if one.us is not None]
    passes_ms = None
    if totals.passes_ms is not None:
        least, most = PLAIN_PASSES if totals.other_flops > totals.flops else (1.0, 1.0)
        passes_ms = totals.passes_ms * least, totals.passes_ms * most
    gib = (compiled or memory).bytes / _GIB
    return Figures(
        products=sum(explained.products.values()) + sum(others.values()),
        kernels=explained.kernels,
        gflop=(totals.flops + totals.other_flops) / 1e9,
        products_ms=totals.products_ms + sum(us * count for us, count in timed) / 1e3,
        untimed_products=totals.untimed + sum(others.values()) - sum(count for _, count in timed),
        passes=sum(explained.passes.values()),
        passes_mb=totals.passes_bytes / 1e6,
        passes_ms=passes_ms,
        attention=sum(explained.attention.values()) + sum(attention_calls.values()),
        attention_ms=totals.attention_ms,
        untimed_attention=sum(explained.attention.values())
        + sum(count for one, count in attention_calls.items() if one.us is None),
        kept_gib=totals.kept_bytes / _GIB,
        arguments_gib=memory.arguments / _GIB,
        results_gib=memory.results / _GIB,
        reused_gib=memory.reused / _GIB,
        temporaries_gib=memory.temporaries / _GIB,
        xla_temporaries_gib=None if compiled is None else compiled.temporaries / _GIB,
        gib=gib,
        fits=_fits(gib, gib_of_chip(explained.device), explained.num_devices, compiled is not None),
    )


def _fits(gib: float, chip_gib: int | None, num_devices: int, is_compiled: bool) -> bool | None:
    if num_devices > 1 and not is_compiled:
        return None
    return fits(gib, chip_gib, is_estimate=not is_compiled)


def _untimed(one: Figures) -> str:
    each = [(one.untimed_products, "product"), (one.untimed_attention, "attention call")]
    return ", ".join(f"{count} {name}{'s' * (count > 1)}" for count, name in each if count) or "-"


def _products_without_time(explained: Explanation) -> Iterator[tuple[str, int | None, int]]:
    """The products that have no time: in words, their operations, and how often each is executed."""
    for product, count in explained.products.items():
        if product.cost is None or product.cost.us is None:
            reason = f", in XLA's form: {' '.join(product.reason.split())}" if product.reason else ""
            flops = None if product.cost is None else product.cost.flops
            yield f"{product.epilogue}, {product.a} @ {product.b}{reason}", flops, count
    for one, count in explained.other_products.items():
        if one.us is None:
            where = f" in {one.source}" if one.source else ""
            yield f"{one.operation}, {one.a} @ {one.b}{where}", one.flops, count


def _named_without_time(explained: Explanation) -> str:
    """The products and calls that have no time, the largest first; at most four kinds, and the number of others."""
    found = sorted(_products_without_time(explained), key=lambda one: -(one[1] or 0) * one[2])
    each = [f"{count} {text}" for text, _, count in found[:_MOST_NAMED]]
    rest = sum(count for _, _, count in found[_MOST_NAMED:])
    calls = sum(explained.attention.values())
    each += [f"{rest} other products"] if rest else []
    each += [f"{calls} calls of jax.nn.dot_product_attention"] if calls else []
    calls = sum(count for one, count in explained.attention_calls.items() if one.us is None)
    return "; ".join([*each, *([f"{calls} calls of coda.attention"] if calls else [])])


def _flops_without_time(explained: Explanation) -> collections.Counter[int]:
    """The operations of products without a time, and how many products have so many."""
    counts = collections.Counter[int]()
    for _, flops, count in _products_without_time(explained):
        if flops is not None:
            counts[flops] += count
    return counts


def _us_of(explained: Explanation, flops: collections.Counter[int]) -> float:
    """The microseconds of as many products with these operations, of those that have a time."""
    timed = [(x.cost.flops, x.cost.us, n) for x, n in explained.products.items() if x.cost and x.cost.us is not None]
    timed += [(x.flops, x.us, n) for x, n in explained.other_products.items() if x.flops and x.us is not None]
    left, total = collections.Counter(flops), 0.0
    for size, us, count in timed:
        taken = min(count, left[size])
        left[size] -= taken
        total += us * taken
    return total


def _xla_temporaries(one: Figures) -> str:
    if one.xla_temporaries_gib is None:
        return "-"
    ratio = one.temporaries_ratio
    return _short(one.xla_temporaries_gib) + (f"; the estimate is {ratio:.2f} of it" if ratio is not None else "")


def _reused(one: Figures) -> str:
    return f", {_short(one.reused_gib)} of it in the place of arguments" if one.reused_gib else ""


def _range(ms: tuple[float, float] | None) -> str:
    if ms is None:
        return "-"
    least, most = map(_short, ms)
    return least if least == most else f"{least} to {most}"


def _short(value: float) -> str:
    """The value with three digits, or all its digits before the point."""
    if 0 < value < 1e-3:
        return "< 0.001"
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"
