"""From an analysed epilogue to its Program: stores, reductions, the finishing equations, in canonical numbering."""

from dataclasses import replace
from typing import Any

import numpy as np

from coda_jax.epilogue import elementwise
from coda_jax.epilogue.flatten import Atom, Equation, Literal
from coda_jax.epilogue.locality import Analysis
from coda_jax.epilogue.program import Finish, Node, Program, TileStore, Width
from coda_jax.epilogue.values import (
    ALLOWED,
    COLUMN,
    HALF,
    ROW,
    Finished,
    NotTileLocalError,
    Stacked,
    same_shape,
    same_size,
)


def assemble(analysis: Analysis) -> Program:
    stores: list[TileStore] = []
    finished: list[tuple[int, Atom]] = []
    for output, atom in enumerate(analysis.flat.outputs):
        store = _store(analysis, output, atom)
        if store is None:
            finished.append((output, atom))
        else:
            stores.append(store)
    return _compact(analysis, stores, _finishing(analysis, finished), len(analysis.flat.outputs))


def _store(analysis: Analysis, output: int, atom: Atom) -> TileStore | None:
    """The tile store for an output, or None if it is computed after the kernel."""
    value, aval = analysis.value(atom), analysis.flat.aval(atom)
    if isinstance(value, Finished):
        return None
    if isinstance(value, Stacked):
        raise NotTileLocalError(
            f"epilogue '{analysis.name}': output {output} is a stack of arrays; return them one by one. {ALLOWED}"
        )
    whole = same_shape(aval.shape, (analysis.m, analysis.n))
    half = analysis.ways == 2 and same_shape(aval.shape, (analysis.m, analysis.half))
    unit = same_size(analysis.m, 1) or same_size(aval.shape[-1] if aval.shape else 1, 1)
    if not value.tile and (not (whole or half) or unit):
        return None
    rows_ok = (
        len(value.tags) == 2
        and value.tags[0] in (ROW, None)
        and value.tags[1] in ((COLUMN, None) if whole else (HALF, None))
    )
    if not (whole or half) or not rows_ok:
        made_by = analysis.producers[atom].where() if atom in analysis.producers else "an input"
        raise NotTileLocalError(
            f"epilogue '{analysis.name}': output {output} has shape {aval.shape}, made by {made_by}; a tile output "
            f"has shape (M, N) = ({analysis.m}, {analysis.n}) or (M, N/2), a reduction (M,) or (N,). Reshape it "
            f"outside the epilogue. {ALLOWED}"
        )
    if np.dtype(aval.dtype).name not in elementwise.FLOATS:
        raise NotTileLocalError(
            f"epilogue '{analysis.name}': output {output} is a tile of dtype {aval.dtype}; tile outputs are "
            "bfloat16, float16 or float32. Convert it to a float inside the epilogue, or compute it outside."
        )
    nodes = value.nodes * analysis.ways if whole and len(value.nodes) < analysis.ways else value.nodes
    return TileStore(output, Width.FULL if whole else Width.HALF, nodes)


def _finishing(analysis: Analysis, outputs: list[tuple[int, Atom]]) -> Finish:
    """The equations that `outputs` need, in order, with canonical variable numbers and text."""
    numbers: dict[int, int] = {}
    inputs: list[tuple[int, str, int]] = []
    equations: list[Equation] = []
    lines: list[str] = []

    def visit(atom: Atom) -> Atom:
        if isinstance(atom, Literal) or atom in numbers:
            return atom if isinstance(atom, Literal) else numbers[atom]
        if atom in analysis.sources:
            numbers[atom] = len(numbers)
            source, index = analysis.sources[atom]
            inputs.append((numbers[atom], source, index))
            lines.append(f"f{numbers[atom]} = {source} {index}")
            return numbers[atom]
        equation = analysis.producers[atom]
        read = tuple(map(visit, equation.inputs))
        for variable in equation.outputs:
            numbers[variable] = len(numbers)
        written = tuple(numbers[v] for v in equation.outputs)
        equations.append(replace(equation, inputs=read, outputs=written, source_info=None))
        avals = " ".join(f"f{numbers[v]}:{_aval_text(analysis.flat.avals[v])}" for v in equation.outputs)
        lines.append(f"{avals} = {equation.name}({', '.join(map(_atom_text, read))}) {_params_text(equation.params)}")
        return numbers[atom]

    results = tuple((output, visit(atom)) for output, atom in outputs)
    lines += [f"output {output} = {_atom_text(atom)}" for output, atom in results]
    return Finish(tuple(inputs), tuple(equations), results, "\n".join(lines))


def _compact(analysis: Analysis, stores: list[TileStore], finish: Finish, num_outputs: int) -> Program:
    """Drops reductions and nodes that no output needs, and numbers the rest in order of use."""
    used = sorted({index for _, source, index in finish.inputs if source == "reduction"})
    position = {index: i for i, index in enumerate(used)}
    finish = replace(
        finish,
        inputs=tuple((v, s, position[i] if s == "reduction" else i) for v, s, i in finish.inputs),
        text="\n".join(
            line
            if " = reduction " not in line
            else f"{line.split(' = ')[0]} = reduction {position[int(line.split()[-1])]}"
            for line in finish.text.split("\n")
        ),
    )
    nodes: list[Node] = []
    numbers: dict[int, int] = {}

    def visit(old: int) -> int:
        if old not in numbers:
            inputs = tuple(map(visit, analysis.nodes[old].inputs))
            numbers[old] = len(nodes)
            nodes.append(replace(analysis.nodes[old], inputs=inputs))
        return numbers[old]

    new_stores = tuple(replace(store, values=tuple(map(visit, store.values))) for store in stores)
    new_reductions = tuple(
        replace(analysis.reductions[i], values=tuple(map(visit, analysis.reductions[i].values))) for i in used
    )
    return Program(analysis.operands, analysis.ways, tuple(nodes), new_stores, new_reductions, num_outputs, finish)


def _aval_text(aval: Any) -> str:
    return f"{aval.dtype}[{','.join(map(_dimension_text, aval.shape))}]"


def _dimension_text(dimension: Any) -> str:
    """A symbolic dimension is itself only inside its own scope."""
    return str(dimension) if isinstance(dimension, int) else f"{dimension}@{id(dimension.scope):x}"


def _atom_text(atom: Atom) -> str:
    return f"{atom.dtype} {np.asarray(atom.value).tobytes().hex()}" if isinstance(atom, Literal) else f"f{atom}"


def _params_text(params: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in sorted(params.items()))
