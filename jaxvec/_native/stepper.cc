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

// --- Rows ---
// Functions that return a bool here return false if Python must handle a case; then no error is set.

// A compiled `write(slot, value)`, its method, for a leaf, a dict or a tuple.
struct Writer {
  Ref write;     // Python function that handles every value, or raises
  Ref rows;      // for a leaf: contiguous ndarray [n, ...] of numbers; else null
  Ref children;  // for a dict or tuple: tuple of Writers or functions; else null
  Ref keys;      // for a dict: tuple; else null
};

// Writes a Python or NumPy integer to a leaf without a shape.
bool write_integer(PyArrayObject* rows, char* row, PyObject* value) {
  if (!PyIndex_Check(value)) return false;
  const Ref index(PyNumber_Index(value));
  const int64_t number = index ? PyLong_AsLongLong(index.get()) : -1;
  if (clear_error()) return false;
  return jaxvec::with_integer(dtype_in(rows), [&](auto stored) {
    const bool fits = jaxvec::narrow<int64_t, decltype(stored)>(&number, &stored, 1);
    if (fits) std::memcpy(row, &stored, sizeof stored);
    return fits;
  });
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
  if (integer == -1 && clear_error()) return false;
  *number = static_cast<double>(integer);
  return true;
}

// Writes a float to a leaf without a shape.
bool write_float(int type, char* row, PyObject* value) {
  double number;
  if (!read_float(value, &number)) return false;
  if (type == NPY_FLOAT32) return jaxvec::narrow<double, float>(&number, row, 1);
  std::memcpy(row, &number, sizeof number);
  return true;
}

bool write_leaf(PyArrayObject* rows, Py_ssize_t slot, PyObject* value) {
  if (slot < 0 || slot >= PyArray_DIM(rows, 0)) return false;
  const int type = PyArray_TYPE(rows), ndim = PyArray_NDIM(rows) - 1;
  char* row = PyArray_BYTES(rows) + slot * PyArray_STRIDE(rows, 0);
  if (!PyArray_CheckExact(value)) {
    if (ndim > 0) return false;
    if (type == NPY_FLOAT32 || type == NPY_FLOAT64) return write_float(type, row, value);
    return PyTypeNum_ISINTEGER(type) && write_integer(rows, row, value);
  }
  PyArrayObject* array = as_array(value);
  if (PyArray_NDIM(array) != ndim || !PyArray_ISCARRAY_RO(array)) return false;
  for (int i = 0; i < ndim; ++i) {
    if (PyArray_DIM(array, i) != PyArray_DIM(rows, i + 1)) return false;
  }
  const char* data = PyArray_BYTES(array);
  const npy_intp size = PyArray_SIZE(array);
  const int given = PyArray_TYPE(array);
  if (given == type) {
    if (data != row) std::memmove(row, data, PyArray_NBYTES(array));  // an env may write in place
    return true;
  }
  if (given == NPY_FLOAT64 && type == NPY_FLOAT32) return jaxvec::narrow<double, float>(data, row, size);
  if (given == NPY_INT64 && type == NPY_INT32) return jaxvec::narrow<int64_t, int32_t>(data, row, size);
  if (given == NPY_UINT64 && type == NPY_UINT32) return jaxvec::narrow<uint64_t, uint32_t>(data, row, size);
  return false;
}

void write(PyObject* function, Py_ssize_t slot, PyObject* value);

bool write_children(const Writer& self, Py_ssize_t slot, PyObject* value) {
  const Py_ssize_t count = PyTuple_Size(self.children.get());
  const bool is_dict = self.keys != nullptr;
  if (is_dict ? !PyDict_CheckExact(value) : !PyTuple_CheckExact(value)) return false;
  if ((is_dict ? PyDict_Size(value) : PyTuple_Size(value)) != count) return false;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* item = is_dict ? find(value, PyTuple_GetItem(self.keys.get(), i)) : PyTuple_GetItem(value, i);
    if (item == nullptr) return false;
    const Ref held = share(item);  // the child may be a Python function that changes the dict
    write(PyTuple_GetItem(self.children.get(), i), slot, item);
  }
  return true;
}

