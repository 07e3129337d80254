"""Evaluates a program on entire arrays with XLA: the reference for its kernel, and what a kernel leaves to XLA."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from coda_jax.epilogue import elementwise
from coda_jax.epilogue.contraction_order import contraction_order
from coda_jax.epilogue.flatten import run
from coda_jax.epilogue.operand import Beside
from coda_jax.epilogue.operand_kinds import groups_of_rows
from coda_jax.epilogue.program import HEAD_REDUCTIONS, Axis, Node, Program, ReductionOp


def evaluate(program: Program, acc: jax.Array, *operands: jax.Array) -> list[jax.Array]:
    """The program's flat outputs; tiles have the dtype that f gives them.

    `Epilogue.call` computes the same from f's own equations, which have its custom derivative rules.

    Args:
      acc: (M, N) float32.
      operands: as in `program.operands`.
    """
    stores, reductions = evaluate_tiles(program, acc, *operands)
    outputs = {store.output: tile for store, tile in zip(program.stores, stores, strict=True)}
    outputs.update(finish(program, reductions, operands, acc.shape[0]))
    return [outputs[i] for i in range(program.num_outputs)]


def evaluate_tiles(program: Program, acc: jax.Array, *operands: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
    """The values that the kernel computes: stores, in the dtypes that f gives them, and reductions, float32."""
    rows, columns = acc.shape[0], acc.shape[1] // program.halves.acc_halves
    beside = Beside(rows, columns, program.halves, groups_of_rows(program.operands, operands, rows))
    values: list[jax.Array] = []
    for node in program.nodes:
        values.append(_node(program, node, values, acc, operands, beside))

    def full(value: int) -> jax.Array:
        return jnp.broadcast_to(values[value], (rows, columns))

    stores = []
    for store in program.stores:
        tile = _join_halves(program, [full(value) for value in store.values])
        tile = tile if store.slice is None else tile[:, slice(*store.slice)]
        if store.transposed:
            # XLA merges a product and its transpose into one, which it cannot run with bfloat16 factors on a CPU.
            is_acc = any(program.nodes[value].op == "acc" for value in store.values)
            tile = (lax.optimization_barrier(tile) if is_acc else tile).T
        stores.append(contraction_order(tile) if store.contraction_order else tile)
    reductions = []
    for reduction in program.reductions:
        axes = {Axis.ROW: (1,), Axis.COLUMN: (0,), Axis.ALL: (0, 1)}[reduction.axis]
        halves = [reduction.op.reduce(full(value).astype(jnp.float32), axes) for value in reduction.values]
        along_columns = reduction.axis is Axis.COLUMN
        reductions.append(_join_halves(program, halves) if along_columns else _combined(reduction.op, halves))
    return stores, reductions


def finish(
    program: Program, reductions: Sequence[jax.Array], operands: Sequence[jax.Array | None], rows: Any
) -> dict[int, jax.Array]:
    """The outputs that are not tile stores, by their number.

    Args:
      reductions: finished, (M,), (N,), (N/2,) or () float32, as in `program.reductions`.
      operands: as in `program.operands`; tile operands are not read and may be None.
      rows: M.
    """
    groups = groups_of_rows(program.operands, operands, rows)
    values: dict[int, jax.Array] = {}
    for variable, source, index in program.finishing.inputs:
        if source == "reduction":
            values[variable] = reductions[index]
        else:
            x = operands[index]
            assert x is not None
            operand = program.operands[index]
            values[variable] = operand.kind.as_seen(x.astype(operand.traced_dtype), groups)
    numbers, atoms = [output for output, _ in program.finishing.outputs], [x for _, x in program.finishing.outputs]
    finished = run(program.finishing.equations, values, atoms)
    return dict(zip(numbers, map(jnp.asarray, finished), strict=True))


def _node(
    program: Program,
    node: Node,
    values: Sequence[jax.Array],
    acc: jax.Array,
    operands: Sequence[jax.Array],
    beside: Beside,
) -> jax.Array:
    """One value, (rows or 1, columns or 1)."""
    rows, columns = beside.rows, beside.columns
    match node.op:
        case "acc":
            return program.halves.columns_of(acc, node["half"], columns)
        case "operand":
            operand = program.operands[node["index"]]
            x = operands[node["index"]].astype(operand.traced_dtype)
            return operand.kind.value(x, operand, node["half"], beside)
        case "row":
            return lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
        case "column":
            indices = lax.broadcasted_iota(jnp.int32, (1, columns * program.halves.count), 1)
            return program.halves.columns_of(indices, node["half"], columns)
        case "literal":
            return jnp.full((1, 1), node["value"], node.dtype)
    if node.op in HEAD_REDUCTIONS:
        op, columns_of_half = HEAD_REDUCTIONS[node.op], program.halves.head // 2
        halves = [jnp.broadcast_to(values[i], (rows, columns)) for i in node.inputs]
        heads = [x.reshape(rows, columns // columns_of_half, columns_of_half) for x in halves]
        total = _combined(op, [op.reduce(x, axis=2) for x in heads])
        return jnp.broadcast_to(total[:, :, None], heads[0].shape).reshape(rows, columns)
    inputs = jnp.broadcast_arrays(*(values[i] for i in node.inputs))
    return elementwise.apply(node.op, list(inputs), dict(node.attributes))


def _join_halves(program: Program, halves: Sequence[jax.Array]) -> jax.Array:
    """All columns, along the last axis, from those of each half."""
    if not program.halves.head:
        return jnp.concatenate(halves, axis=-1)
    *rows, columns = halves[0].shape
    if program.halves.interleaved:
        return jnp.stack(halves, axis=-1).reshape(*rows, columns * len(halves))
    width = program.halves.head // 2
    heads = [x.reshape(*rows, columns // width, width) for x in halves]
    return jnp.concatenate(heads, axis=-1).reshape(*rows, columns * len(halves))


def _combined(op: ReductionOp, halves: Sequence[jax.Array]) -> jax.Array:
    out = halves[0]
    for half in halves[1:]:
        out = op.combine(out, half)
    return out
