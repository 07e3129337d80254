"""Attention's derivative in a graph: a call whose kernels make maps of dq, dk and dv in their place.

    t = rstd [R^T dq | R^T dk | dv],  t8 = saturate(s t),  t8^T     what the product behind q, k and v reads backward,
    max |t|,  sum(q dq) + sum(k dk) + sum(v dv)                     behind the derivative of coda.attention(q, k, v)

All that reads dq, dk and dv joins, or nothing does: tiles that have the columns of one, or join those of several, made
of single elements, or of the pairs of a head's halves, of sums and maxima of each head, as the derivative of a norm of
heads has them, and of tables of heads, numbers of each row and of a head's columns, scalars and tiles that are known
before, as `attend.gradients` says of the programs; transposes of such tiles in 8 bits; sums along rows, and along
columns, as the gradient of a projection's bias or of a norm's scale; and maxima. What is made of tiles in memory and is
not itself there is computed again in the kernels, as what a norm makes of its input. Each sees the gradients as they
are stored, so that tiles are those of a pass. Where a vector cannot join, passes make all vectors, of the tiles in
memory.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import partial_eval

from coda_jax.attend.gradients import Gradients, unsupported
from coda_jax.attend.kernel import makes_gradients
from coda_jax.attend.primitive import backward_primitives, pull_back_with
from coda_jax.attend.spec import AttentionSpec
from coda_jax.epilogue import Epilogue, NotTileLocalError, trace
from coda_jax.epilogue.dtypes import FLOAT32, is_of_8_bits
from coda_jax.epilogue.user_code import default_types
from coda_jax.epilogue.values import same_shape
from coda_jax.graph.calls import Call, Result, called_by
from coda_jax.graph.evaluate import as_seen
from coda_jax.graph.pieces import Pieces, as_type, in_pieces
from coda_jax.graph.values import Map, Transposed, Value, inputs_read, is_float, reachable
from coda_jax.jaxprs.bind import bind
from coda_jax.jaxprs.calls import CUSTOM_DERIVATIVES, callee, opened
from coda_jax.jaxprs.def_use import DefUse
from coda_jax.jaxprs.evaluate import bound, evaluate
from coda_jax.jaxprs.walk import equations

_VIEWS = frozenset({"reshape", "name", "sharding_constraint"})  # of gradients, that keep their values and their order
_VIEWS_OF_SUMS = frozenset({"broadcast_in_dim", "reshape", "squeeze"})


@dataclasses.dataclass(frozen=True)
class _Derivative:
    """The equation of a jaxpr that is the derivative of `coda.attention`.

    Attributes:
      equation: whose first results are dq, dk and dv.
      spec: of the primitive in it.
      places: the numbers of the equation's inputs that are the primitive's.
      results: the numbers of the jaxpr's results that are dq, dk and dv.
    """

    equation: core.JaxprEqn
    spec: AttentionSpec
    places: tuple[int, ...]
    results: tuple[int, int, int]

    @property
    def types(self) -> list[Any]:
        """The types of q, k and v, and so of dq, dk and dv."""
        return [x.aval for x in self.equation.outvars[:3]]


@dataclasses.dataclass(frozen=True, eq=False)
class Behind:
    """The maps of dq, dk and dv that attention's kernels make.

    Attributes:
      gradients: dq, dk and dv.
      tiles: in memory, each of columns of one of the three or of several; maybe a gradient itself.
      vectors: maps of the gradients and of tiles behind them that are no tiles themselves.
      maps: all that are between the gradients and these, and these, and what is computed again for them, inputs before
        users.
      read: the other values that the maps read.
    """

    gradients: tuple[Result, Result, Result]
    tiles: tuple[Value, ...]
    vectors: tuple[Value, ...]
    maps: tuple[Map | Transposed, ...]
    read: tuple[Value, ...]

    @property
    def call(self) -> Call:
        """The derivative of attention."""
        return self.gradients[0].call

    @property
    def made(self) -> tuple[Value, ...]:
        """All values that the kernels make."""
        return *self.tiles, *self.vectors


def behind_attention(
    by_xla: Sequence[Value],
    order: Sequence[Value],
    epilogues: Collection[Value],
    wanted: Set[Value],
    as_stored: Set[Value],
    is_known: Callable[[Value, Result], bool],
    made_again: Callable[[Value, Result], bool],
) -> dict[Call, Behind]:
    """For each derivative of attention the maps of dq, dk and dv that its kernels make: all of them, or it has none.

    Args:
      by_xla: the values that XLA makes and stores.
      order: all values of the plan, inputs before users.
      epilogues: the values that epilogues of products make.
      wanted: values that somebody else reads.
      as_stored: tiles that each reader sees as they are stored.
      is_known: whether a value is in memory, or a vector, and known before a call that has this result.
      made_again: whether it is a map that is computed again where it is read, of tiles as large as the result.
    """
    found, made = {}, frozenset(by_xla)
    readers: dict[Value, list[int]] = {}
    for number, value in enumerate(order):
        for x in inputs_read(value):
            readers.setdefault(x, []).append(number)
    for call in dict.fromkeys(x.call for x in by_xla if isinstance(x, Result)):
        derivative = _derivative_of(call)
        gradients = () if derivative is None else tuple(call.results[i] for i in derivative.results)
        if derivative is None or not made.issuperset(gradients):
            continue
        if not all(
            same_shape(x.shape, _as_matrix(of.shape)) for x, of in zip(gradients, derivative.types, strict=True)
        ):
            continue
        for with_vectors in (True, False):
            behind = _behind(gradients, made, order, readers, epilogues, made_again, with_vectors)
            if behind is None or not wanted.isdisjoint((*gradients, *set(behind.maps).difference(behind.vectors))):
                continue
            reads_rounded = any(x in as_stored and x in behind.maps for of in behind.maps for x in inputs_read(of))
            is_there = all(is_known(x, gradients[0]) for x in behind.read)
            if not reads_rounded and is_there and _may_be_made(behind, derivative):
                found[call] = behind
                break
    return found


def _as_matrix(shape: Sequence[Any]) -> tuple[Any, Any]:
    batch, rows, heads, width = shape
    return batch * rows, heads * width


def is_derivative_of_attention(call: Call) -> bool:
    """True for the derivative of attention by kernels, on meshes too."""
    if "is derivative" not in call.traces:
        call.traces["is derivative"] = any(e.primitive in backward_primitives for e, _ in equations(call.jaxpr.jaxpr))
    return bool(call.traces["is derivative"])


def pulls_back_attention(call: Call) -> bool:
    """True for the derivative of attention, whose kernels may make maps in the place of dq, dk and dv."""
    return _derivative_of(call) is not None


def _derivative_of(call: Call) -> _Derivative | None:
    """A call as the derivative of attention; None of another, of attention by XLA, and on a mesh of several devices.

    Devices that have other heads would exchange the columns of dq, dk and dv that tiles join.
    """
    if call.is_on_mesh or jax.sharding.get_abstract_mesh().size > 1:
        return None
    if "derivative of attention" not in call.traces:
        call.traces["derivative of attention"] = _derivative_in(call.jaxpr)
    found: _Derivative | None = call.traces["derivative of attention"]
    return None if found is None or found.spec.implementation == "xla" else found


def _derivative_in(closed: core.ClosedJaxpr) -> _Derivative | None:
    """The derivative of attention in a jaxpr, of whose results three are views of dq, dk and dv."""
    jaxpr = closed.jaxpr
    for equation in jaxpr.eqns:
        if equation.primitive.name not in CUSTOM_DERIVATIVES:
            continue
        inner, constants = opened(callee(equation))
        if len(inner.eqns) != 1 or constants or inner.eqns[0].primitive not in backward_primitives:
            continue
        (one,) = inner.eqns
        numbers: dict[Any, int] = {variable: i for i, variable in enumerate(inner.invars)}
        if list(inner.outvars) != list(one.outvars) or not all(x in numbers for x in one.invars):
            return None
        results = [i for x in equation.outvars[:3] if (i := _result_of(jaxpr, x)) is not None]
        if len(results) != 3:
            return None
        places = tuple(numbers[x] for x in one.invars)
        return _Derivative(equation, one.params["spec"], places, (results[0], results[1], results[2]))
    return None


def _result_of(jaxpr: core.Jaxpr, variable: Any) -> int | None:
    """The number of the jaxpr's only result that is made of this gradient, and is a view of it."""
    while True:
        users = [equation for equation in jaxpr.eqns if any(x is variable for x in equation.invars)]
        places = [i for i, x in enumerate(jaxpr.outvars) if x is variable]
        if not users and len(places) == 1:
            return places[0]
        if places or len(users) != 1 or users[0].primitive.name not in _VIEWS:
            return None
        (variable,) = users[0].outvars


