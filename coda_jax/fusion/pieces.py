"""The straight pieces of a function: each becomes a graph, or stays as it is, with a reason."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from coda_jax.epilogue.values import same_size
from coda_jax.fusion.attention import cudnn
from coda_jax.fusion.attention.in_loops import with_attention_in_loops
from coda_jax.fusion.attention.masks_inside import may_hold_attention, with_masks_inside
from coda_jax.fusion.attention.rule import Attentions, with_attention
from coda_jax.fusion.borders import borders_cost_nothing, read_otherwise
from coda_jax.fusion.centred import with_centred_sums
from coda_jax.fusion.constraints_in_front import (
    constrained_arguments,
    gathered_arguments,
    with_constraints_in_front,
)
from coda_jax.fusion.dots import Dot, Equation, convolution_flops, dot_of, is_derivative, products_in
from coda_jax.fusion.flat_columns import with_flat_columns
from coda_jax.fusion.kept_bytes import has_tangent, kept_by_graph, kept_by_jax, surely_kept_by_jax
from coda_jax.fusion.layers import with_layers_as_calls
from coda_jax.fusion.lift import Lifted, lifted
from coda_jax.fusion.losses.loss import with_losses
from coda_jax.fusion.losses.loss_gradient import with_loss_gradients
from coda_jax.fusion.losses.whole_logits import with_losses_in_sight
from coda_jax.fusion.narrow_views import with_narrow_views
from coda_jax.fusion.nested import Function, Nested, has_products
from coda_jax.fusion.orders import with_rows_first
from coda_jax.fusion.parts_in_front import with_parts_in_place
from coda_jax.fusion.remat import Remat
from coda_jax.fusion.residuals import with_fewer_residuals
from coda_jax.fusion.rounded_products import weights_in, with_rounded_products
from coda_jax.fusion.routing_weights import with_weights_in_front
from coda_jax.fusion.row_sums import with_row_sums_in_front
from coda_jax.fusion.stacks import with_stacks
from coda_jax.fusion.straight import is_call, is_inner, is_jitted, jitted, line_of, repeated, straight
from coda_jax.graph.calls import data_of, is_key, key_impl_of
from coda_jax.graph.function import Graph
from coda_jax.graph.on_mesh import reshaped_as, typed
from coda_jax.graph.rounded import Recipe
from coda_jax.graph.values import reachable
from coda_jax.jaxprs.calls import callee, opened
from coda_jax.jaxprs.def_use import free_variables, variables
from coda_jax.jaxprs.evaluate import evaluate, read, run, without_constants
from coda_jax.jaxprs.walk import equations, inner_jaxprs
from coda_jax.primitives.mesh_types import explicit_cuts, explicit_sharding, vary, varying_axes, with_sharding
from coda_jax.primitives.reverse_mode import shared

_COLLECTIVES = ("psum", "pmax", "pmin", "ppermute", "all_gather", "all_to_all", "reduce_scatter", "psum_scatter")
_SLACK_PERCENT, _VECTORS = 1, 2**16  # a graph keeps a norm's statistics, some bytes a row, which JAX may compute again


@dataclasses.dataclass(frozen=True)
class Options:
    """How functions are fused.

    Attributes:
      is_exact: whether values are rounded where the function rounds them; then norms and losses stay as they are.
      defer_norms: whether products read norms deferred; None: each norm where that saves bytes.
      chunk_losses: whether losses over a vocabulary become operators.
      attention: whether attention becomes `coda.attention`.
      memory: "same" where a backward pass may keep no more than JAX's own; None for whatever is fastest.
      implementation: as in `gemm`.
      fp8: how products with weights are rounded to 8 bits; None for not at all.
    """

    is_exact: bool = False
    defer_norms: bool | None = None
    chunk_losses: bool = True
    attention: bool = True
    memory: str | None = "same"
    implementation: str = "auto"
    fp8: Recipe | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Losses:
    """The losses over a vocabulary in a piece.

    Attributes:
      source: its equations as they were written.
      taken: the products that became part of a loss, and the operators that these are.
    """

    source: core.ClosedJaxpr
    taken: Sequence[tuple[Equation, str]] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class _Place:
    """The place of a function in others.

    Attributes:
      remats: the policies of the checkpoints that hold it, the innermost first.
      kind: "step" for the body of a loop, and what it holds, "body" for that of a branch or a checkpoint, "rule" for a
        function of a custom_vjp, and what it holds: nobody differentiates it; "outer" for no body.
      weights: which arguments are weights, or views of these.
      fixed: which arguments have no derivative.
      gathered: the numbers of those that devices gather, as FSDP's weights.
    """

    remats: Sequence[Remat]
    kind: str
    weights: Sequence[bool]
    fixed: Sequence[bool]
    gathered: frozenset[int] = frozenset()

    def behind(self, count: int) -> _Place:
        """The same of a function with so many constants in front of its arguments."""
        weights, fixed = [*[True] * count, *self.weights], [*[False] * count, *self.fixed]
        return dataclasses.replace(self, weights=weights, fixed=fixed)


@dataclasses.dataclass(frozen=True, eq=False)
class Piece:
    """A straight function: the function itself, a loop's body, a branch, what a checkpoint holds.

    Attributes:
      name: of the function, or of what holds it.
      lifted: the graph that it became; None if it stays as it is.
      reason: why it stays.
      jaxpr: its equations.
      nested: runs those that hold jaxprs of their own, which are pieces too.
      losses: those over a vocabulary.
      attentions: its attention.
      in_rule: whether it is a function of a custom_vjp, which nobody differentiates.
      unrounded: why products are not rounded to 8 bits, by their equations' ids, where a recipe was given.
      count: how many calls of a fused function it is; 1 for anything else.
    """

    name: str
    lifted: Lifted | None
    reason: str
    jaxpr: core.ClosedJaxpr
    nested: Nested
    losses: Losses
    attentions: Attentions
    in_rule: bool = False
    unrounded: Mapping[int, str] = dataclasses.field(default_factory=dict)
    count: int = 1

    @property
    def taken(self) -> list[tuple[Equation, str]]:
        """The products that became part of an operator, and the operators."""
        return [*self.attentions.taken, *self.losses.taken]

    @property
    def left(self) -> list[tuple[Equation, str]]:
        """The products that stay as they are, and why."""
        if self.lifted is None:
            return [(equation, self.reason) for equation in products_in(self.jaxpr.jaxpr).values()]
        return [(equation, reason) for equation, reason in self.lifted.products if isinstance(reason, str)]

    @property
    def stays(self) -> bool:
        """Whether nothing of it is fused: it is no graph, and operators have not taken all of its products."""
        return self.lifted is None and not (self.taken and not products_in(self.jaxpr.jaxpr))

    def __call__(self, *arrays: Any) -> Sequence[Any]:
        if self.lifted is None:
            return evaluate(self.jaxpr.jaxpr, self.jaxpr.consts, arrays, self.nested, opens=())
        given = (_as_array(arrays[i], self.jaxpr.in_avals[i]) for i in self.lifted.sources)
        outputs = self.lifted.graph(*map(data_of, given))
        return [_as_result(x, aval) for x, aval in zip(outputs, self.jaxpr.out_avals, strict=True)]


class Pieces:
    """The pieces of a function, made when they are first called with arrays of new types.

    Attributes:
      made: all of them, in order.
      kernels: the products of the function that are kernels before it is fused, with the user's lines.
    """

    def __init__(self, options: Options):
        self.options, self.made, self.kernels = options, list[Piece](), list[tuple[Equation, str]]()
        self._bodies: dict[Hashable, Any] = {}  # of maps of all pieces
        self._calls: dict[Hashable, tuple[Any, Function]] = {}  # jaxprs of fused functions, and what they become

    def function(
        self,
        closed: core.ClosedJaxpr,
        name: str,
        remats: Sequence[Remat] = (),
        weights: Sequence[bool] | None = None,
        *,
        kind: str = "body",
        fixed: Sequence[bool] | None = None,
    ) -> Function:
        """A jaxpr, fused, as a function of its constants and its arguments.

        Args:
          name: of the function, or of what holds it.
          remats, kind: as in `_Place`.
          weights: as there, of the arguments; None for all, as far as they have no rows.
          fixed: as there; None for none.
        """
        whole = without_constants(closed)
        if not has_products(whole.jaxpr) and not cudnn.has_calls(whole.jaxpr):
            return core.jaxpr_as_fun(whole)
        known: dict[Hashable, Function] = {}
        count = len(closed.in_avals)
        place = _Place(remats, kind, weights or [weights is None] * count, fixed or [False] * count)

        def function(*arrays: Any) -> Sequence[Any]:
            key = jax.sharding.get_abstract_mesh(), tuple(map(signature, arrays))
            if key not in known:
                known[key] = self._function_at(whole, closed.consts, name, arrays, place.behind(len(closed.consts)))
            return known[key](*arrays)

        return function

    def called(
        self,
        body: Any,
        name: str,
        remats: Sequence[Remat],
        weights: Sequence[bool],
        fixed: Sequence[bool],
        *,
        kind: str,
    ) -> Function:
        """The function that a fused function becomes where it is called, of its constants and its arguments.

        It is one jitted function for equal calls, which JAX traces, differentiates and transposes once.
        """
        key = id(body), jax.sharding.get_abstract_mesh(), tuple(remats), tuple(weights), tuple(fixed), kind
        if key not in self._calls:
            closed = core.ClosedJaxpr(*opened(body))
            function = self.function(closed, name, remats, weights, kind=kind, fixed=fixed)
            self._calls[key] = body, jitted(name, shared()(lambda *arrays: list(function(*arrays))))
        return self._calls[key][1]

    def _function_at(
        self, whole: core.ClosedJaxpr, constants: Sequence[Any], name: str, arrays: Sequence[Any], place: _Place
    ) -> Function:
        """The function for arrays of these types; where it stays as it is, fused functions in it are fused alone.

        The first of its arguments are constants. A fused function that it calls more than once stays a call where this
        costs nothing: it is traced, planned and differentiated once.
        """
        if place.kind == "outer" and is_jitted(whole.jaxpr):  # one program where it is called outside of another one
            function = self._opened_at(whole, constants, name, arrays, place)
            assert function is not None
            return function
        before = len(self.made)
        for calls in self._with_calls(whole, arrays, place):
            function = self._opened_at(calls, constants, name, arrays, place, calls_cost_nothing=True)
            if function is not None:
                return function
            del self.made[before:]  # the calls, which are opened
        function = self._opened_at(straight(whole, arrays), constants, name, arrays, place)
        if any(piece.stays for piece in self.made[before:]):
            flat = straight(whole, arrays, opens_inner=False)
            if any(map(is_inner, flat.jaxpr.eqns)):
                del self.made[before:]
                function = self._opened_at(flat, constants, name, arrays, place)
        assert function is not None
        return function

    def _with_calls(self, whole: core.ClosedJaxpr, arrays: Sequence[Any], place: _Place) -> Iterator[core.ClosedJaxpr]:
        """A jaxpr as straight ones with calls that are alike, where these may stay calls."""
        if place.remats or varying_axes(*arrays) or whole.jaxpr.effects:
            return
        if calls := repeated(whole.jaxpr):
            flat = straight(whole, arrays, stays=lambda e: id(callee(e)) in calls)
            if not is_derivative(flat.jaxpr):
                yield from with_good_borders(flat)
        if place.kind == "outer":
            flat = straight(whole, arrays)
            layers = None if is_derivative(flat.jaxpr) else with_layers_as_calls(flat)
            if layers is not None:
                yield from with_good_borders(layers)

    def _opened_at(
        self,
        flat: core.ClosedJaxpr,
        constants: Sequence[Any],
        name: str,
        arrays: Sequence[Any],
        place: _Place,
        *,
        calls_cost_nothing: bool = False,
    ) -> Function | None:
        """The function of a straight jaxpr, the first of whose arguments are constants.

        With `calls_cost_nothing` it is None where one that opens its calls of fused functions may be better.
        """
        flat, attentions = with_parts_in_place(flat), Attentions()
        if self.options.attention and not self.options.is_exact:
            flat, in_loops = with_attention_in_loops(
                with_masks_inside(flat), implementation=self.options.implementation
            )
            known = dict(zip(flat.jaxpr.constvars, flat.consts, strict=True))
            known |= dict(zip(flat.jaxpr.invars, constants, strict=False))
            if calls_cost_nothing and _gives_masks(flat.jaxpr, known):
                return None
            flat, attentions = with_attention(flat, known, implementation=self.options.implementation)
            attentions = dataclasses.replace(attentions, taken=[*in_loops, *attentions.taken])
        flat = with_flat_columns(with_rows_first(flat))
        losses = Losses(with_losses_in_sight(flat))
        if self.options.chunk_losses and not self.options.is_exact:
            made, beside = with_loss_gradients(losses.source)
            made, taken = with_losses(made, sums=place.kind == "outer", rules=place.kind != "rule")
            losses = dataclasses.replace(losses, taken=[*beside, *taken])
            flat = made if losses.taken else flat
        if not self.options.is_exact:
            flat = with_weights_in_front(with_narrow_views(with_centred_sums(flat)))
        flat = with_row_sums_in_front(with_fewer_residuals(flat, arrays), is_exact=self.options.is_exact)
        flat = with_stacks(flat, arrays)
        consts = flat.consts  # of jitted functions that are opened, which JAX has read when it traced these
        if consts:
            flat, arrays = without_constants(flat), [*consts, *arrays]
        place = place.behind(len(consts))
        flat, constraints = with_constraints_in_front(flat)
        place = dataclasses.replace(place, gathered=gathered_arguments(flat.jaxpr, constraints))
        if calls_cost_nothing and not self._calls_cost_nothing(flat, place):
            return None
        before = len(self.made)
        function = self._straight_function(flat, name, arrays, losses, attentions, place)
        if calls_cost_nothing and any(x.lifted is None and products_in(x.jaxpr.jaxpr) for x in self.made[before:]):
            return None
        if constraints:
            function = functools.partial(_constrained, function, constraints)
        return functools.partial(function, *consts) if consts else function

    def _calls_cost_nothing(self, flat: core.ClosedJaxpr, place: _Place) -> bool:
        """True if no pass and no array in memory is owed to it that calls of fused functions stay in a straight jaxpr.

        They become pieces here.
        """
        every = list(filter(is_call, flat.jaxpr.eqns))
        bodies = [opened(callee(e))[0] for e in every]
        if any(map(is_derivative, bodies)):
            return False
        nested, groups = self._nested_in(flat, place), collections.defaultdict[Function, list[Equation]](list)
        for equation in every:
            groups[nested.called(equation)].append(equation)
        for function, calls in groups.items():
            before = len(self.made)
            types = (typed(x.aval) for x in calls[0].invars)
            jax.make_jaxpr(function)(*map(jax.typeof, opened(callee(calls[0]))[1]), *types)
            made = self.made[before:]
            if not all(x.lifted is not None and borders_cost_nothing(x.lifted) for x in made):
                return False
            self.made[before:] = [dataclasses.replace(x, count=len(calls) * x.count) for x in made]
        return True

    def _straight_function(
        self,
        flat: core.ClosedJaxpr,
        name: str,
        arrays: Sequence[Any],
        losses: Losses,
        attentions: Attentions,
        place: _Place,
    ) -> Function:
        unrounded: Mapping[int, str] = {}
        if self.options.fp8 is not None:
            flat, unrounded = with_rounded_products(flat, self.options.fp8, place.weights, losses.source)
        if flat.jaxpr.effects:
            return _Segments(flat, name, self, place.remats, place.kind, self._weights_in(flat, place))
        nested = functools.partial(self._nested_in, flat, place)
        graph, reason = None, _reason_to_stay(flat.jaxpr, arrays)
        if not reason:
            graph, reason = self._lifted(flat, name, arrays, place, nested)
        piece = Piece(name, graph, reason, flat, nested(), losses, attentions, place.kind == "rule", unrounded)
        self.made.append(piece)
        return piece

    def _weights_in(self, flat: core.ClosedJaxpr, place: _Place) -> Collection[Any]:
        return weights_in(flat.jaxpr, place.weights) if self.options.fp8 is not None else {}

    def _nested_in(self, flat: core.ClosedJaxpr, place: _Place) -> Nested:
        """Runs the bodies in a straight jaxpr."""
        return self.nested(place.remats, place.kind, self._weights_in(flat, place), fixed_in(flat.jaxpr, place.fixed))

    def nested(
        self, remats: Sequence[Remat], kind: str, weights: Collection[Any], fixed: Collection[Any] = ()
    ) -> Nested:
        """Runs the bodies in a piece; those of jitted functions are as the piece is, no bodies of loops."""
        own, rule = (functools.partial(self.function, kind=one) for one in (kind, "rule"))
        call = functools.partial(self.called, kind="body" if kind == "outer" else kind)
        if kind == "rule":
            return Nested(rule, call, remats, weights, fixed=fixed)
        step = functools.partial(self.function, kind="step")
        body = step if kind == "step" else functools.partial(self.function, kind="body")
        return Nested(body, call, remats, weights, own, rule, step, fixed)

    def _lifted(
        self,
        flat: core.ClosedJaxpr,
        name: str,
        arrays: Sequence[Any],
        place: _Place,
        nested: Callable[[], Nested],
    ) -> tuple[Lifted | None, str]:
        """The graph of a piece, the first whose backward pass keeps as little as it may; or why there is none."""
        remats, kind = place.remats, place.kind
        is_differentiated = kind != "rule" and not is_derivative(flat.jaxpr)  # else nobody does it again
        has_most = self.options.memory == "same" and is_differentiated
        least = surely_kept_by_jax(flat.jaxpr) if has_most and not remats else 0
        most = functools.cache(
            lambda: kept_by_jax(flat, arrays, next(iter(remats), None)) if has_most else float("inf")
        )
        reason, before = "", len(self.made)
        for defers in dict.fromkeys((self.options.defer_norms, False)):
            found = lifted(
                flat,
                name,
                nested(),
                self._bodies,
                is_exact=self.options.is_exact,
                defers=defers,
                implementation=self.options.implementation,
                remats=remats,
                is_step=kind == "step",
                fixed=place.fixed,
                gathered=place.gathered,
            )
            if any(jnp.issubdtype(x.dtype, jnp.complexfloating) for x in reachable(found.graph.outputs)):
                reason = "complex numbers pass between its products"
            elif (least and _keeps_surely_no_more(found.graph, least)) or most() == float("inf"):
                return found, ""
            else:
                kept = kept_by_graph(found.graph)
                if remats and not _keeps_no_more(kept, most()):
                    found = dataclasses.replace(found, graph=found.graph.keeping_least())
                    kept = kept_by_graph(found.graph)
                if _keeps_no_more(kept, most()):
                    return found, ""
                reason = f"its backward pass would keep {kept // 2**10} KiB; "
                reason += f"as JAX derives it, it keeps {most() // 2**10}"
            del self.made[before:]  # the bodies in it, which become pieces again where it is run
        return None, reason


def kernels_in(jaxpr: core.Jaxpr, around: str = "") -> Iterator[tuple[Equation, str]]:
    """The products that are kernels, bodies' too, with the user's lines; around: the line of what holds the jaxpr."""
    for equation in jaxpr.eqns:
        line = line_of(equation) or around
        if equation.primitive.name == "coda_gemm":
            yield equation, line
        for inner in inner_jaxprs(equation):
            yield from kernels_in(inner, line)


def _keeps_surely_no_more(graph: Graph, least: Any) -> bool:
    """True for a graph that keeps no more than JAX's derivative does at least; False where it has no derivative."""
    try:
        kept = kept_by_graph(graph)
    except Exception:  # a rule of the user's may raise anything, as it does in JAX's
        return False
    return isinstance(kept, int) and isinstance(least, int) and _keeps_no_more(kept, least)


