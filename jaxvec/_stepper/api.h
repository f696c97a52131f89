// What the files of this extension share: references, outcomes, and Python's and NumPy's C APIs.
//
// The limited API makes one library serve every Python from 3.11 on. The GIL is held throughout.

#ifndef JAXVEC_STEPPER_API_H_
#define JAXVEC_STEPPER_API_H_

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define NPY_TARGET_VERSION NPY_2_0_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL jaxvec_stepper_arrays  // compiled.cc imports it for all
#include <numpy/arrayobject.h>

#include <memory>

struct Release {
  void operator()(PyObject* object) const { Py_XDECREF(object); }
};
using Ref = std::unique_ptr<PyObject, Release>;

inline Ref Share(PyObject* object) { return Ref(Py_NewRef(object)); }

enum class Outcome {
  kDone,
  kOther,  // not a case for these files; no error is set
  kError,  // a Python error is set
};

inline PyArrayObject* AsArray(PyObject* object) { return reinterpret_cast<PyArrayObject*>(object); }

// Returns a zeroed object of a type, of which nothing else is made ready.
template <typename T>
T* Allocate(PyTypeObject* type) {
  auto allocate = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
  return reinterpret_cast<T*>(allocate(type, 0));
}

#endif  // JAXVEC_STEPPER_API_H_
