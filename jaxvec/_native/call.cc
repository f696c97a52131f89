#include "call.h"

#include <atomic>

#include "interrupts.h"

namespace jaxvec {
namespace {

std::atomic<const Python*> python{nullptr};

// Runs Python's handlers of signals that have come, and keeps what they raise in the call. A Python
// function can't: it would be interrupted at its first instruction, before it can catch anything.
void hear_signals(const Python& python, Call& call) {
  const int gil = python.ensure_gil();
  if (python.run_signal_handlers() != 0) {
    void *type = nullptr, *value = nullptr, *traceback = nullptr;
    python.take_exception(&type, &value, &traceback);
    // `sys.exit(5)` leaves its argument for the value, until somebody makes the exception.
    python.make_exception(&type, &value, &traceback);
    call.exception = value != nullptr ? value : type;
  }
  python.release_gil(gil);
}

}  // namespace

void set_python(const Python* answering) { python.store(answering); }

std::shared_ptr<Pool> pool_of(const std::vector<Array>& operands) {
  if (operands.empty() || !is_token(operands[0])) return nullptr;
  return find(static_cast<const TokenRow*>(operands[0].data)->pool);
}

std::string ask_python(Call& call, Moved moved, Pool* pool) {
  const Python* answering = python.load();
  std::string error;
  int32_t answered = 0;
  call.moved = static_cast<uint32_t>(moved);
  call.error = &error;
  if (answering == nullptr) {
    error = "the Python interpreter has ended";
  } else {
    hear_signals(*answering, call);
    answered = answering->answer(&call);
    if (answered == 0 && error.empty()) {
      // A signal came between the two, and nobody has heard what its handler raised.
      call.exception = answering->keyboard_interrupt;
      answered = answering->answer(&call);
    }
  }
  if (moved == Moved::kUnderWay) pool->land();
  if (answered == 1) return "";
  return error.empty() ? "jaxvec could not say why; the standard error may tell more" : error;
}

bool interrupted() {
  static std::atomic<uint32_t> heard{0};
  const uint32_t now = signals();
  return heard.load(std::memory_order_relaxed) != now && heard.exchange(now) != now;
}

std::string answer_on_host(Call& call) {
  const std::vector<Array> operands(call.operands, call.operands + call.num_operands);
  const std::vector<Array> results(call.results, call.results + call.num_results);
  const std::shared_ptr<Pool> pool = pool_of(operands);
  Moved moved = Moved::kNothingDone;
  if (pool != nullptr) {
    HostTarget target;
    moved = pool->answer(call.verb, call.fingerprint, operands, results, target, &call.waited_ns);
  }
  if (moved == Moved::kDone && !interrupted()) return "";
  return ask_python(call, moved, pool.get());
}

}  // namespace jaxvec
