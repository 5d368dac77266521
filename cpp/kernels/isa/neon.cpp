// NEON (AArch64, where every CPU has it): 4 lanes, 32 registers. Tested under qemu-user, not yet run on hardware.
#include "kernels/kernels.h"
#include "kernels/number_formats.h"

#if defined(__aarch64__)
#include <arm_neon.h>

namespace offload::neon {

inline constexpr int W = 4;
inline constexpr int kRowTile = 4;
inline constexpr int kValueTiles[] = {8, 8};  // vectors of a value row accumulated together for 1, 2, .. heads
using F = float32x4_t;

static inline F f_set1(float x) { return vdupq_n_f32(x); }
static inline F f_load(const float* p) { return vld1q_f32(p); }
static inline void f_store(float* p, F x) { vst1q_f32(p, x); }
static inline F f_fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
static inline F f_max(F a, F b) { return vmaxnmq_f32(a, b); }  // drops a NaN, as the other ISAs' maxima do
static inline F f_round(F x) { return vrndnq_f32(x); }
// x * 2^n; 0 where n is below -126, whatever x is. A NaN n is not, and its x is NaN, too.
static inline F f_scale2(F x, F n) {
  const int32x4_t biased = vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127));
  const F scaled = vmulq_f32(x, vreinterpretq_f32_s32(vshlq_n_s32(biased, 23)));
  const uint32x4_t vanishes = vcltq_f32(n, vdupq_n_f32(-126.0f));
  return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(scaled), vanishes));
}
static inline float f_sum(F x) { return vaddvq_f32(x); }
static inline float f_max_lane(F x) { return vmaxnmvq_f32(x); }

static inline F f_load_as(const Bf16* p) {
  return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(reinterpret_cast<const uint16_t*>(p)), 16));
}
static inline F f_load_as(const Half* p) {
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const uint16_t*>(p))));
}
static inline F f_load_as(const Int8* p) {
  int32_t codes;
  std::memcpy(&codes, p, sizeof codes);
  return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(static_cast<uint32_t>(codes))))));
}
static inline F f_set1_as(const Half* p) { return f_set1(to_float(*p)); }
static inline void f_store_as(Half* p, F x) {
  vst1_u16(reinterpret_cast<uint16_t*>(p), vreinterpret_u16_f16(vcvt_f16_f32(x)));
}
static inline void f_store_as(Bf16* p, F x) {
  const uint32x4_t bits = vreinterpretq_u32_f32(x);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
  const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
  vst1_u16(reinterpret_cast<uint16_t*>(p), vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), rounded, quiet), 16));
}
// 4 sums of whole numbers, and how products of int8 rows with int16 queries are added.
using I = int32x4_t;
static inline I i_zero() { return vdupq_n_s32(0); }
static inline int16x8_t i_load_pairs(const int8_t* p) { return vmovl_s8(vld1_s8(p)); }
static inline I i_add_products(I sums, int16x8_t row, const int16_t* query) {
  const int16x8_t q = vld1q_s16(query);
  return vmlal_high_s16(vmlal_s16(sums, vget_low_s16(row), vget_low_s16(q)), row, q);
}
static inline int16x8_t i_low_nibbles(int16x8_t pairs) { return vshrq_n_s16(vshlq_n_s16(pairs, 12), 12); }
static inline int16x8_t i_high_squares(int16x8_t pairs) {
  const int16x8_t high = vandq_s16(vshrq_n_s16(pairs, 4), vdupq_n_s16(15));
  return vmulq_s16(high, high);
}
static inline F f_from_ints(I x) { return vcvtq_f32_s32(x); }
static inline F f_sqrt(F x) { return vsqrtq_f32(x); }
template <int G, int R>
static inline void f_store_sums(const F* sums, float scale, float* out, int64_t stride) {
  for (int g = 0; g < G; ++g) {
    const F* s = sums + g * R;
    if constexpr (R == 4) {
      vst1q_f32(out + g * stride, vmulq_n_f32(vpaddq_f32(vpaddq_f32(s[0], s[1]), vpaddq_f32(s[2], s[3])), scale));
    } else {
      for (int r = 0; r < R; ++r) out[g * stride + r] = scale * vaddvq_f32(s[r]);
    }
  }
}

