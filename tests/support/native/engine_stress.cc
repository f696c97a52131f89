// Drives a pool from many programs at once, for sanitizers to watch.
//
// Threads stand in for compiled programs, which step whenever the handle they hold is fresh; for
// Python, which steps and closes the pool while it has the lock, and ends what programs hand over; and
// for workers, some of whose envs are slow. Every answer is checked to be that of its own step.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "engine.h"
#include "words.h"

using namespace jaxvec;

namespace {

constexpr uint32_t kSlots = 6, kWorkers = 3;
constexpr uint32_t kU32 = 'u' + 256 * 4;
constexpr int64_t kFingerprint = 42;

// Copies rows late, as a GPU does: when somebody waits, or its program comes to it.
class LateCopies : public Copies {
 public:
  bool done() override { return done_; }
  void wait() override {
    const std::lock_guard guard(lock_);
    if (done_) return;
    for (const auto& [to, runs] : puts) host_.put(to, runs);
    done_ = true;
  }

  std::vector<std::pair<void*, std::vector<Run>>> puts;

 private:
  HostTarget host_;
  std::mutex lock_;
  std::atomic<bool> done_{false};
};

class LateTarget : public Target {
 public:
  void put(void* to, const std::vector<Run>& runs) override { copies->puts.emplace_back(to, runs); }
  std::shared_ptr<Copies> finish() override { return copies; }

  const std::shared_ptr<LateCopies> copies = std::make_shared<LateCopies>();
};

struct Rows {
  std::vector<uint32_t> action, result, steps;
};

void work(Board board, uint32_t index, Rows& rows) {
  Worker worker = {board, index, first_slot(board, index), first_slot(board, index + 1), 0};
  std::vector<int64_t> slots(kSlots);
  std::mt19937 random(index);
  for (;;) {
    uint32_t operation = 0, count;
    take(worker, &operation, slots.data(), &count);
    if (count == 0 && operation != kEnd) return;
    for (uint32_t i = 0; i < count; ++i) {
      if (random() % 200 == 0) std::this_thread::sleep_for(std::chrono::microseconds(400));
      rows.result[slots[i]] = 2 * rows.action[slots[i]];
      ++rows.steps[slots[i]];
    }
    post(worker, slots.data(), count);
  }
}

struct Shared {
  Parent parent;
  Rows rows;
  std::vector<uint32_t> generation;
  std::vector<std::atomic<uint32_t>>
      handles;  // the generations of the latest, which are out once a step has ended
  std::shared_ptr<Engine> engine;
  std::atomic<uint32_t> steps{0}, by_programs{0}, handed_over{0}, refused{0};

  // Gives out a handle, if no later one is out already: between a step and this, others step on.
  void renew(int64_t slot, uint32_t count) {
    uint32_t latest = handles[slot];
    while (latest < count && !handles[slot].compare_exchange_weak(latest, count)) {
    }
  }

