"""Products in a jaxpr: which are of two matrices, or of a matrix for each group, once the axes of rows are one.

A `coda_rounded_dot`, whose factors are rounded to 8 bits, counts as a dot_general.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jax.extend import core

from coda_jax.epilogue.dtypes import FLOAT32, FLOATS, INT32
from coda_jax.epilogue.values import same_shape
from coda_jax.operators.rounded_dot import DOTS
from coda_jax.primitives.mesh_types import explicit_sharding

Equation = Any  # a core.JaxprEqn: mypy knows no shape of its variables
RAGGED = "ragged_dot_general"
PRODUCTS = DOTS | {RAGGED}
_PRECISE = ("HIGH", "HIGHEST", "F32", "TF32")  # of products in float32, in the names that JAX gives precisions


@dataclasses.dataclass(frozen=True)
class Dot:
    """A product of matrices, a (M, K) or with transpose_a (K, M), and b (K, N) or (N, K).

    With groups it is a ragged_dot_general: rows of a are sorted by group, and b has a matrix for each, (G, K, N) or
    (G, N, K); or with transpose_a both have such rows, and the result is (G, M, N).

    Attributes:
      a, b: the variables of its factors.
      rows_a: how many axes of a come first in its matrix.
      rows_b: of b.
      transpose_a: whether a's rows are summed over; then those of b are too, and the result has no rows.
      transpose_b: whether the columns of b are summed over.
      order_b: how b's axes are transposed first, so that those summed over come first; None where they lie well.
      groups: the variable of how many rows each group has; None for a product without groups.
    """

    a: Any
    b: Any
    rows_a: int
    rows_b: int
    transpose_a: bool
    transpose_b: bool
    order_b: tuple[int, ...] | None = None
    groups: Any = None

    @property
    def matrix_a(self) -> tuple[Any, ...]:
        """The shape of a's matrix."""
        sizes = self.a.aval.shape
        return math.prod(sizes[: self.rows_a]), math.prod(sizes[self.rows_a :])

    @property
    def matrix_b(self) -> tuple[Any, ...]:
        """The shape of b's matrix, or of that of each group."""
        sizes = self.b.aval.shape if self.order_b is None else [self.b.aval.shape[axis] for axis in self.order_b]
        sizes = sizes[1:] if self.has_matrices else sizes
        return math.prod(sizes[: self.rows_b]), math.prod(sizes[self.rows_b :])

    @property
    def has_matrices(self) -> bool:
        """Whether b has a matrix for each group."""
        return self.groups is not None and not self.transpose_a

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
    return {i: equation for i, equation in enumerate(jaxpr.eqns) if is_dot(equation)}


def is_dot(equation: Equation) -> bool:
    """True for a dot_general, also for one whose factors are rounded to 8 bits."""
    return equation.primitive.name in DOTS


def products_in(jaxpr: core.Jaxpr) -> dict[int, Equation]:
    """The dot_generals, and those of groups of rows, among the equations, by number."""
    return {i: equation for i, equation in enumerate(jaxpr.eqns) if equation.primitive.name in PRODUCTS}


def operations(equation: Equation, a: Sequence[Any], b: Sequence[Any]) -> Any:
    """Multiplications and additions of one of `PRODUCTS`, of factors of these shapes."""
    ragged = equation.params.get("ragged_dot_dimension_numbers")
    numbers = equation.params["dimension_numbers"] if ragged is None else ragged.dot_dimension_numbers
    (_, contracted), (_, batch) = numbers
    apart = {*contracted, *batch, *(() if ragged is None else ragged.rhs_group_dimensions)}
    return 2 * math.prod(a) * math.prod(size for axis, size in enumerate(b) if axis not in apart)


def swaps_factors(transpose: Equation, dot: Equation) -> bool:
    """True for a transpose of a product's result that is the result of the factors in the other order."""
    if dot.primitive.name == RAGGED:  # (G, M, N) as (G, N, M)
        is_contraction = isinstance(one := _ragged_dot_of(dot, *dot.invars[:2]), Dot) and one.transpose_a
        return is_contraction and tuple(transpose.params["permutation"]) == (0, 2, 1)
    (sums, _), (batch, _) = dot.params["dimension_numbers"]
    first, rank = dot.invars[0].aval.ndim - len(sums), dot.outvars[0].aval.ndim
    return not batch and tuple(transpose.params["permutation"]) == (*range(first, rank), *range(first))


def dot_of(equation: Equation, *, is_swapped: bool = False) -> Dot | str:
    """The product that an equation is, or is with its factors in the other order; why it is none."""
    a, b = equation.invars[1::-1] if is_swapped else equation.invars[:2]
    if isinstance(a, core.Literal) or isinstance(b, core.Literal):
        return "a factor is a constant number"
    if a.aval.dtype != b.aval.dtype or a.aval.dtype.name not in FLOATS:
        return f"its factors are {a.aval.dtype} and {b.aval.dtype}"
    if equation.outvars[0].aval.dtype.name not in FLOATS:
        return f"its result is {equation.outvars[0].aval.dtype}"
    if is_precise(equation.params.get("precision")) and a.aval.dtype == np.dtype(FLOAT32):
        return f"it asks for precision {equation.params['precision']}"
    if equation.primitive.name == RAGGED:
        return _ragged_dot_of(equation, a, b)
    (sums_a, sums_b), (batch, _) = equation.params["dimension_numbers"]
    if batch:
        return "both factors have batch axes, as in attention, or experts with a capacity"
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


def _ragged_dot_of(equation: Equation, a: Any, b: Any) -> Dot | str:
    """The product of groups of rows that a ragged_dot_general is, with these factors; why it is none."""
    params, groups = equation.params, equation.invars[2]
    numbers = params["ragged_dot_dimension_numbers"]
    (sums_a, sums_b), (batch, _) = numbers.dot_dimension_numbers
    ragged, of_groups = tuple(numbers.lhs_ragged_dimensions), tuple(numbers.rhs_group_dimensions)
    if batch:
        return "both factors have batch axes: a product of groups for each"
    if isinstance(groups, core.Literal) or groups.aval.dtype != np.dtype(INT32) or groups.aval.ndim != 1:
        return f"the sizes of its groups are {groups.aval.str_short()}"
    if params.get("group_offset") is not None:
        return "it has a group_offset"
    if params.get("out_sharding") is not None and explicit_sharding(equation.outvars[0].aval) is not None:
        return "it asks for an out_sharding"
    if a.aval.ndim != 2 or ragged != (0,) or of_groups not in ((), (0,)):
        return f"its groups are along axes {ragged} of {a.aval.str_short()}, not along the rows of a matrix"
    if not of_groups:
        if b.aval.ndim == 2 and tuple(sums_a) == tuple(sums_b) == (0,):
            return Dot(a, b, 1, 1, True, False, groups=groups)
        return "it sums over other axes than the rows of each group"
    if b.aval.ndim != 3 or tuple(sums_a) != (1,) or tuple(sums_b) not in ((1,), (2,)):
        return f"it sums over axes {tuple(sums_b)} of {b.aval.str_short()}, which are not one of each group's matrix"
    return Dot(a, b, 1, 1, False, tuple(sums_b) == (2,), groups=groups)


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
    equations = (*products_in(jaxpr).values(), *taken)
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
