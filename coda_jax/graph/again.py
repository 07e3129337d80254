"""A graph's forward pass, computed again by a checkpoint: the products behind the arrays that its policy keeps.

A product's epilogue makes several arrays. Where a policy of `jax.checkpoint` keeps one of them, y = x w, JAX would
compute tanh(y), which a later product reads, by the kernel that made both. So all that a forward pass returns goes
through a primitive that changes nothing, and that tells JAX's partial evaluation how to make it again: by a plan that
is given what the policy keeps. It has the products behind that alone.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import ad, batching, mlir, partial_eval

from coda_jax.graph.calls import Result
from coda_jax.graph.plan import Plan
from coda_jax.graph.run import run
from coda_jax.graph.saved import as_equation, evaluated_again, keeps, named
from coda_jax.graph.values import Leaf, Value

if TYPE_CHECKING:
    from coda_jax.graph.function import Derivative

_again_p = core.Primitive("coda_again")
_same_p = core.Primitive("coda_same")  # it makes nothing again


def made_again(derivative: Derivative, made: Sequence[Any], names: Sequence[str | None], arrays: Sequence[Any]) -> Any:
    """The arrays that a forward pass made; a checkpoint around it computes them again from what its policy keeps.

    Args:
      derivative: whose forward pass made it.
      made: the arrays of the outputs and of the kept values, each maybe several.
      names: of each, by which policies keep it; None of those that they do not keep.
      arrays: the graph's arguments.
    """
    leaves, tree = jax.tree.flatten(list(made))
    if not leaves or not any(names):
        return made
    again = _Again(derivative, tuple(names), tree)
    results = _again_p.bind(*leaves, *arrays, again=again)
    return jax.tree.unflatten(tree, results[: len(leaves)])


@dataclasses.dataclass(frozen=True, eq=False)
class _Again:
    """The results of a forward pass, as functions of some of them.

    Attributes:
      derivative, names: as in `made_again`.
      tree: the structure of the results, each maybe of several arrays.
      chosen: the numbers of the results that it is of, where nobody reads the others; None for all.
      batches: for each vmap around it, the innermost first, the batch axes of the results' arrays and of the graph's
        arguments, and the size of the batch.
    """

    derivative: Derivative
    names: tuple[str | None, ...]
    tree: Any
    chosen: tuple[int, ...] | None = None
    batches: tuple[tuple[Sequence[int | None], Any], ...] = ()

    def kept(self, saveable: Callable[..., Any], types: Sequence[Any]) -> list[bool]:
        """Flags of the results that a policy keeps; types: of their arrays."""
        each = zip(jax.tree.unflatten(self.tree, types), self.names, strict=True)
        return [
            name is not None and all(keeps(saveable, x, name) for x in jax.tree.leaves(parts)) for parts, name in each
        ]

    def flags(self, kept: Sequence[bool]) -> list[bool]:
        """A flag for each array of the results, from one for each result."""
        each = zip(jax.tree.unflatten(self.tree, range(self.tree.num_leaves)), kept, strict=True)
        return [flag for parts, flag in each for _ in jax.tree.leaves(parts)]

    def is_of_call(self) -> list[bool]:
        """Flags of the results that JAX computes again from what it keeps in calls."""
        answers = self.derivative.graph.answers
        calls = frozenset() if answers is None else answers.kept_in_calls
        return [isinstance(x, Result) and x.call in calls for x in self._values]

    def plan(self, given: Sequence[bool]) -> Plan:
        """The plan that makes the results that are not given."""
        each = list(zip(self._values, self._dtypes, given, strict=True))
        known = [x for x, dtype, flag in each if flag and self._is_given(x, dtype)]
        wanted, derivative = [x for x, _, flag in each if not flag], self.derivative
        return Plan(wanted, known, as_stored=derivative.as_stored, unread_rows=derivative.unread_rows)

    def function(self, plan: Plan, given: Sequence[bool]) -> Callable[..., list[jax.Array]]:
        """The arrays of the results as a function of those that are given, and of the graph's arguments."""
        graph, flags = self.derivative.graph, self.flags(given)
        each = list(zip(self._values, self._dtypes, given, strict=True))
        wanted = [dtype for _, dtype, flag in each if not flag]

        def again(*arrays: Any) -> list[jax.Array]:
            own, arguments = iter(arrays[: sum(flags)]), arrays[sum(flags) :]
            results = jax.tree.unflatten(self.tree, [next(own) if flag else 0 for flag in flags])
            known = dict(graph.known(arguments))
            known |= {
                x: of for (x, dtype, flag), of in zip(each, results, strict=True) if flag and self._is_given(x, dtype)
            }
            made = iter(run(plan, known, out_dtypes=wanted, **graph.pass_options(plan, "again")))
            each_result = zip(results, given, self.names, strict=True)
            results = [of if flag else _named(next(made), name) for of, flag, name in each_result]
            # None is an argument itself; a checkpoint in this one may keep others of them.
            inner = dataclasses.replace(self, chosen=self.numbers, batches=())
            same: list[jax.Array] = _again_p.bind(*jax.tree.leaves(results), *arguments, again=inner)
            return same

        function: Callable[..., list[jax.Array]] = again
        for axes, size in self.batches:
            chosen = [axis for axis, flag in zip(axes, flags, strict=False) if flag]
            function = jax.vmap(function, (*chosen, *axes[len(flags) :]), out_axes=list(axes), axis_size=size)
        return function

    def of_results(self, flags: Sequence[bool]) -> _Again:
        """The same of these results alone."""
        parts = itertools.compress(jax.tree.unflatten(self.tree, range(self.tree.num_leaves)), flags)
        leaves, tree = jax.tree.flatten(list(parts))
        batches = tuple(([*(axes[i] for i in leaves), *axes[self.tree.num_leaves :]], n) for axes, n in self.batches)
        names = tuple(itertools.compress(self.names, flags))
        chosen = tuple(itertools.compress(self.numbers, flags))
        return _Again(self.derivative, names, tree, chosen, batches)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of the results that it is of."""
        every = range(len(self.derivative.graph.outputs) + len(self.derivative.kept))
        return tuple(every) if self.chosen is None else self.chosen

    @property
    def _values(self) -> list[Value]:
        every = [*self.derivative.graph.outputs, *self.derivative.kept]
        return [every[i] for i in self.numbers]

    @property
    def _dtypes(self) -> list[Any]:
        graph = self.derivative.graph
        every = [*graph.out_dtypes, *(x.stored_as(graph.dtype) for x in self.derivative.kept)]
        return [every[i] for i in self.numbers]

    def _is_given(self, x: Value, dtype: Any) -> bool:
        """True for a result whose array is the value's, as other products read it."""
        return not isinstance(x, Leaf) and dtype == x.stored_as(self.derivative.graph.dtype)


