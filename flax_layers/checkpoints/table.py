"""Parameters from and to the arrays of a checkpoint, by one table of their places for both directions."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from flax import nnx

from flax_layers.checkpoints.placement import Index, Path, Shardings, block_of, by_path, on_host, placed
from flax_layers.fp8 import History
from flax_layers.moe.router import BalanceBias


@dataclasses.dataclass(frozen=True)
class Part:
    """An array of a checkpoint, and how a parameter of ours holds it.

    Attributes:
      name: in the checkpoint.
      shape: in the checkpoint.
      transposed: whether it is (out, in), as torch.nn.Linear stores kernels.
      order: for each of our columns of a head its number in theirs; empty if the numbers are the same.
      factor: ours is theirs times this factor.
    """

    name: str
    shape: tuple[int, ...]
    transposed: bool = False
    order: tuple[int, ...] = ()
    factor: float = 1.0

    def read(self, array: Any, row_count: int, rows: slice, columns: slice) -> np.ndarray:
        """A block of our parameter; of the checkpoint's array only the heads in which the block is are read.

        Args:
          array: the checkpoint's, of any kind whose slices NumPy takes.
          row_count: of our parameter, 1 for a vector.
          rows, columns: of the block, with start and stop.
        """
        width = len(self.order) or 1
        first = columns.start // width * width
        heads = slice(first, -(-columns.stop // width) * width)
        block = self._block(array, row_count, rows, heads)
        return _times(self.in_our_order(block)[:, columns.start - first : columns.stop - first], self.factor)

    def in_our_order(self, columns: np.ndarray) -> np.ndarray:
        """Entire heads of columns (..., N) of theirs, in the order of ours."""
        return self._ordered(columns, self.order)

    def in_their_order(self, columns: np.ndarray) -> np.ndarray:
        """The inverse."""
        return self._ordered(columns, np.argsort(self.order))

    def _ordered(self, columns: np.ndarray, order: Sequence[int] | np.ndarray) -> np.ndarray:
        if not self.order:
            return columns
        return columns.reshape(*columns.shape[:-1], -1, len(order))[..., list(order)].reshape(columns.shape)

    def _block(self, array: Any, row_count: int, rows: slice, columns: slice) -> np.ndarray:
        """Rows and columns of our parameter, with columns in their order."""
        if self.transposed:
            return block_of(array, (columns, rows)).T
        axis = next(i for i in range(len(self.shape) + 1) if math.prod(self.shape[:i]) == row_count)
        row_index, rows = _cover(self.shape[:axis], rows)
        column_index, columns = _cover(self.shape[axis:], columns)
        block = block_of(array, (*row_index, *column_index))
        return block.reshape(math.prod(block.shape[:axis]), -1)[rows, columns]

    def write(self, array: np.ndarray) -> np.ndarray:
        """The checkpoint's array; ours may have any shape."""
        if self.order:
            array = self.in_their_order(array.reshape(-1))
        array = _times(array.reshape(self.shape[::-1] if self.transposed else self.shape), 1 / self.factor)
        return array.T if self.transposed else array


