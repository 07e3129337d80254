"""The arrays that policies of `jax.checkpoint` keep of a function that is fused.

JAX asks a policy about each equation of a checkpointed function: about `dot_general` and `name`. Fused, these are
products with epilogues, of which a policy knows nothing. So it is asked here, about the equations that the function
had. The graph keeps the variables that it keeps, or values in their place from which they are made without a product,
under names that hold the policy's answer (`KeptName`); and `Remat` gives that answer to `jax.checkpoint`.

`jax.checkpoint` asks a policy as it is where that keeps all of a function, or nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jax import lax
from jax.ad_checkpoint import Offloadable
from jax.extend import core

from coda_jax.attend.primitive import CONTEXT_NAME
from coda_jax.fusion.alike import is_attention
from coda_jax.fusion.dots import Equation
from coda_jax.fusion.rows import SHAPES
from coda_jax.graph.on_mesh import ELEMENTWISE, PVARY
from coda_jax.graph.row_axes import KEEPS_ROWS
from coda_jax.graph.saved import answer_about, is_kept
from coda_jax.jaxprs.calls import CALLS, CUSTOM_DERIVATIVES
from coda_jax.jaxprs.def_use import definitions, variables
from coda_jax.jaxprs.walk import equations, inner_jaxprs, num_carried, num_constants

_SAME = PVARY | {"convert_element_type", "copy", "name", "reshape", "squeeze", "transpose"}
_MOVES = frozenset({"gather", "dynamic_slice", "rev", "sort", "cumsum"})
_RANDOM = frozenset({"random_bits", "random_wrap", "random_unwrap", "random_fold_in", "random_split", "random_seed"})
_CHEAP = _SAME | ELEMENTWISE | SHAPES | KEEPS_ROWS.keys() | _MOVES | _RANDOM
ARGUMENT = "argument"  # in the place of an answer: of what is computed of arguments alone


@dataclasses.dataclass(frozen=True)
class Remat:
    """A policy of `jax.checkpoint`, as the same for a function that is fused.

    Attributes:
      policy: the user's.
      has_effects: whether the function has side effects. What these read is not kept: JAX raises a KeyError then.
      is_part: whether the function is a part of what the checkpoint holds, which may compute its results again.
    """

    policy: Callable[..., Any]
    has_effects: bool = dataclasses.field(default=False, compare=False)
    is_part: bool = dataclasses.field(default=False, compare=False)

    def __call__(self, primitive: Any, *types: Any, **params: Any) -> Any:
        """The policy's answer; about a name of what a graph keeps, the answer that the name holds."""
        name = params.get("name")
        return name.answers.get(self, False) if isinstance(name, KeptName) else self.policy(primitive, *types, **params)

    def answer(self, equation: Equation) -> Any:
        """The policy's answer about an equation; None where its results are computed again."""
        primitive, params, inputs = equation.primitive, equation.params, equation.invars
        if "rounding" in params:  # the policy knows products by their primitive
            primitive, inputs = lax.dot_general_p, inputs[:2]
            params = {key: value for key, value in params.items() if key != "rounding"}
        answer = self.policy(primitive, *(x.aval for x in inputs), **params)
        return answer if is_kept(answer) else None

    def keeps_attention(self, equation: Equation) -> bool:
        """True if the policy keeps results of `coda.attention`, which its derivative names, on the device."""
        answer = answer_about(self.policy, equation.outvars[0].aval, CONTEXT_NAME)
        return is_kept(answer) and not isinstance(answer, Offloadable)

    def answers(self, jaxpr: core.Jaxpr) -> Iterator[Any]:
        """The answers about all equations that hold no others, with those in loops and calls."""
        return (self.answer(equation) for equation, _ in equations(jaxpr) if not inner_jaxprs(equation))

    def kept(self, jaxpr: core.Jaxpr) -> dict[Any, Any]:
        """The variables that the policy keeps, with its answers, and those that are the same in another form."""
        found: dict[Any, Any] = {}
        for equation in jaxpr.eqns:
            if is_attention(equation):
                if self.keeps_attention(equation):
                    found |= dict.fromkeys(equation.outvars, True)
            elif inner := inner_jaxprs(equation):
                is_opened = equation.primitive.name in CUSTOM_DERIVATIVES and len(inner[0].outvars) == len(
                    equation.outvars
                )
                inside = self.kept(inner[0]) if is_opened else {}
                pairs = zip(equation.outvars, inner[0].outvars, strict=True) if is_opened else ()
                found |= {x: inside[y] for x, y in pairs if y in inside}
            elif (answer := self.answer(equation)) is not None:
                found |= dict.fromkeys(equation.outvars, answer)
            elif equation.primitive.name in _SAME and not found.keys().isdisjoint(variables(equation.invars)):
                found |= dict.fromkeys(equation.outvars, found[equation.invars[0]])
        return found

    def without_products(self, jaxpr: core.Jaxpr, given: Sequence[Any] | None = None) -> dict[Any, Any]:
        """The variables that are kept, or computed of what is kept and of arguments with no product run again.

        Args:
          given: the arguments that are such variables, by number; None for all.

        Returns:
          The policy's answers about what they are computed of; `ARGUMENT` for what no policy keeps.
        """
        flags = [True] * len(jaxpr.invars) if given is None else given
        found = dict.fromkeys((*jaxpr.constvars, *itertools.compress(jaxpr.invars, flags)), ARGUMENT)
        kept = self.kept(jaxpr)
        for equation in jaxpr.eqns:
            inputs = variables(equation.invars)
            if any(x in kept for x in equation.outvars):
                found |= {x: kept[x] for x in equation.outvars if x in kept}
            elif inner_jaxprs(equation):
                flags = [isinstance(x, core.Literal) or x in found for x in equation.invars]
                found |= dict(zip(equation.outvars, self._results(equation, flags), strict=True))
                found = {x: answer for x, answer in found.items() if answer is not None}
            elif is_cheap(equation) and all(x in found for x in inputs):
                answers = [found[x] for x in inputs if found[x] is not ARGUMENT]
                found |= dict.fromkeys(equation.outvars, answers[0] if answers else ARGUMENT)
        return found

    def borders(self, jaxpr: core.Jaxpr) -> set[Any]:
        """The variables that are kept and made of what is not: all others that are kept may be made of these."""
        known, kept = self.without_products(jaxpr), self.kept(jaxpr)
        made_of_others = [e for e in jaxpr.eqns if not all(x in known for x in variables(e.invars))]
        return kept.keys() & definitions(made_of_others)

    def _results(self, equation: Equation, flags: Sequence[bool]) -> list[Any]:
        """The answers about the results of an equation with jaxprs of its own; None where a product is run again."""
        inner, none = inner_jaxprs(equation), [None] * len(equation.outvars)
        name = equation.primitive.name
        if name == "cond":
            each = [self.without_products(one, flags[1:]) for one in inner] if flags[0] else []
        elif name == "scan" or name in CALLS | CUSTOM_DERIVATIVES:
            each = [self.without_products(inner[0], flags)] if len(inner[0].invars) == len(flags) else []
        else:
            return none
        if name == "scan":
            consts, carried = num_constants(equation), num_carried(equation)
            is_carried = all(x in each[0] for x in variables(inner[0].outvars[:carried]))
            if not is_carried or not all(flags[consts : consts + carried]):
                return none
        of = [
            [ARGUMENT if isinstance(x, core.Literal) else found.get(x) for x in one.outvars]
            for one, found in zip(inner, each, strict=False)
        ]
        if not of or any(len(one) != len(none) for one in of):
            return none
        return [
            None if None in answers else max(answers, key=lambda x: x is not ARGUMENT)
            for answers in zip(*of, strict=True)
        ]


