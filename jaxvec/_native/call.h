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
  bool fresh;            // whether a reset starts from the pool, without a handle
  int64_t fingerprint;   // of the pool specification that the program was compiled for
  const uint8_t* extra;  // further arguments, pickled
  size_t num_extra;      // bytes
  uint32_t interrupts;   // value of `interrupts()` when the call started
  std::vector<Array> operands = {};
  std::vector<Array> results = {};
  // For a program on a GPU: the device memory of all small results, which one last copy fills.
  void* packed = nullptr;
  size_t packed_bytes = 0;
  void* raised = nullptr;  // for a caller in Python: the `Ref` that gets the exception that ends the call
  uint32_t status = 0;     // progress so far, a `Status`
  int64_t waited_ns = 0;   // time waited so far, if `status` is kUnderWay
  bool on_device = false;  // whether a program on a GPU calls; operands and results are in host memory anyway
  uint32_t pool = 0;       // id of the pool; 0 if the first operand is not a token
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

// Answers a call with operands and results in host memory. Returns as `ask_python`.
std::string answer_on_host(Call& call);

}  // namespace jaxvec
