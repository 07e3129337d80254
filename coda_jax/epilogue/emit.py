"""CUDA text of a program: `struct Epilogue`, straight-line code for one element of the accumulator fragment."""

from collections.abc import Sequence

import numpy as np

from coda_jax.epilogue.elementwise import FLOATS, OPERATIONS, ROUND
from coda_jax.epilogue.program import Axis, Kind, Node, Program, Reduction, ReductionOp

_DTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "int32": "i32", "bool": "pred"}
# Entries of the struct: array name (its count has an s) and type, with what stands in an array without entries.
_ACCESS = {
    "tile_load": "TileAccess",
    "tile_store": "TileAccess",
    "row_vector": "VectorAccess",
    "column_vector": "VectorAccess",
    "scalar": "VectorAccess",
    "row_reduction": "ReductionAccess",
    "column_reduction": "ReductionAccess",
}
_EMPTY = {
    "TileAccess": "-1, 0, coda::DType::f32, false",
    "VectorAccess": "-1, 0, 1, coda::DType::f32, false",
    "ReductionAccess": "-1, 0, 1, coda::Op::sum",
}
_LOADS = {
    Kind.TILE: ("tile_load", "tile"),
    Kind.ROW_VECTOR: ("row_vector", "row_vector"),
    Kind.COLUMN_VECTOR: ("column_vector", "column_vector"),
    Kind.SCALAR: ("scalar", "scalar"),
}
_COMBINE = {
    ReductionOp.SUM: "{} + {}",
    ReductionOp.MAX: "coda::maximum({}, {})",
    ReductionOp.MIN: "coda::minimum({}, {})",
    ReductionOp.LOGSUMEXP: "coda::log_add_exp({}, {})",
}


def emit(program: Program, out_dtypes: Sequence[np.dtype], batched_operands: Sequence[bool]) -> str:
    """The CUDA definition of `struct Epilogue` for a program; see cuda/epilogue_sm90.cuh for how the kernel uses it.

    Tensor maps are numbered a, b, `program.tile_operands`, stores; pointers are numbered non-tile operands in order,
    then reductions. A vector that the program does not read has a number but no entry.

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
        self.slots: dict[tuple[int, int], str] = {}
        self.results: list[str] = []
        tiles = program.tile_operands
        others = [i for i, operand in enumerate(program.operands) if operand.kind is not Kind.TILE]
        for index, batched in zip(range(len(program.operands)), batched_operands, strict=True):
            if index in tiles:
                self.load(index, 2 + tiles.index(index), batched)
            elif index in others:
                self.load(index, others.index(index), batched)
        for number, (store, dtype) in enumerate(zip(program.stores, out_dtypes, strict=True)):
            for way, value in enumerate(store.values):
                entry = f"{2 + len(tiles) + number}, {way}, {_dtype(np.dtype(dtype))}, false"
                self.result("tile_store", entry, self.name(value))
        for number, reduction in enumerate(program.reductions):
            self.reduction(len(others) + number, reduction)

    def load(self, index: int, position: int, batched: bool) -> None:
        operand = self.program.operands[index]
        (array, member), flag = _LOADS[operand.kind], str(bool(batched)).lower()
        for way in self.program.loads(index):
            self.slots[index, way] = (
                f"in.{member}[{len(self.entries[array])}].{'f' if operand.dtype.name in FLOATS else 'i'}"
            )
            ways = "" if operand.kind is Kind.TILE else f"{self.program.ways_of(operand.width)}, "
            self.entries[array].append(f"{position}, {way}, {ways}{_dtype(operand.dtype)}, {flag}")

    def result(self, array: str, entry: str, value: str) -> None:
        self.results.append(f"out.{array.split('_')[0]}[{len(self.entries[array])}] = {value};")
        self.entries[array].append(entry)

    def reduction(self, pointer: int, reduction: Reduction) -> None:
        ways, op = self.program.ways_of(reduction.width), f"coda::Op::{reduction.op.value}"
        values = list(map(self.name, reduction.values))
        if reduction.axis is Axis.ROW:
            combined = values[0] if len(values) == 1 else _COMBINE[reduction.op].format(*values)
            self.result("row_reduction", f"{pointer}, 0, 1, {op}", combined)
            return
        for way, value in enumerate(values):
            self.result("column_reduction", f"{pointer}, {way}, {ways}, {op}", value)

    def text(self) -> str:
        size = {name: max(1, len(entries)) for name, entries in self.entries.items()}
        acc_ways, ways = self.program.acc_ways, self.program.ways
        lines = [
            "struct Epilogue {",
            f"  static constexpr int acc_ways = {acc_ways}, ways = {ways};",
            *(f"  static constexpr int {name}s = {len(entries)};" for name, entries in self.entries.items()),
            *map(self.array, self.entries),
            "  struct Element {",
            f"    float acc[{acc_ways}];",
            *(f"    coda::Word {member}[{size[array]}];" for array, member in _LOADS.values()),
            "    int row;",
            f"    int column[{ways}];",
            "  };",
            "  struct Result {",
            f"    float tile[{size['tile_store']}];",
            f"    float row[{size['row_reduction']}];",
            f"    float column[{size['column_reduction']}];",
            "  };",
            "  CODA_DEVICE static void evaluate(const Element& in, Result& out) {",
            *(
                f"    const {_type(node)} v{i} = {self.expression(node)};"
                for i, node in enumerate(self.program.nodes)
                if node.op != "literal"
            ),
            *(f"    {result}" for result in self.results),
            "  }",
            "};",
        ]
        return "\n".join(lines) + "\n"

    def array(self, name: str) -> str:
        kind = _ACCESS[name]
        entries = ", ".join(f"{{{entry}}}" for entry in self.entries[name] or [_EMPTY[kind]])
        return f"  static constexpr coda::{kind} {name}[] = {{{entries}}};"

    def name(self, number: int) -> str:
        """How a value is referred to: literals stand where they are used."""
        node = self.program.nodes[number]
        return _literal(node["value"], node.dtype) if node.op == "literal" else f"v{number}"

    def expression(self, node: Node) -> str:
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


def _type(node: Node) -> str:
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
