#include "handoff.h"

#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <vector>

namespace jaxvec {
namespace {

// A dead worker can't ring the alarm; its socket tells. So the parent looks there this often.
constexpr int64_t kLookAroundNs = 50'000'000;

// Workers wait for each other and for the parent's turn; the parent waits for whole steps, and should
// leave its core to a worker soon.
constexpr int64_t kParentSpinNs = 50'000;

int64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1'000'000'000 + time.tv_nsec;
}

// Sleeps until `word` is woken, unless it is not `seen` any more. Returns 0 or an errno.
int futex_wait(Line& line, uint32_t seen, const timespec* timeout) {
  const long result =
      syscall(SYS_futex, reinterpret_cast<uint32_t*>(&line.word), FUTEX_WAIT, seen, timeout, nullptr, 0);
  return result == 0 ? 0 : errno;
}

void futex_wake(Line& line) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&line.word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Looks again for a while before a sleep, because a core that idles is slow to wake: by tens of
// microseconds in a virtual machine. It yields each time, so whoever has work for this core goes first.
class Spin {
 public:
  explicit Spin(int64_t ns) : until_(ns == 0 ? 0 : now_ns() + ns) {}

  bool again() {
    if (until_ == 0) return false;
    sched_yield();
    if (now_ns() < until_) return true;
    until_ = 0;
    return false;
  }

 private:
  int64_t until_;  // 0 when it is over
};

// Counters wrap; a difference does not, while less than half of them lies between.
bool reached(uint32_t counter, uint32_t target) { return static_cast<int32_t>(counter - target) >= 0; }

bool any_readable(const Parent& parent) {
  std::vector<pollfd> sockets(parent.board.num_workers);
  for (uint32_t worker = 0; worker < parent.board.num_workers; ++worker) {
    sockets[worker] = {parent.sockets[worker], POLLIN, 0};
  }
  return poll(sockets.data(), sockets.size(), 0) > 0;
}

void wake_worker(Board& board, uint32_t worker) {
  // The worker says that it sleeps, then looks at its bell; we ring the bell, then look whether it
  // sleeps. In one total order of these four, at least one side sees the other.
  board.bell[worker].word.fetch_add(1, std::memory_order_seq_cst);
  if (board.asleep[worker].word.load(std::memory_order_seq_cst) != 0) {
    futex_wake(board.bell[worker]);
  }
}

}  // namespace

