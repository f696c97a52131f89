// What the bindings share: exceptions that are passed on, and conversions of NumPy's arrays to `Array`s.
#pragma once

#include <vector>

#include "engine.h"
#include "python.h"

namespace jaxvec {

// Removes and returns the exception that ended this thread's latest move of local envs; null if there is
// none.
Ref take_failure();

// Removes and returns the Python error that is set, as an exception.
inline Ref take_exception() {
  PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
  PyErr_Fetch(&type, &value, &traceback);
  // After `sys.exit(5)` the value is 5, until this makes it an exception.
  PyErr_NormalizeException(&type, &value, &traceback);
  if (value != nullptr && traceback != nullptr) PyException_SetTraceback(value, traceback);
  Py_XDECREF(type);
  Py_XDECREF(traceback);
  return Ref(value);
}

// Throws an exception that `take_exception` returned.
[[noreturn]] inline void raise_again(const Ref& exception) {
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.get())), exception.get());
  throw PythonError();
}

// Arrays that borrow their memory from NumPy's.
struct Arrays {
  std::vector<Ref> items;
  std::vector<Array> arrays;
  std::vector<std::vector<int64_t>> dims;  // to which `arrays` point
};

inline void read(PyObject* from, Arrays* to) {
  read(from, &to->items);
  for (const Ref& item : to->items) {
    PyArrayObject* array = as_array(item.get());
    if (!PyArray_Check(item.get()) || !PyArray_ISCARRAY_RO(array)) {
      raise(PyExc_TypeError, "expected a C-contiguous array, not %R", Py_TYPE(item.get()));
    }
    const auto rank = static_cast<uint32_t>(PyArray_NDIM(array));
    to->dims.emplace_back(PyArray_DIMS(array), PyArray_DIMS(array) + rank);
    to->arrays.push_back({PyArray_DATA(array), to->dims.back().data(), rank, dtype_in(array), nullptr});
  }
}

// Returns an array over memory that it does not own.
inline Ref make_array(PyArray_Descr* dtype, const std::vector<npy_intp>& dims, void* data) {
  Py_IncRef(reinterpret_cast<PyObject*>(dtype));  // PyArray_NewFromDescr takes this reference
  return own(PyArray_NewFromDescr(&PyArray_Type, dtype, static_cast<int>(dims.size()), dims.data(), nullptr,
                                  data, NPY_ARRAY_CARRAY, nullptr));
}

}  // namespace jaxvec
