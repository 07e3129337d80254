"""Advice to a user on products in XLA's form, passes between products, and products too small to gain."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jax.extend import core

from coda_jax.epilogue import Axis
from coda_jax.epilogue.dtypes import FACTORS, is_of_8_bits
from coda_jax.jaxprs.graph import Array, Graph
from coda_jax.jaxprs.source_lines import called_directly
from coda_jax.lowering.addressing import unaligned_rows
from coda_jax.lowering.launch import folds
from coda_jax.primitives.gemm_primitive import PRIMITIVES
from coda_jax.primitives.spec import GemmSpec
from coda_jax.tiles import arch
from coda_jax.tiles.constants import CONSTANTS
from coda_jax.tools.unfused import Unfused

if TYPE_CHECKING:
    from coda_jax.tools.explain import Product

_JOIN_PRODUCTS = ", or join those that read the same array: coda.gemm(x, (w1, w2), ...)"
_JOIN_LAYERS = (
    "Call both sides in one function under coda.fuse, as the blocks and models of flax_layers do, or in one "
    "coda.block: epilogues make what needs one tile and sums over its rows, and the plan says why another stays a pass"
)
_WRITE_PRODUCTS = (
    "Put these lines in a function under coda.fuse, or write each product as a coda.gemm with what follows it as its "
    "epilogue="
)
_KEEP_NORM = (
    "An RMSNorm that products alone read is applied behind them, without a pass; a LayerNorm takes one, for its mean "
    "and its variance are summed over whole rows first"
)
_WORTH_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Advice:
    """A change that a user could make.

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


class Calls:
    """A jaxpr's calls of products: their common properties that a `Product` lacks."""

    def __init__(self, jaxpr: core.Jaxpr) -> None:
        self._called_directly = called_directly(jaxpr, PRIMITIVES)
        self._direct: set[Product] = set()
        self._direct_kernels: dict[int, Product] = {}  # by the equation's id
        self._weight_share: dict[Product, float] = {}
        self._readers: dict[Any, list[Product]] = collections.defaultdict(list)
        self._sum_rows: set[Product] = set()
        self._batches: dict[Product, tuple[Any, str]] = {}

    def add(self, product: Product, equation: core.JaxprEqn) -> None:
        """Takes one call into account."""
        spec: GemmSpec = equation.params["spec"]
        factors = self._called_directly.pop(id(equation), [])  # once, even if the jaxpr is called several times
        if factors:
            self._direct.add(product)
            if product.reason is None:
                self._direct_kernels[id(equation)] = product
        if not spec.transpose_a and not spec.transpose_b:
            for factor in factors:
                self._readers[factor].append(product)
        if spec.transpose_a:
            self._sum_rows.add(product)
        flat = spec.matrices.spec_of_matrices
        if any(flat.batched) and not folds(flat):
            rows = spec.matrices.flat_types([v.aval for v in equation.invars])[0].shape[-2]
            self._batches[product] = rows, _hinder_of_rows(flat)
        aval: Any = equation.invars[1].aval
        if product.cost is not None and all(isinstance(size, int) for size in aval.shape):
            self._weight_share[product] = math.prod(aval.shape) * aval.dtype.itemsize / product.cost.bytes

    def is_direct(self, product: Product) -> bool:
        """Whether the program itself calls it, not a block, so that the program chooses its operands and outputs."""
        return product in self._direct

    def transposed_copies(self, graphs: Iterable[Graph]) -> dict[tuple[Product, str, str, int], int]:
        """The kernels' factors that the program transposes first, and how often: product, factor, change and bytes.

        Left out are the backward pass's, whose factors are the forward pass's, and those of 8 bits, which lie one way.
        """
        found: collections.Counter[tuple[Product, str, str, int]] = collections.Counter()
        for graph in graphs:
            for one in graph.operations:
                product = None if one.is_backward else self._direct_kernels.get(id(one.equation))
                if product is None:
                    continue
                spec: GemmSpec = one.equation.params["spec"]
                factors = (("a", spec.transpose_a), ("b", spec.transpose_b))
                for (name, flag), batched, array in zip(factors, spec.batched, one.inputs, strict=False):
                    may_change = not (is_of_8_bits(array.dtype) or (name == "a" and spec.ragged))
                    if may_change and array.bytes and _is_transposed_matrix(array, batched):
                        change = f"Leave out transpose_{name}" if flag else f"Pass transpose_{name}=True"
                        found[product, name, change, array.bytes] += graph.times
        return found

    def sums_rows(self, product: Product) -> bool:
        """Whether a is transposed, as for a weight's gradient: more rows make no result larger."""
        return product in self._sum_rows

    def batch(self, product: Product) -> tuple[Any, str] | None:
        """The rows of each product of a batch that `jax.vmap` made, and why they are not one product of all rows."""
        return None if self.sums_rows(product) else self._batches.get(product)

    def reads_weights(self, product: Product) -> bool:
        """Whether b is most of its traffic."""
        return not self.sums_rows(product) and self._weight_share.get(product, 0.0) > 0.5

    def share_a_factor(self, products: Iterable[Product]) -> bool:
        """Whether two of them that the program itself calls multiply the same array."""
        among = set(products)
        return any(sum(one in among for one in readers) > 1 for readers in self._readers.values())


