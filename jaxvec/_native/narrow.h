// Casts of numbers to narrower types, and types of integers by their dtype.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace jaxvec {

// NumPy's kind + 256 * item size in bytes, of an integer type.
template <typename Integer>
constexpr uint32_t dtype_of = (std::is_signed_v<Integer> ? 'i' : 'u') + 256 * sizeof(Integer);

// Calls `function` with a zero of an integer type; returns false for other types.
template <typename Function>
bool with_integer(uint32_t dtype, const Function& function) {
  const auto call_with_one = [&](auto... zeros) {
    return ((dtype == dtype_of<decltype(zeros)> && function(zeros)) || ...);
  };
  return call_with_one(int8_t{}, int16_t{}, int32_t{}, int64_t{}, uint8_t{}, uint16_t{}, uint32_t{},
                       uint64_t{});
}

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
      lost |= static_cast<From>(target[i]) != value || (target[i] < 0) != (value < 0);
    } else {
      lost |= std::isinf(target[i]) && !std::isinf(value);
    }
  }
  return !lost;
}

}  // namespace jaxvec
