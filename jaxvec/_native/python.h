// Helpers for the files that use Python's C API: owned references, errors as exceptions, work without the
// GIL, Python objects that hold a C++ object, and functions with converted arguments.
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
#include <initializer_list>
#include <memory>
#include <new>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "engine.h"

static_assert(std::is_same_v<int64_t, long>);  // the format "l" builds an int64_t

struct Release {
  void operator()(PyObject* object) const { Py_XDECREF(object); }
};
using Ref = std::unique_ptr<PyObject, Release>;

inline Ref share(PyObject* object) { return Ref(Py_NewRef(object)); }

inline PyArrayObject* as_array(PyObject* object) { return reinterpret_cast<PyArrayObject*>(object); }

// Returns NumPy's kind + 256 * item size in bytes.
inline uint32_t dtype_in(PyArrayObject* array) {
  const auto kind = static_cast<unsigned char>(PyArray_DESCR(array)->kind);
  return kind + 256 * static_cast<uint32_t>(PyArray_ITEMSIZE(array));
}

// Thrown while a Python error is set; `call_with` passes the error on.
struct PythonError {};

inline void check(bool done) {
  if (!done) throw PythonError();
}

// Owns a new reference; throws if it is null.
inline Ref own(PyObject* object) {
  check(object != nullptr);
  return Ref(object);
}

// Converts the answer of Python's C API to a question.
inline bool is_true(int answer) {
  check(answer >= 0);
  return answer != 0;
}

// Clears the Python error that is set, if there is one. Returns whether there was.
inline bool clear_error() {
  const bool is_set = PyErr_Occurred() != nullptr;
  PyErr_Clear();
  return is_set;
}

template <typename... Arguments>
[[noreturn]] void raise(PyObject* type, const char* format, Arguments... arguments) {
  PyErr_Format(type, format, arguments...);
  throw PythonError();
}

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

// A name of attributes or keys.
class Name {
 public:
  explicit Name(const char* text) : text_(text) {}
  operator PyObject*() {
    if (object_ == nullptr) object_ = own(PyUnicode_InternFromString(text_)).release();
    return object_;
  }

 private:
  const char* const text_;
  PyObject* object_ = nullptr;
};

// Looks up a borrowed value in a dict; null if there is none.
inline PyObject* find(PyObject* dict, PyObject* key) {
  PyObject* const value = PyDict_GetItemWithError(dict, key);
  check(value != nullptr || PyErr_Occurred() == nullptr);
  return value;
}

inline void set_item(PyObject* dict, PyObject* key, PyObject* value) {
  check(PyDict_SetItem(dict, key, value) == 0);
}

// Returns a borrowed item of a list.
inline PyObject* item_of(PyObject* list, Py_ssize_t index) {
  PyObject* const item = PyList_GetItem(list, index);
  check(item != nullptr);
  return item;
}

// Calls a function of Python's that takes the GIL.
//
// Once the interpreter has ended, Python before 3.14 ends a daemon thread there, by unwinding its stack. That
// would drop our references without the GIL. So the thread sleeps forever, as from 3.14 on.
template <typename Take>
auto take_gil(const Take& take) try {
  return take();
} catch (...) {
  for (;;) pause();
}

// Holds the GIL, in any thread.
//
// A thread of XLA has no Python thread state. `PyGILState_Release` would delete the one that
// `PyGILState_Ensure` creates, which together take 17 us, so the first call in a thread keeps it. It stays
// after the thread's end; XLA keeps its threads.
class WithGil {
 public:
  WithGil() : state_(take_gil(ensure)) {}
  ~WithGil() { PyGILState_Release(state_); }
  WithGil(const WithGil&) = delete;

 private:
  static PyGILState_STATE ensure() {
    const bool is_new = PyGILState_GetThisThreadState() == nullptr;
    const PyGILState_STATE state = PyGILState_Ensure();
    if (is_new) PyGILState_Ensure();  // never released
    return state;
  }

  const PyGILState_STATE state_;
};

