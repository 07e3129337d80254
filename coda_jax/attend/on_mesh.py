"""Attention over the devices of a mesh: which mesh axes shard which of its axes, and what each device computes.

Sequences, heads and queries may be sharded; keys are gathered, and so are the columns of heads. Each device has the key
heads of its queries: where there are fewer than shards, several devices have the same one. dk and dv are summed over
the devices that share keys: those with other queries, and those with other heads of the same key head; gradients of a
score's arrays over those that share the array. Bits of dropout are those of an element's place in the whole: a device
has those of its rows, and all keys.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import ArrayMapping, CompoundFactor, SdyShardingRule
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend import core as jex_core
from jax.interpreters import mlir

from coda_jax import ffi
from coda_jax.attend.costs import pairs
from coda_jax.attend.masks import Sizes, intervals_of_band
from coda_jax.attend.primitive import FORMS, is_backward
from coda_jax.attend.spec import AttentionSpec
from coda_jax.lowering.on_devices import digest_of, lower_partition, mesh_of, parts_of, scattered_sum
from coda_jax.lowering.xla_partitioner import Partition, ShardedArray, mesh_of_program, partitioned_call
from coda_jax.primitives.fallbacks import is_strict
from coda_jax.primitives.mesh_types import MeshAxes, cutting_evenly, explicit_cuts, partition_spec

# (*arrays) -> the results of a primitive
Form = Callable[..., list[jax.Array]]
# (arrays, spec, pairs of each head that see each other) -> the form of attention of a device's shards
FormOf = Callable[[Sequence[Any], AttentionSpec, int | None], Form]


class Plan(NamedTuple):
    """The mesh axes that shard attention, the major one first.

    Attributes:
      batch, heads, rows: the sequences, the heads of queries and the queries.
      key_heads: the first of `heads`, which shard the heads of keys. The others share them.
      key_scatters: for dk and for dv, those of the mesh axes over which it is summed that shard its keys.
    """

    batch: MeshAxes
    heads: MeshAxes
    rows: MeshAxes
    key_heads: MeshAxes
    key_scatters: tuple[MeshAxes, ...]

    @property
    def sharing(self) -> MeshAxes:
        """The mesh axes of heads over which devices have the same heads of keys."""
        return self.heads[len(self.key_heads) :]

    def specs(self, arrays: Sequence[Any], spec: AttentionSpec) -> tuple[Any, ...]:
        """The shardings of the arguments, which have shapes."""
        arrays, operands = spec.split(arrays)
        of_queries = partition_spec([self.batch, self.rows, self.heads, ()])
        of_keys = partition_spec([self.batch, (), self.key_heads, ()])
        of_rows = partition_spec([self.batch, self.heads, self.rows])
        of_masks = {
            "intervals": partition_spec([self.batch, (), self.rows]),
            "query_ids": partition_spec([self.batch, self.rows]),
            "key_ids": partition_spec([self.batch, ()]),
            "row_bits": of_rows,
        }
        others = [of_masks.get(name) for name in spec.mask.fields]
        others += [None] * (spec.count - 3 - len(others))
        for i, x in enumerate(arrays[3 : spec.count]):
            if others[i] is None:  # sinks, or of all pairs, with axes of size 1
                each = zip(x.shape, (self.batch, self.heads, self.rows, ()), strict=False)
                others[i] = partition_spec([() if size == 1 else names for size, names in each])
        results = (of_queries, of_rows, of_queries, of_rows)  # y, lse and their cotangents
        scalars = [partition_spec([])] * len(operands)
        return (of_queries, of_keys, of_keys, *others, *results[: len(arrays) - spec.count], *scalars)

    def result_specs(self, arrays: Sequence[Any], spec: AttentionSpec, *, is_backward: bool) -> tuple[Any, ...]:
        """The shardings of y, lse and what is made of y, or of the backward pass's results, of such arguments."""
        of_queries = partition_spec([self.batch, self.rows, self.heads, ()])
        of_rows = partition_spec([self.batch, self.heads, self.rows])
        if not is_backward:
            of_y = spec.results
            y = [of_queries] if of_y is None or of_y.keeps_y else []
            transposed = partition_spec([self.heads, (), self.batch, self.rows])
            stores = () if of_y is None else of_y.program.stores
            tiles = (transposed if store.transposed else of_queries for store in stores)
            maxima = [partition_spec([])] * (0 if of_y is None else len(of_y.program.reductions))
            return *y, of_rows, *tiles, *maxima
        gradients = spec.gradient_arrays(self.specs(arrays, spec))
        return of_queries, *self.key_specs, *([of_rows] if spec.mask.has_sinks else []), *gradients

    @property
    def key_specs(self) -> list[Any]:
        """The shardings of dk and dv."""
        return [partition_spec([self.batch, x, self.key_heads, ()]) for x in self.key_scatters]

    def gradient_sums(self, arrays: Sequence[Any], spec: AttentionSpec) -> list[MeshAxes]:
        """For each gradient of a score's array the mesh axes over which devices share the array.

        Args:
          arrays: the arguments, which have shapes, unsharded.
        """
        over = (self.batch, self.heads, self.rows)
        return [
            tuple(name for size, names in zip(x.shape, over, strict=False) if size == 1 for name in names)
            for x in spec.gradient_arrays(arrays)
        ]


