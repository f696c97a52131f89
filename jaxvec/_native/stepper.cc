// The stepping loop for ordinary steps of ordinary envs, and the writers of their rows.
//
// This file handles the common cases and leaves all others to Python, which has all rules. `Stepper.run`
// returns to its caller with the unhandled result of `env.step`; a `Writer` calls the Python function that it
// replaces. So the code here only has to recognise the common cases. Python makes both objects: `Stepper` in
// _envs/env_slice.py, `Writer` in _memory/rows.py.

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <memory>

#include "narrow.h"
#include "python.h"

namespace {

// The result of a fast path.
enum class Outcome {
  kDone,
  kFallback,  // Python must handle this case; no error is set
  kError,     // a Python error is set
};

// --- Rows ---

// A compiled `write(slot, value)` for a leaf, a dict, a tuple, text or a sequence.
struct Writer {
  Ref write;     // Python function that handles every value, or raises
  Ref rows;      // for a leaf: contiguous ndarray [n, ...] of numbers; else null
  Ref children;  // for a dict or tuple: tuple of Writers or functions; else null
  Ref keys;      // for a dict: tuple; else null
  Ref sizes;     // for text or a sequence: contiguous ndarray [n] of int32; else null
  Ref parts;     // for text or a sequence: tuple of contiguous ndarrays [n, size, ...] of numbers
  Ref item;      // for a sequence: Writer or function for row `slot * size + i`; else null
};

template <typename To>
Outcome store_integer(long long value, char* to) {
  const To stored = static_cast<To>(value);
  if (static_cast<long long>(stored) != value) return Outcome::kFallback;
  std::memcpy(to, &stored, sizeof(To));
  return Outcome::kDone;
}

// Writes a Python or NumPy integer to a leaf without a shape.
Outcome write_integer(int type, char* row, PyObject* value) {
  if (!PyIndex_Check(value)) return Outcome::kFallback;
  const Ref index(PyNumber_Index(value));
  const long long number = index ? PyLong_AsLongLong(index.get()) : -1;
  if (PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    return Outcome::kFallback;
  }
  switch (type) {
    case NPY_INT8:
      return store_integer<int8_t>(number, row);
    case NPY_INT16:
      return store_integer<int16_t>(number, row);
    case NPY_INT32:
      return store_integer<int32_t>(number, row);
    case NPY_INT64:
      return store_integer<int64_t>(number, row);
    case NPY_UINT8:
      return store_integer<uint8_t>(number, row);
    case NPY_UINT16:
      return store_integer<uint16_t>(number, row);
    case NPY_UINT32:
      return store_integer<uint32_t>(number, row);
    default:
      return Outcome::kFallback;
  }
}

// Reads a Python float (NumPy's float64 is a subclass) or NumPy's float32; false for other types.
bool read_float(PyObject* value, double* number) {
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

// Reads a float as above, or an exact Python int; false for other values.
bool read_number(PyObject* value, double* number) {
  if (read_float(value, number)) return true;
  if (!PyLong_CheckExact(value)) return false;
  const long long integer = PyLong_AsLongLong(value);
  if (integer == -1 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    return false;
  }
  *number = static_cast<double>(integer);
  return true;
}

// Writes a float to a leaf without a shape.
Outcome write_float(int type, char* row, PyObject* value) {
  double number;
  if (!read_float(value, &number)) return Outcome::kFallback;
  if (type == NPY_FLOAT64) {
    std::memcpy(row, &number, sizeof number);
    return Outcome::kDone;
  }
  const bool fits = jaxvec::narrow<double, float>(&number, row, 1);
  return fits ? Outcome::kDone : Outcome::kFallback;
}

Outcome write_leaf(PyArrayObject* rows, Py_ssize_t slot, PyObject* value) {
  if (slot < 0 || slot >= PyArray_DIM(rows, 0)) return Outcome::kFallback;
  const int type = PyArray_TYPE(rows), ndim = PyArray_NDIM(rows) - 1;
  char* row = PyArray_BYTES(rows) + slot * PyArray_STRIDE(rows, 0);
  if (!PyArray_CheckExact(value)) {
    if (ndim > 0) return Outcome::kFallback;
    if (type == NPY_FLOAT32 || type == NPY_FLOAT64) return write_float(type, row, value);
    return PyTypeNum_ISINTEGER(type) ? write_integer(type, row, value) : Outcome::kFallback;
  }
  PyArrayObject* array = as_array(value);
  if (PyArray_NDIM(array) != ndim || !PyArray_ISCARRAY_RO(array)) return Outcome::kFallback;
  for (int i = 0; i < ndim; ++i) {
    if (PyArray_DIM(array, i) != PyArray_DIM(rows, i + 1)) return Outcome::kFallback;
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
    fits = jaxvec::narrow<double, float>(data, row, size);
  } else if (given == NPY_INT64 && type == NPY_INT32) {
    fits = jaxvec::narrow<int64_t, int32_t>(data, row, size);
  } else if (given == NPY_UINT64 && type == NPY_UINT32) {
    fits = jaxvec::narrow<uint64_t, uint32_t>(data, row, size);
  }
  return fits ? Outcome::kDone : Outcome::kFallback;
}

Outcome write(PyObject* write, Py_ssize_t slot, PyObject* value);

Outcome write_children(const Writer& self, Py_ssize_t slot, PyObject* value) {
  const Py_ssize_t count = PyTuple_Size(self.children.get());
  const bool is_dict = self.keys != nullptr;
  if (is_dict ? !PyDict_CheckExact(value) : !PyTuple_CheckExact(value)) return Outcome::kFallback;
  if ((is_dict ? PyDict_Size(value) : PyTuple_Size(value)) != count) return Outcome::kFallback;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* item = is_dict ? PyDict_GetItemWithError(value, PyTuple_GetItem(self.keys.get(), i))
                             : PyTuple_GetItem(value, i);
    if (item == nullptr) return PyErr_Occurred() == nullptr ? Outcome::kFallback : Outcome::kError;
    const Ref held = share(item);  // the child may be a Python function that changes the dict
    if (write(PyTuple_GetItem(self.children.get(), i), slot, item) == Outcome::kError) return Outcome::kError;
  }
  return Outcome::kDone;
}

template <typename Char>
Outcome write_text(PyObject* text, Py_ssize_t count, char* row) {
  auto* chars = reinterpret_cast<Char*>(row);
  for (Py_ssize_t i = 0; i < count; ++i) {
    const Py_UCS4 code = PyUnicode_ReadChar(text, i);
    chars[i] = static_cast<Char>(code);
    if (static_cast<Py_UCS4>(chars[i]) != code) return Outcome::kFallback;
  }
  return Outcome::kDone;
}

// Writes a str or a tuple, and zeros behind it.
Outcome write_padded(const Writer& self, Py_ssize_t slot, PyObject* value) {
  PyArrayObject* first = as_array(PyTuple_GetItem(self.parts.get(), 0));
  const bool is_text = self.item == nullptr;
  if (slot < 0 || slot >= PyArray_DIM(first, 0)) return Outcome::kFallback;
  if (is_text ? !PyUnicode_CheckExact(value) : !PyTuple_CheckExact(value)) return Outcome::kFallback;
  const Py_ssize_t count = is_text ? PyUnicode_GetLength(value) : PyTuple_Size(value);
  const npy_intp size = PyArray_DIM(first, 1);
  if (count > size) return Outcome::kFallback;
  if (is_text) {
    char* row = PyArray_BYTES(first) + slot * PyArray_STRIDE(first, 0);
    const bool is_narrow = PyArray_TYPE(first) == NPY_UINT8;
    const Outcome outcome =
        is_narrow ? write_text<uint8_t>(value, count, row) : write_text<int32_t>(value, count, row);
    if (outcome != Outcome::kDone) return outcome;
  }
  for (Py_ssize_t i = 0; !is_text && i < count; ++i) {
    if (write(self.item.get(), slot * size + i, PyTuple_GetItem(value, i)) == Outcome::kError)
      return Outcome::kError;
  }
  for (Py_ssize_t i = 0; i < PyTuple_Size(self.parts.get()); ++i) {
    PyArrayObject* part = as_array(PyTuple_GetItem(self.parts.get(), i));
    const npy_intp width = PyArray_NBYTES(part) / PyArray_DIM(part, 0) / size;
    std::memset(PyArray_BYTES(part) + (slot * size + count) * width, 0, (size - count) * width);
  }
  *static_cast<int32_t*>(PyArray_GETPTR1(as_array(self.sizes.get()), slot)) = static_cast<int32_t>(count);
  return Outcome::kDone;
}

// Writes row `slot` with a Writer, and with its Python function if the Writer can't.
Outcome write(PyObject* write, Py_ssize_t slot, PyObject* value) {
  if (Py_TYPE(write) == type_of<Writer>) {
    const auto& self = own_of<Writer>(write);
    const Outcome outcome = self.rows != nullptr    ? write_leaf(as_array(self.rows.get()), slot, value)
                            : self.parts != nullptr ? write_padded(self, slot, value)
                                                    : write_children(self, slot, value);
    if (outcome != Outcome::kFallback) return outcome;
    write = self.write.get();
  }
  const Ref index(PyLong_FromSsize_t(slot));
  const Ref result(index ? PyObject_CallFunctionObjArgs(write, index.get(), value, nullptr) : nullptr);
  return result ? Outcome::kDone : Outcome::kError;
}

PyObject* writer_call(PyObject* self, PyObject* args, PyObject*) {
  Py_ssize_t slot;
  PyObject* value;
  if (!PyArg_ParseTuple(args, "nO:Writer", &slot, &value)) return nullptr;
  return write(self, slot, value) == Outcome::kError ? nullptr : Py_NewRef(Py_None);
}

// The arguments of these three functions are documented in _ext.pyi.

Ref leaf_writer(PyObject* write, PyObject* rows) {
  PyArrayObject* array = as_array(rows);
  const int type = PyArray_TYPE(array);
  if (!(PyTypeNum_ISNUMBER(type) || PyTypeNum_ISBOOL(type)) || PyArray_NDIM(array) == 0 ||
      !PyArray_ISCARRAY(array)) {
    return share(write);
  }
  Ref writer = make_owner<Writer>();
  auto& self = own_of<Writer>(writer.get());
  self.write = share(write);
  self.rows = share(rows);
  return writer;
}

Ref nested_writer(PyObject* write, PyObject* keys, PyObject* children) {
  Ref writer = make_owner<Writer>();
  auto& self = own_of<Writer>(writer.get());
  self.write = share(write);
  self.children = share(children);
  if (keys != Py_None) self.keys = share(keys);
  return writer;
}

// Returns whether this file can write to an array of the items or characters of `size` rows.
bool is_part(PyArrayObject* array, npy_intp size) {
  const int type = PyArray_TYPE(array);
  return (PyTypeNum_ISNUMBER(type) || PyTypeNum_ISBOOL(type)) && PyArray_ISCARRAY(array) &&
         PyArray_NDIM(array) > 1 && PyArray_DIM(array, 0) >= size && PyArray_DIM(array, 1) > 0;
}

Ref padded_writer(PyObject* write, PyObject* item, PyObject* sizes, PyObject* parts) {
  const npy_intp size = PyArray_SIZE(as_array(sizes));
  bool known = size > 0 && PyTuple_Size(parts) > 0;
  for (Py_ssize_t i = 0; known && i < PyTuple_Size(parts); ++i) {
    known = is_part(as_array(PyTuple_GetItem(parts, i)), size);
  }
  if (known && item == Py_None) {
    const int type = PyArray_TYPE(as_array(PyTuple_GetItem(parts, 0)));
    known = type == NPY_UINT8 || type == NPY_INT32;
  }
  if (!known) return share(write);
  Ref writer = make_owner<Writer>();
  auto& self = own_of<Writer>(writer.get());
  self.write = share(write);
  self.sizes = share(sizes);
  self.parts = share(parts);
  if (item != Py_None) self.item = share(item);
  return writer;
}

// --- Steps ---

// Steps the envs of a slice, which lists and arrays contain by their index there.
struct Stepper {
  Ref kept;                           // the arguments, which own the objects below
  PyObject* states;                   // list of int: pending work of each env; 0 for an ordinary step
  PyObject* infos;                    // list of dict: infos of the latest steps
  PyObject* marks;                    // tuple of ndarray [n, ...] that mark rows at an episode's end; or None
  PyObject* returns;                  // ndarray [n, ...] of float64: returns of the running episodes
  PyObject* lengths;                  // ndarray [n] of int64: lengths of the running episodes
  PyObject* row_reward;               // ndarray [n, ...] of float32 or float64, in the segment
  PyObject* row_return;               // ndarray [n, ...] of float32 or float64, in the segment
  PyObject* row_length;               // ndarray [n] of int32 or int64, in the segment
  PyObject* running;                  // ndarray [1] of uint32 in shared memory: 1 + slot of the env that runs
  PyObject* forked;                   // list; not empty in a fork of this process
  PyObject* write_obs;                // Writer, or a function of index and observation
  PyObject* write_info;               // function of index and info
  Py_ssize_t first;                   // slot of index 0
  long marked;                        // the state in which a step also clears the marks of its row
  npy_intp num_rewards;               // numbers in the reward of a step
  std::unique_ptr<double[]> rewards;  // [num_rewards], of the step that is being written
};

PyObject *step_name, *elapsed_name, *max_steps_name;

// Steps one env; null if a Python error is set. `limits` are the attributes of its bypassed TimeLimits,
// innermost first, and this does the work of these wrappers.
Ref step_env(PyObject* env, PyObject* limits, PyObject* action) {
  Ref result(PyObject_CallMethodObjArgs(env, step_name, action, nullptr));
  const Py_ssize_t count = PyTuple_Size(limits);
  if (!result || count == 0) return result;
  if (!PyTuple_CheckExact(result.get())) result = Ref(PySequence_Tuple(result.get()));
  if (!result || PyTuple_Size(result.get()) != 5) return result;  // Python will raise the error
  bool over = false;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* limit = PyTuple_GetItem(limits, i);
    PyObject *before = PyDict_GetItemWithError(limit, elapsed_name),
             *max_steps = PyDict_GetItemWithError(limit, max_steps_name);
    if (before == nullptr || max_steps == nullptr) {
      if (PyErr_Occurred() == nullptr)
        PyErr_SetString(PyExc_AttributeError, "a TimeLimit has no _elapsed_steps or _max_episode_steps");
      return nullptr;
    }
    const long long elapsed = PyLong_AsLongLong(before) + 1, last = PyLong_AsLongLong(max_steps);
    if (PyErr_Occurred() != nullptr) return nullptr;
    const Ref after(PyLong_FromLongLong(elapsed));
    if (!after || PyDict_SetItem(limit, elapsed_name, after.get()) < 0) return nullptr;
    over |= elapsed >= last;
  }
  if (!over) return result;
  const auto item = [&](Py_ssize_t i) { return PyTuple_GetItem(result.get(), i); };
  return Ref(PyTuple_Pack(5, item(0), item(1), item(2), Py_True, item(4)));
}

