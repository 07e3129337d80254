"""CUDA text of a program: `struct Epilogue`, straight-line code for one element of the accumulator fragment.

The form that is compiled names an operand by its place, `column_vector_0`: equal mathematics is equal text, and so one
kernel, whatever functions it came from. The form for a reader names it as the user's function does, `rstd`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from coda_jax.epilogue.dtypes import BOOL, INT32, TABLE
from coda_jax.epilogue.elementwise import OPERATIONS, rounded
from coda_jax.epilogue.operand_kinds import KINDS
from coda_jax.epilogue.program import HEAD_REDUCTIONS, Axis, Node, Program, Reduction, ReductionOp, TileStore
from coda_jax.epilogue.struct_text import declared, entry
from coda_jax.epilogue.user_names import is_usable

# The lists of the struct, and the type of their entries; see cuda/epilogue_abi.cuh.
_LISTS = {
    **{kind.list_name: "TileAccess" if kind.by_tensor_map else "VectorAccess" for kind in KINDS if kind.list_name},
    "row_reduction": "ReductionAccess",
    "column_reduction": "ReductionAccess",
    "whole_reduction": "ReductionAccess",
    "transposed_store": "TransposedAccess",
}
_COMBINE = {
    ReductionOp.SUM: "{} + {}",
    ReductionOp.MAX: "coda::maximum({}, {})",
    ReductionOp.MIN: "coda::minimum({}, {})",
    ReductionOp.LOGSUMEXP: "coda::log_add_exp({}, {})",
}


def emit(
    program: Program,
    out_dtypes: Sequence[np.dtype],
    batched_operands: Sequence[bool],
    *,
    rows_in_groups: bool = False,
    for_reader: bool = False,
) -> str:
    """The CUDA definition of `struct Epilogue` for a program; cuda/epilogue_abi.cuh tells how the kernel uses it.

    One entry of a list over columns stands for both interleaved halves, and its two values are adjacent. Tensor maps
    are numbered a, b, `program.tile_operands`, stores, and of symmetric results the stores again, transposed. Pointers
    are numbered non-tile operands in order, then stores if rows are in groups, then reductions. A vector that the
    program does not read has a number but no entry.

    Args:
      program: the checked epilogue.
      out_dtypes: of results in the table of dtypes, one for each of `program.stores`.
      batched_operands: for each operand, whether it has a batch axis.
      rows_in_groups: whether groups divide the product's rows.
      for_reader: whether to write the names and the line of the user's function, if `program.user_names` has them.
    """
    return _Emitter(program, out_dtypes, batched_operands, rows_in_groups, for_reader).text()


_ROUNDING = ("convert_element_type", "saturate")  # operations whose result has another dtype


class _Stored(NamedTuple):
    """A value that is stored: its expression, and the dtype that it is rounded to."""

    value: str
    dtype: np.dtype
    contraction_order: bool = False
    saturates: bool = False

    @property
    def conversion(self) -> tuple[str, np.dtype, bool]:
        """The value and how it is rounded: two results that agree in this share one conversion."""
        return self.value, self.dtype, self.saturates

    @property
    def fields(self) -> dict[str, object]:
        return {"contraction_order": self.contraction_order, "saturates": self.saturates}


class _Emitter:
    def __init__(
        self,
        program: Program,
        out_dtypes: Sequence[np.dtype],
        batched_operands: Sequence[bool],
        rows_in_groups: bool,
        for_reader: bool,
    ):
        self.program = program
        self.user_names = program.user_names if for_reader else None
        self.lists: dict[str, list[str]] = {name: [] for name in _LISTS}
        self.entry_values = 2 if program.halves.interleaved else 1  # values of one entry of a list over columns
        self.places: dict[tuple[int, int], tuple[str, int]] = {}  # operand, half -> member of Element, and index
        self.results: list[str] = []
        self.head_values = {number: position for position, number in enumerate(program.head_levels)}
        tiles = program.tile_operands
        others = [i for i, operand in enumerate(program.operands) if not operand.kind.by_tensor_map]
        for index, batched in zip(range(len(program.operands)), batched_operands, strict=True):
            if index in tiles:
                self.load(index, 2 + tiles.index(index), batched)
            elif index in others:
                self.load(index, others.index(index), batched)
        self.names = self.value_names()
        self.stores(2 + len(tiles), len(others) if rows_in_groups else None, out_dtypes)
        first_reduction = len(others) + (len(program.stores) if rows_in_groups else 0)
        for number, reduction in enumerate(program.reductions):
            self.reduction(first_reduction + number, reduction)

    def load(self, index: int, position: int, batched: bool) -> None:
        operand = self.program.operands[index]
        kind, entries = operand.kind, self.lists.get(operand.kind.list_name, [])
        per_entry = self.entry_values if kind.has_columns else 1
        halves = self.program.halves.of(operand.width) if kind.has_columns and not kind.by_tensor_map else 1
        for half in self.program.loads(index):
            if half in self.program.loaded_runs(index):
                fields = {
                    "map" if kind.by_tensor_map else "pointer": position,
                    "half": 0 if per_entry > 1 else half,
                    "halves": halves,
                    "dtype": _dtype(operand.dtype),
                    "batched": bool(batched) or kind.by_group,
                    "period": operand.period,
                }
                entries.append(entry(fields))
            at = (len(entries) - 1) * per_entry + (half if per_entry > 1 else 0)
            self.places[index, half] = kind.member, at

    def value_names(self) -> dict[int, str]:
        """Names of all nodes but literals; in the form for a reader, operands have the user's names."""
        names: dict[int, str] = {}
        nodes = sorted(enumerate(self.program.nodes), key=lambda node: node[1].op == "operand")
        for number, node in nodes:
            name = self.leaf_name(number, node)
            names[number] = name if name and name not in names.values() else f"v{number}"
        return names

    def leaf_name(self, number: int, node: Node) -> str:
        """The name of an element's member; empty for other nodes."""
        if number in self.head_values:
            return f"head_value_{self.head_values[number]}"
        match node.op:
            case "acc" | "column":
                halves = self.program.halves.acc_halves if node.op == "acc" else self.program.halves.count
                return f"{node.op}_{node['half']}" if halves > 1 else node.op
            case "row":
                return "row"
            case "operand":
                index, half = node["index"], node["half"]
                if self.user_names and is_usable(name := self.user_names.operand(index)):
                    return f"{name}_{half}" if len(self.program.loads(index)) > 1 else name
                member, at = self.places[index, half]
                return f"{member}_{at}"
        return ""

    def stores(self, first_map: int, first_pointer: int | None, out_dtypes: Sequence[np.dtype]) -> None:
        """Sections whose tiles store the same values in the same dtypes share a variant.

        Args:
          first_pointer: of the stores; None if they have none.
        """
        self.sections: list[str] = []
        self.tile_stores: list[list[str]] = []  # for each section
        self.tile_results: list[list[str]] = []  # for each variant
        self.needed: list[frozenset[int]] = []  # for each variant, the nodes that it needs
        variants: list[list[_Stored]] = []
        reduced = [value for reduction in self.program.reductions for value in reduction.values]
        for first, end in self.program.sections:
            chosen = self.program.stores_of((first, end))
            entries: list[str] = []
            results: list[_Stored] = []
            for i in chosen:
                store, dtype = self.program.stores[i], np.dtype(out_dtypes[i])
                if store.transposed:
                    continue
                first_column, end_column = store.slice or (0, 0)
                for half, value in enumerate(store.values):
                    stored = self.stored(store, value, dtype)
                    if half < self.program.halves.runs(store.width):
                        fields = {"map": first_map + i, "half": half, "first": first_column, "dtype": _dtype(dtype)}
                        if first_pointer is not None:
                            halves = self.program.halves.tensor_map_halves(store.width)
                            fields |= {
                                "pointer": first_pointer + i,
                                "halves": halves,
                                "columns": end_column - first_column,
                            }
                        entries.append(entry(fields | stored.fields))
                    results.append(stored)
            for i in chosen:
                if self.program.symmetric or self.program.stores[i].transposed:
                    map_ = first_map + i + len(self.program.stores) * self.program.symmetric
                    self.transposed_store(self.program.stores[i], map_, np.dtype(out_dtypes[i]), results)
            if results not in variants:
                variants.append(results)
                self.tile_results.append([f"out.tile[{i}] = {one.value};" for i, one in enumerate(results)])
                values = [(value, i) for i in chosen for value in self.program.stores[i].values]
                nodes = [self.stored_node(value, np.dtype(out_dtypes[i])) for value, i in values]
                self.needed.append(self.program.needed([*reduced, *nodes]))
            self.sections.append(entry({"variant": variants.index(results), "first": first, "end": end}))
            self.tile_stores.append(entries)

    @property
    def evaluated(self) -> frozenset[int]:
        """The nodes that some variant needs."""
        return frozenset[int]().union(*self.needed)

    def transposed_store(self, store: TileStore, map_: int, dtype: np.dtype, results: list[_Stored]) -> None:
        """Entries for a transposed store. A program that has one has one section.

        Args:
          results: values of the tiles that are stored untransposed; values that are not among them are appended.
        """
        for half, value in enumerate(store.values):
            stored = self.stored(store, value, dtype)
            # A value may also be stored in another order: its conversion is the same.
            same = [i for i, one in enumerate(results) if one.conversion == stored.conversion]
            if not same:
                results.append(stored)
            at = same[0] if same else len(results) - 1
            fields = {"map": map_, "half": half, "value": at, "dtype": _dtype(dtype), **stored.fields}
            self.lists["transposed_store"].append(entry(fields))

    def stored(self, store: TileStore, number: int, dtype: np.dtype) -> _Stored:
        """How a node is stored."""
        saturates = self.program.nodes[number].op == "saturate"
        number = self.stored_node(number, dtype)
        return _Stored(self.name(number), dtype, store.contraction_order, saturates)

    def stored_node(self, number: int, dtype: np.dtype) -> int:
        """The node to store as `dtype` for this node: its input, if it only rounds to `dtype`, as the store does."""
        node = self.program.nodes[number]
        is_rounded = TABLE[dtype.name].bytes == 1 and node.dtype == dtype.name and node.op in _ROUNDING
        return node.inputs[0] if is_rounded else number

    def result(self, name: str, at: int, list_entry: str, value: str) -> None:
        self.results.append(f"out.{name.split('_')[0]}[{at}] = {value};")
        if list_entry:
            self.lists[name].append(list_entry)

    def reduction(self, pointer: int, reduction: Reduction) -> None:
        op = f"Op::{reduction.op.value}"
        values = list(map(self.name, reduction.values))
        if reduction.axis is not Axis.COLUMN:
            name = "row_reduction" if reduction.axis is Axis.ROW else "whole_reduction"
            self.result(
                name, len(self.lists[name]), entry({"pointer": pointer, "op": op}), _combined(reduction.op, values)
            )
            return
        first = len(self.lists["column_reduction"]) * self.entry_values
        halves = self.program.halves.of(reduction.width)
        for half, value in enumerate(values):
            is_entry = half < self.program.halves.runs(reduction.width)
            fields = {"pointer": pointer, "half": half, "halves": halves, "op": op}
            self.result("column_reduction", first + half, entry(fields) if is_entry else "", value)

    def text(self) -> str:
        origin = f"  // {self.user_names.origin}" if self.user_names else ""
        lines = [f"struct Epilogue : coda::EpilogueDefaults {{{origin}", *self.geometry()]
        if len(self.sections) > 1 or any(self.program.sections[0]):
            lines += declared("Section section[]", [self.sections])
        if stored := max(map(len, self.tile_stores)):
            lines += declared(f"TileAccess tile_store[][{stored}]", self.tile_stores)
        for name, entries in self.lists.items():
            if entries:
                lines += declared(f"{_LISTS[name]} {name}[]", [entries])
        lines += [
            *self.heads(),
            "",
            "  template <int variant>",
            "  CODA_DEVICE static void evaluate(const auto& in, auto& out) {",
            *self.statements(sorted(self.evaluated)),
            *(f"    {result}" for result in self.results),
            *self.tile_results_of_variants(),
            "  }",
            "};",
        ]
        return "\n".join(lines) + "\n"

    def geometry(self) -> list[str]:
        """Declares how the program divides its columns, where that differs from the defaults."""
        program = self.program
        counts = {"halves": program.halves.count, "acc_halves": program.halves.acc_halves}
        sizes = [f"{name} = {halves}" for name, halves in counts.items() if halves > 1]
        sizes += [f"head = {program.halves.head}"] if program.halves.head else []
        lines = [f"  static constexpr int {', '.join(sizes)};"] if sizes else []
        flags = {"interleaved": program.halves.interleaved, "symmetric": program.symmetric}
        return lines + [f"  static constexpr bool {name} = true;" for name, flag in flags.items() if flag]

    def heads(self) -> list[str]:
        """The values of heads: their operations, and for each variant the passes that compute those it needs."""
        levels = self.program.head_levels
        if not levels:
            return []
        ops = [f"Op::{HEAD_REDUCTIONS[self.program.nodes[number].op].value}" for number in levels]
        passes = [
            ", ".join(str(level if number in needed else -1) for number, level in levels.items())
            for needed in self.needed
        ]
        return [
            f"  static constexpr int head_values = {len(ops)}, head_passes = {max(levels.values()) + 1};",
            f"  static constexpr Op head_op[] = {{{', '.join(ops)}}};",
            f"  static constexpr int head_pass[][{len(ops)}] = {{{', '.join(f'{{{row}}}' for row in passes)}}};",
            *self.evaluate_heads(),
        ]

    def evaluate_heads(self) -> list[str]:
        """The function of each pass, which computes an element's terms of the values of its head."""
        levels = self.program.head_levels
        lines = [
            "",
            "  template <int pass>",
            "  CODA_DEVICE static void evaluate_heads(const auto& in, float* value) {",
        ]
        for level in sorted(set(levels.values())):
            nodes = [number for number in levels if levels[number] == level]
            lines += [f"    if constexpr (pass == {level}) {{"]
            inputs = {number: self.program.nodes[number].inputs for number in nodes}
            roots = [value for values in inputs.values() for value in values]
            lines += [f"  {line}" for line in self.statements(sorted(self.program.needed(roots)))]
            for number, values in inputs.items():
                op = HEAD_REDUCTIONS[self.program.nodes[number].op]
                lines.append(
                    f"      value[{self.head_values[number]}] = {_combined(op, list(map(self.name, values)))};"
                )
            lines.append("    }")
        return [*lines, "  }"]

    def tile_results_of_variants(self) -> list[str]:
        if len(self.tile_results) == 1:
            return [f"    {result}" for result in self.tile_results[0]]
        lines = []
        for number, results in enumerate(self.tile_results):
            if results:
                lines += [f"    if constexpr (variant == {number}) {{", *(f"      {x}" for x in results), "    }"]
        return lines

    def statements(self, numbers: Iterable[int]) -> list[str]:
        nodes = ((number, self.program.nodes[number]) for number in numbers)
        return [
            f"    const {register_of(node)} {self.names[number]} = {self.expression(number)};"
            for number, node in nodes
            if node.op != "literal"
        ]

    def name(self, number: int) -> str:
        """A node's name in expressions; a literal is written out."""
        node = self.program.nodes[number]
        return literal_text(node["value"], node.dtype) if node.op == "literal" else self.names[number]

    def expression(self, number: int) -> str:
        node = self.program.nodes[number]
        if number in self.head_values:
            return f"in.head_value[{self.head_values[number]}]"
        match node.op:
            case "acc" | "column":
                return f"in.{node.op}[{node['half']}]"
            case "operand":
                (member, at), is_float = self.places[node["index"], node["half"]], TABLE[node.dtype].is_float
                word = f"in.{member}[{at}].{'f' if is_float else 'i'}"
                return f"{word} != 0" if node.dtype == BOOL else word
            case "row":
                return "in.row"
        dtypes = [self.program.nodes[i].dtype for i in node.inputs]
        return operation_text(node, list(map(self.name, node.inputs)), dtypes)


