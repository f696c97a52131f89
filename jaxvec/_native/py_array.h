// NumPy's arrays as C++'s `Array`s, and the other way round.
#pragma once

#include <vector>

#include "pool.h"
#include "python.h"

namespace jaxvec {

// Takes the items of a sequence; false if a Python error is set.
inline bool to_list(PyObject* sequence, std::vector<Ref>* items) {
  const Py_ssize_t count = PySequence_Size(sequence);
  for (Py_ssize_t i = 0; i < count; ++i) {
    items->push_back(Ref(PySequence_GetItem(sequence, i)));
    if (!items->back()) return false;
  }
  return count >= 0;
}

// Borrows the memory of arrays; false if a Python error is set.
struct Arrays {
  std::vector<Array> arrays;
  std::vector<std::vector<int64_t>> dims;

  bool take(const std::vector<Ref>& given) {
    for (const Ref& each : given) {
      PyArrayObject* array = AsArray(each.get());
      if (!PyArray_Check(each.get()) || !PyArray_ISCARRAY_RO(array)) {
        PyErr_SetString(PyExc_TypeError, "contiguous arrays are needed");
        return false;
      }
      PyArray_Descr* dtype = PyArray_DESCR(array);
      const auto rank = static_cast<uint32_t>(PyArray_NDIM(array));
      dims.emplace_back(PyArray_DIMS(array), PyArray_DIMS(array) + rank);
      const auto kind = static_cast<unsigned char>(dtype->kind);
      arrays.push_back({PyArray_DATA(array), dims.back().data(), rank,
                        kind + 256 * static_cast<uint32_t>(PyArray_ITEMSIZE(array)), nullptr});
    }
    return true;
  }
};

// Returns an array of this dtype that lies in somebody's memory; null for an error.
inline Ref make_array(PyObject* dtype, const std::vector<npy_intp>& dims, void* data) {
  auto* descr = reinterpret_cast<PyArray_Descr*>(Py_NewRef(dtype));  // which the call takes over
  return Ref(PyArray_NewFromDescr(&PyArray_Type, descr, static_cast<int>(dims.size()), dims.data(), nullptr,
                                  data, NPY_ARRAY_CARRAY, nullptr));
}

}  // namespace jaxvec
