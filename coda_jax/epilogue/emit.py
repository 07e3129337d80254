"""CUDA text of a program: `struct Epilogue`, straight-line code for one element of the accumulator fragment."""

from collections.abc import Iterable, Sequence

import numpy as np

from coda_jax.epilogue.elementwise import FLOATS, OPERATIONS, ROUND
from coda_jax.epilogue.program import HEAD_REDUCTIONS, Axis, Kind, Node, Program, Reduction, ReductionOp

_DTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "int32": "i32", "bool": "pred"}
# Entries of the struct: array name (its count has an s) and type, with what stands in an array without entries.
_ACCESS = {
    "tile_load": "TileAccess",
    "row_vector": "VectorAccess",
    "column_vector": "VectorAccess",
    "scalar": "VectorAccess",
    "head_table": "VectorAccess",
    "head_vector": "VectorAccess",
    "row_reduction": "ReductionAccess",
    "column_reduction": "ReductionAccess",
}
_EMPTY = {
    "TileAccess": "-1, 0, 0, coda::DType::f32, false",
    "VectorAccess": "-1, 0, 1, coda::DType::f32, false",
    "ReductionAccess": "-1, 0, 1, coda::Op::sum",
}
_OVER_COLUMNS = ("tile_load", "row_vector", "head_table", "head_vector", "column_reduction")
_LOADS = {
    Kind.TILE: ("tile_load", "tile"),
    Kind.ROW_VECTOR: ("row_vector", "row_vector"),
    Kind.COLUMN_VECTOR: ("column_vector", "column_vector"),
    Kind.SCALAR: ("scalar", "scalar"),
    Kind.HEAD_TABLE: ("head_table", "head_table"),
    Kind.HEAD_VECTOR: ("head_vector", "head_vector"),
}
_COMBINE = {
    ReductionOp.SUM: "{} + {}",
    ReductionOp.MAX: "coda::maximum({}, {})",
    ReductionOp.MIN: "coda::minimum({}, {})",
    ReductionOp.LOGSUMEXP: "coda::log_add_exp({}, {})",
}


def emit(program: Program, out_dtypes: Sequence[np.dtype], batched_operands: Sequence[bool]) -> str:
    """The CUDA definition of `struct Epilogue` for a program; see cuda/epilogue_sm90.cuh for how the kernel uses it.

    Where neighbouring columns are worked on together, one entry of an array that lies over columns stands for both, and
    its values follow each other. Tensor maps are numbered a, b, `program.tile_operands`, stores; pointers are numbered
    non-tile operands in order, then reductions. A vector that the program does not read has a number but no entry.

    Args:
      program: the checked epilogue.
      out_dtypes: float32, bfloat16 or float16, one for each of `program.stores`.
      batched_operands: for each operand, whether it has a batch axis.
    """
    return _Emitter(program, out_dtypes, batched_operands).text()


