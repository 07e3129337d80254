"""Parameters onto the devices of a mesh and back, one at a time: no host needs the memory for an entire model.

Each device's shard of a parameter is read by itself and is on the device before the next one is read. Shardings are
given as one of

    None                                 the default device, as without a mesh
    a jax.sharding.Sharding              for all of them
    f(path, leaf) -> Sharding            path ("layers", 0, "mlp", "gate_up"), leaf a jax.ShapeDtypeStruct
    an nnx.State, or nested dictionaries of the model's structure, whose leaves are Shardings
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

Path: TypeAlias = tuple[str | int, ...]
Index: TypeAlias = tuple[slice, ...]  # a slice with start and stop for each axis
ShardingOf: TypeAlias = Callable[[Path, jax.ShapeDtypeStruct], Sharding]
Shardings: TypeAlias = Sharding | ShardingOf | Mapping[Any, Any] | nnx.State | None


def by_path(
    shardings: Shardings, leaves: Mapping[Path, Any], beside: Sequence[Path] = ()
) -> dict[Path, Sharding | None]:
    """The sharding of each parameter.

    Args:
      shardings: in one of the forms above.
      leaves: path -> what has the parameter's shape and dtype.
      beside: paths of arrays that are no parameters; if a structure has no sharding for them they are replicated.

    Raises:
      ValueError: a parameter without a sharding or a sharding without a parameter, or one that does not divide it.
      TypeError: a leaf that is no sharding.
    """
    if shardings is None:
        return dict.fromkeys(leaves)
    sharding_at: dict[Path, Any]
    if isinstance(shardings, Sharding):
        sharding_at = dict.fromkeys(leaves, shardings)
    elif isinstance(shardings, nnx.State | Mapping):
        sharding_at = _flat(nnx.to_pure_dict(shardings) if isinstance(shardings, nnx.State) else shardings)
        first = next(iter(sharding_at.values()), None)
        replicated = NamedSharding(first.mesh, PartitionSpec()) if isinstance(first, NamedSharding) else first
        sharding_at = {**dict.fromkeys(beside, replicated), **sharding_at}
        for path in sorted(leaves.keys() ^ sharding_at.keys(), key=_dotted):
            what = "no parameter" if path in sharding_at else "no sharding"
            raise ValueError(f"shardings: there is {what} {_dotted(path)}")
    else:
        sharding_at = {path: shardings(path, jax.ShapeDtypeStruct(x.shape, x.dtype)) for path, x in leaves.items()}
    for path, leaf in leaves.items():
        sharding = sharding_at[path]
        if not isinstance(sharding, Sharding):
            raise TypeError(f"shardings: {sharding!r} of {_dotted(path)} is not a jax.sharding.Sharding")
        try:
            if isinstance(sharding, NamedSharding) and len(sharding.spec) > len(leaf.shape):
                raise ValueError(f"{sharding.spec} has more axes")
            sharding.shard_shape(leaf.shape)
        except ValueError as error:
            raise ValueError(f"shardings: {_dotted(path)} {leaf.shape} cannot be cut so: {error}") from None
    return sharding_at


def placed(read: Callable[[Index], np.ndarray], shape: tuple[int, ...], sharding: Sharding | None) -> jax.Array:
    """The array of this shape from blocks that `read` returns; each process reads those of its own devices."""
    if sharding is None:
        return jnp.asarray(read(_bounds((slice(None),) * len(shape), shape)))
    devices_at: dict[str, list[jax.Device]] = {}  # by the index, which Python 3.11 cannot hash
    index_at: dict[str, Index] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        bounds = _bounds(index or (), shape)
        devices_at.setdefault(str(bounds), []).append(device)
        index_at[str(bounds)] = bounds
    blocks: list[jax.Array] = []
    for key, devices in devices_at.items():
        block = read(index_at[key])
        copies = [
            jax.device_put(block, SingleDeviceSharding(device, memory_kind=sharding.memory_kind)) for device in devices
        ]
        blocks += jax.block_until_ready(copies)  # else blocks that are still being copied pile up
    return jax.make_array_from_single_device_arrays(shape, sharding, blocks)


def on_host(array: Any, index: tuple[int, ...] = (), *, only_first_process: bool = False) -> np.ndarray | None:
    """array[index] in the host's memory, of which JAX keeps no copy.

    Args:
      array: of any sharding. Where it has devices of other processes, all processes call this together.
      index: of the first axes, as a layer's, or a layer's and an expert's.
      only_first_process: whether all processes but the first only help to gather: they get None.
    """
    is_wanted = not (only_first_process and jax.process_index())
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        gathered = _gathered(array, index).addressable_data(0)
        return np.asarray(gathered) if is_wanted else None
    if not is_wanted:
        return None
    lead, rest = tuple(slice(i, i + 1) for i in index), array.shape[len(index) :]
    return block_of(array, (*lead, *_bounds((slice(None),) * len(rest), rest))).reshape(rest)


def block_of(array: Any, index: Index) -> np.ndarray:
    """array[index] in the host's memory; a jax.Array is read from its devices' shards, without a collective.

    Raises:
      ValueError: an array with shards on other processes' devices.
    """
    if not isinstance(array, jax.Array):
        return np.asarray(array[index])
    if not array.is_fully_addressable:
        raise ValueError(f"an array {array.shape} lies on other processes' devices too: it cannot be read here")
    block = np.empty([axis.stop - axis.start for axis in index], array.dtype)
    for shard in array.addressable_shards:
        bounds = _bounds(shard.index, array.shape)
        overlap = [slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(index, bounds, strict=True)]
        if shard.replica_id or any(axis.stop <= axis.start for axis in overlap):
            continue
        if overlap == list(bounds):  # a new jax.Array: each caches what NumPy has read of it
            piece = jax.make_array_from_single_device_arrays(shard.data.shape, shard.data.sharding, [shard.data])
        else:
            piece = shard.data[_within(overlap, bounds)]
        block[_within(overlap, index)] = np.asarray(piece)
    return block


def wait_for_all_processes(what: str) -> None:
    """Returns when every process has come here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)


