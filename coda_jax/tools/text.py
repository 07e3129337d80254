"""The text that `coda.explain` prints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from coda_jax.tiles import arch
from coda_jax.tools.costs import pass_us

if TYPE_CHECKING:
    from coda_jax.tools.explain import Explanation

_MOST_ROWS = 8  # of passes, and of what is kept
_MOST_OTHERS = 5  # of products that are not coda_jax's


def columns(rows: Sequence[Sequence[str]], right: Sequence[int]) -> list[str]:
    """The rows with aligned columns: those of `right` to the right, others to the left; the last is not padded."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=False))
        ]
        lines.append("  ".join([*cells, row[-1]]).rstrip())
    return lines


def explanation(explained: Explanation) -> str:
    """The tables, the advice, and the sources."""
    lines = [
        *_products(explained),
        *_own_attention(explained),
        *_attention(explained),
        *_others(explained),
        *_between(explained),
        *_kept(explained),
    ]
    lines += [f"{count:>5}  {note}" for note, count in explained.notes.items()]
    for plan, count in explained.blocks.items():
        first, *others = plan.splitlines()
        lines += ["", f"{first}, {count} times" if count > 1 else first, *(f"  {line}" for line in others)]
    if explained.advice:
        lines += ["", "advice", *(f"  * {one}" for one in explained.advice)]
    for product in explained.products:
        if product.source:
            lines.append(f"\n// {product.epilogue}: {product.a} @ {product.b}\n{product.source.rstrip()}")
    return "\n".join(lines)


def _products(explained: Explanation) -> Iterator[str]:
    header = ("count", "epilogue", "product", "GFLOP", "MB", "us", "roofline", "XLA's us", "lowered to")
    rows = [header]
    for product, count in explained.products.items():
        reason = product.reason and " ".join(product.reason.split())  # on one line of the table
        target = f"XLA: {reason}" if reason else f"{arch.of(explained.device).name} kernel, {product.tile}"
        numbers = ("",) * 5
        if (cost := product.cost) is not None:
            share = f"{cost.share:.0%} of {cost.bound}" if cost.share is not None else ""
            us = "" if cost.us is None else f"{cost.us:.0f}"
            xla_us = "" if cost.xla_us is None else f"> {cost.xla_us:.0f}"
            numbers = (_short(cost.flops / 1e9), _short(cost.bytes / 1e6), us, share, xla_us)
        rows.append((str(count), product.epilogue, f"{product.a} @ {product.b}", *numbers, target))
    used = [i for i in range(len(header)) if i < 3 or any(row[i] for row in rows[1:])]
    right = [used.index(i) for i in (0, 3, 4, 5, 7) if i in used]
    yield from columns([[row[i] for i in used] for row in rows], right)
    totals = explained.totals
    if totals.products_ms:
        left_out = f"; {totals.untimed} products have no time" if totals.untimed else ""
        yield (
            f"products, as on an {explained.device}: {totals.products_ms:.{_places(totals.products_ms)}f} ms, "
            f"{totals.roofline_ms / totals.products_ms:.0%} of the roofline{left_out}"
        )
        if totals.xla_ms:
            places = _places(totals.xla_ms)
            yield f"in XLA's form at least {totals.xla_ms:.{places}f} ms in place of {totals.fused_ms:.{places}f}"


def _own_attention(explained: Explanation) -> Iterator[str]:
    """Calls of `coda.attention`."""
    if not explained.attention_calls:
        return
    header = ("count", "attention", "query", "key, value", "mask", "GFLOP", "pairs", "tiles skipped", "MB", "us")
    rows = [(*header, "TFLOP/s", "lowered to")]
    for one, count in explained.attention_calls.items():
        target = (
            f"{arch.of(explained.device).name} kernels"
            if one.reason is None
            else f"XLA: {' '.join(one.reason.split())}"
        )
        each = f", on each device's part over {', '.join(one.over)}" if one.over else ""
        size = None if one.bytes_read is None or one.bytes_written is None else one.bytes_read + one.bytes_written
        numbers = (
            "" if one.flops is None else _short(one.flops / 1e9),
            "" if one.pairs is None else f"{one.pairs:.0%}",
            "" if one.skipped is None else f"{one.skipped:.0%}",
            "" if size is None else _short(size / 1e6),
            "" if one.us is None else f"{one.us:.0f}",
            "" if one.tflops is None else f"{one.tflops:.0f}",
        )
        keys = one.key if one.key == one.value else f"{one.key}, {one.value}"
        name = "backward" if one.is_backward else "forward"
        rows.append((str(count), name, one.query, keys, one.mask, *numbers, target + each))
    used = [i for i in range(len(rows[0])) if i < 5 or any(row[i] for row in rows[1:])]
    right = [used.index(i) for i in (0, *range(5, 11)) if i in used]
    yield ""
    yield from columns([[row[i] for i in used] for row in rows], right)
    if (ms := explained.totals.attention_ms) > 0:
        yield f"attention, by rates of {arch.of(explained.device).name}: about {ms:.{_places(ms)}f} ms"


