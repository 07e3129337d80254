"""Parameters onto the devices of a mesh and back, one at a time: no host needs the memory for a whole model.

Each device's part of a parameter is read by itself and is on the device before the next one is read. What says where
parameters lie is one of

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
      beside: those that are no parameters, for which a structure may have no sharding: each device has them whole.

    Raises:
      ValueError: a parameter without a sharding or a sharding without a parameter, or one that does not divide it.
      TypeError: what is no sharding.
    """
    if shardings is None:
        return dict.fromkeys(leaves)
    found: dict[Path, Any]
    if isinstance(shardings, Sharding):
        found = dict.fromkeys(leaves, shardings)
    elif isinstance(shardings, nnx.State | Mapping):
        found = _flat(nnx.to_pure_dict(shardings) if isinstance(shardings, nnx.State) else shardings)
        first = next(iter(found.values()), None)
        whole = NamedSharding(first.mesh, PartitionSpec()) if isinstance(first, NamedSharding) else first
        found = {**dict.fromkeys(beside, whole), **found}
        for path in sorted(leaves.keys() ^ found.keys(), key=_dotted):
            what = "no parameter" if path in found else "no sharding"
            raise ValueError(f"shardings: there is {what} {_dotted(path)}")
    else:
        found = {path: shardings(path, jax.ShapeDtypeStruct(x.shape, x.dtype)) for path, x in leaves.items()}
    for path, leaf in leaves.items():
        sharding = found[path]
        if not isinstance(sharding, Sharding):
            raise TypeError(f"shardings: {sharding!r} of {_dotted(path)} is not a jax.sharding.Sharding")
        try:
            if isinstance(sharding, NamedSharding) and len(sharding.spec) > len(leaf.shape):
                raise ValueError(f"{sharding.spec} has more axes")
            sharding.shard_shape(leaf.shape)
        except ValueError as error:
            raise ValueError(f"shardings: {_dotted(path)} {leaf.shape} cannot be cut so: {error}") from None
    return found


def placed(read: Callable[[Index], np.ndarray], shape: tuple[int, ...], sharding: Sharding | None) -> jax.Array:
    """The array of this shape, whose blocks `read` reads; each process reads those of its own devices."""
    if sharding is None:
        return jnp.asarray(read(_bounds((slice(None),) * len(shape), shape)))
    devices_at: dict[str, list[jax.Device]] = {}  # by the index, which Python 3.11 cannot hash
    index_at: dict[str, Index] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        bounds = _bounds(index or (), shape)
        devices_at.setdefault(str(bounds), []).append(device)
        index_at[str(bounds)] = bounds
    parts: list[jax.Array] = []
    for key, devices in devices_at.items():
        block = read(index_at[key])
        copies = [
            jax.device_put(block, SingleDeviceSharding(device, memory_kind=sharding.memory_kind)) for device in devices
        ]
        parts += jax.block_until_ready(copies)  # else blocks that are still copied pile up
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)


def on_host(array: Any, index: tuple[int, ...] = (), *, only_first_process: bool = False) -> np.ndarray | None:
    """array[index] in the host's memory, of which JAX keeps no copy.

    Args:
      array: of any sharding. Where it has devices of other processes, all processes call this together.
      index: of the first axes, as a layer's, or a layer's and an expert's.
      only_first_process: whether the processes but the first only help: they get None.
    """
    wanted = not (only_first_process and jax.process_index())
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        gathered = _gathered(array, index).addressable_data(0)
        return np.asarray(gathered) if wanted else None
    if not wanted:
        return None
    lead, rest = tuple(slice(i, i + 1) for i in index), array.shape[len(index) :]
    return block_of(array, (*lead, *_bounds((slice(None),) * len(rest), rest))).reshape(rest)


def block_of(array: Any, index: Index) -> np.ndarray:
    """array[index] in the host's memory; of a jax.Array from the parts of its devices, without a collective.

    Raises:
      ValueError: an array with parts on other processes' devices.
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
        if overlap == list(bounds):  # a new jax.Array, for each keeps what NumPy has once read of it
            part = jax.make_array_from_single_device_arrays(shard.data.shape, shard.data.sharding, [shard.data])
        else:
            part = shard.data[_within(overlap, bounds)]
        block[_within(overlap, index)] = np.asarray(part)
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
    cuts = [*sharding.spec, *(None,) * array.ndim]

    def one(x: jax.Array, index: tuple[int, ...]) -> jax.Array:
        for i, cut in zip(index, cuts, strict=False):
            x = lax.dynamic_index_in_dim(x, i, keepdims=False) if cut is None else _summed_alone(x, i)
        return x

    return jax.jit(one, out_shardings=everywhere)(array, index)


def _summed_alone(x: jax.Array, i: int | jax.Array) -> jax.Array:
    """x[i] by a sum of its bits and of zeros: where devices share the first axis they send one slice, not all of x."""
    bits = lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    is_it = (jnp.arange(x.shape[0]) == i).reshape(-1, *(1,) * (x.ndim - 1))
    return lax.bitcast_convert_type(jnp.sum(jnp.where(is_it, bits, 0), axis=0, dtype=bits.dtype), x.dtype)


def _within(part: Iterable[slice], whole: Index) -> Index:
    """The place of a part in what it is a part of."""
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(part, whole, strict=True))


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> Index:
    """The index with start and stop on each axis."""
    return tuple(slice(*axis.indices(size)[:2]) for axis, size in zip(index, shape, strict=True))


def _flat(tree: Mapping[Any, Any], path: Path = ()) -> dict[Path, Any]:
    found: dict[Path, Any] = {}
    for key, value in tree.items():
        found |= _flat(value, (*path, key)) if isinstance(value, Mapping) else {(*path, key): value}
    return found


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))
