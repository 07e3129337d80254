// The products of cuda/accumulator_sm90.cuh on a host, with its descriptors: a warp has its 16 rows of a product.
#pragma once

#include "ptx_sm90.cuh"

// The header itself, but for what is instructions.
#define fence device_fence
#define commit device_commit
#define wait device_wait
#define keep_behind_wait device_keep_behind_wait
#define multiply device_multiply
#define multiply_fragment device_multiply_fragment
#include "device_accumulator_sm90.cuh"
#undef fence
#undef commit
#undef wait
#undef keep_behind_wait
#undef multiply
#undef multiply_fragment

namespace coda::wgmma {

/// A factor in shared memory, of which a step has 16 of k, as its descriptor says.
template <DType input, bool is_mn_major>
struct Factor {
  ptx::uint32 address, leading, stride;

  explicit Factor(ptx::uint64 of)
      : address((of & 0x3FFF) << 4), leading((of >> 16 & 0x3FFF) << 4), stride((of >> 32 & 0x3FFF) << 4) {
    if (of >> 62 != 1) ptx::fail("a descriptor of another swizzle");
  }
  float operator()(int i, int k) const {
    const ptx::uint32 linear = is_mn_major ? address + i / 64 * leading + k / 8 * stride + k % 8 * 128 + i % 64 * 2
                                           : address + i / 8 * stride + i % 8 * 128 + k * 2;
    const ptx::uint32 from = ptx::swizzled(linear);
    ptx::uint16 bits;
    std::memcpy(&bits, ptx::at(from, 2, 2), 2);
    if (!emulated::schedule.late_products && ptx::cta->written.has(from))
      ptx::fail("a product reads what is not fenced");
    return input == DType::bf16 ? __uint_as_float(static_cast<ptx::uint32>(bits) << 16) : ptx::f16_to_float(bits);
  }
};

/// d = a b + (adds ? d : 0) for the 16 rows of the current warp; a(row of the 64, k).
template <DType input, int b_is_mn_major, int registers, class A>
[[gnu::optimize("O3")]] void run(const emulated::Product& product, const A& a) {
  constexpr int columns = 2 * registers;
  const Factor<input, b_is_mn_major> b(product.b);
  const int first_row = threadIdx.x / 32 % 4 * 16;
  float factor[16][columns], sums[16][columns] = {};
  for (int column = 0; column < columns; ++column)
    for (int k = 0; k < 16; ++k) factor[k][column] = b(column, k);
  for (int row = 0; row < 16; ++row)
    for (int k = 0; k < 16; ++k) {
      const float one = a(first_row + row, k);
      for (int column = 0; column < columns; ++column) sums[row][column] += one * factor[k][column];
    }
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < registers; ++i) {
      const float sum = sums[lane / 4 + i / 2 % 2 * 8][i / 4 * 8 + lane % 4 * 2 + i % 2];
      product.d[lane][i] = product.adds ? product.d[lane][i] + sum : sum;
    }
}

/// A lane asks for its warp's next product.
inline void issue(const emulated::Product& mine, float* d, const ptx::uint32* words) {
  emulated::Warp& warp = emulated::warp();
  const int lane = threadIdx.x % 32, number = warp.issued[lane]++;
  emulated::Product& product = warp.products[number];
  if (product.lanes == 0)
    product = mine;
  else if (product.a != mine.a || product.b != mine.b || product.adds != mine.adds || product.run != mine.run)
    ptx::fail("lanes of a warp ask for different products");
  product.d[lane] = d, product.words[lane] = words;
  if (++product.lanes == 32 && !emulated::schedule.late_products) {
    product.run(product);
    warp.products.erase(number);
  }
}
template <DType input, DType input_b, int a_is_mn_major, int b_is_mn_major, int registers>
void multiply(float (&d)[registers], ptx::uint64 a, ptx::uint64 b, int accumulate) {
  static_assert(input_b == input);
  const auto run_it = [](const emulated::Product& product) {
    run<input, b_is_mn_major, registers>(product, Factor<input, a_is_mn_major>(product.a));
  };
  emulated::Product product;
  product.a = a, product.b = b, product.adds = accumulate != 0, product.run = run_it;
  issue(product, d, nullptr);
}
template <DType input, int b_is_mn_major, int registers>
void multiply_fragment(float (&d)[registers], const ptx::uint32* a, ptx::uint64 b, int accumulate) {
  const auto run_it = [](const emulated::Product& product) {
    run<input, b_is_mn_major, registers>(product, [&](int row, int k) {
      const ptx::uint32 word = product.words[row % 8 * 4 + k % 8 / 2][row % 16 / 8 + k / 8 * 2];
      const auto bits = static_cast<ptx::uint16>(word >> k % 2 * 16);
      return input == DType::bf16 ? __uint_as_float(static_cast<ptx::uint32>(bits) << 16) : ptx::f16_to_float(bits);
    });
  };
  emulated::Product product;
  product.b = b, product.adds = accumulate != 0, product.run = run_it;
  issue(product, d, a);
}

inline void fence() {
  emulated::meet("wgmma.fence");
}
inline void commit() {
  emulated::Warp& warp = emulated::warp();
  const int lane = threadIdx.x % 32, group = warp.groups[lane]++;
  if (group == static_cast<int>(warp.group_ends.size()))
    warp.group_ends.push_back(warp.issued[lane]);
  else if (warp.group_ends[group] != warp.issued[lane])
    ptx::fail("lanes of a warp end a group of products at different ones");
}
/// The products of all groups but the last `pending` have run. Those of late ones run here.
template <int pending>
void wait() {
  emulated::meet("wgmma.wait_group");
  emulated::Warp& warp = emulated::warp();
  const int group = warp.groups[threadIdx.x % 32] - pending - 1;
  if (group < 0) return;
  while (!warp.products.empty() && warp.products.begin()->first < warp.group_ends[group]) {
    const emulated::Product& product = warp.products.begin()->second;
    if (product.lanes != 32) ptx::fail("a warp waits for a product that not all lanes have asked for");
    product.run(product);
    warp.products.erase(warp.products.begin());
  }
}
template <int count>
void keep_behind_wait(float (&)[count]) {}

}  // namespace coda::wgmma
