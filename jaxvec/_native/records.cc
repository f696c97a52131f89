// What Python mirrors of our records and numbers, in text: Python compares it when it loads the library.
#include <cstddef>
#include <sstream>
#include <string>

#include "call.h"
#include "handoff.h"
#include "pool.h"
#include "trace.h"

// clang-format off: a line of text reads as a line of code

// A line for each: its name, its bytes, and of each field name, offset and bytes.
#define RECORD(type) \
  {                  \
    using T = type;  \
    out << #type << ' ' << sizeof(T)
#define FIELD(name) << ' ' << #name << ' ' << offsetof(T, name) << ' ' << sizeof(T::name)
// Or of an enumeration: its name, and of each value name and number.
#define VALUES(type) \
  {                  \
    out << #type
#define VALUE(name, value) << ' ' << #name << ' ' << static_cast<uint32_t>(value)
#define END      \
  ;              \
  out << '\n';   \
  }

namespace jaxvec {
namespace {

std::string describe() {
  std::ostringstream out;
  RECORD(Array) FIELD(data) FIELD(dims) FIELD(rank) FIELD(dtype) FIELD(nonzero) END
  RECORD(State) FIELD(last_caller) FIELD(open) FIELD(served) FIELD(devices) END
  RECORD(Plan)
    FIELD(id) FIELD(batch_size) FIELD(in_order) FIELD(together) FIELD(fingerprint) FIELD(wait_ns)
    FIELD(step_ns) FIELD(parent) FIELD(stops) FIELD(generation) FIELD(actions) FIELD(results) FIELD(num_actions)
    FIELD(num_results) FIELD(in_flight) FIELD(sent) FIELD(num_sent) FIELD(due) FIELD(needs_reset)
    FIELD(terminated) FIELD(truncated) END
  RECORD(Request)
    FIELD(verb) FIELD(caller_code) FIELD(new_generation) FIELD(num_slots) FIELD(num_sent) FIELD(slots)
    FIELD(generation) FIELD(sent) FIELD(actions) FIELD(results) FIELD(waited_ns) END
  RECORD(Span) FIELD(began) FIELD(ended) FIELD(thread) FIELD(what) END
  RECORD(Board)
    FIELD(num_slots) FIELD(num_workers) FIELD(spin_ns) FIELD(look_around_ns) FIELD(requested) FIELD(completed)
    FIELD(completed_at) FIELD(doorbell) FIELD(worker_notices) FIELD(asleep) FIELD(finished) FIELD(target)
    FIELD(sleepers) FIELD(parent_notices) END
  RECORD(Parent)
    FIELD(board) FIELD(sockets) FIELD(num_sockets) FIELD(request_number) FIELD(waiters) FIELD(seen_notices)
    FIELD(looked_ns) END
  RECORD(Worker) FIELD(board) FIELD(index) FIELD(first) FIELD(stop) FIELD(seen_notices) END
  RECORD(Call)
    FIELD(verb) FIELD(status) FIELD(fresh) FIELD(num_extra) FIELD(fingerprint) FIELD(waited_ns)
    FIELD(extra) FIELD(operands) FIELD(results) FIELD(num_operands) FIELD(num_results) FIELD(interrupts)
    FIELD(on_device) FIELD(pool) FIELD(packed) FIELD(packed_bytes)
    FIELD(error) FIELD(exception) END
  RECORD(Python)
    FIELD(answer) FIELD(ensure_gil) FIELD(release_gil) FIELD(run_signal_handlers) FIELD(take_exception)
    FIELD(make_exception) FIELD(make_int) FIELD(call) FIELD(release) END
  VALUES(Verb) VALUE(RESET, kReset) VALUE(STEP, kStep) VALUE(SEND, kSend) VALUE(RECV, kRecv)
    VALUE(SAVE, kSave) VALUE(RESTORE, kRestore) END
  VALUES(Status)
    VALUE(DONE, Status::kDone) VALUE(UNDER_WAY, Status::kUnderWay) VALUE(ELSEWHERE, Status::kElsewhere)
    VALUE(BARRED, Status::kBarred) VALUE(BUSY, Status::kBusy) VALUE(COPYING, Status::kCopying)
    VALUE(NO_SUCH_ENV, Status::kNoSuchEnv) VALUE(NAMED_TWICE, Status::kNamedTwice)
    VALUE(STALE, Status::kStale) VALUE(IN_FLIGHT, Status::kInFlight)
    VALUE(NEEDS_RESET, Status::kNeedsReset) VALUE(TOO_FEW, Status::kTooFew) VALUE(LATE, Status::kLate)
    VALUE(PART, Status::kPart) END
  return out.str();
}

}  // namespace
}  // namespace jaxvec

extern "C" __attribute__((visibility("default"))) const char* jaxvec_records() {
  static const std::string text = jaxvec::describe();
  return text.c_str();
}
