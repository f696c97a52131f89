// Methods of the module; see states.cc.

#ifndef JAXVEC_STEPPER_STATES_H_
#define JAXVEC_STEPPER_STATES_H_

#include "api.h"

PyObject* TakeAgain(PyObject* module, PyObject* args);
PyObject* PutAgain(PyObject* module, PyObject* args);

// Makes ready for them; false if a Python error is set.
bool InitStates();

#endif  // JAXVEC_STEPPER_STATES_H_
