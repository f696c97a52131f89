// Counts signals for threads that Python's signal handling does not reach.
//
// Python runs handlers only in the main thread, between two bytecode instructions. A compiled program runs no
// bytecode, so it would not notice Ctrl-C, or the SIGTERM that announces a preemption, before it ends.
#pragma once

#include <cstdint>

namespace jaxvec {

// Starts counting; each signal is then passed to its present handler. Signals without a handler are left
// alone. A handler that is set later ends the counting until the next call: calls re-install SIGINT's counter
// at once, since notebooks set a handler for each cell, and the others after up to 20 ms.
void watch_signals();

// Returns the number of SIGINTs so far.
uint32_t interrupts();

// Returns whether a counted signal arrived since the last call of this function. It must end a program with
// quick steps, too, which never waits for long. Python decides whether it concerns this thread.
bool interrupted();

}  // namespace jaxvec
