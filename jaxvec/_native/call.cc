#include "call.h"

#include <atomic>

#include "interrupts.h"

namespace jaxvec {
namespace {

std::atomic<Answer> python{nullptr};

// Returns the id of the pool in the token; 0, which no pool has, if the first operand is not a token.
uint32_t pool_id_of(const std::vector<Array>& operands) {
  if (operands.empty() || !is_token(operands[0])) return 0;
  return static_cast<const TokenRow*>(operands[0].data)->pool;
}

}  // namespace

void set_python(Answer answer) { python.store(answer); }

std::shared_ptr<Pool> pool_of(const Call& call) { return find(pool_id_of(call.operands)); }

std::string ask_python(Call& call, Status status, Pool* pool) {
  const Answer answer = python.load();
  call.status = static_cast<uint32_t>(status);
  call.pool = pool_id_of(call.operands);
  std::string error = answer == nullptr ? "the Python interpreter has ended" : answer(call);
  if (status == Status::kUnderWay) pool->release();
  return error;
}

bool interrupted() {
  static std::atomic<uint32_t> last_seen{0};
  const uint32_t now = signals();
  // The exchange lets only one of several threads return true.
  return last_seen.load(std::memory_order_relaxed) != now && last_seen.exchange(now) != now;
}

std::string answer_on_host(Call& call) {
  const std::shared_ptr<Pool> pool = pool_of(call);
  Status status = Status::kElsewhere;
  if (pool != nullptr) {
    HostTarget target;
    status = pool->answer(call.verb, call.fingerprint, call.operands, call.results, target, &call.waited_ns);
  }
  if (status == Status::kDone && !interrupted()) return "";
  return ask_python(call, status, pool.get());
}

}  // namespace jaxvec
