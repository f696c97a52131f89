// What a pool's compiled programs did when, while somebody asks for it. Twin of _recorder.py.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "handoff.h"

namespace jaxvec {

// What is recorded besides the calls themselves, which go by their `Verb`; native_engine.py has the names.
enum Part : uint32_t { kWriting = 32, kHandingOver, kWaiting, kCopying };

struct Span {
  int64_t began, ended;  // in ns of the monotonic clock
  uint32_t thread;       // the system's number
  uint32_t what;         // a `Verb`, or a `Part`
};
static_assert(sizeof(Span) == 24);

// The latest spans of all threads. It has memory only while it is on.
class Trace {
 public:
  bool on() const { return on_.load(std::memory_order_relaxed); }

  void start(uint32_t capacity) {
    const std::lock_guard lock(lock_);
    spans_.assign(std::max(capacity, 1u), Span{});
    count_ = 0;
    on_.store(true, std::memory_order_relaxed);
  }

  void add(uint32_t what, int64_t began) {
    thread_local const auto thread = static_cast<uint32_t>(syscall(SYS_gettid));
    const int64_t ended = now_ns();
    const std::lock_guard lock(lock_);
    if (!on()) return;
    spans_[count_++ % spans_.size()] = {began, ended, thread, what};
  }

  // Ends it. Fills in the spans that are left, at most as many as it was started for, in the order in which
  // they ended, and returns how many there ever were.
  uint64_t stop(Span* spans) {
    const std::lock_guard lock(lock_);
    on_.store(false, std::memory_order_relaxed);
    const uint64_t size = spans_.size();
    for (uint64_t i = count_ > size ? count_ - size : 0; i < count_; ++i) *spans++ = spans_[i % size];
    spans_ = {};
    return count_;
  }

 private:
  std::atomic<bool> on_{false};
  std::mutex lock_;  // of what follows
  std::vector<Span> spans_;
  uint64_t count_ = 0;
};

// Records what its block does, if that is asked for when it begins.
class Recording {
 public:
  Recording(Trace& trace, uint32_t what) : trace_(trace), what_(what), began_(trace.on() ? now_ns() : 0) {}
  ~Recording() {
    if (began_ != 0) trace_.add(what_, began_);
  }
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

 private:
  Trace& trace_;
  const uint32_t what_;
  const int64_t began_;
};

}  // namespace jaxvec
