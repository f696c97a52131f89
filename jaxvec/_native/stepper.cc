// The stepping loop, compiled: for the ordinary step of an ordinary env, and the rows that it writes.
//
// It knows one case each, and leaves every other to Python, where all the rules are: `Stepper.run` returns
// to its caller with what `env.step` has returned, a `Writer` calls the function that it stands for. So what
// is here only has to be right about when a case is ordinary. Both are made in Python, which says what is
// what: `Stepper` in _envs/env_slice.py, `Writer` in _memory/rows.py. States of envs are in states.cc.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>

#include "states.h"

namespace {

// --- Rows ---

// `write(slot, value)` of a leaf, a dict or a tuple. The pointers are references of its own, or null.
struct Writer {
  PyObject_HEAD PyObject* write;  // takes every value, or raises
  PyObject* rows;                 // of a leaf: ndarray [n, ...] of numbers, contiguous
  PyObject* children;             // of a dict or tuple: a Writer or function each
  PyObject* keys;                 // of a dict
};

PyTypeObject* writer_type;

// Casts a row as NumPy would, if that loses nothing but a float's precision.
template <typename From, typename To>
bool Narrow(const char* from, char* to, npy_intp size) {
  const auto* source = reinterpret_cast<const From*>(from);
  auto* target = reinterpret_cast<To*>(to);
  bool lost = false;
  for (npy_intp i = 0; i < size; ++i) {
    if constexpr (std::numeric_limits<From>::is_integer) {
      target[i] = static_cast<To>(source[i]);
      lost |= static_cast<From>(target[i]) != source[i];
    } else {
      target[i] = static_cast<To>(source[i]);
      lost |= std::isinf(target[i]) && !std::isinf(source[i]);
    }
  }
  return !lost;
}

template <typename To>
bool StoreInteger(long long value, char* to) {
  const To stored = static_cast<To>(value);
  if (static_cast<long long>(stored) != value) return false;
  std::memcpy(to, &stored, sizeof(To));
  return true;
}

// Of a leaf without a shape: a Python integer, or NumPy's.
Outcome WriteInteger(int type, char* row, PyObject* value) {
  if (!PyIndex_Check(value)) return Outcome::kOther;
  const Ref index(PyNumber_Index(value));
  const long long number = index ? PyLong_AsLongLong(index.get()) : -1;
  if (PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    return Outcome::kOther;
  }
  bool fits = false;
  switch (type) {
    case NPY_INT8:
      fits = StoreInteger<int8_t>(number, row);
      break;
    case NPY_INT16:
      fits = StoreInteger<int16_t>(number, row);
      break;
    case NPY_INT32:
      fits = StoreInteger<int32_t>(number, row);
      break;
    case NPY_INT64:
      fits = StoreInteger<int64_t>(number, row);
      break;
    case NPY_UINT8:
      fits = StoreInteger<uint8_t>(number, row);
      break;
    case NPY_UINT16:
      fits = StoreInteger<uint16_t>(number, row);
      break;
    case NPY_UINT32:
      fits = StoreInteger<uint32_t>(number, row);
      break;
    default:
      break;
  }
  return fits ? Outcome::kDone : Outcome::kOther;
}

// Reads a Python float, of which NumPy's float64 is one, or NumPy's float32; false for anything else.
bool ReadFloat(PyObject* value, double* number) {
  if (PyFloat_Check(value)) {
    *number = PyFloat_AsDouble(value);
    return true;
  }
  if (!PyArray_IsScalar(value, Float)) return false;
  float narrow;
  PyArray_ScalarAsCtype(value, &narrow);
  *number = narrow;
  return true;
}

// Of a leaf without a shape.
Outcome WriteFloat(int type, char* row, PyObject* value) {
  double number;
  if (!ReadFloat(value, &number)) return Outcome::kOther;
  if (type == NPY_FLOAT64) {
    std::memcpy(row, &number, sizeof number);
    return Outcome::kDone;
  }
  const bool fits = Narrow<double, float>(reinterpret_cast<const char*>(&number), row, 1);
  return fits ? Outcome::kDone : Outcome::kOther;
}

Outcome WriteLeaf(PyArrayObject* rows, Py_ssize_t slot, PyObject* value) {
  if (slot < 0 || slot >= PyArray_DIM(rows, 0)) return Outcome::kOther;
  const int type = PyArray_TYPE(rows), ndim = PyArray_NDIM(rows) - 1;
  char* row = PyArray_BYTES(rows) + slot * PyArray_STRIDE(rows, 0);
  if (!PyArray_CheckExact(value)) {
    if (ndim > 0) return Outcome::kOther;
    if (type == NPY_FLOAT32 || type == NPY_FLOAT64) return WriteFloat(type, row, value);
    return PyTypeNum_ISINTEGER(type) ? WriteInteger(type, row, value) : Outcome::kOther;
  }
  PyArrayObject* array = AsArray(value);
  if (PyArray_NDIM(array) != ndim || !PyArray_ISCARRAY_RO(array)) return Outcome::kOther;
  for (int i = 0; i < ndim; ++i) {
    if (PyArray_DIM(array, i) != PyArray_DIM(rows, i + 1)) return Outcome::kOther;
  }
  const char* data = PyArray_BYTES(array);
  const npy_intp size = PyArray_SIZE(array);
  const int given = PyArray_TYPE(array);
  if (given == type) {
    if (data != row) std::memmove(row, data, PyArray_NBYTES(array));  // an env may write in place
    return Outcome::kDone;
  }
  bool fits = false;
  if (given == NPY_FLOAT64 && type == NPY_FLOAT32) {
    fits = Narrow<double, float>(data, row, size);
  } else if (given == NPY_INT64 && type == NPY_INT32) {
    fits = Narrow<int64_t, int32_t>(data, row, size);
  } else if (given == NPY_UINT64 && type == NPY_UINT32) {
    fits = Narrow<uint64_t, uint32_t>(data, row, size);
  }
  return fits ? Outcome::kDone : Outcome::kOther;
}

Outcome Write(PyObject* write, Py_ssize_t slot, PyObject* value);

Outcome WriteChildren(Writer* self, Py_ssize_t slot, PyObject* value) {
  const Py_ssize_t count = PyTuple_Size(self->children);
  const bool is_dict = self->keys != nullptr;
  if (is_dict ? !PyDict_CheckExact(value) : !PyTuple_CheckExact(value)) return Outcome::kOther;
  if ((is_dict ? PyDict_Size(value) : PyTuple_Size(value)) != count) return Outcome::kOther;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* item =
        is_dict ? PyDict_GetItemWithError(value, PyTuple_GetItem(self->keys, i)) : PyTuple_GetItem(value, i);
    if (item == nullptr) return PyErr_Occurred() == nullptr ? Outcome::kOther : Outcome::kError;
    const Ref held = Share(item);  // what writes it may be Python, and change the dict
    if (Write(PyTuple_GetItem(self->children, i), slot, item) == Outcome::kError) return Outcome::kError;
  }
  return Outcome::kDone;
}

