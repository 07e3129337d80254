"""Tables of measured tiles: the user's, which `coda.tune` writes, and those that come with the library.

A table is JSON, ``{"format": 1, "devices": {device kind: {key: entry}}}``. A key is `Problem.key`, or `user_key` of it
in the user's table. An entry has the fields of a `GemmConfig` under ``config``; the rest of it is for the reader: the
epilogue's name, the median time in microseconds and that of the cost model's choice. The user's table comes first, then
the library's, whose tiles are better by energy and by time, then the cost model.

Environment, read when a product is lowered:

* ``CODA_JAX_TUNED``: the user's table (default ``tuned.json`` in the folder where compiled kernels are kept, and none
  in a job of several processes, as all must lower the same program; empty: none). A table that is named in such a job
  must be the same in all processes: `agreement.py` compares it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import json
import math
import os
import pathlib
import threading
import uuid
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from coda_jax import ffi
from coda_jax.epilogue import Program
from coda_jax.tiles import arch
from coda_jax.tiles.agreement import may_consult
from coda_jax.tiles.choose import choose_config
from coda_jax.tiles.config import GemmConfig, KernelConfig
from coda_jax.tiles.constants import by_time, constants_for, constants_in_use, tiles_by
from coda_jax.tiles.cost_model import GemmShape, cost
from coda_jax.tiles.traffic import EpilogueTraffic, element_traffic

FORMAT = 1
SHIPPED = pathlib.Path(__file__).resolve().parent / "tuned"

_Devices = Mapping[str, Mapping[str, Any]]
_reported: set[str] = set()
_reporting = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Problem:
    """A product as it is launched: all that its best tile depends on, except the device.

    Attributes:
      shape: its sizes and b's layout.
      program: its epilogue.
      dtype: of a, and of b.
      out_dtypes: of the program's stores.
      transpose_a: whether a is stored as (K, M).
      batched: flags for a, b and the operands.
      b_dtype: of b, if it differs from a's.
    """

    shape: GemmShape
    program: Program
    dtype: np.dtype
    out_dtypes: tuple[np.dtype, ...]
    transpose_a: bool
    batched: tuple[bool, ...]
    b_dtype: np.dtype | None = None

    @property
    def dtype_of_b(self) -> np.dtype:
        return self.dtype if self.b_dtype is None else self.b_dtype

    @property
    def key(self) -> str | None:
        """Its name in tables, the same in every process; None if a size is symbolic."""
        sizes = (self.shape.m, self.shape.n, self.shape.k, self.shape.batch)
        if not all(isinstance(size, int) for size in sizes):
            return None
        m, n, k, batch = sizes
        layout = "".join("NT"[transposed] for transposed in (self.transpose_a, self.shape.transpose_b))
        flags = "".join(str(int(flag)) for flag in self.batched)
        factors = " ".join(dict.fromkeys(np.dtype(dtype).name for dtype in (self.dtype, self.dtype_of_b)))
        names = " ".join(np.dtype(dtype).name for dtype in self.out_dtypes)
        digest = hashlib.sha256(f"{self.program.elementwise_text}\n{names}\n{flags}".encode()).hexdigest()[:16]
        groups = f" {self.shape.ragged} in {self.shape.groups}" if self.shape.ragged else ""
        return f"{batch}x{m}x{n}x{k}{groups} {layout} {factors} {digest}"

    def config(self, fixed: GemmConfig | None, device: str | None) -> KernelConfig:
        """`fixed` completed: the cost model of this kind of device chooses the fields that are None."""
        with arch.as_if_attached(device):
            return choose_config(self.shape, self.program, self.out_dtypes, fixed, device)


def expected_nanoseconds(problem: Problem, config: KernelConfig, device: str | None) -> int | None:
    """The expected time of a product by the cost model, for XLA's scheduler; None where the model has no constants."""
    if problem.key is None:
        return None
    constants = by_time(constants_for(device))
    with arch.as_if_attached(device):
        if config.tile.kind not in constants.of_block:
            return None
        traffic = element_traffic(problem.program, EpilogueTraffic.of(problem.program, problem.out_dtypes))
        nanoseconds = cost(problem.shape, config.tile, traffic, constants) * arch.current().unit_nanoseconds
    return None if math.isinf(nanoseconds) else max(1, round(nanoseconds))


def config_for(problem: Problem, fixed: GemmConfig | None, device: str | None) -> tuple[KernelConfig, str]:
    """The configuration of a product's kernel, and its source: "config", "tuned", "tuned by coda_jax" or "cost model".

    Args:
      fixed: the user's, which comes before all others.
      device: kind of the device it runs on; None if that is not known: then no table is read, and the cost model is
        that of `Arch.default_device`.
    """
    if fixed is not None and fixed != GemmConfig():
        return problem.config(fixed, device), "config"
    key = problem.key
    if device is not None and key is not None:
        user_table = user_path()
        user_table = user_table if may_consult(user_table, chosen_by(), tiles_by()) else None
        for path, name, origin in (
            (user_table, user_key(key, device), "tuned"),
            (shipped_path(device), key, "tuned by coda_jax"),
        ):
            entry = _devices(path, _load(path)).get(device, {}).get(name) if path else None
            if entry is not None:
                try:
                    return problem.config(_config(entry), device), origin
                except ValueError as error:
                    _warn(f"{path}: the entry '{name}' of {device} is ignored: {error}")
    return problem.config(None, device), "cost model"


