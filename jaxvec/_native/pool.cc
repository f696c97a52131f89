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
static_assert(sizeof(TokenRow) == 3 * sizeof(uint32_t));

std::vector<Leaf> leaves(const Array* arrays, uint32_t count) {
  return std::vector<Leaf>(arrays, arrays + count);
}

// The first of `arrays` is a token; all have as many rows as that.
bool same_types(const std::vector<Leaf>& leaves, const std::vector<Array>& arrays, int64_t rows) {
  return arrays.size() == leaves.size() + 1 && is_token(arrays[0]) && arrays[0].dims[0] == rows &&
         std::equal(leaves.begin(), leaves.end(), arrays.begin() + 1,
                    [rows](const Leaf& leaf, const Array& array) {
                      return leaf.takes(array) && array.dims[0] == rows;
                    });
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
  char* const target = static_cast<char*>(data);
  if (contiguous(slots)) {
    std::memcpy(target + slots[0] * row, rows, slots.size() * row);
    return;
  }
  for (size_t i = 0; i < slots.size(); ++i) {
    std::memcpy(target + slots[i] * row, static_cast<const char*>(rows) + i * row, row);
  }
}

void Leaf::read(const std::vector<int64_t>& slots, void* rows) const {
  const char* const source = static_cast<const char*>(data);
  if (nonzero == nullptr && contiguous(slots)) {
    std::memcpy(rows, source + slots[0] * row, slots.size() * row);
    return;
  }
  for (size_t i = 0; i < slots.size(); ++i) {
    char* const target = static_cast<char*>(rows) + i * row;
    // Where it is known, most rows are zero; to write zeros takes half as long as to read them, too.
    if (nonzero == nullptr || nonzero[slots[i]]) {
      std::memcpy(target, source + slots[i] * row, row);
    } else {
      std::memset(target, 0, row);
    }
  }
}

Pool::Pool(const Plan& plan)
    : plan_(plan),
      process_(getpid()),
      actions_(leaves(plan.actions, plan.num_actions)),
      results_(leaves(plan.results, plan.num_results)),
      seen_(plan.parent->board.num_slots) {}

Stepped Pool::step(int64_t fingerprint, const std::vector<Array>& operands, const std::vector<Array>& results,
                   int64_t* waited_ns) {
  const int64_t rows = operands[0].dims[0];
  // A fork's child has our memory, but not our workers.
  if (fingerprint != plan_.fingerprint || !same_types(actions_, operands, rows) ||
      !same_types(results_, results, rows) || getpid() != process_ || !enter(false, 0)) {
    return Stepped::kNothingDone;
  }
  const auto* token = static_cast<const TokenRow*>(operands[0].data);
  if (!state.open || !fresh(token, rows)) {
    leave();
    return Stepped::kNothingDone;
  }
  std::vector<int64_t> slots(rows);
  for (int64_t i = 0; i < rows; ++i) slots[i] = token[i].env;
  for (size_t i = 0; i < actions_.size(); ++i) actions_[i].write(slots, operands[i + 1].data);
  start(slots);
  take_off();
  leave();
  const auto sent = std::chrono::steady_clock::now();
  const auto num_slots = static_cast<uint32_t>(rows);
  if (wait(*plan_.parent, slots.data(), num_slots, num_slots, plan_.wait_ns) != kDone) {
    *waited_ns = std::chrono::nanoseconds(std::chrono::steady_clock::now() - sent).count();
    return Stepped::kUnderWay;
  }
  finish(slots, results);
  land();
  return Stepped::kDone;
}

// Whether each of the envs can be stepped by this handle, and is named once.
bool Pool::fresh(const TokenRow* token, size_t rows) {
  ++looks_;
  for (size_t i = 0; i < rows; ++i) {
    const uint32_t env = token[i].env;
    if (token[i].pool != plan_.id || env >= seen_.size() || seen_[env] == looks_ ||
        token[i].count != plan_.counts[env] || plan_.in_flight[env] || plan_.needs_reset[env]) {
      return false;
    }
    seen_[env] = looks_;
  }
  return true;
}

// Sends the envs to their workers. Their count is up from here on: nobody else has a handle to them.
void Pool::start(const std::vector<int64_t>& slots) {
  const int64_t* const stops_end = plan_.stops + plan_.parent->board.num_workers;
  for (size_t first = 0; first < slots.size();) {
    const int64_t* const stop = std::upper_bound(plan_.stops, stops_end, slots[first]);
    const int64_t start = stop == plan_.stops ? 0 : stop[-1];
    size_t last = first;
    while (last < slots.size() && start <= slots[last] && slots[last] < *stop) {
      ++plan_.counts[slots[last++]];
    }
    send(*plan_.parent, static_cast<uint32_t>(stop - plan_.stops), kStep, &slots[first],
         static_cast<uint32_t>(last - first));
    first = last;
  }
  state.mover = plan_.mover;
}

// Reads the envs' rows, which nobody else touches until the handle of this step is used.
void Pool::finish(const std::vector<int64_t>& slots, const std::vector<Array>& results) {
  auto* const token = static_cast<TokenRow*>(results[0].data);
  for (size_t i = 0; i < slots.size(); ++i) {
    const int64_t slot = slots[i];
    if (plan_.terminated != nullptr) {
      plan_.needs_reset[slot] = plan_.terminated[slot] | plan_.truncated[slot];
    }
    token[i] = {plan_.id, static_cast<uint32_t>(slot), plan_.counts[slot]};
  }
  for (size_t i = 0; i < results_.size(); ++i) results_[i].read(slots, results[i + 1].data);
  state.served.fetch_add(1, std::memory_order_relaxed);
}

bool Pool::enter(bool alone, int64_t timeout_ns) {
  std::unique_lock lock(lock_);
  const auto vacant = [&] { return inside_ == 0 && (!alone || in_flight_.empty()); };
  if (!changed_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), vacant)) return false;
  inside_ = this_thread();
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
  in_flight_.push_back(this_thread());
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
