// Calls the handler for CUDA without a GPU: `call` from programs on XLA's CPU backend, with a stream, and
// with all copies made before the program continues; `call_on` from a test, with any stream, and without XLA.
#include <cstring>
#include <string>
#include <vector>

#include "xla/ffi/api/c_api.h"

struct XLA_FFI_Error {
  std::string message;
};

namespace {

XLA_FFI_Handler* handler = nullptr;
void (*flush)(void*) = nullptr;
void* const kStream = reinterpret_cast<void*>(0x1001);

XLA_FFI_Error* get_stream(XLA_FFI_Stream_Get_Args* args) {
  args->stream = kStream;
  return nullptr;
}

// The functions that XLA offers to a handler, as far as ours needs them. `call_on` passes the stream as
// context.
XLA_FFI_Error* create_error(XLA_FFI_Error_Create_Args* args) { return new XLA_FFI_Error{args->message}; }

XLA_FFI_Error* get_stream_of_context(XLA_FFI_Stream_Get_Args* args) {
  args->stream = args->ctx;
  return nullptr;
}

}  // namespace

// An operand or a result, and bytes; fake_cuda.py has the same.
struct Buffer {
  void* data;
  int64_t* dims;
  int64_t rank;
  int64_t dtype;
};
struct Bytes {
  void* data;
  size_t size;
};

// Makes a call, and stores the text of an error.
extern "C" __attribute__((visibility("default"))) void call_on(void* stream, uint32_t verb, bool fresh,
                                                               int64_t fingerprint, Bytes extra, Bytes layout,
                                                               const Buffer* buffers, int64_t num_operands,
                                                               int64_t num_results, char* text, size_t size) {
  std::vector<XLA_FFI_Buffer> described;
  for (const Buffer* each = buffers; each != buffers + num_operands + num_results; ++each) {
    described.push_back({XLA_FFI_Buffer_STRUCT_SIZE, nullptr, static_cast<XLA_FFI_DataType>(each->dtype),
                         each->data, each->rank, each->dims});
  }
  std::vector<void*> pointers;
  for (XLA_FFI_Buffer& each : described) pointers.push_back(&each);
  std::vector<XLA_FFI_ArgType> operands(num_operands, XLA_FFI_ArgType_BUFFER);
  std::vector<XLA_FFI_RetType> results(num_results, XLA_FFI_RetType_BUFFER);
  XLA_FFI_Array extra_value = {XLA_FFI_DataType_U8, extra.size, extra.data};
  XLA_FFI_Array layout_value = {XLA_FFI_DataType_S64, layout.size / sizeof(int64_t), layout.data};
  XLA_FFI_Scalar fingerprint_value = {XLA_FFI_DataType_S64, &fingerprint};
  XLA_FFI_Scalar fresh_value = {XLA_FFI_DataType_PRED, &fresh};
  XLA_FFI_Scalar verb_value = {XLA_FFI_DataType_U32, &verb};
  XLA_FFI_ByteSpan texts[] = {{"extra", 5}, {"fingerprint", 11}, {"fresh", 5}, {"layout", 6}, {"verb", 4}};
  std::vector<XLA_FFI_ByteSpan*> names;
  for (XLA_FFI_ByteSpan& each : texts) names.push_back(&each);
  std::vector<XLA_FFI_AttrType> types = {XLA_FFI_AttrType_ARRAY, XLA_FFI_AttrType_SCALAR,
                                         XLA_FFI_AttrType_SCALAR, XLA_FFI_AttrType_ARRAY,
                                         XLA_FFI_AttrType_SCALAR};
  std::vector<void*> values = {&extra_value, &fingerprint_value, &fresh_value, &layout_value, &verb_value};
  XLA_FFI_Api api = {};
  api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
  api.XLA_FFI_Error_Create = create_error;
  api.XLA_FFI_Stream_Get = get_stream_of_context;
  XLA_FFI_CallFrame frame = {};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &api;
  frame.ctx = static_cast<XLA_FFI_ExecutionContext*>(stream);
  frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, num_operands, operands.data(), pointers.data()};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, num_results, results.data(),
                pointers.data() + num_operands};
  frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE,
                 nullptr,
                 static_cast<int64_t>(names.size()),
                 types.data(),
                 names.data(),
                 values.data()};
  XLA_FFI_Error* const error = handler(&frame);
  strncpy(text, error == nullptr ? "" : error->message.c_str(), size - 1);
  delete error;
}

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
