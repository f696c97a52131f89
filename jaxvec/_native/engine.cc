#include "engine.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <numeric>
#include <unordered_map>
#include <utility>

#include "narrow.h"

namespace jaxvec {
namespace {

constexpr int64_t kEnterTimeoutNs = 1'000'000'000;
static_assert(sizeof(TokenRow) == 3 * sizeof(uint32_t));

bool is_integer(uint32_t dtype) {
  return with_integer(dtype, [](auto) { return true; });
}

// Casts integers to another integer type. Returns false if one does not fit.
bool cast(const Array& from, uint32_t dtype, void* to) {
  return with_integer(from.dtype, [&](auto source) {
    return with_integer(dtype, [&](auto target) {
      return narrow<decltype(source), decltype(target)>(from.data, to, count_of(from));
    });
  });
}

// Returns whether the arrays after the token have the shapes of the first `count` leaves and `rows` rows
// each. Results have the leaves' dtypes, and no rows if the program does not read them. Operands may have
// other integer types.
bool fit(const std::vector<Leaf>& leaves, size_t count, const std::vector<Array>& arrays, int64_t rows,
         bool results) {
  const auto fits = [=](const Leaf& leaf, const Array& array) {
    const bool same = leaf.dtype == array.dtype;
    return leaf.has_shape(array) &&
           (same || (!results && is_integer(leaf.dtype) && is_integer(array.dtype))) &&
           (array.dims[0] == rows || (results && array.dims[0] == 0));
  };
  return arrays.size() > count &&
         std::equal(leaves.begin(), leaves.begin() + count, arrays.begin() + 1, fits);
}

// Returns the number of operands of a step or a send that are leaves of the action or of the reset options.
size_t num_given(uint32_t verb, const std::vector<Array>& operands) {
  const size_t others = verb == kSend ? 2 : 1;  // the token, and the ids of a send
  return operands.size() > others ? operands.size() - others : 0;
}

bool contiguous(const std::vector<int64_t>& slots) {
  const auto is_gap = [](int64_t slot, int64_t next) { return next != slot + 1; };
  return std::adjacent_find(slots.begin(), slots.end(), is_gap) == slots.end();
}

uint32_t size(const std::vector<int64_t>& slots) { return static_cast<uint32_t>(slots.size()); }

std::mutex registry_lock;
std::unordered_map<uint32_t, std::shared_ptr<Engine>>& registry() {                  // under `registry_lock`
  static auto* engines = new std::unordered_map<uint32_t, std::shared_ptr<Engine>>;  // outlives every thread
  return *engines;
}

}  // namespace

size_t count_of(const Array& array) {
  return std::accumulate(array.dims, array.dims + array.rank, size_t{1}, std::multiplies<>());
}

size_t bytes_of(const Array& array) { return count_of(array) * (array.dtype / 256); }

bool is_token(const Array& array) {
  return array.dtype == dtype_of<uint32_t> && array.rank == 2 && array.dims[0] > 0 && array.dims[1] == 3;
}

Leaf::Leaf(const Array& array)
    : data(array.data),
      nonzero(array.nonzero),
      dims(array.dims, array.dims + array.rank),
      dtype(array.dtype),
      row(dtype / 256) {
  for (size_t axis = 1; axis < dims.size(); ++axis) row *= dims[axis];
}

bool Leaf::has_shape(const Array& array) const {
  return array.rank == dims.size() && std::equal(dims.begin() + 1, dims.end(), array.dims + 1);
}

void Leaf::write(const std::vector<int64_t>& slots, const void* rows) const {
  if (row == 0 || rows == nullptr) return;  // the call does not have this leaf, see `Request`
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
  // Most rows of a leaf with flags are zeros, and writing zeros takes half as long as copying them.
  const auto from = [&](int64_t slot) {
    return nonzero == nullptr || nonzero[slot] ? source + slot * row : nullptr;
  };
  const char* next = nullptr;  // end of the last run
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

Engine::Engine(const Plan& plan)
    : plan_(plan),
      process_(getpid()),
      queue_(plan.parent->board.num_slots),
      actions_(plan.actions.begin(), plan.actions.end()),
      results_(plan.results.begin(), plan.results.end()),
      all_(plan.parent->board.num_slots),
      checked_(plan.parent->board.num_slots) {
  std::iota(all_.begin(), all_.end(), 0);
}

Status Engine::answer(uint32_t verb, int64_t fingerprint, const std::vector<Array>& operands,
                      const std::vector<Array>& results, Target& target, int64_t* waited_ns) {
  if (fingerprint != plan_.fingerprint || !fits(verb, operands, results)) return Status::kElsewhere;
  const int64_t rows = operands[0].dims[0];
  const auto* token = static_cast<const TokenRow*>(operands[0].data);
  std::vector<int64_t> slots, sent;
  std::vector<uint32_t> generation;
  slots.reserve(rows);
  generation.reserve(rows);
  for (int64_t i = 0; i < rows; ++i) {
    if (token[i].pool != plan_.id) return Status::kElsewhere;
    slots.push_back(token[i].env);
    generation.push_back(token[i].generation);
  }
  std::vector<const void*> actions(actions_.size());
  // Own the actions of other integer types. Python reports those that do not fit.
  std::vector<std::vector<char>> casts;
  for (size_t i = 0; i < num_given(verb, operands); ++i) {
    const Array& given = operands[i + 1];
    actions[i] = given.data;
    if (given.dtype == actions_[i].dtype) continue;
    casts.emplace_back(count_of(given) * (actions_[i].dtype / 256));
    if (!cast(given, actions_[i].dtype, casts.back().data())) return Status::kElsewhere;
    actions[i] = casts.back().data();
  }
  std::vector<void*> leaves;
  for (size_t i = 1; i < results.size(); ++i) {
    leaves.push_back(results[i].dims[0] > 0 ? results[i].data
                                            : nullptr);  // empty: the program never reads it
  }
  Request request{};
  request.verb = request.caller_code = verb;
  request.new_generation = 1;
  request.num_slots = static_cast<uint32_t>(rows);
  request.slots = slots.data();
  request.generation = generation.data();
  request.actions = actions.data();
  request.results = leaves.data();
  if (verb == kSend) {
    const auto* ids = static_cast<const int32_t*>(operands.back().data);
    sent.assign(ids, ids + operands.back().dims[0]);
    request.sent = sent.data();
    request.num_sent = static_cast<uint32_t>(sent.size());
  }
  auto* next = static_cast<TokenRow*>(results[0].data);
  for (int64_t i = 0; i < rows; ++i) next[i] = {plan_.id, token[i].env, token[i].generation + 1};
  const Status status = move(request, target);
  *waited_ns = request.waited_ns;
  if (status == Status::kDone) state.num_served.fetch_add(1, std::memory_order_relaxed);
  return status;
}

// Returns whether the dtypes and shapes of a program's operands and results are those of the verb.
bool Engine::fits(uint32_t verb, const std::vector<Array>& operands,
                  const std::vector<Array>& results) const {
  const int64_t num_slots = plan_.parent->board.num_slots;
  if (operands.empty() || !is_token(operands[0])) return false;
  const int64_t rows = operands[0].dims[0];
  const size_t given = num_given(verb, operands);
  const bool complete = given == actions_.size() || given + plan_.num_options == actions_.size();
  if (results.empty() || !is_token(results[0]) || results[0].dims[0] != rows) return false;
  if (verb != kStep && rows != num_slots) return false;
  switch (verb) {
    case kStep:
      return complete && fit(actions_, given, operands, rows, false) &&
             results.size() == 1 + results_.size() && fit(results_, results_.size(), results, rows, true);
    case kSend: {
      const Array& ids = operands.back();
      return complete && ids.dtype == dtype_of<int32_t> && ids.rank == 1 && ids.dims[0] > 0 &&
             fit(actions_, given, operands, ids.dims[0], false) && results.size() == 1;
    }
    case kRecv:
      return operands.size() == 1 && results.size() == 1 + results_.size() &&
             fit(results_, results_.size(), results, plan_.batch_size, true);
    default:
      return false;
  }
}

Status Engine::move(Request& request, Target& target) {
  if (getpid() != process_) return Status::kElsewhere;  // a fork's child has no workers
  if (request.slots != nullptr && request.num_slots == 0) return Status::kElsewhere;
  const bool is_send = request.verb == kSend, is_recv = request.verb == kRecv;
  if (!is_recv && !is_send && request.verb != kStep) return Status::kElsewhere;
  if (is_send && request.num_sent == 0) return Status::kElsewhere;
  if (plan_.local != nullptr && request.verb != kStep) return Status::kElsewhere;
  // A recv needs the queue, so there is one at a time.
  const int64_t* const needed = is_recv ? &queue_ : is_send ? request.sent : request.slots;
  const uint32_t count = is_recv ? 1 : is_send ? request.num_sent : request.num_slots;
  // `Pool` refuses to move some of the envs only, and has an error for it.
  if (plan_.all_at_once && !is_recv && needed != nullptr && count < all_.size()) return Status::kElsewhere;
  if (!enter(needed, count, is_recv || request.slots == nullptr, 0)) return Status::kBusy;
  std::vector<int64_t> handle;
  Status status = admit(request, &handle);
  if (status == Status::kDone) {
    status = is_recv   ? check_queue()
             : is_send ? check_envs(request.sent, request.num_sent, true)
                       : check_envs(handle.data(), size(handle), true);
  }
  if (status != Status::kDone) {
    leave();
    return status;
  }
  const Recording recording(trace, request.caller_code);
  if (is_recv) return recv(request, handle, target);
  return is_send ? send(request, handle, target) : step(request, handle, target);
}

// These three are called inside, with the envs of the handle, and leave.

Status Engine::step(Request& request, const std::vector<int64_t>& slots, Target& target) {
  if (plan_.local != nullptr) return step_here(request, slots, target);
  const int64_t start = now_ns();
  dispatch(slots, request.actions);
  advance(slots, request);
  hold(slots.data(), size(slots), false);
  leave();
  if (!await(slots, size(slots), start, &request.waited_ns)) return Status::kUnderWay;
  if (slots.size() == all_.size()) state.steps_ns.fetch_add(request.waited_ns, std::memory_order_relaxed);
  finish(slots, request.results, target);
  release();
  return Status::kDone;
}

// Steps local envs one after the other, so it leaves only after the step.
Status Engine::step_here(Request& request, const std::vector<int64_t>& slots, Target& target) {
  hold(slots.data(), size(slots), false);
  write_actions(slots, request.actions);
  {
    const Recording recording(trace, kDispatching);
    // After a failure, the plan's memory may be gone.
    if (!plan_.local->step(slots)) {
      leave();
      return Status::kUnderWay;
    }
  }
  advance(slots, request);
  leave();
  finish(slots, request.results, target);
  release();
  return Status::kDone;
}

Status Engine::send(Request& request, const std::vector<int64_t>& handle, Target& target) {
  const std::vector<int64_t> slots(request.sent, request.sent + request.num_sent);
  dispatch(slots, request.actions);
  const int64_t due = now_ns() + plan_.step_ns;
  for (const int64_t slot : slots) {
    plan_.in_flight[slot] = 1;
    plan_.due[slot] = due;
    plan_.sent[(*plan_.num_sent)++] = slot;
  }
  advance(handle, request);
  deliver(target);
  leave();
  return Status::kDone;
}

Status Engine::recv(Request& request, const std::vector<int64_t>& handle, Target& target) {
  const uint32_t candidates = plan_.in_order ? plan_.batch_size : *plan_.num_sent;
  const std::vector<int64_t> sent(plan_.sent, plan_.sent + candidates);
  advance(handle, request);
  hold(&queue_, 1, false);
  leave();
  if (!await(sent, plan_.batch_size, now_ns(), &request.waited_ns)) return Status::kUnderWay;
  while (!enter(&queue_, 0, false, kEnterTimeoutNs)) {  // other threads are inside only briefly
  }
  const std::vector<int64_t> slots = receive_batch(sent);
  hold(slots.data(), size(slots), false);  // until their rows are read
  leave();
  finish(slots, request.results, target);
  release();
  return Status::kDone;
}

// Stores the envs that the caller may move: those of its handle, if it is fresh, or all for a caller without
// one, which must wait for copies of other callers. The caller is inside.
Status Engine::admit(const Request& request, std::vector<int64_t>* slots) {
  if (!state.open) return Status::kRefused;
  if (request.slots == nullptr) {
    *slots = all_;
    return copying() ? Status::kCopying : Status::kDone;
  }
  slots->assign(request.slots, request.slots + request.num_slots);
  return check_handle(request.slots, request.generation, request.num_slots);
}

Status Engine::check_handle(const int64_t* slots, const uint32_t* generation, uint32_t count) {
  const Status status = check_ids(slots, count);
  if (status != Status::kDone || generation == nullptr) return status;
  for (uint32_t i = 0; i < count; ++i) {
    if (generation[i] != plan_.generation[slots[i]]) return Status::kStale;
  }
  return Status::kDone;
}

Status Engine::check_envs(const int64_t* slots, uint32_t count, bool stepped) {
  const Status status = check_ids(slots, count);
  if (status != Status::kDone) return status;
  const auto any = [&](const uint8_t* flags) {
    return std::any_of(slots, slots + count, [flags](int64_t slot) { return flags[slot]; });
  };
  if (any(plan_.in_flight)) return Status::kPending;
  return stepped && any(plan_.needs_reset) ? Status::kNeedsReset : Status::kDone;
}

// Returns whether all envs exist and none is duplicated.
Status Engine::check_ids(const int64_t* slots, uint32_t count) {
  const auto num_slots = static_cast<int64_t>(checked_.size());
  if (std::any_of(slots, slots + count, [=](int64_t slot) { return slot < 0 || slot >= num_slots; })) {
    return Status::kNoSuchEnv;
  }
  ++num_checks_;
  for (uint32_t i = 0; i < count; ++i) {
    if (std::exchange(checked_[slots[i]], num_checks_) == num_checks_) return Status::kDuplicate;
  }
  return Status::kDone;
}

void Engine::write_actions(const std::vector<int64_t>& slots, const void* const* actions) {
  const Recording recording(trace, kWriting);
  for (size_t i = 0; i < actions_.size(); ++i) actions_[i].write(slots, actions[i]);
}

void Engine::dispatch(const std::vector<int64_t>& slots, const void* const* actions) {
  write_actions(slots, actions);
  const Recording recording(trace, kDispatching);
  jaxvec::send(*plan_.parent, kStep, slots.data(), size(slots));
}

// Checks that a recv can be made. An overdue env is an error of its own, because recv would not notice it
// while enough other envs are ready.
Status Engine::check_queue() const {
  if (*plan_.num_sent < plan_.batch_size) return Status::kTooFewPending;
  const Board& board = plan_.parent->board;
  const int64_t now = now_ns();
  const bool overdue = std::any_of(plan_.sent, plan_.sent + *plan_.num_sent, [&](int64_t slot) {
    return plan_.due[slot] < now &&
           board.completed[slot].load(std::memory_order_relaxed) != board.requested[slot];
  });
  return overdue ? Status::kLate : Status::kDone;
}

// Makes all other handles to the envs stale.
void Engine::advance(const std::vector<int64_t>& slots, const Request& request) {
  if (!request.new_generation) return;
  for (const int64_t slot : slots) ++plan_.generation[slot];
  state.last_caller = request.caller_code;
}

bool Engine::await(const std::vector<int64_t>& slots, uint32_t count, int64_t start, int64_t* waited_ns) {
  const Recording recording(trace, kWaiting);
  const Outcome outcome = wait(*plan_.parent, slots.data(), size(slots), count, start + plan_.wait_ns);
  *waited_ns = now_ns() - start;
  return outcome == kDone;
}

// Removes a batch from the queue of pending envs and returns it, in the order of `recv`'s results.
std::vector<int64_t> Engine::receive_batch(std::vector<int64_t> sent) {
  const Board& board = plan_.parent->board;
  const auto is_pending = [&](int64_t slot) { return board.completed[slot] != board.requested[slot]; };
  const auto earlier = [&](int64_t one, int64_t other) {
    return board.completed_at[one] < board.completed_at[other];
  };
  if (plan_.in_order) {
    // The caller passes the first that were sent.
  } else if (plan_.batch_size == board.num_slots) {
    std::sort(sent.begin(), sent.end());
  } else {
    sent.erase(std::remove_if(sent.begin(), sent.end(), is_pending), sent.end());
    std::stable_sort(sent.begin(), sent.end(), earlier);
  }
  sent.resize(plan_.batch_size);
  for (const int64_t slot : sent) plan_.in_flight[slot] = 0;
  int64_t* const end = plan_.sent + *plan_.num_sent;
  int64_t* const left =
      std::remove_if(plan_.sent, end, [this](int64_t slot) { return !plan_.in_flight[slot]; });
  *plan_.num_sent = static_cast<uint32_t>(left - plan_.sent);
  return sent;
}

// Copies the envs' rows. No other thread or worker writes them before the returned handle is used.
void Engine::finish(const std::vector<int64_t>& slots, void* const* results, Target& target) {
  const Recording recording(trace, kCopying);
  if (plan_.terminated != nullptr) {
    for (const int64_t slot : slots) {
      plan_.needs_reset[slot] = plan_.terminated[slot] | plan_.truncated[slot];
    }
  }
  std::vector<Run> runs;
  for (size_t i = 0; i < results_.size(); ++i) {
    if (results[i] == nullptr) continue;
    runs.clear();
    results_[i].read(slots, &runs);
    target.put(results[i], runs);
  }
  deliver(target);
}

// Records unfinished copies. The caller is inside or holds the slots, so a thread that enters exclusively
// later finds the copies in `copies_`.
void Engine::deliver(Target& target) {
  std::shared_ptr<Copies> copies = target.finish();
  if (copies == nullptr) return;
  const std::lock_guard lock(lock_);
  copies_.erase(std::remove_if(copies_.begin(), copies_.end(), [](const auto& each) { return each->done(); }),
                copies_.end());
  if (std::find(copies_.begin(), copies_.end(), copies) == copies_.end())
    copies_.push_back(std::move(copies));
}

void Engine::wait_for_copies() {
  std::vector<std::shared_ptr<Copies>> copies;
  {
    const std::lock_guard lock(lock_);
    copies = copies_;
  }
  for (const auto& each : copies) each->wait();
}

bool Engine::copying() {
  const std::lock_guard lock(lock_);
  return !std::all_of(copies_.begin(), copies_.end(), [](const auto& each) { return each->done(); });
}

bool Engine::enter(const int64_t* slots, uint32_t count, bool exclusive, int64_t timeout_ns) {
  std::unique_lock lock(lock_);
  const auto me = std::this_thread::get_id();
  const auto vacant = [&] {
    return (inside_ == std::thread::id() || inside_ == me) &&
           std::none_of(holds_.begin(), holds_.end(), [&](const Hold& hold) {
             return hold.thread != me && conflicts(hold, slots, count, exclusive);
           });
  };
  if (!changed_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), vacant)) return false;
  inside_ = me;
  return true;
}

