#include "dispatch.h"

#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <system_error>
#include <thread>
#include <vector>

namespace jaxvec {

int64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1'000'000'000 + time.tv_nsec;
}

namespace {

// The parent waits for whole steps, and should soon leave its core to a worker.
constexpr int64_t kMaxParentSpinNs = 50'000;
constexpr useconds_t kSendingNapUs = 100;

// A wake takes the parent about 3 us. If it has to wake many workers, it wakes the first one of each block,
// and that one wakes the rest.
constexpr uint32_t kManyWorkers = 16;
constexpr size_t kBlock = 8;

constexpr uint64_t kSliceNs = 100'000;  // the kernel's minimum

// The first version of the kernel's `struct sched_attr`; glibc declares it since 2.41.
struct SchedAttr {
  uint32_t size = sizeof(SchedAttr);
  uint32_t policy = 0;
  uint64_t flags = 0;
  int32_t nice = 0;
  uint32_t priority = 0;
  uint64_t runtime = 0, deadline = 0, period = 0;
};

// Requests short slices once per thread, before its first sleep. Returns whether they are granted.
bool ask_for_short_slices() {
  thread_local const bool granted = request_short_slices() == nullptr;
  return granted;
}

// Sleeps until `line` is woken, unless its word differs from `seen`. Returns 0 or an errno.
int futex_wait(Line& line, uint32_t seen, const timespec* timeout) {
  const long result =
      syscall(SYS_futex, reinterpret_cast<uint32_t*>(&line.word), FUTEX_WAIT, seen, timeout, nullptr, 0);
  return result == 0 ? 0 : errno;
}

void futex_wake(Line& line) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&line.word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void bind_to(int core) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(core, &cores);
  sched_setaffinity(0, sizeof(cores), &cores);
}

// Polls for a while before a sleep, because an idle core takes tens of microseconds to wake in a virtual
// machine. Yielding in each turn lets a thread with work use this core first.
//
// Beside other programs there is no idle core, and a yield is costly: Linux 6.18 moves the thread behind all
// others that are runnable, each of which may run for milliseconds. So a thread that loses its core in a poll
// sleeps at once in the waits of the next `kPauseNs`.
class Spin {
 public:
  explicit Spin(int64_t ns) {
    if (ns == 0) return;
    last_ = now_ns();
    if (last_ >= paused_until_) until_ = last_ + ns;
  }

  bool again() {
    if (until_ == 0) return false;
    sched_yield();
    const int64_t now = now_ns();
    if (now - last_ > kLostCoreNs) paused_until_ = now + kPauseNs;
    if (now - last_ > kBusyCoreNs) busy_until_ = now + kBusyNs;
    if (now >= until_ || now < paused_until_) until_ = 0;
    last_ = now;
    return until_ != 0;
  }

  // Returns whether this thread has lately lost its core in a poll.
  static bool lost_core() { return now_ns() < paused_until_; }

  // Returns until when other programs are expected to keep the core of this thread busy.
  static int64_t busy_until() { return busy_until_; }

 private:
  static constexpr int64_t kLostCoreNs = 500'000;    // longer than a worker's ordinary step
  static constexpr int64_t kBusyCoreNs = 2'000'000;  // longer than a turn of a thread of this program
  static constexpr int64_t kPauseNs = 200'000'000, kBusyNs = 2'000'000'000;
  static thread_local int64_t paused_until_, busy_until_;

  int64_t until_ = 0;  // 0 when it is over
  int64_t last_ = 0;   // time of the latest turn
};

thread_local int64_t Spin::paused_until_ = 0, Spin::busy_until_ = 0;

