// Casts of numbers to narrower types.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstring>
#include <type_traits>

namespace jaxvec {

// Casts `size` numbers as NumPy would. Returns false if an integer does not fit, or a finite float becomes
// infinite.
template <typename From, typename To>
bool narrow(const void* from, void* to, size_t size) {
  auto* target = static_cast<To*>(to);
  bool lost = false;
  for (size_t i = 0; i < size; ++i) {
    From value;  // may be unaligned: packed operands are aligned to words of 4 bytes
    std::memcpy(&value, static_cast<const char*>(from) + i * sizeof(From), sizeof(From));
    target[i] = static_cast<To>(value);
    if constexpr (std::is_integral_v<From>) {
      lost |= static_cast<From>(target[i]) != value;
      if constexpr (std::is_signed_v<From> && !std::is_signed_v<To>) lost |= value < 0;
      if constexpr (!std::is_signed_v<From> && std::is_signed_v<To>) lost |= target[i] < 0;
    } else {
      lost |= std::isinf(target[i]) && !std::isinf(value);
    }
  }
  return !lost;
}

}  // namespace jaxvec
