"""Runs generated epilogues on the host: many programs compiled by g++ together, driven as the kernel drives them.

Buffers are found through the emitted access tables (map and pointer numbers, halves, widths, dtypes), so these are
tested too.
"""

import ctypes
import hashlib
import subprocess
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from coda_jax.epilogue import Axis, Program, Width, emit, finish

HEADERS = Path(__file__).resolve().parents[1] / "cuda"

DRIVER = r"""
#include "epilogue_abi.cuh"
#include <cstring>
#include <vector>
using namespace coda;

static _Float16 half_of(unsigned bits) {
  const unsigned short word = bits;
  _Float16 value;
  std::memcpy(&value, &word, 2);
  return value;
}
// The exponent's bits are those of a half's below its first: all but NaN is 2^8 times that half.
static float from_e4m3(unsigned bits) {
  if ((bits & 0x7f) == 0x7f) return nan();
  return 256 * static_cast<float>(half_of((bits & 0x80) << 8 | (bits & 0x7f) << 7));
}

static Word load(const void* base, long long index, DType dtype) {
  Word word;
  if (dtype == DType::f32) word.f = static_cast<const float*>(base)[index];
  if (dtype == DType::i32) word.i = static_cast<const int*>(base)[index];
  if (dtype == DType::pred) word.i = static_cast<const unsigned char*>(base)[index];
  if (dtype == DType::f16) word.f = static_cast<const _Float16*>(base)[index];
  if (dtype == DType::e4m3) word.f = from_e4m3(static_cast<const unsigned char*>(base)[index]);
  if (dtype == DType::e5m2) word.f = static_cast<float>(half_of(static_cast<const unsigned char*>(base)[index] << 8));
  if (dtype == DType::bf16) word.f = from_bits(unsigned(static_cast<const unsigned short*>(base)[index]) << 16);
  return word;
}
static float combine(Op op, float a, float b) {
  return op == Op::sum ? a + b : op == Op::max ? maximum(a, b) : minimum(a, b);
}
// As the four lanes that share a row do it, three values at a time; what is missing at the end counts as -inf.
static float log_sum_exp(const std::vector<float>& values) {
  LogSumExp lanes[4];
  for (int begin = 0; begin < int(values.size()); begin += 12)
    for (int lane = 0; lane < 4; ++lane) {
      float some[3];
      for (int i = 0; i < 3; ++i) {
        const int at = begin + 3 * lane + i;
        some[i] = at < int(values.size()) ? values[at] : -infinity();
      }
      lanes[lane].add(some);
    }
  for (int lane = 1; lane < 4; ++lane) lanes[0].merge(lanes[lane]);
  return lanes[0].result();
}

// Column of a half in memory: after the columns of the half before it, or in heads whose halves they are.
template <class E>
static int memory_column(int half, int column, int n) {
  if constexpr (E::interleaved) return 2 * column + half;
  if constexpr (E::head > 0)
    return column / (E::head / 2) * E::head + half * (E::head / 2) + column % (E::head / 2);
  return half * n + column;
}

// What one element reads, but for the values of its head. columns[i]: row pitch of map i.
template <class E>
static void fill(typename E::Element& in, int row, int column, int n, const float* acc, void** map, const int* columns,
                 void** pointer) {
  in.row = row;
  for (int half = 0; half < E::halves; ++half) in.column[half] = memory_column<E>(half, column, n);
  for (int half = 0; half < E::acc_halves; ++half)
    in.acc[half] = acc[static_cast<long long>(row) * n * E::acc_halves + memory_column<E>(half, column, n)];
  for (int i = 0; i < E::tile_loads * E::entry_values; ++i) {
    const TileAccess t = E::tile_load[i / E::entry_values];
    const int at = memory_column<E>(t.half + i % E::entry_values, column, n);
    in.tile[i] = load(map[t.map], static_cast<long long>(row) * columns[t.map] + at, t.dtype);
  }
  for (int i = 0; i < E::row_vectors * E::entry_values; ++i) {
    const VectorAccess v = E::row_vector[i / E::entry_values];
    in.row_vector[i] = load(pointer[v.pointer], memory_column<E>(v.half + i % E::entry_values, column, n), v.dtype);
  }
  for (int i = 0; i < E::rope_tables * E::entry_values; ++i) {
    const VectorAccess t = E::rope_table[i / E::entry_values];
    const int width = E::head > 1 ? E::head / 2 : 1;
    int at = t.half * width + column % width;
    if (E::interleaved && t.halves == 2) at = 2 * (column % width) + i % E::entry_values;
    in.rope_table[i] = load(pointer[t.pointer], (t.period ? row % t.period : row) * t.halves * width + at, t.dtype);
  }
  for (int i = 0; i < E::head_vectors * E::entry_values; ++i) {
    const VectorAccess v = E::head_vector[i / E::entry_values];
    const int width = E::head > 1 ? E::head / 2 : 1;
    int at = v.half * width + column % width;
    if (E::interleaved && v.halves == 2) at = 2 * (column % width) + i % E::entry_values;
    in.head_vector[i] = load(pointer[v.pointer], at, v.dtype);
  }
  for (int i = 0; i < E::column_vectors; ++i)
    in.column_vector[i] = load(pointer[E::column_vector[i].pointer], row, E::column_vector[i].dtype);
  for (int i = 0; i < E::scalars; ++i) in.scalar[i] = load(pointer[E::scalar[i].pointer], 0, E::scalar[i].dtype);
}

// Where contraction order has an element of a row.
static int ordered(int at, bool contraction_order) {
  return contraction_order ? at / 16 * 16 + at % 8 * 2 + at / 8 % 2 : at;
}

template <class E>
static int section_of(int first_column) {
  int section = 0;
  while (E::section[section].end && first_column >= E::section[section].end) ++section;
  return section;
}

template <class E, int first = 0>
static void evaluate_heads(int pass, const typename E::Element& in, float* out) {
  if (pass == first) E::template evaluate_heads<first>(in, out);
  if constexpr (first + 1 < E::head_passes) evaluate_heads<E, first + 1>(pass, in, out);
}

template <class E, int first = 0>
static void evaluate(int variant, const typename E::Element& in, typename E::Result& out) {
  if (variant == first) E::template evaluate<first>(in, out);
  if constexpr (first + 1 < E::variants) evaluate<E, first + 1>(variant, in, out);
}

// The values of all heads of a row, [head][value], in as many passes over the row as the kernel makes over a head.
template <class E>
static std::vector<float> values_of_heads(int row, int n, const float* acc, void** map, const int* columns,
                                          void** pointer) {
  const int width = E::head > 1 ? E::head / 2 : 1, count = E::head_values;
  std::vector<float> heads(n / width * count + 1);
  for (int pass = 0; pass < E::head_passes; ++pass) {
    std::vector<bool> begun(heads.size());
    for (int column = 0; column < n; ++column) {
      typename E::Element in;
      float out[count + 1];
      fill<E>(in, row, column, n, acc, map, columns, pointer);
      for (int i = 0; i < count; ++i) in.head_value[i] = heads[column / width * count + i];
      evaluate_heads<E>(pass, in, out);
      const int variant = E::section[section_of<E>(in.column[0])].variant;
      for (int i = 0; i < count; ++i) {
        const int at = column / width * count + i;
        if (E::head_pass[variant][i] != pass) continue;
        heads[at] = begun[at] ? combine(E::head_op[i], heads[at], out[i]) : out[i];
        begun[at] = true;
      }
    }
  }
  return heads;
}

// Reductions start from their neutral element; `n` is the columns of one half.
template <class E>
static void drive(int m, int n, const float* acc, void** map, const int* columns, void** pointer) {
  for (int row = 0; row < m; ++row) {
    const std::vector<float> heads = values_of_heads<E>(row, n, acc, map, columns, pointer);
    std::vector<float> exponents[E::row_reductions + 1];
    for (int column = 0; column < n; ++column) {
      typename E::Element in;
      typename E::Result out;
      fill<E>(in, row, column, n, acc, map, columns, pointer);
      for (int i = 0; i < E::head_values; ++i)
        in.head_value[i] = heads[column / (E::head > 1 ? E::head / 2 : 1) * E::head_values + i];
      const int section = section_of<E>(in.column[0]), variant = E::section[section].variant;
      evaluate<E>(variant, in, out);
      for (int i = 0; i < E::tile_stores(variant) * E::entry_values; ++i) {
        const TileAccess t = E::tile_store[section][i / E::entry_values];
        float* to = static_cast<float*>(map[t.map]) + static_cast<long long>(row) * columns[t.map];
        const int at = memory_column<E>(t.half + i % E::entry_values, column, n) - t.first;
        to[ordered(at, t.contraction_order)] = out.tile[i];
      }
      for (int i = 0; i < E::transposed_stores; ++i) {
        const TransposedAccess t = E::transposed_store[i];
        const long long first = static_cast<long long>(memory_column<E>(t.half, column, n)) * columns[t.map];
        static_cast<float*>(map[t.map])[first + ordered(row, t.contraction_order)] = out.tile[t.value];
      }
      if constexpr (E::whole_reductions > 0)
        for (int i = 0; i < E::whole_reductions; ++i) {
          float& to = *static_cast<float*>(pointer[E::whole_reduction[i].pointer]);
          to = combine(E::whole_reduction[i].op, to, out.whole[i]);
        }
      for (int i = 0; i < E::row_reductions; ++i) {
        const ReductionAccess r = E::row_reduction[i];
        float& to = static_cast<float*>(pointer[r.pointer])[row];
        if (r.op == Op::logsumexp)
          exponents[i].push_back(out.row[i]);
        else
          to = combine(r.op, to, out.row[i]);
      }
      for (int i = 0; i < E::column_reductions * E::entry_values; ++i) {
        const ReductionAccess r = E::column_reduction[i / E::entry_values];
        float& to = static_cast<float*>(pointer[r.pointer])[memory_column<E>(r.half + i % E::entry_values, column, n)];
        to = combine(r.op, to, out.column[i]);
      }
    }
    for (int i = 0; i < E::row_reductions; ++i)
      if (E::row_reduction[i].op == Op::logsumexp)
        static_cast<float*>(pointer[E::row_reduction[i].pointer])[row] = log_sum_exp(exponents[i]);
  }
}
"""


