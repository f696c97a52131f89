// Drives the dispatch with a thread for each worker, for sanitizers to watch.
//
// Rows are plain memory that the parent and the workers write in turn, so any hole in the dispatch's
// ordering is a data race that the sanitizer reports; and every value is checked besides.
#include <algorithm>
#include <cstdio>
#include <iterator>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "words.h"

using namespace jaxvec;

namespace {

enum Notices : uint32_t { kNone, kMany, kStop };  // what notices to workers mean
constexpr Operation kAll[] = {kReset, kStep, kSave, kRestore};

// What a worker adds to a row for an operation.
uint32_t part_of(uint32_t operation) { return 1 + 10 * operation; }

// Now and then the worker is replaced in the middle of its work, by one that knows nothing of it.
void work(Board board, uint32_t index, std::vector<uint32_t>& rows, const std::atomic<uint32_t>& notices) {
  const uint32_t first = first_slot(board, index), last = first_slot(board, index + 1);
  Worker worker = {board, index, first, last, 0};
  std::vector<int64_t> slots(last - first);
  std::mt19937 random(index);
  for (;;) {
    uint32_t operation = 0, count;
    take(worker, &operation, slots.data(), &count);
    if (count == 0 && operation != kEnd) {
      check(notices != kNone, "a notice without a message");
      if (notices == kStop) return;
    }
    uint32_t done = 0;
    for (const uint32_t part : {uint32_t(random() % (count + 1)), count}) {
      for (uint32_t i = done; i < part; ++i) rows[slots[i]] += part_of(operation);
      if (random() % 4 == 0) std::this_thread::yield();
      if (done < part) post(worker, &slots[done], part - done);
      done = std::max(done, part);
      if (random() % 20 == 0) {
        worker = {board, index, first, last, 0};
        break;
      }
    }
  }
}

// Some of the parent's threads: each sends slots of its own and waits for them, some at a time.
void own(Parent& parent, std::mutex& sending, std::vector<int64_t> mine, std::vector<uint32_t>& rows,
         const Words& words, uint32_t rounds) {
  std::mt19937 random{uint32_t(mine[0])};
  std::vector<uint32_t> expected(rows.size());
  for (uint32_t round = 0; round < rounds; ++round) {
    std::vector<int64_t> sent, slots[std::size(kAll)];
    std::shuffle(mine.begin(), mine.end(), random);          // so that workers alternate
    const uint32_t same = random() % (2 * std::size(kAll));  // in every other round, all slots get the same
    for (const int64_t slot : mine) {
      const uint32_t which = same < std::size(kAll) ? same : random() % (std::size(kAll) + 1);
      if (which == std::size(kAll)) continue;
      slots[which].push_back(slot);
      rows[slot] += 7;
      expected[slot] += 7 + part_of(kAll[which]);
    }
    for (size_t which = 0; which < std::size(kAll); ++which) {
      const std::lock_guard lock(sending);
      const uint32_t count = uint32_t(slots[which].size());
      if (count > 0) send(parent, kAll[which], slots[which].data(), count);
      sent.insert(sent.end(), slots[which].begin(), slots[which].end());
    }
    while (!sent.empty()) {  // in batches, as a first-ready pool would
      const uint32_t batch = 1 + random() % uint32_t(sent.size());
      Outcome outcome;
      do outcome = wait(parent, sent.data(), uint32_t(sent.size()), batch, now_ns() + 4'000'000'000);
      while (outcome == kInterrupted);
      check(outcome == kDone, "a wait that did not end");
      std::vector<int64_t> left;
      for (const int64_t slot : sent) {
        if (words.completed[slot].load(std::memory_order_acquire) == words.requested[slot].load()) {
          check(rows[slot] == expected[slot], "a row that is not its worker's answer");
        } else {
          left.push_back(slot);
        }
      }
      check(sent.size() - left.size() >= batch, "a wait that ended too early");
      sent = left;
    }
  }
}

void run(uint32_t num_slots, uint32_t num_workers, uint32_t num_owners, uint32_t spin_ns, uint32_t rounds,
         Notices meanwhile = kNone) {
  Words words(num_slots, num_workers);
  Board board = words.board(spin_ns, 0u - 100 * num_slots);
  board.look_around_ns = UINT32_MAX;  // longer than a wait, which then fails if a wake is lost
  std::vector<uint32_t> rows(num_slots);
  std::atomic<uint32_t> notices{meanwhile};
  std::vector<std::thread> threads, owners;
  for (uint32_t w = 0; w < num_workers; ++w) {
    threads.emplace_back(work, board, w, std::ref(rows), std::cref(notices));
  }
  std::vector<int64_t> stops(num_workers);
  for (uint32_t w = 0; w < num_workers; ++w) stops[w] = first_slot(board, w + 1);
  Parent parent = {board, stops.data(), nullptr, 0, 0, {0}, {0}, {0}};
  parent.longest_spin_ns = 20 * spin_ns;
  parent.rings_once = num_workers % 2 == 0;
  std::mutex sending;
  for (uint32_t o = 0; o < num_owners; ++o) {
    std::vector<int64_t> mine;
    for (uint32_t slot = o; slot < num_slots; slot += num_owners) mine.push_back(slot);
    owners.emplace_back(own, std::ref(parent), std::ref(sending), mine, std::ref(rows), std::cref(words),
                        rounds);
  }
  std::atomic<bool> over{false};
  std::thread notifier([&] {  // wakes workers at any moment, as requests do
    std::mt19937 random;
    while (meanwhile == kMany && !over) notify_worker(parent.board, random() % num_workers);
  });
  for (std::thread& owner : owners) owner.join();
  over = true;
  notifier.join();
  notices = kStop;
  for (uint32_t w = 0; w < num_workers; ++w) notify_worker(parent.board, w);
  for (std::thread& thread : threads) thread.join();

  parent.board.look_around_ns = 50'000'000;
  const int64_t slot = 0;
  words.requested[0] += 1;
  notify_parent(parent.board);
  check(wait(parent, &slot, 1, 1, 0) == kLookAround, "a notice that was not seen");
  mark_notices_seen(parent);
  check(wait(parent, &slot, 1, 1, now_ns() + 1'000'000) == kTimeout, "a wait for nothing");
}

// The worker that should wake the others of its block has died in its sleep.
void run_without_the_first_worker() {
  constexpr uint32_t kWorkers = 20;
  Words words(kWorkers, kWorkers);
  Board board = words.board(0, 0);
  const uint32_t look_around_ns = std::exchange(board.look_around_ns, UINT32_MAX);
  words.asleep[0].word = 1;
  std::vector<uint32_t> rows(kWorkers);
  std::atomic<uint32_t> notices{kNone};
  std::vector<std::thread> threads;
  std::vector<int64_t> stops(kWorkers), slots(kWorkers);
  for (uint32_t w = 0; w < kWorkers; ++w) {
    slots[w] = w, stops[w] = w + 1;
    if (w > 0) threads.emplace_back(work, board, w, std::ref(rows), std::cref(notices));
  }
  for (uint32_t w = 1; w < kWorkers; ++w) {
    while (words.asleep[w].word == 0) std::this_thread::yield();
  }
  for (Line& line : words.asleep) line.extra = UINT32_MAX;  // not on the core of this thread
  Parent parent = {board, stops.data(), nullptr, 0, 0, {0}, {0}, {0}};
  parent.board.look_around_ns = look_around_ns;
  send(parent, kStep, slots.data(), kWorkers);
  check(words.doorbell[0].extra > 0, "the first worker was not to wake any");
  check(wait(parent, &slots[1], kWorkers - 1, kWorkers - 1, now_ns() + 4'000'000'000) == kDone,
        "a block slept on");
  for (uint32_t w = 1; w < kWorkers; ++w) check(rows[w] == part_of(kStep), "a row without its step");
  notices = kStop;
  for (uint32_t w = 0; w < kWorkers; ++w) notify_worker(parent.board, w);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

int main() {
  for (uint32_t spin_ns : {0u, 50'000u}) {
    run(1, 1, 1, spin_ns, 2000);
    run(8, 2, 1, spin_ns, 2000);
    run(13, 5, 3, spin_ns, 1000);
    run(64, 8, 2, spin_ns, 500);
    run(320, 80, 1, spin_ns, 200);  // many workers wake each other
    run(640, 80, 3, spin_ns, 60);
    run(320, 80, 1, spin_ns, 50, kMany);
  }
  run_without_the_first_worker();
  std::puts("done");
}
