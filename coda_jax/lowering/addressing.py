"""The products whose arrays the kernel can address."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from coda_jax.epilogue import Axis, Program, TileStore
from coda_jax.epilogue.contraction_order import BLOCK
from coda_jax.epilogue.dtypes import FACTORS, FLOATS, is_of_8_bits, listed
from coda_jax.primitives.axes import Dimension
from coda_jax.primitives.spec import GemmSpec
from coda_jax.tiles.arch import current

_MAX_PARAMETER_BYTES = 4096  # as in ffi/kernels.h
_MOST_GROUPS = 1024


def unsupported_reason(avals: Sequence[Any], spec: GemmSpec) -> str | None:
    """The rule that keeps the kernel from computing this product, with the value that breaks it; None if none does.

    Args:
      avals: types of the arguments, without a batch axis or with it.
    """
    a, b, _ = spec.split(avals)
    return (
        _unsupported_factors(a, b, spec)
        or _unsupported_groups(spec.num_groups(avals))
        or _unsupported_program(spec)
        or _unsupported_results(spec)
        or _unsupported_rows(a, b, spec)
        or _unsupported_size(a, b)
        or _unsupported_count(spec.program)
    )


def _unsupported_factors(a: Any, b: Any, spec: GemmSpec) -> str | None:
    for name, array in (("a", a), ("b", b)):
        if np.dtype(array.dtype).name not in FACTORS:
            return f"{name} is {np.dtype(array.dtype).name}; the kernel multiplies {listed(FACTORS, 'and')}"
    if a.dtype != b.dtype and not (is_of_8_bits(a.dtype) and is_of_8_bits(b.dtype)):
        return f"a is {np.dtype(a.dtype).name} and b is {np.dtype(b.dtype).name}; the kernel wants one dtype"
    if is_of_8_bits(a.dtype) and (spec.transpose_a or not spec.transpose_b):
        names = " and b ".join(np.dtype(x.dtype).name for x in (a, b))
        return f"a is {names}; the kernel reads factors of 8 bits as (M, K) and (N, K) only"
    m, n, k = spec.sizes(a, b)
    for name, size in (("n", n), ("k", k)):
        if not isinstance(size, int):
            return f"{name} = {size} is symbolic; only m may be"
    if 0 in (m, n, k) or 0 in a.shape or 0 in b.shape:
        return f"m, n, k = {m}, {n}, {k}; an empty product needs no kernel"
    return None


def _unsupported_groups(groups: int) -> str | None:
    if groups > _MOST_GROUPS:
        return f"{groups} groups; the kernel keeps where they begin in shared memory, of at most {_MOST_GROUPS}"
    return None


def _unsupported_program(spec: GemmSpec) -> str | None:
    program = spec.program
    for i, operand in enumerate(program.operands):
        if spec.ragged is not Dimension.M and operand.kind.by_group and program.loads(i):
            return f"operand {i} is by group in a dense product; the kernel takes it in a product of groups only"
    if not program.tiles_of_heads:
        return None
    return (
        f"operand {program.tiles_of_heads[0]}: a reduction of each head depends on this tile, which the kernel "
        "reads once; it reduces heads of what follows from acc and vectors"
    )


def _unsupported_results(spec: GemmSpec) -> str | None:
    """The rule that a result breaks, or an operand of 8 bits; None if none does."""
    program = spec.program
    for store, dtype in zip(program.stores, spec.store_dtypes, strict=True):
        if reason := _unsupported_store(spec, store, np.dtype(dtype)):
            return f"output {store.output} {reason}"
    dtypes = {f"operand {i}": np.dtype(program.operands[i].dtype) for i in program.tile_operands}
    dtypes |= {f"output {store.output}": dtype for store, dtype in zip(program.stores, spec.store_dtypes, strict=True)}
    least_box_bytes = current().least_row_bytes
    for name, dtype in dtypes.items():
        if dtype.itemsize == 1 and program.halves.head // 2 % least_box_bytes:
            return (
                f"{name} is {dtype.name} with heads of {program.halves.head} columns; half a head is less than a box "
                f"of {least_box_bytes} bytes, or no multiple"
            )
    if spec.ragged is Dimension.M and any(reduction.axis is Axis.ALL for reduction in program.reductions):
        return "an output is a maximum of all rows, and rows may be in no group, of which the kernel writes none"
    return None


def _unsupported_store(spec: GemmSpec, store: TileStore, dtype: np.dtype) -> str | None:
    program = spec.program
    if spec.ragged and (store.transposed or is_of_8_bits(dtype)):
        what = "is transposed" if store.transposed else f"is {dtype.name}"
        return f"{what}; the kernel of a product of groups stores {listed(FLOATS)}, rows as rows"
    if (store.transposed or program.symmetric) and dtype.itemsize > 2:
        what = "transposed" if store.transposed else "symmetric"
        return f"is {dtype.name} and {what}; the kernel transposes results of 8 and of 16 bits"
    if store.transposed and (program.halves.head or len(program.sections) > 1):
        what = f"heads of {program.halves.head} columns" if program.halves.head else "slices of the columns"
        return f"is transposed, of an epilogue of {what}; the kernel transposes all columns or a half of them"
    if store.contraction_order and not is_of_8_bits(dtype):
        return f"is {dtype.name} in contraction order; the kernel stores results of 8 bits in it"
    first = store.slice[0] if store.slice else 0
    begins = [
        section[0] - first for section in program.sections if program.stores.index(store) in program.stores_of(section)
    ]
    if store.contraction_order and any(begin % BLOCK for begin in begins):
        return (
            f"is in contraction order, and tiles begin at columns {begins}; the kernel orders whole blocks of {BLOCK}"
        )
    return None


def _unsupported_rows(a: Any, b: Any, spec: GemmSpec) -> str | None:
    for name, size, dtype, is_of_half in _rows(a, b, spec):
        if not isinstance(size, int):
            return f"{name}: its rows have the symbolic length {size}"
        row_bytes = size * np.dtype(dtype).itemsize
        if row_bytes % 16:
            return (
                f"{name}: a row{' of a half' if is_of_half else ''} of {size} {np.dtype(dtype).name} is "
                f"{row_bytes} bytes; TMA addresses multiples of 16"
            )
    return None


def _rows(a: Any, b: Any, spec: GemmSpec) -> Iterator[tuple[str, Any, Any, bool]]:
    """Name, row length and dtype of each array that is loaded or stored in tiles, and whether it is a half's row."""
    m, n, _ = spec.sizes(a, b)
    program, has_halves = spec.program, spec.program.halves.n_halves > 1
    columns = n // program.halves.n_halves
    yield "a", a.shape[-1], a.dtype, False
    yield "b", b.shape[-1] if spec.transpose_b else columns, b.dtype, has_halves
    for i in program.tile_operands:
        yield f"operand {i}", columns, program.operands[i].dtype, has_halves
    for store, dtype in zip(program.stores, spec.store_dtypes, strict=True):
        size = m if store.transposed else store.slice[1] - store.slice[0] if store.slice else columns
        yield f"output {store.output}", size, dtype, has_halves and not store.transposed