class HostPrograms:
    """Programs compiled together; `run(i, ...)` executes number i."""

    def __init__(self, programs: Sequence[Program], directory: Path):
        self.programs = list(programs)
        parts = [DRIVER]
        for i, program in enumerate(self.programs):
            text = emit(program, [np.dtype(np.float32)] * len(program.stores), [False] * len(program.operands))
            # Unnamed: the members of equally named classes in other shared objects would be taken for these.
            parts.append(f"namespace {{ namespace p{i} {{\n{text}}} }}\n")
            arguments = "int m, int n, const float* acc, void** map, const int* columns, void** pointer"
            call = f"drive<CompleteEpilogue<p{i}::Epilogue>>(m, n, acc, map, columns, pointer)"
            parts.append(f'extern "C" void run_{i}({arguments}) {{ {call}; }}\n')
        source = "".join(parts)
        name = hashlib.sha256(source.encode()).hexdigest()[:16]
        (directory / f"{name}.cc").write_text(source)
        library = directory / f"{name}.so"
        command = [
            "g++",
            "-std=c++20",
            "-O0",
            "-w",
            "-shared",
            "-fPIC",
            "-ffp-contract=off",
            f"-I{HEADERS}",
            "-o",
            str(library),
        ]
        done = subprocess.run([*command, str(directory / f"{name}.cc")], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[:4000]
        self.library = ctypes.CDLL(str(library))

    def run(self, index: int, acc: np.ndarray, operands: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Flat outputs of program `index`; tiles as float32."""
        program = self.programs[index]
        m, columns = acc.shape
        n = columns // program.halves.acc_halves
        acc = np.ascontiguousarray(acc, np.float32)
        operands = [np.array(x, order="C") for x in operands]
        for x, operand in zip(operands, program.operands, strict=True):
            assert x.dtype == operand.dtype
        tiles = [operands[i] for i in program.tile_operands]
        others = [x for x, o in zip(operands, program.operands, strict=True) if not o.kind.by_tensor_map]
        width = {width: program.halves.columns(width, columns) for width in Width}
        sizes = [s.slice[1] - s.slice[0] if s.slice else width[s.width] for s in program.stores]
        shapes = [(size, m) if s.transposed else (m, size) for s, size in zip(program.stores, sizes, strict=True)]
        stores = [np.full(shape, np.nan, np.float32) for shape in shapes]
        shape_of = {Axis.ROW: lambda _: m, Axis.COLUMN: lambda r: width[r.width], Axis.ALL: lambda _: ()}
        reductions = [np.full(shape_of[r.axis](r), r.op.neutral, np.float32) for r in program.reductions]
        maps, pointers = [acc, acc, *tiles, *stores], [*others, *reductions]
        pitches = (ctypes.c_int * len(maps))(*(x.shape[1] for x in maps))
        self.library[f"run_{index}"](
            m, n, acc.ctypes.data_as(ctypes.c_void_p), _addresses(maps), pitches, _addresses(pointers)
        )
        outputs = finish(program, [jnp.asarray(x) for x in reductions], [jnp.asarray(x) for x in operands], m)
        outputs.update({store.output: x for store, x in zip(program.stores, stores, strict=True)})
        return [np.asarray(outputs[i]) for i in range(program.num_outputs)]


def _addresses(arrays: Sequence[np.ndarray]) -> ctypes.Array:
    return (ctypes.c_void_p * max(1, len(arrays)))(*(x.ctypes.data for x in arrays))