// Writes row `slot`, by whatever it takes.
Outcome Write(PyObject* write, Py_ssize_t slot, PyObject* value) {
  if (Py_TYPE(write) == writer_type) {
    auto* self = reinterpret_cast<Writer*>(write);
    const Outcome outcome = self->rows != nullptr ? WriteLeaf(AsArray(self->rows), slot, value)
                                                  : WriteChildren(self, slot, value);
    if (outcome != Outcome::kOther) return outcome;
    write = self->write;
  }
  const Ref index(PyLong_FromSsize_t(slot));
  const Ref result(index ? PyObject_CallFunctionObjArgs(write, index.get(), value, nullptr) : nullptr);
  return result ? Outcome::kDone : Outcome::kError;
}

void WriterDealloc(PyObject* object) {
  auto* self = reinterpret_cast<Writer*>(object);
  Py_XDECREF(self->write);
  Py_XDECREF(self->keys);
  Py_XDECREF(self->children);
  Py_XDECREF(self->rows);
  Free(object);
}

PyObject* WriterCall(PyObject* self, PyObject* args, PyObject*) {
  Py_ssize_t slot;
  PyObject* value;
  if (!PyArg_ParseTuple(args, "nO:Writer", &slot, &value)) return nullptr;
  return Write(self, slot, value) == Outcome::kError ? nullptr : Py_NewRef(Py_None);
}

