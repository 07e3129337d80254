"""`coda.fuse.report`: what became of each product of a function, and what that saves."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend import core

from coda_jax.epilogue.dtypes import FLOATS_OF_8_BITS
from coda_jax.fusion.dots import is_derivative
from coda_jax.fusion.first_histories import init
from coda_jax.fusion.fuse import AUX, Fused, fuse, loss_form, unfused
from coda_jax.fusion.histories import ARGUMENT
from coda_jax.fusion.losses.whole_logits import WholeLogits, whole_logits
from coda_jax.fusion.pieces import Options, Piece
from coda_jax.graph.describe import described, made_in, name_of
from coda_jax.graph.values import Product, is_float, source_of
from coda_jax.jaxprs.source_lines import line_in, line_of, module_of, users_line
from coda_jax.jaxprs.traced import of_arrays
from coda_jax.tools.explain import Explanation, explained
from coda_jax.tools.left import Left
from coda_jax.tools.text import columns

IS_KERNEL = "it is a kernel of its own, of an operator, a block or a function fused with other options"


_MOST_LINES = 3  # of a reason


@dataclasses.dataclass(frozen=True)
class FusedProduct:
    """One product of a function.

    Attributes:
      piece: the piece that it is in: the function, "scan", "cond", "while", "checkpoint", "shard_map",
        "custom_vjp", or the fused function that a larger one calls.
      line: of the user's code, and the module or the line of a library that it calls.
      shapes: of its factors, once the axes of rows are one.
      epilogue: the operations that its epilogue does.
      reason: why the product is left as it is; empty if it is not.
      factors: the dtype of its factors.
      unrounded: why `fp8=` does not round them to 8 bits; empty if it does, or is not given.
      count: how many products it stands for: one in each call of a fused function that a larger one calls.
    """

    piece: str
    line: str
    shapes: str
    epilogue: tuple[str, ...]
    reason: str
    factors: str = ""
    unrounded: str = ""
    count: int = 1

    @property
    def place(self) -> str:
        """The piece, and how many calls of it there are."""
        return self.piece if self.count == 1 else f"{self.piece}, {self.count} calls"

    @property
    def rounding(self) -> str:
        """The dtype of its factors, and why it is none of 8 bits."""
        return ": ".join(filter(None, (self.factors, self.unrounded)))


@dataclasses.dataclass(frozen=True)
class Report:
    """A table of what `fuse` makes of a function.

    Attributes:
      name: of the function.
      products: all its products.
      backward: the plans of the derivatives in words, one for each piece.
      plain, fused: what `coda.explain` says of both; None of a function that asks for the value of an array.
      reason: why the function runs as it is; empty if it does not.
      passes_left: the passes that stay XLA's, with why, and how often each runs.
      logits: those of losses over a vocabulary that stay whole, the largest first, and why.
    """

    name: str
    products: tuple[FusedProduct, ...]
    backward: tuple[str, ...]
    plain: Explanation | None
    fused: Explanation | None
    reason: str = ""
    passes_left: Mapping[Left, int] = dataclasses.field(default_factory=dict)
    logits: tuple[WholeLogits, ...] = ()

    def __str__(self) -> str:
        if self.reason or self.plain is None or self.fused is None:
            return f"fuse({self.name}): it runs as it is, for {self.reason}"
        kept, every = (sum(x.count for x in self.products if not (x.reason and flag)) for flag in (True, False))
        rows = [("product", "line", "in", "epilogue")]
        rows += [
            (one.shapes, one.line, one.place, f"left: {one.reason}" if one.reason else ", ".join(one.epilogue) or "-")
            for one in self.products
        ]
        if any(one.unrounded or one.factors in FLOATS_OF_8_BITS for one in self.products):
            last = ["factors", *(one.rounding or "-" for one in self.products)]
            rows = [(*row, text) for row, text in zip(rows, last, strict=True)]  # type: ignore[misc]
        totals = self.plain.totals, self.fused.totals
        megabytes = [(f"{x.passes_bytes / 1e6:.0f} MB", f"{x.kept_bytes / 1e6:.0f} MB") for x in totals]
        lines = [f"fuse({self.name}): {kept} of {every} products are coda_jax's", *columns(rows, ())]
        lines += [
            "",
            *columns(
                [
                    ("", "passes between products", "kept for the backward pass"),
                    *((label, *one) for label, one in zip(("plain", "fused"), megabytes, strict=True)),
                ],
                (1,),
            ),
        ]
        whole = [("logits that stay whole", "line", "why")]
        whole += [(f"{one.bytes / 1e6:.0f} MB", one.line, one.reason) for one in self.logits]
        lines += ["", *columns(whole, ())] if self.logits else []
        return "\n".join([*lines, *(f"\n{text}" for text in self.backward), "", *self._last_lines()])

    @property
    def left(self) -> dict[str, tuple[int, tuple[str, ...]]]:
        """The passes that stay XLA's: for each reason the bytes that they move, and the program's lines, largest first.

        The bytes are all those of `fused.totals.passes_bytes`.
        """
        reasons = {one.line.partition(" (")[0]: one.reason for one in self.products if one.reason}
        moved = collections.Counter[str]()
        lines: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        for one, count in self.passes_left.items():
            reason = reasons.get(one.product or "")
            why = f"{one.why}: {reason}" if reason else one.why
            moved[why] += one.bytes * count
            lines[why][one.source or ""] += one.bytes * count
        sorted_lines = {why: tuple(line for line, _ in of.most_common() if line) for why, of in lines.items()}
        return {why: (count, sorted_lines[why]) for why, count in moved.most_common()}

    def _last_lines(self) -> Iterator[str]:
        """The bytes that stay XLA's, and why."""
        found = self.left
        total = sum(count for count, _ in found.values())
        yield f"stays XLA's: {_megabytes(total)} between products{', for' if total else ''}"
        large = {why: one for why, one in found.items() if one[0] >= total / 100}
        rows = [(_megabytes(count), f"{why}{_at(lines)}") for why, (count, lines) in large.items()]
        if small := {why: count for why, (count, _) in found.items() if why not in large}:
            rows.append((_megabytes(sum(small.values())), f"smaller: {'; '.join(small)}"))
        yield from columns(rows, (0,)) if rows else ()


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.0f} MB" if count >= 1e7 else f"{count / 1e6:.2g} MB"