def plan(
    shapes: Sequence[Sequence[int]],
    arguments: Sequence[Sequence[MeshAxes]],
    results: Sequence[Sequence[MeshAxes]],
    mesh_sizes: Mapping[str, int],
    *,
    is_backward: bool,
) -> Plan:
    """The plan that follows how y or dq is sharded, else how q is; XLA reshards arrays that are sharded otherwise.

    Mesh axes that do not divide an axis evenly do not shard it.

    Args:
      shapes: of q, k, v and the other arguments, unsharded.
      arguments, results: for each axis of each array the mesh axes that shard it. Results are y, or what has its axes,
        or dq, dk and dv.
      mesh_sizes: the number of devices along each mesh axis.
    """
    batch, length, heads, _ = shapes[0]
    keys, key_heads = shapes[1][1:3]
    given: set[str] = set()

    def over(axis: int, *sizes: int) -> MeshAxes:
        names = next((x for cuts in (*results[:1], arguments[0]) if (x := _free(cuts[axis], given))), ())
        found = cutting_evenly(names, mesh_sizes, *sizes)
        given.update(found)
        return found

    batches, of_heads, rows = over(0, batch), over(2, heads), over(1, length)
    count = len(of_heads)
    while key_heads % math.prod(mesh_sizes[name] for name in of_heads[:count]):
        count -= 1
    shared = {*rows, *of_heads[count:]}
    wanted = (tuple(name for name in cuts[1] if name in shared) for cuts in results[1:3])
    scatters = tuple(cutting_evenly(names, mesh_sizes, keys) for names in wanted) if is_backward else ()
    return Plan(batches, of_heads, rows, of_heads[:count], scatters)


def _free(names: MeshAxes, given: set[str]) -> MeshAxes:
    return tuple(name for name in names if name not in given)


