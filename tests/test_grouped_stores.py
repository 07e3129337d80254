"""What a tile of a product of groups writes, by the kernel's own epilogue on the host: the lanes of a warp take turns,
and the copy engine stores as late as it may. Rows of other groups stay as they are. And what a k block loses that has
rows of two groups.
"""

import ctypes
import dataclasses
import functools
import pathlib
import re
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.epilogues import EpilogueCase
from benchmarks.programs import lowered, spec_of
from coda_jax.epilogue import trace
from coda_jax.primitives.axes import Dimension
from coda_jax.tiles.config import GemmConfig

HEADERS = pathlib.Path(__file__).resolve().parents[1] / "cuda"
BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32

# Shared memory is an array of bytes. Lanes are fibers: each runs to the next instruction that all of them have.
PTX = r"""
#pragma once
#include <ucontext.h>
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <string>
#include <vector>
#define __device__
#define __host__
#define __shared__
#define __align__(bytes)
#define __forceinline__ inline
using std::max, std::min;
struct float4 { float x, y, z, w; };
struct int2 { int x, y; };
static bool is_misaligned;
struct int4 {
  int x, y, z, w;
  int4& operator=(const int4& other) {
    is_misaligned = is_misaligned || reinterpret_cast<size_t>(this) % 16 != 0;
    std::memmove(static_cast<void*>(this), &other, 16);
    return *this;
  }
};
static struct { int x; } blockIdx, gridDim, threadIdx;
static unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned long long>(a) * b >> 32; }
static float __fdividef(float a, float b) { return a / b; }
static float __uint_as_float(unsigned bits) { float value; std::memcpy(&value, &bits, 4); return value; }
static int __shfl_sync(unsigned, int value, int) { return value; }  // that all lanes have
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static void __stcg(float4*, float4) { std::abort(); }
static float4 __ldcg(const float4*) { std::abort(); }
static void __nanosleep(int) { std::abort(); }
static int atomicAdd(int*, int) { std::abort(); }
static void __syncthreads() {}

static ucontext_t loop, contexts[32];
static bool has_ended[32];
static int current;
static void __syncwarp() { const int self = current; swapcontext(&contexts[self], &loop); }
static float values[32];
static float __shfl_xor_sync(unsigned, float value, int mask) {
  values[current] = value;
  __syncwarp();
  const float other = values[current ^ mask];
  __syncwarp();
  return other;
}

namespace coda::ptx {
using uint16 = unsigned short;
using uint32 = unsigned;
using uint64 = unsigned long long;
static unsigned char memory[232448];
static unsigned char* at(uint32 address, int bytes) {
  if (address % bytes != 0 || address + bytes > sizeof memory) std::abort();
  return memory + address;
}
static std::string events;  // of one thread: zeros, fences, barriers

struct TensorMap {
  unsigned char* base;
  int element_bytes, box_columns, box_rows, swizzle_bytes;
  int sizes[4];  // columns, halves, rows, batch
  long long strides[4];
};
struct Store {
  const TensorMap* map;
  uint32 source;
  int place[4];
  void run() const {  // what lies within the array
    for (int row = 0; row < map->box_rows; ++row)
      for (int column = 0; column < map->box_columns; ++column) {
        const int index[4] = {place[0] + column, place[1], place[2] + row, place[3]};
        long long offset = 0;
        bool inside = true;
        for (int i = 0; i < 4; ++i) {
          inside = inside && 0 <= index[i] && index[i] < map->sizes[i];
          offset += index[i] * map->strides[i];
        }
        uint32 from = source + row * map->swizzle_bytes + column * map->element_bytes;
        from ^= (from >> 7 & (map->swizzle_bytes / 16 - 1)) << 4;
        if (inside) std::memcpy(map->base + offset, at(from, map->element_bytes), map->element_bytes);
      }
  }
};
static std::vector<Store> given[32];
static std::deque<std::vector<Store>> pending[32];  // groups that have not read shared memory
static void tma_store(const TensorMap& map, uint32 source, int column, int half, int row, int batch) {
  given[current].push_back({&map, source, {column, half, row, batch}});
}
static void tma_store_commit() {
  pending[current].push_back(given[current]);
  given[current].clear();
}
template <int count> void tma_store_wait_read() {
  for (auto& groups = pending[current]; groups.size() > count; groups.pop_front())
    for (const Store& store : groups.front()) store.run();
}
static void fence_async_proxy() { events += 'f'; }
static void named_barrier_sync(int number, int threads) {
  events += std::to_string(number) + "/" + std::to_string(threads);
}

static uint32 addresses[32], words_of[32][4];
static void store_matrices(uint32 address, const uint32 (&words)[4]) {
  addresses[current] = address;
  std::copy(words, words + 4, words_of[current]);
  __syncwarp();
  for (int i = 0; i < 4; ++i)
    std::memcpy(at(addresses[8 * i + current / 4], 16) + 4 * (current % 4), &words_of[current][i], 4);
  __syncwarp();
}
static void store_pair(uint32 address, float first, float second) {
  const float pair[2] = {first, second};
  std::memcpy(at(address, 8), pair, 8);
}
static int4 load_16_bytes(uint32 address) {
  int4 words;
  std::memcpy(static_cast<void*>(&words), at(address, 16), 16);
  return words;
}
static int load_word(uint32 address) {
  int word;
  std::memcpy(&word, at(address, 4), 4);
  return word;
}
static void store_zeros(uint32 address) {
  std::memset(at(address, 16), 0, 16);
  if (events.empty() || events.back() != 'z') events += 'z';
}
static uint32 bits(float value) { uint32 of; std::memcpy(&of, &value, 4); return of; }
static uint32 pack_bf16(float low, float high) {
  const auto rounded = [](float x) { return (bits(x) + 0x7FFF + (bits(x) >> 16 & 1)) >> 16; };
  return rounded(low) | rounded(high) << 16;
}
static uint32 pack_f16(float low, float high) {
  const _Float16 pair[2] = {static_cast<_Float16>(low), static_cast<_Float16>(high)};
  uint32 of;
  std::memcpy(&of, pair, 4);
  return of;
}
static float f16_to_float(uint16 of) { _Float16 value; std::memcpy(&value, &of, 2); return value; }
OTHERS
}  // namespace coda::ptx
"""
# Those that nothing here runs.
NOT_RUN = (
    *("store_word", "load_pair", "load_matrices", "store_release", "load_acquire", "shared_address"),
    *("tma_prefetch_map", "tma_load", "tma_load_multicast", "mbarrier_init", "mbarrier_init_fence", "mbarrier_arrive"),
    *("mbarrier_arrive_expect", "mbarrier_arrive_remote", "mbarrier_wait", "store_async", "named_barrier_arrive"),
    *("cluster_rank", "cluster_arrive", "cluster_wait", "launch_dependents", "wait_for_earlier_kernels"),
)
OTHERS = (
    "".join(f"template <class... T> int {name}(T&&...) {{ std::abort(); }}\n" for name in NOT_RUN)
    + """
template <int count> void registers_decrease() { std::abort(); }
template <int count> void registers_increase() { std::abort(); }
"""
)