PyType_Slot writer_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(WriterDealloc)},
    {Py_tp_call, reinterpret_cast<void*>(WriterCall)},
    {0, nullptr},
};
PyType_Spec writer_spec = {"jaxvec._native._ext.Writer", sizeof(Writer), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, writer_slots};

PyObject* LeafWriter(PyObject*, PyObject* args) {
  PyObject *write, *rows;
  if (!PyArg_ParseTuple(args, "OO!:leaf_writer", &write, &PyArray_Type, &rows)) return nullptr;
  PyArrayObject* array = AsArray(rows);
  const int type = PyArray_TYPE(array);
  if (!(PyTypeNum_ISNUMBER(type) || PyTypeNum_ISBOOL(type)) || PyArray_NDIM(array) == 0 ||
      !PyArray_ISCARRAY(array)) {
    return Py_NewRef(write);
  }
  auto* self = Allocate<Writer>(writer_type);
  if (self == nullptr) return nullptr;
  self->write = Py_NewRef(write);
  self->rows = Py_NewRef(rows);
  return reinterpret_cast<PyObject*>(self);
}

PyObject* NestedWriter(PyObject*, PyObject* args) {
  PyObject *write, *keys, *children;
  if (!PyArg_ParseTuple(args, "OOO!:nested_writer", &write, &keys, &PyTuple_Type, &children)) return nullptr;
  if (keys != Py_None && (!PyTuple_Check(keys) || PyTuple_Size(keys) != PyTuple_Size(children))) {
    PyErr_SetString(PyExc_TypeError, "keys must be None, or a tuple with one for each child");
    return nullptr;
  }
  auto* self = Allocate<Writer>(writer_type);
  if (self == nullptr) return nullptr;
  self->write = Py_NewRef(write);
  self->children = Py_NewRef(children);
  self->keys = keys == Py_None ? nullptr : Py_NewRef(keys);
  return reinterpret_cast<PyObject*>(self);
}

// --- Steps ---

// Of the envs of a slice, by their index there. The pointers are references of its own.
struct Stepper {
  PyObject_HEAD PyObject* states;  // list of int: what each has to do; 0 for an ordinary step
  PyObject* infos;                 // list of dict: of their last steps
  PyObject* marks;                 // tuple of ndarray [n, ...] of numbers: what marks a row; or None
  PyObject* returns;               // ndarray [n] of float64, of the episodes that run
  PyObject* lengths;               // ndarray [n] of int64
  PyObject* row_reward;            // ndarray [n] of floats, as the next
  PyObject* row_return;
  PyObject* row_length;  // ndarray [n] of integers
  PyObject* running;     // ndarray [1] of uint32: 1 + the slot whose env runs
  PyObject* forked;      // list; not empty in a fork of this process
  PyObject* write_obs;   // Writer, or a function of index and observation
  PyObject* write_info;  // function of index and info
  Py_ssize_t first;      // slot of index 0
  long marked;           // the state in which an env steps, and clears what marks its row
};

PyTypeObject* stepper_type;
PyObject *step_name, *elapsed_name, *most_name;