def on_each_device(
    *shards: jax.Array,
    spec: AttentionSpec,
    primitive: jex_core.Primitive,
    plan: Plan,
    form_of: FormOf,
    mesh_sizes: Mapping[str, int],
    sums: Sequence[MeshAxes],
    seen: int | None,
) -> list[jax.Array]:
    """The results of a device's shards, in a region where the plan's mesh axes are manual.

    Args:
      sums: as `Plan.gradient_sums` has them.
      seen: the pairs of each head that see each other, on all devices that have queries of it.
    """
    (q, k, v, *others), operands = spec.split(shards)
    heads_of_device = _KeyHeads.of(q.shape[2], k.shape[2], plan.sharing, mesh_sizes)
    k, v = heads_of_device.taken(k), heads_of_device.taken(v)
    batch, rows, heads, _ = q.shape
    if plan.rows and spec.score is not None and spec.score.has_rows:
        at = spec.count - 3
        own = lax.axis_index(plan.rows) * rows + jnp.arange(rows, dtype=jnp.int32)
        others = [*others[:at], own.reshape(1, 1, rows, 1), *others[at:]]
        spec = dataclasses.replace(spec, score=spec.score.with_rows_of_array())
    if plan.rows and (spec.mask.left, spec.mask.right) != (None, None):
        sizes = Sizes(batch, heads, rows, k.shape[1])
        others = [intervals_of_band(spec.mask, lax.axis_index(plan.rows) * rows, sizes), *others]
        spec = dataclasses.replace(spec, mask=dataclasses.replace(spec.mask, left=None, right=None, intervals=1))
    arrays = [q, k, v, *others, *operands]
    share = math.prod(mesh_sizes[name] for name in plan.rows)
    results = form_of(arrays, spec, None if seen is None else seen // share)(*arrays)
    if not is_backward(primitive):
        return _of_all_devices(results, spec, plan)
    dq, dk, dv, *others = results
    axes = plan.rows + plan.sharing
    each = zip((dk, dv), plan.key_specs, strict=True)
    of_keys = (_summed(heads_of_device.place(x), axes, wanted) if axes else x for x, wanted in each)
    first = len(others) - len(sums)
    of_score = (_summed(x, over, jax.P()) if over else x for x, over in zip(others[first:], sums, strict=True))
    return [dq, *of_keys, *others[:first], *of_score]


def _of_all_devices(results: list[jax.Array], spec: AttentionSpec, plan: Plan) -> list[jax.Array]:
    """A device's results, whose maxima, the last of them, become those over all devices."""
    axes = plan.batch + plan.heads + plan.rows
    count = 0 if spec.results is None else len(spec.results.program.reductions)
    first = len(results) - count
    return [*results[:first], *(lax.pmax(x, axes) if axes else x for x in results[first:])]


def _like_queries(results: Sequence[Any], spec: AttentionSpec, *, is_backward: bool) -> Sequence[Any]:
    """The results of a primitive that have the axes of q, or dq, dk and dv."""
    of_y = spec.results
    if is_backward or of_y is None:
        return results
    first = 1 + of_y.keeps_y
    stores = zip(results[first:], of_y.program.stores, strict=False)
    return [*results[: first - 1], *(x for x, store in stores if not store.transposed)]


def _summed(x: jax.Array, axes: MeshAxes, spec: Any) -> jax.Array:
    """The sum over the devices, which is rounded as it is sent: bfloat16 as such, float16 not."""
    sent = x.dtype if x.dtype == jnp.bfloat16 else jnp.promote_types(x.dtype, jnp.float32)
    return scattered_sum(x.astype(sent), axes, spec).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class _KeyHeads:
    """The heads of keys that a device needs of those that it shares with others.

    Attributes:
      count: how many it shares.
      taken_heads: their numbers; None if it needs all.
    """

    count: int
    taken_heads: jax.Array | None

    @classmethod
    def of(cls, heads: int, count: int, sharing: MeshAxes, mesh_sizes: Mapping[str, int]) -> _KeyHeads:
        """The heads of a device with so many heads of queries, by how many of keys its group of devices shares."""
        if not sharing:
            return cls(count, None)
        shards = math.prod(mesh_sizes[name] for name in sharing)
        repeats = math.lcm(count, shards) // count  # of each head, so that the shards divide them evenly
        own = count * repeats // shards
        assert heads % own == 0, (heads, count, shards)
        return cls(count, (lax.axis_index(sharing) * own + jnp.arange(own)) // repeats)

    def taken(self, x: jax.Array) -> jax.Array:
        """The heads of x (B, S, K, D) that the device needs."""
        return x if self.taken_heads is None else jnp.take(x, self.taken_heads, axis=2, mode="clip")

    def place(self, x: jax.Array) -> jax.Array:
        """`taken` the other way, for gradients: the sum of what the device has of each head, in one order; else 0."""
        if self.taken_heads is None:
            return x
        is_of_head = self.taken_heads[:, None] == jnp.arange(self.count)
        terms = jnp.where(is_of_head[..., None], x[:, :, :, None], 0)
        return jnp.sum(terms, axis=2, dtype=jnp.promote_types(x.dtype, jnp.float32)).astype(x.dtype)


def lower_explicit(
    ctx: mlir.LoweringRuleContext, *arrays: Any, spec: AttentionSpec, primitive: jex_core.Primitive, form_of: FormOf
) -> Any:
    """A shard_map over the explicit axes, as the types of arguments and results say."""
    avals: Sequence[Any] = ctx.avals_in
    cuts = list(map(explicit_cuts, avals)), list(map(explicit_cuts, ctx.avals_out))
    partition = _partition([x.shape for x in avals], *cuts, mesh_of(avals).shape, avals, spec, primitive, form_of)
    return lower_partition(ctx, *arrays, partition=partition)


def parts_of_types(avals: Sequence[Any], results: Sequence[Any], spec: AttentionSpec) -> tuple[list[Any], list[Any]]:
    """Types of what a device has of the arguments and of the results, whose types are over explicit axes."""
    sizes, backward = mesh_of(avals).shape, len(results) >= 3 and spec.results is None
    cuts = list(map(explicit_cuts, avals)), _like_queries(list(map(explicit_cuts, results)), spec, is_backward=backward)
    planned = plan([x.shape for x in avals], *cuts, sizes, is_backward=backward)
    result_specs = planned.result_specs(avals, spec, is_backward=backward)
    return parts_of(avals, planned.specs(avals, spec), sizes), parts_of(results, result_specs, sizes)


def _partition(
    shapes: Sequence[Sequence[int]],
    arguments: Sequence[Sequence[MeshAxes]],
    results: Sequence[Sequence[MeshAxes]],
    mesh_sizes: Mapping[str, int],
    arrays: Sequence[Any],
    spec: AttentionSpec,
    primitive: jex_core.Primitive,
    form_of: FormOf,
) -> Partition:
    backward = is_backward(primitive)
    like_queries = _like_queries(results, spec, is_backward=backward)
    planned = plan(shapes, arguments, like_queries, mesh_sizes, is_backward=backward)
    each = functools.partial(
        on_each_device,
        spec=spec,
        primitive=primitive,
        plan=planned,
        form_of=form_of,
        mesh_sizes=mesh_sizes,
        sums=planned.gradient_sums(arrays, spec),
        seen=pairs(spec.mask, shapes[0][1], shapes[1][1]),
    )
    return Partition(planned.specs(arrays, spec), planned.result_specs(arrays, spec, is_backward=backward), each)


def lower_automatic(
    ctx: mlir.LoweringRuleContext, *arrays: Any, spec: AttentionSpec, primitive: jex_core.Primitive, form_of: FormOf
) -> Any:
    """A call that calls back when XLA's partitioner has decided how its arrays are sharded."""

    def unsharded(*arrays: jax.Array) -> list[jax.Array]:
        return FORMS[primitive](*arrays, spec=spec, on_cpu=False)

    def partition(
        arguments: Sequence[ShardedArray], results: Sequence[ShardedArray], sizes: Mapping[str, int]
    ) -> Partition:
        cuts = [x.mesh_axes for x in arguments], [x.mesh_axes for x in results]
        return _partition([x.shape for x in arguments], *cuts, sizes, arguments, spec, primitive, form_of)

    avals: Sequence[Any] = ctx.avals_in
    rule = sharding_rule([x.shape for x in avals], spec, primitive, mesh_of_program(ctx).size)
    call = partitioned_call(ctx, unsharded, partition, rule)

    def whole(*arrays: jax.Array) -> list[jax.Array]:
        # The persistent cache's key holds shapes and rule, but not what the callback will put in the call's place.
        digest = digest_of(primitive.name, spec, is_strict(), ffi.headers_hash())
        with set_xla_metadata(coda_attention=digest):
            return call(*arrays)

    return mlir.lower_fun(whole, multiple_results=True)(ctx, *arrays)


def sharding_rule(
    shapes: Sequence[Sequence[int]], spec: AttentionSpec, primitive: jex_core.Primitive, num_devices: int
) -> SdyShardingRule:
    """The rule that tells Shardy's propagation which axes of the arguments and the results go together.

    Heads of keys go with those of queries, but not where Shardy could not shard both by the same mesh axes: it would
    gather the queries then.
    """
    shapes, operands = spec.split(shapes)
    heads, key_heads = shapes[0][2], shapes[1][2]
    sizes: dict[str, Any] = {}
    of_heads: Any = "heads"
    of_key_heads = "heads"
    if heads != key_heads and key_heads > 1 and _shards_agree(heads, key_heads, num_devices):
        of_heads, sizes = CompoundFactor("heads", "groups"), {"groups": heads // key_heads}
    elif heads != key_heads:
        of_key_heads = "key_heads"
    replicated: list[str] = []  # the factors that are never sharded, in the order in which Shardy meets them

    def whole() -> str:
        replicated.append(f"replicated_{len(replicated)}")
        return replicated[-1]

    def queries() -> ArrayMapping:
        return ArrayMapping("batch", "rows", of_heads, whole())

    def of_rows() -> ArrayMapping:
        return ArrayMapping("batch", of_heads, "rows")

    def of_all_pairs(shape: Sequence[int]) -> ArrayMapping:
        each = zip(shape, ("batch", of_heads, "rows", None), strict=False)
        return ArrayMapping(*(whole() if size == 1 or name is None else name for size, name in each))

    def masks(field: str, shape: Sequence[int]) -> ArrayMapping:
        match field:
            case "intervals":
                return ArrayMapping("batch", whole(), "rows")
            case "query_ids":
                return ArrayMapping("batch", "rows")
            case "key_ids":
                return ArrayMapping("batch", whole())
            case "row_bits":
                return of_rows()
        return of_all_pairs(shape)  # of sinks the first two axes

    def keys(rows: str | None = None) -> ArrayMapping:
        return ArrayMapping("batch", rows or whole(), of_key_heads, whole())

    arguments = [queries(), keys(), keys(), *map(masks, spec.mask.fields, shapes[3:])]
    arguments += map(of_all_pairs, spec.score_arrays(shapes))
    if is_backward(primitive):
        arguments += [queries(), of_rows(), queries(), of_rows()]
        results = [queries(), keys("keys_of_dk"), keys("keys_of_dv")]  # sums, which may be scattered
        results += [of_rows()] if spec.mask.has_sinks else []
        results += map(of_all_pairs, spec.gradient_arrays(shapes))
    else:
        results = [*([queries()] if spec.results is None or spec.results.keeps_y else []), of_rows()]
        for store in () if spec.results is None else spec.results.program.stores:
            results.append(ArrayMapping(of_heads, whole(), "batch", "rows") if store.transposed else queries())
        results += [ArrayMapping()] * (0 if spec.results is None else len(spec.results.program.reductions))
        arguments += [ArrayMapping()] * len(operands)
    return SdyShardingRule(tuple(arguments), tuple(results), need_replication_factors=tuple(replicated), **sizes)


def _shards_agree(heads: int, key_heads: int, num_devices: int) -> bool:
    """True if any number of shards of the heads of queries divides those of keys, or is a multiple of them."""
    shards = (n for n in range(2, num_devices + 1) if num_devices % n == 0 and heads % n == 0)
    return all(key_heads % n == 0 or n % key_heads == 0 for n in shards)