def advise(
    products: Mapping[Product, int],
    calls: Calls,
    between: Mapping[Unfused, int],
    graphs: Iterable[Graph],
    notes: Mapping[str, int],
    remedies: Mapping[str, str],
    device: str | None,
) -> tuple[Advice, ...]:
    """All advice: fallbacks first, then notes, copies of factors, passes that blocks would fuse, and products that gain
    nothing.
    """
    passes = _pass_advice(between) if device is not None else ()
    return (
        *_fallback_advice(products),
        *_note_advice(notes, remedies),
        *_copy_advice(calls, graphs),
        *passes,
        *_small_product_advice(products, calls, device),
    )


def _copy_advice(calls: Calls, graphs: Iterable[Graph]) -> Iterator[Advice]:
    for (product, name, change, bytes_), count in calls.transposed_copies(graphs).items():
        yield Advice(
            _named([(product, count)]),
            f"its {name} is a transposed copy of {bytes_} bytes, which XLA makes first",
            f"{change}, with {name} as it lies before: the kernel reads it so",
        )


def _is_transposed_matrix(array: Array, batched: bool) -> bool:
    """Whether an array, a batch of matrices or one, is the transpose of each."""
    if array.maker is None or array.maker.name != "transpose" or array.shape != array.maker.outputs[0].shape:
        return False
    rank = len(array.shape)
    swapped = (*range(rank - 2), rank - 1, rank - 2)
    return rank == 2 + batched and tuple(array.maker.equation.params["permutation"]) == swapped


def _pass_advice(between: Mapping[Unfused, int]) -> Iterator[Advice]:
    """Advice on passes next to coda_jax's products, and on those between other products, if they are large enough."""
    in_all = sum(one.bytes * count for one, count in between.items())
    kinds = ((False, True, _JOIN_LAYERS), (False, False, _WRITE_PRODUCTS), (True, True, _KEEP_NORM))
    for is_layer_norm, has_kernels, change in kinds:
        passes = [
            (one, count)
            for one, count in between.items()
            if one.is_layer_norm == is_layer_norm and (one.has_kernels == has_kernels or is_layer_norm)
        ]
        passes.sort(key=lambda item: -item[0].bytes * item[1])
        large = [(one, count) for one, count in passes if one.bytes * count > max(in_all / 50, _WORTH_BYTES)]
        if not large:
            continue
        names = list(dict.fromkeys(name for one, _ in large for name in one.between))
        told = [f"{_few(one.operation.split('+'), '+')} in {one.source or 'an unknown line'}" for one, _ in large]
        told = list(dict.fromkeys(told))
        megabytes = sum(one.bytes * count for one, count in large) / 1e6
        of, why = (" for LayerNorms", "") if is_layer_norm else ("", ", for no block has both sides")
        yield Advice(
            f"{_count(sum(count for _, count in large), 'pass')} of XLA's{of} between {_few(names, ', ')}, forward",
            f"{megabytes:.0f} MB{why}: {_few(told, '; ')}",
            change,
        )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'es' * (number != 1)}"