// Runs `work` while other threads may run Python, and returns its result.
template <typename Work>
auto without_gil(const Work& work) {
  struct Restore {
    ~Restore() {
      take_gil([this] { PyEval_RestoreThread(state); });
    }
    PyThreadState* const state = PyEval_SaveThread();
  } const restore;
  return work();
}

// A Python object that holds a `T`. The functions of this module make it, Python code can't.
template <typename T>
struct Owner {
  PyObject_HEAD T own;
};

template <typename T>
inline PyTypeObject* type_of = nullptr;  // of Owner<T>

template <typename T>
T& own_of(PyObject* object) {
  return reinterpret_cast<Owner<T>*>(object)->own;
}

// Returns an object with a default-constructed `T`.
template <typename T>
Ref make_owner() {
  Ref object = own(PyType_GenericAlloc(type_of<T>, 0));
  new (&own_of<T>(object.get())) T();
  return object;
}

template <typename T>
void deallocate_owner(PyObject* object) {
  own_of<T>(object).~T();
  PyTypeObject* type = Py_TYPE(object);
  PyObject_Free(object);
  Py_DECREF(type);
}

// Returns the definitions with an end, for Python, which uses them for ever.
inline PyMethodDef* keep(std::initializer_list<PyMethodDef> definitions) {
  auto* const kept = new std::vector<PyMethodDef>(definitions);
  kept->push_back({nullptr, nullptr, 0, nullptr});
  return kept->data();
}

// Creates the type of `Owner<T>` with methods.
template <typename T>
void make_type(const char* name, std::initializer_list<PyMethodDef> methods) {
  PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(deallocate_owner<T>)},
                         {Py_tp_methods, keep(methods)},
                         {0, nullptr}};
  constexpr unsigned kFlags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION;
  PyType_Spec spec = {name, sizeof(Owner<T>), 0, kFlags, slots};
  type_of<T> = reinterpret_cast<PyTypeObject*>(own(PyType_FromSpec(&spec)).release());
}

inline void add_functions(PyObject* module, std::initializer_list<PyMethodDef> functions) {
  check(PyModule_AddFunctions(module, keep(functions)) == 0);
}

// An argument of numbers, converted to a contiguous array of `T`. `data` is null for `None`.
template <typename T, int type>
struct Numbers {
  Ref array;
  const T* data = nullptr;
  uint32_t count = 0;
};
using Slots = Numbers<int64_t, NPY_INT64>;
using Generation = Numbers<uint32_t, NPY_UINT32>;

// Arguments that borrow their memory from NumPy's arrays.
struct Arrays {
  std::vector<Ref> items;
  std::vector<jaxvec::Array> arrays;
};

// Converters of arguments; they throw if a Python error is set.
inline void read(PyObject* from, PyObject** to) { *to = from; }

inline void read(PyObject* from, PyArrayObject** to) { *to = as_array(from); }  // Python has checked it

inline void read(PyObject* from, const char** to) {
  *to = PyUnicode_AsUTF8AndSize(from, nullptr);
  check(*to != nullptr);
}

template <typename T>
std::enable_if_t<std::is_integral_v<T>> read(PyObject* from, T* to) {
  *to = static_cast<T>(PyLong_AsUnsignedLongLongMask(from));
  check(PyErr_Occurred() == nullptr);
}

// Reads the items of a sequence.
inline void read(PyObject* from, std::vector<Ref>* items) {
  const Py_ssize_t count = PySequence_Size(from);
  check(count >= 0);
  for (Py_ssize_t i = 0; i < count; ++i) items->push_back(own(PySequence_GetItem(from, i)));
}

inline void read(PyObject* from, Arrays* to) {
  read(from, &to->items);
  for (const Ref& item : to->items) {
    PyArrayObject* array = as_array(item.get());
    if (!PyArray_Check(item.get()) || !PyArray_ISCARRAY_RO(array)) {
      raise(PyExc_TypeError, "expected a C-contiguous array, not %R", Py_TYPE(item.get()));
    }
    const auto rank = static_cast<uint32_t>(PyArray_NDIM(array));
    to->arrays.push_back({PyArray_DATA(array), PyArray_DIMS(array), rank, dtype_in(array), nullptr});
  }
}