// Writes row `slot` with a Writer, and with its Python function if the Writer can't.
void write_row(Writer& self, Py_ssize_t slot, PyObject* value) {
  const bool written = self.rows != nullptr ? write_leaf(as_array(self.rows.get()), slot, value)
                                            : write_children(self, slot, value);
  if (!written) write(self.write.get(), slot, value);
}

// Writes row `slot` with a function, or directly with the Writer of which it is the method.
void write(PyObject* function, Py_ssize_t slot, PyObject* value) {
  PyObject* const owner = PyCFunction_Check(function) ? PyCFunction_GetSelf(function) : nullptr;
  if (owner != nullptr && Py_TYPE(owner) == type_of<Writer>) {
    return write_row(own_of<Writer>(owner), slot, value);
  }
  own(PyObject_CallFunctionObjArgs(function, own(PyLong_FromSsize_t(slot)).get(), value, nullptr));
}

// These two functions return the method of a Writer. Their arguments are documented in _ext.pyi.

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
  return own(PyObject_GetAttrString(writer.get(), "write"));
}

Ref nested_writer(PyObject* write, PyObject* keys, PyObject* children) {
  Ref writer = make_owner<Writer>();
  auto& self = own_of<Writer>(writer.get());
  self.write = share(write);
  self.children = share(children);
  if (keys != Py_None) self.keys = share(keys);
  return own(PyObject_GetAttrString(writer.get(), "write"));
}

// --- Steps ---

// Steps the envs of a slice, which lists and arrays contain by their index there.
struct Stepper {
  Ref kept;                           // the arguments, which own the objects below
  PyObject* states;                   // list of int: pending work of each env; 0 for an ordinary step
  PyObject* infos;                    // list of dict: infos of the latest steps
  PyObject* marks;                    // tuple of ndarray [n, ...] that mark rows at an episode's end; or None
  PyArrayObject* returns;             // ndarray [n, ...] of float64: returns of the running episodes
  PyArrayObject* lengths;             // ndarray [n] of int64: lengths of the running episodes
  PyArrayObject* row_reward;          // ndarray [n, ...] of float32 or float64, in the segment
  PyArrayObject* row_return;          // ndarray [n, ...] of float32 or float64, in the segment
  PyArrayObject* row_length;          // ndarray [n] of int32 or int64, in the segment
  PyArrayObject* running;             // ndarray [1] of uint32 in shared memory: 1 + slot of the env that runs
  PyObject* forked;                   // list; not empty in a fork of this process
  PyObject* write_obs;                // Writer, or a function of index and observation
  PyObject* write_info;               // function of index and info
  Py_ssize_t first;                   // slot of index 0
  long marked;                        // the state in which a step also clears the marks of its row
  npy_intp num_rewards;               // numbers in the reward of a step
  std::unique_ptr<double[]> rewards;  // [num_rewards], of the step that is being written
};

Name step_name{"step"}, elapsed_name{"_elapsed_steps"}, max_steps_name{"_max_episode_steps"};

