#pragma once

#include <cstdint>

namespace jaxvec {

// The version of the FFI that the handlers were built for: 1000 * major + minor.
uint32_t ffi_version();

}  // namespace jaxvec