@dataclasses.dataclass(frozen=True)
class AnyOf:
    """The policy that keeps what one of these policies keeps, with the answer of the first that does."""

    policies: Sequence[Callable[..., Any]]

    def __call__(self, primitive: Any, *types: Any, **params: Any) -> Any:
        answers = (policy(primitive, *types, **params) for policy in self.policies)
        return next(filter(is_kept, answers), False)


def is_cheap(equation: Equation) -> bool:
    """True for an equation that is no product, and computes no function of its own."""
    return equation.primitive.name in _CHEAP


class KeptName(str):
    """The name of an array that a graph keeps because policies do.

    Attributes:
      answers: theirs; none of those that do not keep it.
    """

    answers: Mapping[Remat, Any]

    @classmethod
    def of(cls, answers: Mapping[Remat, Any], text: str) -> KeptName:
        name = cls(text)
        name.answers = answers
        return name


def remat_of(policy: Callable[..., Any] | None, jaxpr: core.Jaxpr) -> Remat | None:
    """The policy of a checkpoint that is fused; None where it keeps all of the function, or nothing."""
    if policy is None:
        return None
    remat = Remat(policy)
    try:
        answers = list(remat.answers(jaxpr))
    except Exception:  # JAX raises it where it asks: in a derivative
        return None
    is_mixed = any(x is not None for x in answers) and any(x is None for x in answers)
    return remat if is_mixed else None
