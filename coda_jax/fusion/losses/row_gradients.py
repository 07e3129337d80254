"""A loss over a vocabulary with its gradient, whatever both are of a token's logits, evaluated in chunks of tokens.

    z = x w,  numbers of each token = f(z),  dz = g(z, numbers of each token),  dx = dz w^T,  dw = x^T dz

`wide` reads what losses are known to make of logits. Here nothing is said of what is computed: where each token is
treated alone from the logits to their cotangent, one loop makes both for some tokens at a time, and dx and dw of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from coda_jax.fusion.dots import Dot, Equation, dots_in, is_derivative, is_dot
from coda_jax.fusion.losses.ends import end_of, kind_of_end
from coda_jax.fusion.losses.logits import Logits, logits_of, result_of
from coda_jax.fusion.losses.row_losses import Region, RowLoss
from coda_jax.fusion.makers import Makers, among
from coda_jax.fusion.picks import is_over_last
from coda_jax.graph.values import is_float
from coda_jax.jaxprs.def_use import variables


@dataclasses.dataclass(frozen=True)
class RowGradient:
    """A loss with its gradient that is evaluated in chunks of tokens.

    Attributes:
      makers: of the jaxpr.
      loss: whose last number is the logits' cotangent.
      ends: the products of the cotangent, with what each makes: "dx" or "dw".
    """

    makers: Makers
    loss: RowLoss
    ends: Sequence[tuple[Equation, str]]

    operator = "chunks of a loss and its gradient"

    @property
    def logits(self) -> Logits:
        return self.loss.logits

    @property
    def products(self) -> Sequence[Equation]:
        """The products that it makes."""
        return [self.logits.product, *(equation for equation, _ in self.ends)]

    @property
    def arguments(self) -> list[Any]:
        """The variables that it reads."""
        return self.loss.arguments

    @property
    def results(self) -> list[Any]:
        """The variables that it makes."""
        return [*self.loss.numbers[:-1], *(equation.outvars[0] for equation, _ in self.ends)]

    def outputs(self, values: dict[Any, Any]) -> list[jax.Array]:
        """The values of the results."""
        chunks, arrays = self.loss.chunks_of(values)
        numbers, dx, dw = chunks.with_gradients(*arrays)
        dot = self.logits.dot
        gradients = {"dx": dx.reshape(dot.a.aval.shape), "dw": dw.reshape(dot.b.aval.shape)}
        each = zip(numbers, self.loss.numbers[:-1], strict=True)
        made = [y.reshape(out.aval.shape).astype(out.aval.dtype) for y, out in each]
        return [*made, *(end_of(self.makers, dot, equation, kind, gradients[kind]) for equation, kind in self.ends)]


def row_gradients(makers: Makers, least: int) -> Iterator[RowGradient]:
    """The losses of products of at least so many columns that stand beside their gradients."""
    if not is_derivative(makers.jaxpr):
        return
    largest = _largest_softmax(makers)
    for equation in dots_in(makers.jaxpr).values():
        z, dot = result_of(makers, equation)
        if not isinstance(dot, Dot) or dot.transpose_a or dot.order_b is not None or dot.a is dot.b:
            continue
        is_kernel = dot.a.aval.dtype.itemsize == 2  # else the sums of logits are passes, as plain JAX has them
        is_wide = z.aval.ndim == dot.rows_a + 1 and z.aval.shape[-1] >= least
        is_softmax = 2 * largest.get(z, 0) >= _size(z)  # some columns may be padding
        if is_kernel and is_wide and is_softmax:
            found = _GradientRegion(makers, next(iter(logits_of(makers, equation, z, dot)))).found()
            if found is not None:
                yield found


class _GradientRegion(Region):
    """The equations between logits and their cotangent."""

    def __init__(self, makers: Makers, logits: Logits):
        super().__init__(makers, logits, sums=False)
        self._ends: list[tuple[Equation, str]] = []

    def found(self) -> RowGradient | None:
        """The loss with its gradient; None if there is none whose logits may be made in chunks."""
        loss = self.loss() if self._tokens_are_many() else ""
        return None if isinstance(loss, str) else RowGradient(self._makers, loss, self._ends)

    def _reason_of(self, equations: Sequence[Equation], made: Any, numbers: Sequence[Any]) -> str:
        wide, dot = [x for x in numbers if self._is_wide(x)], self._logits.dot
        if len(wide) != 1 or not _has_softmax(equations, self._is_wide):
            return "there is no cotangent of them all"
        every = set(map(id, equations))
        for equation in self._makers.equations:
            read = [x for x in variables(equation.invars) if x in made and self._is_wide(x)]
            if id(equation) in every or not read:
                continue
            if equation.primitive.name != "dot_general" or read != wide:
                return f"{equation.primitive.name} reads them, which does not treat each token alone"
            kind = kind_of_end(self._makers, dot, equation, 0 if among(equation.invars[0], wide) else 1)
            if kind is None or not self._is_rounded_alike(equation):
                return "another product reads their cotangent"
            self._ends.append((equation, kind))
        return "" if self._ends and not among(wide[0], self._makers.jaxpr.outvars) else "no product reads them"

    def _in_order(self, numbers: Sequence[Any]) -> list[Any]:
        """The numbers of each token, and last the cotangent."""
        return sorted(numbers, key=self._is_wide)

    def _is_rounded_alike(self, end: Equation) -> bool:
        """True for a product of factors, and with a result, as chunks have them."""
        dtype, out = self._logits.dot.a.aval.dtype, end.outvars[0].aval.dtype
        return all(x.aval.dtype == dtype for x in end.invars) and out.itemsize <= dtype.itemsize


def _largest_softmax(makers: Makers) -> dict[Any, float]:
    """The elements of the largest array whose exponentials, and sums over columns, are made of a variable.

    No product is between them. Few products' results are among them: the rows of all others need not be followed.
    """
    found: dict[Any, tuple[float, float]] = {}  # of exponentials, and of what is summed
    for equation in reversed(makers.equations):
        if is_dot(equation):
            continue
        each = [found.get(x, (0, 0)) for x in equation.outvars]
        exponentials, sums = (max(one, default=0) for one in zip(*each, strict=True)) if each else (0, 0)
        if equation.primitive.name == "exp":
            exponentials = max(exponentials, _size(equation.invars[0]))
        if equation.primitive.name == "reduce_sum" and is_over_last(equation):
            sums = max(sums, _size(equation.invars[0]))
        for x in variables(equation.invars) if exponentials or sums else ():
            before = found.get(x, (0, 0))
            found[x] = max(before[0], exponentials), max(before[1], sums)
    return {x: min(sizes) for x, sizes in found.items()}


def _size(x: Any) -> float:
    """How many elements a variable has; of symbolic sizes infinitely many."""
    return x.aval.size if isinstance(x.aval.size, int) else float("inf")


def _has_softmax(equations: Sequence[Equation], is_wide: Any) -> bool:
    """True where exponentials are made, and summed over the columns: the logits are read again behind the sums.

    A loss whose largest logit has a gradient is none: masks of it are more passes than they are in a graph.
    """
    names = {e.primitive.name for e in equations}
    masks = (e.invars[0] for e in equations if e.primitive.name == "eq")
    return (
        "exp" in names
        and not any(is_float(x.aval.dtype) and is_wide(x) for x in masks)
        and any(e.primitive.name == "reduce_sum" and is_over_last(e) and is_wide(e.invars[0]) for e in equations)
    )