// Makes the kernel choose again which thread runs on the worker's core, more often while that core is busy.
//
// A worker that has used up its share of a busy core waits until the other threads have used up their shares.
// The kernel looks for that moment only at its own ticks, every 4 ms at 250 Hz, and a step waits for its
// latest worker. Each time this thread goes to sleep, the kernel chooses anew. There is one per process, as
// there is one worker per process.
class Ticker {
 public:
  // Ticks on the core of the calling thread until `until_ns`.
  void tick_until(int64_t until_ns) {
    if (now_ns() >= until_ns) return;
    core_.store(sched_getcpu(), std::memory_order_relaxed);
    until_.store(until_ns, std::memory_order_seq_cst);
    // A process that an env forks inherits `runs_in_` without the thread, so it holds the process's id.
    const pid_t self = getpid();
    if (runs_in_.exchange(self, std::memory_order_seq_cst) == self) return;
    sigset_t all, before;  // signals have to interrupt the worker's sleep
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      std::thread([this, self] { run(self); }).detach();
    } catch (const std::system_error&) {  // too many threads: steps are correct without this one
      runs_in_.store(0, std::memory_order_seq_cst);
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

 private:
  void run(pid_t self) {
    pthread_setname_np(pthread_self(), "jaxvec ticker");
    request_short_slices();
    do {
      while (now_ns() < until_.load(std::memory_order_seq_cst)) {
        const int core = core_.load(std::memory_order_relaxed);
        if (core != sched_getcpu()) bind_to(core);
        const timespec period = {0, kPeriodNs};
        nanosleep(&period, nullptr);
      }
      // `tick_until` stores `until_`, then exchanges `runs_in_`; we store `runs_in_`, then load `until_`. So
      // either we see the new time, or the caller sees that it has to start a thread.
      runs_in_.store(0, std::memory_order_seq_cst);
    } while (now_ns() < until_.load(std::memory_order_seq_cst) &&
             runs_in_.exchange(self, std::memory_order_seq_cst) != self);
  }

  static constexpr long kPeriodNs = 300'000;
  std::atomic<int> core_{0};
  std::atomic<int64_t> until_{0};
  std::atomic<pid_t> runs_in_{0};
};

Ticker ticker;

bool any_readable(const Parent& parent) {
  std::vector<pollfd> sockets(parent.num_sockets);
  for (uint32_t i = 0; i < parent.num_sockets; ++i) sockets[i] = {parent.sockets[i], POLLIN, 0};
  return poll(sockets.data(), sockets.size(), 0) > 0;
}

bool notified(const Parent& parent) {
  return parent.board.parent_notices->word.load(std::memory_order_acquire) !=
         parent.seen_notices.load(std::memory_order_relaxed);
}

// Returns whether the control sockets need attention although the slots are completed. The sockets are polled
// at intervals, as a program with batches that are always ready would otherwise never notice a failed worker.
bool needs_attention(Parent& parent, int64_t now) {
  if (notified(parent)) return true;
  if (now - parent.looked_ns.load(std::memory_order_relaxed) < parent.board.look_around_ns) return false;
  parent.looked_ns.store(now, std::memory_order_relaxed);
  return any_readable(parent);
}

// Returns how long a wait polls before it sleeps.
int64_t spin_time(const Parent& parent) {
  const int64_t usual = std::min<int64_t>(parent.board.spin_ns, kMaxParentSpinNs);
  const int64_t expected = 2 * parent.mean_wait_ns.load(std::memory_order_relaxed);
  return usual > 0 && expected <= parent.longest_spin_ns ? std::max(usual, expected) : usual;
}

uint32_t count_completed(const Board& board, const int64_t* slots, uint32_t num_slots) {
  uint32_t completed = 0;
  for (uint32_t i = 0; i < num_slots; ++i) {
    // Acquire pairs with the release in `post`: if the marks are equal, the slot's row can be read.
    completed += board.completed[slots[i]].load(std::memory_order_acquire) ==
                 board.requested[slots[i]].load(std::memory_order_relaxed);
  }
  return completed;
}

struct Waiter {
  explicit Waiter(Parent& parent) : waiters(parent.waiters) { ++waiters; }
  ~Waiter() { --waiters; }