def _behind(
    gradients: Sequence[Any],
    by_xla: Set[Value],
    order: Sequence[Value],
    readers: Mapping[Value, Sequence[int]],
    epilogues: Collection[Value],
    made_again: Callable[[Value, Result], bool],
    with_vectors: bool,
) -> Behind | None:
    """The maps of dq, dk and dv, if passes make all of them, and the tiles that anything else reads are in memory.

    Args:
      readers: for each value the places in `order` of those that read it.
      with_vectors: whether also those that are no tiles; else passes make them of tiles in memory.
    """
    dq, dk, dv = gradients
    tiles: dict[Value, None] = dict.fromkeys(gradients)  # also those that are computed again where they are read
    maps: list[Map | Transposed] = []
    in_memory: set[Value] = set()
    heap = [number for x in gradients for number in readers.get(x, ())]
    heapq.heapify(heap)
    seen: set[Value] = set()
    while heap:
        value = order[heapq.heappop(heap)]
        if value in seen:
            continue
        seen.add(value)
        if isinstance(value, Map | Transposed) and value not in epilogues and (with_vectors or value.is_tile):
            maps.append(value)
            if value.is_tile:
                tiles[value] = None
                for number in readers.get(value, ()):
                    heapq.heappush(heap, number)
        else:
            in_memory.update(x for x in inputs_read(value) if x in tiles)
    if not maps or not in_memory.issubset(by_xla):
        return None
    stored = tuple(x for x in tiles if x in in_memory or (x in by_xla and x not in gradients))
    vectors = tuple(x for x in maps if x not in tiles)
    again, read = _read(maps, tiles, lambda x: made_again(x, dq))
    maps_in_order = sorted([*again, *maps], key=lambda value: value.number)
    return Behind((dq, dk, dv), stored, vectors, tuple(maps_in_order), tuple(read))


