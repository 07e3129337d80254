"""Traces a user's function, and makes a checked epilogue of it."""

import contextlib
import inspect
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.config import trace_context  # has no public name

from coda_jax.epilogue.analysis import Analysis
from coda_jax.epilogue.assemble import assemble
from coda_jax.epilogue.axis_rules import RULES
from coda_jax.epilogue.dtypes import FLOATS, TABLE, TILES, VECTORS, listed
from coda_jax.epilogue.flatten import Constants, Flat, call, flatten, keep_used_constants
from coda_jax.epilogue.groups import GroupOffsets, Marked, check_groups, unmarked
from coda_jax.epilogue.halves import Halves, Width
from coda_jax.epilogue.logsumexp import recognise
from coda_jax.epilogue.operand import Columns, Operand, OperandKind
from coda_jax.epilogue.operand_kinds import KINDS, is_repeated, seen
from coda_jax.epilogue.program import Program
from coda_jax.epilogue.user_code import default_types, make_jaxpr
from coda_jax.epilogue.user_names import UserNames
from coda_jax.epilogue.values import Layout, NeedsLayout, NotTileLocalError, same_size
from coda_jax.epilogue.whole_maximum import merge_maxima

_WIDEST_HEAD = 256  # columns of one that a tile has
_MOST_TYPES = 4096
_types: dict[Hashable, list[Any]] = {}  # of results, by functions' keys and all that a trace depends on


@dataclass(frozen=True, eq=False)
class Epilogue:
    """A traced and checked epilogue function. Holds no array.

    Attributes:
      name: of the function, for messages.
      program: what the kernel runs; equal for equal mathematics.
      out_tree, out_avals: what the function returns; the flat avals have its dtypes.
      flat: its equations; functions with derivatives of their own are still calls.
      parts: a cache, of the traces of functions that are parts of it.
    """

    name: str
    program: Program
    out_tree: Any
    out_avals: tuple[jax.ShapeDtypeStruct, ...]
    flat: Flat
    _num_operands: int
    parts: dict[Hashable, dict[Any, "Epilogue"]] = field(default_factory=dict)

    def call(self, acc: jax.Array, *arguments: jax.Array) -> list[jax.Array]:
        """The user's function, differentiable by JAX with its custom derivative rules, which `program` lacks.

        Args:
          acc: (M, N) float32.
          arguments: as `program.operands`; floating operands are converted to float32 first.

        Returns:
          Flat outputs, with the dtypes that the function gives them.
        """
        with default_types():
            operands = seen(self.program.operands, arguments, acc.shape[0])[: self._num_operands]
            return call(self.flat, [acc, *operands], arguments[self._num_operands :])

    def called(self, name: str) -> "Epilogue":
        """The same epilogue with another name for messages."""
        return self if name == self.name else replace(self, name=name)

    def symmetric(self) -> "Epilogue":
        """The same epilogue, of a product whose results are symmetric."""
        return replace(self, program=replace(self.program, symmetric=True))

    def with_acc(self) -> "Epilogue":
        """The same epilogue with acc as an additional last flat output. Its out_tree is a list."""
        flat = replace(self.flat, outputs=(*self.flat.outputs, 0))
        acc = flat.avals[0]
        out_avals = (*self.out_avals, jax.ShapeDtypeStruct(acc.shape, acc.dtype))
        out_tree = jax.tree.structure([0] * len(out_avals))
        program = self.program.with_acc()
        return replace(self, program=program, out_tree=out_tree, out_avals=out_avals, flat=flat, parts={})


