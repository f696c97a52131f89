// Counts Ctrl-C, for threads that Python's own signal handling never reaches.
//
// Python runs its handlers in the main thread only. Where that one is inside XLA, waiting for a program
// that waits for an env in a thread of XLA's, nobody would hear of Ctrl-C before the env is done.
#pragma once

#include <cstdint>

namespace jaxvec {

// Counts from now on, and passes every SIGINT on to the handler that is there. Does nothing where there
// is none, or where it counts already. Whoever sets a handler later ends the counting, until this is called
// again.
void watch_interrupts();

// Returns how many there were.
uint32_t interrupts();

}  // namespace jaxvec