SOURCE = r"""
#include "ptx_sm90.cuh"
#define private public
#include "mainloop_sm90.cuh"
#undef private
using namespace coda;

struct Piece {  // of work of a consumer
  int consumer, row, row_end, column, column_end, section, index_m, index_n, has_product;
};
struct Launch {
  int m, n, pieces, lane_first;
  const Piece* piece;
  const float* acc;  // (m, n); of all that is outside of it or of the piece's rows `foreign`
  const ptx::TensorMap* map;
  void** pointer;
};
constexpr float foreign = 12345;
static const Launch* launched;
static int consumer, warp;

template <class C, class E, class P>
static void lane_of_warp() {
  using Visitor = EpilogueVisitor<C, CompleteEpilogue<E>, P>;
  using Layout = typename Visitor::Layout;
  static P params;
  const Launch& launch = *launched;
  std::copy(launch.map, launch.map + sizeof params.map / sizeof *params.map, params.map);
  std::copy(launch.pointer, launch.pointer + sizeof params.pointer / sizeof *params.pointer, params.pointer);
  params.m = launch.m, params.n = launch.n, params.k = 64, params.batch = C::groups;
  const int lane = current;
  Visitor epilogue(params, consumer * Layout::bytes, {0}, consumer, warp, lane);
  for (int i = 0; i < launch.pieces; ++i) {
    const Piece& piece = launch.piece[i];
    if (piece.consumer != consumer) continue;
    const RowGroupTile tile{
        {piece.row, piece.column, 1, piece.index_m, piece.index_n, piece.section, piece.column_end}, piece.row_end};
    if (!piece.has_product) {
      epilogue.store_zeros(tile);
      continue;
    }
    epilogue.begin(tile);
    typename Visitor::TileAccumulator accumulator;
    constexpr int of_half = C::tile_n / Layout::n_halves;
    for (int block = 0; block < Layout::blocks; ++block)
      for (int j = 0; j < C::tile_n / 8; ++j)
        for (int r = 0; r < 2; ++r)
          for (int c = 0; c < 2; ++c) {
            const int row = tile.row + 64 * block + 16 * warp + lane / 4 + 8 * r, at = 8 * j + 2 * (lane % 4) + c;
            const int n = launch.n / Layout::n_halves, column = tile.column + at % of_half;
            const bool inside = row < min(tile.row_end, launch.m) && column < n;
            accumulator.registers[block][4 * j + 2 * r + c] =
                inside ? launch.acc[static_cast<long long>(row) * launch.n + at / of_half * n + column] : foreign;
          }
    epilogue.visit(tile, accumulator);
  }
  epilogue.finish();
}

/// Each warp does its work on its own, its lanes in turn.
template <class C, class E, class P>
static int run(const Launch* launch) {
  static char stacks[32][1 << 16];
  static void (*entry)() = lane_of_warp<C, E, P>;
  launched = launch, is_misaligned = false;
  std::fill(std::begin(ptx::memory), std::end(ptx::memory), 0xFF);
  for (consumer = 0; consumer < consumers; ++consumer)
    for (warp = 0; warp < consumer_warps; ++warp) {
      for (int i = 0; i < 32; ++i) {
        has_ended[i] = false;
        getcontext(&contexts[i]);
        contexts[i].uc_stack.ss_sp = stacks[i], contexts[i].uc_stack.ss_size = sizeof stacks[i];
        contexts[i].uc_link = nullptr;
        makecontext(&contexts[i], [] {
          entry();
          has_ended[current] = true;
          setcontext(&loop);
        }, 0);
      }
      for (int running = 32; running > 0;) {
        running = 0;
        for (int i = 0; i < 32; ++i) {
          current = (launch->lane_first + i) % 32;
          if (!has_ended[current]) swapcontext(&loop, &contexts[current]);
          running += !has_ended[current];
        }
      }
      for (int i = 0; i < 32; ++i)
        if (!ptx::given[i].empty() || !ptx::pending[i].empty()) std::abort();
    }
  return is_misaligned;
}

template <class C, class E, class P>
static int zero(int of_consumer, int slot, int first, unsigned char* stages, int bytes, char* said) {
  using Kernel = Gemm<C, CompleteEpilogue<E>, P>;
  static P params;
  if (bytes != Kernel::Layout::epilogue_offset) return 0;
  std::copy(stages, stages + bytes, ptx::memory);
  for (int thread = 0; thread < 128; ++thread) {
    gridDim.x = 1, blockIdx.x = 0, threadIdx.x = 128 * (1 + of_consumer) + thread;
    params.m = params.n = params.k = 64, params.batch = C::groups;
    ptx::events.clear();
    Kernel(params, 0).zero_behind(of_consumer, slot, first);
    if (thread == 0) std::strcpy(said, ptx::events.c_str());
  }
  std::copy(ptx::memory, ptx::memory + bytes, stages);
  return Kernel::Layout::stage_bytes;
}
PROGRAMS
"""