// Returns row `index` of a column.
void* row_of(PyObject* column, Py_ssize_t index) { return PyArray_GETPTR1(as_array(column), index); }

// Stores number `i` of a row in a column of one of two types.
template <typename Narrow, typename Wide>
void store(PyObject* column, int narrow_type, Py_ssize_t index, npy_intp i, Wide value) {
  void* row = row_of(column, index);
  if (PyArray_TYPE(as_array(column)) == narrow_type) {
    static_cast<Narrow*>(row)[i] = static_cast<Narrow>(value);
  } else {
    static_cast<Wide*>(row)[i] = value;
  }
}

// Reads a vector of rewards: an array of the right shape, or a list or tuple of numbers. Python handles other
// values.
bool read_vector(const Stepper& self, PyObject* given) {
  PyArrayObject* returns = as_array(self.returns);
  const int ndim = PyArray_NDIM(returns) - 1;
  double* rewards = self.rewards.get();
  if (PyArray_CheckExact(given)) {
    PyArrayObject* array = as_array(given);
    const int type = PyArray_TYPE(array);
    if (PyArray_NDIM(array) != ndim || !PyArray_ISCARRAY_RO(array) ||
        !PyArray_CompareLists(PyArray_DIMS(array), PyArray_DIMS(returns) + 1, ndim) ||
        (type != NPY_FLOAT32 && type != NPY_FLOAT64)) {
      return false;
    }
    const void* data = PyArray_DATA(array);
    for (npy_intp i = 0; i < self.num_rewards; ++i)
      rewards[i] =
          type == NPY_FLOAT32 ? static_cast<const float*>(data)[i] : static_cast<const double*>(data)[i];
  } else {
    const bool is_list = PyList_CheckExact(given);
    if (ndim != 1 || !(is_list || PyTuple_CheckExact(given))) return false;
    if ((is_list ? PyList_Size(given) : PyTuple_Size(given)) != self.num_rewards) return false;
    for (npy_intp i = 0; i < self.num_rewards; ++i) {
      PyObject* item = is_list ? PyList_GetItem(given, i) : PyTuple_GetItem(given, i);
      if (!read_number(item, &rewards[i])) return false;
    }
  }
  return true;
}

