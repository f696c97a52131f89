// Lets XLA's CPU backend call the handler that is for CUDA: it is told of a stream, as on a GPU, and what it
// put off on that is done before the program goes on. So whole programs can run it without a GPU.
#include <cstring>
#include <vector>

#include "xla/ffi/api/c_api.h"

namespace {

XLA_FFI_Handler* handler = nullptr;
void (*flush)(void*) = nullptr;
void* const kStream = reinterpret_cast<void*>(0x1001);

XLA_FFI_Error* get_stream(XLA_FFI_Stream_Get_Args* args) {
  args->stream = kStream;
  return nullptr;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) void prepare(XLA_FFI_Handler* theirs,
                                                               void (*their_flush)(void*)) {
  handler = theirs;
  flush = their_flush;
}

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* call(XLA_FFI_CallFrame* frame) {
  if (frame->extension_start != nullptr) return handler(frame);  // XLA asks for metadata
  std::vector<char> memory(frame->api->struct_size);
  std::memcpy(memory.data(), frame->api, memory.size());
  auto* api = reinterpret_cast<XLA_FFI_Api*>(memory.data());
  api->XLA_FFI_Stream_Get = get_stream;
  XLA_FFI_CallFrame theirs;
  std::memcpy(&theirs, frame, frame->struct_size < sizeof(theirs) ? frame->struct_size : sizeof(theirs));
  theirs.api = api;
  XLA_FFI_Error* const error = handler(&theirs);
  flush(kStream);
  return error;
}
