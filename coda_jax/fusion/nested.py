"""Equations that hold jaxprs of their own, run with these fused: loops, branches, checkpoints."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from coda_jax.fusion.custom import CUSTOM_VJPS, Rule, may_be_opened, rule_of
from coda_jax.fusion.dots import PRODUCTS, Equation
from coda_jax.fusion.makers import among
from coda_jax.fusion.remat import AnyOf, Remat, remat_of
from coda_jax.fusion.rounded_products import flags_in_body
from coda_jax.fusion.stacks import stacked
from coda_jax.fusion.straight import (
    CHECKPOINTS,
    JITS,
    at_line,
    is_call,
    is_inner,
    is_opaque,
    is_stacked,
    name_of_inner,
)
from coda_jax.graph.calls import is_key
from coda_jax.jaxprs.bind import bind
from coda_jax.jaxprs.calls import callee, opened
from coda_jax.jaxprs.evaluate import without_constants
from coda_jax.jaxprs.walk import equations, inner_jaxprs, num_carried, num_constants
from coda_jax.operators.fp8_matmul import product_of
from coda_jax.operators.rounded_dot import rounded_dot_p
from coda_jax.primitives.reverse_mode import shared

Function = Callable[..., Sequence[Any]]


class Nested:
    """Runs an equation, with the bodies in it that have products fused.

    Args:
      fused: the function that a closed jaxpr becomes; the second argument is the name of what holds it, the third are
        the policies of the checkpoints that hold it.
      call: `fused` for a fused function that is called, one function for all calls; the last argument are flags of
        arguments that have no derivative.
      remats: the policies of the checkpoints that hold the equations, the innermost first.
      weights: the variables that are weights, where products with these are rounded to 8 bits.
      fused_in_jit: `fused` for what a jitted function holds, if that is another one.
      fused_in_rule: `fused` for the functions of a custom_vjp, which nobody differentiates, if that is another one.
      fused_in_step: `fused` for the body of a loop, if that is another one.
      fixed: the variables that have no derivative.
    """

    def __init__(
        self,
        fused: Callable[[core.ClosedJaxpr, str, Sequence[Remat], Sequence[bool]], Function],
        call: Callable[[Any, str, Sequence[Remat], Sequence[bool], Sequence[bool]], Function],
        remats: Sequence[Remat],
        weights: Collection[Any] = (),
        fused_in_jit: Callable[[core.ClosedJaxpr, str, Sequence[Remat], Sequence[bool]], Function] | None = None,
        fused_in_rule: Callable[[core.ClosedJaxpr, str, Sequence[Remat], Sequence[bool]], Function] | None = None,
        fused_in_step: Callable[[core.ClosedJaxpr, str, Sequence[Remat], Sequence[bool]], Function] | None = None,
        fixed: Collection[Any] = (),
    ):
        self._fused, self._remats, self._weights = fused, tuple(remats), weights
        self._call, self._fixed = call, fixed
        self._around = [dataclasses.replace(one, is_part=True) for one in self._remats]  # the same for all bodies
        others = {"jit": fused_in_jit, "rule": fused_in_rule, "step": fused_in_step}
        self._fused_in = {of: other or fused for of, other in others.items()}
        self._known: dict[Hashable, tuple[Any, Function]] = {}  # bodies, by identity and weights, and their functions
        self._jitted: dict[Hashable, core.ClosedJaxpr] = {}  # the same of jitted functions, as jaxprs

    def __call__(self, equation: Equation, inputs: Sequence[Any]) -> Sequence[Any]:
        """The results of an equation, at its line."""
        results: Sequence[Any] = at_line(equation, self._results, equation, inputs)
        return results

    def _results(self, equation: Equation, inputs: Sequence[Any]) -> Sequence[Any]:
        if equation.primitive.name == rounded_dot_p.name:
            return [product_of(inputs, **equation.params)]
        if is_opaque(equation):
            return bind(equation.primitive, inputs, equation.params)
        equation = self._with_policies(equation)
        run, has_bodies = _rule(equation), any(map(has_products, inner_jaxprs(equation)))
        if run is _by_its_rule and self._keeps(opened(callee(equation))[0]):
            run = None  # the policies are asked about the equations of the rule
        flags = flags_in_body(equation, [among(x, self._weights) for x in equation.invars])
        if run is None and equation.primitive.name in JITS and has_bodies:  # its arrays are donated as they are
            return bind(equation.primitive, inputs, {**equation.params, "jaxpr": self._of_jit(equation, flags)})
        # JAX refuses an eager gradient of a shard_map that holds a rule with symbols of zeros: it is jitted without
        # products too.
        if run is None or not (has_bodies or run is shard_mapped):
            return bind(equation.primitive, inputs, equation.params)
        if is_call(equation):
            each = zip(equation.invars, as_arrays(equation, inputs), strict=True)
            given = (lax.stop_gradient(x) if among(v, self._fixed) else x for v, x in each)
            return self.called(equation)(*opened(callee(equation))[1], *given)
        return run(functools.partial(self._function, flags=flags), equation, as_arrays(equation, inputs))

    def called(self, equation: Equation) -> Function:
        """The function that a call of a fused function becomes, of its constants and its arguments."""
        body = callee(equation)
        flags = ([among(x, of) for x in equation.invars] for of in (self._weights, self._fixed))
        return self._call(body, name_of_inner(equation), self._around, *flags)

    def _with_policies(self, equation: Equation) -> Equation:
        """The equation; a checkpoint with what the policies around it keep in it kept too, and not computed again."""
        if equation.primitive.name not in CHECKPOINTS or equation.params.get("differentiated"):
            return equation
        body, own = opened(callee(equation))[0], equation.params["policy"]
        keeping = [remat for remat in self._remats if any(answer is not None for answer in remat.answers(body))]
        others = [remat for remat in keeping if remat.policy != own]
        if not others:
            return equation
        policy = AnyOf((own, *others)) if own is not None else AnyOf(tuple(others))
        return equation.replace(params={**equation.params, "policy": policy})

    def _keeps(self, jaxpr: core.Jaxpr) -> bool:
        """True if a policy keeps something of a jaxpr."""
        return any(answer is not None for remat in self._remats for answer in remat.answers(jaxpr))

    def _function(
        self,
        body: Any,
        name: str,
        remat: Remat | None = None,
        *,
        of: str = "",
        flags: Sequence[bool] = (),
        checkpoint: tuple[Any, bool | tuple[bool, ...]] | None = None,
    ) -> Function:
        """The function that a body becomes, made once, so that JAX traces the checkpoints of equal layers once.

        Args:
          body: a jaxpr.
          name: of what holds it.
          remat: the policy of the checkpoint that it is the body of.
          flags: which of its arguments are weights; of others than it has, as a rule's are, none.
          of: "jit" for the body of a jitted function, "rule" for a function of a custom_vjp, "step" for a loop's body.
          checkpoint: the user's policy and `prevent_cse` of a `jax.checkpoint` of the function.
        """
        key = id(body), tuple(flags), checkpoint and (id(checkpoint[0]), checkpoint[1])
        if key not in self._known:
            closed = core.ClosedJaxpr(*opened(body))
            is_alike = len(flags) == len(closed.in_avals)
            weights = list(flags) if is_alike else [False] * len(closed.in_avals)
            remats = self._around if remat is None else [remat, *self._around]
            fused = self._fused_in.get(of, self._fused)
            made = functools.partial(fused(closed, name, remats, weights), *closed.consts)
            function: Function = made
            if checkpoint is not None:
                policy, prevent_cse = checkpoint
                function = jax.checkpoint(
                    shared()(lambda *xs: list(made(*xs))),
                    policy=policy if remat is None else remat,
                    prevent_cse=prevent_cse,
                )
            self._known[key] = [body, checkpoint], function
        return self._known[key][1]

    def _of_jit(self, equation: Equation, flags: Sequence[bool]) -> core.ClosedJaxpr:
        """The jaxpr that a jitted function's becomes; the same each time, so that it is compiled once."""
        body = callee(equation)
        key = id(body), jax.sharding.get_abstract_mesh(), tuple(flags)
        if key not in self._jitted:
            function = self._function(body, str(equation.params["name"]), of="jit", flags=flags)
            types: list[Any] = [x.aval for x in opened(body)[0].invars]
            self._jitted[key] = jax.make_jaxpr(shared()(lambda *xs: list(function(*xs))))(*types)
        return self._jitted[key]


