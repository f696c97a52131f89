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
#include <cstdlib>
#include <vector>

namespace jaxvec {

int64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1'000'000'000 + time.tv_nsec;
}

namespace {

// Workers wait for each other and for the parent's turn; the parent waits for whole steps, and should
// leave its core to a worker soon.
constexpr int64_t kParentSpinNs = 50'000;

constexpr uint64_t kSliceNs = 100'000;  // the shortest that the kernel grants

// The first version of the kernel's `struct sched_attr`, which glibc has had since 2.41 only.
struct SchedAttr {
  uint32_t size = sizeof(SchedAttr);
  uint32_t policy = 0;
  uint64_t flags = 0;
  int32_t nice = 0;
  uint32_t priority = 0;
  uint64_t runtime = 0, deadline = 0, period = 0;
};

// Asks the scheduler for short slices for this thread, once, before it sleeps for the first time.
//
// A thread that is woken while every core is busy waits until a running thread has used up its slice, about
// 3 ms. A step needs one such turn in each direction, so a busy machine would make it slow by that much.
// Since 6.12 Linux gives a thread with a shorter slice its turn earlier, and no more time in all. It needs no
// privilege. Older kernels ignore the field. Threads and processes that this thread starts get the default
// (SCHED_FLAG_RESET_ON_FORK): envs run programs of their own. That flag would also take a negative nice value
// from them, so such a thread passes its slices on.
void ask_for_short_slices() {
  thread_local bool asked = false;
  if (asked) return;
  asked = true;
  const char* setting = getenv("JAXVEC_SHORT_SLICES");
  if (setting != nullptr && *setting == '0') return;
  SchedAttr attr;
  // A thread that its program has put under another policy stays as it is.
  if (syscall(SYS_sched_getattr, 0, &attr, sizeof(attr), 0) != 0 || attr.policy != SCHED_OTHER) return;
  if (attr.nice >= 0) attr.flags |= 1;  // SCHED_FLAG_RESET_ON_FORK
  attr.runtime = kSliceNs;
  syscall(SYS_sched_setattr, 0, &attr, 0);
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
  std::vector<pollfd> sockets(parent.num_sockets);
  for (uint32_t i = 0; i < parent.num_sockets; ++i) sockets[i] = {parent.sockets[i], POLLIN, 0};
  return poll(sockets.data(), sockets.size(), 0) > 0;
}

bool notified(const Parent& parent) {
  return parent.board.parent_notices->word.load(std::memory_order_acquire) !=
         parent.seen_notices.load(std::memory_order_relaxed);
}

// Whether there is more to know than that the slots are completed: others may have failed. Who always
// finds a batch completed would never hear of them, so now and then it looks at the sockets, too.
bool anything_else(Parent& parent) {
  if (notified(parent)) return true;
  const int64_t now = now_ns();
  if (now - parent.looked_ns.load(std::memory_order_relaxed) < parent.board.look_around_ns) return false;
  parent.looked_ns.store(now, std::memory_order_relaxed);
  return any_readable(parent);
}

uint32_t count_completed(const Board& board, const int64_t* slots, uint32_t num_slots) {
  uint32_t completed = 0;
  for (uint32_t i = 0; i < num_slots; ++i) {
    // Where they are equal, the slot's row is ours to read.
    completed += board.completed[slots[i]].load(std::memory_order_acquire) ==
                 board.requested[slots[i]].load(std::memory_order_relaxed);
  }
  return completed;
}

class Waiter {
 public:
  explicit Waiter(Parent& parent) : parent_(parent) {
    parent_.waiters.fetch_add(1, std::memory_order_seq_cst);
  }
  ~Waiter() { parent_.waiters.fetch_sub(1, std::memory_order_seq_cst); }
  Waiter(const Waiter&) = delete;
  Waiter& operator=(const Waiter&) = delete;

 private:
  Parent& parent_;
};

void wake_worker(Board& board, uint32_t worker) {
  // The worker says that it sleeps, then looks at its doorbell; we ring the doorbell, then look whether it
  // sleeps. In one total order of these four, at least one side sees the other.
  board.doorbell[worker].word.fetch_add(1, std::memory_order_seq_cst);
  if (board.asleep[worker].word.load(std::memory_order_seq_cst) != 0) {
    futex_wake(board.doorbell[worker]);
  }
}

// Finds the slots that are a worker's now, in the order in which they were asked for, as far as they
// want the same operation as the first.
uint32_t next_work(const Worker& worker, uint32_t* operation, int64_t* slots) {
  const Board& board = worker.board;
  int64_t* end = slots;
  for (int64_t slot = worker.first; slot < worker.stop; ++slot) {
    const int64_t completed = board.completed[slot].load(std::memory_order_relaxed);  // ours alone to write
    if (board.requested[slot].load(std::memory_order_acquire) != completed) *end++ = slot;
  }
  if (end == slots) return 0;
  const auto requested = [&board](int64_t slot) {
    return board.requested[slot].load(std::memory_order_relaxed);
  };
  const auto earlier = [&requested](int64_t one, int64_t other) { return requested(one) < requested(other); };
  if (!std::is_sorted(slots, end, earlier)) std::sort(slots, end, earlier);
  *operation = static_cast<uint32_t>(requested(slots[0]) % kEnd);
  const auto differs = [&](int64_t slot) { return requested(slot) % kEnd != *operation; };
  return static_cast<uint32_t>(std::find_if(slots, end, differs) - slots);
}

}  // namespace

