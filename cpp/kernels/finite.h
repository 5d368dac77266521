#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/kernels.h"

namespace offload {

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

}  // namespace offload
