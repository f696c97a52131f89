// Calls of programs on NVIDIA's GPUs: the same pool, with copies on the program's stream at both ends.
//
// Nothing of CUDA is needed to build this, nor to load it: its driver is opened at the first call.
#pragma once

#include <cstdint>
#include <string>

#include "call.h"

namespace jaxvec {

// Answers a call whose operands and results are in the memory of a GPU, on `stream` (a CUstream). Returns
// the error's text, or an empty one. The results are there for whatever comes later on the stream.
std::string answer_on_cuda(Call& call, void* stream);

// Page-locks memory for so many calls at once, each of which brings and takes `count` arrays of so many
// bytes. The caller has a context current, and no program is running that this could keep from ending.
void prepare_cuda(uint32_t calls, const uint64_t* bytes, uint32_t count);

// Takes the driver from another library; null for the machine's.
void use_driver(const char* library);

}  // namespace jaxvec