  std::atomic<uint32_t>& waiters;  // its operators are seq_cst
};

void ring(Board& board, uint32_t worker) {
  board.doorbell[worker].word.fetch_add(1, std::memory_order_seq_cst);
}

// Returns whether the worker may need a wake, and wakes it.
//
// The worker stores `asleep`, then loads its doorbell; we add to the doorbell, then load `asleep`. The four
// accesses are seq_cst, so in their total order at least one side sees the other's store.
bool wake_if_asleep(Board& board, uint32_t worker) {
  const bool asleep = board.asleep[worker].word.load(std::memory_order_seq_cst) != 0;
  if (asleep) futex_wake(board.doorbell[worker]);
  return asleep;
}

void wake_worker(Board& board, uint32_t worker) {
  ring(board, worker);
  wake_if_asleep(board, worker);
}

// Wakes the sleeping workers from `first` to `stop - 1`. Their doorbells have been rung, or it is no harm.
void wake_sleepers(Board& board, uint32_t first, uint32_t stop) {
  for (uint32_t worker = first; worker < stop; ++worker) wake_if_asleep(board, worker);
}

// Wakes neighbouring workers, most of which the first sleeping one wakes in place of this thread.
//
// That one finds in its `to_wake` how many. We ring the others' doorbells, then store `to_wake` and ring its
// own, then load its `asleep`; it stores `asleep` = 0, then takes `to_wake`. If we see it asleep, it takes
// `to_wake` later, and finds the others either asleep or aware of their doorbells. If we see it awake, it may
// have looked before our store. Then we take `to_wake` back, and wake the others.
void wake_block(Board& board, const std::vector<uint32_t>& block) {
  auto worker = block.begin();
  for (; worker != block.end() && board.asleep[*worker].word.load(std::memory_order_relaxed) == 0; ++worker) {
    wake_worker(board, *worker);
  }
  if (worker == block.end()) return;
  const uint32_t leader = *worker, last = block.back();
  while (++worker != block.end()) ring(board, *worker);
  std::atomic<uint32_t>& to_wake = board.doorbell[leader].extra;
  // It may not have taken the number of an earlier send yet.
  to_wake.store(std::max(to_wake.load(std::memory_order_relaxed), last - leader), std::memory_order_seq_cst);
  ring(board, leader);
  if (!wake_if_asleep(board, leader) && to_wake.exchange(0, std::memory_order_seq_cst) != 0)
    wake_sleepers(board, leader + 1, last + 1);
}

// Wakes the workers of `slots`.
//
// If all have work, one common bell may do for those that poll. A worker stores `asleep`, then loads both of
// its bells; we add to the common one, then load `asleep`. So a worker that we see awake sees the bell.
//
// A worker that is woken on this thread's core may take it over at once, until its step is done. So workers
// that slept on this core come last: otherwise the others would sleep on meanwhile.
void wake_owners(Parent& parent, const int64_t* slots, uint32_t count) {
  Board& board = parent.board;
  const bool all = count == board.num_slots;
  const bool rung = all && parent.rings_once;
  if (rung) board.common_bell->word.fetch_add(1, std::memory_order_seq_cst);
  std::vector<char> owns(all ? 0 : board.num_workers);
  const auto owner_of = [&](int64_t slot) {
    return std::upper_bound(parent.stops, parent.stops + board.num_workers, slot) - parent.stops;
  };
  for (uint32_t i = 0; i < count && !all; ++i) owns[owner_of(slots[i])] = 1;
  const auto here = static_cast<uint32_t>(sched_getcpu());
  const bool many = (all ? board.num_workers : std::count(owns.begin(), owns.end(), 1)) >= kManyWorkers;
  std::vector<uint32_t> block, last;
  for (uint32_t worker = 0; worker < board.num_workers; ++worker) {
    if (!all && !owns[worker]) continue;
    if (rung && board.asleep[worker].word.load(std::memory_order_seq_cst) == 0) continue;
    if (board.asleep[worker].extra.load(std::memory_order_relaxed) == here) {
      last.push_back(worker);
    } else if (!many) {
      wake_worker(board, worker);
    } else {
      block.push_back(worker);
      if (block.size() < kBlock) continue;
      wake_block(board, block);
      block.clear();
    }
  }
  wake_block(board, block);
  for (const uint32_t worker : last) wake_worker(board, worker);
}

// Stores the worker's pending slots in the order of their requests, up to the first with another operation.
// Returns their number.
uint32_t next_work(const Worker& worker, uint32_t* operation, int64_t* slots) {
  const Board& board = worker.board;
  const std::atomic<uint32_t>& sending = board.target->extra;
  int64_t* end;
  uint32_t before;
  do {
    Spin spin(kMaxParentSpinNs);
    while ((before = sending.load(std::memory_order_acquire)) % 2 != 0) {
      if (!spin.again()) usleep(kSendingNapUs);  // the parent may be stopped
    }
    end = slots;
    for (int64_t slot = worker.first; slot < worker.stop; ++slot) {
      const int64_t completed = board.completed[slot].load(std::memory_order_relaxed);  // only we write it
      if (board.requested[slot].load(std::memory_order_acquire) != completed) *end++ = slot;
    }
  } while (sending.load(std::memory_order_acquire) != before);
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

// The stores of requests in between are releases, so a worker that sees one of them also sees `sending`
// change.
void begin_or_end_send(Board& board) {
  std::atomic<uint32_t>& sending = board.target->extra;  // one thread at a time sends
  sending.store(sending.load(std::memory_order_relaxed) + 1, std::memory_order_release);
}

}  // namespace

const char* request_short_slices() {
  const char* setting = getenv("JAXVEC_SHORT_SLICES");
  if (setting != nullptr && *setting == '0') return "JAXVEC_SHORT_SLICES is 0";
  SchedAttr attr;
  if (syscall(SYS_sched_getattr, 0, &attr, sizeof(attr), 0) != 0)
    return "sched_getattr is not permitted here";
  // Respect another scheduling policy that the program has chosen.
  if (attr.policy != SCHED_OTHER) return "this process has another scheduling policy than SCHED_OTHER";
  if (attr.nice >= 0) attr.flags |= 1;  // SCHED_FLAG_RESET_ON_FORK
  attr.runtime = kSliceNs;
  if (syscall(SYS_sched_setattr, 0, &attr, 0) != 0) return "sched_setattr is not permitted here";
  // Kernels without this feature ignore the field, and report 0.
  const bool granted = syscall(SYS_sched_getattr, 0, &attr, sizeof(attr), 0) == 0 && attr.runtime == kSliceNs;
  return granted ? nullptr : "this kernel has none; Linux 6.12 and newer have";
}

void send(Parent& parent, uint32_t operation, const int64_t* slots, uint32_t count) {
  begin_or_end_send(parent.board);
  for (uint32_t i = 0; i < count; ++i) {
    const int64_t request = kEnd * ++parent.request_number + operation;
    parent.board.requested[slots[i]].store(request,
                                           std::memory_order_release);  // publishes actions and seeds
  }
  begin_or_end_send(parent.board);
  wake_owners(parent, slots, count);
}

void notify_worker(Board& board, uint32_t worker) {
  board.worker_notices[worker].word.fetch_add(1, std::memory_order_release);
  wake_worker(board, worker);
}

Outcome wait(Parent& parent, const int64_t* slots, uint32_t num_slots, uint32_t count, int64_t deadline) {
  ask_for_short_slices();
  Board& board = parent.board;
  const Waiter waiter(parent);
  const int64_t start = now_ns();
  Spin spin(spin_time(parent));
  for (;;) {
    // Workers store `completed`, then add to `finished`. So a slot that is not completed below is added to
    // `finished` after this load.
    const uint32_t finished = board.finished->word.load(std::memory_order_seq_cst);
    const uint32_t completed = count_completed(board, slots, num_slots);
    if (completed >= count) {
      const int64_t now = now_ns();
      const int64_t mean = parent.mean_wait_ns.load(std::memory_order_relaxed);
      // An estimate: of several threads that do this at once, one may count.
      parent.mean_wait_ns.store(mean + (now - start - mean) / 4, std::memory_order_relaxed);
      return needs_attention(parent, now) ? kLookAround : kDone;
    }
    // As with a worker's doorbell: we store `target` and add to `sleepers`, then load `finished`; workers add
    // to `finished`, then load both. Either we see the new value, or the worker sees that it has to wake us.
    // Slots of other threads count, too, so a wake may come too early, but never too late. A single waiter
    // needs a wake only when as many slots are finished as it lacks; several waiters need one after each
    // slot.
    const uint32_t waiters = parent.waiters.load(std::memory_order_seq_cst);
    board.target->word.store(finished + (waiters == 1 ? count - completed : 1), std::memory_order_seq_cst);
    if (parent.waiters.load(std::memory_order_seq_cst) != waiters)
      continue;  // a new one needs an earlier target
    do {
      if (notified(parent)) return kLookAround;
    } while (board.finished->word.load(std::memory_order_seq_cst) == finished && spin.again());
    if (board.finished->word.load(std::memory_order_seq_cst) != finished) continue;
    const int64_t left = deadline - now_ns();
    if (left <= 0) return any_readable(parent) ? kLookAround : kTimeout;
    const int64_t nap = std::min<int64_t>(left, board.look_around_ns);
    const timespec timeout = {nap / 1'000'000'000, nap % 1'000'000'000};
    board.sleepers->word.fetch_add(1, std::memory_order_seq_cst);
    const bool unfinished = board.finished->word.load(std::memory_order_seq_cst) == finished;
    const int error = unfinished ? futex_wait(*board.finished, finished, &timeout) : 0;
    board.sleepers->word.fetch_sub(1, std::memory_order_relaxed);
    if (error == EINTR) return kInterrupted;
    if (error == ETIMEDOUT) {
      // A worker may have died, or be stopped, before it woke the others of its block.
      if (board.num_workers >= kManyWorkers) wake_sleepers(board, 0, board.num_workers);
      if (any_readable(parent)) return kLookAround;
    }
  }
}

void mark_notices_seen(Parent& parent) {
  parent.seen_notices.store(parent.board.parent_notices->word.load(std::memory_order_acquire),
                            std::memory_order_relaxed);
}

void take(Worker& worker, uint32_t* operation, int64_t* slots, uint32_t* count) {
  Board& board = worker.board;
  Line& doorbell = board.doorbell[worker.index];
  Spin spin(board.spin_ns);
  for (;;) {
    const uint32_t seen = doorbell.word.load(std::memory_order_seq_cst);
    const uint32_t seen_by_all = board.common_bell->word.load(std::memory_order_seq_cst);
    const auto rung = [&] {
      return doorbell.word.load(std::memory_order_seq_cst) != seen ||
             board.common_bell->word.load(std::memory_order_seq_cst) != seen_by_all;
    };
    *count = next_work(worker, operation, slots);
    if (*count > 0) return;
    if (board.worker_notices[worker.index].word.load(std::memory_order_acquire) != worker.seen_notices) {
      ++worker.seen_notices;
      return;
    }
    while (!rung() && spin.again()) {
    }
    if (ask_for_short_slices()) ticker.tick_until(Spin::busy_until());
    cpu_set_t cores;  // it is bound only in its sleep, since threads and processes of envs would inherit that
    const bool stays =
        worker.keeps_core && !Spin::lost_core() && sched_getaffinity(0, sizeof(cores), &cores) == 0;
    if (stays) bind_to(sched_getcpu());
    board.asleep[worker.index].extra.store(static_cast<uint32_t>(sched_getcpu()), std::memory_order_relaxed);
    board.asleep[worker.index].word.store(1, std::memory_order_seq_cst);
    const timespec nap = {board.look_around_ns / 1'000'000'000, board.look_around_ns % 1'000'000'000};
    const int error = rung() ? 0 : futex_wait(doorbell, seen, &nap);
    board.asleep[worker.index].word.store(0, std::memory_order_seq_cst);
    if (stays) sched_setaffinity(0, sizeof(cores), &cores);
    const uint32_t to_wake = doorbell.extra.exchange(0, std::memory_order_seq_cst);
    wake_sleepers(board, worker.index + 1, worker.index + 1 + to_wake);
    if (error == ETIMEDOUT || error == EINTR) {
      *operation = kEnd;
      return;
    }
  }
}

void post(Worker& worker, const int64_t* slots, uint32_t count) {
  Board& board = worker.board;
  const int64_t now = now_ns();
  for (uint32_t i = 0; i < count; ++i) {
    const int64_t slot = slots[i];
    board.completed_at[slot].store(now, std::memory_order_relaxed);
    // Release publishes the slot's row.
    board.completed[slot].store(board.requested[slot].load(std::memory_order_relaxed),
                                std::memory_order_release);
  }
  const uint32_t finished = board.finished->word.fetch_add(count, std::memory_order_seq_cst) + count;
  // The counters wrap around, but differ by less than 2**31.
  const auto beyond = static_cast<int32_t>(finished - board.target->word.load(std::memory_order_seq_cst));
  if (beyond >= 0 && board.sleepers->word.load(std::memory_order_seq_cst) != 0) futex_wake(*board.finished);
}

void notify_parent(Board& board) {
  board.parent_notices->word.fetch_add(1, std::memory_order_seq_cst);
  // This ends all sleeps although `finished` is unchanged. A thread that is about to sleep misses the wake,
  // and reads the notices after its sleep of at most `look_around_ns`.
  futex_wake(*board.finished);
}

}  // namespace jaxvec
