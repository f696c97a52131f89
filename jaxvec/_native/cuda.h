// Calls of programs on NVIDIA GPUs: the same pool, with copies on the program's stream before and after.
//
// Neither building nor loading this needs CUDA, since the driver is opened at the first call.
#pragma once

#include <cstdint>
#include <string>

#include "call.h"

namespace jaxvec {

// Answers a call with operands and results in GPU memory, on `stream` (a CUstream). Returns the error's
// text, empty on success. Later work on the stream finds the results there.
std::string answer_on_cuda(Call& call, void* stream);

// Page-locks memory for `calls` calls at once, each with `count` arrays of these sizes. The caller has a
// context current, and no running program may depend on this thread.
void prepare_cuda(uint32_t calls, const uint64_t* bytes, uint32_t count);

// Loads the driver from another library.
void use_driver(const char* library);

}  // namespace jaxvec
