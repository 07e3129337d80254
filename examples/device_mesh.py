"""The devices of a run: its mesh, how parameters, optimizer state and batches lie on it, and its processes."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from flax_layers import sharding

RULES = sharding.FSDP_TENSOR
AXES = {
    "data": "windows of a batch",
    "fsdp": "windows and, at rest, parameters",
    "tensor": "columns or rows of the products",
}


def mesh_sizes(text: str) -> dict[str, int]:
    """The sizes in "data=2,fsdp=2,tensor=2", for argparse."""
    sizes: dict[str, int] = {}
    for item in text.split(","):
        name, _, size = item.partition("=")
        if name not in AXES:
            raise argparse.ArgumentTypeError(f"unknown axis {name!r} in {text!r}; axes are {', '.join(AXES)}")
        if name in sizes:
            raise argparse.ArgumentTypeError(f"{name} comes twice in {text!r}")
        if not size.isdecimal() or int(size) < 1:
            raise argparse.ArgumentTypeError(f"{item!r} in {text!r} must be {name}=SIZE, a positive integer")
        sizes[name] = int(size)
    return sizes


def make_mesh(sizes: dict[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of these devices, by default all of all processes.

    Raises:
      ValueError: the sizes' product is not the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    count = math.prod(sizes.values())
    if count != len(devices):
        text = ",".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(
            f"{text}: the sizes multiply to {count}, and there are {len(devices)} devices "
            f"(processes: {jax.process_count()})"
        )
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes), devices=devices)


def state_shardings(tree: Any, mesh: Mesh | None) -> Any:
    """The sharding of each array of a training state; gradients and an optimizer's moments have their parameters'.

    Kernels are sharded over "fsdp" and "tensor", along one side or both; norms and counts are on every device.

    Raises:
      ValueError: a parameter that the mesh does not divide evenly.
    """
    if mesh is None:
        device = SingleDeviceSharding(jax.local_devices()[0])
        return jax.tree.map(lambda x: device, tree)
    return sharding.parameter_shardings(tree, mesh, RULES)


def batch_sharding(mesh: Mesh, windows: int) -> NamedSharding:
    """The sharding of windows (B, T + 1): over "data" and "fsdp", or on every device if these do not divide them."""
    axes = batch_axes(mesh)
    return NamedSharding(mesh, P(axes) if windows % batch_ways(mesh) == 0 else P())


def batch_axes(mesh: Mesh) -> tuple[str, ...]:
    return tuple(name for name in ("data", "fsdp") if name in mesh.shape)


def batch_ways(mesh: Mesh | None) -> int:
    """Into how many parts a batch is cut."""
    return 1 if mesh is None else math.prod(mesh.shape[name] for name in batch_axes(mesh))


def put(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """The array, which every process has, on the mesh; each process copies what its own devices are to have."""
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def fetch(array: jax.Array) -> np.ndarray:
    """The array in the host's memory, of all processes."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def add_process_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("several processes, each started with the same arguments but --process")
    group.add_argument("--distributed", action="store_true", help="in a job of Slurm or Open MPI, which say the rest")
    group.add_argument("--coordinator", metavar="HOST:PORT", help="of the first process, where no such job does")
    group.add_argument("--processes", type=int, metavar="N", help="how many there are")
    group.add_argument("--process", type=int, metavar="I", help="which this one is, from 0")


def start_processes(arguments: list[str] | None, parser: argparse.ArgumentParser) -> None:
    """Joins this process with the others, before jax looks for devices."""
    options = parser.parse_known_args(arguments)[0]
    by_hand = (options.coordinator, options.processes, options.process)
    if any(x is not None for x in by_hand):
        if None in by_hand:
            parser.error("--coordinator, --processes and --process come together")
        if not 0 <= options.process < options.processes:
            parser.error(f"--process {options.process} must be from 0 to --processes - 1 = {options.processes - 1}")
    elif not options.distributed:
        return
    try:
        jax.distributed.initialize(*by_hand)
    except (RuntimeError, ValueError) as error:
        parser.error(
            f"--distributed: {error} Outside of a job of Slurm or Open MPI give --coordinator, --processes, --process"
            if None in by_hand
            else f"--coordinator {options.coordinator}: {error}"
        )


def greatest(value: int) -> int:
    """The greatest of what the processes give, which all call this together."""
    if jax.process_count() == 1:
        return value
    return int(np.max(multihost_utils.process_allgather(np.int32(value))))


def in_first_process(action: Callable[[], None], error: type[Exception]) -> None:
    """Runs the action in the first process; an error there is one in every process, so that none waits for it."""
    raised: Exception | None = None
    if jax.process_index() == 0:
        try:
            action()
        except error as caught:
            raised = caught
    if greatest(raised is not None):
        raise raised or error("the first process says why not")
