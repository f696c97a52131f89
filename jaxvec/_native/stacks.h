// Native stacks of a process that hangs, after the Python stacks that `faulthandler` writes.
#pragma once

namespace jaxvec {

// Lets the handler of `signal`, which is that of `faulthandler`, be followed by one that writes the native
// stack of the same thread and a zero byte to the descriptor `memory`. Returns false if there is no handler.
bool add_native_stack(int signal, int memory);

}  // namespace jaxvec
