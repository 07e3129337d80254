"""Programs as graphs of operations: StableHLO as JAX lowers it, and the HLO that XLA made of it for a device."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

ATTENTION, ATTENTION_BACKWARD, PRODUCT = "attention", "attention_backward", "product"
OURS = ("coda_gemm", "coda_launch")  # targets of custom calls: products, and attention's kernels
INPUT = "input"  # what makes a computation's arguments
CONTROL = ("while", "conditional", "case", "if", "call")


@dataclasses.dataclass(frozen=True)
class Array:
    """Type of an array: dtype as the text names it ("bf16"), and shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        bits = re.search(r"\d+", self.dtype)
        return math.prod(self.shape) * max(1, int(bits[0]) // 8 if bits else 1)


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation of a computation.

    Attributes:
      name: unique in its program.
      operation: "multiply", "fusion", ...
      results: types of the results.
      operands: (name of the operation it comes from, its type).
      kernel: what it is if it is a kernel in its own right: the epilogue's name for coda_jax's products, "product" for
        others, "attention" and "attention_backward"; else empty.
      scope: JAX's name stack, "jit(step)/transpose(jvp())/mul".
    """

    name: str
    operation: str
    results: tuple[Array, ...]
    operands: tuple[tuple[str, Array], ...]
    kernel: str = ""
    scope: str = ""


Computation = Sequence[Operation]  # in order; the last one is "return" or the root


def kernel_of(operation: str, target: str, attributes: str) -> str:
    """`Operation.kernel` of an operation, the target of its custom call, and the rest of its text."""
    if target in OURS:
        found = re.search(r'\bname = \\*"([^"\\]+)', attributes)
        name = found[1] if found else target
        if target == "coda_gemm":
            return name
        return ATTENTION_BACKWARD if "ackward" in name else ATTENTION
    if re.search(r"attention|fmha|sdpa", target, re.IGNORECASE):
        return ATTENTION_BACKWARD if "ackward" in target else ATTENTION
    triton = operation == "fusion" and re.search(r"__triton_gemm|__triton_nested_gemm|__cutlass", attributes)
    products = ("dot_general", "dot", "convolution")
    return PRODUCT if triton or operation in products or re.search("cublas|gemm|matmul", target) else ""


def with_first_names(operations: Iterable[Operation]) -> list[Operation]:
    """The operations, of which kernels that differ by the number in their names alone are named as the first of them.

    Equal layers of one function have such kernels, as loss_2 and loss_6: their arrays have the same types.
    """
    ours = [(re.fullmatch(r"(.*_)(\d+)", one.kernel), one) for one in operations]
    firsts: dict[Any, int] = {}
    keys = [(found[1], tuple(x for _, x in one.operands), one.results) if found else None for found, one in ours]
    for key, (found, _) in zip(keys, ours, strict=True):
        if found:
            firsts[key] = min(firsts.get(key, int(found[2])), int(found[2]))
    return [
        dataclasses.replace(one, kernel=f"{found[1]}{firsts[key]}") if found else one
        for key, (found, one) in zip(keys, ours, strict=True)
    ]


def count_ours(text: str) -> int:
    """How many custom calls of the library an HLO program's text has."""
    return sum(text.count(f'custom_call_target="{target}"') for target in OURS)


# --- StableHLO


def stablehlo_computations(module: Any) -> list[Computation]:
    """The computations of `lowered.compiler_ir("stablehlo")`; private functions are inlined into their callers.

    Bodies of loops are computations of their own, whose arguments come from "input".
    """
    functions = {function.attributes["sym_name"].value: function for function in module.body.operations}
    walk = _Walk(functions)
    walk.computation(functions["main"].regions[0].blocks[0])
    return walk.computations


class _Walk:
    def __init__(self, functions: dict[str, Any]):
        self.functions, self.computations, self.count = functions, [], 0

    def computation(self, block: Any) -> None:
        found: list[Operation] = []
        returned = self._block(block, dict.fromkeys(block.arguments, INPUT), found)
        self.computations.append([*found, Operation("return", "return", (), returned)])

    def _block(self, block: Any, makers: dict[Any, str], found: list[Operation]) -> tuple[tuple[str, Array], ...]:
        """Appends the block's operations; gives what makes the values that it returns, and their types."""
        for op in block.operations:
            kind = op.operation.name.split(".")[-1]
            operands = tuple((makers.get(value, INPUT), _array(value.type)) for value in op.operands)
            if kind == "return":
                return operands
            if kind == "optimization_barrier":
                makers.update(zip(op.results, (name for name, _ in operands), strict=True))
                continue
            if kind == "call" and (callee := op.attributes["callee"].value) in self.functions:
                body = self.functions[callee].regions[0].blocks[0]
                inner = dict(zip(body.arguments, (name for name, _ in operands), strict=True))
                returned = self._block(body, inner, found)
                makers.update(zip(op.results, (name for name, _ in returned), strict=True))
                continue
            if kind in CONTROL:
                for region in op.regions:
                    self.computation(region.blocks[0])
            self.count += 1
            name = f"{kind}.{self.count}"
            target = op.attributes["call_target_name"].value if kind == "custom_call" else ""
            attributes = str(op.attributes["mhlo.backend_config"]) if target in OURS else ""
            scope = re.match(r'loc\("([^"]*)"', str(op.location))
            results = tuple(_array(value.type) for value in op.results)
            kernel = kernel_of(kind, target, attributes)
            found.append(Operation(name, kind, results, operands, kernel, scope[1] if scope else ""))
            makers.update(dict.fromkeys(op.results, name))
        return ()


def _array(type_: Any) -> Array:
    found = re.fullmatch(r"tensor<((?:\d+x)*)(\w+)>", str(type_))
    if found is None:  # a token, a tuple
        return Array("token", (0,))
    return Array(found[2], tuple(int(size) for size in found[1].split("x") if size))


# --- optimised HLO


def hlo_computations(text: str, *, inside_fusions: bool = False) -> list[Computation]:
    """The computations of `compiled.as_text()` whose operations are executed one by one; not the inside of fusions.

    With `inside_fusions` these too: XLA puts a custom call and the slice that it reads or writes into one.
    """
    bodies: dict[str, list[str]] = {}
    entry, current = "", None
    for line in text.splitlines():
        header = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$", line)
        if header:
            current = bodies.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None:
            current.append(line)
    found, waiting, seen = [], [entry], {entry}
    while waiting:
        lines = bodies[waiting.pop()]
        found.append(_hlo_computation(lines))
        for line in lines:
            # Loops and branches, and what is started to run asynchronously; fusions and reductions have kernels.
            if inside_fusions or not re.search(
                r"[\s)]fusion\(|[\s)](all-)?reduce\w*(-start)?\(|[\s)](sort|scatter|reduce-window)\(", line
            ):
                for callee in re.findall(r"(?:body|calls|to_apply|\w+_computation)=%?([\w.\-]+)", line):
                    if callee in bodies and callee not in seen:
                        seen.add(callee)
                        waiting.append(callee)
    return found


_INSTRUCTION = re.compile(r"\s*(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")


def _hlo_computation(lines: Iterable[str]) -> Computation:
    types: dict[str, tuple[Array, ...]] = {}
    found: list[Operation] = []
    root: Operation | None = None
    for line in lines:
        match = _INSTRUCTION.match(line)
        if match is None:
            continue
        is_root, name, type_, operation, rest = match.groups()
        arguments, attributes = _closed(rest)
        results = tuple(
            Array(dtype, tuple(int(size) for size in shape.split(",") if size))
            for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", type_)
        )
        names = re.findall(r"%([\w.\-]+)", arguments) or [x for x in re.findall(r"[\w.\-]+", arguments) if x in types]
        operands = tuple((one, array) for one in names for array in types.get(one, ()))
        if operation == "get-tuple-element":
            operands = ((names[0], results[0]),)
        target = re.search(r'custom_call_target="([^"]+)"', attributes)
        scope = re.search(r'op_name="([^"]+)"', attributes)
        kernel = kernel_of(operation, target[1] if target else "", attributes)
        types[name] = results
        found.append(Operation(name, operation, results, operands, kernel, scope[1] if scope else ""))
        if is_root:
            root = found[-1]
    if root is not None:
        found.append(Operation("return", "return", (), tuple((root.name, array) for array in root.results)))
    return found


def _closed(text: str) -> tuple[str, str]:
    """The text before the closing bracket, and the text after it."""
    depth = 1
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return text[:i], text[i + 1 :]
    return text, ""
