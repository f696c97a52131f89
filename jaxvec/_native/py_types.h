// Types of the bindings: the parent's end of the dispatch, and conversions of NumPy's arrays to `Array`s.
#pragma once

#include <vector>

#include "engine.h"
#include "python.h"

namespace jaxvec {

// The parent's end of the dispatch, as Python's `Parent` holds it.
struct ParentEnd {
  Ref marks;  // keeps the segment mapped while `parent` has its addresses
  std::vector<int64_t> stops;
  std::vector<int32_t> sockets;
  Parent parent{};
};

extern PyTypeObject* parent_type;  // of Owner<ParentEnd>

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

// Appends the items of a sequence; false if a Python error is set.
inline bool append_items(PyObject* sequence, std::vector<Ref>* items) {
  const Py_ssize_t count = PySequence_Size(sequence);
  for (Py_ssize_t i = 0; i < count; ++i) {
    items->push_back(Ref(PySequence_GetItem(sequence, i)));
    if (!items->back()) return false;
  }
  return count >= 0;
}

// Arrays that borrow their memory from NumPy's.
struct Arrays {
  std::vector<Array> arrays;
  std::vector<std::vector<int64_t>> dims;  // to which `arrays` point

  // Appends the arrays of a sequence, and keeps them in `items`; false if a Python error is set.
  bool borrow(PyObject* sequence, std::vector<Ref>* items) {
    if (!append_items(sequence, items)) return false;
    for (const Ref& each : *items) {
      PyArrayObject* array = as_array(each.get());
      if (!PyArray_Check(each.get()) || !PyArray_ISCARRAY_RO(array)) {
        PyErr_Format(PyExc_TypeError, "expected a C-contiguous array, not %R", Py_TYPE(each.get()));
        return false;
      }
      const auto rank = static_cast<uint32_t>(PyArray_NDIM(array));
      dims.emplace_back(PyArray_DIMS(array), PyArray_DIMS(array) + rank);
      const auto kind = static_cast<unsigned char>(PyArray_DESCR(array)->kind);
      arrays.push_back({PyArray_DATA(array), dims.back().data(), rank,
                        kind + 256 * static_cast<uint32_t>(PyArray_ITEMSIZE(array)), nullptr});
    }
    return true;
  }
};

// Returns an array over memory that it does not own; null if a Python error is set.
inline Ref make_array(PyArray_Descr* dtype, const std::vector<npy_intp>& dims, void* data) {
  Py_IncRef(reinterpret_cast<PyObject*>(dtype));  // PyArray_NewFromDescr takes this reference
  return Ref(PyArray_NewFromDescr(&PyArray_Type, dtype, static_cast<int>(dims.size()), dims.data(), nullptr,
                                  data, NPY_ARRAY_CARRAY, nullptr));
}

}  // namespace jaxvec
