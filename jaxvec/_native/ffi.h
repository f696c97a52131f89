// A compiled program's call into a pool, as Python sees it when it has to answer one.
#pragma once

#include <cstdint>
#include <string>

#include "pool.h"

namespace jaxvec {

struct Call {
  uint32_t operation;      // of `Operation`
  uint32_t under_way;      // a step that was sent already; the caller holds the pool's gate
  uint32_t sequenced;      // of a reset: whether the token's count must be the pool's
  uint32_t num_options;    // bytes
  int64_t fingerprint;     // of the specification that the program was made for
  int64_t waited_ns;       // of a step under way
  const uint8_t* options;  // of a reset, pickled
  const Array* operands;
  const Array* results;
  uint32_t num_operands;
  uint32_t num_results;
  std::string* error;
};

// Python's side of a call: fills in the results and returns 1, or calls `fail` and returns 0.
using Python = int32_t (*)(Call*);

// Sets who answers; null when the interpreter ends.
void set_python(Python python);

// The version of the FFI that the handlers were built for: 1000 * major + minor.
uint32_t ffi_version();

}  // namespace jaxvec
