// `Parent` and `Worker`: the two ends of the dispatch. native_dispatch.py has the rest of them.
#include "py_dispatch.h"

#include <cstring>
#include <numeric>

namespace jaxvec {

PyTypeObject* parent_type;

namespace {

struct PortableWorkerDispatch {
  Ref marks;
  std::vector<int64_t> slots;  // all
  Worker worker{};
};

// Takes the segment's words from the attributes of `Marks` (_marks.py).
bool fill(PyObject* marks, uint32_t spin_ns, uint32_t look_around_ns, Board* board) {
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
  if (!found && PyErr_Occurred() == nullptr) PyErr_SetString(PyExc_TypeError, "the marks are no arrays");
  return found;
}

// Says so if a worker or slots are not there.
bool check(const Board& board, uint32_t worker, const Slots& slots) {
  bool there = worker < board.num_workers;
  for (uint32_t i = 0; i < slots.count; ++i) {
    there &= slots.data[i] >= 0 && slots.data[i] < static_cast<int64_t>(board.num_slots);
  }
  if (!there) PyErr_SetString(PyExc_IndexError, "there is no such worker or slot");
  return there;
}

// --- Parent ---

Parent& parent_of(PyObject* self) { return OwnOf<PortableParentDispatch>(self).parent; }

PyObject* make_parent(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"marks", "sockets", "spin_ns", "look_around_ns", nullptr};
  PyObject* marks;
  Numbers<const int32_t, NPY_INT32> sockets;
  uint32_t spin_ns, look_around_ns;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "$OO&II:Parent", const_cast<char**>(names), &marks,
                                   sockets.Convert, &sockets, &spin_ns, &look_around_ns)) {
    return nullptr;
  }
  auto end = std::make_unique<PortableParentDispatch>();
  if (!fill(marks, spin_ns, look_around_ns, &end->parent.board)) return nullptr;
  end->marks = Share(marks);
  end->sockets.assign(sockets.data, sockets.data + sockets.count);
  end->parent.sockets = end->sockets.data();
  end->parent.num_sockets = sockets.count;
  return MakeOwner(type, std::move(end));
}

PyObject* parent_send(PyObject* self, PyObject* args) {
  Parent& parent = parent_of(self);
  uint32_t worker, operation;
  Slots slots;
  if (!PyArg_ParseTuple(args, "IIO&:send", &worker, &operation, slots.Convert, &slots)) return nullptr;
  if (!check(parent.board, worker, slots)) return nullptr;
  return WithoutGil([&] { send(parent, worker, operation, slots.data, slots.count); });
}

PyObject* parent_pass_on(PyObject* self, PyObject* args) {
  Parent& parent = parent_of(self);
  uint32_t worker;
  Slots requests, slots;
  if (!PyArg_ParseTuple(args, "IO&O&:pass_on", &worker, requests.Convert, &requests, slots.Convert, &slots)) {
    return nullptr;
  }
  if (!check(parent.board, worker, slots)) return nullptr;
  return WithoutGil([&] { pass_on(parent, worker, requests.data, slots.data, slots.count); });
}

PyObject* parent_notify_worker(PyObject* self, PyObject* args) {
  Parent& parent = parent_of(self);
  uint32_t worker;
  if (!PyArg_ParseTuple(args, "I:notify_worker", &worker) || !check(parent.board, worker, {})) return nullptr;
  return WithoutGil([&] { notify_worker(parent, worker); });
}

PyObject* parent_wait(PyObject* self, PyObject* args) {
  Parent& parent = parent_of(self);
  Slots slots;
  uint32_t count;
  long long timeout_ns;
  if (!PyArg_ParseTuple(args, "O&IL:wait", slots.Convert, &slots, &count, &timeout_ns)) return nullptr;
  if (!check(parent.board, 0, slots)) return nullptr;
  const Outcome outcome =
      WithoutGil([&] { return wait(parent, slots.data, slots.count, count, timeout_ns); });
  return PyBool_FromLong(outcome == kDone);
}

PyObject* parent_mark_notices_seen(PyObject* self, PyObject*) {
  mark_notices_seen(parent_of(self));
  return Py_NewRef(Py_None);
}

PyObject* parent_notify_parent(PyObject* self, PyObject*) {
  return WithoutGil([&] { notify_parent(parent_of(self).board); });
}

PyObject* parent_close(PyObject* self, PyObject*) {
  OwnOf<PortableParentDispatch>(self).marks.reset();
  return Py_NewRef(Py_None);
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
PyType_Slot parent_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(make_parent)},
    {Py_tp_dealloc, reinterpret_cast<void*>(DeallocateOwner<PortableParentDispatch>)},
    {Py_tp_methods, parent_methods},
    {0, nullptr},
};
PyType_Spec parent_spec = {"jaxvec._native._ext.Parent", sizeof(Owner<PortableParentDispatch>), 0, Py_TPFLAGS_DEFAULT,
                           parent_slots};

