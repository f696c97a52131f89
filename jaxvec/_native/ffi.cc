// The XLA FFI handlers, with which compiled programs on the CPU and on NVIDIA GPUs call a pool. Twin of
// callbacks/_ffi.py.
#include "xla/ffi/api/ffi.h"

#include <string>
#include <utility>
#include <vector>

#include "call.h"
#include "cuda.h"
#include "interrupts.h"
#include "python.h"

namespace jaxvec {
namespace {

namespace ffi = ::xla::ffi;

// Returns NumPy's kind and item size, as in `Array`; 0 for types that NumPy lacks. XLA's ABI numbers the
// types of each kind consecutively.
uint32_t numpy_dtype(ffi::DataType type) {
  using Type = ffi::DataType;
  const auto dtype = [type](char kind) { return kind + 256 * static_cast<uint32_t>(ffi::ByteWidth(type)); };
  if (type == Type::PRED) return dtype('b');
  if (type >= Type::S8 && type <= Type::S64) return dtype('i');
  if (type >= Type::U8 && type <= Type::U64) return dtype('u');
  if (type >= Type::F16 && type <= Type::F64) return dtype('f');
  return type == Type::C64 || type == Type::C128 ? dtype('c') : 0;
}

Array as_array(const ffi::AnyBuffer& buffer) {
  const auto dims = buffer.dimensions();
  return {buffer.untyped_data(), dims.begin(), static_cast<uint32_t>(dims.size()),
          numpy_dtype(buffer.element_type()), nullptr};
}

Array as_array(ffi::Result<ffi::AnyBuffer> buffer) { return as_array(*buffer); }

// Collects the operands or results of a call, all of which are buffers.
template <typename Buffers>
std::vector<Array> collect(const Buffers& buffers) {
  std::vector<Array> arrays;
  arrays.reserve(buffers.size());
  for (size_t i = 0; i < buffers.size(); ++i) {
    arrays.push_back(as_array(buffers.template get<ffi::AnyBuffer>(i).value()));
  }
  return arrays;
}

// Makes and answers a call. The operands are the token and the verb's operands; the results are the next
// token and the verb's results, packed if there is a layout.
template <typename Answer>
ffi::Error serve(ffi::RemainingArgs args, ffi::RemainingRets rets, int64_t fingerprint, uint32_t verb,
                 bool fresh, ffi::Span<const uint8_t> extra, const ffi::Span<const int64_t>* layout,
                 const Answer& answer) {
  watch_signals();  // in each call, because notebooks set a SIGINT handler for each cell
  Call call{verb, fresh, fingerprint, extra.begin(), extra.size(), interrupts()};
  call.operands = collect(args);
  call.results = collect(rets);
  if (layout != nullptr) {
    const std::vector<Array> arrays = std::exchange(call.results, {});
    if (arrays.empty() || !unpack(layout->begin(), layout->end(), arrays, &call.results)) {
      return ffi::Error(ffi::ErrorCode::kInternal,
                        "the program's results are not packed as its layout specifies; recompile it");
    }
    call.packed = arrays[0].data;
    call.packed_bytes = bytes_of(arrays[0]);
  }
  const std::string error = answer(call);
  return error.empty() ? ffi::Error::Success() : ffi::Error(ffi::ErrorCode::kInternal, error);
}

ffi::Error call_on_host(ffi::RemainingArgs args, ffi::RemainingRets rets, int64_t fingerprint, uint32_t verb,
                        bool fresh, ffi::Span<const uint8_t> extra) {
  return serve(args, rets, fingerprint, verb, fresh, extra, nullptr, answer_on_host);
}

ffi::Error call_on_cuda(void* stream, ffi::RemainingArgs args, ffi::RemainingRets rets, int64_t fingerprint,
                        uint32_t verb, bool fresh, ffi::Span<const uint8_t> extra,
                        ffi::Span<const int64_t> layout) {
  return serve(args, rets, fingerprint, verb, fresh, extra, &layout,
               [stream](Call& call) { return answer_on_cuda(call, stream); });
}

// Adds the arguments that calls on all platforms have.
template <typename Binding>
auto bind(Binding binding) {
  return std::move(binding)
      .RemainingArgs()
      .RemainingRets()
      .template Attr<int64_t>("fingerprint")
      .template Attr<uint32_t>("verb")
      .template Attr<bool>("fresh")
      .template Attr<ffi::Span<const uint8_t>>("extra");
}

}  // namespace
}  // namespace jaxvec

// The handlers lack the trait for command buffers on purpose: a CUDA graph would replay the copies without
// stepping the envs.
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxvec_ffi_call, jaxvec::call_on_host, jaxvec::bind(xla::ffi::Ffi::Bind()));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxvec_ffi_cuda_call, jaxvec::call_on_cuda,
                              jaxvec::bind(xla::ffi::Ffi::Bind().Ctx<xla::ffi::PlatformStream<void*>>())
                                  .Attr<xla::ffi::Span<const int64_t>>("layout"));

void add_handlers(PyObject* module) {
  const auto add = [module](const char* name, XLA_FFI_Error* (*handler)(XLA_FFI_CallFrame*)) {
    const Ref capsule = own(PyCapsule_New(reinterpret_cast<void*>(handler), nullptr, nullptr));
    check(PyModule_AddObjectRef(module, name, capsule.get()) == 0);
  };
  check(PyModule_AddIntConstant(module, "FFI_VERSION", 1000 * XLA_FFI_API_MAJOR + XLA_FFI_API_MINOR) == 0);
  add("FFI_CALL", jaxvec_ffi_call);
  add("FFI_CUDA_CALL", jaxvec_ffi_cuda_call);
}