def attached_device() -> str | None:
    """Kind of the attached GPUs, if there are any and all are of one kind."""
    if (named := arch.named_device()) is not None:
        return named
    try:
        kinds = {device.device_kind for device in jax.devices("cuda")}
    except RuntimeError:
        return None
    return kinds.pop() if len(kinds) == 1 else None


def user_path() -> pathlib.Path | None:
    """The table that `coda.tune` writes; None where there is none."""
    setting = os.environ.get("CODA_JAX_TUNED")
    if setting is None and (folder := ffi.cache_directory()) and jax.process_count() == 1:
        return pathlib.Path(folder, "tuned.json")
    return pathlib.Path(setting) if setting else None


def chosen_by() -> str:
    """Identifies the settings that choose tiles: the digest of the user's table, and ``CODA_JAX_TILES_BY``."""
    return f"{_digest(user_path())} {tiles_by()}"


def _digest(path: pathlib.Path | None) -> str:
    content = None if path is None else _load(path)
    return _digest_of(content) if isinstance(content, bytes) else "none"


@functools.cache
def _digest_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def user_key(key: str, device: str) -> str:
    """The key in the user's table: with "by time" if tiles are chosen so and this device's constants differ for it."""
    return key if constants_in_use(device) == constants_for(device) else f"{key} by time"


def shipped_path(device: str) -> pathlib.Path:
    """The library's table for a kind of device, which need not exist."""
    return SHIPPED / f"{device.replace(' ', '_').replace('/', '_').lower()}.json"


def entry(config: KernelConfig, *, epilogue: str, us: float, cost_model_us: float) -> dict[str, Any]:
    """A table's entry for a product."""
    times = {"us": round(us, 2), "cost_model_us": round(cost_model_us, 2)}
    return {"config": dataclasses.asdict(config), "epilogue": epilogue, **times}


def read(path: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Device kind -> key -> entry, empty where there is no such file.

    Raises:
      ValueError: the file is no table of this format.
      OSError: it cannot be read.
    """
    try:
        return _parsed(path.read_bytes())
    except FileNotFoundError:
        return {}


def _parsed(content: bytes) -> dict[str, dict[str, Any]]:
    try:
        table = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {error}") from None
    if not isinstance(table, dict) or table.get("format") != FORMAT:
        raise ValueError(f'it is not a table of tiles with "format": {FORMAT}')
    devices = table.get("devices")
    if not isinstance(devices, dict) or not all(isinstance(entries, dict) for entries in devices.values()):
        raise ValueError('its "devices" is not an object of objects')
    return devices


def update(path: pathlib.Path, device: str, entries: Mapping[str, Any]) -> None:
    """Merges entries into a table. Readers see the old table or the new one; writers wait for each other.

    Raises:
      ValueError: the file exists and is no table of this format; it is left as it is.
      OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.with_name(path.name + ".lock")):
        devices = read(path)
        devices[device] = dict(sorted({**devices.get(device, {}), **entries}.items()))
        write(path, devices)


def write(path: pathlib.Path, devices: Mapping[str, Mapping[str, Any]]) -> None:
    """Replaces a table atomically."""
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("w") as file:
            json.dump({"format": FORMAT, "devices": devices}, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    _load.cache_clear()


@contextlib.contextmanager
def _locked(path: pathlib.Path) -> Iterator[None]:
    with path.open("a") as file:
        # On a file system without locks, two simultaneous writers may lose the entries of one, but never the table.
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@functools.cache  # once a process: the kernel of a product must not change between two steps
def _load(path: pathlib.Path) -> bytes | OSError:
    """A table's text, for both its digest and its entries; or the error that reading it raised."""
    try:
        return path.read_bytes()
    except OSError as error:
        return error


@functools.cache
def _devices(path: pathlib.Path, content: bytes | OSError) -> _Devices:
    """The table's entries by device; empty if the table cannot be used."""
    if isinstance(content, FileNotFoundError):
        return {}
    try:
        if isinstance(content, OSError):
            raise content
        return _parsed(content)
    except (ValueError, OSError) as error:
        _warn(f"the table of tuned tiles {path} is ignored: {error}")
        return {}


def _config(entry: Any) -> GemmConfig:
    config = entry.get("config") if isinstance(entry, dict) else None
    names = {field.name for field in dataclasses.fields(GemmConfig)}
    if (
        not isinstance(config, dict)
        or not config.keys() <= names
        or any(type(x) is not (bool if name in ("split_k", "cooperative") else int) for name, x in config.items())
    ):
        raise ValueError(
            f"its config is {config!r}; it must be an object of GemmConfig's fields, split_k and cooperative booleans "
            "and the others integers"
        )
    return GemmConfig(**config)


def _warn(message: str) -> None:
    with _reporting:
        if message in _reported:
            return
        _reported.add(message)
    warnings.warn(message, stacklevel=2)
