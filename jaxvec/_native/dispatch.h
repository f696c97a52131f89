// The dispatch of slots between the parent and its workers: two marks per slot in shared memory, and futexes.
//
// A slot (an env's row) belongs to the parent while `completed` equals `requested`. `send` stores a new
// request in `requested`; `post` copies it to `completed`. There is no other record of pending work, so a
// worker that replaces a dead one finds the unfinished work here. _memory/segment.py lays the words out. Each
// word is written by one side only, or only by atomic addition.
#pragma once

#include <atomic>
#include <cstdint>

namespace jaxvec {

// A word that another process polls has a cache line of its own, to avoid false sharing.
struct alignas(64) Line {
  std::atomic<uint32_t> word;
  std::atomic<uint32_t> extra;  // used in `doorbell`, `asleep` and `target`
};
static_assert(sizeof(Line) == 64);
static_assert(std::atomic<uint32_t>::is_always_lock_free);

// Addresses of the segment's words. Python fills them in and keeps the segment mapped.
struct Board {
  uint32_t num_slots;
  uint32_t num_workers;
  uint32_t spin_ns;                    // time to poll before sleeping; 0 where cores are scarce
  uint32_t look_around_ns;             // longest sleep, as a dead process can't wake the other side
  std::atomic<int64_t>* requested;     // [num_slots] parent writes: the latest request, its number and verb
  std::atomic<int64_t>* completed;     // [num_slots] worker writes: the request it completed last
  std::atomic<int64_t>* completed_at;  // [num_slots] worker writes: time of completion, monotonic ns
  Line* doorbell;                      // [num_workers] parent adds: there is new work or a new message;
                                       // `extra` is the number of next workers that it wakes when it wakes
  Line* common_bell;                   // parent adds: there is new work for all workers
  Line* worker_notices;                // [num_workers] parent adds: a message is on the control socket
  Line* asleep;                        // [num_workers] worker writes: 1 if it may need a wake; `extra` is the
                                       // core that it slept on last
  Line* finished;                      // workers add: completed slots; the parent sleeps on it
  Line* target;                        // parent writes: value of `finished` that it sleeps for; `extra` is
                                       // odd while it stores requests: a batched env needs all of its own
  Line* sleepers;                      // parent adds: number of its threads that may need a wake
  Line* parent_notices;                // both sides add: the parent should poll its control sockets
};

// Requests to workers: the members of `Verb` (move.py) below kEnd. A mark is kEnd * number + operation.
enum Operation : uint32_t { kReset = 0, kStep = 1, kSave = 6, kRestore = 7, kSimulate = 8, kEnd = 16 };

// The reason why a wait ended.
enum Outcome : int32_t {
  kDone = 0,
  kLookAround = 1,   // a control socket is readable, or the parent was notified
  kTimeout = 2,      // of this wait; the caller decides whether it is an error
  kInterrupted = 3,  // by a signal; Python's handlers should run
};

// The parent's own words. `request_number` is under the pool's lock, since one thread at a time sends. Any
// number of threads wait and use the atomics.
struct Parent {
  Board board;
  const int64_t* stops;    // [num_workers] end of each worker's slots, which start at the previous end
  const int32_t* sockets;  // [num_sockets] descriptors of control sockets; one may stand for several sockets
  uint32_t num_sockets;
  int64_t request_number;                // latest request; workers serve requests in this order
  std::atomic<uint32_t> waiters;         // number of threads in `wait`
  std::atomic<uint32_t> seen_notices;    // value of `parent_notices` at the last poll
  std::atomic<int64_t> looked_ns;        // time of the latest poll of the sockets by a wait
  std::atomic<int64_t> mean_wait_ns{0};  // average of the latest waits for completed slots
  int64_t longest_spin_ns = 0;           // a wait polls twice that average, unless that is more than this
  bool rings_once = false;               // whether a send to all envs uses `common_bell`
};

struct Worker {
  Board board;
  uint32_t index;
  uint32_t first, stop;     // range of its slots
  uint32_t seen_notices;    // number of received messages
  bool keeps_core = false;  // whether it wakes on the core where it fell asleep, unless others want that
};

// Returns the time of the monotonic clock.
int64_t now_ns();

// Requests short time slices for this thread. Returns null, or the reason why it keeps the default slices.
//
// If all cores are busy, a thread that is woken waits until a running thread has used up its slice of about
// 3 ms, and a step needs one wake in each direction. Since Linux 6.12 a thread with a shorter slice runs
// sooner, without more time in total. This needs no privilege. Threads and processes that this thread starts
// get the default slice (SCHED_FLAG_RESET_ON_FORK), since envs run programs of their own. That flag would
// also reset a negative nice value, so such a thread passes its slice on.
const char* request_short_slices();

// Dispatches `count` slots and wakes their workers.
void send(Parent& parent, uint32_t operation, const int64_t* slots, uint32_t count);

// Wakes a worker after a message was written to its control socket.
void notify_worker(Board& board, uint32_t worker);

// Waits up to `deadline` until `count` of the slots belong to the parent. May be called again after any
// outcome.
Outcome wait(Parent& parent, const int64_t* slots, uint32_t num_slots, uint32_t count, int64_t deadline);

// Called before the control sockets are polled; earlier notices no longer end a wait.
void mark_notices_seen(Parent& parent);

// Waits for work or a notice. `count` becomes 0 for a notice, else the number of slots with one `operation`.
// After `look_around_ns` without either, or a signal, `count` is 0 and `operation` is `kEnd`.
// `slots` has room for all slots of the worker. While this core is busy, a thread of this process makes the
// kernel look more often whether the worker may run.
void take(Worker& worker, uint32_t* operation, int64_t* slots, uint32_t* count);

// Marks slots as completed and wakes the parent if it sleeps for them.
void post(Worker& worker, const int64_t* slots, uint32_t count);

// Makes the parent poll its control sockets.
void notify_parent(Board& board);

}  // namespace jaxvec
