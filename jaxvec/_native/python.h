// Helpers for the files that use Python's C API: owned references, work without the GIL, Python objects that
// hold a C++ object, and converters of arguments.
//
// The limited API makes one library serve every Python from 3.11 on. Callers hold the GIL, except inside of
// `without_gil`.
#pragma once

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define NPY_TARGET_VERSION NPY_1_21_API_VERSION  // workers in another interpreter may have an older NumPy
#define PY_ARRAY_UNIQUE_SYMBOL jaxvec_arrays
#ifndef JAXVEC_IMPORTS_NUMPY
#define NO_IMPORT_ARRAY  // module.cc imports NumPy's functions for all files
#endif
#include <numpy/arrayobject.h>
#include <unistd.h>

#include <cstdint>
#include <memory>
#include <new>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

static_assert(std::is_same_v<int64_t, long>);  // the format "l" parses and builds an int64_t

struct Release {
  void operator()(PyObject* object) const { Py_XDECREF(object); }
};
using Ref = std::unique_ptr<PyObject, Release>;

inline Ref share(PyObject* object) { return Ref(Py_NewRef(object)); }

inline PyArrayObject* as_array(PyObject* object) { return reinterpret_cast<PyArrayObject*>(object); }

// Returns a zeroed object of `type`, without calling a constructor.
template <typename T>
T* allocate(PyTypeObject* type) {
  auto allocate = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
  return reinterpret_cast<T*>(allocate(type, 0));
}

