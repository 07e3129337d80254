"""Products in a jaxpr: which `dot_general`s are products of two matrices, once the axes of rows are one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jax.extend import core

from coda_jax.epilogue.dtypes import FLOAT32, FLOATS
from coda_jax.epilogue.values import same_shape

Equation = Any  # a core.JaxprEqn: mypy knows no shape of its variables
_PRECISE = ("HIGH", "HIGHEST", "F32", "TF32")  # of products in float32, in the names that JAX gives precisions


@dataclasses.dataclass(frozen=True)
class Dot:
    """A dot_general as a product of matrices, a (M, K) or with transpose_a (K, M), and b (K, N) or (N, K).

    Attributes:
      a, b: the variables of its factors.
      rows_a: how many axes of a come first in its matrix.
      rows_b: of b.
      transpose_a: whether a's rows are summed over; then those of b are too, and the result has no rows.
      transpose_b: whether the columns of b are summed over.
      order_b: how b's axes are transposed first, so that those summed over come first; None where they lie well.
    """

    a: Any
    b: Any
    rows_a: int
    rows_b: int
    transpose_a: bool
    transpose_b: bool
    order_b: tuple[int, ...] | None = None

    @property
    def matrix_a(self) -> tuple[Any, ...]:
        """The shape of a's matrix."""
        sizes = self.a.aval.shape
        return math.prod(sizes[: self.rows_a]), math.prod(sizes[self.rows_a :])

    @property
    def matrix_b(self) -> tuple[Any, ...]:
        """The shape of b's matrix."""
        sizes = self.b.aval.shape if self.order_b is None else [self.b.aval.shape[axis] for axis in self.order_b]
        return math.prod(sizes[: self.rows_b]), math.prod(sizes[self.rows_b :])

    @property
    def columns(self) -> Any:
        """The number of its result's columns."""
        return self.matrix_b[0 if self.transpose_b else 1]

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * math.prod(self.matrix_a) * self.columns


def dots_in(jaxpr: core.Jaxpr) -> dict[int, Equation]:
    """The dot_generals among the equations, by number."""
    return {i: equation for i, equation in enumerate(jaxpr.eqns) if equation.primitive.name == "dot_general"}


def swaps_factors(transpose: Equation, dot: Equation) -> bool:
    """True for a transpose of a dot_general's result that is the result of the factors in the other order."""
    (sums, _), (batch, _) = dot.params["dimension_numbers"]
    first, rank = dot.invars[0].aval.ndim - len(sums), dot.outvars[0].aval.ndim
    return not batch and tuple(transpose.params["permutation"]) == (*range(first, rank), *range(first))


def dot_of(equation: Equation, *, is_swapped: bool = False) -> Dot | str:
    """The product that a dot_general is, or is with its factors in the other order; why it is none."""
    a, b = equation.invars[::-1] if is_swapped else equation.invars
    if isinstance(a, core.Literal) or isinstance(b, core.Literal):
        return "a factor is a constant number"
    if a.aval.dtype != b.aval.dtype or a.aval.dtype.name not in FLOATS:
        return f"its factors are {a.aval.dtype} and {b.aval.dtype}"
    if equation.outvars[0].aval.dtype.name not in FLOATS:
        return f"its result is {equation.outvars[0].aval.dtype}"
    if is_precise(equation.params.get("precision")) and a.aval.dtype == np.dtype(FLOAT32):
        return f"it asks for precision {equation.params['precision']}"
    (sums_a, sums_b), (batch, _) = equation.params["dimension_numbers"]
    if batch:
        return "both factors have batch axes, as in attention"
    sums_a, sums_b = (sums_b, sums_a) if is_swapped else (sums_a, sums_b)
    pairs = sorted(zip(sums_a, sums_b, strict=True))
    sums_a, sums_b = ([pair[i] for pair in pairs] for i in (0, 1))
    if not pairs or len(sums_a) == a.aval.ndim or len(sums_b) == b.aval.ndim:
        return "a factor is a vector, or nothing is summed over"
    count = len(pairs)
    transposed = transposed_factors((sums_a, sums_b), (a.aval.ndim, b.aval.ndim))
    if transposed is not None:
        rows_a = count if transposed[0] else a.aval.ndim - count
        rows_b = b.aval.ndim - count if transposed[1] else count
        return Dot(a, b, rows_a, rows_b, *transposed)
    if sums_a == _last(a.aval.ndim, count):
        others = [axis for axis in range(b.aval.ndim) if axis not in sums_b]
        return Dot(a, b, a.aval.ndim - count, count, False, False, (*sums_b, *others))
    is_of_b = sums_a == list(range(count)) and sums_b != _last(b.aval.ndim, count)
    of, sums = (b, sums_b) if is_of_b else (a, sums_a)
    return f"it sums over axes {tuple(sums)} of {of.aval.str_short()}, which are not its last"


def transposed_factors(sums: Sequence[Sequence[int]], ranks: Sequence[int]) -> tuple[bool, bool] | None:
    """Says which factors of a product of matrices are transposed; None for one whose axes lie otherwise.

    Args:
      sums: the axes of both factors that are summed over.
      ranks: how many axes these have.
    """
    pairs = sorted(zip(*sums, strict=True))
    (of_a, of_b), first = ([pair[i] for pair in pairs] for i in (0, 1)), list(range(len(pairs)))
    if of_a == _last(ranks[0], len(pairs)) and of_b in (first, _last(ranks[1], len(pairs))):
        return False, of_b != first
    return (True, False) if of_a == of_b == first else None


def convolution_flops(equation: Equation, kernel: Sequence[Any], out: Sequence[Any]) -> Any:
    """Multiplications and additions of a convolution with a kernel and a result of these shapes."""
    features = kernel[equation.params["dimension_numbers"].rhs_spec[0]]
    return 2 * math.prod(out) * math.prod(kernel) // max(1, features)


def is_derivative(jaxpr: core.Jaxpr, taken: Iterable[core.JaxprEqn] = ()) -> bool:
    """True for equations with the gradient of a weight: h^T d beside h W, or beside d W^T; or with a checkpoint's.

    Args:
      taken: products that stood in the jaxpr as it was written, and of which an operator was made.
    """
    if any(equation.params.get("differentiated") for equation in jaxpr.eqns):
        return True
    equations = (*dots_in(jaxpr).values(), *taken)
    dots = [dot for equation in equations if isinstance(dot := dot_of(equation), Dot)]
    products = {(dot.a, dot.matrix_a[1], dot.columns) for dot in dots if not dot.transpose_a}
    gradients = [(dot, dot.matrix_a[1], dot.matrix_b[1]) for dot in dots if dot.transpose_a]
    return any((dot.a, m, n) in products or (dot.b, n, m) in products for dot, m, n in gradients)


def _last(rank: int, count: int) -> list[int]:
    return list(range(rank - count, rank))


def is_precise(precision: Any) -> bool:
    """True for a precision of products in float32 beyond the default."""
    names = {str(getattr(x, "name", x)) for x in (precision if isinstance(precision, tuple) else (precision,))}
    return any(name.startswith(_PRECISE) for name in names)


def begins(shape: Sequence[Any], rows: Sequence[Any]) -> bool:
    """True for a shape that begins with these axes, or is these."""
    return len(shape) >= len(rows) and same_shape(shape[: len(rows)], rows)