template <typename T, int type>
void read(PyObject* from, Numbers<T, type>* to) {
  if (from == Py_None) return;
  constexpr int kFlags = NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_ALIGNED | NPY_ARRAY_FORCECAST;
  to->array = own(PyArray_FROM_OTF(from, type, kFlags));
  to->data = static_cast<T*>(PyArray_DATA(as_array(to->array.get())));
  to->count = static_cast<uint32_t>(PyArray_SIZE(as_array(to->array.get())));
}

// Reads the address of an array that Python or other processes use, too, so it is never converted. `None`
// leaves the address unchanged.
template <typename T>
std::enable_if_t<std::is_integral_v<T>> read(PyObject* from, T** to) {
  if (from == Py_None) return;
  if (!PyArray_Check(from) || !PyArray_ISCARRAY(as_array(from)) ||
      PyArray_ITEMSIZE(as_array(from)) != sizeof(T)) {
    raise(PyExc_TypeError, "expected a writeable C-contiguous array with items of %zu bytes", sizeof(T));
  }
  *to = static_cast<T*>(PyArray_DATA(as_array(from)));
}

// Reads the items of a dict of arguments, by name.
struct Items {
  template <typename T>
  void operator()(const char* name, T* to) const {
    PyObject* const value = PyDict_GetItemString(dict, name);
    if (value == nullptr) raise(PyExc_TypeError, "expected an item '%s'", name);
    read(value, to);
  }

  PyObject* dict;
};

// Converters of results. A function may also return nothing.
inline PyObject* to_python(Ref value) { return value.release(); }
inline PyObject* to_python(bool value) { return PyBool_FromLong(value); }
inline PyObject* to_python(uint32_t value) { return PyLong_FromUnsignedLong(value); }
inline PyObject* to_python(const char* value) { return Py_BuildValue("z", value); }

template <typename... Arguments, typename Call, size_t... i>
PyObject* call_with(PyObject* const* given, Py_ssize_t count, const Call& call,
                    std::index_sequence<i...>) try {
  if (count != sizeof...(i)) raise(PyExc_TypeError, "expected %zu arguments, not %zd", sizeof...(i), count);
  std::tuple<std::decay_t<Arguments>...> values;
  (read(given[i], &std::get<i>(values)), ...);
  if constexpr (std::is_void_v<decltype(call(std::get<i>(values)...))>) {
    call(std::get<i>(values)...);
    return Py_NewRef(Py_None);
  } else {
    return to_python(call(std::get<i>(values)...));
  }
} catch (const PythonError&) {
  return nullptr;
}

// Makes a Python function of a function in C++, or a method of one that takes a `T&` first.
template <typename Function, Function function>
struct Definition;
template <typename Result, typename... Arguments, Result (*function)(Arguments...)>
struct Definition<Result (*)(Arguments...), function> {
  static PyObject* call(PyObject*, PyObject* const* given, Py_ssize_t count) {
    return call_with<Arguments...>(given, count, function, std::index_sequence_for<Arguments...>());
  }
};
template <typename T, typename Result, typename... Arguments, Result (*function)(T&, Arguments...)>
struct Definition<Result (*)(T&, Arguments...), function> {
  static PyObject* call(PyObject* self, PyObject* const* given, Py_ssize_t count) {
    const auto method = [&](auto&... values) { return function(own_of<T>(self), values...); };
    return call_with<Arguments...>(given, count, method, std::index_sequence_for<Arguments...>());
  }
};

template <auto function>
PyMethodDef define(const char* name) {
  const auto call = reinterpret_cast<void (*)()>(Definition<decltype(function), function>::call);
  return {name, reinterpret_cast<PyCFunction>(call), METH_FASTCALL, nullptr};
}

// Removes and returns the exception that ended this thread's latest move of local envs; null if there is
// none.
Ref take_failure();

// Each adds the functions of one file to the module.
void add_engine(PyObject* module);
void add_calls(PyObject* module);
void add_handlers(PyObject* module);
void add_stepper(PyObject* module);
void add_states(PyObject* module);
