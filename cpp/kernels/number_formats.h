// Portable bf16 and fp16 conversions, round to nearest even; the reference behaviour of every ISA's own. And what is
// finite.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/kernels.h"

namespace offload {

inline float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float to_float(float value) { return value; }

inline float to_float(Bf16 value) { return bits_to_float(uint32_t{value.bits} << 16); }

inline float to_float(Half value) {
  const uint32_t sign = uint32_t{value.bits & 0x8000u} << 16;
  const uint32_t magnitude = value.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return bits_to_float(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  // Scaling by 2^112 rebiases normal and subnormal numbers alike.
  return bits_to_float(sign | float_to_bits(bits_to_float(magnitude << 13) * 0x1p112f));
}

template <class T>
T from_float(float value);

template <>
inline float from_float<float>(float value) {
  return value;
}

template <>
inline Bf16 from_float<Bf16>(float value) {
  const uint32_t bits = float_to_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>(bits >> 16 | 0x40u)};  // keep NaN a NaN
  return {static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}

template <>
inline Half from_float<Half>(float value) {
  const uint32_t bits = float_to_bits(value);
  const auto sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
  if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // rounds past 65504
  if (magnitude < 0x38800000u) {
    // Subnormal: adding 0.5 aligns the mantissa so that the FPU rounds it for us.
    const float aligned = bits_to_float(magnitude) + 0.5f;
    return {static_cast<uint16_t>(sign | (float_to_bits(aligned) - float_to_bits(0.5f)))};
  }
  const uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u) - 0x38000000u;
  return {static_cast<uint16_t>(sign | rounded >> 13)};
}

// Whether a number has all of these bits.
template <class Bits>
bool any_has_all(const char* x, int64_t bytes, Bits wanted) {
  constexpr Bits kAll = static_cast<Bits>(-1);
  Bits found = 0;  // no early end, and masks as wide as the numbers: vectorised
  for (int64_t i = 0; i < bytes; i += static_cast<int64_t>(sizeof(Bits))) {
    Bits bits;
    std::memcpy(&bits, x + i, sizeof bits);
    found |= static_cast<Bits>(bits & wanted) == wanted ? kAll : Bits{0};
  }
  return found != 0;
}

// NaN and infinity have all bits of the exponent set, and no other number has.
inline bool all_finite(const void* x, int64_t bytes, DType dtype) {
  const auto* first = static_cast<const char*>(x);
  if (dtype == DType::f32) return !any_has_all<uint32_t>(first, bytes, 0x7f800000);
  return !any_has_all<uint16_t>(first, bytes, dtype == DType::f16 ? 0x7c00 : 0x7f80);
}

// The same of a row of keys or values in a page: of int8 the scales tell.
inline bool row_is_finite(const void* row, int64_t head_dim, DType format) {
  if (format != DType::i8) return all_finite(row, row_bytes(head_dim, format), format);
  const int64_t codes = num_codes(head_dim);
  return all_finite(static_cast<const char*>(row) + codes, row_bytes(head_dim, format) - codes, DType::f16);
}

}  // namespace offload
