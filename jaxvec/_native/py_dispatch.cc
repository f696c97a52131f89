// `Parent` and `Worker`: the two ends of the dispatch for Python. native_dispatch.py wraps them.
#include <numeric>

#include "py_types.h"

namespace jaxvec {
namespace {

struct WorkerEnd {
  Ref marks;                   // keeps the segment mapped
  std::vector<int64_t> slots;  // all slots of the worker
  Worker worker{};
};

// Reads the addresses of the segment's words from a `Marks` (_memory/segment.py).
Board read_marks(PyObject* marks, uint32_t spin_ns, uint32_t look_around_ns) {
  Board board{};
  board.spin_ns = spin_ns;
  board.look_around_ns = look_around_ns;
  const auto find = [marks](const char* name, auto*& words) {
    const Ref array = own(PyObject_GetAttrString(marks, name));
    void* const data = PyArray_DATA(as_array(array.get()));
    words = static_cast<std::remove_reference_t<decltype(words)>>(data);
    return static_cast<uint32_t>(PyArray_DIM(as_array(array.get()), 0));
  };
  board.num_slots = find("requested", board.requested);
  find("completed", board.completed);
  find("completed_at", board.completed_at);
  board.num_workers = find("doorbell", board.doorbell);
  find("worker_notices", board.worker_notices);
  find("asleep", board.asleep);
  find("finished", board.finished);
  find("target", board.target);
  find("sleepers", board.sleepers);
  find("parent_notices", board.parent_notices);
  return board;
}

// --- Parent ---

Ref make_parent(PyObject* marks, const Slots& stops, const Numbers<int32_t, NPY_INT32>& sockets,
                uint32_t spin_ns, uint32_t look_around_ns) {
  Ref self = make_owner<ParentEnd>();
  auto& end = own_of<ParentEnd>(self.get());
  end.marks = share(marks);
  end.stops.assign(stops.data, stops.data + stops.count);
  end.sockets.assign(sockets.data, sockets.data + sockets.count);
  end.parent.board = read_marks(marks, spin_ns, look_around_ns);
  end.parent.stops = end.stops.data();
  end.parent.sockets = end.sockets.data();
  end.parent.num_sockets = sockets.count;
  return self;
}

void parent_send(ParentEnd& end, uint32_t operation, const Slots& slots) {
  without_gil([&] { send(end.parent, operation, slots.data, slots.count); });
}

void parent_notify_worker(ParentEnd& end, uint32_t worker) {
  without_gil([&] { notify_worker(end.parent.board, worker); });
}

bool parent_wait(ParentEnd& end, const Slots& slots, uint32_t count, int64_t timeout_ns) {
  return without_gil([&] { return wait(end.parent, slots.data, slots.count, count, timeout_ns); }) == kDone;
}

void parent_mark_notices_seen(ParentEnd& end) { mark_notices_seen(end.parent); }

void parent_notify_parent(ParentEnd& end) {
  without_gil([&] { notify_parent(end.parent.board); });
}

void parent_close(ParentEnd& end) { end.marks.reset(); }

PyMethodDef parent_methods[] = {
    define<parent_send>("send"),
    define<parent_notify_worker>("notify_worker"),
    define<parent_wait>("wait"),
    define<parent_mark_notices_seen>("mark_notices_seen"),
    define<parent_notify_parent>("notify_parent"),
    define<parent_close>("close"),
    {nullptr, nullptr, 0, nullptr},
};

// --- Worker ---

Ref make_worker(PyObject* marks, uint32_t index, uint32_t first, uint32_t stop, uint32_t notices,
                uint32_t spin_ns) {
  Ref self = make_owner<WorkerEnd>();
  auto& end = own_of<WorkerEnd>(self.get());
  end.marks = share(marks);
  end.worker = {read_marks(marks, spin_ns, 0), index, first, stop, notices};
  end.slots.resize(stop - first);
  std::iota(end.slots.begin(), end.slots.end(), first);
  return self;
}

// Stores the slots in an array with room for all of the worker's.
Ref worker_take(WorkerEnd& end, int64_t* slots) {
  uint32_t operation = 0, count = 0;
  without_gil([&] { take(end.worker, &operation, slots, &count); });
  return own(Py_BuildValue("II", operation, count));
}

void worker_post(WorkerEnd& end, const Slots& slots) {
  without_gil([&] { post(end.worker, slots.data, slots.count); });
}

void worker_post_some(WorkerEnd& end, uint32_t first, uint32_t count) {
  without_gil([&] { post(end.worker, end.slots.data() + (first - end.worker.first), count); });
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

PyMethodDef functions[] = {
    define<make_parent>("parent"),
    define<make_worker>("worker"),
    define<request_short_slices>("request_short_slices"),
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace
}  // namespace jaxvec

bool add_dispatch(PyObject* module) {
  using namespace jaxvec;
  return make_type<ParentEnd>("jaxvec._native._ext.Parent", {Py_tp_methods, parent_methods}) &&
         make_type<WorkerEnd>("jaxvec._native._ext.Worker", {Py_tp_methods, worker_methods}) &&
         PyModule_AddFunctions(module, functions) == 0;
}