def _keeps_no_more(kept: Any, most: Any) -> bool:
    """True for no more bytes than these; also if symbolic sizes decide it."""
    try:
        return bool(100 * kept <= (100 + _SLACK_PERCENT) * most + 100 * _VECTORS)
    except jax.errors.InconclusiveDimensionOperation:
        return True


class _Segments:
    """A function with side effects: what stands between two of them is a piece, and they stay in their order."""

    def __init__(
        self,
        flat: core.ClosedJaxpr,
        name: str,
        pieces: Pieces,
        remats: Sequence[Remat],
        kind: str,
        weights: Collection[Any],
    ):
        self._remats = [dataclasses.replace(remat, has_effects=True, is_part=True) for remat in remats]
        self._jaxpr, self._nested, self._weights = flat.jaxpr, pieces.nested(self._remats, kind, weights), weights
        self._parts: list[Equation | tuple[Function, list[Any], list[Any]]] = []
        every: list[Equation] = flat.jaxpr.eqns
        groups = itertools.groupby(enumerate(every, 1), lambda numbered: bool(numbered[1].effects))
        for has_effects, numbered in groups:
            ends, group = zip(*numbered, strict=True)
            if has_effects:
                self._parts += group
            else:
                later = [x for e in every[ends[-1] :] for x in e.invars] + list(flat.jaxpr.outvars)
                self._parts.append(self._segment(group, later, name, pieces))

    def _segment(
        self, group: Sequence[Equation], later: Sequence[Any], name: str, pieces: Pieces
    ) -> tuple[Function, list[Any], list[Any]]:
        read_later, inputs = set(variables(later)), free_variables(group)
        results = [x for equation in group for x in equation.outvars if x in read_later]

        def segment(*arrays: Any) -> list[Any]:
            values = dict(zip(inputs, arrays, strict=True))
            run(group, values, self._nested, opens=())
            return [values[x] for x in results]

        known: list[tuple[Function, Sequence[Any]]] = []  # none before the first call, whose types are those of all

        def function(*arrays: Any) -> Sequence[Any]:
            if not known:
                closed = jax.make_jaxpr(segment)(*arrays)
                flags = [x in self._weights for x in inputs]
                known.append((pieces.function(closed, name, self._remats, flags), closed.consts))
            ((fused, consts),) = known
            return fused(*consts, *arrays)

        return function, inputs, results

    def __call__(self, *arrays: Any) -> list[Any]:
        known = dict(zip(self._jaxpr.invars, arrays, strict=True))
        for part in self._parts:
            if isinstance(part, tuple):
                function, inputs, results = part
                known.update(zip(results, function(*(known[x] for x in inputs)), strict=True))
            else:
                run([part], known, self._nested, opens=())
        return [read(known, x) for x in self._jaxpr.outvars]


