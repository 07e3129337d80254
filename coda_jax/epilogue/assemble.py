"""Makes the Program of an analysed epilogue: its stores and reductions, in canonical numbering."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from coda_jax.epilogue.analysis import Analysis
from coda_jax.epilogue.dtypes import RESULTS, listed
from coda_jax.epilogue.finishing import finishing
from coda_jax.epilogue.flatten import Atom
from coda_jax.epilogue.halves import Width
from coda_jax.epilogue.program import Axis, Node, Program, Reduction, TileStore, needed_nodes
from coda_jax.epilogue.simplify import simplify
from coda_jax.epilogue.values import (
    CHANNEL,
    COLUMN,
    COLUMNS,
    HALF,
    HEAD,
    ROW,
    Finished,
    Local,
    NotTileLocalError,
    Stacked,
    Tag,
    same_shape,
    same_size,
)


def assemble(analysis: Analysis) -> Program:
    """The program of an analysed epilogue; raises NotTileLocalError for an output of another shape."""
    stores: list[TileStore] = []
    finished: list[tuple[int, Atom]] = []
    for output, atom in enumerate(analysis.flat.outputs):
        store = _store(analysis, output, atom)
        if store is None:
            finished.append((output, atom))
        else:
            stores.append(store)
    finish, reductions = finishing(analysis, finished)
    nodes, new_stores, new_reductions = _compact(analysis, stores, reductions)
    outputs = len(analysis.flat.outputs)
    return Program(
        analysis.operands,
        analysis.halves,
        nodes,
        _in_order(new_stores, new_reductions),
        new_reductions,
        outputs,
        finish,
        analysis.n if analysis.layout.slices else 0,
    )


def _in_order(stores: tuple[TileStore, ...], reductions: tuple[Reduction, ...]) -> tuple[TileStore, ...]:
    """The stores in the order in which the kernel has them: that of f's outputs, unless registers are short.

    Registers are short where several reductions along columns keep sums beside the accumulator. The value computed
    first is then stored first, so that no register holds it while the others are computed: a LayerNorm's backward pass
    with all its sums spills 2060 bytes in 128 x 192 tiles, and 2256 in the other order.
    """
    if sum(reduction.axis is Axis.COLUMN for reduction in reductions) < 2:
        return stores
    return tuple(sorted(stores, key=lambda store: max(store.values)))


def _store(analysis: Analysis, output: int, atom: Atom) -> TileStore | None:
    """The tile store for an output, or None if it is computed after the kernel."""
    value, aval = analysis.value(atom), analysis.flat.aval(atom)
    if isinstance(value, Finished):
        return None
    if isinstance(value, Stacked):
        raise NotTileLocalError(
            f"epilogue '{analysis.name}': output {output} is a stack of arrays; return them one by one."
        )
    if value.tile and HEAD in value.tags and COLUMNS.intersection(value.tags) == {HEAD}:
        raise NotTileLocalError(
            f"epilogue '{analysis.name}': output {output} has shape {aval.shape}, a value for each head; such values "
            f"can be used in the epilogue but not returned."
        )
    first, end = value.slice or (0, analysis.n)
    axis_order = slice(None, None, -1 if value.transposed else None)
    tags, shape = value.tags[axis_order], aval.shape[axis_order]
    is_full = same_shape(shape, (analysis.m, end - first))
    may_be_half = analysis.halves.count == 2 and not analysis.head
    is_half = may_be_half and same_shape(shape, (analysis.m, analysis.half))
    unit = same_size(analysis.m, 1) or same_size(aval.shape[-1] if aval.shape else 1, 1)
    if not value.tile and (not (is_full or is_half) or unit):
        return None
    if not (is_full or is_half) or not _is_matrix(tags, (COLUMN, CHANNEL, None) if is_full else (HALF, None)):
        made_by = analysis.producers[atom].where() if atom in analysis.producers else "an input"
        raise NotTileLocalError(
            f"epilogue '{analysis.name}': output {output} has shape {aval.shape}, made by {made_by}; a tile output "
            f"has shape (M, N) = ({analysis.m}, {analysis.n}), (M, N/2) or that of a slice of the columns, or the "
            f"transposed one, a reduction (M,), (N,) or (). Reshape it outside the epilogue."
        )
    _check_stored(value, aval.dtype, f"epilogue '{analysis.name}': output {output}")
    nodes = value.nodes * analysis.halves.count if is_full and len(value.nodes) < analysis.halves.count else value.nodes
    width = Width.FULL if is_full else Width.HALF
    return TileStore(output, width, nodes, value.slice, value.transposed, value.ordered is not None)


def _check_stored(value: Local, dtype: Any, name: str) -> None:
    """Raises where a tile has a dtype or an order in which none is stored."""
    if np.dtype(dtype).name not in RESULTS:
        raise NotTileLocalError(
            f"{name} is a tile of dtype {dtype}; tile outputs are {listed(RESULTS)}. Convert it to a float inside the "
            "epilogue, or compute it outside."
        )
    if value.ordered is not None and value.ordered != value.tags[-1]:
        raise NotTileLocalError(
            f"{name} is in contraction order along the {value.ordered}s, and not along its last axis, as a tile is "
            "stored. Return its transpose, or order the other axis."
        )


def _is_matrix(tags: Sequence[Tag], columns: Sequence[Tag]) -> bool:
    """Whether the axes are the rows and one of `columns`."""
    return len(tags) == 2 and tags[0] in (ROW, None) and tags[1] in columns


def _compact(
    analysis: Analysis, stores: list[TileStore], reductions: list[Reduction]
) -> tuple[tuple[Node, ...], tuple[TileStore, ...], tuple[Reduction, ...]]:
    """Drops nodes that neither a store nor a reduction needs, and numbers the rest in the order of f."""
    roots = {value for store in stores for value in store.values}
    roots.update(value for reduction in reductions for value in reduction.values)
    simplified, at = simplify(analysis.nodes, roots)
    needed = needed_nodes(simplified, {at[value] for value in roots})
    numbers = {old: new for new, old in enumerate(sorted(needed))}

    def renumbered(values: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(numbers[at[value]] for value in values)

    return (
        tuple(replace(simplified[old], inputs=tuple(numbers[x] for x in simplified[old].inputs)) for old in numbers),
        tuple(replace(store, values=renumbered(store.values)) for store in stores),
        tuple(replace(reduction, values=renumbered(reduction.values)) for reduction in reductions),
    )