// Casts a function with keyword arguments to the one type that tables of methods have.
inline PyCFunction as_method(PyCFunctionWithKeywords function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

inline void take_gil(PyThreadState* state) {
  try {
    PyEval_RestoreThread(state);
  } catch (...) {
    // Once the interpreter has ended, Python before 3.14 ends a daemon thread here, by unwinding its stack.
    // That would drop our references without the GIL. So the thread sleeps forever, as from 3.14 on.
    for (;;) pause();
  }
}

// Holds the GIL, in any thread.
//
// A thread of XLA has no Python thread state. `PyGILState_Release` would delete the one that
// `PyGILState_Ensure` creates, which together take 17 us, so the first call in a thread keeps it. It stays
// after the thread's end; XLA keeps its threads.
class WithGil {
 public:
  WithGil() : state_(take()) {}
  ~WithGil() { PyGILState_Release(state_); }
  WithGil(const WithGil&) = delete;

 private:
  static PyGILState_STATE take() {
    try {
      const bool is_new = PyGILState_GetThisThreadState() == nullptr;
      const PyGILState_STATE state = PyGILState_Ensure();
      if (is_new) PyGILState_Ensure();  // never released
      return state;
    } catch (...) {  // as in `take_gil`
      for (;;) pause();
    }
  }

  const PyGILState_STATE state_;
};

// Runs `work` while other threads may run Python, and returns its result.
template <typename Work>
auto without_gil(const Work& work) {
  PyThreadState* const state = PyEval_SaveThread();
  if constexpr (std::is_void_v<decltype(work())>) {
    work();
    take_gil(state);
  } else {
    auto result = work();
    take_gil(state);
    return result;
  }
}

// A Python object that holds a `T`.
template <typename T>
struct Owner {
  PyObject_HEAD T own;
};

template <typename T>
T& own_of(PyObject* object) {
  return reinterpret_cast<Owner<T>*>(object)->own;
}

// Returns an object with a default-constructed `T`; null if a Python error is set.
template <typename T>
Ref make_owner(PyTypeObject* type) {
  auto* object = allocate<Owner<T>>(type);
  if (object != nullptr) new (&object->own) T();
  return Ref(reinterpret_cast<PyObject*>(object));
}

template <typename T>
void deallocate_owner(PyObject* object) {
  own_of<T>(object).~T();
  PyTypeObject* type = Py_TYPE(object);
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(object);
  Py_DECREF(type);
}

// Returns a new type of `Owner<T>`; null if a Python error is set. Python code can instantiate it only if the
// slots contain `Py_tp_new`.
template <typename T>
PyTypeObject* make_type(const char* name, std::vector<PyType_Slot> slots) {
  const bool has_new = slots[0].slot == Py_tp_new;
  slots.push_back({Py_tp_dealloc, reinterpret_cast<void*>(deallocate_owner<T>)});
  slots.push_back({0, nullptr});
  const unsigned flags = Py_TPFLAGS_DEFAULT | (has_new ? 0 : Py_TPFLAGS_DISALLOW_INSTANTIATION);
  PyType_Spec spec = {name, sizeof(Owner<T>), 0, flags, slots.data()};
  return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
}

// An argument of numbers, converted to a contiguous array of `T`. `data` is null for `None`.
template <typename T, int type>
struct Numbers {
  Ref array;
  T* data = nullptr;
  uint32_t count = 0;

  // For "O&".
  static int convert(PyObject* given, void* to) {
    auto* self = static_cast<Numbers*>(to);
    if (given == Py_None) return 1;
    constexpr int kFlags = NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_ALIGNED | NPY_ARRAY_FORCECAST;
    self->array = Ref(PyArray_FROM_OTF(given, type, kFlags));
    if (!self->array) return 0;
    self->data = static_cast<T*>(PyArray_DATA(as_array(self->array.get())));
    self->count = static_cast<uint32_t>(PyArray_SIZE(as_array(self->array.get())));
    return 1;
  }
};
using Slots = Numbers<const int64_t, NPY_INT64>;
using Generation = Numbers<const uint32_t, NPY_UINT32>;

// Converters of positional arguments; false if a Python error is set.
inline bool read(PyObject* from, PyObject** to) {
  *to = from;
  return true;
}
inline bool read(PyObject* from, bool* to) {
  const int truth = PyObject_IsTrue(from);
  *to = truth > 0;
  return truth >= 0;
}
inline bool read(PyObject* from, uint32_t* to) {
  *to = static_cast<uint32_t>(PyLong_AsUnsignedLongMask(from));
  return PyErr_Occurred() == nullptr;
}
inline bool read(PyObject* from, int64_t* to) {
  *to = PyLong_AsLong(from);
  return PyErr_Occurred() == nullptr;
}
template <typename T, int type>
bool read(PyObject* from, Numbers<T, type>* to) {
  return to->convert(from, to) != 0;
}

inline PyObject* to_python(PyObject* value) { return value; }
inline PyObject* to_python(bool value) { return PyBool_FromLong(value); }

// Makes a Python method of `function(own, arguments...)`, which may return nothing or what `to_python` takes.
// The method raises the Python error that the function has set, if any.
template <auto function>
struct Method;
template <typename T, typename Result, typename... Arguments, Result (*function)(T&, Arguments...)>
struct Method<function> {
  template <size_t... i>
  static PyObject* apply(PyObject* self, PyObject* const* given, std::index_sequence<i...>) {
    std::tuple<std::decay_t<Arguments>...> values;
    if (!(read(given[i], &std::get<i>(values)) && ...)) return nullptr;
    if constexpr (std::is_void_v<Result>) {
      function(own_of<T>(self), std::get<i>(values)...);
      return PyErr_Occurred() == nullptr ? Py_NewRef(Py_None) : nullptr;
    } else {
      const Result result = function(own_of<T>(self), std::get<i>(values)...);
      return PyErr_Occurred() == nullptr ? to_python(result) : nullptr;
    }
  }

  static PyObject* Call(PyObject* self, PyObject* const* given, Py_ssize_t count) {
    if (count == sizeof...(Arguments)) return apply(self, given, std::index_sequence_for<Arguments...>());
    return PyErr_Format(PyExc_TypeError, "expected %zu arguments, not %zd", sizeof...(Arguments), count);
  }
};

template <auto function>
PyMethodDef define(const char* name) {
  const auto call = reinterpret_cast<void (*)()>(Method<function>::Call);
  return {name, reinterpret_cast<PyCFunction>(call), METH_FASTCALL, nullptr};
}

// For "O&": reads the address of an array that Python or other processes use, too, so it is never converted.
// `None` leaves the address unchanged.
template <typename T>
int convert_shared(PyObject* given, void* to) {
  if (given == Py_None) return 1;
  if (!PyArray_Check(given) || !PyArray_ISCARRAY(as_array(given)) ||
      PyArray_ITEMSIZE(as_array(given)) != sizeof(T)) {
    PyErr_Format(PyExc_TypeError,
                 "expected a writeable C-contiguous array with items of %zu bytes in shared memory",
                 sizeof(T));
    return 0;
  }
  *static_cast<T**>(to) = static_cast<T*>(PyArray_DATA(as_array(given)));
  return 1;
}

// The result of a fast path in stepper.cc and states.cc.
enum class Outcome {
  kDone,
  kFallback,  // Python must handle this case; no error is set
  kError,     // a Python error is set
};

// Each adds the functions and types of one file to the module; false if a Python error is set.
bool add_dispatch(PyObject* module);
bool add_engine(PyObject* module);
bool add_calls(PyObject* module);
bool add_stepper(PyObject* module);
bool add_states(PyObject* module);