// Clears the marks that the previous episode's end left in a row; false if a Python error is set.
bool clear_marks(const Stepper& self, Py_ssize_t index) {
  const Py_ssize_t count = PyTuple_Size(self.marks);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyArrayObject* array = as_array(PyTuple_GetItem(self.marks, i));
    const npy_intp size = PyArray_NBYTES(array) / PyArray_DIM(array, 0);  // the stride of empty rows is not 0
    std::memset(PyArray_BYTES(array) + index * size, 0, size);
  }
  PyObject* ordinary = PyLong_FromLong(0);
  return ordinary != nullptr && PyList_SetItem(self.states, index, ordinary) == 0;
}

// Writes the row of a step. A fallback has written nothing.
Outcome write_step(const Stepper& self, PyObject* number, Py_ssize_t index, PyObject* result, bool marked,
                   PyObject* end_step) {
  if (!PyTuple_CheckExact(result) || PyTuple_Size(result) != 5) return Outcome::kFallback;
  if (marked && self.marks == Py_None) return Outcome::kFallback;
  PyObject *obs = PyTuple_GetItem(result, 0), *given = PyTuple_GetItem(result, 1);
  PyObject* info = PyTuple_GetItem(result, 4);
  if (!PyDict_CheckExact(info)) return Outcome::kFallback;
  double* rewards = self.rewards.get();
  const bool is_vector = PyArray_NDIM(as_array(self.returns)) > 1;
  if (!(is_vector ? read_vector(self, given) : read_number(given, rewards))) return Outcome::kFallback;
  const int terminated = PyObject_IsTrue(PyTuple_GetItem(result, 2));
  const int truncated = PyObject_IsTrue(PyTuple_GetItem(result, 3));
  if (PyErr_Occurred() != nullptr) {
    PyErr_Clear();  // Python will raise it again
    return Outcome::kFallback;
  }
  auto* returns = static_cast<double*>(row_of(self.returns, index));
  int64_t& length = *static_cast<int64_t*>(row_of(self.lengths, index));
  for (npy_intp i = 0; i < self.num_rewards; ++i) {
    returns[i] += rewards[i];
    store<float>(self.row_reward, NPY_FLOAT32, index, i, rewards[i]);
    store<float>(self.row_return, NPY_FLOAT32, index, i, returns[i]);
  }
  ++length;
  store<int32_t>(self.row_length, NPY_INT32, index, 0, length);
  if (marked && !clear_marks(self, index)) return Outcome::kError;
  Ref last;
  if (terminated != 0 || truncated != 0) {
    last = Ref(PyObject_CallFunctionObjArgs(end_step, number, obs, terminated != 0 ? Py_True : Py_False,
                                            truncated != 0 ? Py_True : Py_False, info, nullptr));
    if (!last) return Outcome::kError;
    obs = PyTuple_GetItem(last.get(), 0);
    info = PyTuple_GetItem(last.get(), 1);
  }
  PyObject* before = PyList_GetItem(self.infos, index);
  if (obs == nullptr || info == nullptr || before == nullptr) return Outcome::kError;
  if (PyDict_Size(info) != 0 || PyDict_Size(before) != 0) {  // else the row is empty already
    const Ref done(PyObject_CallFunctionObjArgs(self.write_info, number, info, nullptr));
    if (!done) return Outcome::kError;
  }
  return write(self.write_obs, index, obs);
}

