// A pool as compiled programs see it: the step that meets with nothing unusual, without Python.
//
// Whatever else happens (a handle that is stale, a pool that is broken, closed or busy, an env that
// fails or is slow) is Python's business: `step` says so and has changed nothing, or it hands over in
// the middle of its wait. So all supervision, and every error's text, is in one place (_pool.py).
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "handoff.h"

namespace jaxvec {

// A C-contiguous array: a leaf in the segment, or an operand or result of a program.
struct Array {
  void* data;
  const int64_t* dims;
  uint32_t rank;
  uint32_t dtype;          // NumPy's kind + 256 * bytes of an element; 0 for what NumPy does not have
  const uint8_t* nonzero;  // [num_slots] of a leaf in the segment: 0 for rows of zeros; null if not known
};

// Whether the array can be a handle's token: the pool's id and its count, `[2]` uint32.
bool is_token(const Array& array);

// What Python reads and writes of a pool, holding its gate.
struct State {
  uint32_t count;   // resets and steps so far, as handles say
  uint32_t mover;   // who moved last: an index of _gate.py's MOVERS
  uint32_t open;    // 0 when programs must ask Python, which knows why
  uint32_t served;  // calls of programs that succeeded
};

// What a pool is made of. What it points to lives for as long as the pool is open; `Array`s are copied.
struct Plan {
  uint32_t id;
  uint32_t mover;        // what `State.mover` is after a program's step
  int64_t fingerprint;   // of the specification
  int64_t wait_ns;       // how long a step waits before it hands over to Python
  Parent* parent;        // the hand-off
  const int64_t* slots;  // [num_slots] 0, 1, …
  const int64_t* stops;  // [num_workers] worker w has the slots from the stop before its own on
  const Array* actions;  // leaves in the segment, in the order of the program's operands
  const Array* results;  // and of its results
  uint32_t num_actions;
  uint32_t num_results;
  uint8_t* needs_reset;       // [num_slots]
  const uint8_t* terminated;  // [num_slots]; null where envs reset themselves
  const uint8_t* truncated;
};

// A leaf in the segment.
struct Leaf {
  explicit Leaf(const Array& array);
  bool same_type(const Array& array) const;
  void copy_to(void* target) const;

  void* data;
  const uint8_t* nonzero;
  std::vector<int64_t> dims;
  uint32_t dtype;
  size_t bytes;
};

enum class Stepped {
  kDone,
  kNothingDone,  // for Python to do, from the start
  kUnderWay,     // sent, not finished: for Python to end. The caller has the gate, and must leave it.
};

class Pool {
 public:
  explicit Pool(const Plan& plan);

  // Steps every env once. `operands`: the token and the actions; `results`: the next token and the
  // leaves of the time step. `waited_ns` is set where the step is handed over.
  Stepped step(int64_t fingerprint, const std::vector<Array>& operands, const std::vector<Array>& results,
               int64_t* waited_ns);

  // One thread at a time may use the pool. Returns whether this one may, after at most so long.
  bool enter(int64_t timeout_ns);
  // Lets the next one in; does nothing if this thread is not the one inside. So an interrupt just
  // after `enter` does no harm where `leave` is called in any case.
  void leave();

  State state{};

 private:
  bool any_needs_reset() const;
  void finish(const std::vector<Array>& results);

  const Plan plan_;
  const int32_t process_;
  const std::vector<Leaf> actions_;
  const std::vector<Leaf> results_;
  std::mutex lock_;  // of `inside_`
  std::condition_variable left_;
  uintptr_t inside_ = 0;  // the thread, or 0
};

// Compiled programs name a pool by its id, so they hold no pointer and serve many pools. A program
// that runs keeps the pool's object alive, though its memory is Python's, behind the gate and `open`.
void publish(uint32_t id, std::shared_ptr<Pool> pool);
void withdraw(uint32_t id);
std::shared_ptr<Pool> find(uint32_t id);

}  // namespace jaxvec
