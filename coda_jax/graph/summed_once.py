"""Products that a sum alone reads, as one of several pairs of factors, where a mesh may shard what they sum over.

As dq Wq^T + dk Wk^T + dv Wv^T, the gradient of what separate weights multiply: under tensor parallelism each device has
some columns of dq, dk and dv, adds its three products, and the sum is reduced over the mesh once. Where the mesh shards
rows alone, each device runs the products that it would run without this.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence

from coda_jax.epilogue.dtypes import is_of_8_bits
from coda_jax.epilogue.values import same_size
from coda_jax.graph.constraint import Constraint
from coda_jax.graph.plan import has_halves
from coda_jax.graph.values import Product, Value
from coda_jax.primitives.mesh_types import sizes_in_use


def summed_once(terms: Sequence[Value]) -> list[Value]:
    """The terms of a sum that nothing else reads, with one product in the place of those that may be one."""
    added: dict[Value, Value | None] = {}
    for products in alike(terms):
        added |= {**dict.fromkeys(products), products[0]: sum_of(products)}
    made = (added.get(x, x) for x in terms)
    return [x for x in made if x is not None]


def alike(terms: Sequence[Value]) -> list[list[Product]]:
    """The products among these terms that may be one, several each, in their order."""
    together: dict[Hashable, list[Product]] = defaultdict(list)
    for x in terms:
        if isinstance(x, Product) and _may_be_added(x):
            together[x.transpose_b].append(x)
    found = []
    for first, *others in together.values():
        found.append([first, *(x for x in others if _asks_as(x, first))])
    return [products for products in found if len(products) > 1]


def _may_be_added(x: Product) -> bool:
    """True for a product of the mesh's rows whose k each mesh axis divides."""
    sizes, k = sizes_in_use(), x.a.shape[0 if x.transpose_a else -1]
    if not sizes or not isinstance(k, int) or any(k % size for size in sizes):
        return False
    is_plain = x.groups is None and x.scales is None and x.spec_of_a is None and not is_of_8_bits(x.a.dtype)
    is_whole = not (has_halves(x.a) or has_halves(x.b))
    return is_plain and is_whole and not x.transpose_a and not any(same_size(size, 1) for size in x.shape)


def sum_of(products: Sequence[Product]) -> Product:
    """The product of all pairs of factors of these, which are of one shape and layout."""
    first = products[0]
    pairs = [pair for x in products for pair in x.pairs]
    made = Product(*pairs[0], transpose_b=first.transpose_b, like=first.like, added=pairs[1:])
    made.spec, made.out_spec = first.spec, first.out_spec
    made.made_of = frozenset().union(*(x.made_of for x in products))
    made.is_wide, made.source = any(x.is_wide for x in products), products[-1].source
    return made


def _asks_as(x: Product, other: Product) -> bool:
    """True for a product that is sharded as another, as far as the function says so."""
    each = ((x.spec, other.spec), (x.out_spec, other.out_spec))
    return all(
        one is two or (isinstance(one, Constraint) and isinstance(two, Constraint) and one.asks_as(two))
        for one, two in each
    )