PyObject* run(Stepper& self, Py_ssize_t place, PyObject* envs, PyObject* limits, PyObject* indices,
              PyObject* actions, PyObject* end_step, PyObject* after) {
  auto* running = static_cast<volatile uint32_t*>(PyArray_DATA(as_array(self.running)));
  const Py_ssize_t count = PyList_Size(indices);
  for (; place < count; ++place) {
    PyObject* number = PyList_GetItem(indices, place);
    const Py_ssize_t index = number == nullptr ? -1 : PyLong_AsSsize_t(number);
    if (PyErr_Occurred() != nullptr) return nullptr;
    *running =
        static_cast<uint32_t>(self.first + index + 1);  // the supervisor reads it if the env crashes or hangs
    PyObject* pending = PyList_GetItem(self.states, index);
    const long state = pending == nullptr ? -1 : PyLong_AsLong(pending);
    if (PyErr_Occurred() != nullptr) return nullptr;
    if (state != 0 && state != self.marked) return Py_BuildValue("nO", place, Py_None);
    if (PyErr_CheckSignals() < 0) return nullptr;  // a step in C need not run Python's handlers
    PyObject *env = PyList_GetItem(envs, index), *around = PyList_GetItem(limits, index);
    PyObject* action = PyList_GetItem(actions, place);
    if (env == nullptr || around == nullptr || action == nullptr) return nullptr;
    const Ref held[] = {share(env), share(around), share(action)};  // the env may change the lists
    const Ref result = step_env(env, around, action);
    if (!result) return nullptr;
    Outcome outcome = Outcome::kFallback;
    if (PyList_Size(self.forked) == 0)
      outcome = write_step(self, number, index, result.get(), state != 0, end_step);
    if (outcome == Outcome::kError) return nullptr;
    if (outcome == Outcome::kFallback) return Py_BuildValue("nO", place, result.get());
    if (after == Py_None) continue;
    const Ref done(PyObject_CallFunctionObjArgs(after, number, nullptr));
    if (!done) return nullptr;
  }
  return Py_BuildValue("nO", place, Py_None);
}

