// A compiled program's call into a pool, in the form in which C++ or Python answers it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine.h"

namespace jaxvec {

struct Call {
  uint32_t verb;         // `Verb` of move.py
  uint32_t status;       // progress so far, a `Status`
  int fresh;             // whether a reset starts from the pool, without a handle
  uint32_t num_extra;    // bytes
  int64_t fingerprint;   // of the pool specification that the program was compiled for
  int64_t waited_ns;     // time waited so far, if `status` is kUnderWay
  const uint8_t* extra;  // further arguments, pickled
  std::vector<Array> operands;
  std::vector<Array> results;
  uint32_t interrupts;  // value of `interrupts()` when the call started
  uint32_t on_device;   // whether a program on a GPU calls; operands and results are in host memory anyway
  uint32_t pool;        // id of the pool; 0 if the first operand is not a token
  // For a program on a GPU: the device memory of all small results, which one last copy fills.
  void* packed;
  uint64_t packed_bytes;
  void* raised;  // for a caller in Python: the `Ref` that gets the exception that ends the call; else null
};

// Finds the operands or results of a call in arrays, of which the first may hold several: `layout` is that of
// `Packing` in callbacks/_packing.py. Returns whether it is consistent with the arrays.
bool unpack(const int64_t* layout, const int64_t* end, const std::vector<Array>& arrays,
            std::vector<Array>* found);

// A function with which Python answers a call, or ends it with an error and returns the error's text. Null
// while there is no interpreter.
using Answer = std::string (*)(Call&);
void set_python(Answer answer);

// Returns the engine of the pool that a call is for; null if it is closed or uses the portable dispatch.
std::shared_ptr<Engine> engine_of(const Call& call);

// Lets Python answer a call, or finish it if `status` is kUnderWay. Returns the error's text, empty on
// success.
std::string ask_python(Call& call, Status status, Engine* engine);

// Returns whether a handled signal, such as Ctrl-C, arrived since the last call of this function. It must end
// a program with quick steps, too, which never waits for long. Python decides whether it concerns this
// thread.
bool interrupted();

// Answers a call with operands and results in host memory. Returns as `ask_python`.
std::string answer_on_host(Call& call);

}  // namespace jaxvec