@dataclasses.dataclass(frozen=True)
class Entry:
    """A parameter, and the arrays of the checkpoint whose columns are concatenated in its columns.

    Attributes:
      path: keys of the parameter in the model's state, ("layers", i, ...) in layer i, also where layers are stacked;
        (..., "experts", e, "gate_up") for expert e in an array with the experts along its first axis.
      parts: the arrays.
    """

    path: Path
    parts: tuple[Part, ...]

    def read(self, arrays: Mapping[str, Any], shape: tuple[int, ...], index: Index, out: np.ndarray) -> None:
        """Reads a block of the parameter into `out`.

        Args:
          arrays: of the checkpoint.
          shape: the parameter's.
          index: where the block is, with start and stop on each axis.
          out: of the block's shape and the parameter's dtype.
        """
        row_count = math.prod(_rows(shape))
        rows = index[0] if _rows(shape) else slice(0, 1)
        out, done = out.reshape(rows.stop - rows.start, -1), 0
        for start, stop in _intervals(shape[len(_rows(shape)) :], index[len(_rows(shape)) :]):
            first = 0
            for part in self.parts:
                width = math.prod(part.shape) // row_count
                columns = slice(max(start - first, 0), min(stop - first, width))
                if (count := columns.stop - columns.start) > 0:
                    out[:, done : done + count] = part.read(arrays[part.name], row_count, rows, columns)
                    done += count
                first += width

    def split(self, parameter: np.ndarray) -> list[np.ndarray]:
        """The arrays of the checkpoint, not copied where nothing but the shape differs."""
        rows = _rows(parameter.shape)
        widths = [math.prod(part.shape) // math.prod(rows) for part in self.parts]
        columns = np.split(parameter.reshape(*rows, -1), list(itertools.accumulate(widths[:-1])), axis=-1)
        return [part.write(x) for part, x in zip(self.parts, columns, strict=True)]


def check_layers(count: int, arrays: Mapping[str, Any]) -> None:
    """Raises a ValueError if there are fewer arrays than layers, before a table of so many layers is made."""
    if count > len(arrays):
        raise ValueError(
            f"the checkpoint lacks layers: the config has {count}, and there are {len(arrays)} arrays in all"
        )


def check(table: Sequence[Entry], arrays: Mapping[str, Any], hint: str) -> None:
    """Raises a ValueError unless the arrays are those of the table, in its shapes; `hint` follows unknown names."""
    expected = {part.name: part.shape for entry in table for part in entry.parts}
    if missing := sorted(expected.keys() - arrays.keys()):
        raise ValueError(f"the checkpoint lacks {some(missing)}")
    if unknown := sorted(arrays.keys() - expected.keys()):
        raise ValueError(f"a model of this config has no {some(unknown)}; {hint}")
    for name, shape in expected.items():
        if tuple(arrays[name].shape) != shape:
            raise ValueError(f"{name} has shape {tuple(arrays[name].shape)}; the config makes it {shape}")


def fill(model: Any, table: Sequence[Entry], arrays: Mapping[str, Any], shardings: Shardings = None) -> Any:
    """The model with the arrays as parameters, in its own dtypes, and with empty histories of scales.

    Args:
      model: as nnx.eval_shape makes it. Its layers may be stacked for a scan.
      table: all its parameters.
      arrays: those that the table names. Beside the model the host's memory holds one parameter's shard of a device, or
        one parameter without shardings.
      shardings: of the parameters, see `flax_layers.checkpoints.placement`.
    """
    graphdef, state = nnx.split(model)
    shapes = nnx.to_pure_dict(state)
    entries_at: dict[Path, list[tuple[tuple[int, ...], Entry]]] = defaultdict(list)
    for entry in as_stored(table, shapes):
        path, stacked_at = place(shapes, entry.path)
        entries_at[path].append((stacked_at, entry))
    histories: list[Any] = [path for path, _ in nnx.to_flat_state(nnx.state(model, History))]
    sharding_at = by_path(shardings, {path: at(shapes, path) for path in (*entries_at, *histories)}, histories)
    params: dict[Any, Any] = {}
    for path in histories:
        _put(params, path, placed(_zeros, at(shapes, path).shape, sharding_at[path]))
    for path, entries in entries_at.items():
        leaf = at(shapes, path)

        def read(index: Index, leaf: Any = leaf, entries: list[tuple[tuple[int, ...], Entry]] = entries) -> np.ndarray:
            block = np.empty([axis.stop - axis.start for axis in index], leaf.dtype)
            for stacked_at, entry in entries:
                count = len(stacked_at)
                lead = list(zip(stacked_at, index[:count], strict=True))
                if all(axis.start <= i < axis.stop for i, axis in lead):
                    own = block[tuple(i - axis.start for i, axis in lead)]
                    entry.read(arrays, leaf.shape[count:], index[count:], own)
            return block

        _put(params, path, placed(read, leaf.shape, sharding_at[path]))
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graphdef, state)


def _zeros(index: Index) -> np.ndarray:
    return np.zeros([axis.stop - axis.start for axis in index], np.float32)


def arrays_of(
    model: nnx.Module | nnx.State, table: Sequence[Entry], *, only_first_process: bool = False
) -> Iterator[tuple[Part, np.ndarray]]:
    """The arrays of a checkpoint, one after another, in the parameters' own dtypes.

    Parameters on a mesh are gathered one at a time, those of stacked layers one layer at a time. Where a mesh has
    several processes, all of them call this together.

    Args:
      model: a model, or a state with its structure. Its layers may be stacked for a scan.
      table: its parameters. Arrays are divided by their factors, which is right for parameters and not for gradients.
      only_first_process: whether the other processes only help to gather: nothing is yielded there.
    """
    params = _parameters_in(model, table)
    for entry in as_stored(table, params):
        path, stacked_at = place(params, entry.path)
        array = on_host(at(params, path), stacked_at, only_first_process=only_first_process)
        if array is not None:
            yield from zip(entry.parts, entry.split(array), strict=True)


def types_of(model: nnx.Module | nnx.State, table: Sequence[Entry]) -> Iterator[tuple[Part, np.dtype]]:
    """The parts that `arrays_of` yields, and the dtype of each; nothing is gathered."""
    params = _parameters_in(model, table)
    for entry in as_stored(table, params):
        dtype = at(params, place(params, entry.path)[0]).dtype
        yield from ((part, dtype) for part in entry.parts)


def _parameters_in(model: nnx.Module | nnx.State, table: Sequence[Entry]) -> Any:
    """As `parameters_of`; a ValueError if the table lacks one, except those of modules that a user added."""
    params = parameters_of(model)
    known = {place(params, entry.path)[0] for entry in as_stored(table, params)}
    ours = {path[0] for path in known} | {"head"}
    if unknown := [path for path, _ in nnx.to_flat_state(nnx.State(params)) if path[0] in ours and path not in known]:
        raise ValueError(
            f"the model has {'.'.join(map(str, unknown[0]))}, for which its config has no place: give model.config"
        )
    return params


