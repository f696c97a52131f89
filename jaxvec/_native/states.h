// Functions of the module that save and restore states of envs incrementally; see states.cc.
#pragma once

#include "python.h"

enum class Outcome {
  kDone,
  kFallback,  // Python must handle this case; no error is set
  kError,     // a Python error is set
};

PyObject* SaveChanges(PyObject* module, PyObject* args);
PyObject* RestoreChanges(PyObject* module, PyObject* args);

// Prepares both functions; false if a Python error is set.
bool InitStates();
