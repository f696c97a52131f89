// The XLA FFI handlers: a compiled program's way into a pool, on the CPU and on NVIDIA's GPUs. Twin of
// callbacks/_ffi.py.
#include "ffi.h"

#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "call.h"
#include "cuda.h"
#include "interrupts.h"
#include "xla/ffi/api/ffi.h"

namespace jaxvec {
namespace {

namespace ffi = ::xla::ffi;

// NumPy's kind and size of an element, see `Array`.
uint32_t numpy_dtype(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::PRED:
      return 'b' + 256 * 1;
    case ffi::DataType::S8:
      return 'i' + 256 * 1;
    case ffi::DataType::S16:
      return 'i' + 256 * 2;
    case ffi::DataType::S32:
      return 'i' + 256 * 4;
    case ffi::DataType::S64:
      return 'i' + 256 * 8;
    case ffi::DataType::U8:
      return 'u' + 256 * 1;
    case ffi::DataType::U16:
      return 'u' + 256 * 2;
    case ffi::DataType::U32:
      return 'u' + 256 * 4;
    case ffi::DataType::U64:
      return 'u' + 256 * 8;
    case ffi::DataType::F16:
      return 'f' + 256 * 2;
    case ffi::DataType::F32:
      return 'f' + 256 * 4;
    case ffi::DataType::F64:
      return 'f' + 256 * 8;
    case ffi::DataType::C64:
      return 'c' + 256 * 8;
    case ffi::DataType::C128:
      return 'c' + 256 * 16;
    default:
      return 0;
  }
}

Array as_array(const ffi::AnyBuffer& buffer) {
  const auto dims = buffer.dimensions();
  return {buffer.untyped_data(), dims.begin(), static_cast<uint32_t>(dims.size()),
          numpy_dtype(buffer.element_type()), nullptr};
}

// The operands or results of a call. The framework has checked nothing of them but that they exist.
template <typename Buffers>
ffi::Error collect(const Buffers& buffers, std::vector<Array>* arrays) {
  arrays->reserve(buffers.size());
  for (size_t i = 0; i < buffers.size(); ++i) {
    auto buffer = buffers.template get<ffi::AnyBuffer>(i);
    if (buffer.has_error()) return buffer.error();
    if constexpr (std::is_same_v<Buffers, ffi::RemainingRets>) {
      arrays->push_back(as_array(**buffer));
    } else {
      arrays->push_back(as_array(*buffer));
    }
  }
  return ffi::Error::Success();
}

// The results of a program that has packed small ones into the first array; the others have one each.
// `layout` says of each result where it begins in the packed array, in bytes, or -1; its dtype, rank and
// dimensions: as `_layout` of _ffi.py. Returns whether these fit the arrays.
bool unpack(ffi::Span<const int64_t> layout, const std::vector<Array>& arrays, Call* call,
            std::vector<Array>* results) {
  if (arrays.empty()) return false;
  call->packed = arrays[0].data;
  call->packed_bytes = bytes_of(arrays[0]);
  size_t alone = 1;
  const int64_t* next = layout.begin();
  for (const int64_t* const end = next + layout.size(); next != end;) {
    if (end - next < 3 || next[2] < 0 || end - next - 3 < next[2]) return false;
    Array result{nullptr, next + 3, static_cast<uint32_t>(next[2]), static_cast<uint32_t>(next[1]), nullptr};
    const size_t bytes = bytes_of(result);
    if (next[0] >= 0) {
      const auto place = static_cast<size_t>(next[0]);
      if (place > call->packed_bytes || bytes > call->packed_bytes - place) return false;
      result.data = static_cast<char*>(call->packed) + place;
    } else {
      if (alone == arrays.size() || bytes_of(arrays[alone]) != bytes) return false;
      result.data = arrays[alone++].data;
    }
    results->push_back(result);
    next += 3 + result.rank;
  }
  return alone == arrays.size();
}

// Makes a call of what the FFI gives. Operands: the token, and what the verb takes. Results: the next
// token, and what it gives; packed, if there is a layout.
template <typename Answer>
ffi::Error serve(ffi::RemainingArgs args, ffi::RemainingRets rets, int64_t fingerprint, uint32_t verb,
                 bool fresh, ffi::Span<const uint8_t> extra, const ffi::Span<const int64_t>* layout,
                 const Answer& answer) {
  watch_signals();  // notebooks set a handler of their own for each cell
  std::vector<Array> operands, results;
  if (ffi::Error error = collect(args, &operands); error.failure()) return error;
  if (ffi::Error error = collect(rets, &results); error.failure()) return error;
  Call call{};
  if (layout != nullptr) {
    const std::vector<Array> arrays = std::move(results);
    results.clear();
    if (!unpack(*layout, arrays, &call, &results)) {
      return ffi::Error(ffi::ErrorCode::kInternal, "a program whose results are not packed as it says");
    }
  }
  call.verb = verb;
  call.fresh = fresh;
  call.extra = extra.begin();
  call.num_extra = static_cast<uint32_t>(extra.size());
  call.fingerprint = fingerprint;
  call.operands = operands.data();
  call.num_operands = static_cast<uint32_t>(operands.size());
  call.results = results.data();
  call.num_results = static_cast<uint32_t>(results.size());
  call.interrupts = interrupts();
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

// What a call has, after what its platform adds.
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

uint32_t ffi_version() { return 1000 * XLA_FFI_API_MAJOR + XLA_FFI_API_MINOR; }

}  // namespace jaxvec

// Neither has the trait of being compatible with command buffers: a CUDA graph would repeat the copies and
// leave out the envs, so XLA must not capture a call, and by default does not.
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxvec_ffi_call, jaxvec::call_on_host, jaxvec::bind(xla::ffi::Ffi::Bind()));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxvec_ffi_cuda_call, jaxvec::call_on_cuda,
                              jaxvec::bind(xla::ffi::Ffi::Bind().Ctx<xla::ffi::PlatformStream<void*>>())
                                  .Attr<xla::ffi::Span<const int64_t>>("layout"));
