"""Operands that depend on no score, as expressions over the axes of the scores that they meet.

Broadcasts, reshapes, transposes, casts and elementwise operations are followed backward, under the labels of the axes;
iotas become positions, and gathers of a table's entries entries. What is left are leaves: variables whose axes have
labels.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from coda_jax.attend.score.gathers import MOST_ENTRIES, Component, reads
from coda_jax.epilogue.values import NotElementwise
from coda_jax.fusion.attention.axes import VIEWS, Atom, Label, Labels, Unlike, atoms_of, labels_of, moved_back, whole
from coda_jax.fusion.dots import Equation
from coda_jax.fusion.makers import Makers
from coda_jax.fusion.straight import applied
from coda_jax.graph.on_mesh import ELEMENTWISE, PVARY
from coda_jax.jaxprs.bind import bind
from coda_jax.jaxprs.def_use import variables
from coda_jax.jaxprs.evaluate import read

SAME = PVARY | {"copy", "name", "sharding_constraint", "optimization_barrier"}  # the identity, to a value
LOCAL = ELEMENTWISE | {
    *["select_n", "clamp", "square", "is_finite", "not", "and", "or", "xor", "rem", "sign", "floor", "ceil", "round"],
    *["eq", "ne", "lt", "le", "gt", "ge", "integer_pow", "pow", "exp2", "abs", "min", "max", "neg", "sub", "add"],
    *["mul", "div", "exp", "log", "tanh", "sqrt", "rsqrt", "shift_left", "shift_right_logical"],
}
_OF_CONDITIONS: dict[str, Callable[..., Any]] = {  # operations of `logic`, which no equation has
    "and": jnp.logical_and,
    "or": jnp.logical_or,
    "not": jnp.logical_not,
    "nonzero": lambda x: x != 0,
}
ENTRIES = "entries"  # the kind of the atom of a table's axis that an index counts
_MOST_KNOWN = 1 << 26  # elements of a constant array whose values are looked at
_MOST_EQUATIONS = 64  # that a constant is computed by
_MOST_DEPTH = 48  # of an expression; what is deeper is a leaf


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
    """An expression.

    Attributes:
      op: "score" for the product itself, "operand" for what is not yet looked into, "leaf", "iota", "constant", "entry"
        of a gather, or the name of an elementwise primitive.
      args: of a primitive; of an entry its number, and the table, a leaf one of whose axes has an atom of its own.
      equation: that of a primitive.
      var: of an operand or a leaf; the number that a constant is; the dtype of an iota.
      labels: of the axes of an operand or a leaf; that of the axis which an iota counts.
      start: the first number of an iota.
    """

    op: str
    args: tuple[Node, ...] = ()
    equation: Equation = None
    var: Any = None
    labels: Labels = ()
    start: int = 0

    def walk(self) -> Iterator[Node]:
        """All nodes, each once."""
        seen, open_ = set[int](), [self]
        while open_:
            node = open_.pop()
            if id(node) not in seen:
                seen.add(id(node))
                yield node
                open_ += node.args

    def atoms(self) -> frozenset[Atom]:
        """The atoms that the expression depends on, beside those of the scores."""
        return frozenset(atom for node in self.walk() for atom in atoms_of(node.labels))

    @property
    def has_score(self) -> bool:
        return any(node.op == "score" for node in self.walk())

    @property
    def is_table(self) -> bool:
        """Whether it is the table of an entry."""
        return self.op == "leaf" and any(atom.kind == ENTRIES for atom in atoms_of(self.labels))

    @property
    def leaves(self) -> list[Node]:
        return [node for node in self.walk() if node.op == "leaf"]


class Trees:
    """Makes expressions of variables.

    Args:
      makers: of the jaxpr.
      constants: the values of those of its variables that are known.
    """

    def __init__(self, makers: Makers, constants: Mapping[Any, Any]):
        self.makers, self._constants = makers, constants
        self._known: dict[Any, np.ndarray | None] = {}
        self._nodes: dict[Any, Node] = {}

    def expanded(self, node: Node) -> Node:
        """An expression whose operands are expressions too.

        Raises:
          Unlike: an operand has an axis that the scores have not.
        """
        made: dict[int, Node] = {}

        def of(one: Node) -> Node:
            if id(one) not in made:
                if one.op == "operand":
                    made[id(one)] = self.node(one.var, one.labels)
                else:
                    args = tuple(map(of, one.args))
                    is_same = all(x is y for x, y in zip(args, one.args, strict=True))
                    made[id(one)] = one if is_same else dataclasses.replace(one, args=args)
            return made[id(one)]

        return of(node)

    def node(self, x: Any, labels: Sequence[Label], depth: int = 0) -> Node:
        """The expression that a variable or a literal is; raises as `expanded` does."""
        labels = labels_of(labels)
        if isinstance(x, core.Literal):
            return constant(x)
        key = x, labels
        if key not in self._nodes:
            self._nodes[key] = self._made(x, labels, depth)
        return self._nodes[key]

    def _made(self, x: Any, labels: Labels, depth: int) -> Node:
        known = self.known(x) if not x.aval.shape else None
        if known is not None:
            return Node("constant", var=known)
        equation = self.makers.maker(x)
        if equation is None or depth > _MOST_DEPTH:
            return self._leaf(x, labels)
        name, shape = equation.primitive.name, x.aval.shape
        if name in LOCAL or name in SAME:
            args = (self.node(y, beside(y, labels, shape), depth + 1) for y in equation.invars)
            return Node(name, tuple(args), equation)
        if name in VIEWS and len(equation.invars) == 1:
            source = equation.invars[0]
            if isinstance(source, core.Literal):
                return self.node(source, ())
            try:
                return self.node(source, moved_back(equation, labels), depth + 1)
            except Unlike:
                return self._leaf(x, labels)
        if name == "iota":
            return Node("iota", var=x.aval.dtype, labels=(labels[equation.params["dimension"]],))
        if name == "gather" and (entry := self._entry(equation, labels, depth)) is not None:
            return entry
        return self._leaf(x, labels)

    def _entry(self, equation: Equation, labels: Labels, depth: int) -> Node | None:
        """The entry of a small table that a gather reads, by an index of no arrays of pairs; None of another gather."""
        (table, indices), shapes = equation.invars, [x.aval.shape for x in equation.invars]
        try:
            of = reads(equation, shapes, labels)
            if isinstance(table, core.Literal) or len(of.counted) != 1 or shapes[0][of.counted[0]] > MOST_ENTRIES:
                return None
            index = self.node(indices, [label or () for label in of.indices[0]], depth + 1)
            each = zip(shapes[0], of.table, strict=True)
            own: list[Label] = [
                (Atom(size, ENTRIES),) if isinstance(label, Component) else label or () for size, label in each
            ]
            of_table = self._leaf(table, labels_of(own))
        except (NotElementwise, Unlike):
            return None
        if any(sum(map(bool, leaf.labels)) > 1 for leaf in index.leaves):
            return None
        return Node("entry", (index, of_table), equation)

    def _leaf(self, x: Any, labels: Labels) -> Node:
        """A variable that is not looked into; constants that count along one axis are an iota."""
        for label, size in zip(labels, x.aval.shape, strict=True):
            if not label and size > 1:
                raise Unlike("an operand has an axis that the scores have not")
        counted = [label for label in labels if label]
        if len(counted) == 1 and jnp.issubdtype(x.aval.dtype, jnp.integer) and (known := self.known(x)) is not None:
            numbers = np.ravel(known)
            if np.array_equal(numbers, np.arange(len(numbers)) + int(numbers[0])):
                return Node("iota", var=x.aval.dtype, labels=(counted[0],), start=int(numbers[0]))
        return Node("leaf", var=x, labels=labels)

    def known(self, x: Any) -> np.ndarray | None:
        """The value of a variable that is computed of constants alone; None of another."""
        if x not in self._known:
            is_constant = x in self._constants
            self._known[x] = _as_numpy(self._constants[x]) if is_constant else self._evaluated(x)
        return self._known[x]

    def _evaluated(self, x: Any) -> np.ndarray | None:
        needed, open_ = dict[int, Equation](), [x]
        while open_:
            one = open_.pop()
            if self._known.get(one) is not None or (one in self._constants and self.known(one) is not None):
                continue
            equation = self.makers.maker(one)
            if equation is None or equation.effects or len(needed) > _MOST_EQUATIONS or not _is_small(equation):
                return None
            needed[self.makers.number(equation)] = equation
            open_ += variables(equation.invars)
        values = {y: value for y, value in self._known.items() if value is not None}

        def value() -> Any:
            for number in sorted(needed):
                equation = needed[number]
                inputs = [read(values, y) for y in equation.invars]
                outputs = inputs if equation.primitive.name in SAME else applied(equation, inputs)
                values.update(zip(equation.outvars, outputs, strict=True))
            return values[x]

        return _as_computed(value)


def _is_small(equation: Equation) -> bool:
    """True for an equation with small results, which may be computed while a function is traced."""
    if any(equation.primitive.name.startswith(name) for name in ("random", "threefry", "jit", "pjit", "dot_general")):
        return False
    return all(isinstance(x.aval.size, int) and x.aval.size <= _MOST_KNOWN for x in equation.outvars)


def _as_numpy(value: Any) -> np.ndarray | None:
    """A constant as an array of numpy's; None of a traced or of a large one."""
    if isinstance(value, jax.core.Tracer) or np.size(value) > _MOST_KNOWN or not hasattr(value, "dtype"):
        return None
    if jnp.issubdtype(value.dtype, jax.dtypes.extended):
        return None
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return None
    return np.asarray(value)


