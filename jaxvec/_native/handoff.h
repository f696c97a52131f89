// The hand-off between parent and workers: two marks on each slot in shared memory, and futexes to wake.
//
// A slot (an env's row) belongs to the parent while `completed` equals `requested`: `send` marks it with a
// new request, `post` copies the mark. Nothing else says what is to be done, so a worker that takes another's
// place finds the work that the other left. The words lie in the segment; `_layout.py` says where. Each
// is written by one side only, or only by atomic addition.
#pragma once

#include <atomic>
#include <cstdint>

namespace jaxvec {

// One cache line for each word that another process polls, so that neighbours don't disturb it.
struct alignas(64) Line {
  std::atomic<uint32_t> word;
};
static_assert(sizeof(Line) == 64);
static_assert(std::atomic<uint32_t>::is_always_lock_free);

// The segment's words. Plain pointers: Python fills it in, and keeps the segment mapped.
struct Board {
  uint32_t num_slots;
  uint32_t num_workers;
  uint32_t spin_ns;                    // how long to look again before sleeping; 0 where cores are scarce
  uint32_t look_around_ns;             // how long the parent sleeps at most: a dead worker can't notify it
  std::atomic<int64_t>* requested;     // [num_slots] parent writes: the latest request, its number and verb
  std::atomic<int64_t>* completed;     // [num_slots] worker writes: the request it completed last
  std::atomic<int64_t>* completed_at;  // [num_slots] worker writes: when, in ns of the monotonic clock
  Line* doorbell;                      // [num_workers] parent adds: something new, look around
  Line* worker_notices;                // [num_workers] parent adds: a message is on the control socket
  Line* asleep;                        // [num_workers] worker writes: 1 if it may need a wake
  Line* finished;                      // workers add: slots finished; the parent sleeps on it
  Line* target;                        // parent writes: the value of `finished` that it sleeps for
  Line* sleepers;                      // parent adds: how many of its threads may need a wake
  Line* parent_notices;                // anyone adds: the parent should look at its control sockets
};

// What workers are asked for: `Verb` of move.py, below kEnd. A request is kEnd * number + operation.
enum Operation : uint32_t { kReset = 0, kStep = 1, kSave = 6, kRestore = 7, kEnd = 8 };

// What a wait ended with.
enum Outcome : int32_t {
  kDone = 0,
  kLookAround = 1,   // a control socket has something, or the parent was notified
  kTimeout = 2,      // of this wait; whether that is an error is the caller's business
  kInterrupted = 3,  // by a signal: let Python's handlers run
};

// The parent's own words. One thread at a time sends, under the pool's lock; any number wait.
struct Parent {
  Board board;
  const int32_t* sockets;  // [num_sockets] control sockets, or what stands for several
  uint32_t num_sockets;
  int64_t request_number;              // of the latest request; they are served in this order
  std::atomic<uint32_t> waiters;       // threads that wait
  std::atomic<uint32_t> seen_notices;  // of `parent_notices`
  std::atomic<int64_t> looked_ns;      // when a wait looked at the sockets last
};

struct Worker {
  Board board;
  uint32_t index;
  uint32_t first, stop;   // its slots
  uint32_t seen_notices;  // messages received
};

// The monotonic clock.
int64_t now_ns();

// Hands `count` slots of one worker to it and wakes it.
void send(Parent& parent, uint32_t worker, uint32_t operation, const int64_t* slots, uint32_t count);

// Hands slots over with requests that another hand-off made, whose slots these are, too.
void pass_on(Parent& parent, uint32_t worker, const int64_t* requests, const int64_t* slots, uint32_t count);

// Tells a worker that a message is on its control socket.
void notify_worker(Parent& parent, uint32_t worker);

// Waits until `count` of the slots are the parent's. Can be called again when it ended otherwise.
Outcome wait(Parent& parent, const int64_t* slots, uint32_t num_slots, uint32_t count, int64_t timeout_ns);

// Who looks at the control sockets says so before: notices until now are no news any more.
void mark_notices_seen(Parent& parent);

// Waits for work or a notice. `count` is 0 for a notice, else of one `operation`; `slots` has room for all
// of the worker's.
void take(Worker& worker, uint32_t* operation, int64_t* slots, uint32_t* count);

// Hands finished slots back to the parent.
void post(Worker& worker, const int64_t* slots, uint32_t count);

// Makes the parent look at its control sockets at once.
void notify_parent(Board& board);

}  // namespace jaxvec