def _unsupported_size(a: Any, b: Any) -> str | None:
    for name, array in (("a", a), ("b", b)):
        known = [size for size in array.shape if isinstance(size, int)]
        if math.prod(known) >= 2**40 or math.prod(known[:-1]) >= 2**31 or known[-1] >= 2**31:
            return f"{name}: shape {array.shape} is beyond the kernel's 32-bit coordinates"
    return None


def _unsupported_count(program: Program) -> str | None:
    buffers = 2 + len(program.operands) + len(program.stores) + len(program.reductions)
    maps = 2 + len(program.tile_operands) + len(program.stores) * (1 + program.symmetric)
    if 128 * maps + 8 * buffers + 16 > _MAX_PARAMETER_BYTES:
        return (
            f"product and epilogue have {buffers} arrays, {maps} of them matrices; a launch takes "
            f"{_MAX_PARAMETER_BYTES - 16} bytes, at 128 a matrix and 8 an array"
        )
    return None


def unaligned_rows(avals: Sequence[Any], spec: GemmSpec) -> list[tuple[str, int, int]]:
    """Name, row length and required divisor of each array whose rows TMA does not address."""
    a, b, _ = spec.split(avals)
    each = ((name, size, 16 // np.dtype(dtype).itemsize) for name, size, dtype, _ in _rows(a, b, spec))
    return [(name, size, unit) for name, size, unit in each if isinstance(size, int) and size % unit]