static inline int64_t filter_at_least(const float* x, int64_t n, float threshold, int32_t* positions,
                                      int64_t capacity) {
  int64_t count = 0;
  const float32x4_t limit = vdupq_n_f32(threshold);
  for (int64_t i = 0; i < n; i += 4) {
    const int64_t left = n - i < 4 ? n - i : 4;
    if (left == 4 && vmaxvq_u32(vcgeq_f32(vld1q_f32(x + i), limit)) == 0) continue;
    for (int64_t b = 0; b < left; ++b) {
      if (!(x[i + b] >= threshold)) continue;
      if (count < capacity) positions[count] = static_cast<int32_t>(i + b);
      ++count;
    }
  }
  return count;
}

static inline int64_t count_at_least(const float* x, int64_t n, float threshold) {
  const float32x4_t limit = vdupq_n_f32(threshold);
  uint32x4_t hits = vdupq_n_u32(0);
  int64_t i = 0;
  for (; i + 4 <= n; i += 4) hits = vsubq_u32(hits, vcgeq_f32(vld1q_f32(x + i), limit));
  auto count = static_cast<int64_t>(vaddlvq_u32(hits));
  for (; i < n; ++i) count += x[i] >= threshold;
  return count;
}

// Codes of kByteLanes tokens, entries looked up by their nibbles, and 16-bit sums of those.
inline constexpr int kByteLanes = 16;
using B = uint8x16_t;
struct ByteSums {
  uint16x8_t first, second;
};
static inline B b_load(const uint8_t* p) { return vld1q_u8(p); }
static inline B b_low_nibbles(B x) { return vandq_u8(x, vdupq_n_u8(15)); }
static inline B b_high_nibbles(B x) { return vshrq_n_u8(x, 4); }
static inline B b_look_up(const uint8_t* entries, B at) { return vqtbl1q_u8(vld1q_u8(entries), at); }
static inline B b_add(B a, B b) { return vaddq_u8(a, b); }
static inline ByteSums b_no_sums() { return {vdupq_n_u16(0), vdupq_n_u16(0)}; }
static inline void b_add_to(ByteSums* sums, B x) {
  sums->first = vaddw_u8(sums->first, vget_low_u8(x));
  sums->second = vaddw_high_u8(sums->second, x);
}
static inline void b_store_sums(const ByteSums& sums, uint16_t* out) {
  vst1q_u16(out, sums.first);
  vst1q_u16(out + 8, sums.second);
}

// Codes of a group of packed weights, and their products with int8: two to a lane of 16 bits, which 2 * 128 * 127 fit.
inline constexpr int kDotGroups = 1;
using C = int8x16x2_t;
static inline C c_load(const int8_t* p) { return {{vld1q_s8(p), vld1q_s8(p + 16)}}; }
static inline C c_load_nibbles(const uint8_t* p) {
  const uint8x16_t pairs = vld1q_u8(p);
  return {{vreinterpretq_s8_u8(vandq_u8(pairs, vdupq_n_u8(15))), vreinterpretq_s8_u8(vshrq_n_u8(pairs, 4))}};
}
static inline int16x8_t i_pair_products(int8x16_t w, int8x16_t x) {
  return vmlal_high_s8(vmull_s8(vget_low_s8(w), vget_low_s8(x)), w, x);
}
static inline I i_dot_bytes(const C& w, const int8_t* x) {
  const I first = vpaddlq_s16(i_pair_products(w.val[0], vld1q_s8(x)));
  return vpadalq_s16(first, i_pair_products(w.val[1], vld1q_s8(x + 16)));
}
static inline I i_dot_nibbles(const C& w, const int8_t* x) { return i_dot_bytes(w, x); }
static inline F f_spread(const float* factor) { return vdupq_n_f32(*factor); }
static inline F f_add_halves(const C& w, const int8_t* x, const float* factors, F part) {
  const I first = vpaddlq_s16(i_pair_products(w.val[0], vld1q_s8(x)));
  const I second = vpaddlq_s16(i_pair_products(w.val[1], vld1q_s8(x + 16)));
  return vfmaq_n_f32(vfmaq_n_f32(part, f_from_ints(first), factors[0]), f_from_ints(second), factors[1]);
}
using T = int8x16_t;
static inline T t_load(const int8_t* table) { return vld1q_s8(table); }
static inline C c_look_up(T table, const C& w) {
  return {{vqtbl1q_s8(table, vreinterpretq_u8_s8(w.val[0])), vqtbl1q_s8(table, vreinterpretq_u8_s8(w.val[1]))}};
}

#include "kernels/tile_ops-inl.h"
#include "kernels/tile_ops_int8-inl.h"
template <>
struct TileOps<Int8> : Int8Ops {};
#include "kernels/bodies-inl.h"

}  // namespace offload::neon

const offload::KernelTable* offload::neon_table() {
  static const KernelTable table = neon::make_table("neon");
  return &table;
}
#endif
