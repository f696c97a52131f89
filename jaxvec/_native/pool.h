// A pool as compiled programs see it: steps, sends and receives that meet with nothing unusual.
//
// Whoever changes the pool has its lock, a readers-writer lock on each slot, and on the queue of those in
// flight; see engine.py, which says who takes it how. Threads are inside one at a time, and for a short
// while only: a step is inside when it sends its envs, then it leaves, holds their slots, and waits for them.
// So programs on several devices, or in several threads, step envs of their own at the same time.
//
// Whatever else happens (a handle that is stale, a pool that is broken, closed or busy, an env that
// fails or is slow) is Python's business: a move says what it is and has changed nothing, or it hands over
// in the middle of its wait. So all supervision, and every error's text, is in one language (_pool/pool.py).
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "handoff.h"
#include "trace.h"

namespace jaxvec {

// A C-contiguous array: a leaf in the segment, or an operand or result of a program.
struct Array {
  void* data;
  const int64_t* dims;
  uint32_t rank;
  uint32_t dtype;          // NumPy's kind + 256 * bytes of an element; 0 for what NumPy does not have
  const uint8_t* nonzero;  // [num_slots] of a leaf in the segment: 0 for rows of zeros; null if not known
};

size_t bytes_of(const Array& array);

// A handle's token is `[num_envs, 3]` uint32: for each of its envs the pool's id, the env's, and its
// generation: how often it was reset or stepped.
struct TokenRow {
  uint32_t pool, env, generation;
};
bool is_token(const Array& array);

// What a pool can be asked for without Python, beside `Operation`; `Verb` of move.py, too.
enum Verb : uint32_t { kSend = 2, kRecv = 3 };

// What Python reads and writes of a pool, being inside.
struct State {
  uint32_t last_caller;          // who moved last: `Move.caller_code` of move.py
  uint32_t open;                 // 0 when programs must ask Python, which knows why
  std::atomic<uint32_t> num_served;  // calls of programs that succeeded; outside, too
  // 0 until Python was asked by a program on a GPU, and has page-locked the segment, if that can be.
  std::atomic<uint32_t> devices;
};

// What a pool is made of. What it points to lives for as long as the pool is open; `Array`s are copied.
struct Plan {
  uint32_t id;
  uint32_t batch_size;   // how many envs a `recv` returns
  uint32_t in_order;     // whether these are the first that were sent, not the first that are done
  uint32_t together;     // how many neighbours are one batched env, whose slots are marked one by one
  int64_t fingerprint;   // of the specification
  int64_t wait_ns;       // how long a step waits before it hands over to Python
  int64_t step_ns;       // how long a step may take
  Parent* parent;        // the hand-off
  const int64_t* stops;  // [num_workers] worker w has the slots from the stop before its own on
  uint32_t* generation;  // [num_slots] resets and steps of each env so far, as handles say
  const Array* actions;  // leaves in the segment, in the order of the program's operands
  const Array* results;  // and of its results
  uint32_t num_actions;
  uint32_t num_results;
  uint8_t* in_flight;         // [num_slots] sent by a `send`, not received: no step can have it
  int64_t* sent;              // [num_slots] those in flight, in the order sent
  uint32_t* num_sent;         // how many these are
  int64_t* due;               // [num_slots] when those in flight are late, in ns of the monotonic clock
  uint8_t* needs_reset;       // [num_slots]
  const uint8_t* terminated;  // [num_slots]; null where envs reset themselves
  const uint8_t* truncated;
};

// Bytes of the segment, or zeros if `from` is null.
struct Run {
  const void* from;
  size_t bytes;
};

// Copies from the segment that may not be done yet.
class Copies {
 public:
  virtual ~Copies() = default;
  virtual bool done() = 0;
  virtual void wait() = 0;
};

// The memory that a program's results are in.
class Target {
 public:
  virtual ~Target() = default;
  // Puts the runs there, one after the other; or begins to.
  virtual void put(void* to, const std::vector<Run>& runs) = 0;
  // All is put but the token. Puts that, after everything else, and returns what is not done yet.
  virtual std::shared_ptr<Copies> finish() { return nullptr; }
};

// This process's own.
class HostTarget : public Target {
 public:
  void put(void* to, const std::vector<Run>& runs) override;
};

// A leaf in the segment.
struct Leaf {
  explicit Leaf(const Array& array);
  // Whether the array could be some rows of this one.
  bool takes(const Array& array) const;
  void write(const std::vector<int64_t>& slots, const void* rows) const;
  // Appends the slots' rows to `runs`, in as few as can be.
  void read(const std::vector<int64_t>& slots, std::vector<Run>* runs) const;