def _constrained(function: Function, constraints: Sequence[tuple[int, Equation]], *arrays: Any) -> Sequence[Any]:
    """The results of a function of constrained arguments."""
    return function(*constrained_arguments(arrays, constraints))


def with_good_borders(closed: core.ClosedJaxpr) -> Iterator[core.ClosedJaxpr]:
    """A straight jaxpr without the calls behind which an epilogue would do more; none if one call is left."""
    while otherwise := read_otherwise(closed.jaxpr):
        closed = straight(closed, closed.in_avals, stays=lambda e, ids=otherwise: id(e) not in ids)  # type: ignore[misc]
    if sum(map(is_call, closed.jaxpr.eqns)) > 1:
        yield closed


def _gives_masks(jaxpr: core.Jaxpr, known: Mapping[Any, Any]) -> bool:
    """True if a call of a fused function is given an array that is known, and may be a mask of its attention.

    Args:
      jaxpr: a straight one.
      known: variables that are constants, some of them tracers.
    """
    arrays = {x for x, value in known.items() if x.aval.ndim > 1 and not isinstance(value, jax.core.Tracer)}
    calls = (e for e in jaxpr.eqns if is_call(e) and may_hold_attention(e))
    return any(not arrays.isdisjoint(variables(e.invars)) for e in calls)


