// Makes calls as XLA does, with Python and CUDA's driver faked, for sanitizers to watch.
//
// First one by one, spoilt in all ways: a pool must refuse them, and must read no more of them than there
// is. So each array is a piece of memory of just its size. Then from several threads, for the CPU and for
// GPUs, whose copies come as late as they may, while Ctrl-C interrupts them.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "call.h"
#include "cuda.h"
#include "interrupts.h"
#include "words.h"

using namespace jaxvec;

extern "C" int cuStreamSynchronize(void* stream);
extern "C" int cuCtxSetCurrent(void* context);

namespace {

constexpr uint32_t kSlots = 6, kWorkers = 3, kBatch = 2;
constexpr uint32_t kU32 = 'u' + 256 * 4, kI32 = 'i' + 256 * 4, kF32 = 'f' + 256 * 4;
constexpr int64_t kBig = 5000;  // elements of a row that a GPU's program copies by itself
constexpr int64_t kFingerprint = 42;
constexpr uint32_t kSlow = 1u << 31;  // an action whose env ends only once Python was asked
void* const kStream = reinterpret_cast<void*>(0x1001);

struct Buffer {
  uint32_t dtype;
  std::vector<int64_t> dims;
  std::vector<char> data;  // of just its size

  Buffer(uint32_t dtype, std::vector<int64_t> dims) : dtype(dtype) { reshape(std::move(dims)); }

  void reshape(std::vector<int64_t> to) {
    size_t bytes = dtype / 256;
    for (const int64_t dim : to) bytes *= size_t(dim);
    std::vector<char> resized(bytes);
    std::copy_n(data.begin(), std::min(bytes, data.size()), resized.begin());
    data = std::move(resized);
    dims = std::move(to);
  }

  template <typename T>
  T* as() {
    return reinterpret_cast<T*>(data.data());
  }
  Array array(const uint8_t* nonzero = nullptr) {
    return {data.data(), dims.data(), uint32_t(dims.size()), dtype, nonzero};
  }
};

// What a program asks for. On a GPU, its buffers stay where they are until the stream is done.
struct Request {
  uint32_t verb;
  std::vector<Buffer> operands, results;
  int64_t fingerprint = kFingerprint;

  TokenRow* token() { return operands[0].as<TokenRow>(); }

