// AVX-512 F, BW, DQ, VL: 16 lanes, 32 registers.
#include <cmath>
#include <cstdint>
#include <new>

#include "kernels/kernels.h"
#include "kernels/number_formats.h"

#if defined(__x86_64__)
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
namespace offload::avx512 {

#include "kernels/isa/avx512_primitives-inl.h"
// clang-format off
#include "kernels/vector_math-inl.h"
#include "kernels/tile_ops-inl.h"
#include "kernels/attention-inl.h"
#include "kernels/clustering-inl.h"
#include "kernels/elementwise-inl.h"
// clang-format on

}  // namespace offload::avx512
#pragma GCC pop_options

namespace offload {

const KernelTable* avx512_table() {
  static const KernelTable table = avx512::make_table("avx512");
  return &table;
}

}  // namespace offload
#else
namespace offload {
const KernelTable* avx512_table() { return nullptr; }
}  // namespace offload
#endif
