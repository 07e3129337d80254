"""The plans of products in programs that are lowered or compiled already, for `coda.explain`.

How arrays are sharded over automatic mesh axes is known only while XLA compiles. What each device multiplies then is
recorded here, under a key that a product has in any trace of the same function. A record has names and sizes alone. Of
more than `PRODUCTS` the oldest are dropped.
"""

from __future__ import annotations

import collections
import hashlib
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from coda_jax.primitives.spec import GemmSpec
from coda_jax.tiles.config import KernelConfig

PRODUCTS, PLANS = 4096, 4  # the most that are recorded; plans of each


class Shard(NamedTuple):
    """The product that a device computes of a sharded one.

    Attributes:
      factors: types of its shards of a and b.
      reason: why it takes the XLA form; None where it is the kernel.
      config, origin: of the kernel, as in `Selection`.
    """

    factors: str
    reason: str | None
    config: KernelConfig | None
    origin: str


_lock = threading.Lock()  # XLA may ask in several threads
_plans: collections.OrderedDict[str, list[Shard]] = collections.OrderedDict()


def key_of(avals: Sequence[Any], spec: GemmSpec) -> str:
    """The key of a product of arguments of these types, whichever line or trace it comes from."""
    types = [(aval.shape, aval.dtype, dict(aval.sharding.mesh.shape)) for aval in avals]
    return hashlib.sha256(f"{spec}\n{types}".encode()).hexdigest()


def record(key: str, shard: Shard) -> None:
    """Records how the product was planned; the latest plan is the last."""
    with _lock:
        others = [plan for plan in _plans.pop(key, []) if plan != shard]
        _plans[key] = [*others, shard][-PLANS:]
        while len(_plans) > PRODUCTS:
            _plans.popitem(last=False)


def recorded(key: str) -> list[Shard]:
    """The plans of a product so far; none where no program with it has been partitioned."""
    with _lock:
        return list(_plans.get(key, []))
