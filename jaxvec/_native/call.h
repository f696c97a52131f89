// A compiled program's call into a pool, as Python sees it when it has to answer one.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "pool.h"

namespace jaxvec {

struct Call {
  uint32_t verb;         // `Verb` of move.py
  uint32_t status;       // how far it has come, of `Status`
  uint32_t fresh;        // of a reset: it starts from the pool, not from a handle
  uint32_t num_extra;    // bytes
  int64_t fingerprint;   // of the specification that the program was made for
  int64_t waited_ns;     // if it is kUnderWay
  const uint8_t* extra;  // what else the call says, pickled
  const Array* operands;
  const Array* results;
  uint32_t num_operands;
  uint32_t num_results;
  uint32_t interrupts;  // how many there had been when the call began
  uint32_t on_device;   // whether a GPU's program calls; operands and results are in our memory all the same
  uint32_t pool;        // its number; 0 if the first operand is no token
  // Of a GPU's program: memory there that all results in it reach by one copy, the last. Null if it is the
  // token's.
  void* packed;
  uint64_t packed_bytes;
};

// Sets what has Python answer a call, or end it with an error, whose text it returns; null when the
// interpreter ends.
using Answer = std::string (*)(Call&);
void set_python(Answer answer);

// The pool that a call is for; null if it is closed, or not with the native hand-off.
std::shared_ptr<Pool> pool_of(const std::vector<Array>& operands);

// Has Python answer a call, or end it where `status` says that the pool has begun. Returns the error's
// text, or an empty one.
std::string ask_python(Call& call, Status status, Pool* pool);

// Whether a signal came since somebody asked: Ctrl-C, or another that is handled. A program whose steps are
// quick never waits for long, but has to end, too; Python decides whether it is for this thread to hear.
bool interrupted();

// Answers a call whose operands and results are in this process's memory; as `ask_python`.
std::string answer_on_host(Call& call);

}  // namespace jaxvec
