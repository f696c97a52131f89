// Counts signals, for threads that Python's own signal handling never reaches.
//
// Python runs its handlers in the main thread only, and only between two of its instructions. A compiled
// program has none: nobody would hear of Ctrl-C, or of the SIGTERM that announces a preemption, before it
// ends.
#pragma once

#include <cstdint>

namespace jaxvec {

// Counts from now on, and passes every signal on to the handler that is there. Does nothing where there
// is none, or where it counts already. Whoever sets a handler later ends the counting, until this is called
// again: SIGINT's at once, since notebooks set one for each cell; others' a moment later.
void watch_signals();

// Returns how many SIGINT there were.
uint32_t interrupts();

// Returns how many there were of all that are watched.
uint32_t signals();

}  // namespace jaxvec