  bool tried() const { return by_programs > 0 && handed_over > 0 && refused > 0; }
};

// Waits as Python does for a step that was sent; the thread is inside, or holds the slots.
void end_step(Shared& shared, const std::vector<int64_t>& slots) {
  const auto count = uint32_t(slots.size());
  Outcome outcome;
  do outcome = wait(shared.parent, slots.data(), count, count, now_ns() + 5'000'000'000);
  while (outcome != kDone && outcome != kTimeout);
  check(outcome == kDone, "a step that did not end");
}

// Steps some envs, which others step, too, whenever the handle it has got is fresh.
void run_program(Shared& shared, uint32_t seed, std::vector<int64_t> slots) {
  const auto count = int64_t(slots.size());
  const int64_t token_dims[] = {count, 3}, dims[] = {count};
  std::vector<TokenRow> token(count), next_token(count);
  std::vector<uint32_t> action(count), result(count);
  const std::vector<Array> operands = {{token.data(), token_dims, 2, kU32, nullptr},
                                       {action.data(), dims, 1, kU32, nullptr}};
  const std::vector<Array> results = {{next_token.data(), token_dims, 2, kU32, nullptr},
                                      {result.data(), dims, 1, kU32, nullptr}};
  for (uint32_t step = 1;; ++step) {
    const std::shared_ptr<Engine> engine = find(1);
    if (engine == nullptr) return;
    while (!engine->enter(slots.data(), 0, false, 1'000'000)) {
    }
    const bool open = engine->state.open;
    engine->leave();
    if (!open) return;
    for (int64_t i = 0; i < count; ++i) {
      const auto slot = uint32_t(slots[i]);
      token[i] = {1, slot, shared.handles[slot] - (step % 7 == 0)};  // sometimes stale
    }
    for (int64_t i = 0; i < count; ++i) action[i] = 1000 * seed + step + uint32_t(slots[i]);
    int64_t waited_ns = 0;
    LateTarget target;
    switch (engine->answer(kStep, kFingerprint, operands, results, target, &waited_ns)) {
      case Status::kUnderWay:
        check(waited_ns > 0, "a wait without time");
        ++shared.handed_over;
        end_step(shared, slots);
        for (int64_t i = 0; i < count; ++i) result[i] = shared.rows.result[slots[i]];
        for (const int64_t slot : slots) shared.renew(slot, shared.generation[slot]);
        engine->release();
        engine->release();  // does nothing
        break;
      case Status::kDone:
        if (step % 3 != 0) std::this_thread::yield();
        target.copies->wait();  // the token comes after the rows
        for (int64_t i = 0; i < count; ++i) {
          check(next_token[i].pool == 1 && next_token[i].env == token[i].env &&
                    next_token[i].generation == token[i].generation + 1,
                "a token that is not the next");
          shared.renew(slots[i], next_token[i].generation);
        }
        break;
      default:
        ++shared.refused;
        continue;
    }
    shared.steps += uint32_t(count);
    ++shared.by_programs;
    for (int64_t i = 0; i < count; ++i) check(result[i] == 2 * action[i], "an answer to another step");
  }
}

// Steps all envs so often, and until the programs have met with all there is to meet with.
void run_host(Shared& shared, uint32_t steps) {
  std::vector<int64_t> slots = {0, 1, 2, 3, 4, 5};
  Engine& engine = *shared.engine;
  for (uint32_t step = 0; step < steps || !shared.tried(); ++step) {
    check(step < 100 * steps, "nothing was tried");
    // However busy the machine is, they get their turn.
    for (const uint32_t before = shared.by_programs; step % 100 == 0 && shared.by_programs == before;) {
      std::this_thread::yield();
    }
    while (!engine.enter(nullptr, 0, true, 1'000'000)) {
    }
    engine.wait_for_copies();  // no handle says that all rows were read
    for (uint32_t slot = 0; slot < kSlots; ++slot) {
      shared.rows.action[slot] = step;
      ++shared.generation[slot];
    }
    send(shared.parent, kStep, slots.data(), kSlots);
    end_step(shared, slots);
    shared.steps += kSlots;
    check(shared.rows.result[5] == 2 * step, "an answer to another step");
    for (const int64_t slot : slots) shared.renew(slot, shared.generation[slot]);
    engine.leave();
    engine.leave();  // does nothing
  }
  while (!engine.enter(nullptr, 0, true, 1'000'000)) {
  }
  engine.state.open = 0;
  withdraw(1);
  engine.leave();
}

// Holds a worker's slots alone again and again, as Python does who asks it: nobody sends them meanwhile.
void run_caller(Shared& shared, int64_t first) {
  const int64_t slots[] = {first, first + 1};
  const Board& board = shared.parent.board;
  while (find(1) != nullptr) {
    if (!shared.engine->enter(slots, 2, true, 1'000'000)) continue;
    shared.engine->hold(slots, 2, true);
    const int64_t before[] = {board.requested[first], board.requested[first + 1]};
    shared.engine->leave();
    std::this_thread::yield();
    check(before[0] == board.requested[first] && before[1] == board.requested[first + 1],
          "a step of an env that a call holds");
    check(shared.engine->holds(), "a hold that is lost");
    shared.engine->release();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// The pool of `Shared`, ready to be used; what it points to lives as long as this.
struct Setup {
  Words words{kSlots, kWorkers};
  Board board = words.board(20'000, 0);
  Shared shared{{board, nullptr, nullptr, 0, 0, {0}, {0}, {0}},
                {std::vector<uint32_t>(kSlots), std::vector<uint32_t>(kSlots), std::vector<uint32_t>(kSlots)},
                std::vector<uint32_t>(kSlots),
                std::vector<std::atomic<uint32_t>>(kSlots),
                {}};
  std::vector<int64_t> stops = {2, 4, 6}, dims = {kSlots}, sent = std::vector<int64_t>(kSlots),
                       due = std::vector<int64_t>(kSlots);
  std::vector<uint8_t> in_flight = std::vector<uint8_t>(kSlots), needs_reset = std::vector<uint8_t>(kSlots);
  uint32_t num_sent = 0;
  std::vector<std::thread> workers;

  Setup(uint32_t batch_size, uint32_t in_order, int64_t wait_ns) {
    Plan plan{};
    plan.id = 1;
    plan.batch_size = batch_size;
    plan.in_order = in_order;
    plan.fingerprint = kFingerprint;
    plan.wait_ns = wait_ns;
    plan.step_ns = 5'000'000'000;
    plan.parent = &shared.parent;
    shared.parent.stops = stops.data();
    plan.generation = shared.generation.data();
    plan.actions = {{shared.rows.action.data(), dims.data(), 1, kU32, nullptr}};
    plan.results = {{shared.rows.result.data(), dims.data(), 1, kU32, nullptr}};
    plan.in_flight = in_flight.data();
    plan.sent = sent.data();
    plan.num_sent = &num_sent;
    plan.due = due.data();
    plan.needs_reset = needs_reset.data();
    shared.engine = std::make_shared<Engine>(plan);
    shared.engine->state.open = 1;
    publish(1, shared.engine);
    for (uint32_t w = 0; w < kWorkers; ++w) workers.emplace_back(work, board, w, std::ref(shared.rows));
  }

  ~Setup() {
    for (uint32_t w = 0; w < kWorkers; ++w) notify_worker(shared.parent.board, w);
    for (std::thread& worker : workers) worker.join();
  }
};

void steps() {
  Setup setup(kSlots, 0, 200'000);
  Shared& shared = setup.shared;
  // Handles to all envs, to envs of one worker, of several, and not in their order.
  const std::vector<std::vector<int64_t>> handles = {{0, 1, 2, 3, 4, 5}, {0, 1}, {2, 3, 4}, {5, 3}};
  std::vector<std::thread> programs;
  for (uint32_t p = 0; p < handles.size(); ++p) {
    programs.emplace_back(run_program, std::ref(shared), p + 1, handles[p]);
  }
  programs.emplace_back(run_caller, std::ref(shared), 4);
  std::thread host(run_host, std::ref(shared), 2000);
  host.join();
  for (std::thread& program : programs) program.join();
  uint32_t taken = 0;
  for (uint32_t slot = 0; slot < kSlots; ++slot) {
    check(shared.rows.steps[slot] == shared.generation[slot], "a step lost or repeated");
    taken += shared.rows.steps[slot];
  }
  check(taken == shared.steps, "a step lost or repeated");
}

// One program sends and receives, while the host asks for the pool now and then.
void first_ready(uint32_t batch_size, uint32_t in_order) {
  Setup setup(batch_size, in_order, 5'000'000'000);
  Shared& shared = setup.shared;
  Engine& engine = *shared.engine;
  std::atomic<bool> stop{false};
  std::thread host([&] {
    while (!stop) {
      if (engine.enter(nullptr, 0, true, 1'000'000)) engine.leave();
      std::this_thread::yield();
    }
  });
  std::thread caller(run_caller, std::ref(shared), 2);
  const int64_t token_dims[] = {kSlots, 3}, batch_dims[] = {batch_size};
  std::vector<TokenRow> token(kSlots), next_token(kSlots);
  for (uint32_t slot = 0; slot < kSlots; ++slot) token[slot] = {1, slot, 0};
  std::vector<uint32_t> result(batch_size), expected(kSlots), order;
  std::vector<int32_t> received = {0, 1, 2, 3, 4, 5};
  std::mt19937 random(batch_size);
  const auto move = [&](Verb verb, std::vector<Array> operands, std::vector<Array> results) {
    operands.insert(operands.begin(), {token.data(), token_dims, 2, kU32, nullptr});
    results.insert(results.begin(), {next_token.data(), token_dims, 2, kU32, nullptr});
    int64_t waited_ns = 0;
    Status status;
    HostTarget target;
    do status = engine.answer(verb, kFingerprint, operands, results, target, &waited_ns);
    while (status == Status::kBusy);  // the host is inside, or the caller holds some
    check(status == Status::kDone, "a wait that did not end");
    token = next_token;
  };
  for (uint32_t turn = 1; turn < 2000; ++turn) {
    if (!received.empty() && (random() % 2 == 0 || order.size() < batch_size)) {
      std::shuffle(received.begin(), received.end(), random);
      std::vector<int32_t> ids(received.begin(), received.begin() + 1 + random() % received.size());
      received.erase(received.begin(), received.begin() + int64_t(ids.size()));
      std::vector<uint32_t> action;
      for (const int32_t id : ids) {
        action.push_back(turn * 10 + uint32_t(id));
        expected[size_t(id)] = 2 * action.back();
        order.push_back(uint32_t(id));
      }
      const int64_t dims[] = {int64_t(ids.size())};
      move(kSend, {{action.data(), dims, 1, kU32, nullptr}, {ids.data(), dims, 1, 'i' + 256 * 4, nullptr}},
           {});
      continue;
    }
    move(kRecv, {}, {{result.data(), batch_dims, 1, kU32, nullptr}});
    for (const uint32_t value : result) {
      const auto who =
          std::find_if(order.begin(), order.end(), [&](uint32_t id) { return expected[id] == value; });
      check(who != order.end(), "an env that is not in flight, or an answer to another step");
      check(!in_order || who == order.begin(), "out of order");
      received.push_back(int32_t(*who));
      order.erase(who);
    }
  }
  stop = true;
  host.join();
  withdraw(1);
  caller.join();
}

}  // namespace

int main() {
  steps();
  first_ready(2, 0);
  first_ready(2, 1);
  first_ready(kSlots, 0);
  first_ready(kSlots, 1);
  std::puts("done");
}
