// The dtypes of arrays, in one list, and the length of a factor's rows in shared memory. Compiles for the host too.
#pragma once

#ifdef __CUDACC__
#define CODA_CONSTEXPR __host__ __device__ constexpr
#else
#define CODA_CONSTEXPR constexpr
#endif

namespace coda {

// A dtype's enumerator, and the C++ type of its bits in memory. The rest of a dtype is in coda_jax/epilogue/dtypes.py.
#define CODA_DTYPES(entry)                                                                                            \
  entry(bf16, unsigned short) entry(f16, unsigned short) entry(f32, float) entry(i32, int) entry(pred, unsigned char) \
      entry(e4m3, unsigned char) entry(e5m2, unsigned char)

#define CODA_ENUMERATOR(name, type) name,
enum class DType { CODA_DTYPES(CODA_ENUMERATOR) };
#undef CODA_ENUMERATOR

/// A dtype as it is stored in memory.
template <DType dtype>
struct Stored;
#define CODA_STORED(name, type) \
  template <>                   \
  struct Stored<DType::name> {  \
    using Bits = type;          \
  };
CODA_DTYPES(CODA_STORED)
#undef CODA_STORED

#define CODA_BYTES(name, type) sizeof(type),
CODA_CONSTEXPR int bytes_of(DType dtype) {
  constexpr int bytes[] = {CODA_DTYPES(CODA_BYTES)};
  return bytes[static_cast<int>(dtype)];
}
#undef CODA_BYTES
#undef CODA_DTYPES

/// The dtype of b: a's, unless the factors have 8 bits, for each of which a Config has a dtype.
template <class Config>
CODA_CONSTEXPR DType dtype_of_b() {
  if constexpr (requires { Config::input_b; }) {
    return Config::input_b;
  } else {
    return Config::input;
  }
}

/// The bytes of a row of a factor's tile in shared memory: those of the widest swizzle. For a k-major factor a row is
/// the k of a stage.
constexpr int factor_row_bytes = 128;
CODA_CONSTEXPR int factor_row_elements(DType dtype) {
  return factor_row_bytes / bytes_of(dtype);
}

}  // namespace coda