// Steps one env; null for an error. `limits` are the attributes of the TimeLimits around it that are passed
// by, inmost first: what these would do is done here, so they are as if they had been called.
Ref StepEnv(PyObject* env, PyObject* limits, PyObject* action) {
  Ref result(PyObject_CallMethodObjArgs(env, step_name, action, nullptr));
  const Py_ssize_t count = PyTuple_Size(limits);
  if (!result || count == 0) return result;
  if (!PyTuple_CheckExact(result.get())) result = Ref(PySequence_Tuple(result.get()));  // as by unpacking it
  if (!result || PyTuple_Size(result.get()) != 5) return result;  // Python will say what is wrong
  bool over = false;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* limit = PyTuple_GetItem(limits, i);
    PyObject *before = PyDict_GetItemWithError(limit, elapsed_name),
             *most = PyDict_GetItemWithError(limit, most_name);
    if (before == nullptr || most == nullptr) {
      if (PyErr_Occurred() == nullptr)
        PyErr_SetString(PyExc_AttributeError, "a TimeLimit has lost its count");
      return nullptr;
    }
    const long long elapsed = PyLong_AsLongLong(before) + 1, last = PyLong_AsLongLong(most);
    if (PyErr_Occurred() != nullptr) return nullptr;
    const Ref after(PyLong_FromLongLong(elapsed));
    if (!after || PyDict_SetItem(limit, elapsed_name, after.get()) < 0) return nullptr;
    over |= elapsed >= last;
  }
  if (!over) return result;
  PyObject* told = result.get();
  return Ref(PyTuple_Pack(5, PyTuple_GetItem(told, 0), PyTuple_GetItem(told, 1), PyTuple_GetItem(told, 2),
                          Py_True, PyTuple_GetItem(told, 4)));
}

void StoreFloat(PyObject* column, Py_ssize_t index, double value) {
  void* to = PyArray_GETPTR1(AsArray(column), index);
  if (PyArray_TYPE(AsArray(column)) == NPY_FLOAT32) {
    *static_cast<float*>(to) = static_cast<float>(value);
  } else {
    *static_cast<double*>(to) = value;
  }
}

void StoreLength(PyObject* column, Py_ssize_t index, long long value) {
  void* to = PyArray_GETPTR1(AsArray(column), index);
  if (PyArray_TYPE(AsArray(column)) == NPY_INT32) {
    *static_cast<int32_t*>(to) = static_cast<int32_t>(value);
  } else {
    *static_cast<int64_t*>(to) = value;
  }
}

// Clears what a row says of the end of the episode before; false for an error.
bool ClearMarks(Stepper* self, Py_ssize_t index) {
  const Py_ssize_t count = PyTuple_Size(self->marks);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyArrayObject* array = AsArray(PyTuple_GetItem(self->marks, i));
    const npy_intp size = PyArray_NBYTES(array) / PyArray_DIM(array, 0);  // an empty row has a stride, too
    std::memset(PyArray_BYTES(array) + index * size, 0, size);
  }
  PyObject* playing = PyLong_FromLong(0);
  return playing != nullptr && PyList_SetItem(self->states, index, playing) == 0;
}

// Writes the row of a step with an ordinary result, and nothing of any other.
Outcome Take(Stepper* self, PyObject* number, Py_ssize_t index, PyObject* result, bool marked,
             PyObject* end_step) {
  if (!PyTuple_CheckExact(result) || PyTuple_Size(result) != 5) return Outcome::kOther;
  if (marked && self->marks == Py_None) return Outcome::kOther;
  PyObject *obs = PyTuple_GetItem(result, 0), *given = PyTuple_GetItem(result, 1);
  PyObject* info = PyTuple_GetItem(result, 4);
  if (!PyDict_CheckExact(info)) return Outcome::kOther;
  double reward;
  if (!ReadFloat(given, &reward)) {
    if (!PyLong_CheckExact(given)) return Outcome::kOther;
    reward = static_cast<double>(PyLong_AsLongLong(given));
  }
  const int terminated = PyObject_IsTrue(PyTuple_GetItem(result, 2));
  const int truncated = PyObject_IsTrue(PyTuple_GetItem(result, 3));
  if (PyErr_Occurred() != nullptr) {
    PyErr_Clear();  // Python will say it again
    return Outcome::kOther;
  }
  auto* sum = static_cast<double*>(PyArray_GETPTR1(AsArray(self->returns), index));
  auto* count = static_cast<int64_t*>(PyArray_GETPTR1(AsArray(self->lengths), index));
  const double episode_return = *sum += reward;
  const int64_t length = ++*count;
  StoreFloat(self->row_reward, index, reward);
  StoreFloat(self->row_return, index, episode_return);
  StoreLength(self->row_length, index, length);
  if (marked && !ClearMarks(self, index)) return Outcome::kError;
  Ref last;
  if (terminated != 0 || truncated != 0) {
    last = Ref(PyObject_CallFunctionObjArgs(end_step, number, obs, terminated != 0 ? Py_True : Py_False,
                                            truncated != 0 ? Py_True : Py_False, info, nullptr));
    if (!last) return Outcome::kError;
    obs = PyTuple_GetItem(last.get(), 0);
    info = PyTuple_GetItem(last.get(), 1);
  }
  PyObject* before = PyList_GetItem(self->infos, index);
  if (obs == nullptr || info == nullptr || before == nullptr) return Outcome::kError;
  if (PyDict_Size(info) != 0 || PyDict_Size(before) != 0) {  // else the row says so already
    const Ref done(PyObject_CallFunctionObjArgs(self->write_info, number, info, nullptr));
    if (!done) return Outcome::kError;
  }
  return Write(self->write_obs, index, obs);
}

