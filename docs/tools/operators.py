"""The table of operators, and their page: formulas from docstrings; products, bytes and what is kept from the code.

An operator stands once in `OPERATORS`, as a call with the shapes of its arguments. What the page says of it is found by
tracing that call.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import coda_jax as coda
from coda_jax.jaxprs.walk import equations_of
from coda_jax.primitives.gemm_primitive import PRIMITIVES

# Sizes to trace with. All differ, so that a number in a shape says which size it is.
SIZES = {
    "M": 1024,
    "D": 256,
    "F": 640,
    "2F": 1280,
    "N": 512,
    "K": 448,
    "V": 4096,
    "H": 6,
    "Hkv": 3,
    "Dh": 32,
    "Dh/2": 16,
    "H Dh": 192,
    "Hkv Dh": 96,
    "Q": 384,
    "E": 12,
    "(E+1)": 13,
}
NAMES = {size: name for name, size in SIZES.items()}


@dataclasses.dataclass(frozen=True)
class Operator:
    """One operator, as it is called.

    Attributes:
      name: in coda_jax.
      call: an expression of the arguments.
      arguments: "name (sizes) dtype", separated by semicolons; bfloat16 where no dtype is said.
      differentiated: whether its gradient is looked at.
      notes: what tracing does not show.
    """

    name: str
    call: str
    arguments: str
    differentiated: bool = True
    notes: str = ""

    @functools.cached_property
    def types(self) -> dict[str, jax.ShapeDtypeStruct]:
        found = {}
        for argument in self.arguments.split("; "):
            name, sizes, dtype = re.fullmatch(r"(\w+) \(([^)]*)\) ?(\w*)", argument).groups()  # type: ignore[union-attr]
            shape = tuple(SIZES[size] for size in sizes.split(", ") if size)
            found[name] = jax.ShapeDtypeStruct(shape, dtype or "bfloat16")
        return found

    @functools.cached_property
    def function(self) -> Callable[..., Any]:
        """The call as a function of its arguments, which returns arrays."""
        code = compile(self.call, f"<{self.name}>", "eval")

        def run(*arrays: jax.Array) -> Any:
            out = eval(code, {"coda": coda, "jax": jax, "jnp": jnp}, dict(zip(self.types, arrays, strict=True)))
            is_formed = isinstance(out, coda.Stream | coda.DeferredNorm)
            return out.array() if is_formed else out

        return run


OPERATORS = (
    Operator(
        "gemm",
        "coda.gemm(a, b, bias, epilogue=lambda acc, bias: jax.nn.gelu(acc + bias))",
        "a (M, K); b (K, N); bias (N) float32",
        notes="What is kept depends on the epilogue: nothing beside the arguments where it is linear in acc, and with "
        '`residuals="recompute"`; else acc, rounded. See [Writing an epilogue](epilogue.md).',
    ),
    Operator(
        "ragged_gemm",
        "coda.ragged_gemm(a, b, group_sizes, coda.ByGroup(bias), epilogue=lambda acc, bias: jax.nn.gelu(acc + bias))",
        "a (M, K); b (E, K, N); group_sizes (E) int32; bias (E, N) float32",
        notes="E groups of rows, one after another. See [Mixture of experts](moe.md).",
    ),
    Operator(
        "ragged_contraction",
        "coda.ragged_contraction(a, b, group_sizes)",
        "a (M, K); b (M, N); group_sizes (E) int32",
        notes="The gradient of `ragged_gemm`'s b.",
    ),
    Operator(
        "rms_norm",
        "coda.rms_norm(x, scale)",
        "x (M, D); scale (D)",
        differentiated=False,
        notes="No product: a `DeferredNorm`, which the next operator applies. Here `.array()` forms it.",
    ),
    Operator(
        "layer_norm",
        "coda.layer_norm(x, scale, bias)",
        "x (M, D); scale (D); bias (D)",
        differentiated=False,
        notes="No product, as `rms_norm`. The statistics are one pass over x.",
    ),
    Operator(
        "gated_mlp",
        "coda.gated_mlp(coda.rms_norm(x, scale), w_gate_up, w_down)",
        "x (M, D); scale (D); w_gate_up (D, 2F); w_down (F, D)",
    ),
    Operator(
        "mlp",
        "coda.mlp(coda.layer_norm(x, scale, bias), w_up, w_down, up_bias=up_bias, down_bias=down_bias)",
        "x (M, D); scale (D); bias (D); w_up (D, F); w_down (F, D); up_bias (F); down_bias (D)",
    ),
    Operator(
        "expert_mlp",
        "coda.expert_mlp(x, w_gate_up, w_down, group_sizes, row_scale=row_scale)",
        "x (M, D); w_gate_up (E, D, 2F); w_down (E, F, D); group_sizes (E) int32; row_scale (M) float32",
        notes="E experts; each row is multiplied with the weights of its own. Products of rows read only weights of "
        "experts that have a row.",
    ),
    Operator(
        "project",
        "coda.project(x, w, residual=residual)",
        "x (M, K); w (K, D); residual (M, D)",
    ),
    Operator(
        "norm_projection",
        "coda.norm_projection(coda.rms_norm(x, scale), w)",
        "x (M, D); scale (D); w (D, N)",
    ),
    Operator(
        "qkv_projection",
        "coda.qkv_projection(coda.rms_norm(x, scale), w, cos, sin, num_heads=6, num_kv_heads=3)",
        "x (M, D); scale (D); w (D, Q); cos (M, Dh/2) float32; sin (M, Dh/2) float32",
        notes="Q = (H + 2 Hkv) Dh.",
    ),
    Operator(
        "linear_cross_entropy",
        "coda.linear_cross_entropy(coda.rms_norm(x, scale), w, labels)[0]",
        "x (M, D); scale (D); w (D, V); labels (M) int32",
        notes="Shown for a single chunk of tokens. A training step works on chunks of about 2048 and forms the "
        "gradients in the forward pass, so that it keeps those of x and w and no logits.",
    ),
    Operator(
        "token_logprobs",
        "coda.token_logprobs(coda.rms_norm(x, scale), w, labels)",
        "x (M, D); scale (D); w (D, V); labels (M) int32",
        notes="Shown for a single chunk of tokens.",
    ),
)


def page() -> str:
    """All operators, as Markdown."""
    return "\n\n".join(described(operator) for operator in OPERATORS)


def described(operator: Operator) -> str:
    """A section: what it computes, its call, its products, and what it keeps."""
    summary, formula = formula_of(getattr(coda, operator.name))
    parts = [f"## `{operator.name}`", summary]
    if formula:
        parts.append(f"```text\n{formula}\n```")
    shapes = ", ".join(f"{name} {symbols(x.shape)} {x.dtype}" for name, x in operator.types.items())
    parts.append(f"```py\n{operator.call}\n```\n{shapes}")
    if operator.notes:
        parts.append(operator.notes)
    if rows := list(product_rows(operator)):
        head = "| pass | epilogue | product, (M, N, K) | reads, bytes | writes, bytes |\n|---|---|---|---|---|\n"
        parts.append(head + "\n".join(map(unbroken, rows)))
    if operator.differentiated:
        parts.append(f"Kept for the backward pass, beside the arguments: {unbroken(kept(operator))}.")
    return "\n\n".join(parts)


def formula_of(function: Any) -> tuple[str, str]:
    """The first line of a docstring, as Markdown, and the formula that follows it, if one does."""
    lines = (inspect.getdoc(function) or "").splitlines()
    block = itertools.takewhile(lambda line: line.startswith("    ") or not line.strip(), lines[1:])
    return re.sub(r"([*|])", r"\\\1", lines[0]), "\n".join(line[4:] for line in block).strip()


def product_rows(operator: Operator) -> Iterator[str]:
    """The rows of a table: the products of the value alone, then those of value and gradient."""
    types = list(operator.types.values())

    def with_gradient(*arrays: jax.Array) -> Any:
        out, pullback = jax.vjp(operator.function, *arrays)
        return out, pullback(out)

    alone = products_of(operator.function, types)
    both = products_of(with_gradient, types) if operator.differentiated else []
    for number, equation in enumerate(alone):
        yield row("value" if number == 0 else "", equation)
    for number, equation in enumerate(both):
        yield row("value and gradient" if number == 0 else "", equation)


def products_of(function: Callable[..., Any], types: list[Any]) -> list[Any]:
    return [equation for equation, _ in equations_of(function, *types)[0] if equation.primitive in PRIMITIVES]


def row(label: str, equation: Any) -> str:
    spec = equation.params["spec"]
    arguments = equation.invars if spec.ragged is None else equation.invars[:-1]  # the last says where groups begin
    a, b = (variable.aval.shape for variable in arguments[:2])
    m, k = reversed(a) if spec.transpose_a else a
    n = b[-2] if spec.transpose_b else b[-1]
    reads, writes = (total(variable.aval for variable in side) for side in (arguments, equation.outvars))
    by_group = "" if spec.ragged is None else ", by group"
    return f"| {label} | `{spec.name}` | {symbols((m, n, k))}{by_group} | {reads} | {writes} |"


def kept(operator: Operator) -> str:
    """The arrays that the pullback holds beside the arguments: shapes, and bytes in all."""

    def residuals(*arrays: jax.Array) -> Any:
        return jax.tree.leaves(jax.vjp(operator.function, *arrays)[1])

    jaxpr = jax.make_jaxpr(residuals)(*operator.types.values()).jaxpr
    avals = [v.aval for v in jaxpr.outvars if v not in jaxpr.invars and v.aval.shape and v.aval.size]
    if not avals:
        return "nothing"
    shapes = ", ".join(f"{aval.dtype} {symbols(aval.shape)}" for aval in avals)
    return f"{shapes}; {total(avals)} bytes"


def symbols(shape: Iterable[int]) -> str:
    return f"({', '.join(NAMES.get(size, str(size)) for size in shape)})"


def unbroken(text: str) -> str:
    """Text in which no line ends inside a product of sizes."""
    return re.sub(r"(?<=\w) (?=[A-Z2])", "\N{NO-BREAK SPACE}", text)


def total(avals: Iterable[Any]) -> str:
    """Bytes of arrays, as a sum of products of sizes."""
    terms = collections.Counter[str]()
    for aval in avals:
        factors, coefficient = [], aval.dtype.itemsize
        for size in aval.shape:
            name = NAMES.get(size, "" if size == 1 else str(size))
            number, letters = re.fullmatch(r"(\d*)(.*)", name).groups()  # type: ignore[union-attr]
            coefficient *= int(number or 1)
            factors += [letters] if letters else []
        terms[" ".join(sorted(factors, key=list(SIZES).index))] += coefficient
    order = sorted(terms, key=lambda names: -len(names.split()))
    return " + ".join(f"{terms[names]} {names}".strip() for names in order)