// --- Worker ---

PyObject* make_worker(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"marks", "index", "first", "stop", "notices", "spin_ns", nullptr};
  PyObject* marks;
  uint32_t spin_ns;
  auto end = std::make_unique<PortableWorkerDispatch>();
  Worker& worker = end->worker;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "$OIIIII:Worker", const_cast<char**>(names), &marks,
                                   &worker.index, &worker.first, &worker.stop, &worker.seen_notices,
                                   &spin_ns) ||
      !fill(marks, spin_ns, 0, &worker.board)) {
    return nullptr;
  }
  if (worker.index >= worker.board.num_workers || worker.first > worker.stop ||
      worker.stop > worker.board.num_slots) {
    PyErr_SetString(PyExc_IndexError, "there is no such worker or slot");
    return nullptr;
  }
  end->marks = Share(marks);
  end->slots.resize(worker.stop - worker.first);
  std::iota(end->slots.begin(), end->slots.end(), worker.first);
  return MakeOwner(type, std::move(end));
}

PyObject* worker_take(PyObject* self, PyObject* args) {
  PortableWorkerDispatch& end = OwnOf<PortableWorkerDispatch>(self);
  Words<int64_t> slots;
  if (!PyArg_ParseTuple(args, "O&:take", slots.Convert, &slots)) return nullptr;
  if (slots.count < static_cast<npy_intp>(end.slots.size())) {
    PyErr_SetString(PyExc_ValueError, "there is no room for all slots");
    return nullptr;
  }
  uint32_t operation = 0;
  const uint32_t count = WithoutGil([&] {
    uint32_t taken;
    take(end.worker, &operation, slots.data, &taken);
    return taken;
  });
  return Py_BuildValue("II", operation, count);
}

PyObject* worker_post(PyObject* self, PyObject* args) {
  PortableWorkerDispatch& end = OwnOf<PortableWorkerDispatch>(self);
  Slots slots;
  if (!PyArg_ParseTuple(args, "O&:post", slots.Convert, &slots)) return nullptr;
  if (!check(end.worker.board, end.worker.index, slots)) return nullptr;
  return WithoutGil([&] { post(end.worker, slots.data, slots.count); });
}

PyObject* worker_post_some(PyObject* self, PyObject* args) {
  PortableWorkerDispatch& end = OwnOf<PortableWorkerDispatch>(self);
  uint32_t first, count;
  if (!PyArg_ParseTuple(args, "II:post_some", &first, &count)) return nullptr;
  if (first < end.worker.first || first > end.worker.stop || count > end.worker.stop - first) {
    PyErr_SetString(PyExc_IndexError, "there is no such slot");
    return nullptr;
  }
  return WithoutGil([&] { post(end.worker, end.slots.data() + (first - end.worker.first), count); });
}

PyObject* worker_mark_notice_seen(PyObject* self, PyObject*) {
  ++OwnOf<PortableWorkerDispatch>(self).worker.seen_notices;
  return Py_NewRef(Py_None);
}

PyObject* worker_notify_worker(PyObject* self, PyObject*) {
  const Worker& worker = OwnOf<PortableWorkerDispatch>(self).worker;
  return WithoutGil([&] {
    Parent parent{};
    parent.board = worker.board;
    notify_worker(parent, worker.index);
  });
}

PyObject* worker_notify_parent(PyObject* self, PyObject*) {
  return WithoutGil([&] { notify_parent(OwnOf<PortableWorkerDispatch>(self).worker.board); });
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
PyType_Slot worker_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(make_worker)},
    {Py_tp_dealloc, reinterpret_cast<void*>(DeallocateOwner<PortableWorkerDispatch>)},
    {Py_tp_methods, worker_methods},
    {0, nullptr},
};
PyType_Spec worker_spec = {"jaxvec._native._ext.Worker", sizeof(Owner<PortableWorkerDispatch>), 0, Py_TPFLAGS_DEFAULT,
                           worker_slots};

}  // namespace
}  // namespace jaxvec

bool AddDispatch(PyObject* module) {
  using jaxvec::parent_type;
  parent_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&jaxvec::parent_spec));
  const Ref worker_type(PyType_FromSpec(&jaxvec::worker_spec));
  return parent_type != nullptr && worker_type && PyModule_AddType(module, parent_type) == 0 &&
         PyModule_AddType(module, reinterpret_cast<PyTypeObject*>(worker_type.get())) == 0;
}
