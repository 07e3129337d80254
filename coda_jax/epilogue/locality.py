"""The check that a flat jaxpr is local to its tile, and its translation to one element's program.

Every array axis carries a tag: it is indexed by the row, by the column, by the column inside one half of N, or the array does not vary along
it. Tags, not sizes, decide what an array is, so that M == N, M == 1 and N == 1 mean nothing special.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from coda_jax.epilogue import elementwise
from coda_jax.epilogue.flatten import Atom, Constants, Equation, Flat, Literal, flatten
from coda_jax.epilogue.program import (
    Axis,
    Finish,
    Kind,
    Node,
    Operand,
    Program,
    Reduction,
    ReductionOp,
    TileStore,
    Width,
    node_attributes,
)

ROW, COLUMN, HALF, INDEX = "row", "column", "half column", "index"  # INDEX: a one-dimensional iota whose axis is not known yet
Tag = str | None

ALLOWED = (
    "Allowed in an epilogue: elementwise operations on acc and operands that broadcast against it, sums, maxima and minima along rows or "
    "columns as outputs, the two halves of N (jnp.split(x, 2, axis=1), jnp.concatenate back), row and column indices from iota."
)

HINTS = {
    "argmax": "Return the maximum; take the index outside the epilogue.",
    "argmin": "Return the minimum; take the index outside the epilogue.",
    "dot_general": "Make the product a coda.gemm of its own.",
    "transpose": "Transpose the result outside the epilogue, or use transpose_a / transpose_b.",
    "gather": "Only the two halves acc[:, :N//2] and acc[:, N//2:] can be taken apart.",
    "dynamic_slice": "Only the two halves acc[:, :N//2] and acc[:, N//2:] can be taken apart, with static indices.",
    "slice": "Only the two halves acc[:, :N//2] and acc[:, N//2:] can be taken apart.",
    "split": "Only two halves, jnp.split(x, 2, axis=1), can be taken apart.",
    "concatenate": "Only two halves can be joined, along the last axis.",
    "pad": "Only a half of N can be padded to the whole.",
    "scan": "Unroll it with a Python loop.",
    "while": "Unroll it with a Python loop.",
    "cond": "Use jnp.where.",
    "random_bits": "Pass random numbers as an operand.",
    "threefry2x32": "Pass random numbers as an operand.",
    "reduce_prod": "Sum logarithms instead.",
}
IDENTITIES = frozenset(
    {"copy", "copy_p", "stop_gradient", "optimization_barrier", "pvary", "pcast", "name", "reduce_precision", "sharding_constraint"}
)
REDUCTIONS = {
    "reduce_sum": ReductionOp.SUM,
    "reduce_max": ReductionOp.MAX,
    "reduce_min": ReductionOp.MIN,
    "reduce_or": ReductionOp.MAX,
    "reduce_and": ReductionOp.MIN,
}


class NotTileLocalError(ValueError):
    """An epilogue does something that one tile of the product cannot do by itself. The message names the operation and its source line."""


class NeedsHalves(Exception):
    """Raised inside the analysis when f turns out to work on halves of N."""


class _NotElementwise(Exception):
    """An equation that has no per-element form; the text says why."""


@dataclass(frozen=True)
class Local:
    """A value with a per-element form.

    Attributes:
      tags: one per array axis.
      nodes: one, or one for each way where an axis is tagged COLUMN and there are two ways.
      tile: it varies with both row and column, or comes from something that does.
    """

    tags: tuple[Tag, ...]
    nodes: tuple[int, ...]
    tile: bool


@dataclass(frozen=True)
class Finished:
    """A value that XLA computes after the kernel, from reductions or from vectors; `why` says what it is, for messages."""

    why: str
    from_reduction: bool = False


@dataclass(frozen=True)
class Stacked:
    """Values stacked along a new first axis: what jnp.select makes of its conditions before it looks for the first true one."""

    items: tuple[Local, ...]


Value = Local | Finished | Stacked


def same_size(a: Any, b: Any) -> bool:
    """Equality of dimensions; False for symbolic ones that cannot be compared."""
    if isinstance(a, int | np.integer) and isinstance(b, int | np.integer):
        return int(a) == int(b)
    return type(a) is type(b) and bool(a == b)


def same_shape(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(map(same_size, a, b))


class Analysis:
    """Translates one flat jaxpr. `operands` fix what the inputs after acc are; inputs are acc, operands, in this order."""

    def __init__(self, flat: Flat, order: Sequence[int], operands: Sequence[Operand], ways: int, name: str):
        self.flat, self.operands, self.ways, self.name = flat, tuple(operands), ways, name
        self.m, self.n = flat.avals[0].shape
        self.half = self.n // 2 if isinstance(self.n, int) and self.n % 2 == 0 else None
        self.nodes: list[Node] = []
        self.numbers: dict[Node, int] = {}
        self.values: dict[int, Value] = {}
        self.reductions: list[Reduction] = []
        self.sources: dict[int, tuple[str, int]] = {}  # flat variable -> ("operand" | "reduction", index)
        self.producers: dict[int, Equation] = {}
        self.values[0] = Local((ROW, COLUMN), tuple(self.node("acc", (), "float32", way=way) for way in range(ways)), True)
        for index, (variable, operand) in enumerate(zip(order, operands, strict=True)):
            self.values[variable] = self.operand(index, operand, flat.avals[variable])
            self.sources[variable] = ("operand", index)
        for equation in flat.equations:
            self.equation(equation)

    # --- nodes

    def node(self, op: str, inputs: tuple[int, ...], dtype: str, /, **attributes: Any) -> int:
        """Number of the node, shared with an equal one."""
        node = Node(op, inputs, dtype, tuple(attributes.items()))
        if node not in self.numbers:
            self.numbers[node] = len(self.nodes)
            self.nodes.append(node)
        return self.numbers[node]

    def literal(self, value: Any, dtype: Any) -> int:
        dtype = np.dtype(dtype)
        value = np.asarray(value, dtype)
        return self.node("literal", (), dtype.name, value=value.item() if dtype.kind in "bi" else LiteralFloat(value))

    def operand(self, index: int, operand: Operand, aval: Any) -> Local:
        dtype = operand.traced_dtype.name
        load = lambda way: self.node("operand", (), dtype, index=index, way=way)
        if operand.kind is Kind.SCALAR:
            return Local((None,) * len(aval.shape), (load(0),), False)
        if operand.kind is Kind.COLUMN_VECTOR:
            return Local((ROW, None), (load(0),), False)
        column: Tag = COLUMN if operand.width is Width.FULL else HALF
        nodes = tuple(map(load, range(self.ways))) if operand.width is Width.FULL else (load(0),)
        if operand.kind is Kind.TILE:
            return Local((ROW, column), nodes, True)
        return Local((None, column) if len(aval.shape) == 2 else (column,), nodes, False)

    # --- equations

    def refuse(self, equation: Equation, why: str = "") -> NoReturn:
        hint = HINTS.get(equation.name, "")
        because = why or "is not local to a tile of the product"
        raise NotTileLocalError(f"epilogue '{self.name}': {equation.where()} {because}. {hint + ' ' if hint else ''}{ALLOWED}")

    def value(self, atom: Atom) -> Value:
        if isinstance(atom, Literal):
            if atom.dtype.name not in elementwise.DTYPES:
                return Finished(f"a constant of dtype {atom.dtype}")
            return Local((), (self.literal(atom.value, atom.dtype),), False)
        return self.values[atom]

    def equation(self, equation: Equation) -> None:
        from coda_jax.epilogue.structure import RULES

        if not equation.outputs or "callback" in equation.name:
            self.refuse(equation, "calls back into Python, which a kernel cannot do")
        for variable in equation.outputs:
            self.producers[variable] = equation
        inputs = [self.value(atom) for atom in equation.inputs]
        tile = any(is_tile(value) for value in inputs)
        finished = next((value for value in inputs if isinstance(value, Finished)), None)
        if finished is not None:
            if tile:
                self.refuse(equation, _combination(finished))
            self.finish_later(equation, finished)
            return
        try:
            if any(isinstance(value, Stacked) for value in inputs):
                outputs: list[Any] = [self.first_true(equation, inputs)]
            elif equation.name in RULES:
                outputs = RULES[equation.name](self, equation, inputs)
            elif equation.name in IDENTITIES:
                outputs = self.identity(equation, inputs)
            else:
                outputs = [self.elementwise(equation, inputs)]
        except _NotElementwise as error:
            if tile:
                self.refuse(equation, str(error))
            self.finish_later(equation, Finished(f"the result of {equation.where()}"))
            return
        self.values.update(zip(equation.outputs, outputs, strict=True))

    def finish_later(self, equation: Equation, value: Finished) -> None:
        if any(hasattr(x, "eqns") or hasattr(x, "jaxpr") for x in jax.tree.leaves(list(equation.params.values()))):
            self.refuse(equation, "is control flow or a nested program, which an epilogue cannot hold")
        for variable in equation.outputs:
            self.values[variable] = value

    def first_true(self, equation: Equation, inputs: Sequence[Any]) -> Local:
        """argmax over stacked conditions: the index of the first true one, 0 if there is none."""
        if equation.name != "argmax" or tuple(equation.params["axes"]) != (0,) or len(inputs) != 1:
            raise _NotElementwise("works on stacked arrays")
        (stacked,) = inputs
        if any(self.nodes[item.nodes[0]].dtype != "bool" for item in stacked.items):
            raise _NotElementwise("looks for the largest of stacked arrays; use jnp.maximum and jnp.where")

        def first(conditions: tuple[int, ...]) -> int:
            index = self.literal(0, "int32")
            for number in range(len(conditions) - 1, -1, -1):
                index = self.node("select_n", (conditions[number], index, self.literal(number, "int32")), "int32")
            return index

        return self.map(stacked.items, first)

    def identity(self, equation: Equation, inputs: list[Local]) -> list[Local]:
        if equation.name != "reduce_precision":
            return list(inputs)
        bits = (equation.params["exponent_bits"], equation.params["mantissa_bits"])
        if bits == (8, 23):
            return list(inputs)
        if bits != (8, 7) or self.nodes[inputs[0].nodes[0]].dtype != "float32":
            raise _NotElementwise(f"with {bits[0]} exponent and {bits[1]} mantissa bits is not supported; use astype")
        rounded = self.map(inputs, lambda nodes: self.convert(self.convert(nodes[0], "bfloat16"), "float32"))
        return [rounded]

    def elementwise(self, equation: Equation, inputs: list[Local]) -> Local:
        name = "add" if equation.name == "add_any" else equation.name
        operation = elementwise.OPERATIONS.get(name)
        if operation is None:
            raise _NotElementwise("is not local to a tile of the product, or not an operation that epilogues know")
        dtype = equation_dtype(self.flat, equation)
        for atom in equation.inputs:
            self.check_dtype(equation, self.flat.aval(atom).dtype)
        self.check_dtype(equation, dtype)
        first = self.flat.aval(equation.inputs[0]).dtype.name
        if first not in operation.dtypes or (name == "pow" and first == "int32"):
            raise _NotElementwise(f"is not supported for {first}")
        if name == "convert_element_type":
            return self.map(inputs, lambda nodes: self.convert(nodes[0], dtype.name))
        attributes = dict(node_attributes(name, equation.params))
        return self.map(inputs, lambda nodes: self.node(name, nodes, dtype.name, **attributes))

    def check_dtype(self, equation: Equation, dtype: Any) -> None:
        if np.dtype(dtype).name not in elementwise.DTYPES:
            raise _NotElementwise(f"works in {dtype}; an epilogue computes in float32, bfloat16, float16, int32 and bool")

    def convert(self, node: int, dtype: str) -> int:
        source = self.nodes[node]
        if source.dtype == dtype:
            return node
        if source.op == "literal":
            return self.literal(np.asarray(source["value"], source.dtype), dtype)
        return self.node("convert_element_type", (node,), dtype, dtype=dtype)

    def map(self, inputs: Sequence[Local], f: Callable[[tuple[int, ...]], int]) -> Local:
        """Applies f to the nodes of elementwise combined inputs (equal shapes, or rank 0), way by way."""
        rank = max(len(value.tags) for value in inputs)
        ranked = [value if len(value.tags) == rank else replace(value, tags=(None,) * rank) for value in inputs]
        tags = tuple(self.unify([value.tags[axis] for value in ranked]) for axis in range(rank))
        resolved = [self.resolve(value, tags) for value in ranked]
        ways = self.ways if COLUMN in tags else 1
        nodes = tuple(f(tuple(v.nodes[way] if len(v.nodes) > 1 else v.nodes[0] for v in resolved)) for way in range(ways))
        return self.local(tags, nodes, any(value.tile for value in inputs))

    def local(self, tags: tuple[Tag, ...], nodes: tuple[int, ...], tile: bool) -> Local:
        return Local(tags, nodes, tile or (ROW in tags and (COLUMN in tags or HALF in tags)))

    def unify(self, tags: Sequence[Tag]) -> Tag:
        found = {tag for tag in tags if tag is not None}
        known = found - {INDEX}
        if len(known) > 1:
            raise _NotElementwise(f"combines an axis indexed by the {sorted(known)[1]} with one indexed by the {sorted(known)[0]} of the product")
        return known.pop() if known else (INDEX if found else None)

    def resolve(self, value: Local, tags: tuple[Tag, ...]) -> Local:
        """`value` with its INDEX axis given the meaning it has in `tags`."""
        if INDEX not in value.tags:
            return value
        tag = tags[value.tags.index(INDEX)]
        if tag == ROW:
            leaves = [self.node("row", (), "int32")]
        elif tag in (COLUMN, HALF):
            leaves = [self.node("column", (), "int32", way=way) for way in range(self.ways if tag == COLUMN else 1)]
        else:
            return value
        nodes = tuple(self.substitute(value.nodes[0], leaf, {}) for leaf in leaves)
        return Local(tuple(tag if t == INDEX else t for t in value.tags), nodes, value.tile)

    def substitute(self, number: int, leaf: int, done: dict[int, int]) -> int:
        node = self.nodes[number]
        if node.op == INDEX:
            return leaf
        if number not in done:
            inputs = tuple(self.substitute(i, leaf, done) for i in node.inputs)
            done[number] = self.node(node.op, inputs, node.dtype, **dict(node.attributes))
        return done[number]

    def halves(self) -> None:
        """Notes that f works on halves."""
        if self.ways == 1:
            raise NeedsHalves

    # --- reductions

    def reduce(self, equation: Equation, inputs: list[Local]) -> list[Value]:
        (value,), op = inputs, REDUCTIONS[equation.name]
        axes = tuple(int(axis) for axis in equation.params["axes"])
        (aval,) = (self.flat.aval(atom) for atom in equation.inputs)
        reduced = [value.tags[axis] for axis in axes]
        if not value.tile:
            raise _NotElementwise("")
        if any(tag is None and not same_size(aval.shape[axis], 1) for axis, tag in zip(axes, reduced, strict=True)):
            raise _NotElementwise("reduces an axis that is neither the rows nor the columns of the product")
        kept = tuple(tag for axis, tag in enumerate(value.tags) if axis not in axes)
        if all(tag is None for tag in reduced):
            return [Local(kept, value.nodes, value.tile)]
        self.check_reduction_dtype(equation, value, aval)
        nodes = tuple(self.convert(node, "float32") for node in value.nodes)
        along_row = COLUMN in reduced or HALF in reduced
        width = Width.FULL if along_row or COLUMN in value.tags else Width.HALF
        if not along_row and len(nodes) < (self.ways if width is Width.FULL else 1):
            nodes = nodes * self.ways  # what lost its column axis because N == 1
        reduction = Reduction(op, Axis.ROW if along_row else Axis.COLUMN, width, nodes)
        if reduction not in self.reductions:
            self.reductions.append(reduction)
        index = self.reductions.index(reduction)
        size = self.m if along_row else (self.n if width is Width.FULL else self.half)
        out = self.flat.avals[equation.outputs[0]]
        both = along_row and ROW in reduced

        def complete(x: jax.Array) -> jax.Array:
            if both and (equation.name != "reduce_sum" or out.dtype != jnp.int32):
                x = op.reduce(x, axis=0)
            elif both:
                x = jnp.sum(x.astype(jnp.int32), axis=0)
            x = x if same_shape(x.shape, out.shape) else x.reshape(out.shape)
            return x.astype(out.dtype)

        source = self.flat.new(jax.ShapeDtypeStruct((size,), jnp.float32))
        self.sources[source] = ("reduction", index)
        self.values[source] = Finished("")
        self.append_finishing(equation, complete, source)
        return [Finished(f"the reduction {equation.where()}", from_reduction=True)]

    def check_reduction_dtype(self, equation: Equation, value: Local, aval: Any) -> None:
        dtype = np.dtype(aval.dtype).name
        if dtype in elementwise.FLOATS or dtype == "bool":
            return
        if not all(self.is_count(node) for node in value.nodes):
            raise _NotElementwise(f"is a reduction of {dtype} values, and reductions are float32. Convert them to float32 first")

    def is_count(self, number: int) -> bool:
        """Whether the integer node is -1, 0 or 1, so that its float32 sum is exact up to 2^24 terms."""
        node = self.nodes[number]
        if node.op == "literal":
            return abs(node["value"]) <= 1
        if node.op == "convert_element_type":
            return self.nodes[node.inputs[0]].dtype == "bool"
        return node.op == "select_n" and all(self.is_count(case) for case in node.inputs[1:])

    def append_finishing(self, equation: Equation, f: Callable[[jax.Array], jax.Array], source: int) -> None:
        """Defines the equation's output as f(source), evaluated after the kernel."""
        aval = self.flat.avals[source]
        body = flatten(jax.make_jaxpr(f)(aval), Constants(), inline_custom_derivatives=True)
        names: dict[int, int] = {0: source}
        read = lambda atom: atom if isinstance(atom, Literal) else names[atom]
        (result,) = body.outputs
        for inner in body.equations:
            for variable in inner.outputs:
                names[variable] = equation.outputs[0] if variable == result else self.flat.new(body.avals[variable])
            outputs = tuple(names[v] for v in inner.outputs)
            moved = replace(inner, inputs=tuple(map(read, inner.inputs)), outputs=outputs)
            for variable in outputs:
                self.producers[variable] = moved
        if result == 0:
            self.sources[equation.outputs[0]] = self.sources[source]

    # --- the program

    def program(self) -> Program:
        stores: list[TileStore] = []
        finished: list[tuple[int, Atom]] = []
        for output, atom in enumerate(self.flat.outputs):
            store = self.store(output, atom)
            if store is None:
                finished.append((output, atom))
            else:
                stores.append(store)
        return self.compact(stores, self.finishing(finished), len(self.flat.outputs))

    def store(self, output: int, atom: Atom) -> TileStore | None:
        """The tile store for an output, or None if it is computed after the kernel."""
        value, aval = self.value(atom), self.flat.aval(atom)
        if isinstance(value, Finished):
            return None
        if isinstance(value, Stacked):
            raise NotTileLocalError(f"epilogue '{self.name}': output {output} is a stack of arrays; return them one by one. {ALLOWED}")
        whole = same_shape(aval.shape, (self.m, self.n))
        half = self.ways == 2 and same_shape(aval.shape, (self.m, self.half))
        unit = same_size(self.m, 1) or same_size(aval.shape[-1] if aval.shape else 1, 1)
        if not value.tile and (not (whole or half) or unit):
            return None
        rows_ok = len(value.tags) == 2 and value.tags[0] in (ROW, None) and value.tags[1] in ((COLUMN, None) if whole else (HALF, None))
        if not (whole or half) or not rows_ok:
            made_by = self.producers[atom].where() if isinstance(atom, int) and atom in self.producers else "an input"
            raise NotTileLocalError(
                f"epilogue '{self.name}': output {output} has shape {aval.shape}, made by {made_by}; a tile output has shape (M, N) = "
                f"({self.m}, {self.n}) or (M, N/2), a reduction (M,) or (N,). Reshape it outside the epilogue. {ALLOWED}"
            )
        if np.dtype(aval.dtype).name not in elementwise.FLOATS:
            raise NotTileLocalError(
                f"epilogue '{self.name}': output {output} is a tile of dtype {aval.dtype}; tile outputs are bfloat16, float16 or float32. "
                "Convert it to a float inside the epilogue, or compute it outside."
            )
        nodes = value.nodes * self.ways if whole and len(value.nodes) < self.ways else value.nodes
        return TileStore(output, Width.FULL if whole else Width.HALF, nodes)

    def finishing(self, outputs: list[tuple[int, Atom]]) -> Finish:
        """The equations that `outputs` need, in order, with canonical variable numbers and text."""
        numbers: dict[int, int] = {}
        inputs: list[tuple[int, str, int]] = []
        equations: list[Equation] = []
        lines: list[str] = []

        def visit(atom: Atom) -> Atom:
            if isinstance(atom, Literal) or atom in numbers:
                return atom if isinstance(atom, Literal) else numbers[atom]
            if atom in self.sources:
                numbers[atom] = len(numbers)
                source, index = self.sources[atom]
                inputs.append((numbers[atom], source, index))
                lines.append(f"f{numbers[atom]} = {source} {index}")
                return numbers[atom]
            equation = self.producers[atom]
            read = tuple(map(visit, equation.inputs))
            for variable in equation.outputs:
                numbers[variable] = len(numbers)
            written = tuple(numbers[v] for v in equation.outputs)
            equations.append(replace(equation, inputs=read, outputs=written, source_info=None))
            avals = " ".join(f"f{numbers[v]}:{_aval_text(self.flat.avals[v])}" for v in equation.outputs)
            lines.append(f"{avals} = {equation.name}({', '.join(map(_atom_text, read))}) {_params_text(equation.params)}")
            return numbers[atom]

        results = tuple((output, visit(atom)) for output, atom in outputs)
        lines += [f"output {output} = {_atom_text(atom)}" for output, atom in results]
        return Finish(tuple(inputs), tuple(equations), results, "\n".join(lines))

    def compact(self, stores: list[TileStore], finish: Finish, num_outputs: int) -> Program:
        """Drops reductions and nodes that no output needs, and numbers the rest in order of use."""
        used = sorted({index for _, source, index in finish.inputs if source == "reduction"})
        position = {index: i for i, index in enumerate(used)}
        finish = replace(
            finish,
            inputs=tuple((v, s, position[i] if s == "reduction" else i) for v, s, i in finish.inputs),
            text="\n".join(
                line if " = reduction " not in line else f"{line.split(' = ')[0]} = reduction {position[int(line.split()[-1])]}"
                for line in finish.text.split("\n")
            ),
        )
        nodes: list[Node] = []
        numbers: dict[int, int] = {}

        def visit(old: int) -> int:
            if old not in numbers:
                inputs = tuple(map(visit, self.nodes[old].inputs))
                numbers[old] = len(nodes)
                nodes.append(replace(self.nodes[old], inputs=inputs))
            return numbers[old]

        new_stores = tuple(replace(store, values=tuple(map(visit, store.values))) for store in stores)
        new_reductions = tuple(
            replace(self.reductions[i], values=tuple(map(visit, self.reductions[i].values))) for i in used
        )
        return Program(self.operands, self.ways, tuple(nodes), new_stores, new_reductions, num_outputs, finish)