PyObject* Run(PyObject* object, PyObject* args) {
  auto* self = reinterpret_cast<Stepper*>(object);
  Py_ssize_t place;
  PyObject *envs, *limits, *indices, *actions, *end_step, *after;
  if (!PyArg_ParseTuple(args, "nO!O!O!O!OO:run", &place, &PyList_Type, &envs, &PyList_Type, &limits,
                        &PyList_Type, &indices, &PyList_Type, &actions, &end_step, &after)) {
    return nullptr;
  }
  auto* running = static_cast<volatile uint32_t*>(PyArray_DATA(AsArray(self->running)));
  const Py_ssize_t count = PyList_Size(indices);
  for (; place < count; ++place) {
    PyObject* number = PyList_GetItem(indices, place);
    const Py_ssize_t index = number == nullptr ? -1 : PyLong_AsSsize_t(number);
    if (PyErr_Occurred() != nullptr) return nullptr;
    *running = static_cast<uint32_t>(self->first + index + 1);  // before the env can crash or hang
    PyObject* due = PyList_GetItem(self->states, index);
    const long state = due == nullptr ? -1 : PyLong_AsLong(due);
    if (PyErr_Occurred() != nullptr) return nullptr;
    if (state != 0 && state != self->marked) return Py_BuildValue("nO", place, Py_None);
    if (PyErr_CheckSignals() < 0) return nullptr;  // an env need not run any Python that would
    PyObject *env = PyList_GetItem(envs, index), *around = PyList_GetItem(limits, index);
    PyObject* action = PyList_GetItem(actions, place);
    if (env == nullptr || around == nullptr || action == nullptr) return nullptr;
    const Ref held[] = {Share(env), Share(around), Share(action)};  // whatever it does to our lists
    const Ref result = StepEnv(env, around, action);
    if (!result) return nullptr;
    Outcome outcome = Outcome::kOther;
    if (PyList_Size(self->forked) == 0)
      outcome = Take(self, number, index, result.get(), state != 0, end_step);
    if (outcome == Outcome::kError) return nullptr;
    if (outcome == Outcome::kOther) return Py_BuildValue("nO", place, result.get());
    if (after == Py_None) continue;
    const Ref done(PyObject_CallFunctionObjArgs(after, number, nullptr));
    if (!done) return nullptr;
  }
  return Py_BuildValue("nO", place, Py_None);
}

bool IsColumn(PyObject* object, npy_intp size, int type, int other) {
  PyArrayObject* array = AsArray(object);
  const int given = PyArray_TYPE(array);
  return PyArray_NDIM(array) == 1 && PyArray_DIM(array, 0) >= size && PyArray_ISBEHAVED(array) &&
         (given == type || given == other);
}

bool IsMark(PyObject* object, npy_intp size) {
  if (!PyArray_Check(object)) return false;
  PyArrayObject* array = AsArray(object);
  const int type = PyArray_TYPE(array);
  return (PyTypeNum_ISNUMBER(type) || PyTypeNum_ISBOOL(type)) && PyArray_ISCARRAY(array) &&
         PyArray_NDIM(array) > 0 && PyArray_DIM(array, 0) >= size;
}

