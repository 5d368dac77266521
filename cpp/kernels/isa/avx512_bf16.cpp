// AVX512-BF16 on top of AVX-512 with VNNI, which every CPU with the former has: only the dot products of bf16 change.
#include "kernels/kernels.h"
#include "kernels/number_formats.h"

#if defined(__x86_64__)
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")
namespace offload::avx512_bf16 {

#include "kernels/isa/avx512_primitives-inl.h"

// clang-format off
#include "kernels/tile_ops-inl.h"
#include "kernels/tile_ops_bf16-inl.h"
template <>
struct TileOps<Bf16> : PairOps {};
#include "kernels/attention-inl.h"
#include "kernels/register_tile-inl.h"
#include "kernels/causal_attention-inl.h"
#include "kernels/causal_attention_bf16-inl.h"
// clang-format on

// The pairwise kernels work on 32 columns at a time.
static void score_any(const ScoreArgs& args) {
  if (args.head_dim % 32 == 0) return score<Bf16>(args);
  avx512_vnni_table()->score[static_cast<int>(DType::bf16)](args);
}

static void attend_any(const AttendArgs& args) {
  if (args.head_dim % 32 == 0) return attend<Bf16>(args);
  avx512_vnni_table()->attend[static_cast<int>(DType::bf16)](args);
}

}  // namespace offload::avx512_bf16
#pragma GCC pop_options

const offload::KernelTable* offload::avx512_bf16_table() {
  static const KernelTable table = [] {
    KernelTable improved = *avx512_vnni_table();
    improved.name = "avx512_bf16";
    const int bf16 = static_cast<int>(DType::bf16);
    improved.score[bf16] = avx512_bf16::score_any;
    improved.attend[bf16] = avx512_bf16::attend_any;
    improved.attend_causal[bf16] = avx512_bf16::attend_causal<avx512_bf16::PairProducts>;
    improved.causal_multiple[bf16] = 32;
    improved.multiply[bf16] = nullptr;  // torch's use the dot products, too
    improved.pack_input[bf16] = avx512_bf16::pack_input<Bf16>;
    improved.linear[bf16] = avx512_bf16::linear<Bf16>;
    return improved;
  }();
  return &table;
}
#endif