def is_tile(value: Value) -> bool:
    return any(map(is_tile, value.items)) if isinstance(value, Stacked) else isinstance(value, Local) and value.tile


def _combination(value: Finished) -> str:
    if value.from_reduction:
        return (
            f"combines the tile with {value.why}, which is known only after all tiles. Return the reduction, and apply it to the "
            "product's result outside, or pass it to a later product as an operand"
        )
    return f"combines the tile with {value.why}, which a tile cannot compute. Compute that before the call and pass it as an operand"


class LiteralFloat(float):
    """A float32 constant, compared and printed by its bits, so that 0.0, -0.0 and NaN stay themselves."""

    def __repr__(self) -> str:
        return np.float32(self).tobytes()[::-1].hex()

    __str__ = __repr__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LiteralFloat) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))


def equation_dtype(flat: Flat, equation: Equation) -> np.dtype:
    return np.dtype(flat.avals[equation.outputs[0]].dtype)


def _aval_text(aval: Any) -> str:
    return f"{aval.dtype}[{','.join(map(_dimension_text, aval.shape))}]"


def _dimension_text(dimension: Any) -> str:
    """A symbolic dimension is itself only inside its own scope."""
    return str(dimension) if isinstance(dimension, int) else f"{dimension}@{id(dimension.scope):x}"


def _atom_text(atom: Atom) -> str:
    return f"{atom.dtype} {np.asarray(atom.value).tobytes().hex()}" if isinstance(atom, Literal) else f"f{atom}"


def _params_text(params: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in sorted(params.items()))
