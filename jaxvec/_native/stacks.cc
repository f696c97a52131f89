#include "stacks.h"

#include <errno.h>
#include <execinfo.h>
#include <signal.h>
#include <unistd.h>

namespace jaxvec {
namespace {

constexpr int kMaxFrames = 100;
constexpr int kOwnFrames = 2;  // of `on_dump`, and of the code with which the kernel calls it
constexpr char kTitle[] = "\nNative stack of the current thread (most recent call first):\n";

// Written before the handler is installed.
struct sigaction previous;
int memory = -1;

// Comes last, as it waits while another thread loads a library: then the reader has at least the Python
// stacks.
void on_dump(int signal, siginfo_t*, void*) {
  const int error = errno;
  previous.sa_handler(signal);
  void* frames[kMaxFrames];
  const int count = backtrace(frames, kMaxFrames);
  if (count > kOwnFrames && write(memory, kTitle, sizeof(kTitle) - 1) > 0) {
    backtrace_symbols_fd(frames + kOwnFrames, count - kOwnFrames, memory);
  }
  [[maybe_unused]] const auto written = write(memory, "", 1);
  errno = error;
}

}  // namespace

bool add_native_stack(int signal, int descriptor) {
  void* frame;
  backtrace(&frame, 1);  // the first call loads a library and allocates, which a handler must not do
  if (sigaction(signal, nullptr, &previous) != 0 || (previous.sa_flags & SA_SIGINFO) != 0 ||
      previous.sa_handler == SIG_DFL || previous.sa_handler == SIG_IGN) {
    return false;
  }
  memory = descriptor;
  struct sigaction action = previous;
  action.sa_flags |= SA_SIGINFO;
  action.sa_sigaction = on_dump;
  return sigaction(signal, &action, nullptr) == 0;
}

}  // namespace jaxvec
