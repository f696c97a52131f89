// A server of slow envs for benchmarks/servers.py: `delay_server SECONDS` prints its port on 127.0.0.1.
//
// It answers each line with a constant reply, after SECONDS, or at once if the line requests a reset.
#include <arpa/inet.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <utility>

namespace {

constexpr char kReply[] = "[[0.0123456, 0.1234567, -0.0345678, 0.0045678], 1.0, false, false]\n";

int64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * int64_t{1'000'000'000} + time.tv_nsec;
}

// A client has one request at a time, so the reply fits into the socket's buffer.
void reply(int connection) { (void)!write(connection, kReply, sizeof(kReply) - 1); }

void watch(int poller, int descriptor) {
  epoll_event event = {};
  event.events = EPOLLIN;
  event.data.fd = descriptor;
  epoll_ctl(poller, EPOLL_CTL_ADD, descriptor, &event);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const int64_t delay = static_cast<int64_t>(atof(argv[1]) * 1e9);
  const int listener = socket(AF_INET, SOCK_STREAM, 0), timer = timerfd_create(CLOCK_MONOTONIC, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  if (bind(listener, reinterpret_cast<sockaddr*>(&address), size) != 0 || listen(listener, 1024) != 0 ||
      getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    perror("delay_server");
    return 1;
  }
  printf("%d\n", ntohs(address.sin_port));
  fflush(stdout);
  const int poller = epoll_create1(0);
  watch(poller, listener);
  watch(poller, timer);
  std::deque<std::pair<int64_t, int>> pending;  // times of replies and connections, in order
  const auto set_timer = [&] {
    itimerspec time = {};
    if (!pending.empty()) {
      time.it_value = {pending.front().first / 1'000'000'000, pending.front().first % 1'000'000'000};
    }
    timerfd_settime(timer, TFD_TIMER_ABSTIME, &time, nullptr);
  };
  for (;;) {
    epoll_event events[64];
    const int count = epoll_wait(poller, events, 64, -1);
    for (int i = 0; i < count; ++i) {
      const int descriptor = events[i].data.fd;
      if (descriptor == listener) {
        watch(poller, accept(listener, nullptr, nullptr));
      } else if (descriptor == timer) {
        uint64_t expirations;
        (void)!read(timer, &expirations, sizeof(expirations));
        for (; !pending.empty() && pending.front().first <= now_ns(); pending.pop_front()) {
          reply(pending.front().second);
        }
        set_timer();
      } else {
        char line[4096];
        const ssize_t length = read(descriptor, line, sizeof(line) - 1);
        if (length <= 0) {
          close(descriptor);
          continue;
        }
        line[length] = '\0';
        if (strstr(line, "reset") != nullptr) {
          reply(descriptor);
          continue;
        }
        pending.emplace_back(now_ns() + delay, descriptor);
        if (pending.size() == 1) set_timer();
      }
    }
  }
}
