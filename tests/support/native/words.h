// The words of a dispatch in plain memory, for threads in place of processes.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "dispatch.h"

namespace jaxvec {

struct Words {
  std::vector<std::atomic<int64_t>> requested, completed, completed_at;
  std::vector<Line> doorbell, notices, asleep, single;

  Words(uint32_t slots, uint32_t workers)
      : requested(slots),
        completed(slots),
        completed_at(slots),
        doorbell(workers),
        notices(workers),
        asleep(workers),
        single(5) {}

  // `start` is where the counter of finished slots begins: it may wrap.
  Board board(uint32_t spin_ns, uint32_t start) {
    for (auto* lines : {&doorbell, &notices, &asleep, &single}) {
      for (Line& line : *lines) line.word = 0;
    }
    single[0].word = single[1].word = start;
    return {uint32_t(requested.size()),
            uint32_t(doorbell.size()),
            spin_ns,
            50'000'000,
            requested.data(),
            completed.data(),
            completed_at.data(),
            doorbell.data(),
            &single[4],
            notices.data(),
            asleep.data(),
            &single[0],
            &single[1],
            &single[2],
            &single[3]};
  }
};

// The first slot of a worker; workers hold neighbours.
inline uint32_t first_slot(const Board& board, uint32_t worker) {
  return board.num_slots * worker / board.num_workers;
}

inline void check(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "failed: %s\n", what);
  std::exit(1);
}

}  // namespace jaxvec