// Steps one env. `limits` are the attributes of its bypassed TimeLimits, innermost first, and this does the
// work of these wrappers.
Ref step_env(PyObject* env, PyObject* limits, PyObject* action) {
  Ref result = own(PyObject_CallMethodObjArgs(env, step_name, action, nullptr));
  const Py_ssize_t count = PyTuple_Size(limits);
  if (count == 0) return result;
  if (!PyTuple_CheckExact(result.get())) result = own(PySequence_Tuple(result.get()));
  if (PyTuple_Size(result.get()) != 5) return result;  // Python will raise the error
  bool over = false;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* limit = PyTuple_GetItem(limits, i);
    PyObject *before = find(limit, elapsed_name), *max_steps = find(limit, max_steps_name);
    if (before == nullptr || max_steps == nullptr) {
      raise(PyExc_AttributeError, "a TimeLimit has no _elapsed_steps or _max_episode_steps");
    }
    const long long elapsed = PyLong_AsLongLong(before) + 1, last = PyLong_AsLongLong(max_steps);
    check(PyErr_Occurred() == nullptr);
    set_item(limit, elapsed_name, own(PyLong_FromLongLong(elapsed)).get());
    over |= elapsed >= last;
  }
  if (!over) return result;
  const auto item = [&](Py_ssize_t i) { return PyTuple_GetItem(result.get(), i); };
  return own(PyTuple_Pack(5, item(0), item(1), item(2), Py_True, item(4)));
}

// Returns row `index` of a column.
void* row_of(PyArrayObject* column, Py_ssize_t index) { return PyArray_GETPTR1(column, index); }

// Stores number `i` of a row in a column of one of two types.
template <typename Narrow, typename Wide>
void store(PyArrayObject* column, int narrow_type, Py_ssize_t index, npy_intp i, Wide value) {
  void* row = row_of(column, index);
  if (PyArray_TYPE(column) == narrow_type) {
    static_cast<Narrow*>(row)[i] = static_cast<Narrow>(value);
  } else {
    static_cast<Wide*>(row)[i] = value;
  }
}

