#include "interrupts.h"

#include <signal.h>

#include <atomic>
#include <mutex>

#include "dispatch.h"

namespace jaxvec {
namespace {

// Signals besides SIGINT with which schedulers and users end, pause or notify a program.
constexpr int kOthers[] = {SIGHUP,  SIGQUIT, SIGUSR1, SIGUSR2,  SIGALRM,
                           SIGTERM, SIGCONT, SIGXCPU, SIGWINCH, SIGIO};
constexpr int64_t kCheckIntervalNs = 20'000'000;  // between checks of their handlers, ten system calls

std::atomic<uint32_t> num_interrupts{0};
std::atomic<uint32_t> num_signals{0};  // SIGINT included
struct sigaction previous[NSIG];       // by signal; written under `watching`, before our handler is installed

// Async-signal-safe: only lock-free additions, and the handler that was there.
void on_signal(int signal, siginfo_t* info, void* context) {
  if (signal == SIGINT) num_interrupts.fetch_add(1, std::memory_order_relaxed);
  num_signals.fetch_add(1, std::memory_order_relaxed);
  const struct sigaction& next = previous[signal];
  if (next.sa_flags & SA_SIGINFO) {
    next.sa_sigaction(signal, info, context);
  } else {
    next.sa_handler(signal);
  }
}

// Installs our handler in front of another one, if there is one.
void watch(int signal) {
  struct sigaction current;
  if (sigaction(signal, nullptr, &current) != 0) return;
  const bool watched = (current.sa_flags & SA_SIGINFO) && current.sa_sigaction == on_signal;
  if (watched || current.sa_handler == SIG_DFL || current.sa_handler == SIG_IGN) return;
  previous[signal] = current;
  current.sa_flags |= SA_SIGINFO;  // the mask and SA_RESTART stay as the other handler needs them
  current.sa_sigaction = on_signal;
  sigaction(signal, &current, nullptr);
}

}  // namespace

void watch_signals() {
  static std::mutex watching;
  static int64_t next_check = 0;  // under `watching`
  const std::unique_lock lock(watching, std::try_to_lock);
  if (!lock.owns_lock()) return;  // another thread is doing this
  watch(SIGINT);
  const int64_t now = now_ns();
  if (now < next_check) return;
  next_check = now + kCheckIntervalNs;
  for (const int signal : kOthers) watch(signal);
}

uint32_t interrupts() { return num_interrupts.load(std::memory_order_relaxed); }

bool interrupted() {
  static std::atomic<uint32_t> last_seen{0};
  const uint32_t now = num_signals.load(std::memory_order_relaxed);
  // The exchange lets only one of several threads return true.
  return last_seen.load(std::memory_order_relaxed) != now && last_seen.exchange(now) != now;
}

}  // namespace jaxvec
