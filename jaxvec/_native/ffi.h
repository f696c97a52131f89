#pragma once

#include <cstdint>

namespace jaxvec {

// The version of the FFI that the handlers were built for: 1000 * major + minor.
uint32_t ffi_version();

}  // namespace jaxvec

// The handlers, for programs on the CPU and on CUDA.
struct XLA_FFI_Error;
struct XLA_FFI_CallFrame;
extern "C" XLA_FFI_Error* jaxvec_ffi_call(XLA_FFI_CallFrame* frame);
extern "C" XLA_FFI_Error* jaxvec_ffi_cuda_call(XLA_FFI_CallFrame* frame);
