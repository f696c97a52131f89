// `Parent` and `Worker`: the two ends of the dispatch for Python. native_dispatch.py wraps them.

#include <numeric>

#include "py_types.h"

namespace jaxvec {

PyTypeObject* parent_type;

namespace {

struct WorkerEnd {
  Ref marks;                   // keeps the segment mapped
  std::vector<int64_t> slots;  // all slots of the worker
  Worker worker{};
};

// Reads the addresses of the segment's words from a `Marks` (_memory/segment.py).
bool read_marks(PyObject* marks, uint32_t spin_ns, uint32_t look_around_ns, Board* board) {
  board->spin_ns = spin_ns;
  board->look_around_ns = look_around_ns;
  bool found = true;
  const auto find = [&](const char* name, auto*& words) {
    const Ref array(found ? PyObject_GetAttrString(marks, name) : nullptr);
    found = array && PyArray_Check(array.get()) && PyArray_ISCARRAY(AsArray(array.get()));
    if (!found) return uint32_t{0};
    words = static_cast<std::remove_reference_t<decltype(words)>>(PyArray_DATA(AsArray(array.get())));
    return static_cast<uint32_t>(PyArray_DIM(AsArray(array.get()), 0));
  };
  board->num_slots = find("requested", board->requested);
  find("completed", board->completed);
  find("completed_at", board->completed_at);
  board->num_workers = find("doorbell", board->doorbell);
  find("worker_notices", board->worker_notices);
  find("asleep", board->asleep);
  find("finished", board->finished);
  find("target", board->target);
  find("sleepers", board->sleepers);
  find("parent_notices", board->parent_notices);
  if (!found && PyErr_Occurred() == nullptr)
    PyErr_SetString(PyExc_TypeError, "an attribute of the marks is not a writeable C-contiguous array");
  return found;
}

// Returns whether the worker and all slots exist; sets an IndexError if not.
bool check(const Board& board, uint32_t worker, const Slots& slots) {
  bool valid = worker < board.num_workers;
  for (uint32_t i = 0; i < slots.count; ++i) {
    valid &= slots.data[i] >= 0 && slots.data[i] < static_cast<int64_t>(board.num_slots);
  }
  if (!valid) {
    PyErr_Format(PyExc_IndexError, "worker %u or one of its slots is out of range (%u workers, %u slots)",
                 worker, board.num_workers, board.num_slots);
  }
  return valid;
}

// --- Parent ---

Parent& parent_of(PyObject* self) { return OwnOf<ParentEnd>(self).parent; }

PyObject* make_parent(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"marks", "sockets", "spin_ns", "look_around_ns", nullptr};
  PyObject* marks;
  Numbers<const int32_t, NPY_INT32> sockets;
  uint32_t spin_ns, look_around_ns;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "$OO&II:Parent", const_cast<char**>(names), &marks,
                                   sockets.Convert, &sockets, &spin_ns, &look_around_ns)) {
    return nullptr;
  }
  Ref self = MakeOwner<ParentEnd>(type);
  if (!self) return nullptr;
  auto& end = OwnOf<ParentEnd>(self.get());
  if (!read_marks(marks, spin_ns, look_around_ns, &end.parent.board)) return nullptr;
  end.marks = Share(marks);
  end.sockets.assign(sockets.data, sockets.data + sockets.count);
  end.parent.sockets = end.sockets.data();
  end.parent.num_sockets = sockets.count;
  return self.release();
}

PyObject* parent_send(PyObject* self, PyObject* args) {
  Parent& parent = parent_of(self);
  uint32_t worker, operation;
  Slots slots;
  if (!PyArg_ParseTuple(args, "IIO&:send", &worker, &operation, slots.Convert, &slots) ||
      !check(parent.board, worker, slots)) {
    return nullptr;
  }
  return WithoutGil([&] { send(parent, worker, operation, slots.data, slots.count); });
}

PyObject* parent_pass_on(PyObject* self, PyObject* args) {
  Parent& parent = parent_of(self);
  uint32_t worker;
  Slots requests, slots;
  if (!PyArg_ParseTuple(args, "IO&O&:pass_on", &worker, requests.Convert, &requests, slots.Convert, &slots) ||
      !check(parent.board, worker, slots)) {
    return nullptr;
  }
  return WithoutGil([&] { pass_on(parent, worker, requests.data, slots.data, slots.count); });
}

PyObject* parent_notify_worker(PyObject* self, PyObject* args) {
  Parent& parent = parent_of(self);
  uint32_t worker;
  if (!PyArg_ParseTuple(args, "I:notify_worker", &worker) || !check(parent.board, worker, {})) return nullptr;
  return WithoutGil([&] { notify_worker(parent.board, worker); });
}

PyObject* parent_wait(PyObject* self, PyObject* args) {
  Parent& parent = parent_of(self);
  Slots slots;
  uint32_t count;
  int64_t timeout_ns;
  if (!PyArg_ParseTuple(args, "O&Il:wait", slots.Convert, &slots, &count, &timeout_ns) ||
      !check(parent.board, 0, slots)) {
    return nullptr;
  }
  const auto run = [&] { return wait(parent, slots.data, slots.count, count, timeout_ns); };
  return PyBool_FromLong(WithoutGil(run) == kDone);
}

PyObject* parent_mark_notices_seen(PyObject* self, PyObject*) {
  mark_notices_seen(parent_of(self));
  Py_RETURN_NONE;
}

PyObject* parent_notify_parent(PyObject* self, PyObject*) {
  return WithoutGil([&] { notify_parent(parent_of(self).board); });
}

