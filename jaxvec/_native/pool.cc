#include "pool.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <unordered_map>

namespace jaxvec {
namespace {

constexpr uint32_t kTokenType = 'u' + 256 * 4;
constexpr uint32_t kIdType = 'i' + 256 * 4;
constexpr int64_t kPatienceNs = 1'000'000'000;
static_assert(sizeof(TokenRow) == 3 * sizeof(uint32_t));

std::vector<Leaf> leaves(const Array* arrays, uint32_t count) {
  return std::vector<Leaf>(arrays, arrays + count);
}

// Whether `arrays` from `first` on are so many rows of the leaves.
bool take(const std::vector<Leaf>& leaves, const std::vector<Array>& arrays, size_t first, int64_t rows) {
  return arrays.size() >= first + leaves.size() &&
         std::equal(leaves.begin(), leaves.end(), arrays.begin() + first,
                    [rows](const Leaf& leaf, const Array& array) {
                      return leaf.takes(array) && array.dims[0] == rows;
                    });
}

bool is_token_of(const std::vector<Array>& arrays, int64_t rows) {
  return !arrays.empty() && is_token(arrays[0]) && arrays[0].dims[0] == rows;
}

bool contiguous(const std::vector<int64_t>& slots) {
  for (size_t i = 1; i < slots.size(); ++i) {
    if (slots[i] != slots[0] + static_cast<int64_t>(i)) return false;
  }
  return true;
}

uintptr_t this_thread() { return static_cast<uintptr_t>(pthread_self()); }

std::mutex registry_lock;
std::unordered_map<uint32_t, std::shared_ptr<Pool>>& registry() {
  static auto* pools = new std::unordered_map<uint32_t, std::shared_ptr<Pool>>;  // outlives every thread
  return *pools;
}

}  // namespace

bool is_token(const Array& array) {
  return array.dtype == kTokenType && array.rank == 2 && array.dims[0] > 0 && array.dims[1] == 3;
}

Leaf::Leaf(const Array& array)
    : data(array.data),
      nonzero(array.nonzero),
      dims(array.dims, array.dims + array.rank),
      dtype(array.dtype),
      row(dtype / 256) {
  for (size_t axis = 1; axis < dims.size(); ++axis) row *= dims[axis];
}

bool Leaf::takes(const Array& array) const {
  return dtype == array.dtype && array.rank == dims.size() &&
         std::equal(dims.begin() + 1, dims.end(), array.dims + 1);
}

void Leaf::write(const std::vector<int64_t>& slots, const void* rows) const {
  if (row == 0) return;  // then `rows` may be null, which memcpy must not get
  char* const target = static_cast<char*>(data);
  if (contiguous(slots)) {
    std::memcpy(target + slots[0] * row, rows, slots.size() * row);
    return;
  }
  for (size_t i = 0; i < slots.size(); ++i) {
    std::memcpy(target + slots[i] * row, static_cast<const char*>(rows) + i * row, row);
  }
}

void Leaf::read(const std::vector<int64_t>& slots, std::vector<Run>* runs) const {
  if (row == 0) return;
  const char* const source = static_cast<const char*>(data);
  // Where it is known, most rows are zero; to write zeros takes half as long as to read them, too.
  const auto from = [&](int64_t slot) {
    return nonzero == nullptr || nonzero[slot] ? source + slot * row : nullptr;
  };
  const char* next = nullptr;  // where the last run would go on
  for (const int64_t slot : slots) {
    const char* const here = from(slot);
    if (!runs->empty() && here == next) {
      runs->back().bytes += row;
    } else {
      runs->push_back({here, row});
    }
    next = here == nullptr ? nullptr : here + row;
  }
}

void HostTarget::put(void* to, const std::vector<Run>& runs) {
  char* target = static_cast<char*>(to);
  for (const Run& run : runs) {
    if (run.from != nullptr) {
      std::memcpy(target, run.from, run.bytes);
    } else {
      std::memset(target, 0, run.bytes);
    }
    target += run.bytes;
  }
}

Pool::Pool(const Plan& plan)
    : plan_(plan),
      process_(getpid()),
      actions_(leaves(plan.actions, plan.num_actions)),
      results_(leaves(plan.results, plan.num_results)),
      seen_(plan.parent->board.num_slots) {}

Moved Pool::answer(uint32_t verb, int64_t fingerprint, const std::vector<Array>& operands,
                   const std::vector<Array>& results, Target& target, int64_t* waited_ns) {
  // A fork's child has our memory, but not our workers.
  if (fingerprint != plan_.fingerprint || getpid() != process_) return Moved::kNothingDone;
  switch (verb) {
    case kStep:
      return step(operands, results, target, waited_ns);
    case kSend:
      return send(operands, results, target);
    case kRecv:
      return recv(operands, results, target, waited_ns);
    default:
      return Moved::kNothingDone;
  }
}

Moved Pool::step(const std::vector<Array>& operands, const std::vector<Array>& results, Target& target,
                 int64_t* waited_ns) {
  const int64_t rows = operands[0].dims[0];
  if (operands.size() != 1 + actions_.size() || !take(actions_, operands, 1, rows) ||
      !is_token_of(results, rows) || results.size() != 1 + results_.size() ||
      !take(results_, results, 1, rows) || !enter(false, 0)) {
    return Moved::kNothingDone;
  }
  std::vector<int64_t> slots;
  if (!open(operands, &slots) || !may_step(slots)) {
    leave();
    return Moved::kNothingDone;
  }
  const Recording recording(trace, kStep);
  hand_over(slots, &operands[1]);
  count(slots, kStep);
  take_off();
  leave();
  if (await(slots, static_cast<uint32_t>(rows), waited_ns) == Moved::kUnderWay) return Moved::kUnderWay;
  write_token(slots, results[0]);
  finish(slots, results, target);
  land();
  return Moved::kDone;
}

Moved Pool::send(const std::vector<Array>& operands, const std::vector<Array>& results, Target& target) {
  const uint32_t num_slots = plan_.parent->board.num_slots;
  const Array& ids = operands.back();
  const int64_t rows = ids.rank == 1 ? ids.dims[0] : 0;
  if (operands.size() != 2 + actions_.size() || !is_token_of(operands, num_slots) || ids.dtype != kIdType ||
      rows == 0 || !take(actions_, operands, 1, rows) || !is_token_of(results, num_slots) ||
      results.size() != 1 || !enter(false, 0)) {
    return Moved::kNothingDone;
  }
  const auto* id = static_cast<const int32_t*>(ids.data);
  const std::vector<int64_t> slots(id, id + rows);
  std::vector<int64_t> all;
  bool may = open(operands, &all);
  ++looks_;
  for (const int64_t slot : slots) may = may && first_met(slot);
  if (!may || !may_step(slots)) {
    leave();
    return Moved::kNothingDone;
  }
  const Recording recording(trace, kSend);
  hand_over(slots, &operands[1]);
  const int64_t due = now_ns() + plan_.step_ns;
  for (const int64_t slot : slots) {
    plan_.in_flight[slot] = 1;
    plan_.due[slot] = due;
    plan_.sent[(*plan_.num_sent)++] = slot;
  }
  count(all, kSend);
  write_token(all, results[0]);
  deliver(target);
  leave();
  state.served.fetch_add(1, std::memory_order_relaxed);
  return Moved::kDone;
}

Moved Pool::recv(const std::vector<Array>& operands, const std::vector<Array>& results, Target& target,
                 int64_t* waited_ns) {
  const uint32_t num_slots = plan_.parent->board.num_slots;
  if (operands.size() != 1 || !is_token_of(operands, num_slots) || !is_token_of(results, num_slots) ||
      results.size() != 1 + results_.size() || !take(results_, results, 1, plan_.batch_size) ||
      !enter(true, 0)) {  // one recv at a time
    return Moved::kNothingDone;
  }
  std::vector<int64_t> all;
  if (!open(operands, &all) || *plan_.num_sent < plan_.batch_size || overdue()) {
    leave();
    return Moved::kNothingDone;
  }
  const Recording recording(trace, kRecv);
  const uint32_t candidates = plan_.in_order ? plan_.batch_size : *plan_.num_sent;
  const std::vector<int64_t> sent(plan_.sent, plan_.sent + candidates);
  count(all, kRecv);
  take_off();
  leave();
  if (await(sent, plan_.batch_size, waited_ns) == Moved::kUnderWay) return Moved::kUnderWay;
  while (!enter(false, kPatienceNs)) {  // others are inside for short only
  }
  const std::vector<int64_t> slots = land_batch(sent);
  write_token(all, results[0]);
  leave();
  finish(slots, results, target);
  land();
  return Moved::kDone;
}

// Whether the token is one of ours and fresh, and names each of its envs once. The caller is inside.
bool Pool::open(const std::vector<Array>& operands, std::vector<int64_t>* slots) {
  if (!state.open) return false;
  const auto* token = static_cast<const TokenRow*>(operands[0].data);
  const int64_t rows = operands[0].dims[0];
  ++looks_;
  slots->reserve(rows);
  for (int64_t i = 0; i < rows; ++i) {
    const uint32_t env = token[i].env;
    if (token[i].pool != plan_.id || !first_met(env) || token[i].count != plan_.counts[env]) return false;
    slots->push_back(env);
  }
  return true;
}

// Whether there is such an env, and this look has not met it yet.
bool Pool::first_met(int64_t env) {
  if (env < 0 || env >= static_cast<int64_t>(seen_.size()) || seen_[env] == looks_) return false;
  seen_[env] = looks_;
  return true;
}

bool Pool::may_step(const std::vector<int64_t>& slots) const {
  return std::none_of(slots.begin(), slots.end(),
                      [this](int64_t slot) { return plan_.in_flight[slot] || plan_.needs_reset[slot]; });
}

// Sends the envs, with their actions, to their workers.
void Pool::hand_over(const std::vector<int64_t>& slots, const Array* actions) {
  {
    const Recording recording(trace, kWriting);
    for (size_t i = 0; i < actions_.size(); ++i) actions_[i].write(slots, actions[i].data);
  }
  const Recording recording(trace, kHandingOver);
  const int64_t* const stops_end = plan_.stops + plan_.parent->board.num_workers;
  for (size_t first = 0; first < slots.size();) {
    const int64_t* const stop = std::upper_bound(plan_.stops, stops_end, slots[first]);
    const int64_t start = stop == plan_.stops ? 0 : stop[-1];
    size_t last = first;
    while (last < slots.size() && start <= slots[last] && slots[last] < *stop) ++last;
    jaxvec::send(*plan_.parent, static_cast<uint32_t>(stop - plan_.stops), kStep, &slots[first],
                 static_cast<uint32_t>(last - first));
    first = last;
  }
}

// Whether an env in flight should be done long since: `recv` alone, which others satisfy, would not meet it.
bool Pool::overdue() const {
  const Board& board = plan_.parent->board;
  const int64_t now = now_ns();
  return std::any_of(plan_.sent, plan_.sent + *plan_.num_sent, [&](int64_t slot) {
    return plan_.due[slot] < now && board.done[slot].load(std::memory_order_relaxed) != board.asked[slot];
  });
}

// From here on nobody else has a handle to the envs.
void Pool::count(const std::vector<int64_t>& slots, uint32_t mover) {
  for (const int64_t slot : slots) ++plan_.counts[slot];
  state.mover = mover;
}

Moved Pool::await(const std::vector<int64_t>& slots, uint32_t count, int64_t* waited_ns) {
  const Recording recording(trace, kWaiting);
  const auto start = std::chrono::steady_clock::now();
  const auto num_slots = static_cast<uint32_t>(slots.size());
  if (wait(*plan_.parent, slots.data(), num_slots, count, plan_.wait_ns) == kDone) return Moved::kDone;
  *waited_ns = std::chrono::nanoseconds(std::chrono::steady_clock::now() - start).count();
  return Moved::kUnderWay;
}

// Takes a batch of those sent out of flight and returns it, in the order in which `recv` returns it.
std::vector<int64_t> Pool::land_batch(std::vector<int64_t> sent) {
  const Board& board = plan_.parent->board;
  if (plan_.batch_size == board.num_slots) {
    std::sort(sent.begin(), sent.end());
  } else if (!plan_.in_order) {
    sent.erase(std::remove_if(sent.begin(), sent.end(),
                              [&board](int64_t slot) { return board.done[slot] != board.asked[slot]; }),
               sent.end());
    std::stable_sort(sent.begin(), sent.end(), [&board](int64_t one, int64_t other) {
      return board.done_at[one] < board.done_at[other];
    });
  }
  sent.resize(plan_.batch_size);
  for (const int64_t slot : sent) plan_.in_flight[slot] = 0;
  int64_t* const end = plan_.sent + *plan_.num_sent;
  int64_t* const left =
      std::remove_if(plan_.sent, end, [this](int64_t slot) { return !plan_.in_flight[slot]; });
  *plan_.num_sent = static_cast<uint32_t>(left - plan_.sent);
  return sent;
}

// Reads the envs' rows, which nobody else touches until the handle that we return is used.
void Pool::finish(const std::vector<int64_t>& slots, const std::vector<Array>& results, Target& target) {
  const Recording recording(trace, kCopying);
  if (plan_.terminated != nullptr) {
    for (const int64_t slot : slots) {
      plan_.needs_reset[slot] = plan_.terminated[slot] | plan_.truncated[slot];
    }
  }
  std::vector<Run> runs;
  for (size_t i = 0; i < results_.size(); ++i) {
    runs.clear();
    results_[i].read(slots, &runs);
    target.put(results[i + 1].data, runs);
  }
  deliver(target);
  state.served.fetch_add(1, std::memory_order_relaxed);
}

// The caller is inside or in flight, so whoever waits to be alone will know of the copies.
void Pool::deliver(Target& target) {
  std::shared_ptr<Copies> copies = target.finish();
  if (copies == nullptr) return;
  const std::lock_guard lock(lock_);
  copies_.erase(std::remove_if(copies_.begin(), copies_.end(), [](const auto& each) { return each->done(); }),
                copies_.end());
  if (std::find(copies_.begin(), copies_.end(), copies) == copies_.end())
    copies_.push_back(std::move(copies));
}

void Pool::settle() {
  std::vector<std::shared_ptr<Copies>> copies;
  {
    const std::lock_guard lock(lock_);
    copies = copies_;
  }
  for (const auto& each : copies) each->wait();
}

void Pool::write_token(const std::vector<int64_t>& slots, const Array& token) const {
  auto* row = static_cast<TokenRow*>(token.data);
  for (const int64_t slot : slots) *row++ = {plan_.id, static_cast<uint32_t>(slot), plan_.counts[slot]};
}

bool Pool::enter(bool alone, int64_t timeout_ns) {
  std::unique_lock lock(lock_);
  const uintptr_t me = this_thread();
  const auto vacant = [&] {
    return (inside_ == 0 || inside_ == me) &&
           (!alone || std::all_of(in_flight_.begin(), in_flight_.end(),
                                  [me](uintptr_t thread) { return thread == me; }));
  };
  if (!changed_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), vacant)) return false;
  inside_ = me;
  return true;
}

void Pool::leave() {
  {
    const std::lock_guard lock(lock_);
    if (inside_ != this_thread()) return;
    inside_ = 0;
  }
  changed_.notify_all();
}

void Pool::take_off() {
  const std::lock_guard lock(lock_);
  if (std::find(in_flight_.begin(), in_flight_.end(), this_thread()) == in_flight_.end()) {
    in_flight_.push_back(this_thread());
  }
}

void Pool::land() {
  {
    const std::lock_guard lock(lock_);
    const auto mine = std::find(in_flight_.begin(), in_flight_.end(), this_thread());
    if (mine == in_flight_.end()) return;
    in_flight_.erase(mine);
  }
  changed_.notify_all();
}

void publish(uint32_t id, std::shared_ptr<Pool> pool) {
  const std::lock_guard lock(registry_lock);
  registry()[id] = std::move(pool);
}

void withdraw(uint32_t id) {
  const std::lock_guard lock(registry_lock);
  registry().erase(id);
}

std::shared_ptr<Pool> find(uint32_t id) {
  const std::lock_guard lock(registry_lock);
  const auto entry = registry().find(id);
  return entry == registry().end() ? nullptr : entry->second;
}

}  // namespace jaxvec