def _few(names: Sequence[str], separator: str) -> str:
    """The names, joined; at most four, or three and the number of others."""
    return separator.join(names if len(names) <= 4 else [*names[:3], f"{len(names) - 3} more"])


def _fallback_advice(products: Mapping[Product, int]) -> Iterator[Advice]:
    """One advice for each remedy and reason."""
    groups: dict[tuple[str, str], dict[str, int]] = collections.defaultdict(dict)
    for product, count in products.items():
        if product.reason is not None and product.remedy is not None:
            group = groups[" ".join(product.reason.split()), product.remedy]
            group[product.epilogue] = group.get(product.epilogue, 0) + count
    for (reason, remedy), group in groups.items():
        names = ", ".join(f"{count} {name}" for name, count in group.items())
        yield Advice(names, f"XLA's form: {reason}", remedy)


def _note_advice(notes: Mapping[str, int], remedies: Mapping[str, str]) -> Iterator[Advice]:
    for note, count in notes.items():
        if remedies.get(note):
            operator, _, reason = note.partition(": ")
            yield Advice(f"{count} {operator}" if count > 1 else operator, reason.rstrip("."), remedies[note])


def _small_product_advice(products: Mapping[Product, int], calls: Calls, device: str | None) -> Iterator[Advice]:
    """Advice on kernels whose launch is most of their time, and on those that are bound by memory.

    A block's product only gets advice if its weights are read for few rows: the block's plan chose the rest.
    """
    if device not in CONSTANTS:
        return
    launch_us = min(CONSTANTS[device].start) * arch.of(device).unit_nanoseconds / 1e3
    kernels = [
        (product, count, product.cost, product.cost.us)
        for product, count in products.items()
        if product.reason is None and product.cost is not None and product.cost.us is not None
    ]
    if small := [(product, count) for product, count, _, us in kernels if us < 2 * launch_us]:
        yield Advice(
            _named(small),
            "too small to gain: the launch and the first tiles' way to the chip take most of the time",
            "Give them more rows, by a larger batch"
            + (_JOIN_PRODUCTS if calls.share_a_factor(product for product, _ in small) else ""),
        )
    for product, count, cost, us in kernels:
        if us < 2 * launch_us or cost.bound != "memory":
            continue
        if (batch := calls.batch(product)) is not None:
            change = "It is a batch, by jax.vmap, of products of {} rows each, for {}".format(*batch)
        elif calls.reads_weights(product):
            change = "No tile helps; more rows would, by a larger batch: most of it is a weight that is read for few"
        elif not calls.is_direct(product):
            continue
        elif calls.sums_rows(product):
            change = "No tile helps; more rows would, by a larger batch: its result is as large for few"
        else:
            change = "No tile and no larger batch helps; narrower outputs or fewer tile operands would"
        why = f"bound by memory: {cost.flops / cost.bytes:.0f} flops a byte"
        yield Advice(_named([(product, count)]), why, change)


def _hinder_of_rows(spec: GemmSpec) -> str:
    """Why a batch of products of matrices does not become rows of one."""
    a_batched, b_batched, _ = spec.split(spec.batched)
    if b_batched or not a_batched:
        return "each has a b of its own"
    if any(reduction.axis is not Axis.ROW for reduction in spec.program.reductions):
        return "an output is reduced over rows: reduce the product's result outside of it"
    return "an operand or a result of its epilogue differs in the batch otherwise than by rows"


def _named(products: Sequence[tuple[Product, int]]) -> str:
    """The text for these products: the first one with its factors, and the number of others."""
    (first, count), *others = products
    named = f"{count} {first.epilogue}, {first.a} @ {first.b}"
    return f"{named}, and {sum(count for _, count in others)} others" if others else named


def remedy_of(avals: Sequence[Any], spec: GemmSpec, reason: str) -> str | None:
    """The change by which a product of these arguments, in XLA's form for this reason, would become a kernel."""
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
    """The advice to pad n or k, or m of a transposed a, and to which size; None if all are aligned."""
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
    return f"Pad {' and '.join(each)}, with zeros{', and slice the result' if {*units} - {'k'} else ''}"