def beside(x: Any, labels: Sequence[Label], shape: Sequence[Any]) -> Labels:
    """The labels of an operand of an elementwise equation, from those of its result."""
    if isinstance(x, core.Literal) or not x.aval.shape:
        return ()
    return tuple(
        label if size == whole_size else () for label, size, whole_size in zip(labels, x.aval.shape, shape, strict=True)
    )


def constant(x: Any) -> Node:
    """The expression that a literal is."""
    return Node("constant", var=np.asarray(x.val, x.aval.dtype))


def constant_of(node: Node) -> float | None:
    """The number that an expression of constants is; None of another."""
    if not all(one.op == "constant" or one.args for one in node.walk()):
        return None
    if any(one.op == "constant" and np.ndim(one.var) for one in node.walk()):
        return None
    return float(_as_computed(lambda: value_of(node, {}, ())))


def _as_computed(value: Callable[[], Any]) -> np.ndarray:
    """A value that is computed of constants now, on the default device, whatever mesh there is.

    The devices of `jax.set_mesh` may be described alone. A mesh is of one thread: another one has none.
    """
    if jax.sharding.get_abstract_mesh().empty:
        with jax.ensure_compile_time_eval():
            return np.asarray(value())
    has_64_bits = bool(jax.config.jax_enable_x64)  # of this thread

    def apart() -> np.ndarray:
        with jax.enable_x64(has_64_bits):
            return np.asarray(value())

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(apart).result()