class Piece(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int)
        for name in [
            "consumer",
            "row",
            "row_end",
            "column",
            "column_end",
            "section",
            "index_m",
            "index_n",
            "has_product",
        ]
    )


class TensorMap(ctypes.Structure):
    _fields_ = (
        ("base", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("element_bytes", "box_columns", "box_rows", "swizzle_bytes")),
        ("sizes", ctypes.c_int * 4),
        ("strides", ctypes.c_longlong * 4),
    )


class Launch(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int) for name in ("m", "n", "pieces", "lane_first")),
        *((name, ctypes.c_void_p) for name in ("piece", "acc", "map", "pointer")),
    )


@dataclasses.dataclass(frozen=True)
class Case:
    """An epilogue that is exact in float32, its results' dtypes, N, and the tile."""

    epilogue: object
    out_dtypes: tuple
    n: int = 328
    tile: tuple = (128, 128)
    ragged: Dimension = Dimension.M
    options: dict = dataclasses.field(default_factory=dict)

    def kernel(self, m):
        k = 64
        acc = jax.ShapeDtypeStruct((m, self.n), F32)
        offsets = jax.ShapeDtypeStruct((4,), jnp.int32)
        traced, (*captured, kept) = trace(self.epilogue, acc, (), offsets)
        assert not captured
        by_k = self.ragged is Dimension.K
        spec = spec_of(EpilogueCase(self.epilogue, None, self.out_dtypes), traced, ragged=self.ragged, transpose_a=by_k)
        types = (
            jax.ShapeDtypeStruct((k, m) if by_k else (m, k), BF16),
            jax.ShapeDtypeStruct((k, self.n) if by_k else (3, k, self.n), BF16),
        )
        config = GemmConfig(tile_m=self.tile[0], tile_n=self.tile[1], **self.options)
        return spec, lowered((*types, kept), spec, config)