def _at(lines: Sequence[str]) -> str:
    """Text for lines: at most three, and the number of others."""
    shown = "; ".join(lines[:_MOST_LINES]) + (f"; {len(lines) - _MOST_LINES} more" if len(lines) > _MOST_LINES else "")
    return f" ({shown})" if lines else ""


def report(f: Callable[..., Any], *args: Any, **kwargs: Any) -> Report:
    """As `coda.fuse.report`."""
    fused = (f if isinstance(f, Fused) else fuse(f)).fresh()
    plain_kwargs = {name: x for name, x in kwargs.items() if fused.options.fp8 is None or name != ARGUMENT}
    if fused.is_delayed and ARGUMENT not in kwargs:
        kwargs = {**kwargs, ARGUMENT: init(fused, *args, **kwargs)}
    try:
        function, arrays = of_arrays(fused, args, kwargs, static_numbers=True)
        result = jax.eval_shape(function, *arrays, **(kwargs if function is fused else {}))
    except Exception:
        if not fused.reason:
            raise
        return Report(fused.name, (), (), None, None, fused.reason)  # it cannot be traced
    pieces, reason = list(fused.pieces.made), fused.reason
    kernels = (FusedProduct(fused.name, line, _types(x), (), IS_KERNEL) for x, line in fused.pieces.kernels)
    plain_function, fused_function = fused.plain, fused
    if (form := loss_form(result)) and not any(map(_is_derivative, pieces)):
        plain_function, fused_function = (_with_gradients(g, has_aux=form == AUX) for g in (fused.plain, fused))
    with unfused():
        plain_explained, _ = explained(plain_function, args, plain_kwargs, "cuda", static_numbers=True)
    fused_explained, left = explained(fused_function, args, kwargs, "cuda", static_numbers=True)
    lifted = [piece for piece in pieces if piece.lifted is not None]
    return Report(
        fused.name,
        (*(dataclasses.replace(x, count=piece.count) for piece in pieces for x in _products(piece)), *kernels),
        tuple(_backward(piece) for piece in lifted if not piece.in_rule),
        plain_explained,
        fused_explained,
        reason,
        _at_kernels(left, lifted),
        tuple(sorted((x for piece in pieces for x in _whole(piece, fused.options)), key=lambda x: -x.bytes)),
    )


def _is_derivative(piece: Piece) -> bool:
    return is_derivative(piece.jaxpr.jaxpr, [equation for equation, _ in piece.taken])


