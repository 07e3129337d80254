"""`coda.fuse.report`: what became of each product of a function, and what that saves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core

from coda_jax.fusion.dots import dots_in, is_derivative
from coda_jax.fusion.fuse import AUX, Fused, fuse, loss_form, unfused
from coda_jax.fusion.pieces import Piece
from coda_jax.fusion.straight import line_of
from coda_jax.graph.describe import described, made_in, name_of
from coda_jax.graph.values import Product, is_float
from coda_jax.tools.explain import Explanation, explain
from coda_jax.tools.text import columns

IS_KERNEL = "it is a kernel of its own, of an operator, a block or a function fused with other options"


@dataclasses.dataclass(frozen=True)
class FusedProduct:
    """One product of a function.

    Attributes:
      piece: the piece that it is in: the function, "scan", "cond", "while", "checkpoint", "shard_map",
        "custom_vjp".
      line: of the user's code.
      shapes: of its factors, once the axes of rows are one.
      epilogue: the operations that its epilogue does.
      reason: why the product is left as it is; empty if it is not.
    """

    piece: str
    line: str
    shapes: str
    epilogue: tuple[str, ...]
    reason: str


@dataclasses.dataclass(frozen=True)
class Report:
    """A table of what `fuse` makes of a function.

    Attributes:
      name: of the function.
      products: all its products.
      backward: the plans of the derivatives in words, one for each piece.
      plain, fused: what `coda.explain` says of both; None of a function that asks for the value of an array.
      reason: why the function runs as it is; empty if it does not.
    """

    name: str
    products: tuple[FusedProduct, ...]
    backward: tuple[str, ...]
    plain: Explanation | None
    fused: Explanation | None
    reason: str = ""

    def __str__(self) -> str:
        if self.reason or self.plain is None or self.fused is None:
            return f"fuse({self.name}): it runs as it is, for {self.reason}"
        kept = [one for one in self.products if not one.reason]
        rows = [("product", "line", "in", "epilogue")]
        rows += [
            (one.shapes, one.line, one.piece, f"left: {one.reason}" if one.reason else ", ".join(one.epilogue) or "-")
            for one in self.products
        ]
        totals = self.plain.totals, self.fused.totals
        megabytes = [(f"{x.passes_bytes / 1e6:.0f} MB", f"{x.kept_bytes / 1e6:.0f} MB") for x in totals]
        lines = [f"fuse({self.name}): {len(kept)} of {len(self.products)} products are coda_jax's", *columns(rows, ())]
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
        return "\n".join([*lines, *(f"\n{text}" for text in self.backward)])


def report(f: Callable[..., Any], *args: Any, **kwargs: Any) -> Report:
    """As `coda.fuse.report`."""
    fused = (f if isinstance(f, Fused) else fuse(f)).fresh()
    try:
        result = jax.eval_shape(fused, *args, **kwargs)
    except Exception:
        if not fused.reason:
            raise
        return Report(fused.name, (), (), None, None, fused.reason)  # it cannot be traced
    pieces, reason = list(fused.pieces.made), fused.reason
    kernels = (FusedProduct(fused.name, line, _types(x), (), IS_KERNEL) for x, line in fused.pieces.kernels)
    plain_function, fused_function = fused.plain, fused
    if (form := loss_form(result)) and not any(is_derivative(piece.jaxpr.jaxpr) for piece in pieces):
        plain_function, fused_function = (_with_gradients(g, has_aux=form == AUX) for g in (fused.plain, fused))
    with unfused():
        plain_explained = explain(plain_function, *args, **kwargs, platform="cuda")
    fused_explained = explain(fused_function, *args, **kwargs, platform="cuda")
    return Report(
        fused.name,
        (*(product for piece in pieces for product in _products(piece)), *kernels),
        tuple(_backward(piece) for piece in pieces if piece.lifted is not None and not piece.in_rule),
        plain_explained,
        fused_explained,
        reason,
    )


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
    found = [FusedProduct(piece.name, line_of(x), _types(x), (operator,), "") for x, operator in piece.losses]
    if piece.lifted is None:
        dots = dots_in(piece.jaxpr.jaxpr).values()
        return [*found, *(FusedProduct(piece.name, line_of(x), _types(x), (), piece.reason) for x in dots)]
    plan = piece.lifted.graph.plan
    steps = {step.product: i for i, step in enumerate(plan.steps)}
    for equation, product in piece.lifted.products:
        if isinstance(product, Product):
            names = () if product not in steps else tuple(dict.fromkeys(map(name_of, made_in(plan, steps[product]))))
            found.append(FusedProduct(piece.name, line_of(equation), _shapes(product), names, ""))
        else:
            found.append(FusedProduct(piece.name, line_of(equation), _types(equation), (), product))
    return found


def _backward(piece: Piece) -> str:
    assert piece.lifted is not None
    graph = piece.lifted.graph
    name = f"{graph.name}_backward"
    return f"backward pass of {piece.name}\n{described(graph.derivative().backward().plan, name)}"


def _shapes(product: Product) -> str:
    a, b = (f"{x.shape}{'^T' * t}" for x, t in ((product.a, product.transpose_a), (product.b, product.transpose_b)))
    return f"{a} @ {b}"


def _types(equation: core.JaxprEqn) -> str:
    return " @ ".join(x.aval.str_short() for x in equation.invars[:2])