def operation_text(node: Node, inputs: list[str], dtypes: list[str]) -> str:
    """The expression of an elementwise operation, of texts of its inputs, which have these dtypes."""
    operation = OPERATIONS[node.op]
    text = operation.expression(inputs, dtypes, dict(node.attributes))
    return text if operation.exact else rounded(text, node.dtype)


def _combined(op: ReductionOp, values: Sequence[str]) -> str:
    """The values of the halves, combined into one."""
    return values[0] if len(values) == 1 else _COMBINE[op].format(*values)


def register_of(node: Node) -> str:
    """The C++ type of a node's value."""
    if node.op == "angle":
        return "coda::Angle"
    return TABLE[node.dtype].register


def _dtype(dtype: np.dtype) -> str:
    return f"DType::{TABLE[dtype.name].cuda}"


def literal_text(value: float | int | bool, dtype: str) -> str:
    """An exact C++ literal: the shortest decimal that reads back as the same float32."""
    if dtype == BOOL:
        return str(bool(value)).lower()
    if dtype == INT32:
        return str(value) if value >= 0 else f"({value})" if value > -(2**31) else "(-2147483647 - 1)"
    single = np.float32(value)
    if np.isnan(single):
        return "coda::nan()"
    if np.isinf(single):
        return "coda::infinity()" if single > 0 else "(-coda::infinity())"
    text = str(single)
    text = f"{text}f" if "." in text or "e" in text else f"{text}.0f"
    return f"({text})" if text.startswith("-") else text
