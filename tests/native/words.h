// The words of a hand-off in plain memory, for threads in place of processes.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "handoff.h"

namespace jaxvec {

struct Words {
  std::vector<std::atomic<uint32_t>> asked, done;
  std::vector<std::atomic<int64_t>> done_at;
  std::vector<uint32_t> inbox;
  std::vector<Line> inbox_count, bell, knocks, asleep, single;

  Words(uint32_t slots, uint32_t workers, uint32_t capacity)
      : asked(slots),
        done(slots),
        done_at(slots),
        inbox(workers * capacity),
        inbox_count(workers),
        bell(workers),
        knocks(workers),
        asleep(workers),
        single(3) {}

  Board board(uint32_t capacity, uint32_t spin_ns, uint32_t start) {
    for (Line& line : single) line.word = 0;
    for (auto* lines : {&inbox_count, &bell, &knocks, &asleep}) {
      for (Line& line : *lines) line.word = 0;
    }
    // Counters begin just below their wrap.
    for (Line& line : inbox_count) line.word = start;
    single[0].word = single[1].word = start;
    return {uint32_t(asked.size()),
            uint32_t(bell.size()),
            capacity,
            spin_ns,
            asked.data(),
            done.data(),
            done_at.data(),
            inbox.data(),
            inbox_count.data(),
            bell.data(),
            knocks.data(),
            asleep.data(),
            &single[0],
            &single[1],
            &single[2]};
  }
};

inline void check(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "failed: %s\n", what);
  std::exit(1);
}

inline uint32_t power_of_two(uint32_t at_least) {
  uint32_t power = 1;
  while (power < at_least) power *= 2;
  return power;
}

}  // namespace jaxvec