def _rule(equation: Equation) -> Callable[..., Sequence[Any]] | None:
    """How the bodies of an equation are run fused; None where they stay."""
    if is_inner(equation):
        return _call
    if is_stacked(equation):
        return _stacked
    if equation.primitive.name in CUSTOM_VJPS:
        if any(is_inner(inner) for inner, _ in equations(opened(callee(equation))[0])):
            return _custom_vjp
        return _by_its_rule if may_be_opened(equation) else None
    return _RULES.get(equation.primitive.name)


def as_arrays(equation: Equation, inputs: Sequence[Any]) -> list[Any]:
    """The inputs of an equation; numbers among them as arrays of its dtypes."""
    return [
        jnp.asarray(x, v.aval.dtype) if jnp.ndim(x) == 0 and not is_key(v.aval) else x
        for x, v in zip(inputs, equation.invars, strict=True)
    ]


def has_products(jaxpr: core.Jaxpr) -> bool:
    return _count_of_products(jaxpr) > 0


def _count_of_products(jaxpr: core.Jaxpr) -> int:
    return sum(equation.primitive.name in PRODUCTS for equation, _ in equations(jaxpr))


def run_scan(fused: Callable[..., Function], equation: Equation, inputs: Sequence[Any]) -> Sequence[Any]:
    """The results of a loop; inputs behind its own are stacked, and each step gets its part behind its arguments."""
    params, consts, carried = equation.params, num_constants(equation), num_carried(equation)
    body = fused(params["jaxpr"], "scan", of="step")

    def step(carry: Sequence[Any], xs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        outputs = list(body(*inputs[:consts], *carry, *xs))
        return outputs[:carried], outputs[carried:]

    carry, stacked = lax.scan(
        step,
        list(inputs[consts : consts + carried]),
        list(inputs[consts + carried :]),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *stacked]


def _stacked(fused: Callable[..., Function], equation: Equation, inputs: Sequence[Any]) -> Sequence[Any]:
    return stacked(equation, inputs, lambda loop: fused(loop.params["jaxpr"], "scan", of="step"))


def run_cond(fused: Callable[..., Function], equation: Equation, inputs: Sequence[Any]) -> Sequence[Any]:
    """The results of a branch; inputs behind the equation's own are arguments of all branches."""
    index, *operands = inputs
    branches = [fused(branch, "cond") for branch in equation.params["branches"]]
    results: Sequence[Any] = lax.switch(index, [lambda *xs, f=f: list(f(*xs)) for f in branches], *operands)
    return results


def _while(fused: Callable[..., Function], equation: Equation, inputs: Sequence[Any]) -> Sequence[Any]:
    params = equation.params
    cond_end = params["cond_nconsts"]
    body_end = cond_end + params["body_nconsts"]
    cond = core.jaxpr_as_fun(core.ClosedJaxpr(*opened(params["cond_jaxpr"])))
    body = fused(params["body_jaxpr"], "while", of="step")
    cond_consts, body_consts = inputs[:cond_end], inputs[cond_end:body_end]
    results: Sequence[Any] = lax.while_loop(
        lambda state: cond(*cond_consts, *state)[0],
        lambda state: list(body(*body_consts, *state)),
        list(inputs[body_end:]),
    )
    return results


def _checkpoint(fused: Callable[..., Function], equation: Equation, inputs: Sequence[Any]) -> Sequence[Any]:
    params, inner = equation.params, callee(equation)
    is_differentiated = params.get("differentiated")
    if not is_differentiated:
        remat = remat_of(params["policy"], opened(inner)[0])
        checkpoint = params["policy"], params["prevent_cse"]
        results: Sequence[Any] = fused(inner, "checkpoint", remat, checkpoint=checkpoint)(*inputs)
        return results
    body = fused(inner, "checkpoint")
    closed = jax.make_jaxpr(lambda *xs: list(body(*xs)))(*map(jax.typeof, inputs))  # a backward pass: its barrier stays
    return with_body(equation, without_constants(closed), closed.consts, inputs)


def with_body(
    equation: Equation, whole: core.ClosedJaxpr, consts: Sequence[Any], inputs: Sequence[Any]
) -> Sequence[Any]:
    """The results of a checkpoint that holds another jaxpr.

    Args:
      equation: the checkpoint.
      whole: the jaxpr, without constants.
      consts: its first arguments.
      inputs: the others: those that the checkpoint had, and further ones behind these.
    """
    params = {**equation.params, "jaxpr": whole if isinstance(callee(equation), core.ClosedJaxpr) else whole.jaxpr}
    if isinstance(flags := params["prevent_cse"], tuple):  # one for each argument
        params["prevent_cse"] = (*[False] * len(consts), *flags, *[True] * (len(inputs) - len(flags)))
    return bind(equation.primitive, [*consts, *inputs], params)


def _call(fused: Callable[..., Function], equation: Equation, inputs: Sequence[Any]) -> Sequence[Any]:
    return fused(callee(equation), "fuse")(*inputs)


def _custom_vjp(fused: Callable[..., Function], equation: Equation, inputs: Sequence[Any]) -> Sequence[Any]:
    """The function alone; its rules, whose functions are traced outside of the one around, are fused where they are."""
    body, held = fused(callee(equation), "custom_vjp"), callee(equation)
    closed = jax.make_jaxpr(lambda *xs: list(body(*xs)))(*map(jax.typeof, inputs))
    return bind(equation.primitive, inputs, {k: closed if x is held else x for k, x in equation.params.items()})


def _by_its_rule(fused: Callable[..., Function], equation: Equation, inputs: Sequence[Any]) -> Sequence[Any]:
    """The function and both functions of its rule, each fused by itself; as it is where that has no product fused."""
    value, body = fused(callee(equation), "custom_vjp", of="rule"), opened(callee(equation))[0]
    closed = jax.make_jaxpr(lambda *xs: list(value(*xs)))(*map(jax.typeof, inputs))
    if _count_of_products(closed.jaxpr) >= _count_of_products(body):
        return bind(equation.primitive, inputs, equation.params)
    rules: list[Rule] = []

    def forward(*arrays: Any) -> tuple[list[Any], Any]:
        if not rules:
            rules.append(rule_of(equation, [jax.typeof(x) for x in arrays]))
        outputs = list(fused(rules[0].forward, "custom_vjp forward", of="rule")(*arrays))
        count = len(equation.outvars)
        return outputs[:count], outputs[count:]

    def backward(kept: Sequence[Any], cotangents: Sequence[Any]) -> tuple[Any, ...]:
        found = iter(fused(rules[0].backward, "custom_vjp backward", of="rule")(*kept, *cotangents))
        return tuple(next(found) if flag else None for flag in rules[0].is_differentiated)

    function = jax.custom_vjp(lambda *xs: list(value(*xs)))
    function.defvjp(forward, backward)
    results: Sequence[Any] = function(*inputs)
    return results


def shard_mapped(fused: Callable[..., Function], equation: Equation, inputs: Sequence[Any]) -> Sequence[Any]:
    """The results of a shard_map whose body is another function; `fused` gives that, for the body and a name."""
    params = equation.params
    axes = params["newly_manual_axes"] if "newly_manual_axes" in params else params["manual_axes"]
    body = fused(params["jaxpr"], "shard_map")
    mapped = jax.shard_map(
        lambda *xs: list(body(*xs)),
        mesh=params["mesh"],
        in_specs=params["in_specs"],
        out_specs=list(params["out_specs"]),
        axis_names=set(axes),
        check_vma=params["check_vma"],
    )
    results: Sequence[Any] = jax.jit(mapped)(*inputs)  # one that is not compiled refuses custom_vjp's zeros
    return results


_RULES: Mapping[str, Callable[..., Sequence[Any]]] = {
    "scan": run_scan,
    "cond": run_cond,
    "while": _while,
    "shard_map": shard_mapped,
    **dict.fromkeys(CHECKPOINTS, _checkpoint),
}