def _with_gradients(f: Callable[..., Any], *, has_aux: bool) -> Callable[..., Any]:
    """f with its gradients of all floating arrays."""

    def function(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        flags = [hasattr(x, "dtype") and is_float(x.dtype) for x in leaves]

        def of_floats(floats: list[Any]) -> Any:
            given = iter(floats)
            args, kwargs = jax.tree.unflatten(
                tree, [next(given) if flag else x for x, flag in zip(leaves, flags, strict=True)]
            )
            return f(*args, **kwargs)

        return jax.value_and_grad(of_floats, has_aux=has_aux)(
            [x for x, flag in zip(leaves, flags, strict=True) if flag]
        )

    return function


def _products(piece: Piece) -> list[FusedProduct]:
    found = [FusedProduct(piece.name, _line(x), _types(x), (operator,), "") for x, operator in piece.taken]
    scores = {(_line(x), _types(x)): reason for x, reason in piece.attentions.left}
    calls = [one for one in piece.attentions.left if one[0].primitive.name != "dot_general"]  # of cuDNN's attention
    found += [FusedProduct(piece.name, _line(x), _types(x), (), reason) for x, reason in calls]

    def left(equation: core.JaxprEqn, reason: str) -> FusedProduct:
        line, types = _line(equation), _types(equation)
        return FusedProduct(piece.name, line, types, (), scores.get((line, types), reason), *_factors(piece, equation))

    if piece.lifted is None:
        return [*found, *itertools.starmap(left, piece.left)]
    plan = piece.lifted.graph.plan
    steps = {step.product: i for i, step in enumerate(plan.steps)}
    for equation, product in piece.lifted.products:
        if isinstance(product, Product):
            names = _words(map(name_of, made_in(plan, steps[product]))) if product in steps else ()
            found.append(
                FusedProduct(piece.name, _line(equation), _shapes(product), names, "", *_factors(piece, equation))
            )
        else:
            found.append(left(equation, product))
    return found


def _factors(piece: Piece, equation: Any) -> tuple[str, str]:
    """The dtype of a product's factors, and why it is none of 8 bits where it was to be."""
    rounding = equation.params.get("rounding")
    dtype = equation.invars[0].aval.dtype if rounding is None else rounding.recipe.dtype
    return str(dtype), piece.unrounded.get(id(equation), "")


def _words(names: Iterable[str]) -> tuple[str, ...]:
    """The words of maps, each once; those that compute nothing left out."""
    words = dict.fromkeys(word for name in names for word in name.split("+"))
    return tuple(word for word in words if word not in ("reshape", "cast"))


def _at_kernels(left: Mapping[Left, int], pieces: Sequence[Piece]) -> Mapping[Left, int]:
    """The passes, with the lines of the products whose results they copy, in the place of those of copies."""
    lines: dict[str, set[str]] = collections.defaultdict(set)
    for piece in pieces:
        assert piece.lifted is not None
        graph = piece.lifted.graph
        for i, step in enumerate(graph.plan.steps):
            lines[f"{graph.name}_{i}"] |= {users_line(line)} if (line := line_in(source_of(step.product))) else set()
    counts = collections.Counter[Left]()
    for one, count in left.items():
        found = list(lines.get(one.kernel or "", ()))
        counts[dataclasses.replace(one, source=found[0]) if len(found) == 1 else one] += count
    return counts


def _whole(piece: Piece, options: Options) -> list[WholeLogits]:
    taken = [x for x, _ in piece.losses.taken]
    if piece.in_rule:  # the logits of a chunk
        return []
    return whole_logits(piece.losses.source, taken, is_exact=options.is_exact, chunk_losses=options.chunk_losses)


def _backward(piece: Piece) -> str:
    assert piece.lifted is not None
    graph = piece.lifted.graph
    name = f"{graph.name}_backward"
    return f"backward pass of {piece.name}\n{described(graph.derivative().backward().plan, name)}"


def _line(equation: core.JaxprEqn) -> str:
    """The program's line, and where it is that of a library, its module, or the library's line."""
    line = line_of(equation, with_function=True) or "-"
    library = line.partition(", from ")[0] if ", from " in line else ""
    named = module_of(equation) or library
    return f"{users_line(line)}, {named}" if library and named else line


def _shapes(product: Product) -> str:
    a, b = (f"{x.shape}{'^T' * t}" for x, t in ((product.a, product.transpose_a), (product.b, product.transpose_b)))
    return f"{a} @ {b}"


def _types(equation: core.JaxprEqn) -> str:
    return " @ ".join(x.aval.str_short() for x in equation.invars[:2])
