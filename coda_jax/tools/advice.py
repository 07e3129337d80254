"""What a user could change: products in XLA's form, layers that are not one block, products too small to gain."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from coda_jax.epilogue.dtypes import FACTORS, is_of_8_bits
from coda_jax.lowering.addressing import unaligned_rows
from coda_jax.primitives.spec import GemmSpec
from coda_jax.tiles.constants import CONSTANTS, UNIT_NANOSECONDS

if TYPE_CHECKING:
    from coda_jax.tools.explain import Product


@dataclasses.dataclass(frozen=True)
class Advice:
    """Something that could be changed.

    Attributes:
      about: which products, or which layer.
      why: what is lost.
      change: what to do.
    """

    about: str
    why: str
    change: str

    def __str__(self) -> str:
        return f"{self.about}: {self.why}. {self.change}"


def advise(
    products: Mapping[Product, int], notes: Mapping[str, int], remedies: Mapping[str, str], device: str | None
) -> tuple[Advice, ...]:
    """All advice: fallbacks first, then notes, then products that gain nothing."""
    return (*_of_fallbacks(products), *_of_notes(notes, remedies), *_of_small(products, device))


def _of_fallbacks(products: Mapping[Product, int]) -> Iterator[Advice]:
    """One for each remedy and reason."""
    groups: dict[tuple[str, str], dict[str, int]] = collections.defaultdict(dict)
    for product, count in products.items():
        if product.reason is not None and product.remedy is not None:
            group = groups[" ".join(product.reason.split()), product.remedy]
            group[product.epilogue] = group.get(product.epilogue, 0) + count
    for (reason, remedy), group in groups.items():
        names = ", ".join(f"{count} {name}" for name, count in group.items())
        yield Advice(names, f"XLA's form: {reason}", remedy)


def _of_notes(notes: Mapping[str, int], remedies: Mapping[str, str]) -> Iterator[Advice]:
    for note, count in notes.items():
        if remedies.get(note):
            operator, _, reason = note.partition(": ")
            yield Advice(f"{count} {operator}" if count > 1 else operator, reason.rstrip("."), remedies[note])


def _of_small(products: Mapping[Product, int], device: str | None) -> Iterator[Advice]:
    """Kernels whose launch is most of their time, and those that move more than they multiply."""
    if device not in CONSTANTS:
        return
    launch_us = min(CONSTANTS[device].start) * UNIT_NANOSECONDS / 1e3
    kernels = [
        (product, count, product.cost, product.cost.us)
        for product, count in products.items()
        if product.reason is None and product.cost is not None and product.cost.us is not None
    ]
    if small := [(product, count) for product, count, _, us in kernels if us < 2 * launch_us]:
        yield Advice(
            _named(small),
            "too small to gain: the launch and the first tiles' way to the chip take most of the time",
            "Give them more rows, by a larger batch, or join products that read the same array: "
            "coda.gemm(x, (w1, w2), ...)",
        )
    for product, count, cost, us in kernels:
        if us >= 2 * launch_us and cost.bound == "memory":
            yield Advice(
                _named([(product, count)]),
                f"bound by memory: {cost.flops / cost.bytes:.0f} flops a byte",
                "No tile helps; fewer bytes would: narrower outputs, fewer tile operands, or more rows for a weight "
                "that is read for few",
            )


def _named(products: Sequence[tuple[Product, int]]) -> str:
    """Which these are, the first one with its factors."""
    (first, count), *others = products
    named = f"{count} {first.epilogue}, {first.a} @ {first.b}"
    return f"{named}, and {sum(count for _, count in others)} others" if others else named


def remedy_of(avals: Sequence[Any], spec: GemmSpec, reason: str) -> str | None:
    """What would bring the kernel, where a product of these arguments takes XLA's form for this reason."""
    if spec.implementation == "xla":
        return "Leave out implementation='xla'"
    if "doctor" in reason or "NVRTC" in reason:
        return "python -m coda_jax.doctor says what is missing"
    if reason.startswith("the GPU has compute capability"):
        return None
    if reason.startswith("XLA partitions it"):
        return "Call it inside a jax.shard_map over all mesh axes, or make the mesh's axes explicit"
    a, b, _ = spec.split(avals)
    if is_of_8_bits(a.dtype) and (spec.transpose_a or not spec.transpose_b):
        return "Store a as (M, K) and b as (N, K), transposed where they are quantised, and give transpose_b=True"
    if a.dtype.name not in FACTORS or (a.dtype != b.dtype and not is_of_8_bits(a.dtype)):
        return "Cast both factors to bfloat16, in a layer by dtype=jnp.bfloat16; parameters may stay float32"
    if padded := _padded(avals, spec):
        return padded
    return "Leave out config, or what it fixes" if spec.config is not None else None


def _padded(avals: Sequence[Any], spec: GemmSpec) -> str | None:
    """Which of n and k, or m of a transposed a, should have which size."""
    types, matrices = spec.matrices.flat_types(avals), spec.matrices.spec_of_matrices
    a, b, _ = matrices.split(types)
    sizes = matrices.sizes(a, b)
    units: dict[str, int] = {}
    for name, size, unit in unaligned_rows(types, matrices):
        if name == "a":
            letter = "m" if spec.transpose_a else "k"
        else:
            letter = "k" if name == "b" and spec.transpose_b else "n"
            unit *= 2 if letter == "n" and 2 * size == sizes.n else 1  # the rows of one half
        units[letter] = max(unit, units.get(letter, 0))
    if not units:
        return None
    each = [
        f"{letter} from {getattr(sizes, letter)} to {-(-getattr(sizes, letter) // unit) * unit}, a multiple of {unit}"
        for letter, unit in units.items()
    ]
    return f"Pad {' and '.join(each)}, with zeros"
