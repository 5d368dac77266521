// AVX-512 F, BW, DQ, VL: 16 lanes, 32 registers.
#include "kernels/kernels.h"
#include "kernels/number_formats.h"

#if defined(__x86_64__)
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
namespace offload::avx512 {

#include "kernels/isa/avx512_primitives-inl.h"
#include "kernels/bodies-inl.h"

}  // namespace offload::avx512
#pragma GCC pop_options

const offload::KernelTable* offload::avx512_table() {
  static const KernelTable table = avx512::make_table("avx512");
  return &table;
}
#endif
