// The contract of a generated Epilogue (coda_jax/epilogue/emit.py): its members, and the inputs and outputs of its
// functions. Compiles for the host too, where tests run generated epilogues.
#pragma once

#include "dtypes.cuh"
#include "elementwise.cuh"

namespace coda {

enum class Op { sum, max, min, logsumexp };

/// The dimension that the groups of a grouped product divide (grouped_scheduler.cuh).
enum class Ragged { none, m, k };

/// One operand value in a register: .f for floating types (converted to float32), .i for int32 and bool.
union Word {
  float f;
  int i;
};

// The lists of an Epilogue have an entry for each array, or for each half of N or of a head that an array spans. An
// empty list has one entry, for which `is_none` is true.

/// Columns first .. end of the product, whose bounds no tile straddles, and their variant. {0, 0, 0}: all columns.
struct Section {
  int variant = 0;
  int first = 0;
  int end = 0;
};

/// A tile read or written: its tensor map, the half of this entry, and the product's column that is the array's first.
/// For rows in groups also the pointer, and the width of a row: the number of halves, or of columns. For a result of 8
/// bits whether its columns are in contraction order (fragment_sm90.cuh), and whether it saturates: values beyond the
/// dtype's range are the largest finite one, or else XLA's.
struct TileAccess {
  int map = -1;
  int half = 0;
  int first = 0;
  DType dtype = DType::f32;
  bool batched = false;
  int pointer = -1;
  int halves = 1;
  int columns = 0;
  bool contraction_order = false;  // of 8 bits
  bool saturates = false;          // of 8 bits

  CODA_CONSTEXPR bool is_none() const { return map < 0; }
};

/// A tile written transposed, (N, M): its tensor map, the half, and its number among a Result's tiles.
struct TransposedAccess {
  int map = -1;
  int half = 0;
  int value = 0;
  DType dtype = DType::f32;
  bool contraction_order = false;
  bool saturates = false;

  CODA_CONSTEXPR bool is_none() const { return map < 0; }
};

/// A vector, scalar or rope table: its pointer, the half, and how many halves the array spans. For a rope table whose
/// rows repeat, their number is the `period`.
struct VectorAccess {
  int pointer = -1;
  int half = 0;
  int halves = 1;
  DType dtype = DType::f32;
  bool batched = false;
  int period = 0;

  CODA_CONSTEXPR bool is_none() const { return pointer < 0; }
};

/// A reduction's partial results: their pointer, the half, and how many halves the array spans.
struct ReductionAccess {
  int pointer = -1;
  int half = 0;
  int halves = 1;
  Op op = Op::sum;

  CODA_CONSTEXPR bool is_none() const { return pointer < 0; }
};

/// The defaults of an Epilogue: one variant for all columns, without operands or results.
/// contracts.cuh checks the types of all members.
struct EpilogueDefaults {
  using DType = coda::DType;
  using Op = coda::Op;
  using Section = coda::Section;
  using TileAccess = coda::TileAccess;
  using TransposedAccess = coda::TransposedAccess;
  using VectorAccess = coda::VectorAccess;
  using ReductionAccess = coda::ReductionAccess;

  // An element is one column, or two that are combined, one of each half of N or of each half of a head.
  static constexpr int halves = 1;
  static constexpr int acc_halves = 1;        // how many of them acc spans, and with it b
  static constexpr int head = 0;              // columns of a head, if the halves are those of heads
  static constexpr bool interleaved = false;  // the halves of a head are its even and its odd columns
  static constexpr bool symmetric = false;    // of all results only the tiles on and below the diagonal are computed

  static constexpr Section section[] = {{}};
  static constexpr TileAccess tile_store[][1] = {{{}}};  // of each section
  static constexpr TransposedAccess transposed_store[] = {{}};
  static constexpr TileAccess tile_load[] = {{}};
  static constexpr VectorAccess row_vector[] = {{}};     // (N,)
  static constexpr VectorAccess column_vector[] = {{}};  // (M, 1)
  static constexpr VectorAccess scalar[] = {{}};
  static constexpr VectorAccess rope_table[] = {{}};   // (M, columns of a head)
  static constexpr VectorAccess head_vector[] = {{}};  // (columns of a head,)
  static constexpr ReductionAccess row_reduction[] = {{}};
  static constexpr ReductionAccess column_reduction[] = {{}};
  static constexpr ReductionAccess whole_reduction[] = {{}};  // of all rows and columns: a maximum

  // Values of a head, reduced over its columns in passes: values of one pass may depend on those of earlier passes.
  static constexpr int head_values = 0, head_passes = 0;
  static constexpr Op head_op[] = {Op::sum};
  static constexpr int head_pass[][1] = {{-1}};  // for each variant and value: its pass, or -1 if it is not needed