  void* data;
  const uint8_t* nonzero;
  std::vector<int64_t> dims;
  uint32_t dtype;
  size_t row;  // bytes
};

// What came of a move, or would: `Status` of engine.py. But for the first two, nothing was done.
enum class Status : uint32_t {
  kDone = 0,
  kUnderWay,   // begun, not finished: for Python to end. The caller holds its slots, to be released.
  kElsewhere,  // not for this code: another verb, a program made for other envs, the child of a fork
  kBarred,     // the pool is closed or broken
  kBusy,       // others are inside, or hold slots that the caller needs
  kCopying,    // a GPU copies from the segment yet
  kNoSuchEnv,
  kNamedTwice,
  kStale,     // the envs were moved since the caller got its handle
  kInFlight,  // an env was sent, and not received
  kNeedsReset,
  kTooFew,  // envs are in flight for a `recv`
  kLate,    // is an env in flight, which others' being ready hides
  kPart,    // of a batched env, which moves as a whole
};

// What is asked of a pool: by a program, or by Python for one of its callers.
struct Request {
  uint32_t verb;
  uint32_t caller_code;        // for `State`, if there is a new generation
  uint32_t new_generation;     // whether handles to the envs go stale
  uint32_t num_slots;          // of the caller's handle
  uint32_t num_sent;           // of a send
  const int64_t* slots;        // null for all, by a caller who has no handle
  const uint32_t* generation;  // of the envs when the caller got its handle
  const int64_t* sent;         // whom to send
  const void* const* actions;  // rows for each leaf
  void* const* results;        // out: rows of each leaf; null if they are not asked for
  int64_t waited_ns;           // out, if the move is under way
};

class Pool {
 public:
  explicit Pool(const Plan& plan);

  // Answers a program's call, of the verbs kStep, kSend and kRecv; operands and results are as in
  // _program.py's `Call`, and in this process's memory but for what `target` puts, all results after the
  // token. `waited_ns` is set where the call is handed over.
  Status answer(uint32_t verb, int64_t fingerprint, const std::vector<Array>& operands,
                const std::vector<Array>& results, Target& target, int64_t* waited_ns);

  // Makes a move, of the same verbs.
  Status move(Request& request, Target& target);

  // Says whether a caller may ask for these envs, with the handle it has, if any: kDone if so; inside.
  Status check_handle(const int64_t* slots, const uint32_t* generation, uint32_t count);
  // Says whether these envs, which may be anybody's, can be moved, and stepped if they are to be.
  Status check_envs(const int64_t* slots, uint32_t count, bool stepped);

  // Waits until no copies from the segment are under way. Who has a fresh handle need not, see cuda.cc;
  // everybody else has to before envs write to it again. The caller is inside.
  void wait_for_copies();

  // Lets this thread in once nobody else is inside, or holds some of these slots: alone or, if the thread is
  // to be in exclusively, at all. Null is for all slots, and the queue. Returns whether it is in, after at
  // most so long. A thread that is inside already has been interrupted, and has left without saying so; or it
  // is asked from a signal handler.
  bool enter(const int64_t* slots, uint32_t count, bool exclusive, int64_t timeout_ns);
  // Lets the next one in; does nothing if this thread is not the one inside. So an interrupt just
  // after `enter` does no harm where `leave` is called in any case.
  void leave();
  // This thread, which is inside, holds these slots, too, when it leaves: it waits for envs, and releases all
  // that it holds when it has them. Releasing does nothing in a thread that holds nothing.
  void hold(const int64_t* slots, uint32_t count, bool alone);
  bool holds();
  void release();

  State state{};
  Trace trace;

 private:
  // What a thread holds: slots, of which one may be the queue.
  struct Hold {
    uintptr_t thread;
    bool alone;
    std::vector<int64_t> slots;
  };

  bool bars(const Hold& hold, const int64_t* slots, uint32_t count, bool exclusive) const;
  Status step(Request& request, Target& target);
  Status send(Request& request, Target& target);
  Status recv(Request& request, Target& target);
  bool fits(uint32_t verb, const std::vector<Array>& operands, const std::vector<Array>& results) const;
  Status admit(const Request& request, std::vector<int64_t>* slots);
  Status meet(const int64_t* slots, uint32_t count);
  bool is_part(const int64_t* slots, uint32_t count) const;
  bool copying();
  void hand_over(const std::vector<int64_t>& slots, const void* const* actions);
  bool overdue() const;
  void advance(const std::vector<int64_t>& slots, const Request& request);
  Status await(const std::vector<int64_t>& slots, uint32_t count, int64_t* waited_ns);
  std::vector<int64_t> receive_batch(std::vector<int64_t> sent);
  void finish(const std::vector<int64_t>& slots, void* const* results, Target& target);
  void deliver(Target& target);

  const Plan plan_;
  const int32_t process_;
  const int64_t queue_;  // stands for the queue of those in flight, among slots
  const std::vector<Leaf> actions_;
  const std::vector<Leaf> results_;
  std::vector<int64_t> all_;    // slots
  std::vector<uint32_t> seen_;  // [num_slots] the last look that met with the env
  uint32_t looks_ = 0;
  std::mutex lock_;  // of what follows
  std::condition_variable changed_;
  uintptr_t inside_ = 0;  // the thread, or 0
  std::vector<Hold> holds_;
  std::vector<std::shared_ptr<Copies>> copies_;
};

// Compiled programs name a pool by its id, so they hold no pointer and serve many pools. A program
// that runs keeps the pool's object alive, though its memory is Python's, behind `enter` and `open`.
void publish(uint32_t id, std::shared_ptr<Pool> pool);
void withdraw(uint32_t id);
std::shared_ptr<Pool> find(uint32_t id);

}  // namespace jaxvec
