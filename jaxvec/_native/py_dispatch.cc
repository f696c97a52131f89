// `Parent` and `Worker`: the two ends of the dispatch for Python. native_dispatch.py wraps them.

#include <algorithm>
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
    found = array && PyArray_Check(array.get()) && PyArray_ISCARRAY(as_array(array.get()));
    if (!found) return uint32_t{0};
    words = static_cast<std::remove_reference_t<decltype(words)>>(PyArray_DATA(as_array(array.get())));
    return static_cast<uint32_t>(PyArray_DIM(as_array(array.get()), 0));
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

// Returns whether the worker and all slots exist, below `stop` if it is given; sets an IndexError if not.
bool check(const Board& board, uint32_t worker, const Slots& slots, int64_t stop = INT64_MAX) {
  bool valid = worker < board.num_workers;
  stop = std::min<int64_t>(stop, board.num_slots);
  for (uint32_t i = 0; i < slots.count; ++i) valid &= slots.data[i] >= 0 && slots.data[i] < stop;
  if (!valid) {
    PyErr_Format(PyExc_IndexError, "worker %u or one of its slots is out of range (%u workers, %u slots)",
                 worker, board.num_workers, board.num_slots);
  }
  return valid;
}

// --- Parent ---

PyObject* make_parent(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"marks", "stops", "sockets", "spin_ns", "look_around_ns", nullptr};
  PyObject* marks;
  Slots stops;
  Numbers<const int32_t, NPY_INT32> sockets;
  uint32_t spin_ns, look_around_ns;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "$OO&O&II:Parent", const_cast<char**>(names), &marks,
                                   stops.convert, &stops, sockets.convert, &sockets, &spin_ns,
                                   &look_around_ns)) {
    return nullptr;
  }
  Ref self = make_owner<ParentEnd>(type);
  if (!self) return nullptr;
  auto& end = own_of<ParentEnd>(self.get());
  if (!read_marks(marks, spin_ns, look_around_ns, &end.parent.board)) return nullptr;
  if (stops.count == 0 || stops.count != end.parent.board.num_workers) {
    PyErr_SetString(PyExc_ValueError, "there is not one stop per worker");
    return nullptr;
  }
  end.marks = share(marks);
  end.stops.assign(stops.data, stops.data + stops.count);
  end.parent.stops = end.stops.data();
  end.sockets.assign(sockets.data, sockets.data + sockets.count);
  end.parent.sockets = end.sockets.data();
  end.parent.num_sockets = sockets.count;
  return self.release();
}

void parent_send(ParentEnd& end, uint32_t operation, const Slots& slots) {
  if (!check(end.parent.board, 0, slots, end.stops.back())) return;
  without_gil([&] { send(end.parent, operation, slots.data, slots.count); });
}

void parent_forward(ParentEnd& end, const Slots& requests, const Slots& slots) {
  if (!check(end.parent.board, 0, slots, end.stops.back())) return;
  if (requests.count != end.parent.board.num_slots) {
    PyErr_SetString(PyExc_ValueError, "there is not one request per slot");
    return;
  }
  without_gil([&] { forward(end.parent, requests.data, slots.data, slots.count); });
}

void parent_notify_worker(ParentEnd& end, uint32_t worker) {
  if (check(end.parent.board, worker, {})) without_gil([&] { notify_worker(end.parent.board, worker); });
}

bool parent_wait(ParentEnd& end, const Slots& slots, uint32_t count, int64_t timeout_ns) {
  if (!check(end.parent.board, 0, slots)) return false;
  return without_gil([&] { return wait(end.parent, slots.data, slots.count, count, timeout_ns); }) == kDone;
}

void parent_mark_notices_seen(ParentEnd& end) { mark_notices_seen(end.parent); }

void parent_notify_parent(ParentEnd& end) {
  without_gil([&] { notify_parent(end.parent.board); });
}

void parent_close(ParentEnd& end) { end.marks.reset(); }

