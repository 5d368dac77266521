// Attention in bf16 with AMX: groups of four query heads and more, as most models have them.
#include "kernels/isa/amx_attention.h"

#include <cmath>
#include <cstdint>
#include <new>
#include <type_traits>

#include "kernels/number_formats.h"

#if defined(__x86_64__)
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("amx-tile,amx-bf16,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")
namespace offload::amx_attention {

#include "kernels/isa/avx512_primitives-inl.h"
// clang-format off
#include "kernels/vector_math-inl.h"
#include "kernels/tile_ops-inl.h"
#include "kernels/tile_ops_bf16-inl.h"
#include "kernels/tile_ops_amx-inl.h"
#include "kernels/attention-inl.h"
// clang-format on

static bool fits(int group_size, int64_t head_dim) { return head_dim % 32 == 0 && group_size >= kHeadBlock; }

}  // namespace offload::amx_attention

namespace offload::amx {

void score(const ScoreArgs& args) {
  if (amx_attention::fits(args.group_size, args.head_dim)) return amx_attention::score<Bf16>(args);
  avx512_bf16_table()->score[static_cast<int>(DType::bf16)](args);
}

void attend(const AttendArgs& args) {
  if (amx_attention::fits(args.group_size, args.head_dim)) return amx_attention::attend<Bf16>(args);
  avx512_bf16_table()->attend[static_cast<int>(DType::bf16)](args);
}

}  // namespace offload::amx
#pragma GCC pop_options
#endif