def gate(acc):
    of_gate, up = jnp.split(acc, 2, axis=1)
    return jnp.maximum(of_gate, 0) * up


def halves_of_heads(acc):
    first, second = jnp.split(acc.reshape(acc.shape[0], -1, 64), 2, axis=-1)
    return jnp.concatenate([second - first, first], axis=-1).reshape(acc.shape)


def neighbours(acc):
    x = acc.reshape(acc.shape[0], -1, 64)
    return jnp.stack([x[..., 1::2], -x[..., 0::2]], axis=-1).reshape(acc.shape)


CASES = {
    "bfloat16": Case(lambda acc: acc, (BF16,)),
    "float16": Case(lambda acc: acc * 2, (F16,), tile=(128, 192)),
    "float32": Case(lambda acc: acc, (F32,)),
    "shared tile": Case(lambda acc: (acc, -acc), (BF16, F32), n=520, tile=(128, 256)),
    "kept gate": Case(lambda acc: (acc, gate(acc)), (BF16, BF16), n=2 * 200),
    "wide gate": Case(lambda acc: (gate(acc), acc), (F32, BF16), n=2 * 136, tile=(64, 256)),
    "slices": Case(lambda acc: (acc[:, :104], acc[:, 104:]), (BF16, F32)),
    "slices and all": Case(lambda acc: (acc[:, :104], acc), (F32, BF16)),
    "slices at any column": Case(lambda acc: (acc[:, :100], acc[:, 100:], acc), (F32, F32, BF16)),
    "heads": Case(halves_of_heads, (BF16,), n=320),
    "neighbours": Case(neighbours, (BF16,), n=320),
    "row sums": Case(lambda acc: (acc, jnp.sum(acc, axis=1)), (BF16,)),
    "columns in passes": Case(lambda acc: (acc, -acc), (F32, BF16), options={"column_passes": 2}),
    "k": Case(lambda acc: acc, (BF16,), ragged=Dimension.K),
    "k of a shared tile": Case(lambda acc: acc, (BF16,), tile=(128, 256), ragged=Dimension.K),
}
M = 333  # no multiple of 16
GUARD = 4096