def _reason_to_stay(jaxpr: core.Jaxpr, arrays: Sequence[Any]) -> str:
    """Why a piece is not fused; empty if it is."""
    dots = products_in(jaxpr).values()
    if not dots:
        return "it has no product outside of its bodies"
    multiplied = [x for e in dots for x in (*e.invars, *e.outvars)]
    if any(same_size(size, 0) for x in multiplied for size in x.aval.shape):
        return "a product of it is empty"
    if _is_of_convolutions(jaxpr):
        return "its convolutions have ten times the operations of its products"
    return _reason_on_mesh(jaxpr, arrays)


def _reason_on_mesh(jaxpr: core.Jaxpr, arrays: Sequence[Any]) -> str:
    """Why a piece is not fused, in a body of shard_map, where a graph lets all arrays vary alike, or on two meshes."""
    if len(_meshes(jaxpr)) > 1 and jax.sharding.get_abstract_mesh().empty:  # which JAX refuses in a jitted function
        return "its arrays are constrained to several meshes"
    axes = varying_axes(*arrays)
    results: list[Any] = [x.aval for x in jaxpr.outvars]
    if any(x.manual_axis_type.varying != axes for x in results):
        return "its results vary over other axes of a mesh than its arguments do"
    if not axes:
        return ""
    for outer in jaxpr.eqns:
        bodies = inner_jaxprs(outer)
        for name in (outer.primitive.name, *(e.primitive.name for body in bodies for e, _ in equations(body))):
            if name.startswith(_COLLECTIVES):
                return f"it sums or moves arrays over a mesh: {name} at {line_of(outer)}"
        if bodies and any(x.aval.manual_axis_type.varying != axes for x in variables(outer.invars)):
            return f"a body in it reads arrays that vary over fewer axes of a mesh than others: {line_of(outer)}"
    return ""