def _read(
    maps: Sequence[Map | Transposed], tiles: Collection[Value], made_again: Callable[[Value], bool]
) -> tuple[list[Map | Transposed], list[Value]]:
    """The maps that are computed again for these, and the values that all of them read, but for `tiles`."""
    again: dict[Map | Transposed, None] = {}
    read: dict[Value, None] = {}
    open_ = list(reversed(maps))
    while open_:
        for x in inputs_read(open_.pop()):
            if x in tiles or x in again or x in read:
                continue
            if isinstance(x, Map | Transposed) and made_again(x):
                again[x] = None
                open_.append(x)
            else:
                read[x] = None
    return list(again), list(read)


def _may_be_made(behind: Behind, derivative: _Derivative) -> bool:
    """Whether the kernels can make the maps, but for the dtypes of operands."""
    narrow = behind.gradients[0].dtype
    dtypes = [
        narrow if x in behind.gradients else x.dtype if is_of_8_bits(x.dtype) else np.dtype(FLOAT32)
        for x in behind.tiles
    ]
    return _made(behind, derivative, [_narrow(x, behind) for x in behind.read], dtypes) is not None


def _narrow(x: Value, behind: Behind) -> jax.ShapeDtypeStruct:
    """The type of a value, of 16 bits where it is a tile that may be stored so."""
    is_stored = x.is_tile and is_float(x.dtype)
    return jax.ShapeDtypeStruct(x.shape, behind.gradients[0].dtype if is_stored else x.type.dtype)


# ---- as epilogues


class _Traced(NamedTuple):
    """The maps as epilogues of dq, dk and dv, whose first outputs are columns of the tiles, and others vectors.

    Attributes:
      epilogues: of the three.
      places: for each the numbers of its operands among those of all.
      members: for each tile the gradients whose columns it has, as `Gradients` has them.
    """

    epilogues: tuple[Epilogue, Epilogue, Epilogue]
    places: tuple[tuple[int, ...], ...]
    members: tuple[tuple[int, ...], ...]


class _NotJoined(Exception):
    """Columns of tiles are not those of dq, dk or dv, all in one way; or a vector is of several, and no maximum."""


def _made(
    behind: Behind, derivative: _Derivative, types: Sequence[Any], dtypes: Sequence[np.dtype[Any]]
) -> tuple[_Traced, Gradients] | None:
    """The maps as epilogues, and what the kernels take of these; None where they cannot make it.

    Args:
      types: of the operands.
      dtypes: of the tiles.
    """
    bodies = [x.body for x in behind.maps if isinstance(x, Map)]
    traced = bodies[0].once(("behind attention", _structure(behind, types)), lambda: _traced(behind, types))
    if traced is None:
        return None
    dq, dk, dv = (epilogue.program for epilogue in traced.epilogues)
    gradients = Gradients((dq, dk, dv), traced.places, len(types), traced.members, tuple(dtypes))
    for i, (program, of) in enumerate(zip(gradients.programs, derivative.types, strict=True)):
        own = [dtypes[tile] for tile in gradients.tiles_of(i)]
        if unsupported(program, own, of.shape[3], len(own)) is not None:
            return None
    q, k, v = derivative.types
    return (traced, gradients) if makes_gradients(gradients, q, k, v, derivative.spec) else None