def trace(
    f: Callable[..., Any] | None, acc: Any, operands: Sequence[Any], group_offsets: Any = None
) -> tuple[Epilogue, tuple[Any, ...]]:
    """Traces f(acc, *operands), checks that it is local to a tile, and hoists the arrays that it closes over.

    Args:
      f: a JAX function of arrays; None is the identity.
      acc: shape (M, N), dtype float32 (an array or a ShapeDtypeStruct). M may be symbolic.
      operands: shapes (), (N,), (1, N), (M, 1), (M, N), or with N/2 or 2N in the place of N where f works on halves;
        (M, Dh), (M, Dh/2), (Dh,) or (1, Dh) where f works on heads of Dh columns, and also (S, Dh) or (S, Dh/2) where
        S divides M, whose rows f repeats with jnp.tile. f sees floating ones as float32. `ByGroup` operands are
        (G, N), (G, N/2), (G, 1) or (G,), and f sees the entry of each row's group, (M, N) and so on.
      group_offsets: (G + 1,) int32, for operands by group and for a product with groups; see groups.py.

    If f has a dict as its attribute `traced`, its trace depends on the types alone, and is kept there for each.
    Functions of other names that compute the same may have one dict.

    Returns:
      The epilogue, and the captured arrays (or tracers), which are its operands after the explicit ones. The last are
      the offsets of groups, if there are any.

    Raises:
      NotTileLocalError: f needs more than one tile, asks for the value of an array, or an operand does not broadcast
        against acc.
      ValueError: operands by group and groups that do not go together.
    """
    known: dict[Any, Epilogue] | None = getattr(f, "traced", None)
    if f is None and group_offsets is None and isinstance(acc, jax.core.ShapedArray):
        return _bare(acc, jax.sharding.get_abstract_mesh()), ()
    if f is None or known is None or group_offsets is not None:
        return _traced(f, acc, operands, group_offsets)
    key = (acc, *operands), jax.sharding.get_abstract_mesh()
    if key not in known:
        epilogue, captured = _traced(f, acc, operands, None)
        if captured:  # the next trace may capture other arrays
            return epilogue, captured
        known[key] = epilogue
    return known[key].called(f.__name__), ()


def _traced(
    f: Callable[..., Any] | None, acc: Any, operands: Sequence[Any], group_offsets: Any
) -> tuple[Epilogue, tuple[Any, ...]]:
    f = _identity if f is None else f
    named = f.func if isinstance(f, partial) else f
    name = getattr(named, "__name__", type(named).__name__).strip("<>")
    m, n = acc.shape
    names = _parameter_names(f, len(operands))
    trees: list[Any] = []

    def flat_f(*arguments: Any) -> list[Any]:
        leaves, tree = jax.tree.flatten(f(*arguments))
        trees.append(tree)
        return leaves

    flat_f.__name__, flat_f.__wrapped__ = name, f  # type: ignore[attr-defined]  # whose line JAX's messages then give
    labels = [f"operand '{label}'" for label in names]

    def described(arrays: Sequence[Any], layout: Layout, *, is_final: bool) -> list[Operand]:
        """The operands and then the captured arrays, with their kinds."""
        kinds = [_operand(x, m, n, layout, is_final, label, name) for x, label in zip(arrays, labels, strict=True)]
        return [*map(_as_float32, kinds[: len(operands)]), *kinds[len(operands) :]]

    check_groups(operands, group_offsets, labels, name)
    offsets = () if group_offsets is None else (GroupOffsets(group_offsets),)
    labels += ["group_offsets"] * len(offsets)
    explicit = described((*operands, *offsets), _initial_layout(operands, n), is_final=False)
    avals = _avals(acc, explicit, (*operands, *offsets))[: 1 + len(operands)]
    jaxpr = make_jaxpr(flat_f, avals, name)
    with default_types():
        constants = Constants()
        differentiable = flatten(jaxpr, constants, inline_custom_derivatives=False)
        flat = flatten(jaxpr, constants, inline_custom_derivatives=True)
        recognise(flat)
        merge_maxima(flat)
        captured = tuple(keep_used_constants((differentiable, flat), constants))
        arrays = (*operands, *captured, *offsets)
        labels[len(operands) : len(operands)] = [f"captured array {i}" for i in range(len(captured))]
        order = [
            *range(1, len(avals)),
            *(flat.constants.get(i, flat.new(jax.typeof(x))) for i, x in enumerate(captured)),
            *(flat.new(x.array) for x in offsets),
        ]

        def program(layout: Layout) -> Program:
            kinds = described(arrays, layout, is_final=False)
            if any(x.width is Width.HALF for x in kinds):
                layout = replace(layout, halves=replace(layout.halves, count=2))
            try:
                analysis = Analysis(flat, order, kinds, layout, name, RULES)
            except NeedsLayout as needs:
                return program(needs.layout)
            except NotTileLocalError:
                described(arrays, layout, is_final=True)  # raises a better message if an operand fits no kind
                raise
            described(arrays, layout, is_final=True)
            return assemble(analysis)

        out_avals = tuple(jax.ShapeDtypeStruct(flat.aval(atom).shape, flat.aval(atom).dtype) for atom in flat.outputs)
        try:
            checked = program(_initial_layout(arrays, n))
        except NotTileLocalError as error:
            # A single head of all N columns is analysed as plain columns. Only a table whose rows repeat, or a norm of
            # the head, needs it to be a head.
            if n % 2 or n > _WIDEST_HEAD:
                raise
            checked = _one_head_program(program, n, error)
        checked = replace(checked, user_names=UserNames.of(f, name, names))
        epilogue = Epilogue(name, checked, trees[-1], out_avals, differentiable, len(operands))
        return epilogue, (*captured, *map(unmarked, offsets))