def parameters_of(model: nnx.Module | nnx.State) -> Any:
    """Nested dictionaries of a model's parameters and balance biases; a ValueError if adapters are among them."""
    kinds = nnx.Any(nnx.Param, BalanceBias)
    params = nnx.to_pure_dict(nnx.state(model, kinds) if isinstance(model, nnx.Module) else model)
    if adapted := [path for path, _ in nnx.to_flat_state(nnx.State(params)) if path[-1] == "lora_a"]:
        raise ValueError(
            f"{'.'.join(map(str, adapted[0][:-1]))} is an adapter, which this checkpoint has no place for: merge_lora "
            "or remove_lora first; save_peft_folder writes adapters alone"
        )
    return params


def as_stored(table: Sequence[Entry], params: Any) -> Iterator[Entry]:
    """The table for a model that may have separate kernels of query, key and value, and of gate and up.

    Balance biases are left out where there are none, as in gradients.
    """
    for entry in table:
        if entry.path[-2:] == ("router", "bias") and "bias" not in at(params, place(params, entry.path[:-1])[0]):
            continue
        if entry.path[-1] == "gate_up" and "gate_up" not in at(params, place(params, entry.path[:-1])[0]):
            if len(entry.parts) == 1:
                raise ValueError(f"{entry.parts[0].name} has gate and up together; the model has them apart")
            for name, part in zip(("gate", "up"), entry.parts, strict=True):
                yield Entry((*entry.path[:-1], name, "kernel"), (part,))
            continue
        *parent, layer, kind = entry.path
        attention = at(params, place(params, tuple(parent))[0]) if layer == "qkv" else {"qkv": None}
        if "qkv" in attention:
            yield entry
        elif len(entry.parts) == 1:
            raise ValueError(f"{entry.parts[0].name} has query, key and value together; the model has them apart")
        else:
            for name, part in zip(("query", "key", "value"), entry.parts, strict=True):
                yield Entry((*parent, name, kind), (part,))


def place(params: Any, path: Path) -> tuple[Path, tuple[int, ...]]:
    """The parameter's place in the model's state, and its index there: a layer's or an expert's where they are stacked.

    Args:
      params: nested dictionaries of the parameters. A parameter that is not there has the place of its path.
      path: an entry's, in which a number that is no key is an index along the parameter's first axis, or the next one.
    """
    keys: list[str | int] = []
    index: list[int] = []
    for key in path:
        if isinstance(key, int) and key not in params:
            index.append(key)
        else:
            keys.append(key)
            params = params.get(key, {}) if isinstance(params, Mapping) else {}
    return tuple(keys), tuple(index)


def _rows(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The first axis of a kernel; none of a vector, which is all columns."""
    return shape[:1] if len(shape) > 1 else ()


def interleaved(size: int) -> tuple[int, ...]:
    """The `Part.order` of heads of this size whose rotary embedding turns columns 2 i and 2 i + 1 together."""
    return (*range(0, size, 2), *range(1, size, 2))


def _cover(axes: tuple[int, ...], span: slice) -> tuple[Index, slice]:
    """The index to read of axes that are one axis of ours, and the place in it of a span of ours.

    Args:
      axes: their sizes.
      span: of our axis, with start and stop.
    """
    if not axes:
        return (), span
    rest = axes[1:]
    size = math.prod(rest)
    start, stop = span.start // size, -(-span.stop // size)
    index = (slice(start, stop), *(slice(0, n) for n in rest))
    return index, slice(span.start - start * size, span.stop - start * size)


def _intervals(axes: tuple[int, ...], index: Index) -> Iterator[tuple[int, int]]:
    """Start and stop of a block's spans, as long as possible, in axes that are flattened to one."""
    start = stop = 0
    for outer in itertools.product(*(range(axis.start, axis.stop) for axis in index[:-1])):
        offset = 0
        for i, size in zip(outer, axes[:-1], strict=True):
            offset = offset * size + i
        offset *= axes[-1]
        if offset + index[-1].start != stop:
            if stop > start:
                yield start, stop
            start = offset + index[-1].start
        stop = offset + index[-1].stop
    if stop > start:
        yield start, stop


def _times(array: np.ndarray, factor: float) -> np.ndarray:
    if factor == 1:
        return array
    return (array.astype(np.promote_types(array.dtype, np.float32)) * np.float32(factor)).astype(array.dtype)


def at(tree: Any, path: Path) -> Any:
    """The value at a path in nested dictionaries."""
    for key in path:
        tree = tree[key]
    return tree


def _put(tree: dict[Any, Any], path: Path, value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


def some(names: list[str]) -> str:
    """The first names, for a message."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