PyMethodDef parent_methods[] = {
    define<parent_send>("send"),
    define<parent_forward>("forward"),
    define<parent_notify_worker>("notify_worker"),
    define<parent_wait>("wait"),
    define<parent_mark_notices_seen>("mark_notices_seen"),
    define<parent_notify_parent>("notify_parent"),
    define<parent_close>("close"),
    {nullptr, nullptr, 0, nullptr},
};

// --- Worker ---

PyObject* make_worker(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"marks", "index", "first", "stop", "notices", "spin_ns", nullptr};
  PyObject* marks;
  uint32_t spin_ns;
  Ref self = make_owner<WorkerEnd>(type);
  if (!self) return nullptr;
  auto& end = own_of<WorkerEnd>(self.get());
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
  end.marks = share(marks);
  end.slots.resize(worker.stop - worker.first);
  std::iota(end.slots.begin(), end.slots.end(), worker.first);
  return self.release();
}

PyObject* worker_take(WorkerEnd& end, PyObject* array) {
  int64_t* slots = nullptr;
  if (!convert_shared<int64_t>(array, &slots)) return nullptr;
  if (slots == nullptr || PyArray_SIZE(as_array(array)) < static_cast<npy_intp>(end.slots.size())) {
    return PyErr_Format(PyExc_ValueError, "the array needs room for all %zu slots of the worker",
                        end.slots.size());
  }
  uint32_t operation = 0, count = 0;
  without_gil([&] { take(end.worker, &operation, slots, &count); });
  return Py_BuildValue("II", operation, count);
}

void worker_post(WorkerEnd& end, const Slots& slots) {
  if (!check(end.worker.board, end.worker.index, slots)) return;
  without_gil([&] { post(end.worker, slots.data, slots.count); });
}

void worker_post_some(WorkerEnd& end, uint32_t first, uint32_t count) {
  const Worker& worker = end.worker;
  if (first < worker.first || first > worker.stop || count > worker.stop - first) {
    PyErr_Format(PyExc_IndexError, "%u slots from %u on are not all in the worker's range %u to %u", count,
                 first, worker.first, worker.stop);
    return;
  }
  without_gil([&] { post(end.worker, end.slots.data() + (first - worker.first), count); });
}

void worker_mark_notice_seen(WorkerEnd& end) { ++end.worker.seen_notices; }

void worker_notify_worker(WorkerEnd& end) {
  without_gil([&] { notify_worker(end.worker.board, end.worker.index); });
}

void worker_notify_parent(WorkerEnd& end) {
  without_gil([&] { notify_parent(end.worker.board); });
}

PyMethodDef worker_methods[] = {
    define<worker_take>("take"),
    define<worker_post>("post"),
    define<worker_post_some>("post_some"),
    define<worker_mark_notice_seen>("mark_notice_seen"),
    define<worker_notify_worker>("notify_worker"),
    define<worker_notify_parent>("notify_parent"),
    {nullptr, nullptr, 0, nullptr},
};

PyObject* request_slices(PyObject*, PyObject*) { return Py_BuildValue("z", request_short_slices()); }

PyMethodDef functions[] = {
    {"request_short_slices", request_slices, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace
}  // namespace jaxvec

bool add_dispatch(PyObject* module) {
  using namespace jaxvec;
  parent_type = make_type<ParentEnd>(
      "jaxvec._native._ext.Parent",
      {{Py_tp_new, reinterpret_cast<void*>(make_parent)}, {Py_tp_methods, parent_methods}});
  PyTypeObject* const worker_type = make_type<WorkerEnd>(
      "jaxvec._native._ext.Worker",
      {{Py_tp_new, reinterpret_cast<void*>(make_worker)}, {Py_tp_methods, worker_methods}});
  return parent_type != nullptr && worker_type != nullptr && PyModule_AddType(module, parent_type) == 0 &&
         PyModule_AddType(module, worker_type) == 0 && PyModule_AddFunctions(module, functions) == 0;
}
