// What the files that speak to Python share: its C API and NumPy's, references, and a way to let go of the
// GIL.
//
// The limited API makes one library serve every Python from 3.11 on. The GIL is held wherever nothing else is
// said.
#pragma once

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define NPY_TARGET_VERSION NPY_2_0_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL jaxvec_arrays
#ifndef JAXVEC_IMPORTS_NUMPY
#define NO_IMPORT_ARRAY  // module.cc does it for all
#endif
#include <numpy/arrayobject.h>
#include <unistd.h>

#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>

struct Release {
  void operator()(PyObject* object) const { Py_XDECREF(object); }
};
using Ref = std::unique_ptr<PyObject, Release>;

inline Ref Share(PyObject* object) { return Ref(Py_NewRef(object)); }

inline PyArrayObject* AsArray(PyObject* object) { return reinterpret_cast<PyArrayObject*>(object); }

// Returns a zeroed object of a type, of which nothing else is made ready.
template <typename T>
T* Allocate(PyTypeObject* type) {
  auto allocate = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
  return reinterpret_cast<T*>(allocate(type, 0));
}

// Frees an object, of which all else is done.
inline void Free(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(object);
  Py_DECREF(type);
}

// Casts a function that takes keyword arguments for a table of methods, which has one type for all.
inline PyCFunction AsMethod(PyCFunctionWithKeywords function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

inline void TakeGil(PyThreadState* state) {
  try {
    PyEval_RestoreThread(state);
  } catch (...) {
    // Once the interpreter has ended, Python before 3.14 ends a daemon thread here. That would unwind our
    // frames, which would drop references without the GIL. So the thread sleeps for good, as from 3.14 on.
    for (;;) pause();
  }
}

// Returns what `work` does while other threads run Python; `None` to Python if that is nothing.
template <typename Work>
auto WithoutGil(const Work& work) {
  PyThreadState* const state = PyEval_SaveThread();
  if constexpr (std::is_void_v<decltype(work())>) {
    work();
    TakeGil(state);
    return Py_NewRef(Py_None);
  } else {
    auto result = work();
    TakeGil(state);
    return result;
  }
}

// An object of Python that owns a `T` of C++.
template <typename T>
struct Owner {
  PyObject_HEAD T* own;
};

template <typename T>
T& OwnOf(PyObject* object) {
  return *reinterpret_cast<Owner<T>*>(object)->own;
}

template <typename T>
PyObject* MakeOwner(PyTypeObject* type, std::unique_ptr<T> own) {
  auto* object = Allocate<Owner<T>>(type);
  if (object != nullptr) object->own = own.release();
  return reinterpret_cast<PyObject*>(object);
}

template <typename T>
void DeallocateOwner(PyObject* object) {
  delete reinterpret_cast<Owner<T>*>(object)->own;
  Free(object);
}

// An argument of numbers, as a contiguous array of `T`; or `None`, of which `data` is null.
template <typename T, int type>
struct Numbers {
  Ref array;
  T* data = nullptr;
  uint32_t count = 0;

  // For "O&".
  static int Convert(PyObject* given, void* to) {
    auto* self = static_cast<Numbers*>(to);
    if (given == Py_None) return 1;
    constexpr int kFlags = NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_ALIGNED | NPY_ARRAY_FORCECAST;
    self->array = Ref(PyArray_FROM_OTF(given, type, kFlags));
    if (!self->array) return 0;
    self->data = static_cast<T*>(PyArray_DATA(AsArray(self->array.get())));
    self->count = static_cast<uint32_t>(PyArray_SIZE(AsArray(self->array.get())));
    return 1;
  }
};
using Slots = Numbers<const int64_t, NPY_INT64>;
using Generation = Numbers<const uint32_t, NPY_UINT32>;

// An array that others read and write, too, so it must be as it is said to be; or `None`.
template <typename T>
struct Words {
  T* data = nullptr;
  npy_intp count = 0;

  // For "O&".
  static int Convert(PyObject* given, void* to) {
    auto* self = static_cast<Words*>(to);
    if (given == Py_None) return 1;
    if (!PyArray_Check(given) || !PyArray_ISCARRAY(AsArray(given)) ||
        PyArray_ITEMSIZE(AsArray(given)) != sizeof(T)) {
      PyErr_SetString(PyExc_TypeError, "an array in shared memory has another type or layout than in C++");
      return 0;
    }
    self->data = static_cast<T*>(PyArray_DATA(AsArray(given)));
    self->count = PyArray_SIZE(AsArray(given));
    return 1;
  }
};

// Adds what a file has to the module; false if a Python error is set.
bool AddDispatch(PyObject* module);
bool AddPool(PyObject* module);
bool AddCalls(PyObject* module);
bool AddStepper(PyObject* module);
