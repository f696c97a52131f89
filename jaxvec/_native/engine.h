// The engine of a pool, for compiled programs: the ordinary step, send and recv, without Python.
//
// A move enters the engine, checks the request, dispatches its envs, holds their slots, leaves, and waits.
// One thread at a time is inside, and only briefly; the holds are a readers-writer lock on each slot and on
// the queue of pending envs (engine.py has the rules). So programs on several devices, or in several threads,
// step different envs at the same time.
//
// Without workers, a step calls the envs itself, while it is inside, and sends and receives are Python's.
//
// Python handles everything else: a stale handle, a pool that is broken, closed or busy, an env that fails or
// is slow. A move then returns the reason and has changed nothing, or it returns in the middle of its wait.
// So all supervision and all error texts are in one language (_pool/).
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "dispatch.h"
#include "trace.h"

namespace jaxvec {

// A C-contiguous array: a leaf in the segment, or an operand or result of a program.
struct Array {
  void* data;
  const int64_t* dims;
  uint32_t rank;
  uint32_t dtype;          // NumPy's kind + 256 * item size in bytes; 0 for dtypes that NumPy lacks
  const uint8_t* nonzero;  // [num_slots] for a leaf in the segment: 0 for rows of zeros; null if unknown
};

size_t count_of(const Array& array);  // number of elements
size_t bytes_of(const Array& array);

// A row of a token, which is `[num_envs, 3]` uint32. The generation counts the env's resets and steps.
struct TokenRow {
  uint32_t pool, env, generation;
};
bool is_token(const Array& array);

// Verbs of an engine besides `Operation`; the numbers are those of `Verb` in move.py.
enum Verb : uint32_t { kSend = 2, kRecv = 3 };

// Fields of an engine that Python reads and writes, in the order of engine.py. Plain fields belong to
// the thread inside.
struct State {
  uint32_t last_caller;              // `Move.caller_code` (move.py) of the latest move
  uint32_t open;                     // 0 if programs must ask Python, which knows the reason
  std::atomic<uint32_t> num_served;  // successful calls of programs in C++; only C++ writes it, in any thread
  // Becomes 1 after a program on a GPU has asked Python, which page-locks the segment if possible. Only
  // Python writes it.
  std::atomic<uint32_t> devices;
  // Time of all steps of all envs by workers, from dispatch to completion. Only C++ adds to it, in any
  // thread.
  std::atomic<uint64_t> steps_ns;
};

// The envs of a pool without workers.
class LocalEnvs {
 public:
  virtual ~LocalEnvs() = default;
  // Steps envs in this thread, which is inside, and returns whether all went well and the pool is still open.
  virtual bool step(const std::vector<int64_t>& slots) = 0;
};

// The arguments of an engine. Pointers are valid while the pool is open. Arrays without
// const belong to the thread inside; `needs_reset` to the thread that holds the slot.
struct Plan {
  uint32_t id;
  uint32_t batch_size;  // number of envs that `recv` returns
  int in_order;         // whether these are the first that were sent, not the first that are ready
  int all_at_once;      // whether the envs are batched: a step or a send has all of them
  int64_t fingerprint;  // of the specification
  int64_t wait_ns;      // time that a move waits before it returns kUnderWay
  int64_t step_ns;      // timeout of a step
  Parent* parent;       // end of the dispatch
  std::shared_ptr<LocalEnvs> local;  // the envs, if they are in this process; null if workers have them
  uint32_t* generation;              // [num_slots] current generation of each env
  std::vector<Array> actions;        // leaves in the segment, in the order of a program's operands
  uint32_t num_options = 0;    // number of the last `actions` that are reset options: a call has all or none
  std::vector<Array> results;  // leaves in the segment, in the order of a program's results
  uint8_t* in_flight;          // [num_slots] whether the env is pending: sent by `send` and not received
  int64_t* sent;               // [num_slots] pending envs in the order in which they were sent
  uint32_t* num_sent;          // number of pending envs
  int64_t* due;                // [num_slots] deadline of each pending env, in ns of the monotonic clock
  uint8_t* needs_reset;        // [num_slots] whether the env must be reset before a step
  const uint8_t* terminated;   // [num_slots]; null with autoreset
  const uint8_t* truncated;    // [num_slots]; null with autoreset
};

// Bytes of the segment, or zeros if `from` is null.
struct Run {
  const void* from;
  size_t bytes;
};

// Asynchronous copies from the segment.
class Copies {
 public:
  virtual ~Copies() = default;
  virtual bool done() = 0;
  virtual void wait() = 0;
};

// The memory of a program's results.
class Target {
 public:
  virtual ~Target() = default;
  // Copies the runs to consecutive memory, or starts to.
  virtual void put(void* to, const std::vector<Run>& runs) = 0;
  // Called after all leaves were put. Copies the token, and returns the unfinished copies or null.
  virtual std::shared_ptr<Copies> finish() { return nullptr; }
};

class HostTarget : public Target {
 public:
  void put(void* to, const std::vector<Run>& runs) override;
};

// A leaf in the segment.
struct Leaf {
  explicit Leaf(const Array& array);
  // Returns whether the array's rows have this leaf's shape.
  bool has_shape(const Array& array) const;
  void write(const std::vector<int64_t>& slots, const void* rows) const;
  // Appends the slots' rows to `runs`; adjacent rows share a run.
  void read(const std::vector<int64_t>& slots, std::vector<Run>* runs) const;

