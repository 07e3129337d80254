"""Parameters from and to the arrays of a checkpoint, by a table of where each lies that is read in both directions."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

Path = tuple[str | int, ...]


@dataclasses.dataclass(frozen=True)
class Part:
    """An array of a checkpoint, and how a parameter of ours holds it.

    Attributes:
      name: in the checkpoint.
      shape: in the checkpoint.
      transposed: whether it is (out, in), as torch.nn.Linear stores kernels.
      interleaved: whether its last axis, the columns of a head, has the two halves of ours in turns.
      factor: what it is multiplied by to be ours.
    """

    name: str
    shape: tuple[int, ...]
    transposed: bool = False
    interleaved: bool = False
    factor: float = 1.0

    def read(self, array: np.ndarray) -> np.ndarray:
        """Ours; not copied where nothing but the shape differs."""
        if self.interleaved:
            array = np.concatenate([array[..., 0::2], array[..., 1::2]], axis=-1)
        return _times(array.T if self.transposed else array, self.factor)

    def write(self, array: np.ndarray) -> np.ndarray:
        """The inverse of `read`; ours may have any shape."""
        array = _times(array.reshape(self.shape[::-1] if self.transposed else self.shape), 1 / self.factor)
        if self.interleaved:
            array = np.stack(np.split(array, 2, axis=-1), axis=-1).reshape(self.shape)
        return array.T if self.transposed else array


@dataclasses.dataclass(frozen=True)
class Entry:
    """A parameter, and the arrays of the checkpoint that lie side by side in its columns.

    Attributes:
      path: keys of the parameter in the model's state, ("layers", i, ...) in layer i, also where layers are stacked.
      parts: the arrays.
    """

    path: Path
    parts: tuple[Part, ...]

    def join(self, arrays: Sequence[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
        """The parameter, in its shape."""
        columns = [part.read(x) for part, x in zip(self.parts, arrays, strict=True)]
        if len(columns) > 1:
            columns = [np.concatenate([x.reshape(*_rows(shape), -1) for x in columns], axis=-1)]
        return columns[0].reshape(shape)

    def split(self, parameter: np.ndarray) -> list[np.ndarray]:
        """The arrays of the checkpoint, not copied where nothing but the shape differs."""
        rows = _rows(parameter.shape)
        widths = [math.prod(part.shape) // math.prod(rows) for part in self.parts]
        columns = np.split(parameter.reshape(*rows, -1), list(itertools.accumulate(widths[:-1])), axis=-1)
        return [part.write(x) for part, x in zip(self.parts, columns, strict=True)]


def check(table: Sequence[Entry], arrays: Mapping[str, Any], hint: str) -> None:
    """Raises a ValueError unless the arrays are those of the table, in its shapes; `hint` is about unknown ones."""
    wanted = {part.name: part.shape for entry in table for part in entry.parts}
    if missing := sorted(wanted.keys() - arrays.keys()):
        raise ValueError(f"the checkpoint lacks {some(missing)}")
    if unknown := sorted(arrays.keys() - wanted.keys()):
        raise ValueError(f"a model of this config has no {some(unknown)}; {hint}")
    for name, shape in wanted.items():
        if tuple(arrays[name].shape) != shape:
            raise ValueError(f"{name} has shape {tuple(arrays[name].shape)}; the config makes it {shape}")


def fill(model: Any, table: Sequence[Entry], arrays: Mapping[str, Any]) -> Any:
    """The model with the arrays for parameters, in its own dtypes.

    Args:
      model: as nnx.eval_shape makes it. Its layers may be stacked for a scan.
      table: all its parameters.
      arrays: what the table names. Beside them one parameter at a time is in the host's memory.
    """
    graphdef, state = nnx.split(model)
    shapes = nnx.to_pure_dict(state)
    entries_at: dict[Path, list[tuple[Any, Entry]]] = defaultdict(list)
    for entry in as_stored(table, shapes):
        path, index = place(shapes, entry.path)
        entries_at[path].append((index, entry))
    params: dict[Any, Any] = {}
    for path, entries in entries_at.items():
        leaf = at(shapes, path)
        parameter = np.empty(leaf.shape, leaf.dtype)
        for index, entry in entries:
            of_layer = parameter[index]
            of_layer[...] = entry.join([np.asarray(arrays[part.name]) for part in entry.parts], of_layer.shape)
        _put(params, path, jnp.asarray(parameter))
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graphdef, state)


def arrays_of(model: nnx.Module | nnx.State, table: Sequence[Entry]) -> Iterator[tuple[Part, np.ndarray]]:
    """The arrays of a checkpoint, one after another, in the parameters' own dtypes.

    Args:
      model: a model, or a state with its structure. Its layers may be stacked for a scan.
      table: its parameters. A factor of theirs is taken off, as it is for a parameter and not for its gradient.
    """
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param) if isinstance(model, nnx.Module) else model)
    if adapted := [path for path, _ in nnx.to_flat_state(nnx.State(params)) if path[-1] == "lora_a"]:
        raise ValueError(
            f"{'.'.join(map(str, adapted[0][:-1]))} is an adapter, which this checkpoint has no place for: merge_lora "
            "or remove_lora first; save_peft_folder writes adapters alone"
        )
    for entry in as_stored(table, params):
        path, index = place(params, entry.path)
        yield from zip(entry.parts, entry.split(np.asarray(at(params, path))[index]), strict=True)


def as_stored(table: Sequence[Entry], params: Any) -> Iterator[Entry]:
    """The table for a model that may have query, key and value apart, and gate and up."""
    for entry in table:
        if entry.path[-1] == "gate_up" and "gate_up" not in at(params, place(params, entry.path[:-1])[0]):
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


def place(params: Any, path: Path) -> tuple[Path, Any]:
    """Where the parameter is in the model's state, and its index there: of a layer in stacked layers, or all of it."""
    if path[0] == "layers" and path[1] not in params["layers"]:
        return (path[0], *path[2:]), path[1]
    return path, ...


def _rows(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The first axis of a kernel; none of a vector, which is all columns."""
    return shape[:1] if len(shape) > 1 else ()


def _times(array: np.ndarray, factor: float) -> np.ndarray:
    if factor == 1:
        return array
    return (array.astype(np.promote_types(array.dtype, np.float32)) * np.float32(factor)).astype(array.dtype)


def at(tree: Any, path: Path) -> Any:
    """What lies there in nested dictionaries."""
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
