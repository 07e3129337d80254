"""The straight pieces of a function: each becomes a graph, or stays as it is, with a reason."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from coda_jax.epilogue.values import same_size
from coda_jax.fusion.attention import cudnn
from coda_jax.fusion.attention.in_loops import with_attention_in_loops
from coda_jax.fusion.attention.masks_inside import with_masks_inside
from coda_jax.fusion.attention.rule import Attentions, with_attention
from coda_jax.fusion.centred import with_centred_sums
from coda_jax.fusion.dots import Dot, Equation, convolution_flops, dot_of, dots_in, is_derivative
from coda_jax.fusion.kept_bytes import kept_by_graph, kept_by_jax, surely_kept_by_jax
from coda_jax.fusion.lift import Lifted, lifted
from coda_jax.fusion.loss import LEAST_VOCABULARY, with_losses
from coda_jax.fusion.loss_gradient import with_loss_gradients
from coda_jax.fusion.narrow_views import with_narrow_views
from coda_jax.fusion.nested import Function, Nested, has_products
from coda_jax.fusion.orders import with_rows_first
from coda_jax.fusion.remat import Remat
from coda_jax.fusion.residuals import with_fewer_residuals
from coda_jax.fusion.row_factors import with_factors_behind
from coda_jax.fusion.row_views import with_rows_in_front
from coda_jax.fusion.stacks import with_stacks
from coda_jax.fusion.stops import with_stops_behind
from coda_jax.fusion.straight import is_inner, is_jitted, line_of, straight
from coda_jax.graph.calls import data_of, is_key, key_impl_of
from coda_jax.graph.function import Graph
from coda_jax.graph.on_mesh import reshaped_as
from coda_jax.graph.values import reachable
from coda_jax.jaxprs.def_use import free_variables, variables
from coda_jax.jaxprs.evaluate import evaluate, read, run, without_constants
from coda_jax.jaxprs.walk import equations, inner_jaxprs
from coda_jax.primitives.mesh_types import explicit_cuts, explicit_sharding, vary, varying_axes, with_sharding

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
    """

    is_exact: bool = False
    defer_norms: bool | None = None
    chunk_losses: bool = True
    attention: bool = True
    memory: str | None = "same"
    implementation: str = "auto"


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
    """

    name: str
    lifted: Lifted | None
    reason: str
    jaxpr: core.ClosedJaxpr
    nested: Nested
    losses: Losses
    attentions: Attentions
    in_rule: bool = False

    @property
    def taken(self) -> list[tuple[Equation, str]]:
        """The products that became part of an operator, and the operators."""
        return [*self.attentions.taken, *self.losses.taken]

    @property
    def stays(self) -> bool:
        """Whether nothing of it is fused: it is no graph, and operators have not taken all of its products."""
        return self.lifted is None and not (self.taken and not dots_in(self.jaxpr.jaxpr))

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

    def function(
        self, closed: core.ClosedJaxpr, name: str, remats: Sequence[Remat] = (), *, kind: str = "body"
    ) -> Function:
        """A jaxpr, fused, as a function of its constants and its arguments.

        Args:
          name: of the function, or of what holds it.
          remats: the policies of the checkpoints that hold it, the innermost first.
          kind: "step" for the body of a loop, and what it holds, "body" for that of a branch or a checkpoint, "rule"
            for a function of a custom_vjp, and what it holds: nobody differentiates it; "outer" for no body.
        """
        whole = without_constants(closed)
        if not has_products(whole.jaxpr) and not cudnn.has_calls(whole.jaxpr):
            return core.jaxpr_as_fun(whole)
        known: dict[Hashable, Function] = {}

        def function(*arrays: Any) -> Sequence[Any]:
            key = jax.sharding.get_abstract_mesh(), tuple(map(signature, arrays))
            if key not in known:
                known[key] = self._function_at(whole, closed.consts, name, arrays, remats, kind)
            return known[key](*arrays)

        return function

    def _function_at(
        self,
        whole: core.ClosedJaxpr,
        constants: Sequence[Any],
        name: str,
        arrays: Sequence[Any],
        remats: Sequence[Remat],
        kind: str,
    ) -> Function:
        """The function for arrays of these types; where it stays as it is, fused functions in it are fused alone.

        The first of its arguments are constants.
        """
        if kind == "outer" and is_jitted(whole.jaxpr):  # it stays one program where it is called outside of another one
            return self._opened_at(whole, constants, name, arrays, remats, kind)
        before = len(self.made)
        function = self._opened_at(straight(whole, arrays), constants, name, arrays, remats, kind)
        if any(piece.stays for piece in self.made[before:]):
            flat = straight(whole, arrays, opens_inner=False)
            if any(map(is_inner, flat.jaxpr.eqns)):
                del self.made[before:]
                return self._opened_at(flat, constants, name, arrays, remats, kind)
        return function

    def _opened_at(
        self,
        flat: core.ClosedJaxpr,
        constants: Sequence[Any],
        name: str,
        arrays: Sequence[Any],
        remats: Sequence[Remat],
        kind: str,
    ) -> Function:
        """The function of a straight jaxpr, the first of whose arguments are constants."""
        attentions = Attentions()
        if self.options.attention and not self.options.is_exact:
            flat, in_loops = with_attention_in_loops(
                with_masks_inside(flat), implementation=self.options.implementation
            )
            known = dict(zip(flat.jaxpr.constvars, flat.consts, strict=True))
            known |= dict(zip(flat.jaxpr.invars, constants, strict=False))
            flat, attentions = with_attention(flat, known, implementation=self.options.implementation)
            attentions = dataclasses.replace(attentions, taken=[*in_loops, *attentions.taken])
        flat = with_rows_first(flat)
        in_front = with_rows_in_front(with_stops_behind(flat, LEAST_VOCABULARY), LEAST_VOCABULARY)
        losses = Losses(with_factors_behind(in_front, LEAST_VOCABULARY))
        if self.options.chunk_losses and not self.options.is_exact:
            made, beside = with_loss_gradients(losses.source)
            made, taken = with_losses(made, sums=kind == "outer", rules=kind != "rule")
            losses = dataclasses.replace(losses, taken=[*beside, *taken])
            flat = made if losses.taken else flat
        if not self.options.is_exact:
            flat = with_narrow_views(with_centred_sums(flat))
        flat = with_stacks(with_fewer_residuals(flat, arrays), arrays)
        consts = flat.consts  # of jitted functions that are opened, which JAX has read when it traced these
        if consts:
            flat, arrays = without_constants(flat), [*consts, *arrays]
        function = self._straight_function(flat, name, arrays, losses, attentions, remats, kind)
        return functools.partial(function, *consts) if consts else function

    def _straight_function(
        self,
        flat: core.ClosedJaxpr,
        name: str,
        arrays: Sequence[Any],
        losses: Losses,
        attentions: Attentions,
        remats: Sequence[Remat],
        kind: str,
    ) -> Function:
        if flat.jaxpr.effects:
            return _Segments(flat, name, self, remats, kind)
        found, reason = None, _reason_to_stay(flat.jaxpr, arrays)
        if not reason:
            found, reason = self._lifted(flat, name, arrays, remats, kind)
        piece = Piece(name, found, reason, flat, self.nested(remats, kind), losses, attentions, kind == "rule")
        self.made.append(piece)
        return piece

    def nested(self, remats: Sequence[Remat], kind: str) -> Nested:
        """Runs the bodies in a piece; those of jitted functions are as the piece is, no bodies of loops."""
        own, rule = (functools.partial(self.function, kind=one) for one in (kind, "rule"))
        if kind == "rule":
            return Nested(rule, remats)
        step = functools.partial(self.function, kind="step")
        body = step if kind == "step" else functools.partial(self.function, kind="body")
        return Nested(body, remats, own, rule, step)

    def _lifted(
        self, flat: core.ClosedJaxpr, name: str, arrays: Sequence[Any], remats: Sequence[Remat], kind: str
    ) -> tuple[Lifted | None, str]:
        """The graph of a piece, the first whose backward pass keeps as little as it may; or why there is none."""
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
                self.nested(remats, kind),
                self._bodies,
                is_exact=self.options.is_exact,
                defers=defers,
                implementation=self.options.implementation,
                remats=remats,
                is_step=kind == "step",
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

    def __init__(self, flat: core.ClosedJaxpr, name: str, pieces: Pieces, remats: Sequence[Remat], kind: str):
        self._remats = [dataclasses.replace(remat, has_effects=True, is_part=True) for remat in remats]
        self._jaxpr, self._nested = flat.jaxpr, pieces.nested(self._remats, kind)
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
                known.append((pieces.function(closed, name, self._remats), closed.consts))
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


def _reason_to_stay(jaxpr: core.Jaxpr, arrays: Sequence[Any]) -> str:
    """Why a piece is not fused; empty if it is."""
    dots = dots_in(jaxpr).values()
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
    products = sum(dot.flops for e in dots_in(jaxpr).values() if isinstance(dot := dot_of(e), Dot))
    convolutions: list[Equation] = [e for e in jaxpr.eqns if e.primitive.name == "conv_general_dilated"]
    flops = sum(convolution_flops(e, e.invars[1].aval.shape, e.outvars[0].aval.shape) for e in convolutions)
    try:
        return bool(flops > 10 * products)
    except jax.errors.InconclusiveDimensionOperation:  # of symbolic sizes
        return False


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