  void* data;
  const uint8_t* nonzero;
  std::vector<int64_t> dims;
  uint32_t dtype;
  size_t row;  // bytes
};

// The outcome of a move, as `Status` of engine.py. Only the first two have changed anything.
enum class Status : uint32_t {
  kDone = 0,
  kUnderWay,   // started, not finished or failed: Python ends it. The caller must release its slots
  kElsewhere,  // not a move for C++: another verb, a program for other envs, or the child of a fork
  kRefused,    // the pool is closed or broken
  kBusy,       // other threads are inside, or hold slots that the caller needs
  kCopying,    // a GPU still copies from the segment
  kNoSuchEnv,
  kDuplicate,
  kStale,    // the envs were moved since the caller got its handle
  kPending,  // an env is pending
  kNeedsReset,
  kTooFewPending,  // too few envs are pending for a `recv`
  kLate,           // a pending env is overdue, which `recv` would miss if enough others are ready
};

// A move that a program, or Python for another caller, requests.
struct Request {
  uint32_t verb;
  uint32_t caller_code;        // becomes `State::last_caller` if there is a new generation
  int new_generation;          // whether other handles to the envs become stale
  uint32_t num_slots;          // of the caller's handle
  uint32_t num_sent;           // of a send
  const int64_t* slots;        // envs of the handle; null for all envs, if the caller has no handle
  const uint32_t* generation;  // generation of each env in the handle
  const int64_t* sent;         // envs to send
  const void* const* actions;  // rows of each leaf; null for leaves that the call does not have
  void* const* results;        // output: rows of each leaf; null for leaves that are not needed
  int64_t waited_ns;           // output: time waited so far
};

class Engine {
 public:
  explicit Engine(const Plan& plan);

  // Answers a program's call, with operands and results as in `Call` of callbacks/_call.py. They are in
  // host memory, except for results that `target` copies.
  Status answer(uint32_t verb, int64_t fingerprint, const std::vector<Array>& operands,
                const std::vector<Array>& results, Target& target, int64_t* waited_ns);

  Status move(Request& request, Target& target);

  // Checks the envs of a handle, and its generation if not null. The caller is inside.
  Status check_handle(const int64_t* slots, const uint32_t* generation, uint32_t count);
  // Checks that any envs can be moved or, if `stepped`, stepped. The caller is inside.
  Status check_envs(const int64_t* slots, uint32_t count, bool stepped);

  // Waits until no copies from the segment are pending. Holders of a fresh handle need not call this, see
  // cuda.cc; other callers must, before envs write to the segment again. The caller is inside.
  void wait_for_copies();

  // Waits until no other thread is inside or holds these slots in conflict: exclusive entry conflicts with
  // all holds, and holds that are `alone` conflict with every entry. Null stands for all slots and the queue.
  // Returns false after the timeout. May be called by a thread that is already inside: an interrupt has made
  // it skip `leave`, or a signal handler calls.
  bool enter(const int64_t* slots, uint32_t count, bool exclusive, int64_t timeout_ns);
  // Does nothing if this thread is not inside, so it is safe in a `finally` even if an interrupt came before
  // or just after `enter`.
  void leave();
  // Adds a hold of this thread, which is inside. It stays after `leave`, until `release`.
  void hold(const int64_t* slots, uint32_t count, bool alone);
  bool holds();
  // Drops all holds of this thread.
  void release();

  State state{};
  Trace trace;

 private:
  struct Hold {
    std::thread::id thread;
    bool alone;
    std::vector<int64_t> slots;  // may contain the queue
  };

  bool conflicts(const Hold& hold, const int64_t* slots, uint32_t count, bool exclusive) const;
  Status step(Request& request, const std::vector<int64_t>& slots, Target& target);
  Status send(Request& request, const std::vector<int64_t>& handle, Target& target);
  Status recv(Request& request, const std::vector<int64_t>& handle, Target& target);
  bool fits(uint32_t verb, const std::vector<Array>& operands, const std::vector<Array>& results) const;
  Status admit(const Request& request, std::vector<int64_t>* slots);
  Status check_ids(const int64_t* slots, uint32_t count);
  Status check_queue() const;
  bool copying();
  void write_actions(const std::vector<int64_t>& slots, const void* const* actions);
  void dispatch(const std::vector<int64_t>& slots, const void* const* actions);
  Status step_here(Request& request, const std::vector<int64_t>& slots, Target& target);
  void advance(const std::vector<int64_t>& slots, const Request& request);
  bool await(const std::vector<int64_t>& slots, uint32_t count, int64_t start, int64_t* waited_ns);
  std::vector<int64_t> receive_batch(std::vector<int64_t> sent);
  void finish(const std::vector<int64_t>& slots, void* const* results, Target& target);
  void deliver(Target& target);

  const Plan plan_;
  const int32_t process_;
  const int64_t queue_;  // pseudo-slot of the queue of pending envs, after all slots
  const std::vector<Leaf> actions_;
  const std::vector<Leaf> results_;
  std::vector<int64_t> all_;       // slots; never changes
  std::vector<uint32_t> checked_;  // [num_slots] number of each env's latest check; of the thread inside
  uint32_t num_checks_ = 0;        // of the thread inside
  std::mutex lock_;                // guards the fields below
  std::condition_variable changed_;
  std::thread::id inside_;  // default: no thread
  std::vector<Hold> holds_;
  std::vector<std::shared_ptr<Copies>> copies_;
};

// The registry of engines. Compiled programs contain a pool's id, not a pointer, so they serve many pools. A
// running program keeps the engine alive; Python's memory in it is used only between `enter` and `leave` or
// under a hold, while the pool is open.
void publish(uint32_t id, std::shared_ptr<Engine> engine);
void withdraw(uint32_t id);
std::shared_ptr<Engine> find(uint32_t id);

}  // namespace jaxvec
