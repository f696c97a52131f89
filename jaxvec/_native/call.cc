#include "call.h"

#include <atomic>

#include "interrupts.h"

namespace jaxvec {
namespace {

std::atomic<const Python*> python{nullptr};

// The number of the pool that the first operand names; 0, which none has, if it is no token.
uint32_t named_by(const Array* operands, size_t count) {
  if (count == 0 || !is_token(operands[0])) return 0;
  return static_cast<const TokenRow*>(operands[0].data)->pool;
}

constexpr int kTries = 100;

void keep_exception(const Python& python, Call& call) {
  void *type = nullptr, *value = nullptr, *traceback = nullptr;
  python.take_exception(&type, &value, &traceback);
  // `sys.exit(5)` leaves its argument for the value, until somebody makes the exception.
  python.make_exception(&type, &value, &traceback);
  python.release(type);
  python.release(traceback);
  python.release(call.exception);
  call.exception = value;
}

// Has Python answer a call. What Python raises, it is given in another call, which ends with it: no Python
// function could catch all of it, since handlers of signals raise theirs between any two instructions, the
// first and those of an `except` included. For the same reason the ending may take several tries.
void ask(const Python& python, Call& call) {
  const int gil = python.ensure_gil();
  if (python.run_signal_handlers() != 0) keep_exception(python, call);
  void* answered = nullptr;
  for (int tries = 0; answered == nullptr && tries < kTries; ++tries) {
    void* const address = python.make_int(&call);
    answered = python.call(python.answer, address);
    if (answered == nullptr) keep_exception(python, call);
    python.release(address);
  }
  if (answered == nullptr) *call.error = "jaxvec was interrupted each time it tried to say why";
  python.release(answered);
  python.release(call.exception);
  python.release_gil(gil);
}

}  // namespace

void set_python(const Python* answering) { python.store(answering); }

std::shared_ptr<Pool> pool_of(const std::vector<Array>& operands) {
  return find(named_by(operands.data(), operands.size()));
}

std::string ask_python(Call& call, Status status, Pool* pool) {
  const Python* answering = python.load();
  std::string error;
  call.status = static_cast<uint32_t>(status);
  call.pool = named_by(call.operands, call.num_operands);
  call.error = &error;
  if (answering == nullptr) {
    error = "the Python interpreter has ended";
  } else {
    ask(*answering, call);
  }
  if (status == Status::kUnderWay) pool->release();
  return error;
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
  Status status = Status::kElsewhere;
  if (pool != nullptr) {
    HostTarget target;
    status = pool->answer(call.verb, call.fingerprint, operands, results, target, &call.waited_ns);
  }
  if (status == Status::kDone && !interrupted()) return "";
  return ask_python(call, status, pool.get());
}

}  // namespace jaxvec