void send(Parent& parent, uint32_t worker, uint32_t operation, const int64_t* slots, uint32_t count) {
  Board& board = parent.board;
  uint32_t* inbox = board.inbox + static_cast<size_t>(worker) * board.capacity;
  Line& put = board.inbox_count[worker];
  uint32_t place = put.word.load(std::memory_order_relaxed);  // ours alone to write
  for (uint32_t i = 0; i < count; ++i, ++place) {
    std::atomic<uint32_t>& asked = board.asked[slots[i]];  // ours alone to write
    asked.store(asked.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    inbox[place % board.capacity] = static_cast<uint32_t>(slots[i]) * 2 + operation;
  }
  put.word.store(place, std::memory_order_release);  // publishes entries, actions and seeds
  wake_worker(board, worker);
}

void knock(Parent& parent, uint32_t worker) {
  parent.board.knocks[worker].word.fetch_add(1, std::memory_order_release);
  wake_worker(parent.board, worker);
}

Outcome receive(Parent& parent, uint32_t count, int64_t* slots, int64_t timeout_ns) {
  Board& board = parent.board;
  const uint32_t target = parent.taken + count;
  const int64_t deadline = now_ns() + timeout_ns;
  // As with a worker's bell: we store the target, then read `finished`; workers add to `finished`,
  // then read the target. So either we see that it is reached, or the last worker sees our target.
  board.target->word.store(target, std::memory_order_seq_cst);
  Spin spin(std::min<int64_t>(board.spin_ns, kParentSpinNs));
  for (;;) {
    const uint32_t finished = board.finished->word.load(std::memory_order_seq_cst);
    if (reached(finished, target)) break;
    const uint32_t alarms = board.alarm->word.load(std::memory_order_acquire);
    if (alarms != parent.alarms) {
      parent.alarms = alarms;
      return kLookAround;
    }
    if (spin.again()) continue;
    const int64_t left = deadline - now_ns();
    if (left <= 0) return any_readable(parent) ? kLookAround : kTimeout;
    const int64_t nap = std::min(left, kLookAroundNs);
    const timespec timeout = {nap / 1'000'000'000, nap % 1'000'000'000};
    const int error = futex_wait(*board.finished, finished, &timeout);
    if (error == EINTR) return kInterrupted;
    if (error == ETIMEDOUT && any_readable(parent)) return kLookAround;
  }
  // `finished` counts entries after they were written, but in any order of their places: one that is
  // ours may be one that its worker is about to write, or never will, if it was killed just there.
  for (uint32_t i = 0; i < count; ++i) {
    const std::atomic<uint32_t>& entry = board.outbox[(parent.taken + i) % board.outbox_capacity];
    if (entry.load(std::memory_order_acquire) != 0) continue;
    const int64_t give_up = now_ns() + kLookAroundNs;
    while (entry.load(std::memory_order_acquire) == 0) {
      if (now_ns() > give_up) return any_readable(parent) ? kLookAround : kTimeout;
      sched_yield();
    }
  }
  for (uint32_t i = 0; i < count; ++i) {
    std::atomic<uint32_t>& entry = board.outbox[(parent.taken + i) % board.outbox_capacity];
    if (slots != nullptr) slots[i] = static_cast<int64_t>(entry.load(std::memory_order_relaxed)) - 1;
    entry.store(0, std::memory_order_relaxed);  // its next writer is sent work first
  }
  parent.taken = target;
  return kDone;
}

void take(Worker& worker, uint32_t* operation, int64_t* slots, uint32_t* count) {
  Board& board = worker.board;
  const uint32_t* inbox = board.inbox + static_cast<size_t>(worker.index) * board.capacity;
  Line& bell = board.bell[worker.index];
  Spin spin(board.spin_ns);
  for (;;) {
    const uint32_t rung = bell.word.load(std::memory_order_seq_cst);
    const uint32_t put = board.inbox_count[worker.index].word.load(std::memory_order_acquire);
    if (put != worker.taken) {
      *operation = inbox[worker.taken % board.capacity] % 2;
      *count = 0;
      while (worker.taken != put && inbox[worker.taken % board.capacity] % 2 == *operation) {
        slots[(*count)++] = inbox[worker.taken++ % board.capacity] / 2;
      }
      return;
    }
    if (board.knocks[worker.index].word.load(std::memory_order_acquire) != worker.knocks) {
      ++worker.knocks;
      *count = 0;
      return;
    }
    if (spin.again()) continue;
    board.asleep[worker.index].word.store(1, std::memory_order_seq_cst);
    if (bell.word.load(std::memory_order_seq_cst) == rung) futex_wait(bell, rung, nullptr);
    board.asleep[worker.index].word.store(0, std::memory_order_relaxed);
  }
}

void post(Worker& worker, const int64_t* slots, uint32_t count) {
  Board& board = worker.board;
  const uint32_t place = board.outbox_count->word.fetch_add(count, std::memory_order_relaxed);
  for (uint32_t i = 0; i < count; ++i) {
    const int64_t slot = slots[i];
    board.done[slot].store(board.asked[slot].load(std::memory_order_relaxed), std::memory_order_relaxed);
    // Publishes the slot's row with its id.
    board.outbox[(place + i) % board.outbox_capacity].store(static_cast<uint32_t>(slot) + 1,
                                                            std::memory_order_release);
  }
  const uint32_t finished = board.finished->word.fetch_add(count, std::memory_order_seq_cst) + count;
  if (reached(finished, board.target->word.load(std::memory_order_seq_cst))) {
    futex_wake(*board.finished);
  }
}

void ring(Board& board) {
  board.alarm->word.fetch_add(1, std::memory_order_seq_cst);
  // Sleepers compare `finished`, which did not change; this ends their sleep all the same. One that
  // is just about to sleep looks at the alarm after its nap.
  futex_wake(*board.finished);
}

}  // namespace jaxvec