def _meshes(jaxpr: core.Jaxpr) -> set[Any]:
    """The meshes that types of variables have, as names and sizes of axes."""
    types: Iterator[Any] = (x.aval for e in jaxpr.eqns for x in (*variables(e.invars), *e.outvars))
    shardings = (getattr(x, "sharding", None) for x in types)
    return {x.mesh.shape_tuple for x in shardings if x is not None and not x.mesh.empty}


def _is_of_convolutions(jaxpr: core.Jaxpr) -> bool:
    """True where there is little to gain: XLA fuses the passes between convolutions best in the program as it was."""
    products = sum(dot.flops for e in products_in(jaxpr).values() if isinstance(dot := dot_of(e), Dot))
    convolutions: list[Equation] = [e for e in jaxpr.eqns if e.primitive.name == "conv_general_dilated"]
    flops = sum(convolution_flops(e, e.invars[1].aval.shape, e.outvars[0].aval.shape) for e in convolutions)
    try:
        return bool(flops > 10 * products)
    except jax.errors.InconclusiveDimensionOperation:  # of symbolic sizes
        return False


def fixed_in(jaxpr: core.Jaxpr, flags: Sequence[bool]) -> set[Any]:
    """The variables of a jaxpr that have no derivative: what is made of such arguments alone, or behind a stop.

    Args:
      jaxpr: has no constants.
      flags: which of its arguments have none; others of floats have one.
    """
    fixed = {x for x, flag in zip(jaxpr.invars, flags, strict=True) if flag or not has_tangent(x)}
    for equation in jaxpr.eqns:
        are_fixed = [isinstance(x, core.Literal) or x in fixed for x in equation.invars]
        if all(are_fixed) or equation.primitive.name == "stop_gradient":
            fixed.update(equation.outvars)
        elif is_call(equation):  # as sums of rows that it gives are
            body = opened(callee(equation))[0]
            known = fixed_in(body, are_fixed)
            each = zip(equation.outvars, body.outvars, strict=True)
            fixed.update(x for x, y in each if not isinstance(y, core.Literal) and y in known)
    return fixed


def signature(x: Any) -> Hashable:
    """The properties of an array that a trace depends on."""
    aval = jax.typeof(x)
    return aval.shape, aval.dtype, aval.weak_type, explicit_cuts(x), varying_axes(x)


def _as_array(x: Any, aval: Any) -> Any:
    """An array; one of a weak type is a Python number to JAX while it differentiates."""
    return x if is_key(aval) or not jax.typeof(x).weak_type else lax.convert_element_type(x, aval.dtype)


def _as_result(x: jax.Array, aval: Any) -> jax.Array:
    if is_key(aval):
        keys: jax.Array = jax.random.wrap_key_data(x, impl=key_impl_of(aval)).reshape(aval.shape)
        return keys
    (x,) = vary(aval.manual_axis_type.varying, with_sharding(reshaped_as(x, aval.shape), explicit_sharding(aval)))
    if not aval.weak_type:
        return x
    weak: jax.Array = lax.convert_element_type_p.bind(x, new_dtype=x.dtype, weak_type=True, sharding=None)
    return weak
