"""Other libraries' bare products, timed beside ours in the same run wherever they are installed.

A module of this package a library; its `load()` gives the peers, or raises `Absent` with what is missing.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax

MODULES = ("torch_cublas", "cutlass", "quack")
FP8_MODULES = ("torch_fp8",)  # products of e4m3 factors, a (M, K) and b (N, K)
GROUPED_MODULES = ("pallas", "tokamax", "quack", "sonicmoe")  # whose load_grouped() gives grouped products
LOSS_MODULES = ("liger", "torch_cublas")  # whose load_losses() gives losses over a vocabulary
ATTENTION_MODULES = ("torch_attention",)  # whose load_attention() gives attention


class Absent(Exception):
    """The library is not here; the message says what it would need."""


@dataclasses.dataclass(frozen=True)
class Peer:
    """A product d (M, N) = op(a) op(b) in bfloat16 with float32 accumulation.

    Attributes:
      name: that of its column in the table.
      version: of the library, for the results.
      prepare: (a, b, transpose_a, transpose_b) -> the call that multiplies these jax arrays and returns d; a is (K, M)
        with transpose_a and b (N, K) with transpose_b. It launches and does not wait.
      to_jax: from what the call returns to the jax array d.
      synchronize: waits for the device; None where the call goes through XLA, in a module `jit_<name>`.
    """

    name: str
    version: str
    prepare: Callable[[jax.Array, jax.Array, bool, bool], Callable[[], Any]]
    to_jax: Callable[[Any], jax.Array] = lambda d: d
    synchronize: Callable[[], None] | None = None


class Prepared(NamedTuple):
    """A call that launches and does not wait, and what makes jax arrays of its result."""

    call: Callable[[], Any]
    to_jax: Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class GroupedPeer:
    """Grouped products of a library whose kernels run outside of XLA.

    Attributes:
      name, version, synchronize: as in `Peer`.
      includes: what its figure includes.
      prepare: (part, arguments) -> the call that computes a part of `benchmarks.moe`, by its name, on these jax arrays;
        None if the library does not have it.
    """

    name: str
    version: str
    includes: str
    prepare: Callable[[str, Sequence[jax.Array]], Prepared | None]
    synchronize: Callable[[], None]


class PreparedLoss(NamedTuple):
    """A call that launches and does not wait, the loss it gives, and the bytes it needs beside its results."""

    call: Callable[[], Any]
    value: float
    temporaries: int


@dataclasses.dataclass(frozen=True)
class LossPeer:
    """The mean cross-entropy of labels over a vocabulary, of features x (M, D) and weights w (D, V) in bfloat16.

    Attributes:
      name, version, synchronize: as in `Peer`.
      prepare: (x, w, labels, has_gradient) -> the call that computes the loss of these jax arrays, and the gradients of
        x and w if there are any. The peer's w is stored as (V, D).
    """

    name: str
    version: str
    prepare: Callable[[jax.Array, jax.Array, jax.Array, bool], PreparedLoss]
    synchronize: Callable[[], None]


class PreparedAttention(NamedTuple):
    """A call that launches and does not wait, what makes jax arrays of its results, and the bytes it needs beside."""

    call: Callable[[], Any]
    to_jax: Callable[[Any], tuple[jax.Array, ...]]
    temporaries: int


@dataclasses.dataclass(frozen=True)
class AttentionPeer:
    """Attention of a library whose kernels run outside of XLA.

    Attributes:
      name, version, synchronize: as in `Peer`.
      includes: what its figure includes.
      prepare: (case of `benchmarks.attention_cases`, jax arrays q, k, v) -> the call that gives y in a tuple; with the
        cotangent dy for a fourth array y, dq, dk and dv. None if the library does not have the case.
    """

    name: str
    version: str
    includes: str
    prepare: Callable[[Any, Sequence[jax.Array]], PreparedAttention | None]
    synchronize: Callable[[], None]


def available(modules: Iterable[str] = MODULES, load: str = "load") -> list[Any]:
    """The peers that a function of this name gives and that are installed here; says in a line which are, which not."""
    found: list[Any] = []
    for module in modules:
        try:
            peers = getattr(importlib.import_module(f"{__name__}.{module}"), load)()
        except Absent as reason:
            print(f"peer {module}: absent, {reason}")
            continue
        print(f"peer {module}: {peers[0].version}")
        found += peers
    return found


def versions(peers: Iterable[Any]) -> str:
    """The versions of the peers' libraries, each once, for the results."""
    return "; ".join(dict.fromkeys(peer.version for peer in peers))