def _attention(explained: Explanation) -> Iterator[str]:
    if not explained.attention:
        return
    forward, backward = (
        [(one, count) for one, count in explained.attention.items() if one.is_backward == is_backward]
        for is_backward in (False, True)
    )
    each = [
        f"{sum(count for _, count in ones)} {name}, "
        f"{_short(sum(one.bytes_read + one.bytes_written for one, _ in ones) / len(ones) / 1e6)} MB each"
        for name, ones in (("forward", forward), ("backward", backward))
        if ones
    ]
    inside = f"; they have {explained.attention_products} products inside" if explained.attention_products else ""
    yield f"attention, no time known: {'; '.join(each)}{inside}"


def _others(explained: Explanation) -> Iterator[str]:
    """The largest products that are neither coda_jax's nor attention's."""
    others = sorted(explained.other_products.items(), key=lambda item: -(item[0].flops or 0) * item[1])
    besides = " nor attention's" if explained.attention_products else ""
    is_not = "neither" if besides else "not"
    if not others:
        yield f"{0:>5}  products that are {is_not} coda_jax's{besides}"
        return
    unknown = sum(count for one, count in others if one.flops is None)
    all_of_them = f"{_short(explained.totals.other_flops / 1e9)} GFLOP{_on_all_devices(explained)}"
    all_of_them += f", and {unknown} whose FLOPs nobody knows" if unknown else ""
    yield ""
    yield f"{sum(explained.other_products.values())} products that are {is_not} coda_jax's{besides}: {all_of_them}"
    rows = [("count", "product", "GFLOP", "MB", "made in")]
    for one, count in others[:_MOST_OTHERS]:
        kind = "" if one.operation == "dot_general" else f"{one.operation}: "
        gflop, megabytes = ("" if x is None else _short(x / unit) for x, unit in ((one.flops, 1e9), (one.bytes, 1e6)))
        where = f"{one.source or '-'}{', backward' if one.is_backward else ''}"
        rows.append((str(count), f"{kind}{one.a} @ {one.b}", gflop, megabytes, where))
    yield from columns(rows, (0, 2, 3))
    if rest := others[_MOST_OTHERS:]:
        flops = sum((one.flops or 0) * count for one, count in rest)
        yield f"{sum(count for _, count in rest):>5}  smaller ones, {_short(flops / 1e9)} GFLOP in all"


def _between(explained: Explanation) -> Iterator[str]:
    passes = sorted(explained.passes.items(), key=lambda item: -item[0].bytes * item[1])
    totals = explained.totals
    if not totals.passes_bytes:
        return
    time = "" if totals.passes_ms is None else f", {totals.passes_ms:.{_places(totals.passes_ms)}f} ms"
    yield ""
    yield f"passes left to XLA{_on_all_devices(explained)}: {_short(totals.passes_bytes / 1e6)} MB{time}"
    shown = [(one, count) for one, count in passes[:_MOST_ROWS] if one.bytes * count > totals.passes_bytes / 200]
    rows = [("count", "MB", "us", "operation", "largest array", "between")]
    for one, count in shown:
        us = pass_us(one.bytes, explained.device) if explained.num_devices == 1 else None
        between = f"{_few(one.after, ', ') or '-'} -> {_few(one.before, ', ') or '-'}"
        told = "" if us is None else f"{us:.0f}"
        rows.append(
            (str(count), _short(one.bytes / 1e6), told, _few(one.operation.split("+"), "+"), one.array, between)
        )
    yield from columns(rows, (0, 1, 2))
    if rest := passes[len(shown) :]:
        megabytes = sum(one.bytes * count for one, count in rest)
        yield f"{sum(count for _, count in rest):>5}  smaller ones, {_short(megabytes / 1e6)} MB in all"


def _kept(explained: Explanation) -> Iterator[str]:
    if not explained.kept:
        return
    yield ""
    yield f"kept for the backward pass{_on_all_devices(explained)}: {explained.totals.kept_bytes / 2**20:.0f} MiB"
    kept = sorted(explained.kept.items(), key=lambda item: -item[0].bytes * item[1])
    rows = [("count", "MiB in all", "name", "array", "made by")]
    for one, count in kept[:_MOST_ROWS]:
        rows.append((str(count), f"{one.bytes * count / 2**20:.0f}", one.name or "-", one.array, one.maker))
    yield from columns(rows, (0, 1))
    if rest := kept[_MOST_ROWS:]:
        yield f"{sum(count for _, count in rest):>5}  others, {sum(one.bytes * n for one, n in rest) / 2**20:.0f} MiB"


def _on_all_devices(explained: Explanation) -> str:
    return f", on {explained.num_devices} devices together" if explained.num_devices > 1 else ""


def _few(names: Sequence[str], separator: str) -> str:
    """The names, joined; at most four, or three and the number of others."""
    return separator.join(names if len(names) <= 4 else [*names[:3], f"{len(names) - 3} more"])


def _short(value: float) -> str:
    """The value with three digits, or all its digits before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _places(value: float) -> int:
    return 1 if value >= 10 else 3
