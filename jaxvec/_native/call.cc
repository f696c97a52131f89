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

std::shared_ptr<Engine> engine_of(const Call& call) { return find(pool_id_of(call.operands)); }

bool unpack(const int64_t* layout, const int64_t* end, const std::vector<Array>& arrays,
            std::vector<Array>* found) {
  if (layout == end) return false;
  const bool packed = *layout++ != 0;
  if (packed && arrays.empty()) return false;
  const size_t packed_bytes = packed ? bytes_of(arrays[0]) : 0;
  size_t next_array = packed ? 1 : 0;
  while (layout != end) {
    if (end - layout < 3 || layout[2] < 0 || end - layout - 3 < layout[2]) return false;
    const auto rank = static_cast<uint32_t>(layout[2]);
    Array array{nullptr, layout + 3, rank, static_cast<uint32_t>(layout[1]), nullptr};
    const size_t bytes = bytes_of(array);
    if (layout[0] >= 0) {
      const auto offset = static_cast<size_t>(layout[0]);
      if (offset > packed_bytes || bytes > packed_bytes - offset) return false;
      if (packed) array.data = static_cast<char*>(arrays[0].data) + offset;
    } else {
      if (next_array == arrays.size() || bytes_of(arrays[next_array]) != bytes) return false;
      array.data = arrays[next_array++].data;
    }
    found->push_back(array);
    layout += 3 + rank;
  }
  return next_array == arrays.size();
}

std::string ask_python(Call& call, Status status, Engine* engine) {
  call.status = static_cast<uint32_t>(status);
  call.pool = pool_id_of(call.operands);
  const Answer answer = python.load();
  std::string error = answer == nullptr ? "the Python interpreter has ended" : answer(call);
  if (status == Status::kUnderWay) engine->release();
  return error;
}

std::string answer_on_host(Call& call) {
  const std::shared_ptr<Engine> engine = engine_of(call);
  Status status = Status::kElsewhere;
  if (engine != nullptr) {
    HostTarget target;
    status =
        engine->answer(call.verb, call.fingerprint, call.operands, call.results, target, &call.waited_ns);
  }
  if (status == Status::kDone && !interrupted()) return "";
  return ask_python(call, status, engine.get());
}

}  // namespace jaxvec