PyObject* make_stepper(PyObject*, PyObject* args, PyObject* kwargs) try {
  static const char* names[] = {"states",     "infos",      "marks",      "returns", "lengths",
                                "row_reward", "row_return", "row_length", "running", "forked",
                                "write_obs",  "write_info", "first",      "marked",  nullptr};
  Ref object = make_owner<Stepper>();
  auto& self = own_of<Stepper>(object.get());
  if (!PyArg_ParseTupleAndKeywords(
          args, kwargs, "$O!O!OO!O!O!O!O!O!O!OOnl:stepper", const_cast<char**>(names), &PyList_Type,
          &self.states, &PyList_Type, &self.infos, &self.marks, &PyArray_Type, &self.returns, &PyArray_Type,
          &self.lengths, &PyArray_Type, &self.row_reward, &PyArray_Type, &self.row_return, &PyArray_Type,
          &self.row_length, &PyArray_Type, &self.running, &PyList_Type, &self.forked, &self.write_obs,
          &self.write_info, &self.first, &self.marked)) {
    return nullptr;
  }
  self.kept = share(kwargs);
  PyArrayObject* returns = as_array(self.returns);
  self.num_rewards = PyArray_MultiplyList(PyArray_DIMS(returns) + 1, PyArray_NDIM(returns) - 1);
  self.rewards = std::make_unique<double[]>(self.num_rewards);
  return object.release();
} catch (const PythonError&) {
  return nullptr;
}

PyMethodDef stepper_methods[] = {
    define<run>("run"),
    {nullptr, nullptr, 0, nullptr},
};

PyMethodDef functions[] = {
    define<leaf_writer>("leaf_writer"),
    define<nested_writer>("nested_writer"),
    define<padded_writer>("padded_writer"),
    {"stepper", as_method(make_stepper), METH_VARARGS | METH_KEYWORDS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
}  // namespace

bool add_stepper(PyObject* module) {
  step_name = PyUnicode_InternFromString("step");
  elapsed_name = PyUnicode_InternFromString("_elapsed_steps");
  max_steps_name = PyUnicode_InternFromString("_max_episode_steps");
  const PyType_Slot call{Py_tp_call, reinterpret_cast<void*>(writer_call)};
  return max_steps_name != nullptr && make_type<Writer>("jaxvec._native._ext.Writer", call) &&
         make_type<Stepper>("jaxvec._native._ext.Stepper", {Py_tp_methods, stepper_methods}) &&
         PyModule_AddFunctions(module, functions) == 0;
}