def _structure(behind: Behind, types: Sequence[Any]) -> Hashable:
    """All that `_traced` depends on: maps of equal layers share their bodies."""
    numbers = {x: i for i, x in enumerate((*behind.gradients, *behind.read, *behind.maps))}

    def of(x: Map | Transposed) -> Hashable:
        body = (x.body, x.index, x.is_rounded) if isinstance(x, Map) else None
        is_maximum = isinstance(x, Map) and _is_maximum(x)
        return body, is_maximum, x.dtype, x.is_tile, tuple(numbers[y] for y in inputs_read(x))

    given = [(x.shape, x.dtype) for x in (*behind.gradients, *types)]
    made = tuple(tuple(numbers[x] for x in each) for each in (behind.tiles, behind.vectors))
    return tuple(given), tuple(map(of, behind.maps)), made


def _traced(behind: Behind, types: Sequence[Any]) -> _Traced | None:
    """The maps as epilogues, of operands of these types; None where they are no epilogues of each."""
    members = tuple(tuple(_gradients_of(x, behind)) for x in behind.tiles)
    if sorted(i for one in set(members) for i in one) != [0, 1, 2]:
        return None

    def all_pieces(*arrays: jax.Array) -> list[list[jax.Array]]:
        made: dict[Value, Any] = dict(zip(behind.gradients, arrays[:3], strict=True))
        made |= {x: as_seen(array) for x, array in zip(behind.read, arrays[3:], strict=True)}
        for value in behind.maps:
            inputs = [_seen(made[x]) for x in inputs_read(value)]
            made[value] = (
                _of_vector(value, inputs, behind) if value in behind.vectors else _of_tile(value, inputs, behind)
            )
        outputs: list[list[jax.Array]] = [[], [], []]
        for x, of in zip(behind.tiles, members, strict=True):
            parts = made[x].parts if isinstance(made[x], Pieces) else [made[x]]
            if len(parts) != len(of):
                raise _NotJoined
            for i, part in zip(of, parts, strict=True):
                outputs[i].append(part)
        for i, of_gradient in enumerate(outputs):
            of_gradient += [made[x][i] for x in behind.vectors if i in made[x]]
        return outputs

    acc_types = [x.type for x in behind.gradients]
    try:
        with default_types():
            closed, shapes = jax.make_jaxpr(all_pieces, return_shape=True)(*acc_types, *types)
        made = [_traced_of(i, closed, list(map(len, shapes)), acc_types[i], types) for i in range(3)]
    except (_NotJoined, NotTileLocalError):
        return None
    (dq, dq_places), (dk, dk_places), (dv, dv_places) = made
    return _Traced((dq, dk, dv), (dq_places, dk_places, dv_places), members)


def _gradients_of(x: Value, behind: Behind) -> list[int]:
    """The numbers of dq, dk and dv that a value is made of."""
    made_of = set(reachable([x], (*behind.read, *behind.gradients)))
    return [i for i, of in enumerate(behind.gradients) if of in made_of]


def _traced_of(
    which: int, closed: core.ClosedJaxpr, counts: Sequence[int], acc: Any, types: Sequence[Any]
) -> tuple[Epilogue, tuple[int, ...]]:
    """The outputs of one gradient as its epilogue, and the numbers of the operands that it reads."""
    flags = [i == which for i, count in enumerate(counts) for _ in range(count)]
    jaxpr, is_read = partial_eval.dce_jaxpr(closed.jaxpr, flags)
    if [i for i in range(3) if is_read[i]] != [which]:
        raise _NotJoined
    places = tuple(i for i, flag in enumerate(is_read[3:]) if flag)
    body = core.ClosedJaxpr(jaxpr, closed.consts)

    def epilogue(acc: jax.Array, *operands: jax.Array) -> list[Any]:
        return core.jaxpr_as_fun(body)(acc, *(as_seen(x) for x in operands))

    traced, captured = trace(epilogue, jax.ShapeDtypeStruct(acc.shape, FLOAT32), [types[i] for i in places])
    if captured:
        raise _NotJoined
    return traced, places


def _of_tile(value: Map | Transposed, inputs: Sequence[Any], behind: Behind) -> Any:
    """A tile as pieces, from inputs that may be pieces."""
    if isinstance(value, Transposed):
        parts: Sequence[Any] = inputs[0].parts if isinstance(inputs[0], Pieces) else ()
        return Pieces([part.T.astype(value.dtype) for part in parts]) if parts else inputs[0].T
    (x,) = in_pieces(value.primal()[0], inputs, bind)
    return as_type(x, behind.gradients[0].dtype) if value.is_rounded else x