void send(Parent& parent, uint32_t worker, uint32_t operation, const int64_t* slots, uint32_t count) {
  for (uint32_t i = 0; i < count; ++i) {
    const int64_t request = kEnd * ++parent.request_number + operation;
    // Publishes actions and seeds.
    parent.board.requested[slots[i]].store(request, std::memory_order_release);
  }
  wake_worker(parent.board, worker);
}

void pass_on(Parent& parent, uint32_t worker, const int64_t* requests, const int64_t* slots, uint32_t count) {
  for (uint32_t i = 0; i < count; ++i) {
    parent.board.requested[slots[i]].store(requests[i], std::memory_order_release);
  }
  wake_worker(parent.board, worker);
}

void notify_worker(Parent& parent, uint32_t worker) {
  parent.board.worker_notices[worker].word.fetch_add(1, std::memory_order_release);
  wake_worker(parent.board, worker);
}

Outcome wait(Parent& parent, const int64_t* slots, uint32_t num_slots, uint32_t count, int64_t timeout_ns) {
  ask_for_short_slices();
  Board& board = parent.board;
  const int64_t deadline = now_ns() + timeout_ns;
  const Waiter waiter(parent);
  Spin spin(std::min<int64_t>(board.spin_ns, kParentSpinNs));
  for (;;) {
    // Workers set `completed`, then add to `finished`: what is not completed now is counted after this.
    const uint32_t finished = board.finished->word.load(std::memory_order_seq_cst);
    const uint32_t completed = count_completed(board, slots, num_slots);
    if (completed >= count) return anything_else(parent) ? kLookAround : kDone;
    // As with a worker's doorbell: we store the target and count as a sleeper, then read `finished`; workers
    // add to `finished`, then read both. So either we see that it has changed, or the worker sees that it
    // has to wake us. Other threads' slots count, too, so the target may come too early, but never too late:
    // who waits alone need not be woken before as many slots are finished as are missing, and others at each.
    const uint32_t waiters = parent.waiters.load(std::memory_order_seq_cst);
    board.target->word.store(finished + (waiters == 1 ? count - completed : 1), std::memory_order_seq_cst);
    if (parent.waiters.load(std::memory_order_seq_cst) != waiters) continue;  // one came, for whom it is late
    do {
      if (notified(parent)) return kLookAround;
    } while (board.finished->word.load(std::memory_order_seq_cst) == finished && spin.again());
    if (board.finished->word.load(std::memory_order_seq_cst) != finished) continue;
    const int64_t left = deadline - now_ns();
    if (left <= 0) return any_readable(parent) ? kLookAround : kTimeout;
    const int64_t nap = std::min<int64_t>(left, board.look_around_ns);
    const timespec timeout = {nap / 1'000'000'000, nap % 1'000'000'000};
    board.sleepers->word.fetch_add(1, std::memory_order_seq_cst);
    int error = 0;
    if (board.finished->word.load(std::memory_order_seq_cst) == finished)
      error = futex_wait(*board.finished, finished, &timeout);
    board.sleepers->word.fetch_sub(1, std::memory_order_relaxed);
    if (error == EINTR) return kInterrupted;
    if (error == ETIMEDOUT && any_readable(parent)) return kLookAround;
  }
}

void mark_notices_seen(Parent& parent) {
  parent.seen_notices.store(parent.board.parent_notices->word.load(std::memory_order_acquire),
                            std::memory_order_relaxed);
}

void take(Worker& worker, uint32_t* operation, int64_t* slots, uint32_t* count) {
  ask_for_short_slices();
  Board& board = worker.board;
  Line& doorbell = board.doorbell[worker.index];
  Spin spin(board.spin_ns);
  for (;;) {
    const uint32_t seen = doorbell.word.load(std::memory_order_seq_cst);
    *count = next_work(worker, operation, slots);
    if (*count > 0) return;
    if (board.worker_notices[worker.index].word.load(std::memory_order_acquire) != worker.seen_notices) {
      ++worker.seen_notices;
      return;
    }
    while (doorbell.word.load(std::memory_order_seq_cst) == seen && spin.again()) {
    }
    board.asleep[worker.index].word.store(1, std::memory_order_seq_cst);
    if (doorbell.word.load(std::memory_order_seq_cst) == seen) futex_wait(doorbell, seen, nullptr);
    board.asleep[worker.index].word.store(0, std::memory_order_relaxed);
  }
}

void post(Worker& worker, const int64_t* slots, uint32_t count) {
  Board& board = worker.board;
  const int64_t now = now_ns();
  for (uint32_t i = 0; i < count; ++i) {
    const int64_t slot = slots[i];
    board.completed_at[slot].store(now, std::memory_order_relaxed);
    // Publishes the slot's row.
    board.completed[slot].store(board.requested[slot].load(std::memory_order_relaxed),
                                std::memory_order_release);
  }
  const uint32_t finished = board.finished->word.fetch_add(count, std::memory_order_seq_cst) + count;
  if (reached(finished, board.target->word.load(std::memory_order_seq_cst)) &&
      board.sleepers->word.load(std::memory_order_seq_cst) != 0) {
    futex_wake(*board.finished);
  }
}

void notify_parent(Board& board) {
  board.parent_notices->word.fetch_add(1, std::memory_order_seq_cst);
  // Sleepers compare `finished`, which did not change; this ends their sleep all the same. One that
  // is just about to sleep looks at the notices after its nap.
  futex_wake(*board.finished);
}

}  // namespace jaxvec
