// The contract of a generated Epilogue and Config, as concepts. A member that is missing or has another type gives one
// error that says how to declare it; the rest of the kernel is not compiled then.
#pragma once

#include "epilogue_abi.cuh"

namespace coda {

// Members by their kind: a value, a list (an array of entries), or lists (an array of equally long ones).
// clang-format off
#define CODA_EPILOGUE_MEMBERS(value, list, lists) \
  value(int, halves)                              \
  value(int, acc_halves)                          \
  value(int, head)                                \
  value(bool, interleaved)                        \
  value(bool, symmetric)                          \
  list(Section, section)                          \
  lists(TileAccess, tile_store)                   \
  list(TransposedAccess, transposed_store)        \
  list(TileAccess, tile_load)                     \
  list(VectorAccess, row_vector)                  \
  list(VectorAccess, column_vector)               \
  list(VectorAccess, scalar)                      \
  list(VectorAccess, rope_table)                  \
  list(VectorAccess, head_vector)                 \
  list(ReductionAccess, row_reduction)            \
  list(ReductionAccess, column_reduction)         \
  list(ReductionAccess, whole_reduction)          \
  value(int, head_values)                         \
  value(int, head_passes)                         \
  list(Op, head_op)                               \
  lists(int, head_pass)

#define CODA_CONFIG_MEMBERS(value, list, lists)            \
  value(DType, input)                                      \
  value(int, tile_m) value(int, tile_n) value(int, tile_k) \
  value(int, consumer_m)                                   \
  value(int, loaded_rows)                                  \
  value(int, stages)                                       \
  value(int, cluster_m)                                    \
  value(int, box_n) value(int, subtile_n)                  \
  value(int, column_passes)                                \
  value(int, load_slots) value(int, store_slots)           \
  value(bool, split_k)                                     \
  value(bool, claims)                                      \
  value(bool, keeps_tables)                                \
  value(Ragged, ragged)                                    \
  value(int, groups) value(int, offsets)                   \
  value(int, multiprocessors)                              \
  value(bool, transpose_a) value(bool, transpose_b)        \
  value(bool, a_batched) value(bool, b_batched)            \
  value(int, shared_bytes)
// clang-format on

template <class A, class B>
constexpr bool is_same = false;
template <class A>
constexpr bool is_same<A, A> = true;
template <class Member, class Entry>
constexpr bool is_list = false;
template <class Entry, int size>
constexpr bool is_list<const Entry[size], Entry> = true;
template <class Member, class Entry>
constexpr bool are_lists = false;
template <class Entry, int count, int size>
constexpr bool are_lists<const Entry[count][size], Entry> = true;

#define CODA_HAS_VALUE(type, member) (requires { requires is_same<decltype(S::member), const type>; })
#define CODA_HAS_LIST(type, member) (requires { requires is_list<decltype(S::member), type>; })
#define CODA_HAS_LISTS(type, member) (requires { requires are_lists<decltype(S::member), type>; })
#define CODA_AND_VALUE(type, member) &&CODA_HAS_VALUE(type, member)
#define CODA_AND_LIST(type, member) &&CODA_HAS_LIST(type, member)
#define CODA_AND_LISTS(type, member) &&CODA_HAS_LISTS(type, member)
#define CODA_MUST_HAVE(struct_, declaration) #struct_ " must have: static constexpr " #declaration

template <class S>
concept HasEpilogueMembers = true CODA_EPILOGUE_MEMBERS(CODA_AND_VALUE, CODA_AND_LIST, CODA_AND_LISTS);

template <class S>
concept HasEvaluate =
    requires(const typename CompleteEpilogue<S>::Element& element, typename CompleteEpilogue<S>::Result& result) {
      S::template evaluate<0>(element, result);
    };

/// A pass over a head is a function of its own; an Epilogue without passes has that of EpilogueDefaults.
template <class S>
concept HasEvaluateHeads = requires(const typename CompleteEpilogue<S>::Element& element, float* value) {
  S::template evaluate_heads<0>(element, value);
};

template <class S>
concept GeneratedEpilogue = HasEpilogueMembers<S> && HasEvaluate<S> && HasEvaluateHeads<S>;

template <class S>
concept GeneratedConfig = true CODA_CONFIG_MEMBERS(CODA_AND_VALUE, CODA_AND_LIST, CODA_AND_LISTS);

/// Whether S is an Epilogue; if it is not, an error says why.
template <class S>
CODA_CONSTEXPR bool check_epilogue() {
#define CODA_ASSERT_VALUE(type, member) \
  static_assert(CODA_HAS_VALUE(type, member), CODA_MUST_HAVE(Epilogue, type member));
#define CODA_ASSERT_LIST(type, member) \
  static_assert(CODA_HAS_LIST(type, member), CODA_MUST_HAVE(Epilogue, type member[]));
#define CODA_ASSERT_LISTS(type, member) \
  static_assert(CODA_HAS_LISTS(type, member), CODA_MUST_HAVE(Epilogue, type member[][]));
  CODA_EPILOGUE_MEMBERS(CODA_ASSERT_VALUE, CODA_ASSERT_LIST, CODA_ASSERT_LISTS)
#undef CODA_ASSERT_LISTS
#undef CODA_ASSERT_LIST
#undef CODA_ASSERT_VALUE
  if constexpr (HasEpilogueMembers<S>) {
    static_assert(HasEvaluate<S>,
                  "Epilogue must have: template <int variant> static void evaluate(const Element& in, Result& out)");
    static_assert(
        HasEvaluateHeads<S>,
        "Epilogue must have: template <int pass> static void evaluate_heads(const Element& in, float* value)");
  }
  return GeneratedEpilogue<S>;
}

/// The same for a Config.
template <class S>
CODA_CONSTEXPR bool check_config() {
#define CODA_ASSERT_VALUE(type, member) \
  static_assert(CODA_HAS_VALUE(type, member), CODA_MUST_HAVE(Config, type member));
  CODA_CONFIG_MEMBERS(CODA_ASSERT_VALUE, , )
#undef CODA_ASSERT_VALUE
  return GeneratedConfig<S>;
}

#undef CODA_MUST_HAVE
#undef CODA_AND_LISTS
#undef CODA_AND_LIST
#undef CODA_AND_VALUE
#undef CODA_HAS_LISTS
#undef CODA_HAS_LIST
#undef CODA_HAS_VALUE
#undef CODA_CONFIG_MEMBERS
#undef CODA_EPILOGUE_MEMBERS

}  // namespace coda
