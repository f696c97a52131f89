#include "interrupts.h"

#include <signal.h>
#include <time.h>

#include <atomic>
#include <mutex>

namespace jaxvec {
namespace {

// What schedulers and users end, pause or prod a program with, besides Ctrl-C.
constexpr int kOthers[] = {SIGHUP,  SIGQUIT, SIGUSR1, SIGUSR2,  SIGALRM,
                           SIGTERM, SIGCONT, SIGXCPU, SIGWINCH, SIGIO};
constexpr int64_t kSeldom = 20'000'000;  // ns between looks at their handlers: ten system calls

std::atomic<uint32_t> count{0};      // of Ctrl-C
std::atomic<uint32_t> all_count{0};  // of these and the others
struct sigaction theirs[NSIG];       // by signal; written before ours is installed

void on_signal(int signal, siginfo_t* info, void* context) {
  if (signal == SIGINT) count.fetch_add(1, std::memory_order_relaxed);
  all_count.fetch_add(1, std::memory_order_relaxed);
  const struct sigaction& next = theirs[signal];
  if (next.sa_flags & SA_SIGINFO) {
    next.sa_sigaction(signal, info, context);
  } else {
    next.sa_handler(signal);
  }
}

// Has a signal counted, if somebody handles it.
void watch(int signal) {
  struct sigaction current;
  if (sigaction(signal, nullptr, &current) != 0) return;
  const bool ours = (current.sa_flags & SA_SIGINFO) && current.sa_sigaction == on_signal;
  if (ours || current.sa_handler == SIG_DFL || current.sa_handler == SIG_IGN) return;
  theirs[signal] = current;
  struct sigaction mine = current;  // their mask, and above all no SA_RESTART that they don't have
  mine.sa_flags |= SA_SIGINFO;
  mine.sa_sigaction = on_signal;
  sigaction(signal, &mine, nullptr);
}

bool looks_at_others() {
  static std::atomic<int64_t> next{0};
  timespec time;
  clock_gettime(CLOCK_MONOTONIC_COARSE, &time);  // a few ns
  const int64_t now = time.tv_sec * 1'000'000'000LL + time.tv_nsec;
  if (now < next.load(std::memory_order_relaxed)) return false;
  next.store(now + kSeldom, std::memory_order_relaxed);
  return true;
}

}  // namespace

void watch_signals() {
  static std::mutex watching;
  const std::unique_lock lock(watching, std::try_to_lock);
  if (!lock.owns_lock()) return;  // another thread does it
  watch(SIGINT);
  if (!looks_at_others()) return;
  for (const int signal : kOthers) watch(signal);
}

uint32_t interrupts() { return count.load(std::memory_order_relaxed); }

uint32_t signals() { return all_count.load(std::memory_order_relaxed); }

}  // namespace jaxvec