  std::string call(void* stream) {
    std::vector<Array> from, to;
    for (Buffer& operand : operands) from.push_back(operand.array());
    for (Buffer& result : results) to.push_back(result.array());
    from.shrink_to_fit();
    to.shrink_to_fit();
    watch_signals();
    Call call{};
    call.verb = verb;
    call.fingerprint = fingerprint;
    call.operands = from;
    call.results = to;
    call.interrupts = interrupts();
    return stream == nullptr ? answer_on_host(call) : answer_on_cuda(call, stream);
  }
};

// The pool, with its workers; rows of no bytes are among its leaves.
struct Setup {
  Words words{kSlots, kWorkers};
  Board board = words.board(20'000, 0);
  Parent parent = {board, nullptr, nullptr, 0, 0, {0}, {0}, {0}};
  Buffer action{kU32, {kSlots}}, nothing{kF32, {kSlots, 0}}, small{kU32, {kSlots}}, big{kU32, {kSlots, kBig}};
  std::vector<uint8_t> nonzero = std::vector<uint8_t>(kSlots), in_flight = nonzero, needs_reset = nonzero;
  std::vector<uint32_t> generation = std::vector<uint32_t>(kSlots);
  std::vector<std::atomic<bool>> released = std::vector<std::atomic<bool>>(kSlots);
  std::vector<int64_t> stops = {2, 4, 6}, sent = std::vector<int64_t>(kSlots), due = sent;
  uint32_t num_sent = 0;
  std::shared_ptr<Engine> engine;
  std::vector<std::thread> workers;

  Setup() {
    Plan plan{};
    plan.id = 1;
    plan.batch_size = kBatch;
    plan.fingerprint = kFingerprint;
    plan.wait_ns = 100'000;
    plan.step_ns = 5'000'000'000;
    plan.parent = &parent;
    parent.stops = stops.data();
    plan.generation = generation.data();
    plan.actions = {action.array(), nothing.array()};
    plan.results = {small.array(), big.array(nonzero.data()), nothing.array()};
    plan.in_flight = in_flight.data();
    plan.sent = sent.data();
    plan.num_sent = &num_sent;
    plan.due = due.data();
    plan.needs_reset = needs_reset.data();
    engine = std::make_shared<Engine>(plan);
    engine->state.open = engine->state.devices = 1;
    publish(1, engine);
    for (uint32_t w = 0; w < kWorkers; ++w) workers.emplace_back(&Setup::work, this, w);
  }

  ~Setup() {
    withdraw(1);
    for (uint32_t w = 0; w < kWorkers; ++w) notify_worker(parent.board, w);
    for (std::thread& worker : workers) worker.join();
  }

  void work(uint32_t index) {
    Worker worker = {board, index, first_slot(board, index), first_slot(board, index + 1), 0};
    std::vector<int64_t> slots(worker.stop - worker.first);
    for (;;) {
      uint32_t operation = 0, count;
      take(worker, &operation, slots.data(), &count);
      if (count == 0 && operation != kEnd) return;
      for (uint32_t i = 0; i < count; ++i) {
        const int64_t slot = slots[i];
        const uint32_t value = action.as<uint32_t>()[slot];
        while ((value & kSlow) && !released[slot].exchange(false)) std::this_thread::yield();
        small.as<uint32_t>()[slot] = value + 1;
        nonzero[slot] = value % 2;
        std::fill_n(big.as<uint32_t>() + slot * kBig, kBig, value % 2 ? value : 0);
        post(worker, &slot, 1);
      }
    }
  }

  Request step(const std::vector<uint32_t>& envs, uint32_t value) {
    const auto rows = int64_t(envs.size());
    Request request = {kStep,
                       {{kU32, {rows, 3}}, {kU32, {rows}}, {kF32, {rows, 0}}},
                       {{kU32, {rows, 3}}, {kU32, {rows}}, {kU32, {rows, kBig}}, {kF32, {rows, 0}}}};
    for (int64_t i = 0; i < rows; ++i) {
      request.token()[i] = {1, envs[i], generation[envs[i]]};
      request.operands[1].as<uint32_t>()[i] = value + 2 * uint32_t(i);
    }
    return request;
  }

  Request send(const std::vector<int32_t>& ids) {
    Request request = recv();
    request.verb = kSend;
    request.results.resize(1, request.results[0]);
    const auto rows = int64_t(ids.size());
    request.operands.push_back({kU32, {rows}});
    request.operands.push_back({kF32, {rows, 0}});
    request.operands.push_back({kI32, {rows}});
    std::copy(ids.begin(), ids.end(), request.operands[3].as<int32_t>());
    std::copy(ids.begin(), ids.end(), request.operands[1].as<int32_t>());
    return request;
  }

  Request recv() {
    Request request = {kRecv,
                       {{kU32, {kSlots, 3}}},
                       {{kU32, {kSlots, 3}}, {kU32, {kBatch}}, {kU32, {kBatch, kBig}}, {kF32, {kBatch, 0}}}};
    for (uint32_t slot = 0; slot < kSlots; ++slot) request.token()[slot] = {1, slot, generation[slot]};
    return request;
  }
};

// Python, which refuses what the pool does, and ends the steps that it has begun.
Setup* asked;
std::atomic<uint32_t> handed_over{0}, told{0};

std::string answer(Call& call) {
  if (call.status == uint32_t(Status::kDone)) {  // of an interrupt
    ++told;
    return "";
  }
  if (call.status != uint32_t(Status::kUnderWay)) return "refused";
  ++handed_over;
  check(call.waited_ns > 0, "a wait without time");
  std::vector<int64_t> slots;
  const auto* token = static_cast<const TokenRow*>(call.operands[0].data);
  for (int64_t i = 0; i < call.operands[0].dims[0]; ++i) slots.push_back(token[i].env);
  for (size_t i = 0; i < slots.size(); ++i) {
    if (static_cast<const uint32_t*>(call.operands[1].data)[i] & kSlow) asked->released[slots[i]] = true;
  }
  const auto count = uint32_t(slots.size());
  Outcome outcome;
  do outcome = wait(asked->parent, slots.data(), count, count, now_ns() + 5'000'000'000);
  while (outcome != kDone && outcome != kTimeout);
  check(outcome == kDone, "a step that did not end");
  for (uint32_t i = 0; i < count; ++i) {
    static_cast<TokenRow*>(call.results[0].data)[i] = {1, token[i].env, asked->generation[token[i].env]};
    static_cast<uint32_t*>(call.results[1].data)[i] = asked->small.as<uint32_t>()[slots[i]];
    std::memcpy(static_cast<uint32_t*>(call.results[2].data) + i * kBig,
                asked->big.as<uint32_t>() + slots[i] * kBig, kBig * sizeof(uint32_t));
  }
  return "";
}

// As XLA's caller waits for what is on a device.
void synchronize(void* stream) {
  if (stream == nullptr) return;
  cuCtxSetCurrent(reinterpret_cast<void*>(0x1000));
  check(cuStreamSynchronize(stream) == 0, "a stream that failed");
  cuCtxSetCurrent(nullptr);
}

struct Spoiler {
  const char* what;
  void (*spoil)(Request&);
};

const std::vector<Spoiler> kSpoilers = {
    {"no operands", [](Request& r) { r.operands.clear(); }},
    {"an operand less", [](Request& r) { r.operands.pop_back(); }},
    {"an operand more", [](Request& r) { r.operands.push_back(r.operands.back()); }},
    {"no results", [](Request& r) { r.results.clear(); }},
    {"a result less", [](Request& r) { r.results.pop_back(); }},
    {"a result more", [](Request& r) { r.results.push_back(r.results.back()); }},
    {"a token of no axis", [](Request& r) { r.operands[0].reshape({}); }},
    {"a token of one axis", [](Request& r) { r.operands[0].reshape({3}); }},
    {"a token of pairs", [](Request& r) { r.operands[0].reshape({r.operands[0].dims[0], 2}); }},
    {"a token of no rows", [](Request& r) { r.operands[0].reshape({0, 3}); }},
    {"a token of fewer rows", [](Request& r) { r.operands[0].reshape({1, 3}); }},
    {"a token of more rows", [](Request& r) { r.operands[0].reshape({kSlots + 1, 3}); }},
    {"a token of numbers with a sign", [](Request& r) { r.operands[0].dtype = kI32; }},
    {"a pool that is not there", [](Request& r) { r.token()[0].pool = 2; }},
    {"an env of another pool", [](Request& r) { r.token()[1].pool = 2; }},
    {"an env too many", [](Request& r) { r.token()[1].env = kSlots; }},
    {"an env that is far off", [](Request& r) { r.token()[1].env = 0xffffffff; }},
    {"an env twice", [](Request& r) { r.token()[1] = r.token()[0]; }},
    {"a stale handle", [](Request& r) { --r.token()[1].generation; }},
    {"another specification", [](Request& r) { ++r.fingerprint; }},
    {"a reset", [](Request& r) { r.verb = kReset; }},
    {"a verb that is not there", [](Request& r) { r.verb = 99; }},
    {"a next token of one axis", [](Request& r) { r.results[0].reshape({3}); }},
    {"a next token of fewer rows", [](Request& r) { r.results[0].reshape({1, 3}); }},
};

const std::vector<Spoiler> kSpoilersOfResults = {
    {"a result of fewer rows", [](Request& r) { r.results[2].reshape({1, kBig}); }},
    {"a result of smaller rows", [](Request& r) { r.results[2].reshape({r.results[2].dims[0], kBig - 1}); }},
    {"a result of one axis", [](Request& r) { r.results[2].reshape({r.results[2].dims[0]}); }},
    {"a result of no axis", [](Request& r) { r.results[1].reshape({}); }},
    {"a result of another type", [](Request& r) { r.results[1].dtype = kF32; }},
};

const std::vector<Spoiler> kSpoilersOfActions = {
    {"an action of no axis", [](Request& r) { r.operands[1].reshape({}); }},
    {"an action of two axes", [](Request& r) { r.operands[1].reshape({r.operands[1].dims[0], 1}); }},
    {"an action for fewer envs", [](Request& r) { r.operands[1].reshape({1}); }},
    {"an action for no envs", [](Request& r) { r.operands[1].reshape({0}); }},
    {"an action of floats", [](Request& r) { r.operands[1].dtype = kF32; }},
    {"an action that NumPy does not have", [](Request& r) { r.operands[1].dtype = 0; }},
};

const std::vector<Spoiler> kSpoilersOfIds = {
    {"ids of no axis", [](Request& r) { r.operands[3].reshape({}); }},
    {"ids of two axes", [](Request& r) { r.operands[3].reshape({r.operands[3].dims[0], 1}); }},
    {"no ids", [](Request& r) { r.operands[3].reshape({0}); }},
    {"fewer ids", [](Request& r) { r.operands[3].reshape({1}); }},
    {"more ids", [](Request& r) { r.operands[3].reshape({5}); }},
    {"ids of another type", [](Request& r) { r.operands[3].dtype = kU32; }},
    {"an id below 0", [](Request& r) { r.operands[3].as<int32_t>()[1] = -1; }},
    {"an id too many", [](Request& r) { r.operands[3].as<int32_t>()[1] = kSlots; }},
    {"an id that is far off", [](Request& r) { r.operands[3].as<int32_t>()[1] = 0x7fffffff; }},
    {"an id twice", [](Request& r) { r.operands[3].as<int32_t>()[1] = r.operands[3].as<int32_t>()[0]; }},
};

void expect_refusals(Setup& setup, const Request& good, const std::vector<Spoiler>& spoilers, void* stream) {
  const auto generation = setup.generation;
  const auto in_flight = setup.in_flight;
  const int64_t request_number = setup.parent.request_number;
  for (const auto& [what, spoil] : spoilers) {
    Request request = good;
    spoil(request);
    check(request.call(stream) == "refused", what);
    synchronize(stream);
    check(setup.generation == generation && setup.in_flight == in_flight &&
              setup.parent.request_number == request_number,
          what);
  }
}

// Makes a call until Python need not be asked to begin it.
void succeed(Request& request, void* stream) {
  std::string error = request.call(stream);
  for (uint32_t tries = 0; error == "refused"; ++tries) {  // another program is inside
    check(tries < 1'000'000, "a call that is always refused");
    std::this_thread::yield();
    error = request.call(stream);
  }
  check(error.empty(), error.c_str());
}

void check_rows(Request& request, size_t row, uint32_t value) {
  check(request.results[1].as<uint32_t>()[row] == value + 1, "an answer to another step");
  const uint32_t* const big = request.results[2].as<uint32_t>() + int64_t(row) * kBig;
  for (const int64_t i : {int64_t{0}, kBig - 1})
    check(big[i] == (value % 2 ? value : 0), "an answer to another step");
}

void one_by_one(Setup& setup, void* stream) {
  const std::vector<int32_t> ids = {5, 0, 3, 1};
  Request step = setup.step({4, 1, 2}, 0), send = setup.send(ids);
  expect_refusals(setup, step, kSpoilers, stream);
  expect_refusals(setup, step, kSpoilersOfResults, stream);
  expect_refusals(setup, step, kSpoilersOfActions, stream);
  expect_refusals(setup, send, kSpoilers, stream);
  expect_refusals(setup, send, kSpoilersOfActions, stream);
  expect_refusals(setup, send, kSpoilersOfIds, stream);
  expect_refusals(setup, setup.recv(), {{"nothing in flight", [](Request&) {}}}, stream);
  succeed(send, stream);
  synchronize(stream);
  expect_refusals(setup, setup.step({4, 1, 2}, 0), {{"an env in flight", [](Request&) {}}}, stream);
  expect_refusals(setup, setup.send({1, 2}), {{"an env in flight", [](Request&) {}}}, stream);
  const int64_t flying[] = {5, 0, 3, 1};
  Outcome outcome;
  do outcome = wait(setup.parent, flying, 4, 4, now_ns() + 5'000'000'000);
  while (outcome != kDone && outcome != kTimeout);
  check(outcome == kDone, "a step that did not end");
  expect_refusals(setup, setup.recv(), kSpoilers, stream);
  expect_refusals(setup, setup.recv(), kSpoilersOfResults, stream);
  std::vector<bool> received(kSlots);
  for (uint32_t batch = 0; batch < 2; ++batch) {
    Request recv = setup.recv();
    succeed(recv, stream);
    synchronize(stream);
    for (size_t row = 0; row < kBatch; ++row) {
      const uint32_t id = recv.results[1].as<uint32_t>()[row] - 1;
      check(std::count(ids.begin(), ids.end(), int32_t(id)) == 1 && !received[id], "an env not in flight");
      received[id] = true;
      check_rows(recv, row, id);
    }
  }
  setup.engine->state.open = 0;
  expect_refusals(setup, setup.step({4, 1, 2}, 0), {{"a pool that is closed", [](Request&) {}}}, stream);
  setup.engine->state.open = 1;
  set_python(nullptr);
  Request stale = step;
  check(stale.call(stream) == "the Python interpreter has ended", "an answer of nobody");
  set_python(answer);
}

// Steps its envs. Each call's operand is the token that the last one gave, which may not be there yet.
void run_program(Setup& setup, std::vector<uint32_t> envs, void* stream, uint32_t rounds) {
  std::vector<std::unique_ptr<Request>> begun;
  Buffer token = setup.step(envs, 0).operands[0];
  for (uint32_t round = 0; round < rounds; ++round) {
    const uint32_t value = 3 * round | (round % 16 == 5 ? kSlow : 0);
    auto request = std::make_unique<Request>(setup.step(envs, value));
    if (begun.empty()) {
      request->operands[0] = token;
    } else {
      request->operands[0].data.swap(begun.back()->results[0].data);  // stays where it is
    }
    succeed(*request, stream);
    begun.push_back(std::move(request));
    if (round % 4 != 0 && round + 1 < rounds) continue;
    synchronize(stream);
    for (const auto& each : begun) {
      for (size_t row = 0; row < envs.size(); ++row) {
        check_rows(*each, row, each->operands[1].as<uint32_t>()[row]);
      }
    }
    token = begun.back()->results[0];
    begun.clear();
  }
}

void all_at_once(Setup& setup) {
  constexpr uint32_t kRounds = 400;
  std::atomic<uint32_t> running{4};
  std::vector<std::thread> programs;
  const auto start = [&](std::vector<uint32_t> envs, uintptr_t stream) {
    programs.emplace_back([&setup, &running, envs, stream] {
      run_program(setup, envs, reinterpret_cast<void*>(stream), kRounds);
      --running;
    });
  };
  start({1, 0}, 0);
  start({2}, 0);
  start({3, 5}, 0x1001);
  start({4}, 0x1002);
  while (running > 0) {
    const uint32_t before = told;
    kill(getpid(), SIGINT);
    while (running > 0 && told == before) std::this_thread::yield();
    // As Python's own verbs, which hold no handle.
    if (setup.engine->enter(nullptr, 0, true, 1'000'000)) setup.engine->wait_for_copies();
    setup.engine->leave();
  }
  for (std::thread& program : programs) program.join();
  check(handed_over > 0 && told > 0, "nothing was tried");
}

}  // namespace

int main() {
  signal(SIGINT, [](int) {});
  use_driver("");  // this program, which the fake driver is part of
  set_python(answer);
  Setup setup;
  asked = &setup;
  one_by_one(setup, nullptr);
  one_by_one(setup, kStream);
  all_at_once(setup);
  std::puts("done");
}