def _gathered(array: jax.Array, index: tuple[int, ...]) -> jax.Array:
    """array[index] on each device."""
    sharding = array.sharding
    if not isinstance(sharding, NamedSharding):
        raise ValueError(f"only arrays with a NamedSharding can be gathered from several processes, not {sharding}")
    everywhere = NamedSharding(sharding.mesh, PartitionSpec())
    entries = [*sharding.spec, *(None,) * array.ndim]

    def one(x: jax.Array, index: tuple[int, ...]) -> jax.Array:
        for i, entry in zip(index, entries, strict=False):
            x = lax.dynamic_index_in_dim(x, i, keepdims=False) if entry is None else _summed_alone(x, i)
        return x

    return jax.jit(one, out_shardings=everywhere)(array, index)


def _summed_alone(x: jax.Array, i: int | jax.Array) -> jax.Array:
    """x[i] as a sum of its bits and zeros: where the first axis is sharded, devices send one slice, not all of x."""
    bits = lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    is_it = (jnp.arange(x.shape[0]) == i).reshape(-1, *(1,) * (x.ndim - 1))
    return lax.bitcast_convert_type(jnp.sum(jnp.where(is_it, bits, 0), axis=0, dtype=bits.dtype), x.dtype)


def _within(inner: Iterable[slice], outer: Index) -> Index:
    """The index of a block in a larger one that contains it."""
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(inner, outer, strict=True))


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> Index:
    """The index with start and stop on each axis."""
    return tuple(slice(*axis.indices(size)[:2]) for axis, size in zip(index, shape, strict=True))


def _flat(tree: Mapping[Any, Any], path: Path = ()) -> dict[Path, Any]:
    flat: dict[Path, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, (*path, key)) if isinstance(value, Mapping) else {(*path, key): value}
    return flat


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))
