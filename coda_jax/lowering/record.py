"""The plans of products and attention in programs that are lowered or compiled already, for `coda.explain`.

How arrays are sharded over automatic mesh axes is known only while XLA compiles. What each device computes then is
recorded here, under a key that a call has in any trace of the same function. A record has names and sizes alone. Of
more than `PRODUCTS` the oldest are dropped.
"""

from __future__ import annotations

import collections
import hashlib
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

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
_plans: collections.OrderedDict[str, list[Any]] = collections.OrderedDict()


def key_of(avals: Sequence[Any], spec: Any) -> str:
    """The key of a product, or another call with a spec, of arguments of these types, whatever trace it comes from."""
    types = [(aval.shape, aval.dtype, dict(aval.sharding.mesh.shape)) for aval in avals]
    return hashlib.sha256(f"{spec}\n{types}".encode()).hexdigest()


def record(key: str, shard: NamedTuple) -> None:
    """Records how the product was planned, or what another call has in the place of a `Shard`; the latest is last."""
    with _lock:
        others = [plan for plan in _plans.pop(key, []) if plan != shard]
        _plans[key] = [*others, shard][-PLANS:]
        while len(_plans) > PRODUCTS:
            _plans.popitem(last=False)


def recorded(key: str) -> list[Any]:
    """The plans of a call so far; none where no program with it has been partitioned."""
    with _lock:
        return list(_plans.get(key, []))