def _named(x: Any, name: str | None) -> Any:
    """A result, maybe of several arrays, with the name by which policies keep it."""
    return x if name is None else jax.tree.map(functools.partial(named, name=name), x)


def _partly_evaluated(
    saveable: Callable[..., Any], unknown: Sequence[bool], instantiated: Sequence[bool], equation: Any
) -> tuple[Any, Any, list[bool], list[bool], list[Any]]:
    """The equation in a forward pass, and what computes its results again, as JAX's partial evaluation takes them."""
    forward, again = None, equation
    if not any(unknown):
        forward = equation  # a checkpoint around this one may compute it again
        again = _equation_again(saveable, equation) or equation.replace(primitive=_same_p, params={})
    return evaluated_again(equation, forward, again, instantiated)


def _equation_again(saveable: Callable[..., Any], equation: Any) -> Any:
    """The call that makes the results again of what a policy keeps; None where that saves no product."""
    again: _Again = equation.params["again"]
    count = again.tree.num_leaves
    kept = again.kept(saveable, [x.aval for x in equation.invars[:count]])
    given = [a or b for a, b in zip(kept, again.is_of_call(), strict=True)]
    plan = again.plan(given)
    if not any(kept) or len(plan.steps) >= len(again.derivative.forward_plan.steps):
        return None
    each = zip(equation.invars[:count], again.flags(given), strict=True)
    read = [*(x for x, flag in each if flag), *equation.invars[count:]]
    try:
        return as_equation(again.function(plan, given), read, equation)
    except ValueError:  # of a result that a batch shares, which the plan makes beside others that it does not
        return None


def _needed(used: list[bool], *rest: Any) -> tuple[list[bool], Any]:
    """The equation of arrays that are used alone; newer JAX says before it which of its arguments are."""
    equation = rest[-1]
    if not any(used):
        return used, None
    arrays, results = (
        [x for x, flag in zip(each, used, strict=True) if flag] for each in (equation.invars, equation.outvars)
    )
    return used, equation.replace(invars=arrays, outvars=results)


def _needed_again(used: list[bool], *rest: Any) -> tuple[list[bool], Any]:
    """The equation of the results that are used; that of a forward pass of all, of which the others may be made."""
    equation = rest[-1]
    again: _Again = equation.params["again"]
    count = again.tree.num_leaves
    if not any(used[:count]):
        return _needed(used, equation.replace(primitive=_same_p, params={}))
    if again.chosen is None:
        return [True] * len(used), equation
    parts = jax.tree.unflatten(again.tree, used[:count])
    results = [any(jax.tree.leaves(flags)) for flags in parts]
    flags = [*again.flags(results), *[True] * (len(used) - count)]
    arrays, outputs = (list(itertools.compress(each, flags)) for each in (equation.invars, equation.outvars))
    shorter = equation.replace(invars=arrays, outvars=outputs, params={"again": again.of_results(results)})
    return flags, shorter


def _batched(
    axis: Any, arrays: Sequence[jax.Array], dims: Sequence[int | None], *, again: _Again
) -> tuple[list[jax.Array], list[int | None]]:
    if axis.explicit_mesh_axis is not None:
        return list(arrays), list(dims)
    arrays = [x if dim is None else jnp.moveaxis(x, dim, 0) for x, dim in zip(arrays, dims, strict=True)]
    axes = [None if dim is None else 0 for dim in dims]
    batch = dataclasses.replace(again, batches=(*again.batches, (axes, axis.size)))
    return _again_p.bind(*arrays, again=batch), axes


def _batched_alike(
    arrays: Sequence[jax.Array], dims: Sequence[int | None]
) -> tuple[list[jax.Array], Sequence[int | None]]:
    return _same_p.bind(*arrays), dims


def _jvp(primitive: Any, primals: Sequence[jax.Array], tangents: Sequence[Any], **params: Any) -> Any:
    return primitive.bind(*primals, **params), list(tangents)


for primitive in (_again_p, _same_p):
    primitive.multiple_results = True
    primitive.def_impl(lambda *arrays, **_: list(arrays))
    primitive.def_abstract_eval(lambda *types, **_: list(types))
    mlir.register_lowering(primitive, lambda _, *arrays, **__: list(arrays))
    ad.primitive_jvps[primitive] = functools.partial(_jvp, primitive)
batching.fancy_primitive_batchers[_again_p] = _batched
batching.primitive_batchers[_same_p] = _batched_alike
partial_eval.dce_rules[_same_p] = _needed
partial_eval.dce_rules[_again_p] = _needed_again
partial_eval.partial_eval_jaxpr_custom_rules[_again_p] = _partly_evaluated