def value_of(node: Node, values: Mapping[Any, Any], order: Sequence[Atom]) -> Any:
    """The value of an expression, with an axis for each atom of `order`, of one element where it does not depend on it.

    Args:
      node: an expression without scores.
      values: of the leaves' variables.
      order: all atoms that it depends on, and others.
    """
    made: dict[int, Any] = {}

    def of(one: Node) -> Any:
        if one.op == "entry" and id(one) not in made:
            made[id(one)] = _entry_value(one, of(one.args[0]), values, order)
        if id(one) not in made:
            made[id(one)] = _value(one, [of(x) for x in one.args], values, order)
        return made[id(one)]

    return of(node)


def _value(node: Node, args: Sequence[Any], values: Mapping[Any, Any], order: Sequence[Atom]) -> Any:
    if node.op == "constant":
        return jnp.asarray(node.var).reshape((1,) * len(order))
    if node.op == "leaf":
        return spread(values[node.var], node.labels, order)
    if node.op == "iota":
        return (positions(node.labels[0], order) + node.start).astype(node.var)
    return elementwise(node, args)


def _entry_value(node: Node, index: jax.Array, values: Mapping[Any, Any], order: Sequence[Atom]) -> jax.Array:
    table = node.args[1]
    (entries,) = [atom for atom in atoms_of(table.labels) if atom.kind == ENTRIES]
    x = spread(values[table.var], table.labels, [*order, entries])
    shape = jnp.broadcast_shapes(x.shape[:-1], index.shape)
    x, index = jnp.broadcast_to(x, (*shape, x.shape[-1])), jnp.broadcast_to(index, shape)[..., None]
    options = {name: node.equation.params[name] for name in ("mode", "fill_value")}
    return jnp.take_along_axis(x, index, axis=-1, **options)[..., 0]


