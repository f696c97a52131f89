// Methods of the module; see states.cc.

#pragma once

#include "python.h"

enum class Outcome {
  kDone,
  kOther,  // not a case for these files; no error is set
  kError,  // a Python error is set
};

PyObject* TakeAgain(PyObject* module, PyObject* args);
PyObject* PutAgain(PyObject* module, PyObject* args);

// Makes ready for them; false if a Python error is set.
bool InitStates();