// Returns whether another thread's hold forbids an entry with these slots.
bool Engine::conflicts(const Hold& hold, const int64_t* slots, uint32_t count, bool exclusive) const {
  if (!exclusive && !hold.alone) return false;
  if (slots == nullptr) return true;
  std::vector<bool> held(queue_ + 1);
  for (const int64_t slot : hold.slots) held[slot] = true;
  return std::any_of(slots, slots + count, [&](int64_t slot) {  // ids are checked only inside
    return slot >= 0 && slot <= queue_ && held[slot];
  });
}

void Engine::leave() {
  {
    const std::lock_guard lock(lock_);
    if (inside_ != std::this_thread::get_id()) return;
    inside_ = {};
  }
  changed_.notify_all();
}

void Engine::hold(const int64_t* slots, uint32_t count, bool alone) {
  const std::lock_guard lock(lock_);
  holds_.push_back({std::this_thread::get_id(), alone, std::vector<int64_t>(slots, slots + count)});
}

bool Engine::holds() {
  const std::lock_guard lock(lock_);
  const auto me = std::this_thread::get_id();
  return std::any_of(holds_.begin(), holds_.end(), [me](const Hold& hold) { return hold.thread == me; });
}

void Engine::release() {
  const auto me = std::this_thread::get_id();
  {
    const std::lock_guard lock(lock_);
    const auto mine =
        std::remove_if(holds_.begin(), holds_.end(), [me](const Hold& hold) { return hold.thread == me; });
    if (mine == holds_.end()) return;
    holds_.erase(mine, holds_.end());
  }
  changed_.notify_all();
}

void publish(uint32_t id, std::shared_ptr<Engine> engine) {
  const std::lock_guard lock(registry_lock);
  registry()[id] = std::move(engine);
}

void withdraw(uint32_t id) {
  const std::lock_guard lock(registry_lock);
  registry().erase(id);
}

std::shared_ptr<Engine> find(uint32_t id) {
  const std::lock_guard lock(registry_lock);
  const auto entry = registry().find(id);
  return entry == registry().end() ? nullptr : entry->second;
}

}  // namespace jaxvec
