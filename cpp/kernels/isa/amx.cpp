// AMX on top of AVX512-BF16, for bf16: attention of four query heads and more (tile_ops_amx-inl.h), that of prompts
// (causal_attention_amx-inl.h), and linear layers of more than four rows (batches, verified draft tokens), which the
// vector kernel passes over several times. A tile multiplies 16 weight rows, as the checkpoint has them, with 16 input
// rows. Run on a 16-core Xeon: all kernel tests pass, and a 4,096 x 14,336 layer takes 0.62 to 0.67 of the vector
// kernel's time for 8 rows and 0.34 to 0.37 for 16, on 1 and 8 threads. tests/cpp/amx_parity.cpp models the tile
// instructions in C++ for machines without them.
#include "kernels/kernels.h"
#include "kernels/number_formats.h"

#if defined(__x86_64__)
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("amx-tile,amx-bf16,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")
namespace offload::amx {

#include "kernels/isa/avx512_primitives-inl.h"
// clang-format off
#include "kernels/tile_ops-inl.h"
#include "kernels/tile_ops_bf16-inl.h"
#include "kernels/tile_ops_amx-inl.h"
#include "kernels/attention-inl.h"
#include "kernels/register_tile-inl.h"
#include "kernels/causal_attention-inl.h"
#include "kernels/causal_attention_bf16-inl.h"
#include "kernels/causal_attention_amx-inl.h"
// clang-format on

static bool has_tiles(int group_size, int64_t head_dim) { return head_dim % 32 == 0 && group_size >= kHeadBlock; }

static void score_any(const ScoreArgs& args) {
  if (has_tiles(args.group_size, args.head_dim)) return score<Bf16>(args);
  avx512_bf16_table()->score[static_cast<int>(DType::bf16)](args);
}

static void attend_any(const AttendArgs& args) {
  if (has_tiles(args.group_size, args.head_dim)) return attend<Bf16>(args);
  avx512_bf16_table()->attend[static_cast<int>(DType::bf16)](args);
}

inline constexpr int kTileColumns = 32;  // bf16; 16 pairs
inline constexpr int kVectorRows = 4;    // up to here one pass of the vector kernel does

// Tiles 0 to 3: sums [16 outputs, 16 input rows]; 4: weights [16 outputs, 32 columns]; 5: inputs [16 column pairs, 16
// input rows], a pair being the two neighbouring columns of one row.
inline constexpr TileConfig kLinearTiles{.row_bytes = {64, 64, 64, 64, 64, 64}, .rows = {16, 16, 16, 16, 16, 16}};

// 16 x 64 bytes of a row-major bf16 matrix, with zeros beyond num_rows and num_columns.
static inline void load_block(const Bf16* from, int num_rows, int64_t width, int64_t num_columns, __m512i* block) {
  const __mmask32 live = num_columns >= kTileColumns ? ~__mmask32{0} : (__mmask32{1} << num_columns) - 1;
  for (int r = 0; r < kTileRows; ++r) {
    block[r] = r < num_rows ? _mm512_maskz_loadu_epi16(live, from + r * width) : _mm512_setzero_si512();
  }
}

static inline void store_block(const __m512i* block, void* to) {
  for (int r = 0; r < kTileRows; ++r) _mm512_storeu_si512(static_cast<char*>(to) + r * 64, block[r]);
}

// Tile 4 <- weights [16, 32 columns from d on]; the last columns of odd widths come through a padded copy.
[[gnu::always_inline]] static inline void load_weights(const Bf16* weight, int64_t width, int64_t d) {
  if (width - d >= kTileColumns) {
    _tile_loadd(4, weight + d, width * 2);
    return;
  }
  alignas(64) char padded[kTileRows * 64];
  __m512i block[kTileRows];
  load_block(weight + d, kTileRows, width, width - d, block);
  store_block(block, padded);
  tile_fence();
  _tile_loadd(4, padded, 64);
}

// sums [Tiles * 16 outputs, 16 input rows] of Tiles * 16 adjacent weight rows
template <int Tiles>
static inline void multiply(const Bf16* x, int num_rows, int64_t width, const Bf16* weight, float* sums) {
  alignas(64) char inputs[kTileRows * 64];
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t d = 0; d < width; d += kTileColumns) {
    __m512i block[kTileRows];
    load_block(x + d, num_rows, width, width - d, block);
    transpose(block);
    store_block(block, inputs);
    tile_fence();
    _tile_loadd(5, inputs, 64);
    load_weights(weight, width, d);
    _tile_dpbf16ps(0, 4, 5);
    if constexpr (Tiles == 4) {
      load_weights(weight + 16 * width, width, d);
      _tile_dpbf16ps(1, 4, 5);
      load_weights(weight + 32 * width, width, d);
      _tile_dpbf16ps(2, 4, 5);
      load_weights(weight + 48 * width, width, d);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
  _tile_stored(0, sums, 64);
  if constexpr (Tiles == 4) {
    _tile_stored(1, sums + 256, 64);
    _tile_stored(2, sums + 512, 64);
    _tile_stored(3, sums + 768, 64);
  }
}

static void linear_any(const void* packed, int num_rows, int64_t in_features, const void* weight, int64_t first,
                       int64_t last, float* out, int64_t out_stride) {
  const auto vector_linear = avx512_bf16_table()->linear[static_cast<int>(DType::bf16)];
  const int64_t tiled = (last - first) / kTileRows * kTileRows;
  if (num_rows <= kVectorRows || num_rows > kTileRows || tiled == 0) {
    return vector_linear(packed, num_rows, in_features, weight, first, last, out, out_stride);
  }
  const Bf16* x = static_cast<const Bf16*>(packed);
  const Bf16* w = static_cast<const Bf16*>(weight) + first * in_features;
  _tile_loadconfig(&kLinearTiles);
  alignas(64) float sums[4 * kTileRows * kTileRows];
  for (int64_t o = 0; o < tiled;) {
    const int tiles = tiled - o >= 4 * kTileRows ? 4 : 1;
    if (tiles == 4) {
      multiply<4>(x, num_rows, in_features, w + o * in_features, sums);
    } else {
      multiply<1>(x, num_rows, in_features, w + o * in_features, sums);
    }
    for (int i = 0; i < tiles; ++i, o += kTileRows) {
      __m512i block[kTileRows];
      for (int j = 0; j < kTileRows; ++j) block[j] = _mm512_loadu_si512(sums + (i * kTileRows + j) * kTileRows);
      transpose(block);
      for (int r = 0; r < num_rows; ++r) _mm512_storeu_si512(out + r * out_stride + o, block[r]);
    }
  }
  _tile_release();  // tiles in use are 8 KB more to save at every context switch
  if (first + tiled < last) {
    vector_linear(packed, num_rows, in_features, weight, first + tiled, last, out + tiled, out_stride);
  }
}

}  // namespace offload::amx
#pragma GCC pop_options

const offload::KernelTable* offload::amx_table() {
  static const KernelTable table = [] {
    KernelTable improved = *avx512_bf16_table();
    improved.name = "amx";
    const int bf16 = static_cast<int>(DType::bf16);
    improved.linear[bf16] = amx::linear_any;
    improved.score[bf16] = amx::score_any;
    improved.attend[bf16] = amx::attend_any;
    improved.attend_causal[bf16] = amx::attend_causal<amx::TileProducts>;
    return improved;
  }();
  return &table;
}
#endif
