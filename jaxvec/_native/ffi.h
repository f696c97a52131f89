// The XLA FFI handlers, for programs on the CPU and on CUDA.
#pragma once

#include "xla/ffi/api/c_api.h"

extern "C" XLA_FFI_Error* jaxvec_ffi_call(XLA_FFI_CallFrame* frame);
extern "C" XLA_FFI_Error* jaxvec_ffi_cuda_call(XLA_FFI_CallFrame* frame);
