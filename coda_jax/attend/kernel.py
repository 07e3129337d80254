"""The kernels' side of attention: their tiles, sources and launches, and the masks' tiles as bits.

The forward pass is one kernel, the backward pass three: the rows' statistics, the gradients, and dq in rows. Of maps of
the gradients, columns of joined matrices, the second makes those of dk and dv, and the third those of dq in its place.

A mask that is a band needs no arrays. Of any other one the tiles that are seen, at all or entirely, are found here,
from what all queries or keys of a tile have in common; so they may be a few more than are needed. They depend on
nothing but the mask's arrays: in a loop over layers they are made once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from coda_jax import ffi
from coda_jax.attend import dropout
from coda_jax.attend.gradients import Gradients, with_gradients
from coda_jax.attend.joined import Joined, can_be_made
from coda_jax.attend.results import Results
from coda_jax.attend.score import Score
from coda_jax.attend.score.distances import STEP, at_first_distances, entries_of_distances
from coda_jax.attend.score.hiding import band, tiles_hidden
from coda_jax.attend.score.program import Table
from coda_jax.attend.score.text import emit
from coda_jax.attend.spec import AttentionConfig, AttentionSpec, MaskArrays
from coda_jax.epilogue import emit as emit_epilogue
from coda_jax.epilogue.dtypes import FACTORS, FLOATS, TABLE, VECTORS, is_of_8_bits
from coda_jax.epilogue.values import same_size
from coda_jax.tiles.arch import current

_NO_BOUND = 1 << 30  # of a band, and of sizes
_MOST_SORTED = 512  # tiles of keys whose order is by what they see
_YIELDS = 4  # blocks for each multiprocessor, one after the other, beside collectives
_ROWS = 128  # rows of arrays are padded to a multiple


@dataclasses.dataclass(frozen=True)
class ForwardTiles:
    """Tiles of the forward kernel: 64 queries for each of `consumers` warpgroups, and keys."""

    head: int
    value_head: int
    consumers: int
    keys: int
    stages: int
    q_stages: int

    @classmethod
    def of(cls, head: int, value_head: int, queries: Any) -> ForwardTiles:
        """The tiles for heads of these widths."""
        if max(head, value_head) <= 64:
            # 192 queries where so many do not leave the last tile half empty.
            is_long = not isinstance(queries, int) or queries >= 2048 or queries % 192 > 128 or queries % 192 == 0
            return cls(head, value_head, 3 if is_long else 2, 128, 4, 2)
        if value_head <= 128 and head <= 192:
            return cls(head, value_head, 2, 128, 2, 2 if head <= 128 else 1)
        return cls(head, value_head, 2, 64, 2, 1)

    @property
    def rows(self) -> int:
        """Queries of a tile."""
        return 64 * self.consumers

    def shared_bytes(self, has_arrays: bool, has_ids: bool) -> int:
        """Bytes that `Forward` of attention_forward_sm90.cuh takes, which checks it."""
        chunks, value_chunks = -(-self.head // 64), _value_chunks(self.value_head)
        tiles = self.q_stages * self.rows * chunks + self.stages * self.keys * (chunks + value_chunks)
        barriers = 2 * 16 * self.stages + 16 * self.q_stages + 8 * self.stages + 12 * 16 + 4 * self.stages
        marks = has_arrays * self.stages * self.keys // 8
        words = -(-(128 * tiles + barriers + marks) // 16) * 16
        return words + has_ids * self.stages * 4 * self.keys + 1024


@dataclasses.dataclass(frozen=True)
class BackwardTiles:
    """Tiles of the backward kernel.

    Attributes:
      dim: the width to which heads are padded there.
    """

    head: int
    value_head: int
    dim: int
    keys: int
    queries: int
    stages: int = 2

    @classmethod
    def of(cls, head: int, value_head: int) -> BackwardTiles:
        """The tiles for heads of these widths."""
        widest = max(head, value_head)
        dim, keys, queries = (64, 128, 128) if widest <= 64 else (128, 128, 64) if widest <= 128 else (256, 64, 64)
        return cls(head, value_head, dim, keys, queries)

    def shared_bytes(self, vectors: int, has_tables: bool = False) -> int:
        """Bytes that `Backward` of attention_backward_sm90.cuh takes, which checks it.

        Args:
          vectors: that it loads with a tile of queries.
          has_tables: whether it makes gradients of tables.
        """
        chunks = self.dim // 64
        value_chunks = 2 if self.dim == 256 and self.value_head <= 128 else chunks
        tiles = 128 * (self.keys + self.stages * self.queries) * (chunks + value_chunks)
        ds, vector = 2 * 2 * self.keys * self.queries, 4 * self.queries
        turns = 4 * (16 + 8 + 8)
        barriers = 16 * self.stages + turns + 16 + 8 * self.stages + 4 * self.stages
        marks = self.stages * self.queries // 8 + 32
        diagonals = has_tables * self.summing_warps * 2 * (self.queries // 8 + 1) * 33 * 4
        return tiles + ds + self.stages * vectors * vector + barriers + marks + diagonals + 1024

    @property
    def summing_warps(self) -> int:
        """Warps that have keys of their own."""
        return 4 if self.dim == 256 else 8

    @property
    def diagonals(self) -> int:
        """Distances of a warp's keys from the queries of a tile."""
        return self.queries + 15

    def sums_shape(self, array: Sequence[Any], pairs: Sequence[Any], table: Table | None = None) -> tuple[Any, ...]:
        """The shape of the sums of which the gradient of a score's array is made: by `ScoreSums`, or `DiagonalSums`.

        Both are in attention_scores.cuh.

        Args:
          array: its shape.
          pairs: (batch, heads, queries, keys).
          table: of an array by distance.
        """
        batch, heads, queries, keys = pairs
        warps, of_warps = self.summing_warps, -(-keys // self.keys) * self.summing_warps
        if table is not None:
            return batch, heads, of_warps, table.entries
        if not same_size(array[2], 1):
            return batch, heads, warps, queries
        return batch, heads, (of_warps if same_size(array[3], 1) else keys)

    def entries(self, score: Score, table: Table, size: int) -> jax.Array:
        """The entries that the distances of a table's array of this size read, as `Backward` takes them."""
        return entries_of_distances(score, table, size // 2, STEP - 1 + self.diagonals)


def _value_chunks(width: int) -> int:
    chunks = -(-width // 64)
    return 4 if chunks == 3 else chunks


def unsupported_reason(avals: Sequence[Any], spec: AttentionSpec) -> str | None:
    """Why the kernels cannot compute such a call; None if they can."""
    q, k, v = avals[:3]
    bias = spec.mask_arrays(avals).bias
    if q.dtype.name not in FACTORS or is_of_8_bits(q.dtype):
        return f"its arrays are {q.dtype}; the kernels take bfloat16 and float16"
    widths = (q.shape[-1], v.shape[-1])
    if any(not isinstance(width, int) or width % 8 or not 0 < width <= 256 for width in widths):
        return f"heads have widths {widths}; the kernels take multiples of 8 up to 256"
    if bias is not None and bias.dtype.name not in FLOATS:
        return f"its bias is {bias.dtype}; the kernels take {', '.join(FLOATS)}"
    has_tables = spec.score is not None and bool(spec.score.tables)
    needed, arch = _most_shared_bytes(widths, q.shape[1], has_tables), current()
    if needed > arch.shared_bytes:
        return f"heads have widths {widths}, whose tiles need {needed} bytes of shared memory, of {arch.shared_bytes}"
    for x in spec.score_arrays(avals):
        if x.dtype.name not in VECTORS:
            return f"its score reads an array of {x.dtype}; the kernels take {', '.join(VECTORS)}"
    sizes = [size for x in (q, k) for size in x.shape[:3] if isinstance(size, int)]
    if any(size >= _NO_BOUND for size in sizes):
        return f"it has sizes {sizes}; the kernels take sizes below 2^30"
    return None


def _most_shared_bytes(widths: tuple[int, int], queries: Any, has_tables: bool) -> int:
    """The bytes of the larger one of both passes' kernels, with all that a mask may have."""
    of_forward = ForwardTiles.of(*widths, queries).shared_bytes(has_arrays=True, has_ids=True)
    return max(of_forward, BackwardTiles.of(*widths).shared_bytes(vectors=2 + 4 + 1 + 1, has_tables=has_tables))


def forward(*arrays: jax.Array, spec: AttentionSpec, yields: bool = False) -> list[jax.Array]:
    """y and lse by the kernel.

    Args:
      *arrays: q (B, T, H, D), k (B, S, K, D), v (B, S, K, Dv) and the arrays of the mask and of the score.
      yields: whether blocks end early, so that collectives find a multiprocessor.
    """
    given, scalars = spec.split(arrays)
    q, k, v = given[:3]
    of_y = spec.results
    batch, queries, heads, _ = q.shape
    y = jax.ShapeDtypeStruct((batch, queries, heads, v.shape[-1]), q.dtype)
    lse = jax.ShapeDtypeStruct((batch, heads, queries), jnp.float32)
    if of_y is not None and (_is_nothing(q, k, spec) or not _stores_results(of_y, queries)):
        plain_y, plain_lse = forward(*given, spec=spec.plain, yields=yields)
        return of_y.beside(plain_y, plain_lse, scalars)
    sinks = _sinks(given, spec)
    if _is_nothing(q, k, spec):
        nothing = jnp.full(lse.shape, -jnp.inf, jnp.float32)
        return [jnp.zeros(y.shape, y.dtype), sinks[0][..., None] + jnp.zeros_like(nothing) if sinks else nothing]
    tiles = ForwardTiles.of(q.shape[-1], v.shape[-1], queries)
    mask = _KernelMask.of(given, spec)
    found = mask.tiles(tiles.rows, tiles.keys, by_keys=False) if mask.has_arrays else _NO_TILES
    operands = _Operands([q, k, v])
    pointers = mask.pointers(operands, found)
    others = [operands.add(x) for x in (*sinks, *dropout.bits(mask.arrays.row_bits, mask.keys))]
    of_score = list(map(operands.add, spec.score_arrays(given)))
    of_scalars = [operands.add(x) for x in scalars]
    count = len(operands.arrays)
    shared_bytes = tiles.shared_bytes(mask.has_arrays, spec.mask.has_ids)
    members = mask.members | {"has_sinks": spec.mask.has_sinks} | dropout.members(spec.mask) | _dtype_member(q)
    members |= dataclasses.asdict(tiles) | {"shared_bytes": shared_bytes}
    threads = current().threads(tiles.consumers)
    own = [y, lse] if of_y is None or of_y.keeps_y else [lse]
    maxima, stores = ([], []) if of_y is None else _types_beside(of_y, y.shape, tiles.rows)
    results = [*own, *maxima, *stores, jax.ShapeDtypeStruct((1,), jnp.int32)]  # and the counter of claims
    beside, claimed = count + len(own), count + len(results) - 1
    source = _source(
        "forward",
        "coda::attention::ForwardParams<Config>",
        threads,
        members,
        _score_text(given, spec),
        _dropout_text(spec),
        None if of_y is None else _text_of_results(of_y),
    )
    call = ffi.LaunchCall(
        name="attention",
        source=source,
        arch=current().target,
        threads=threads,
        smem_bytes=shared_bytes,
        grid=[0, 1, tiles.rows, 0, 2, 1, 0, 0, 1],
        maps=[0, 64, tiles.rows, 1, 64, tiles.keys, 2, 64, tiles.keys],
        pointers=[
            *(count if y in own else -1, beside - 1, claimed),
            *(*pointers, *others, *of_score, *of_scalars, *range(beside, claimed)),
        ],
        sizes=[*_SIZES, *_broadcast_sizes(pointers)],
        words=[*mask.band, int(yields), _bits(spec.scale)],
        zeroed=[claimed],
        resident=_YIELDS if yields else 1,
    )
    *made, _ = _launched(operands.arrays, results, call)
    first_store = len(own) + len(maxima)
    return [*made[: len(own)], *made[first_store:], *map(jnp.max, made[len(own) : first_store])]


def _stores_results(results: Results, queries: Any) -> bool:
    """Whether the kernel can store what is made of y: transposed rows of 16 bytes, which no sequence shares."""
    return not results.has_transposed or (isinstance(queries, int) and queries % 16 == 0)


def _types_beside(results: Results, y: Sequence[Any], rows: int) -> tuple[list[Any], list[Any]]:
    """Types of a word of each warp for each maximum, and of the stores, beside y of this shape in tiles of `rows`."""
    batch, queries, heads, _ = y
    words = jax.ShapeDtypeStruct((batch, heads, -(-queries // rows) * (rows // 16)), jnp.float32)
    stores = [jax.ShapeDtypeStruct(*x) for x in zip(results.shapes(y), results.dtypes, strict=False)]
    return [words] * len(results.program.reductions), stores


_Text = tuple[str, list[str]]  # definitions, and lines of a Config


def _text_of_results(results: Results) -> _Text:
    """The definition of the epilogue of results beside y, and the members of a forward kernel's Config."""
    program = results.program
    first_store = results.count + len(program.reductions)
    members = {"result_pointers": first_store + len(program.stores), "first_store": first_store}
    members |= {"keeps_result": results.keeps_y}
    epilogue = emit_epilogue(program, results.dtypes, [False] * results.count)
    return epilogue, [*(_member(*x) for x in members.items()), "using Epilogue = ::Epilogue;"]


def backward(*arrays: jax.Array, spec: AttentionSpec, yields: bool = False) -> list[jax.Array]:
    """dq, dk and dv by the kernels, or what the spec makes of them, with sinks delta (B, H, T), and gradients of the
    score's arrays.

    They are as `blocks.backward` has them.

    Args:
      *arrays: q, k, v and the further arrays as in `forward`; y, lse, dy and dlse (B, H, T); operands of the maps.
      yields: as in `forward`. Blocks are many here, and end.
    """
    del yields
    arrays, given = map(tuple, spec.split(arrays))
    q, k, v, *_, y, lse, dy, dlse = arrays
    made = spec.gradients
    if made is not None and not makes_gradients(made, q, k, v, spec):
        return with_gradients(backward(*arrays, spec=spec.plain), given, made)
    if _is_nothing(q, k, spec):
        of_sinks = [jnp.where(lse == -jnp.inf, 0, -dlse)] if spec.mask.has_sinks else []
        nothing = [jnp.zeros(x.shape, x.dtype) for x in (q, k, v, *spec.gradient_arrays(arrays))]
        return [*nothing[:3], *of_sinks, *nothing[3:]]
    batch, queries, heads, head = q.shape
    keys, key_heads = k.shape[1:3]
    tiles = BackwardTiles.of(head, v.shape[-1])
    config = spec.config or AttentionConfig()
    mask = _KernelMask.of(arrays, spec)
    query_tiles, key_tiles = -(-queries // tiles.queries), -(-keys // tiles.keys)
    lse_2, delta = _statistics(y, dy, lse, dlse)
    splits = _splits(heads // key_heads, batch, key_tiles, key_heads)
    members = (
        mask.members
        | dropout.members(spec.mask)
        | _dtype_member(q)
        | dataclasses.asdict(tiles)
        | {"deterministic": config.deterministic, "is_split": splits > 1}
    )
    found = mask.tiles(tiles.queries, tiles.keys, by_keys=True) if mask.has_arrays else _NO_TILES
    operands = _Operands([q, k, v, dy])
    statistics = [operands.add(lse_2), operands.add(delta)]
    pointers = mask.pointers(operands, found)
    bits = [operands.add(x) for x in dropout.bits(mask.arrays.row_bits, keys, _ROWS)]
    order = [operands.add(found.needed_keys), operands.add(found.positions)]
    of_score = list(map(operands.add, spec.score_arrays(arrays)))
    each = list(zip(spec.gradient_tables, spec.gradient_arrays(arrays), strict=True))
    entries = [_entries(table, x, spec, tiles) for table, x in each]
    of_entries = [operands.add(x) for x in entries if x is not None]
    joined = None if made is None else _JoinedLaunch.of(made, operands, given)
    count = len(operands.arrays)
    if joined is None:
        own, gradients = [_split_type(x, splits) for x in (k, v)], [count + 1, count + 2]
    else:
        own, gradients = joined.types(q, k, v, tiles), [-1, -1]
    types = [
        jax.ShapeDtypeStruct((batch, heads, query_tiles, tiles.queries * tiles.dim), jnp.float32),
        *own,
        jax.ShapeDtypeStruct((batch, heads, query_tiles), jnp.int32),
        *(
            jax.ShapeDtypeStruct(tiles.sums_shape(x.shape, (batch, heads, queries, keys), table), jnp.float32)
            for table, x in each
        ),
    ]
    turns_at = count + 1 + len(own)
    of_gradients = range(turns_at + 1, count + len(types))
    shared_bytes = tiles.shared_bytes(mask.vectors, has_tables=bool(of_entries))
    source = _source(
        "backward",
        "coda::attention::BackwardParams<Config>",
        current().threads(),
        members | {"shared_bytes": shared_bytes},
        _score_text(arrays, spec, spec.score_gradients),
        _dropout_text(spec),
        None if joined is None else joined.text,
    )
    call = ffi.LaunchCall(
        name="attention, backward",
        source=source,
        arch=current().target,
        threads=current().threads(),
        smem_bytes=shared_bytes,
        grid=[1, 1, tiles.keys, 1, 2, 1, 1, 0, 1, *([count + 1, 0, 1] if splits > 1 else [])],
        maps=[0, 64, tiles.queries, 1, 64, tiles.keys, 2, 64, tiles.keys, 3, 64, tiles.queries],
        pointers=[
            *(*statistics, *pointers, *bits, *order, count, *gradients, turns_at),
            *(*of_score, *of_gradients, *of_entries),
            *([] if joined is None else joined.pointers(count + 1)),
        ],
        sizes=[*_SIZES, *_broadcast_sizes(pointers)],
        words=[*mask.band, splits, _bits(spec.scale)],
        zeroed=[turns_at if config.deterministic else count, *of_gradients],
    )
    sums, *rest = _launched(operands.arrays, types, call)
    own_results, (turns, *of_pairs) = rest[: len(own)], rest[len(own) :]
    of_turns, of_sinks = turns if config.deterministic else None, [delta[:, :, :queries]] if spec.mask.has_sinks else []
    others = [*of_sinks, *map(gradient_of_sums, of_pairs, spec.gradient_arrays(arrays), entries)]
    if joined is not None:
        of_dq = _in_joined(sums, of_turns, q, v, spec.scale, members, joined, own_results)
        return [*joined.finished(own_results, of_dq), *others]
    dk, dv = own_results
    dq = _in_rows(sums, of_turns, q, spec.scale, members)
    if splits > 1:
        dk, dv = (jnp.sum(x, axis=0).astype(like.dtype) for x, like in ((dk, k), (dv, v)))
    return [dq, dk, dv, *others]


def _entries(table: Table | None, array: jax.Array, spec: AttentionSpec, tiles: BackwardTiles) -> jax.Array | None:
    """The entries of the distances of a table's array; None of another array."""
    return None if table is None or spec.score is None else tiles.entries(spec.score, table, array.shape[3])


def gradient_of_sums(sums: jax.Array, like: jax.Array, entries: jax.Array | None = None) -> jax.Array:
    """The gradient of a score's array from the kernel's sums for each sequence and head, in one order.

    Args:
      entries: of a table, as `BackwardTiles.entries` has them: the gradient is by distance, at each entry's first.
    """
    _, _, queries, keys = like.shape
    if entries is not None:
        sums = jnp.sum(sums, axis=2)[:, :, None]
    elif not same_size(queries, 1):
        sums = jnp.sum(sums, axis=2)[..., None]
    elif same_size(keys, 1):
        sums = jnp.sum(sums, axis=2)[..., None, None]
    else:
        sums = sums[:, :, None]
    shared = tuple(axis for axis in (0, 1) if same_size(like.shape[axis], 1))
    summed = jnp.sum(sums, axis=shared, keepdims=True).astype(like.dtype)
    return summed if entries is None else at_first_distances(summed, entries[: like.shape[3]])


def _statistics(y: jax.Array, dy: jax.Array, lse: jax.Array, dlse: jax.Array) -> list[jax.Array]:
    """The rows' lse log2(e), and delta = sum(y dy) - dlse, both (B, H, T padded)."""
    batch, queries, heads, width = y.shape
    shape = (batch, heads, -(-queries // _ROWS) * _ROWS)
    call = ffi.LaunchCall(
        name="attention, backward: statistics",
        source=_source("prepare", "coda::attention::PrepareParams", 256, _dtype_member(y) | {"value_head": width}),
        arch=current().target,
        threads=256,
        smem_bytes=0,
        grid=[4, 0, 1, 4, 1, 8, 4, 2, 32],
        pointers=range(6),
        sizes=[0, 0, 0, 1, 0, 2],
        overlaps=True,
    )
    return _launched([y, dy, lse, dlse], [jax.ShapeDtypeStruct(shape, jnp.float32)] * 2, call)


def _in_rows(
    sums: jax.Array, turns: jax.Array | None, q: jax.Array, scale: float, members: dict[str, Any]
) -> jax.Array:
    """dq from the sums in the order of registers."""
    names = ("input", "head", "value_head", "dim", "queries")
    operands = [sums, *([] if turns is None else [turns])]
    count = len(operands)
    call = ffi.LaunchCall(
        name="attention, backward: dq in rows",
        source=_source("finish_dq", "coda::attention::FinishParams", 128, {name: members[name] for name in names}),
        arch=current().target,
        threads=128,
        smem_bytes=0,
        grid=[0, 0, 1, 0, 1, 1, 0, 2, 1, 0, 3, members["queries"] * members["dim"] // 2],
        pointers=[0, -1 if turns is None else 1, count],
        sizes=[count, 0, count, 1, count, 2],
        words=[_bits(scale)],
        overlaps=True,
    )
    (dq,) = _launched(operands, [jax.ShapeDtypeStruct(q.shape, q.dtype)], call)
    return dq


@dataclasses.dataclass(frozen=True)
class _JoinedLaunch:
    """The maps of dq, dk and dv, as the launches of the kernels take them.

    Attributes:
      gradients: the maps.
      programs: of dq, of dk and of dv.
      given: the operands of all.
      numbers: those of dk, and of dv, among the backward kernel's buffers.
    """

    gradients: Gradients
    programs: tuple[Joined, Joined, Joined]
    given: Sequence[jax.Array]
    numbers: tuple[list[int], list[int]]

    @classmethod
    def of(cls, gradients: Gradients, operands: _Operands, given: Sequence[jax.Array]) -> _JoinedLaunch:
        """The maps for a backward kernel, to whose operands their own are added."""
        of_dq, of_dk, of_dv = (Joined.of(gradients, i) for i in range(3))
        of_keys, of_values = (list(map(operands.add, gradients.operands_of(i, given))) for i in (1, 2))
        return cls(gradients, (of_dq, of_dk, of_dv), given, (of_keys, of_values))

    @property
    def stored(self) -> list[int]:
        """The tiles that the backward kernel stores: all but those of dq alone."""
        return [tile for tile, members in enumerate(self.gradients.members) if members != (0,)]

    def tile_types(self, q: jax.Array, v: jax.Array) -> list[jax.ShapeDtypeStruct]:
        """Types of all tiles."""
        each = zip(self.gradients.shapes(q.shape, v.shape), self.gradients.dtypes, strict=False)
        return [jax.ShapeDtypeStruct(*x) for x in each]

    def types(self, q: jax.Array, k: jax.Array, v: jax.Array, tiles: BackwardTiles) -> list[Any]:
        """Types of the tiles that the backward kernel stores, and of what it reduces of dk and of dv."""
        words = -(-k.shape[1] // tiles.keys) * (tiles.keys // 16)
        all_tiles = self.tile_types(q, v)
        _, of_dk, of_dv = self.programs
        return [
            *(all_tiles[tile] for tile in self.stored),
            *of_dk.reduction_types(k.shape, words),
            *of_dv.reduction_types(v.shape, words),
        ]

    def pointers(self, first: int) -> list[int]:
        """Buffers of the backward kernel, where those of `types` are the first and on."""
        _, of_dk, of_dv = self.programs
        buffers = {tile: first + i for i, tile in enumerate(self.stored)}
        of_keys, of_values = ([buffers[tile] for tile in self.gradients.tiles_of(i)] for i in (1, 2))
        reductions = first + len(buffers)
        middle = reductions + len(of_dk.program.reductions)
        end = middle + len(of_dv.program.reductions)
        return [
            *of_dk.pointers(self.numbers[0], range(reductions, middle), of_keys),
            *of_dv.pointers(self.numbers[1], range(middle, end), of_values),
        ]

    @property
    def text(self) -> _Text:
        """The definitions of the epilogues of dk and dv, and the members of a Config."""
        definitions, lines = [], []
        for name, of in zip(("of_keys", "of_values"), self.programs[1:], strict=True):
            definitions.append(f"namespace {name} {{\n{of.text()}}}  // namespace {name}\n")
            members = " ".join(_member(*x) for x in (of.config | of.columns).items())
            struct = "OfKeys" if name == "of_keys" else "OfValues"
            lines.append(f"struct {struct} {{ using Epilogue = {name}::Epilogue; {members} }};")
        return "".join(definitions), lines

    def finished(self, found: Sequence[jax.Array], of_dq: Sequence[jax.Array]) -> list[jax.Array]:
        """The tiles and all reductions, from the results of the backward kernel and of the one behind it."""
        tiles = dict(zip(self.stored, found, strict=False)) | dict(zip(self.gradients.tiles_of(0), of_dq, strict=False))
        behind_dq, first = len(self.gradients.tiles_of(0)), len(self.stored)
        middle = first + len(self.programs[1].program.reductions)
        each = zip(self.programs, (of_dq[behind_dq:], found[first:middle], found[middle:]), strict=True)
        return [*(tiles[tile] for tile in sorted(tiles)), *(x for of, reduced in each for x in of.reduced(reduced))]


def _in_joined(
    sums: jax.Array,
    turns: jax.Array | None,
    q: jax.Array,
    v: jax.Array,
    scale: float,
    members: dict[str, Any],
    joined: _JoinedLaunch,
    found: Sequence[jax.Array],
) -> list[jax.Array]:
    """The tiles of dq's columns, which are stored in place where a tile has others too, and what is reduced of dq."""
    names = ("input", "head", "value_head", "dim", "queries")
    of_dq, tiles = joined.programs[0], joined.gradients.tiles_of(0)
    stored = dict(zip(joined.stored, found, strict=False))
    in_place = [stored[tile] for tile in tiles if tile in stored]
    operands = _Operands([sums, *in_place])
    turns_at = operands.add(turns)
    numbers = list(map(operands.add, joined.gradients.operands_of(0, joined.given)))
    count, tile = len(operands.arrays), members["queries"]
    words = -(-q.shape[1] // tile) * (tile // 16)
    all_tiles = joined.tile_types(q, v)
    types = [*(all_tiles[tile] for tile in tiles), *of_dq.reduction_types(q.shape, words)]
    stores, reductions = range(count, count + len(tiles)), range(count + len(tiles), count + len(types))
    batch, rows, columns = (1, 2, 0) if joined.gradients.is_transposed(tiles[0]) else (0, 1, 2)
    call = ffi.LaunchCall(
        name="attention, backward: of dq",
        source=_source(
            "finish_dq_results",
            "coda::attention::FinishResultsParams<Config>",
            128,
            {name: members[name] for name in names} | of_dq.config,
            epilogue=(of_dq.text(), ["using Epilogue = ::Epilogue;"]),
        ),
        arch=current().target,
        threads=128,
        smem_bytes=0,
        grid=[0, 0, 1, 0, 1, 1, 0, 2, 1, 0, 3, 64 * members["dim"]],
        pointers=[0, turns_at, *of_dq.pointers(numbers, reductions, stores)],
        sizes=[count, batch, count, rows, 0, 1, count, columns],
        words=[_bits(scale)],
        overlaps=True,
    )
    return _launched(operands.arrays, types, call, {1 + i: i for i in range(len(in_place))})


def _sinks(arrays: Sequence[jax.Array], spec: AttentionSpec) -> list[jax.Array]:
    """The sinks of each sequence, (B, H) float32, if there are any."""
    sinks, (batch, _, heads, _) = spec.mask_arrays(arrays).sinks, arrays[0].shape
    return [] if sinks is None else [jnp.broadcast_to(sinks.astype(jnp.float32), (batch, heads))]


def _dropout_text(spec: AttentionSpec) -> str:
    return dropout.text(spec.mask.dropout_rate) if spec.mask.has_dropout else ""


_SIZES = [0, 0, 0, 1, 1, 1, 0, 2, 1, 2]  # batch, queries, keys, heads, heads of keys, of q and k


def _broadcast_sizes(pointers: Sequence[int]) -> list[int]:
    """Sizes of the dense mask and of the bias, the last of a mask's pointers, four each; of none those of any array."""
    return [number for at in pointers[-2:] for axis in range(4) for number in (max(at, 0), axis)]


def _is_nothing(q: jax.Array, k: jax.Array, spec: AttentionSpec) -> bool:
    """True if no query sees a key whatever the arrays are."""
    left, right = spec.mask.left, spec.mask.right
    is_empty_band = left is not None and right is not None and left + right < 0
    return is_empty_band or any(isinstance(size, int) and size == 0 for size in (*q.shape, *k.shape))


def makes_gradients(gradients: Gradients, q: Any, k: Any, v: Any, spec: AttentionSpec) -> bool:
    """Whether the kernels make what is made of the gradients of arrays of these types; else XLA makes it."""
    if _is_nothing(q, k, spec) or max(q.shape[3], v.shape[3]) > 128:
        return False
    tiles, (keys, key_heads) = BackwardTiles.of(q.shape[3], v.shape[3]), k.shape[1:3]
    splits = _splits(q.shape[2] // key_heads, q.shape[0], -(-keys // tiles.keys), key_heads)
    return can_be_made(gradients, q, k, v, splits)


def _splits(groups: int, batch: Any, key_tiles: Any, key_heads: Any) -> int:
    """Into how many parts the heads of queries that share a head of keys are divided, for there to be work for all."""
    if not all(isinstance(size, int) for size in (groups, batch, key_tiles, key_heads)):
        return 1
    blocks = batch * key_tiles * key_heads
    divisors = [n for n in range(1, groups + 1) if groups % n == 0]
    return next((n for n in divisors if blocks * n >= 2 * current().sms), groups)


def _split_type(x: jax.Array, splits: int) -> jax.ShapeDtypeStruct:
    return (
        jax.ShapeDtypeStruct(x.shape, x.dtype) if splits == 1 else jax.ShapeDtypeStruct((splits, *x.shape), jnp.float32)
    )


class _Operands:
    """The arrays of a launch, to which more are added: each has a buffer's number."""

    def __init__(self, arrays: list[Any]) -> None:
        self.arrays = arrays

    def add(self, x: jax.Array | None) -> int:
        """The number of an array, -1 of none."""
        if x is None:
            return -1
        self.arrays.append(x)
        return len(self.arrays) - 1


@dataclasses.dataclass(frozen=True)
class _TileBits:
    """The tiles of a mask, for one kernel: see `Mask` and `BackwardParams` in cuda/."""

    needed: jax.Array | None = None
    full: jax.Array | None = None
    order: jax.Array | None = None
    needed_keys: jax.Array | None = None
    positions: jax.Array | None = None


_NO_TILES = _TileBits()


@dataclasses.dataclass(frozen=True)
class _KernelMask:
    """A mask as the kernels take it: a band, or arrays whose rows are padded."""

    band: tuple[int, int]
    queries: Any
    keys: Any
    arrays: MaskArrays  # padded; the intervals are there if anything is
    score: tuple[Score, Sequence[jax.Array]] | None = None  # and what it reads

    @classmethod
    def of(cls, arrays: Sequence[jax.Array], spec: AttentionSpec) -> _KernelMask:
        q, k = arrays[:2]
        mask, (batch, queries), keys = spec.mask, q.shape[:2], k.shape[1]
        given = spec.mask_arrays(arrays)
        bounds = tuple(_NO_BOUND if bound is None else bound for bound in (mask.left, mask.right))
        if not (mask.intervals or mask.has_ids or mask.has_mask or mask.has_bias or _score_hides(arrays, spec)):
            return cls((bounds[0], bounds[1]), queries, keys, MaskArrays(row_bits=given.row_bits))
        intervals = given.intervals
        if intervals is None:
            intervals = _band_intervals(mask.left, mask.right, batch, queries, keys)
        count = intervals.shape[1]
        empty = jnp.where(jnp.arange(count) % 2 == 0, keys, -1).astype(jnp.int32)[:, None]
        padding = -queries % _ROWS
        padded = jnp.concatenate([intervals, jnp.broadcast_to(empty, (batch, count, padding))], axis=2)
        ids = [
            None if x is None else jnp.pad(x, ((0, 0), (0, -x.shape[1] % _ROWS)), mode="edge")
            for x in (given.query_ids, given.key_ids)
        ]
        of_score = None if spec.score is None else (spec.score, spec.score_arrays(arrays))
        padded_arrays = given._replace(intervals=padded, query_ids=ids[0], key_ids=ids[1])
        return cls((0, 0), queries, keys, padded_arrays, of_score)

    @property
    def has_arrays(self) -> bool:
        return self.arrays.intervals is not None

    @property
    def has_second(self) -> bool:
        return self.has_arrays and self.arrays.intervals.shape[1] == 4

    @property
    def vectors(self) -> int:
        """Vectors that the backward kernel loads with a tile of queries."""
        intervals = self.arrays.intervals.shape[1] if self.has_arrays else 0
        return 2 + intervals + (self.arrays.query_ids is not None) + (self.arrays.row_bits is not None)

    @property
    def members(self) -> dict[str, Any]:
        """Members of a kernel's Config."""
        mask, bias = self.arrays.mask, self.arrays.bias
        lengths = [x.shape[-1] for x in (mask, bias) if x is not None]
        return {
            "has_arrays": self.has_arrays,
            "has_second": self.has_second,
            "has_ids": self.arrays.query_ids is not None,
            "has_dense": mask is not None,
            "has_bias": bias is not None,
            "bias_type": "f32" if bias is None else TABLE[bias.dtype.name].cuda,
            "has_even_rows": all(isinstance(length, int) and length % 2 == 0 for length in lengths),
        }

    def pointers(self, operands: _Operands, tiles: _TileBits) -> list[int]:
        """Buffers of `Mask`."""
        arrays = self.arrays
        in_order = (arrays.intervals, arrays.query_ids, arrays.key_ids, tiles.needed, tiles.full, tiles.order)
        return [operands.add(x) for x in (*in_order, arrays.mask, arrays.bias)]

    def tiles(self, rows: int, keys: int, *, by_keys: bool) -> _TileBits:
        """The tiles of queries and keys that see each other: bits along keys, or of tiles of keys along queries."""
        needed, full = self._tiles(rows, keys)
        needed_keys = None
        if by_keys:
            needed_keys = _bits_of_tiles(needed)
            needed, full = needed.swapaxes(1, 2), full.swapaxes(1, 2)
        order = positions = None
        is_sorted = not by_keys or (isinstance(needed.shape[1], int) and needed.shape[1] <= _MOST_SORTED)
        if is_sorted:
            count = jnp.sum(needed, axis=2, dtype=jnp.int32).reshape(-1)
            order = jnp.argsort(-count, stable=True).astype(jnp.int32)
            if by_keys:
                positions = jnp.argsort(order).astype(jnp.int32)
        return _TileBits(_bits_of_tiles(needed), _bits_of_tiles(full), order, needed_keys, positions)

    def _tiles(self, rows: int, keys: int) -> tuple[jax.Array, jax.Array]:
        """(B, tiles of queries, tiles of keys) bool: whether anything of a tile is seen, and whether all of it is."""
        of_queries = functools.partial(_of_tiles, size=rows)
        intervals = self.arrays.intervals[:, :, : self.queries]
        starts = jnp.arange(0, -(-self.keys // keys), dtype=jnp.int32) * keys
        ends = starts + (keys - 1)
        needed: Any = False
        full: Any = False
        for i in range(0, intervals.shape[1], 2):
            first, last = intervals[:, i], intervals[:, i + 1]
            lowest, highest = of_queries(first, jnp.min), of_queries(last, jnp.max)
            latest, earliest = of_queries(first, jnp.max), of_queries(last, jnp.min)
            needed |= (starts <= highest[..., None]) & (ends >= lowest[..., None])
            full |= (starts >= latest[..., None]) & (ends <= earliest[..., None])
        if self.arrays.query_ids is not None:
            query_ids, key_ids = self.arrays.query_ids[:, : self.queries], self.arrays.key_ids[:, : self.keys]
            least, most = (of_queries(query_ids, f)[:, :, None] for f in (jnp.min, jnp.max))
            key_least, key_most = (_of_tiles(key_ids, f, size=keys)[:, None] for f in (jnp.min, jnp.max))
            needed &= (least <= key_most) & (key_least <= most)
            full &= (least == most) & (key_least == key_most) & (least == key_least)
        if self.arrays.mask is not None:
            some, whole = (self._dense_tiles(rows, keys, f) for f in (jnp.any, jnp.all))
            needed &= some
            full &= whole
        if self.score is not None:
            all_hidden, none_hidden = tiles_hidden(*self.score, self.queries, self.keys, rows, keys)
            needed &= ~all_hidden
            full &= none_hidden
        return needed, full & needed

    def _dense_tiles(self, rows: int, keys: int, reduce: Any) -> jax.Array:
        """Whether any, or all, elements of a tile of the dense mask are seen, by any or all heads: (1 or B, tiles)."""
        mask = reduce(self.arrays.mask, axis=1)
        fill = "edge"
        for axis, size, whole in ((1, rows, self.queries), (2, keys, self.keys)):
            count = -(-whole // size)
            if (
                isinstance(mask.shape[axis], int)
                and mask.shape[axis] == 1
                and not (isinstance(whole, int) and whole == 1)
            ):
                continue
            padding = [(0, 0)] * 3
            padding[axis] = (0, count * size - mask.shape[axis])
            mask = jnp.pad(mask, padding, mode=fill)
            mask = reduce(mask.reshape(*mask.shape[:axis], count, size, *mask.shape[axis + 1 :]), axis=axis + 1)
        result: jax.Array = mask
        return result


def _of_tiles(x: jax.Array, reduce: Any, size: int) -> jax.Array:
    """(B, tiles) of values (B, N), of which the last fill up the last tile."""
    count = -(-x.shape[1] // size)
    x = jnp.pad(x, ((0, 0), (0, count * size - x.shape[1])), mode="edge")
    result: jax.Array = reduce(x.reshape(x.shape[0], count, size), axis=2)
    return result


def _bits_of_tiles(flags: jax.Array) -> jax.Array:
    """(B, N, words) int32 of flags (B, N, M): 32 of M to a word, the first in the lowest bit."""
    words = -(-flags.shape[2] // 32)
    flags = jnp.pad(flags, ((0, 0), (0, 0), (0, words * 32 - flags.shape[2])))
    bits = flags.reshape(*flags.shape[:2], words, 32).astype(jnp.uint32) << jnp.arange(32, dtype=jnp.uint32)
    return jax.lax.bitcast_convert_type(jnp.sum(bits, axis=3, dtype=jnp.uint32), jnp.int32)


def _band_intervals(left: int | None, right: int | None, batch: Any, queries: Any, keys: Any) -> jax.Array:
    """(B, 2, T): what a band says."""
    row = jnp.arange(queries, dtype=jnp.int32)
    first = jnp.zeros_like(row) if left is None else jnp.maximum(row - left, 0)
    last = jnp.full_like(row, keys - 1) if right is None else jnp.minimum(row + right, keys - 1)
    is_seen = first <= last
    both = jnp.stack([jnp.where(is_seen, first, keys), jnp.where(is_seen, last, -1)])
    return jnp.broadcast_to(both, (batch, *both.shape))


def _dtype_member(x: jax.Array) -> dict[str, Any]:
    return {"input": TABLE[x.dtype.name].cuda}


def _score_hides(arrays: Sequence[jax.Array], spec: AttentionSpec) -> bool:
    """Whether the score may hide keys inside of the mask's band."""
    if spec.score is None:
        return False
    shapes = [x.shape for x in spec.score_arrays(arrays)]
    return not band(spec.score, shapes, arrays[0].shape[1], arrays[1].shape[1]).is_likely_all


def _score_text(arrays: Sequence[jax.Array], spec: AttentionSpec, gradients: Sequence[int] = ()) -> str:
    """The definition of the score function; empty if there is none."""
    return "" if spec.score is None else emit(spec.score, spec.score_arrays(arrays), gradients)


def _source(
    function: str,
    params: str,
    threads: int,
    members: dict[str, Any],
    score: str = "",
    dropout_text: str = "",
    epilogue: _Text | None = None,
) -> str:
    """The text of a kernel: its Config, and the call of a function of the headers.

    Args:
      score: the definition of the score function.
      dropout_text: that of dropout.
      epilogue: those of what is made of results; None for none.
    """
    header = current().attention_headers.get(function, "attention_passes.cuh")
    lines = [_member(name, value) for name, value in members.items()]
    if score:
        lines.append("using Score = ::Score;")
    if dropout_text:
        lines.append("using Dropout = dropout::Epilogue;")
    if epilogue is not None:
        definitions, own = epilogue
        lines += own
        score += ("\n" if score else "") + definitions
    return f"""#include "{header}"

{dropout_text}{score}{chr(10) if score else ""}struct Config {{
{"".join(f"  {line}{chr(10)}" for line in lines)}}};

extern "C" __global__ void __launch_bounds__({threads}, 1)
    coda_attention(const __grid_constant__ {params} params) {{
  coda::attention::{function}<Config>(params);
}}
"""


def _member(name: str, value: Any) -> str:
    if isinstance(value, str):
        return f"static constexpr coda::DType {name} = coda::DType::{value};"
    if isinstance(value, bool):
        return f"static constexpr bool {name} = {'true' if value else 'false'};"
    if isinstance(value, float):
        return f"static constexpr float {name} = {np.float32(value)}f;"
    return f"static constexpr int {name} = {value};"


def _launched(
    arrays: Sequence[Any], results: Sequence[Any], call: ffi.LaunchCall, aliases: Mapping[int, int] | None = None
) -> list[jax.Array]:
    ffi.compile_async(call.source, call.name, call.arch)
    return ffi.launch_call(arrays, results, call, aliases)


def _bits(x: float) -> int:
    return int(np.float32(x).view(np.int32))