def elementwise(node: Node, args: Sequence[Any]) -> Any:
    """The value of an operation on arrays that are broadcast to one shape."""
    if node.op in SAME:
        return args[0]
    if node.equation is None:
        return _OF_CONDITIONS[node.op](*args)
    shape = jnp.broadcast_shapes(*(x.shape for x in args))
    params = node.equation.params
    if node.op == "convert_element_type" and params.get("sharding") is not None:
        params = params | {"sharding": None}
    (result,) = bind(node.equation.primitive, [jnp.broadcast_to(x, shape) for x in args], params)
    return result


def positions(label: Label, order: Sequence[Atom]) -> jax.Array:
    """The positions along an axis with this label, int32, with an axis for each atom of `order`."""
    total, stride = jnp.zeros((1,) * len(order), jnp.int32), 1
    for atom in reversed(whole(label)):
        shape = [atom.size if other is atom else 1 for other in order]
        total = total + stride * lax.broadcasted_iota(jnp.int32, shape, list(order).index(atom))
        stride *= atom.size
    return total


def spread(x: jax.Array, labels: Sequence[Label], order: Sequence[Atom]) -> jax.Array:
    """An array with an axis for each atom of `order`, in their order, of one element where it has none."""
    labels = labels_of(labels)
    sizes = [atom.size for label in labels for atom in label]
    split = x if tuple(sizes) == x.shape else x.reshape(sizes)
    own = [atom for label in labels for atom in label]
    wanted = [atom for atom in order if atom in own]
    axes = [own.index(atom) for atom in wanted]
    moved = split if axes == list(range(len(axes))) else split.transpose(axes)
    shape = [atom.size if atom in own else 1 for atom in order]
    return moved if tuple(shape) == moved.shape else moved.reshape(shape)


def merged(x: jax.Array, groups: Iterable[Sequence[Atom]]) -> jax.Array:
    """An array with an axis for each atom of the groups, with one axis for each group.

    An axis has one element where the array has one along all atoms of the group; else it is whole.
    """
    groups = [list(group) for group in groups]
    shape, new_shape, start = list[int](), list[int](), 0
    for group in groups:
        own = x.shape[start : start + len(group)]
        is_one = all(size == 1 for size in own)
        shape += [1] * len(group) if is_one else [atom.size for atom in group]
        new_shape.append(1 if is_one else int(np.prod([atom.size for atom in group])))
        start += len(group)
    x = x if tuple(shape) == x.shape else jnp.broadcast_to(x, shape)
    return x if tuple(new_shape) == x.shape else x.reshape(new_shape)
