#include "interrupts.h"

#include <signal.h>

#include <atomic>
#include <mutex>

namespace jaxvec {
namespace {

std::atomic<uint32_t> count{0};
struct sigaction theirs;  // written before ours is installed

void on_interrupt(int signal, siginfo_t* info, void* context) {
  count.fetch_add(1, std::memory_order_relaxed);
  if (theirs.sa_flags & SA_SIGINFO) {
    theirs.sa_sigaction(signal, info, context);
  } else {
    theirs.sa_handler(signal);
  }
}

}  // namespace

void watch_interrupts() {
  static std::mutex watching;
  const std::unique_lock lock(watching, std::try_to_lock);
  if (!lock.owns_lock()) return;  // another thread does it
  struct sigaction current;
  if (sigaction(SIGINT, nullptr, &current) != 0) return;
  const bool ours = (current.sa_flags & SA_SIGINFO) && current.sa_sigaction == on_interrupt;
  if (ours || current.sa_handler == SIG_DFL || current.sa_handler == SIG_IGN) return;
  theirs = current;
  struct sigaction mine = current;  // their mask, and above all no SA_RESTART that they don't have
  mine.sa_flags |= SA_SIGINFO;
  mine.sa_sigaction = on_interrupt;
  sigaction(SIGINT, &mine, nullptr);
}

uint32_t interrupts() { return count.load(std::memory_order_relaxed); }

}  // namespace jaxvec
