// The recorder of what compiled programs do in a pool. Twin of _tracing.py.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include "dispatch.h"

namespace jaxvec {

// Parts of a call. Calls themselves are recorded with their `Verb`. native_engine.py has the names.
enum Part : uint32_t { kWriting = 32, kDispatching, kWaiting, kCopying };

struct Span {                // native_engine.py reads these fields
  int64_t start_ns, end_ns;  // monotonic clock
  uint32_t thread;           // the kernel's thread id
  uint32_t what;             // a `Verb` or a `Part`
};

// A ring buffer of the latest spans of all threads. It has memory only while it is on.
class Trace {
 public:
  bool on() const { return on_.load(std::memory_order_relaxed); }

  void start(uint32_t capacity) {
    const std::lock_guard lock(lock_);
    spans_.assign(std::max(capacity, 1u), Span{});
    count_ = 0;
    on_.store(true, std::memory_order_relaxed);
  }

  void add(uint32_t what, int64_t start_ns) {
    thread_local const auto thread = static_cast<uint32_t>(syscall(SYS_gettid));
    const int64_t end_ns = now_ns();
    const std::lock_guard lock(lock_);
    if (!on()) return;
    spans_[count_++ % spans_.size()] = {start_ns, end_ns, thread, what};
  }

  // Ends the trace. Returns the ring, and stores the number of spans that were added to it.
  std::vector<Span> stop(uint64_t* count) {
    const std::lock_guard lock(lock_);
    on_.store(false, std::memory_order_relaxed);
    *count = count_;
    return std::exchange(spans_, {});
  }

 private:
  std::atomic<bool> on_{false};  // written under the lock; read without it, as a hint that `add` checks again
  std::mutex lock_;              // guards the fields below
  std::vector<Span> spans_;
  uint64_t count_ = 0;
};

// Records its scope, if the trace is on at its start.
class Recording {
 public:
  Recording(Trace& trace, uint32_t what) : trace_(trace), what_(what), start_(trace.on() ? now_ns() : 0) {}
  ~Recording() {
    if (start_ != 0) trace_.add(what_, start_);
  }
  Recording(const Recording&) = delete;

 private:
  Trace& trace_;
  const uint32_t what_;
  const int64_t start_;  // 0 if the trace was off
};

}  // namespace jaxvec