def _seen(x: Any) -> Any:
    """An array or pieces as a map sees them."""
    return x.map(_seen) if isinstance(x, Pieces) else as_seen(x)


def _of_vector(value: Map | Transposed, inputs: Sequence[Any], behind: Behind) -> dict[int, jax.Array]:
    """A vector, by the gradients whose epilogues make it: that of one; parts of its columns; a maximum of all three."""
    assert isinstance(value, Map)
    jaxpr = value.primal()[0]
    of = _gradients_of(value, behind)
    if _is_maximum(value) and isinstance(inputs[0], Pieces):
        return {i: in_pieces(jaxpr, [part], bind)[0] for i, part in zip(of, inputs[0].parts, strict=True)}
    summand = _summand(value) if len(of) > 1 else None
    (x,) = in_pieces(jaxpr if summand is None else summand, inputs, bind)
    parts: Sequence[Any] = x.parts if isinstance(x, Pieces) else [x]
    if len(parts) != len(of):
        raise _NotJoined
    if summand is not None:
        parts = [jnp.sum(part, axis=1).reshape(value.shape) for part in parts]
    return dict(zip(of, parts, strict=True))


def _is_maximum(value: Map) -> bool:
    """Whether a vector is the largest magnitude of its input."""
    return any(x.amax is value for x in value.inputs)


def _summand(value: Map) -> core.ClosedJaxpr | None:
    """The function of what a map reads whose sum along rows is the vector; None for another vector."""

    def make() -> core.ClosedJaxpr | None:
        closed = value.primal()[0]
        def_use, out = DefUse(closed.jaxpr), closed.jaxpr.outvars[0]
        while (equation := def_use.maker(out)) is not None and equation.primitive.name in _VIEWS_OF_SUMS:
            out = equation.invars[0]
        if equation is None or equation.primitive.name != "reduce_sum" or tuple(equation.params["axes"]) != (1,):
            return None
        jaxpr = closed.jaxpr.replace(outvars=[equation.invars[0]])
        return core.ClosedJaxpr(jaxpr, closed.consts)

    found: core.ClosedJaxpr | None = value.body.once(("summand",), make)
    return found


# ---- as it runs


def called_behind(
    behind: Behind, results: Sequence[Result], arrays: Sequence[jax.Array], operands: Sequence[jax.Array], dtypes: Any
) -> tuple[dict[Result, jax.Array], dict[Value, jax.Array]] | None:
    """The arrays of these other results of the call, and those of all that is made of dq, dk and dv.

    None where the kernels cannot make these.

    Args:
      arrays: of the call's inputs.
      operands: of the values that the maps read, in the values' shapes.
      dtypes: of the tiles.
    """
    derivative = _derivative_of(behind.call)
    assert derivative is not None, "it was found when the plan was made"
    of_kernels = _made(behind, derivative, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands], dtypes)
    if of_kernels is None:
        return None
    traced, gradients = of_kernels
    outputs: list[jax.Array] = []

    def evaluated(closed: core.ClosedJaxpr, inputs: Sequence[jax.Array]) -> list[Any]:
        def apply(equation: core.JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
            if equation is not derivative.equation:
                return bound(equation, inputs)
            arguments = [inputs[place] for place in derivative.places]
            made, of_sinks = pull_back_with(
                arguments, operands, traced.epilogues, spec=derivative.spec, gradients=gradients
            )
            outputs.extend(made)
            unread = [jnp.zeros(x.shape, x.dtype) for x in derivative.types]
            return [*unread, *of_sinks]

        return evaluate(closed.jaxpr, closed.consts, inputs, apply, opens=())

    found = called_by(evaluated, behind.call, results, arrays)
    count = len(behind.tiles)
    each = zip(behind.tiles, outputs, dtypes, strict=False)
    made: dict[Value, jax.Array] = {x: array.astype(dtype) for x, array, dtype in each}
    remaining = iter(outputs[count:])
    of_vectors: dict[Value, list[jax.Array]] = {x: [] for x in behind.vectors}
    for i in range(3):
        for x in behind.vectors:
            if i in _gradients_of(x, behind):
                of_vectors[x].append(next(remaining))
    for x, of in of_vectors.items():
        assert isinstance(x, Map)
        if len(of) == 1:
            (made[x],) = of
        elif _is_maximum(x):
            made[x] = functools.reduce(jnp.maximum, of)
        else:
            made[x] = jnp.concatenate(of, axis=-1) if _summand(x) is None else functools.reduce(jnp.add, of)
    return found, made