class Library:
    """The kernels of some cases, with parts of the headers' text replaced."""

    def __init__(self, folder, names, replacements=()):
        folder.mkdir(exist_ok=True)
        left = list(replacements)
        for path in HEADERS.glob("*.cuh"):
            text = path.read_text()
            for there, instead in [of for of in left if of[0] in text]:
                assert text.count(there) == 1, there
                text = text.replace(there, instead)
                left.remove((there, instead))
            (folder / path.name).write_text(text)
        assert not left
        (folder / "ptx_sm90.cuh").write_text(PTX.replace("OTHERS", OTHERS))
        self.kernels, programs = {}, []
        for i, name in enumerate(names):
            spec, kernel = CASES[name].kernel(M)
            self.kernels[name] = (i, spec, kernel)
            text = kernel.call.source.split("\n", 1)[1].split('extern "C"')[0]
            types = re.search(r"coda::Params<\d+, \d+>", kernel.call.source)[0]
            of = f"p{i}::Config, p{i}::Epilogue, {types}"
            programs.append(f"namespace p{i} {{\n{text}\n}}\n")
            if spec.ragged is Dimension.K:
                arguments = "int consumer, int slot, int first, unsigned char* stages, int bytes, char* said"
                call = f"zero<{of}>(consumer, slot, first, stages, bytes, said)"
            else:
                arguments, call = "const Launch* launch", f"run<{of}>(launch)"
            programs.append(f'extern "C" int run_{i}({arguments}) {{ return {call}; }}\n')
        (folder / "run.cc").write_text(SOURCE.replace("PROGRAMS", "".join(programs)))
        command = ["g++", "-std=c++20", "-O0", "-w", "-shared", "-fPIC", "-fno-gnu-unique", "-o", "run.so", "run.cc"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[:4000]
        self._library = ctypes.CDLL(str(folder / "run.so"))

    def store(self, name, pieces, acc, lane_first=0):
        """All results, in arrays of bytes that were full of ones, and with as much before and behind them."""
        i, spec, kernel = self.kernels[name]
        out = [_poisoned(result) for result in kernel.results]
        first = len(spec.batched)  # the results' buffers
        call = kernel.call
        maps = (TensorMap * (len(call.maps) // 6))()
        for at in range(2, len(maps)):
            buffer, halves, split_rows, columns, rows, swizzle = call.maps[6 * at : 6 * at + 6]
            assert not split_rows
            result, (_, inside) = kernel.results[buffer - first], out[buffer - first]
            bytes_, pitch = result.dtype.itemsize, result.shape[1] * result.dtype.itemsize
            maps[at] = TensorMap(inside.ctypes.data, bytes_, columns, rows, swizzle)
            maps[at].sizes[:] = (result.shape[1] // halves, halves, result.shape[0], 1)
            maps[at].strides[:] = (bytes_, pitch // halves, pitch, pitch * result.shape[0])
        offsets = np.zeros(4, np.int32)
        of_buffer = {first - 1: offsets, **{first + j: inside for j, (_, inside) in enumerate(out)}}
        pointers = (ctypes.c_void_p * len(call.pointers))(*(of_buffer[buffer].ctypes.data for buffer in call.pointers))
        of_pieces, acc = (Piece * len(pieces))(*pieces), np.ascontiguousarray(acc, np.float32)
        launch = Launch(M, acc.shape[1], len(pieces), lane_first)
        launch.piece, launch.acc = ctypes.addressof(of_pieces), acc.ctypes.data
        launch.map, launch.pointer = ctypes.addressof(maps), ctypes.addressof(pointers)
        assert not self._library[f"run_{i}"](ctypes.byref(launch)), "a misaligned store of 16 bytes"
        for whole, inside in out:
            assert np.all(whole[:GUARD] == 0xFF) and np.all(whole[GUARD + inside.size :] == 0xFF), "outside of an array"
        return [
            inside.view(_bits(result)).reshape(result.shape)
            for (_, inside), result in zip(out, kernel.results, strict=True)
        ]

    def zero(self, name, consumer, slot, first, stages):
        """The stages with that of `slot` zeroed; the bytes of one; what a thread did."""
        stages, said = stages.copy(), ctypes.create_string_buffer(64)
        bytes_ = self._library[f"run_{self.kernels[name][0]}"](
            consumer, slot, first, stages.ctypes.data_as(ctypes.c_void_p), stages.size, said
        )
        return stages, bytes_, said.value.decode()


def _poisoned(result):
    """An array of bytes that are all ones, with more of them around it."""
    size = int(np.prod(result.shape)) * result.dtype.itemsize
    whole = np.full(size + 2 * GUARD + 64, 0xFF, np.uint8)
    start = -whole.ctypes.data % 64
    whole = whole[start : start + size + 2 * GUARD]
    return whole, whole[GUARD : GUARD + size]


def _bits(result):
    return {2: np.uint16, 4: np.uint32}[result.dtype.itemsize]


def tiles(library, name, row, row_end, *, has_product=True, order=0):
    """The pieces of all columns for a tile's rows."""
    _, spec, kernel = library.kernels[name]
    n, columns = CASES[name].n // spec.program.halves.of_n, CASES[name].tile[1] // spec.program.halves.of_n
    found, index_n = [], 0
    for section, (begin, end) in enumerate(spec.program.sections):
        for column in range(begin, end or n, columns):
            place = column, end or n, section, 0, index_n, has_product
            index_n += 1
            if CASES[name].tile[0] == 128 and "consumer_m = 64" in kernel.call.source:  # they share a tile
                found += [Piece(consumer, row + 64 * consumer, row_end, *place) for consumer in range(2)]
            else:
                found.append(Piece((index_n + order) % 2, row, row_end, *place))
    return found


def rows_of_piece(name):
    return 64 if CASES[name].tile in ((128, 256), (64, 256)) else 128


def check(library, name, pieces, acc, **options):
    """That the pieces' own elements are as they should be, and all others as they were."""
    _, spec, kernel = library.kernels[name]
    found, stores = library.store(name, pieces, acc, **options), spec.program.stores
    values = jax.tree.leaves(CASES[name].epilogue(jnp.asarray(acc)))
    columns = CASES[name].tile[1] // spec.program.halves.of_n
    for number, (out, result) in enumerate(zip(found, kernel.results, strict=True)):
        expected = np.full(result.shape, -1, _bits(result).__name__.replace("u", "")).view(_bits(result))
        may_be = np.zeros(result.shape, bool)  # of a whole row where a slice ends: values of the next one
        if number >= len(stores):
            value = np.asarray(acc, np.float32)
        else:
            value = np.asarray(values[stores[number].output]).astype(result.dtype).view(_bits(result))
        for piece in pieces:
            rows = slice(piece.row, min(piece.row_end, piece.row + rows_of_piece(name), M))
            if rows.stop <= rows.start:
                continue
            if number >= len(stores):
                if piece.has_product:
                    of_tile = value[rows, piece.column : piece.column + columns].sum(1, dtype=np.float32)
                    expected[piece.index_n, rows] = of_tile.view(np.uint32)
                continue
            first, end = stores[number].slice or (0, result.shape[1])
            if not (first <= piece.column < end):
                continue
            halves = spec.program.halves.apart(stores[number].width)
            for half in range(halves):
                of_half = half * result.shape[1] // halves - first
                mine = slice(of_half + piece.column, of_half + min(piece.column + columns, piece.column_end))
                expected[rows, mine] = value[rows, mine] if piece.has_product else 0
                more = slice(mine.stop, min(of_half + piece.column + columns, (half + 1) * result.shape[1] // halves))
                may_be[rows, more] = True
        wrong = (out != expected) & ~(may_be & (out == (value if number < len(stores) else out)))
        places = np.argwhere(wrong)[:4].tolist()
        assert not wrong.any(), f"result {number}: {wrong.sum()} elements, at {places}: {out[wrong][:4]}"


GROUPED = [name for name in CASES if CASES[name].ragged is Dimension.M]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return Library(tmp_path_factory.mktemp("stores"), list(CASES))


def accumulator(name, seed=0):
    """Small integers, whose sums are exact in any order."""
    return np.random.default_rng(seed).integers(-9, 10, (M, CASES[name].n)).astype(np.float32)


@pytest.mark.parametrize("name", GROUPED)
def test_a_tile_stores_its_own_rows_alone(library, name):
    for size in (*range(1, 17), 31, 33, 48, 63, 64, 65, 100, 127, 128):
        for row in (0, 101) if size in (7, 128) else (101,):
            pieces = tiles(library, name, row, row + size)
            check(library, name, pieces, accumulator(name), lane_first=size % 32)


@pytest.mark.parametrize("name", GROUPED)
def test_the_last_rows_of_the_array(library, name):
    for row in (M - 1, M - 16, M - 45, M - 128):
        check(library, name, tiles(library, name, row, M), accumulator(name))


@pytest.mark.parametrize("name", GROUPED)
def test_zeros_for_rows_of_no_group(library, name):
    for size in (1, 15, 16, 50, 128):
        check(library, name, tiles(library, name, 101, 101 + size, has_product=False), accumulator(name))


@pytest.mark.parametrize("name", GROUPED)
def test_tiles_without_rows_store_nothing(library, name):
    """As the second of a cluster has them in an odd row of tiles."""
    check(library, name, tiles(library, name, 101, 101), accumulator(name))


@pytest.mark.parametrize("name", GROUPED)
def test_a_consumer_goes_from_tile_to_tile(library, name):
    """Whole boxes, which the copy engine may still have to read, and others take turns in the same slots."""
    rows, pieces = CASES[name].tile[0], []
    for i, (first, end) in enumerate([(0, 5), (5, 150), (150, 150), (150, 179), (179, 310), (310, M)]):
        for row in range(first, end, rows):
            pieces += tiles(library, name, row, end, has_product=i not in (0, 5), order=row // rows)
    for order in range(2):
        if order:
            np.random.default_rng(0).shuffle(pieces)
        check(library, name, pieces, accumulator(name), lane_first=7 * order)


@functools.cache
def _finite(rows):
    return np.random.default_rng(0).normal(size=(rows, 64)).astype(BF16)


def _stages(bytes_, valid):
    """Stages of bfloat16, whose rows of k from `valid` on are NaN and infinite."""
    rows = _finite(bytes_ // 128).copy()
    rows.reshape(-1, 64, 64)[:, valid:] = np.where(np.arange(64) % 3 == 0, np.nan, np.inf)
    return rows.view(np.uint8).reshape(-1)


def _matrix(chunks):
    """(k, columns) of chunks of 64 rows of k that are swizzled."""
    rows = chunks.view(BF16).reshape(-1, 64, 8, 8)
    k = np.arange(64)
    plain = rows[:, k[:, None], np.arange(8) ^ (k[:, None] & 7)]
    return plain.reshape(-1, 64, 64).transpose(1, 0, 2).reshape(64, -1).astype(np.float32)


def check_zeroed(library, name, first):
    """Both consumers, if they share the tile, one after the other; else each on its own."""
    (tile_m, tile_n), shares = CASES[name].tile, CASES[name].tile == (128, 256)
    a_rows, b_rows = tile_m, tile_n  # of 128 bytes in a stage: 64 of k for each 64 columns
    stage = (a_rows + b_rows) * 128
    count = int(re.search(r"stages = (\d+)", library.kernels[name][2].call.source)[1])
    before, slot = _stages(stage * count, first), 1
    after = before
    for consumer in range(2):
        given = after if shares else before
        after, bytes_, said = library.zero(name, consumer, slot, first, given)
        assert bytes_ == stage
        assert said == f"zf{3 + consumer}/128", "zeros, a fence, the consumer's barrier"
        mine = np.zeros(stage * count // 128, bool)  # rows that may change
        share = slice(consumer * 64, consumer * 64 + 64) if shares else slice(0, a_rows)
        of_stage = mine[slot * stage // 128 : (slot + 1) * stage // 128]
        of_stage[share] = of_stage[a_rows:] = True
        mine &= np.arange(len(mine)) % 64 >= first
        rows, rows_before = after.reshape(-1, 128), given.reshape(-1, 128)
        assert np.all(rows[mine] == 0)
        assert np.array_equal(rows[~mine], rows_before[~mine])
        if first % 9 == 5 and (consumer == 1 or not shares):
            one = after[slot * stage : (slot + 1) * stage]
            whole = before[slot * stage : (slot + 1) * stage]
            a, b = _matrix(one[: a_rows * 128]), _matrix(one[a_rows * 128 :])
            of_a, of_b = _matrix(whole[: a_rows * 128])[:first], _matrix(whole[a_rows * 128 :])[:first]
            assert np.array_equal(a.T @ b, a[:first].T @ b[:first]) and np.isfinite(a.T @ b).all()
            np.testing.assert_allclose(a.T @ b, of_a.T @ of_b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["k", "k of a shared tile"])
def test_rows_of_k_behind_the_end_are_zeroed_in_both_factors(library, name):
    for first in range(64):
        check_zeroed(library, name, first)


FAULTS = {
    "a neighbour's rows": ("kept gate", "if (rows < 16) {", "if (rows < 0) {"),
    "an empty group is missing": ("bfloat16", "    });\n    if (lane == 0) ptx::tma_store_commit();", "    });"),
    "a row too far": ("float32", "16 * warp + row) * width", "16 * warp + row + 1) * width"),
    "no swizzle": ("float32", "Result::offset(row, byte / 16) + byte % 16", "row * row_bytes + byte"),
    "no half": ("kept gate", "(Layout::head > 0 ? 0 : access.half * n) + at - access.first", "at - access.first"),
    "whole chunks": ("slices at any column", "rows_are_aligned<variant, index>() ? 16", "true ? 16"),
    "the wrong of two": ("slices at any column", "8 * (value & 2)", "0"),
    "no slice": ("slices", "access.half * n) + at - access.first", "access.half * n) + at"),
    "columns beyond the end": ("bfloat16", "if (at >= tile.column_end) continue;", ""),
    "rows of another width": ("slices", "access.columns > 0 ? access.columns : ", ""),
    "a sum of a neighbour's rows": ("row sums", "at < row_end(tile)", "at < params.m"),
    "a batch": ("bfloat16", "return rows_in_groups ? 0 : tile.batch;", "return tile.batch;"),
    "zeros in one box": (
        "bfloat16",
        "for (int box = 0; box < Layout::boxes; ++box)\n#pragma",
        "for (int box = 0; box < 1; ++box)\n#pragma",
    ),
    "rows of another block": (
        "bfloat16",
        "row_end(tile) - (tile.row + 64 * block + 16 * warp)",
        "row_end(tile) - (tile.row + 16 * warp)",
    ),
    "k: one factor": ("k", "chunk < chunks_of_a + chunks_of_b;", "chunk < chunks_of_a;"),
    "k: the other factor": (
        "k",
        "for (int chunk = 0; chunk < chunks_of_a",
        "for (int chunk = chunks_of_a; chunk < chunks_of_a",
    ),
    "k: a row too few": ("k", "int at = first * factor_row_bytes", "int at = (first + 1) * factor_row_bytes"),
    "k: a row too many": ("k", "int at = first * factor_row_bytes", "int at = (first - 1) * factor_row_bytes"),
    "k: another share": (
        "k of a shared tile",
        "(cooperative ? consumer * chunks_of_a",
        "(cooperative ? 0 * chunks_of_a",
    ),
    "k: no fence": ("k", "    ptx::fence_async_proxy();\n    ptx::named_barrier_sync", "    ptx::named_barrier_sync"),
}
SOME = {"a neighbour's rows", "an empty group is missing", "k: one factor"}  # the others are slow


@pytest.mark.parametrize(
    "fault", [pytest.param(FAULTS[name], marks=[pytest.mark.slow] * (name not in SOME)) for name in FAULTS], ids=FAULTS
)
def test_a_fault_shows(tmp_path, fault):
    name, *replacement = fault
    library = Library(tmp_path / "fault", [name], [tuple(replacement)])
    with pytest.raises(AssertionError):
        if CASES[name].ragged is Dimension.K:
            for first in (1, 5, 63):
                check_zeroed(library, name, first)
        else:
            test_a_tile_stores_its_own_rows_alone(library, name)
            test_zeros_for_rows_of_no_group(library, name)
            test_a_consumer_goes_from_tile_to_tile(library, name)
