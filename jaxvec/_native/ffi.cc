// The XLA FFI handlers on the CPU: a compiled program's way into a pool. Twin of callbacks/_ffi.py.
#include "ffi.h"

#include <atomic>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "interrupts.h"
#include "xla/ffi/api/ffi.h"

namespace jaxvec {
namespace {

namespace ffi = ::xla::ffi;

std::atomic<const Python*> python{nullptr};

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

// Runs Python's handlers of signals that have come, and keeps what they raise in the call. A Python
// function can't: it would be interrupted at its first instruction, before it can catch anything.
void hear_signals(const Python& python, Call& call) {
  const int gil = python.ensure_gil();
  if (python.run_signal_handlers() != 0) {
    void *type = nullptr, *value = nullptr, *traceback = nullptr;
    python.take_exception(&type, &value, &traceback);
    call.exception = value != nullptr ? value : type;
  }
  python.release_gil(gil);
}

// Has Python answer the call.
ffi::Error ask_python(Call& call) {
  std::string error;
  call.error = &error;
  const Python* answering = python.load();
  if (answering == nullptr) return ffi::Error(ffi::ErrorCode::kInternal, "the Python interpreter has ended");
  hear_signals(*answering, call);
  if (answering->answer(&call) == 1) return ffi::Error::Success();
  if (error.empty()) {  // a signal came between the two, and nobody has heard what its handler raised
    call.exception = answering->keyboard_interrupt;
    if (answering->answer(&call) == 1) return ffi::Error::Success();
  }
  if (error.empty()) error = "jaxvec could not say why; the standard error may tell more";
  return ffi::Error(ffi::ErrorCode::kInternal, error);
}

std::shared_ptr<Pool> pool_of(const std::vector<Array>& operands) {
  if (operands.empty() || !is_token(operands[0])) return nullptr;
  return find(static_cast<const TokenRow*>(operands[0].data)->pool);
}

// Whether Ctrl-C came since somebody asked. A program whose steps are quick never waits for long, but
// has to end, too; Python decides whether it is for this thread to hear.
bool interrupted() {
  static std::atomic<uint32_t> heard{0};
  const uint32_t now = interrupts();
  return heard.load(std::memory_order_relaxed) != now && heard.exchange(now) != now;
}

// Operands: the token, and what the verb takes. Results: the next token, and what it gives.
ffi::Error call(ffi::RemainingArgs args, ffi::RemainingRets rets, int64_t fingerprint, uint32_t verb,
                bool fresh, ffi::Span<const uint8_t> extra) {
  watch_interrupts();  // notebooks set a handler of their own for each cell
  std::vector<Array> operands, results;
  if (ffi::Error error = collect(args, &operands); error.failure()) return error;
  if (ffi::Error error = collect(rets, &results); error.failure()) return error;
  Call call{};
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
  const std::shared_ptr<Pool> pool = pool_of(operands);  // null: closed, or not with the native hand-off
  const Moved moved = pool == nullptr ? Moved::kNothingDone
                                      : pool->answer(verb, fingerprint, operands, results, &call.waited_ns);
  if (moved == Moved::kDone && !interrupted()) return ffi::Error::Success();
  call.moved = static_cast<uint32_t>(moved);
  ffi::Error error = ask_python(call);
  if (moved == Moved::kUnderWay) pool->land();
  return error;
}

}  // namespace

void set_python(const Python* answering) { python.store(answering); }

uint32_t ffi_version() { return 1000 * XLA_FFI_API_MAJOR + XLA_FFI_API_MINOR; }

}  // namespace jaxvec

// What XLA is given, by name.
#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxvec_ffi_call, jaxvec::call,
                              xla::ffi::Ffi::Bind()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int64_t>("fingerprint")
                                  .Attr<uint32_t>("verb")
                                  .Attr<bool>("fresh")
                                  .Attr<xla::ffi::Span<const uint8_t>>("extra"));

#pragma GCC visibility pop