// Reads a vector of rewards: an array of the right shape, or a list or tuple of numbers. Python handles other
// values.
bool read_vector(const Stepper& self, PyObject* given) {
  const int ndim = PyArray_NDIM(self.returns) - 1;
  double* rewards = self.rewards.get();
  if (PyArray_CheckExact(given)) {
    PyArrayObject* array = as_array(given);
    const int type = PyArray_TYPE(array);
    if (PyArray_NDIM(array) != ndim || !PyArray_ISCARRAY_RO(array) ||
        !PyArray_CompareLists(PyArray_DIMS(array), PyArray_DIMS(self.returns) + 1, ndim) ||
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

// Clears the marks that the previous episode's end left in a row.
void clear_marks(const Stepper& self, Py_ssize_t index) {
  const Py_ssize_t count = PyTuple_Size(self.marks);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyArrayObject* array = as_array(PyTuple_GetItem(self.marks, i));
    const npy_intp size = PyArray_NBYTES(array) / PyArray_DIM(array, 0);  // the stride of empty rows is not 0
    std::memset(PyArray_BYTES(array) + index * size, 0, size);
  }
  check(PyList_SetItem(self.states, index, own(PyLong_FromLong(0)).release()) == 0);
}

// Writes the row of a step. Returns false if Python must do it; then it has written nothing.
bool write_step(const Stepper& self, PyObject* number, Py_ssize_t index, PyObject* result, bool marked,
                PyObject* end_step) {
  if (!PyTuple_CheckExact(result) || PyTuple_Size(result) != 5) return false;
  if (marked && self.marks == Py_None) return false;
  PyObject *obs = PyTuple_GetItem(result, 0), *given = PyTuple_GetItem(result, 1);
  PyObject* info = PyTuple_GetItem(result, 4);
  if (!PyDict_CheckExact(info)) return false;
  double* rewards = self.rewards.get();
  const bool is_vector = PyArray_NDIM(self.returns) > 1;
  if (!(is_vector ? read_vector(self, given) : read_number(given, rewards))) return false;
  const int terminated = PyObject_IsTrue(PyTuple_GetItem(result, 2));
  const int truncated = PyObject_IsTrue(PyTuple_GetItem(result, 3));
  if (clear_error()) return false;  // Python will raise it again
  auto* returns = static_cast<double*>(row_of(self.returns, index));
  int64_t& length = *static_cast<int64_t*>(row_of(self.lengths, index));
  for (npy_intp i = 0; i < self.num_rewards; ++i) {
    returns[i] += rewards[i];
    store<float>(self.row_reward, NPY_FLOAT32, index, i, rewards[i]);
    store<float>(self.row_return, NPY_FLOAT32, index, i, returns[i]);
  }
  ++length;
  store<int32_t>(self.row_length, NPY_INT32, index, 0, length);
  if (marked) clear_marks(self, index);
  Ref last;
  if (terminated != 0 || truncated != 0) {
    last = own(PyObject_CallFunctionObjArgs(end_step, number, obs, terminated != 0 ? Py_True : Py_False,
                                            truncated != 0 ? Py_True : Py_False, info, nullptr));
    obs = PyTuple_GetItem(last.get(), 0);
    info = PyTuple_GetItem(last.get(), 1);
    check(obs != nullptr && info != nullptr);
  }
  if (PyDict_Size(info) != 0 || PyDict_Size(item_of(self.infos, index)) != 0) {  // else it is empty already
    own(PyObject_CallFunctionObjArgs(self.write_info, number, info, nullptr));
  }
  write(self.write_obs, index, obs);
  return true;
}

Ref run(Stepper& self, Py_ssize_t place, PyObject* envs, PyObject* limits, PyObject* indices,
        PyObject* actions, PyObject* end_step, PyObject* after) {
  auto* running = static_cast<volatile uint32_t*>(PyArray_DATA(self.running));
  const Py_ssize_t count = PyList_Size(indices);
  for (; place < count; ++place) {
    PyObject* number = item_of(indices, place);
    Py_ssize_t index;
    read(number, &index);
    *running =
        static_cast<uint32_t>(self.first + index + 1);  // the supervisor reads it if the env crashes or hangs
    long state;
    read(item_of(self.states, index), &state);
    if (state != 0 && state != self.marked) break;
    check(PyErr_CheckSignals() == 0);             // a step in C need not run Python's handlers
    const Ref env = share(item_of(envs, index));  // the env may change the lists
    const Ref around = share(item_of(limits, index)), action = share(item_of(actions, place));
    const Ref result = step_env(env.get(), around.get(), action.get());
    if (PyList_Size(self.forked) != 0 ||
        !write_step(self, number, index, result.get(), state != 0, end_step)) {
      return own(Py_BuildValue("nO", place, result.get()));
    }
    if (after != Py_None) own(PyObject_CallFunctionObjArgs(after, number, nullptr));
  }
  return own(Py_BuildValue("nO", place, Py_None));
}

Ref make_stepper(PyObject* arguments) {
  Ref object = make_owner<Stepper>();
  auto& self = own_of<Stepper>(object.get());
  const Items read_item{arguments};
  read_item("states", &self.states);
  read_item("infos", &self.infos);
  read_item("marks", &self.marks);
  read_item("returns", &self.returns);
  read_item("lengths", &self.lengths);
  read_item("row_reward", &self.row_reward);
  read_item("row_return", &self.row_return);
  read_item("row_length", &self.row_length);
  read_item("running", &self.running);
  read_item("forked", &self.forked);
  read_item("write_obs", &self.write_obs);
  read_item("write_info", &self.write_info);
  read_item("first", &self.first);
  read_item("marked", &self.marked);
  self.kept = share(arguments);
  self.num_rewards = PyArray_MultiplyList(PyArray_DIMS(self.returns) + 1, PyArray_NDIM(self.returns) - 1);
  self.rewards = std::make_unique<double[]>(self.num_rewards);
  return object;
}

}  // namespace

void add_stepper(PyObject* module) {
  make_type<Writer>("jaxvec._native._ext.Writer", {define<write_row>("write")});
  make_type<Stepper>("jaxvec._native._ext.Stepper", {define<run>("run")});
  add_functions(module, {define<leaf_writer>("leaf_writer"), define<nested_writer>("nested_writer"),
                         define<make_stepper>("stepper")});
}