  /// Computes an element's terms of the values of its head, in one of the passes.
  template <int pass>
  CODA_DEVICE static void evaluate_heads(const auto& element, float* value) {}

  // Without a default: template <int variant> static void evaluate(const Element& in, Result& out).
};

CODA_CONSTEXPR int at_least_one(int count) {
  return count > 0 ? count : 1;
}

/// The number of entries of a list.
template <class Access, int size>
CODA_CONSTEXPR int count(const Access (&list)[size]) {
  int entries = 0;
  while (entries < size && !list[entries].is_none()) ++entries;
  return entries;
}

template <class Epilogue>
CODA_CONSTEXPR int count_variants() {
  int variants = 1;
  for (const Section& section : Epilogue::section)
    variants = section.variant < variants ? variants : section.variant + 1;
  return variants;
}

/// The first section of a variant. The stores of the variant's other sections only differ in place.
template <class Epilogue>
CODA_CONSTEXPR int first_section_of(int variant) {
  int section = 0;
  while (Epilogue::section[section].variant != variant) ++section;
  return section;
}

/// The number of tiles of a Result: those of stores, in order, and then those that are only stored transposed.
template <class Epilogue>
CODA_CONSTEXPR int most_tile_values() {
  int most = 0;
  for (const auto& stores : Epilogue::tile_store) most = count(stores) > most ? count(stores) : most;
  for (const TransposedAccess& store : Epilogue::transposed_store)
    if (!store.is_none() && store.value >= most) most = store.value + 1;
  return most;
}

/// The inputs of `evaluate` for one element. If halves are interleaved, an entry of a list over columns stands for
/// both, and its two values are adjacent.
template <class Epilogue>
struct ElementOf {
  static constexpr int per_entry = Epilogue::entry_values;
  float acc[Epilogue::acc_halves];
  Word tile[at_least_one(Epilogue::tile_loads) * per_entry];
  Word row_vector[at_least_one(Epilogue::row_vectors) * per_entry];
  Word column_vector[at_least_one(Epilogue::column_vectors)];
  Word scalar[at_least_one(Epilogue::scalars)];
  Word rope_table[at_least_one(Epilogue::rope_tables) * per_entry];
  Word head_vector[at_least_one(Epilogue::head_vectors) * per_entry];
  float head_value[at_least_one(Epilogue::head_values)];
  int row;
  int column[Epilogue::halves];
};

/// Terms of reductions of all rows and columns.
template <int count>
struct WholeTerms {
  float whole[count];
};
template <>
struct WholeTerms<0> {};

/// The outputs of `evaluate`: values of tiles, and terms of the reductions along the element's row and columns.
template <class Epilogue>
struct ResultOf : WholeTerms<Epilogue::whole_reductions> {
  static constexpr int per_entry = Epilogue::entry_values;
  float tile[at_least_one(most_tile_values<Epilogue>()) * per_entry];
  float row[at_least_one(Epilogue::row_reductions)];
  float column[at_least_one(Epilogue::column_reductions) * per_entry];
};

/// A generated Epilogue with the constants and types that follow from its lists, as the kernel uses it.
template <class Generated>
struct CompleteEpilogue : Generated {
  static constexpr int entry_values = Generated::interleaved ? 2 : 1;  // of an entry of a list over columns
  static constexpr int sections = sizeof(Generated::section) / sizeof(Section);
  static constexpr int variants = count_variants<Generated>();
  static constexpr int tile_loads = count(Generated::tile_load);
  static constexpr int row_vectors = count(Generated::row_vector);
  static constexpr int column_vectors = count(Generated::column_vector);
  static constexpr int scalars = count(Generated::scalar);
  static constexpr int rope_tables = count(Generated::rope_table);
  static constexpr int head_vectors = count(Generated::head_vector);
  static constexpr int row_reductions = count(Generated::row_reduction);
  static constexpr int column_reductions = count(Generated::column_reduction);
  static constexpr int whole_reductions = count(Generated::whole_reduction);
  static constexpr int transposed_stores = count(Generated::transposed_store);

  using Element = ElementOf<CompleteEpilogue>;
  using Result = ResultOf<CompleteEpilogue>;

  CODA_CONSTEXPR static int tile_stores(int variant) {
    return count(Generated::tile_store[first_section_of<Generated>(variant)]);
  }
  CODA_CONSTEXPR static int tile_values(int variant) {
    return transposed_stores > 0 ? most_tile_values<Generated>() : tile_stores(variant);
  }
};

}  // namespace coda