class _Emitter:
    def __init__(self, program: Program, out_dtypes: Sequence[np.dtype], batched_operands: Sequence[bool]):
        self.program = program
        self.entries: dict[str, list[str]] = {name: [] for name in _ACCESS}
        self.spread = 2 if program.interleaved else 1  # values of an entry that lies over columns
        self.slots: dict[tuple[int, int], str] = {}
        self.results: list[str] = []
        self.head_values = {number: position for position, number in enumerate(program.head_levels)}
        tiles = program.tile_operands
        others = [i for i, operand in enumerate(program.operands) if operand.kind is not Kind.TILE]
        for index, batched in zip(range(len(program.operands)), batched_operands, strict=True):
            if index in tiles:
                self.load(index, 2 + tiles.index(index), batched)
            elif index in others:
                self.load(index, others.index(index), batched)
        self.stores(2 + len(tiles), out_dtypes)
        for number, reduction in enumerate(program.reductions):
            self.reduction(len(others) + number, reduction)

    def load(self, index: int, position: int, batched: bool) -> None:
        operand = self.program.operands[index]
        (array, member), flag = _LOADS[operand.kind], str(bool(batched)).lower()
        spread = self.spread if array in _OVER_COLUMNS else 1
        for way in self.program.loads(index):
            if way in self.program.entry_ways(index):
                third = 0 if operand.kind is Kind.TILE else self.program.ways_of(operand.width)
                place = 0 if spread > 1 else way
                entry = f"{position}, {place}, {third}, {_dtype(operand.dtype)}, {flag}"
                self.entries[array].append(f"{entry}, {operand.period}" if operand.period else entry)
            at = (len(self.entries[array]) - 1) * spread + (way if spread > 1 else 0)
            self.slots[index, way] = f"in.{member}[{at}].{'f' if operand.dtype.name in FLOATS else 'i'}"

    def stores(self, first_map: int, out_dtypes: Sequence[np.dtype]) -> None:
        """Sections whose tiles store the same values in the same dtypes share a program."""
        self.sections: list[str] = []
        self.tile_stores: list[list[str]] = []  # of each section
        self.tile_results: list[list[str]] = []  # of each program
        self.needed: list[frozenset[int]] = []  # by each program
        reduced = [value for reduction in self.program.reductions for value in reduction.values]
        for section in self.program.sections:
            chosen = self.program.stores_of(section)
            entries: list[str] = []
            results: list[str] = []
            for i in chosen:
                store, dtype = self.program.stores[i], _dtype(np.dtype(out_dtypes[i]))
                for way, value in enumerate(store.values):
                    if way < self.program.entries(store.width):
                        entries.append(
                            f"{first_map + i}, {way}, {store.slice[0] if store.slice else 0}, {dtype}, false"
                        )
                    results.append(f"out.tile[{len(results)}] = {self.name(value)};  // {dtype}")
            if results not in self.tile_results:
                self.tile_results.append(results)
                stored = [value for i in chosen for value in self.program.stores[i].values]
                self.needed.append(self.program.needed([*reduced, *stored]))
            self.sections.append(f"{self.tile_results.index(results)}, {section[0]}, {section[1]}")
            self.tile_stores.append(entries)

    def result(self, array: str, at: int, entry: str, value: str) -> None:
        self.results.append(f"out.{array.split('_')[0]}[{at}] = {value};")
        if entry:
            self.entries[array].append(entry)

    def reduction(self, pointer: int, reduction: Reduction) -> None:
        ways, op = self.program.ways_of(reduction.width), f"coda::Op::{reduction.op.value}"
        values = list(map(self.name, reduction.values))
        if reduction.axis is Axis.ROW:
            combined = _combined(reduction.op, values)
            self.result("row_reduction", len(self.entries["row_reduction"]), f"{pointer}, 0, 1, {op}", combined)
            return
        first = len(self.entries["column_reduction"]) * self.spread
        for way, value in enumerate(values):
            is_entry = way < self.program.entries(reduction.width)
            entry = f"{pointer}, {way}, {ways}, {op}" if is_entry else ""
            self.result("column_reduction", first + way, entry, value)

    def text(self) -> str:
        size = {name: max(1, len(entries)) for name, entries in self.entries.items()}
        acc_ways, ways, head = self.program.acc_ways, self.program.ways, self.program.head
        size |= {name: size[name] * self.spread for name in _OVER_COLUMNS}
        stored = max([1, *map(len, self.tile_stores)])
        tile_stores = [len(results) // self.spread for results in self.tile_results]
        lines = [
            "struct Epilogue {",
            f"  static constexpr int acc_ways = {acc_ways}, ways = {ways}, head = {head};",
            f"  static constexpr bool neighbours = {str(self.program.interleaved).lower()};",
            f"  static constexpr int sections = {len(self.sections)}, programs = {len(self.tile_results)};",
            f"  static constexpr coda::Section section[] = {_list(self.sections)};",
            f"  static constexpr int tile_stores[] = {{{', '.join(map(str, tile_stores))}}};",
            f"  static constexpr coda::TileAccess tile_store[][{stored}] = {{"
            + ", ".join(
                _list(entries + [_EMPTY["TileAccess"]] * (stored - len(entries))) for entries in self.tile_stores
            )
            + "};",
            *(f"  static constexpr int {name}s = {len(entries)};" for name, entries in self.entries.items()),
            *map(self.array, self.entries),
            *self.head_tables(),
            "  struct Element {",
            f"    float acc[{acc_ways}];",
            *(f"    coda::Word {member}[{size[array]}];" for array, member in _LOADS.values()),
            f"    float head_value[{max(1, len(self.head_values))}];",
            "    int row;",
            f"    int column[{ways}];",
            "  };",
            "  struct Result {",
            f"    float tile[{stored * self.spread}];",
            f"    float row[{size['row_reduction']}];",
            f"    float column[{size['column_reduction']}];",
            "  };",
            *self.heads_of_levels(),
            "  template <int program>",
            "  CODA_DEVICE static void evaluate(const Element& in, Result& out) {",
            *self.statements(range(len(self.program.nodes))),
            *(f"    {result}" for result in self.results),
            *(
                f"    if constexpr (program == {number}) {result}"
                for number, results in enumerate(self.tile_results)
                for result in results
            ),
            "  }",
            "};",
        ]
        return "\n".join(lines) + "\n"

    def head_tables(self) -> list[str]:
        """The values of heads: their operations, and where each program needs them the pass that makes them."""
        levels = self.program.head_levels
        ops = [f"coda::Op::{HEAD_REDUCTIONS[self.program.nodes[number].op].value}" for number in levels]
        passes = [
            ", ".join(str(level if number in needed else -1) for number, level in levels.items()) or "-1"
            for needed in self.needed
        ]
        return [
            f"  static constexpr int head_values = {len(ops)}, head_passes = {max(levels.values(), default=-1) + 1};",
            f"  static constexpr coda::Op head_op[] = {{{', '.join(ops) or 'coda::Op::sum'}}};",
            f"  static constexpr int head_pass[][{max(1, len(ops))}] = {_list(passes)};",
        ]

    def heads_of_levels(self) -> list[str]:
        """A function for each pass: what an element adds to the values of its head."""
        levels = self.program.head_levels
        lines = ["  template <int pass>", "  CODA_DEVICE static void evaluate_heads(const Element& in, float* out) {"]
        for level in sorted(set(levels.values())):
            nodes = [number for number in levels if levels[number] == level]
            lines += [f"    if constexpr (pass == {level}) {{"]
            inputs = {number: self.program.nodes[number].inputs for number in nodes}
            roots = [value for values in inputs.values() for value in values]
            lines += [f"  {line}" for line in self.statements(sorted(self.program.needed(roots)))]
            for number, values in inputs.items():
                op = HEAD_REDUCTIONS[self.program.nodes[number].op]
                lines.append(f"      out[{self.head_values[number]}] = {_combined(op, list(map(self.name, values)))};")
            lines.append("    }")
        return [*lines, "  }"]

    def statements(self, numbers: Iterable[int]) -> list[str]:
        nodes = ((number, self.program.nodes[number]) for number in numbers)
        return [
            f"    const {_type(node)} v{number} = {self.expression(number)};"
            for number, node in nodes
            if node.op != "literal"
        ]

    def array(self, name: str) -> str:
        kind = _ACCESS[name]
        return f"  static constexpr coda::{kind} {name}[] = {_list(self.entries[name] or [_EMPTY[kind]])};"

    def name(self, number: int) -> str:
        """How a value is referred to: literals stand where they are used."""
        node = self.program.nodes[number]
        return _literal(node["value"], node.dtype) if node.op == "literal" else f"v{number}"

    def expression(self, number: int) -> str:
        node = self.program.nodes[number]
        if number in self.head_values:
            return f"in.head_value[{self.head_values[number]}]"
        match node.op:
            case "acc":
                return f"in.acc[{node['way']}]"
            case "operand":
                slot = self.slots[node["index"], node["way"]]
                return f"{slot} != 0" if node.dtype == "bool" else slot
            case "row":
                return "in.row"
            case "column":
                return f"in.column[{node['way']}]"
        operation = OPERATIONS[node.op]
        inputs, dtypes = list(map(self.name, node.inputs)), [self.program.nodes[i].dtype for i in node.inputs]
        text = operation.expression(inputs, dtypes, dict(node.attributes))
        return text if operation.exact or node.dtype not in ROUND else f"{ROUND[node.dtype]}({text})"


def _combined(op: ReductionOp, values: Sequence[str]) -> str:
    """The values of the ways as one."""
    return values[0] if len(values) == 1 else _COMBINE[op].format(*values)


def _list(entries: Sequence[str]) -> str:
    return "{" + ", ".join(f"{{{entry}}}" for entry in entries) + "}"


def _type(node: Node) -> str:
    if node.op == "angle":
        return "coda::Angle"
    return "float" if node.dtype in FLOATS else "int" if node.dtype == "int32" else "bool"


def _dtype(dtype: np.dtype) -> str:
    return f"coda::DType::{_DTYPES[dtype.name]}"


def _literal(value: float | int | bool, dtype: str) -> str:
    """An exact C++ literal: the shortest decimal that reads back as the same float32."""
    if dtype == "bool":
        return str(bool(value)).lower()
    if dtype == "int32":
        return str(value) if value >= 0 else f"({value})" if value > -(2**31) else "(-2147483647 - 1)"
    single = np.float32(value)
    if np.isnan(single):
        return "coda::nan()"
    if np.isinf(single):
        return "coda::infinity()" if single > 0 else "(-coda::infinity())"
    text = str(single)
    text = f"{text}f" if "." in text or "e" in text else f"{text}.0f"
    return f"({text})" if text.startswith("-") else text