PyObject* parent_close(PyObject* self, PyObject*) {
  OwnOf<ParentEnd>(self).marks.reset();
  Py_RETURN_NONE;
}

PyMethodDef parent_methods[] = {
    {"send", parent_send, METH_VARARGS, nullptr},
    {"pass_on", parent_pass_on, METH_VARARGS, nullptr},
    {"notify_worker", parent_notify_worker, METH_VARARGS, nullptr},
    {"wait", parent_wait, METH_VARARGS, nullptr},
    {"mark_notices_seen", parent_mark_notices_seen, METH_NOARGS, nullptr},
    {"notify_parent", parent_notify_parent, METH_NOARGS, nullptr},
    {"close", parent_close, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

// --- Worker ---

Worker& worker_of(PyObject* self) { return OwnOf<WorkerEnd>(self).worker; }

PyObject* make_worker(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"marks", "index", "first", "stop", "notices", "spin_ns", nullptr};
  PyObject* marks;
  uint32_t spin_ns;
  Ref self = MakeOwner<WorkerEnd>(type);
  if (!self) return nullptr;
  auto& end = OwnOf<WorkerEnd>(self.get());
  Worker& worker = end.worker;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "$OIIIII:Worker", const_cast<char**>(names), &marks,
                                   &worker.index, &worker.first, &worker.stop, &worker.seen_notices,
                                   &spin_ns) ||
      !read_marks(marks, spin_ns, 0, &worker.board)) {
    return nullptr;
  }
  const Board& board = worker.board;
  if (worker.index >= board.num_workers || worker.first > worker.stop || worker.stop > board.num_slots) {
    return PyErr_Format(PyExc_IndexError,
                        "worker %u with slots %u to %u is out of range (%u workers, %u slots)", worker.index,
                        worker.first, worker.stop, board.num_workers, board.num_slots);
  }
  end.marks = Share(marks);
  end.slots.resize(worker.stop - worker.first);
  std::iota(end.slots.begin(), end.slots.end(), worker.first);
  return self.release();
}

PyObject* worker_take(PyObject* self, PyObject* args) {
  auto& end = OwnOf<WorkerEnd>(self);
  PyObject* array;
  int64_t* slots = nullptr;
  if (!PyArg_ParseTuple(args, "O!:take", &PyArray_Type, &array) || !ConvertShared<int64_t>(array, &slots)) {
    return nullptr;
  }
  if (PyArray_SIZE(AsArray(array)) < static_cast<npy_intp>(end.slots.size())) {
    return PyErr_Format(PyExc_ValueError, "the array needs room for all %zu slots of the worker",
                        end.slots.size());
  }
  uint32_t operation = 0, count = 0;
  Ref none(WithoutGil([&] { take(end.worker, &operation, slots, &count); }));
  return Py_BuildValue("II", operation, count);
}

PyObject* worker_post(PyObject* self, PyObject* args) {
  Worker& worker = worker_of(self);
  Slots slots;
  if (!PyArg_ParseTuple(args, "O&:post", slots.Convert, &slots) ||
      !check(worker.board, worker.index, slots)) {
    return nullptr;
  }
  return WithoutGil([&] { post(worker, slots.data, slots.count); });
}

PyObject* worker_post_some(PyObject* self, PyObject* args) {
  auto& end = OwnOf<WorkerEnd>(self);
  uint32_t first, count;
  if (!PyArg_ParseTuple(args, "II:post_some", &first, &count)) return nullptr;
  if (first < end.worker.first || first > end.worker.stop || count > end.worker.stop - first) {
    return PyErr_Format(PyExc_IndexError, "%u slots from %u on are not all in the worker's range %u to %u",
                        count, first, end.worker.first, end.worker.stop);
  }
  return WithoutGil([&] { post(end.worker, end.slots.data() + (first - end.worker.first), count); });
}

PyObject* worker_mark_notice_seen(PyObject* self, PyObject*) {
  ++worker_of(self).seen_notices;
  Py_RETURN_NONE;
}

PyObject* worker_notify_worker(PyObject* self, PyObject*) {
  return WithoutGil([&] { notify_worker(worker_of(self).board, worker_of(self).index); });
}

PyObject* worker_notify_parent(PyObject* self, PyObject*) {
  return WithoutGil([&] { notify_parent(worker_of(self).board); });
}

PyMethodDef worker_methods[] = {
    {"take", worker_take, METH_VARARGS, nullptr},
    {"post", worker_post, METH_VARARGS, nullptr},
    {"post_some", worker_post_some, METH_VARARGS, nullptr},
    {"mark_notice_seen", worker_mark_notice_seen, METH_NOARGS, nullptr},
    {"notify_worker", worker_notify_worker, METH_NOARGS, nullptr},
    {"notify_parent", worker_notify_parent, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace
}  // namespace jaxvec

bool AddDispatch(PyObject* module) {
  using namespace jaxvec;
  parent_type = MakeType<ParentEnd>(
      "jaxvec._native._ext.Parent",
      {{Py_tp_new, reinterpret_cast<void*>(make_parent)}, {Py_tp_methods, parent_methods}});
  PyTypeObject* const worker_type = MakeType<WorkerEnd>(
      "jaxvec._native._ext.Worker",
      {{Py_tp_new, reinterpret_cast<void*>(make_worker)}, {Py_tp_methods, worker_methods}});
  return parent_type != nullptr && worker_type != nullptr && PyModule_AddType(module, parent_type) == 0 &&
         PyModule_AddType(module, worker_type) == 0;
}