def _one_head_program(program: Callable[[Layout], Program], n: int, error: NotTileLocalError) -> Program:
    """The program of an epilogue with one head of all N columns; raises `error` if there is none."""
    for tables_first in (True, False):
        with contextlib.suppress(NotTileLocalError):
            return program(Layout(Halves(2, head=n), one_head=True, tables_first=tables_first))
    raise error from None


def _identity(acc: jax.Array) -> jax.Array:
    return acc


@lru_cache(maxsize=4096)
def _bare(acc: Any, _: Any) -> Epilogue:
    """The epilogue of a product of this type that has none, beside a mesh."""
    return _traced(_identity, acc, (), None)[0]


def _initial_layout(arrays: Sequence[Any], n: Any) -> Layout:
    """Acc is a half where an array has twice its columns."""
    shapes = [(1, *x.array.shape[1:]) if isinstance(x, Marked) else x.shape for x in arrays]
    widths = [shape[-1] for shape in shapes if len(shape) in (1, 2)]
    twice = any(same_size(width, 2 * n) and not same_size(width, n) for width in widths)
    return Layout(Halves(2, acc=Width.HALF)) if twice else Layout()


def _parameter_names(f: Callable[..., Any], count: int) -> list[str]:
    """Names of f's parameters after acc; numbers where it has none."""
    try:
        parameters = list(inspect.signature(f).parameters.values())[1:]
    except (TypeError, ValueError):
        parameters = []
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [positional[i] if i < len(positional) else str(i) for i in range(count)]


def types_of(f: Callable[..., Any], *args: Any, key: Hashable = None) -> list[Any]:
    """Types of f's flat outputs. jax.eval_shape loses their mesh inside a shard_map that leaves some axes to XLA.

    Args:
      f: a function of these arguments, which are trees of arrays, or of their types.
      key: functions with equal keys have equal types, and are traced once for arguments of equal types; None: always.
    """
    if key is None:
        # JAX keeps something of each trace for as long as the function that it was given lives.
        return list(jax.make_jaxpr(lambda *given: f(*given))(*args).out_avals)
    leaves, tree = jax.tree.flatten(args)
    types = tuple(x if isinstance(x, jax.core.ShapedArray | jax.ShapeDtypeStruct) else jax.typeof(x) for x in leaves)
    known = key, tree, types, jax.sharding.get_abstract_mesh(), trace_context()
    if known not in _types:
        if len(_types) >= _MOST_TYPES:
            _types.clear()
        _types[known] = types_of(f, *args)
    return list(_types[known])


