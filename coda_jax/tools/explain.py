"""What the products of a function are lowered to, and why."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core

from coda_jax.primitives.gemm_primitive import PRIMITIVES
from coda_jax.primitives.kernel import readable_source
from coda_jax.primitives.lowering import problem_of, select
from coda_jax.primitives.notes import coda_note_p
from coda_jax.primitives.shapes import flat_types
from coda_jax.tools.walk import equations_of


@dataclasses.dataclass(frozen=True)
class Product:
    """One kind of product in a function.

    Attributes:
      epilogue: its name, "gemm" for a bare product.
      a, b: types of the factors, `^T` where they are stored transposed.
      reason: why it takes XLA's form; None where it is the Hopper kernel.
      tile: rows and columns of the kernel's tiles, and who chose them; None where it takes XLA's form.
      source: the kernel's CUDA source, if it was asked for; None where it takes XLA's form.
    """

    epilogue: str
    a: str
    b: str
    reason: str | None
    tile: str | None = None
    source: str | None = None


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The products of a function, printed as a table, and below it their sources where these were asked for.

    Attributes:
      products: how often each is executed in one call; the body of a scan counts for each step, that of a while loop
        once, as do all branches of a cond.
      others: products that are not coda_jax's, as attention's are.
      notes: what operators and layers say of themselves, as why a chain is lost, and how often.
    """

    products: dict[Product, int]
    others: int
    notes: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def kernels(self) -> int:
        """How many of the products are Hopper kernels."""
        return sum(count for product, count in self.products.items() if product.reason is None)

    def __str__(self) -> str:
        rows = [("count", "epilogue", "product", "lowered to")]
        for product, count in self.products.items():
            reason = product.reason and " ".join(product.reason.split())  # on one line of the table
            target = f"XLA: {reason}" if reason else f"Hopper kernel, {product.tile}"
            rows.append((str(count), product.epilogue, f"{product.a} @ {product.b}", target))
        wide = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = [f"{a:>{wide[0]}}  {b:{wide[1]}}  {c:{wide[2]}}  {d}" for a, b, c, d in rows]
        lines.append(f"{self.others:>{wide[0]}}  products that are not coda_jax's")
        lines += [f"{count:>{wide[0]}}  {note}" for note, count in self.notes.items()]
        for product in self.products:
            if product.source:
                lines.append(f"\n// {product.epilogue}: {product.a} @ {product.b}\n{product.source.rstrip()}")
        return "\n".join(lines)


def explain(
    function: Callable[..., Any], *args: Any, platform: str | None = None, source: bool = False, **kwargs: Any
) -> Explanation:
    """What each product of function(*args, **kwargs) is lowered to, and why. Nothing is compiled or run.

    Args:
      function: traceable by JAX; jitted or not.
      *args, **kwargs: its arguments, arrays or `jax.ShapeDtypeStruct`s.
      platform: "cuda", to see on any machine what a Hopper GPU would run, or "cpu"; default the one JAX uses.
      source: also tell each kernel's CUDA source, with the epilogue's function, its file and line, and its parameters
        by their names. What is compiled, and what CODA_JAX_DUMP_DIR holds, has `column_vector_0` in the place of
        `rstd`, so that functions with the same mathematics share a kernel.

    Raises:
      ValueError: another platform.

    Example: `print(coda.explain(jax.grad(loss), params, batch))`, and of one product
    `print(coda.explain(coda.gemm, a, b, platform="cuda", source=True))`
    """
    if platform not in (None, "cpu", "gpu", "cuda"):
        raise ValueError(f"{platform=}; it must be 'cuda', 'gpu', 'cpu' or None")
    platform = platform or jax.default_backend()
    products, others, notes = collections.Counter[Product](), 0, collections.Counter[str]()
    found, num_devices = equations_of(function, *args, **kwargs)
    for equation, times in found:
        if equation.primitive in PRIMITIVES:
            products[_product(equation, platform, num_devices, source)] += times
        elif equation.primitive.name in ("dot_general", "conv_general_dilated"):
            others += times
        elif equation.primitive is coda_note_p:
            notes[equation.params["message"]] += times
    return Explanation(dict(products), others, dict(notes))


def _product(equation: core.JaxprEqn, platform: str, num_devices: int, with_source: bool) -> Product:
    avals: list[Any] = [v.aval for v in equation.invars]
    spec = equation.params["spec"]
    matrices = [jax.core.ShapedArray(x.shape, x.dtype) for x in flat_types(avals, spec)[:2]]
    a, b = (
        f"{(aval if aval.ndim == matrix.ndim else matrix).str_short()}{'^T' if transposed else ''}"
        for aval, matrix, transposed in zip(avals, matrices, (spec.transpose_a, spec.transpose_b), strict=False)
    )
    if platform not in ("gpu", "cuda"):
        return Product(spec.name, a, b, f"the platform is {platform}")
    try:
        choice = select(avals, spec, num_devices)
    except ValueError as error:  # a config that does not fit, which the lowering raises
        return Product(spec.name, a, b, str(error))
    if choice.reason is not None:
        return Product(spec.name, a, b, choice.reason)
    parts = f" {' or '.join(choice.parts)}" if choice.parts else ""
    each = f", on each device's part{parts} over {', '.join(choice.over)}" if choice.over else ""
    if choice.config is None:
        return Product(spec.name, a, b, None, f"its tile chosen once XLA has partitioned the program{each}")
    source = readable_source(problem_of(avals, spec), choice.config) if with_source and not choice.over else None
    return Product(spec.name, a, b, None, f"{choice.config.name} ({choice.origin}){each}", source)