PyObject* MakeStepper(PyObject*, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"states",     "infos",      "marks",      "returns", "lengths",
                                "row_reward", "row_return", "row_length", "running", "forked",
                                "write_obs",  "write_info", "first",      "marked",  nullptr};
  PyObject* given[12];
  Py_ssize_t first;
  long marked;
  if (!PyArg_ParseTupleAndKeywords(
          args, kwargs, "$O!O!OO!O!O!O!O!O!O!OOnl:stepper", const_cast<char**>(names), &PyList_Type,
          &given[0], &PyList_Type, &given[1], &given[2], &PyArray_Type, &given[3], &PyArray_Type, &given[4],
          &PyArray_Type, &given[5], &PyArray_Type, &given[6], &PyArray_Type, &given[7], &PyArray_Type,
          &given[8], &PyList_Type, &given[9], &given[10], &given[11], &first, &marked)) {
    return nullptr;
  }
  const npy_intp size = PyList_Size(given[0]);
  bool known =
      IsColumn(given[3], size, NPY_FLOAT64, NPY_FLOAT64) && IsColumn(given[4], size, NPY_INT64, NPY_INT64) &&
      IsColumn(given[5], size, NPY_FLOAT32, NPY_FLOAT64) &&
      IsColumn(given[6], size, NPY_FLOAT32, NPY_FLOAT64) && IsColumn(given[7], size, NPY_INT32, NPY_INT64) &&
      IsColumn(given[8], 1, NPY_UINT32, NPY_UINT32);
  if (given[2] != Py_None) {
    const Py_ssize_t count = PyTuple_Size(given[2]);
    known &= count >= 0;
    for (Py_ssize_t i = 0; i < count; ++i) known &= IsMark(PyTuple_GetItem(given[2], i), size);
  }
  if (!known) {
    PyErr_SetString(PyExc_TypeError, "columns of other dtypes or sizes than this file knows");
    return nullptr;
  }
  auto* self = Allocate<Stepper>(stepper_type);
  if (self == nullptr) return nullptr;
  PyObject** const kept[] = {&self->states,  &self->infos,      &self->marks,      &self->returns,
                             &self->lengths, &self->row_reward, &self->row_return, &self->row_length,
                             &self->running, &self->forked,     &self->write_obs,  &self->write_info};
  for (int i = 0; i < 12; ++i) *kept[i] = Py_NewRef(given[i]);
  self->first = first;
  self->marked = marked;
  return reinterpret_cast<PyObject*>(self);
}

void StepperDealloc(PyObject* object) {
  auto* self = reinterpret_cast<Stepper*>(object);
  for (PyObject* kept :
       {self->states, self->infos, self->marks, self->returns, self->lengths, self->row_reward,
        self->row_return, self->row_length, self->running, self->forked, self->write_obs, self->write_info}) {
    Py_XDECREF(kept);
  }
  Free(object);
}

PyMethodDef stepper_methods[] = {
    {"run", Run, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot stepper_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(StepperDealloc)},
    {Py_tp_methods, stepper_methods},
    {0, nullptr},
};
PyType_Spec stepper_spec = {"jaxvec._native._ext.Stepper", sizeof(Stepper), 0,
                            Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, stepper_slots};

PyMethodDef functions[] = {
    {"leaf_writer", LeafWriter, METH_VARARGS, nullptr},
    {"nested_writer", NestedWriter, METH_VARARGS, nullptr},
    {"put_again", PutAgain, METH_VARARGS, nullptr},
    {"stepper", AsMethod(MakeStepper), METH_VARARGS | METH_KEYWORDS, nullptr},
    {"take_again", TakeAgain, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
}  // namespace

bool AddStepper(PyObject* module) {
  step_name = PyUnicode_InternFromString("step");
  elapsed_name = PyUnicode_InternFromString("_elapsed_steps");
  most_name = PyUnicode_InternFromString("_max_episode_steps");
  writer_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&writer_spec));
  stepper_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&stepper_spec));
  return most_name != nullptr && InitStates() && writer_type != nullptr && stepper_type != nullptr &&
         PyModule_AddFunctions(module, functions) == 0;
}