def _avals(acc: Any, operands: Sequence[Operand], arrays: Sequence[Any]) -> list[Any]:
    """The types that f is traced with; inside a shard_map they vary over the same mesh axes as the arrays."""

    def arguments(acc: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
        return [lax.convert_element_type(acc, jnp.float32), *seen(operands, arrays, acc.shape[0])]

    return types_of(arguments, acc, *map(unmarked, arrays))


def _as_float32(operand: Operand) -> Operand:
    traced = np.dtype(np.float32) if TABLE[operand.dtype.name].is_float else operand.dtype
    return replace(operand, traced_dtype=traced)


def _divides(divisor: Any, size: Any) -> bool:
    return isinstance(divisor, int) and isinstance(size, int) and divisor > 0 and size % divisor == 0


_Candidate = tuple[OperandKind, Width, Any]  # a possible kind and width of an array, and the columns that it then has


def _operand(x: Any, m: Any, n: Any, layout: Layout, is_final: bool, label: str, name: str) -> Operand:
    """The kind of x, by its shape beside acc (M, N). Until the layout is final, x may fit heads that are not known."""
    mark, x = type(x) if isinstance(x, Marked) else None, unmarked(x)
    shape = tuple(x.shape)
    if not isinstance(x.dtype, np.dtype):
        raise NotTileLocalError(
            f"epilogue '{name}': {label} has dtype {x.dtype}; pass random numbers, not keys, as operands."
        )
    dtype = np.dtype(x.dtype)
    candidates = _beside_acc(n, layout, mark)
    if (head := layout.halves.head) and mark is None:
        head_kinds = [*_along_heads(head, Width.FULL), *_along_heads(head // 2, Width.HALF)]
        candidates = [*head_kinds, *candidates] if layout.tables_first else [*candidates, *head_kinds]
    elif (
        mark is None
        and not is_final
        and layout.halves.acc is Width.FULL
        and len(shape) in (1, 2)
        and _divides(shape[-1], n)
    ):
        candidates += _along_heads(shape[-1], Width.FULL)
    fitting = next(((kind, width) for kind, width, columns in candidates if kind.fits(shape, m, columns)), None)
    if fitting is None:
        raise NotTileLocalError(f"epilogue '{name}': {label} {_misfit(shape, m, n, layout, mark)}")
    kind, width = fitting
    is_float = kind.only_floats and (kind.is_tile or bool(head))  # without heads, a head's vector may yet fit nothing
    what, allowed = ("arrays over heads", FLOATS) if is_float else ("vectors and scalars", VECTORS)
    if kind.by_tensor_map:
        what, allowed = "tiles", TILES
    if dtype.name not in allowed:
        raise NotTileLocalError(
            f"epilogue '{name}': {label} of shape {shape} has dtype {dtype}; {what} are {listed(allowed)}."
        )
    return Operand(kind, dtype, dtype, width, kind.period(shape, m))


def _beside_acc(n: Any, layout: Layout, mark: type[Marked] | None) -> list[_Candidate]:
    """The kinds with this mark that may broadcast against acc, or against tiles that have other columns than acc."""
    if layout.halves.acc is Width.HALF:
        full, half = 2 * n, n
    else:
        full, half = (
            n,
            n // 2 if isinstance(n, int) and n % 2 == 0 and not (layout.halves.head or layout.slices) else None,
        )
    kinds = [kind for kind in KINDS if kind.mark is mark and kind.columns is not Columns.OF_HEAD]
    return [(kind, width, columns) for width, columns in ((Width.FULL, full), (Width.HALF, half)) for kind in kinds]


def _along_heads(size: Any, width: Width) -> list[_Candidate]:
    """The kinds that may broadcast against heads, or halves of heads, of so many columns."""
    return [(kind, width, size) for kind in KINDS if kind.columns is Columns.OF_HEAD]


def _misfit(shape: tuple[Any, ...], m: Any, n: Any, layout: Layout, mark: type[Marked] | None) -> str:
    """Why an operand of this shape is refused."""
    if mark is not None:
        allowed = " or ".join(kind.shapes for kind in KINDS if kind.mark is mark)
        return (
            f"has shape {shape}; beside acc (M, N) = ({m}, {n}) an array by group must be {allowed}, with N/2 or 2N in "
            "the place of N where the epilogue works on halves."
        )
    advice = " Pass it with shape (M, 1)." if len(shape) == 1 and same_size(shape[0], m) else ""
    may_repeat = len(shape) == 2 and isinstance(shape[0], int) and shape[0] > 1 and _divides(shape[1], n)
    if may_repeat and not isinstance(m, int) and not is_repeated(shape, m):
        advice = f" M = {m} is not known to be a multiple of {shape[0]}, so that rows of a table cannot repeat."
    head = layout.halves.head
    heads = (
        f", nor against heads of Dh = {head} as (M, Dh), (M, Dh/2) or (Dh,), or (S, Dh) where S is known to divide M"
        if head
        else ""
    )
    return (
        f"has shape {shape}, which does not broadcast against acc (M, N) = ({m}, {n}) as a scalar (), row vector (N,) "
        f"or (1, N), column vector (M, 1) or tile (M, N){heads}.{advice}"
    )
