// `Parent` and `Worker`, the two ends of the dispatch, and `Engine`, the engine of a pool that compiled
// programs step without Python. native_dispatch.py and native_engine.py wrap them.
#include <algorithm>
#include <utility>
#include <vector>

#include "engine.h"
#include "python.h"

namespace jaxvec {
namespace {

struct ParentEnd : Parent {
  Ref kept;  // the owners of the memory to which the base refers; until `close`
};

struct WorkerEnd : Worker {
  Ref kept;              // as above
  const int64_t* slots;  // all slots of the worker
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
  find("common_bell", board.common_bell);
  find("worker_notices", board.worker_notices);
  find("asleep", board.asleep);
  find("finished", board.finished);
  find("target", board.target);
  find("sleepers", board.sleepers);
  find("parent_notices", board.parent_notices);
  return board;
}

// --- `Parent`: the parent's end of the dispatch ---

Ref make_parent(PyObject* marks, const Slots& stops, const Numbers<int32_t, NPY_INT32>& sockets,
                uint32_t spin_ns, uint32_t look_around_ns, int64_t longest_spin_ns, bool rings_once) {
  Ref self = make_owner<ParentEnd>();
  auto& end = own_of<ParentEnd>(self.get());
  end.board = read_marks(marks, spin_ns, look_around_ns);
  end.stops = stops.data;
  end.sockets = sockets.data;
  end.num_sockets = sockets.count;
  end.longest_spin_ns = longest_spin_ns;
  end.rings_once = rings_once;
  end.kept = own(PyTuple_Pack(3, marks, stops.array.get(), sockets.array.get()));
  return self;
}

void parent_send(ParentEnd& end, uint32_t operation, const Slots& slots) {
  without_gil([&] { send(end, operation, slots.data, slots.count); });
}

void parent_notify_worker(ParentEnd& end, uint32_t worker) { notify_worker(end.board, worker); }

bool parent_wait(ParentEnd& end, const Slots& slots, uint32_t count, int64_t timeout_ns) {
  return without_gil(
      [&] { return wait(end, slots.data, slots.count, count, now_ns() + timeout_ns) == kDone; });
}

void parent_mark_notices_seen(ParentEnd& end) { mark_notices_seen(end); }

void parent_close(ParentEnd& end) { end.kept.reset(); }

// --- `Worker`: a worker's end of the dispatch ---

constexpr uint32_t kIdleNs = 1'000'000'000;  // after which `take` returns without work

Ref make_worker(PyObject* marks, uint32_t index, const Slots& slots, uint32_t notices, uint32_t spin_ns,
                bool keeps_core) {
  Ref self = make_owner<WorkerEnd>();
  auto& end = own_of<WorkerEnd>(self.get());
  const auto first = static_cast<uint32_t>(slots.data[0]);
  static_cast<Worker&>(end) = {
      read_marks(marks, spin_ns, kIdleNs), index, first, first + slots.count, notices, keeps_core};
  end.slots = slots.data;
  end.kept = own(PyTuple_Pack(2, marks, slots.array.get()));
  return self;
}

// Stores the slots in an array with room for all of the worker's.
Ref worker_take(WorkerEnd& end, int64_t* slots) {
  uint32_t operation = 0, count = 0;
  without_gil([&] { take(end, &operation, slots, &count); });
  return own(Py_BuildValue("II", operation, count));
}

void worker_post(WorkerEnd& end, const Slots& slots) {
  without_gil([&] { post(end, slots.data, slots.count); });
}

void worker_post_some(WorkerEnd& end, uint32_t first, uint32_t count) {
  without_gil([&] { post(end, end.slots + (first - end.first), count); });
}

void worker_mark_notice_seen(WorkerEnd& end) { ++end.seen_notices; }

void worker_notify_parent(WorkerEnd& end) { notify_parent(end.board); }

// --- `Engine` ---

thread_local PyObject* failure = nullptr;  // of this thread's latest `PythonEnvs::step`; an owned reference

// Envs in this process. The fields need the GIL; the engine owns their objects until `close`.
class PythonEnvs : public LocalEnvs {
 public:
  explicit PythonEnvs(PyObject* step_slots) : step_slots_(step_slots) {}

  bool step(const std::vector<int64_t>& slots) override {
    const WithGil gil;
    if (step_slots_ == nullptr) return false;
    const Ref function = share(step_slots_);
    auto count = static_cast<npy_intp>(slots.size());
    try {
      const Ref array = own(PyArray_SimpleNew(1, &count, NPY_INT64));
      std::copy(slots.begin(), slots.end(), static_cast<int64_t*>(PyArray_DATA(as_array(array.get()))));
      own(PyObject_CallFunctionObjArgs(function.get(), array.get(), nullptr));
    } catch (const PythonError&) {
      failure = take_exception().release();
      return false;
    }
    return step_slots_ != nullptr;
  }

  void close() { step_slots_ = nullptr; }

 private:
  PyObject* step_slots_;  // function of an array [n] int64; null if the pool is closed
};

// This object holds one reference to the engine, and running programs hold others. All fields need the GIL.
struct EngineObject {
  Ref kept;                  // the arguments, which own the plan's memory; until `close`
  std::vector<Ref> results;  // leaves in the segment
  Plan plan{};               // pointers are valid until `close`
  uint32_t num_slots = 0;
  std::shared_ptr<Engine> engine;
  std::shared_ptr<PythonEnvs> local;  // null if workers have the envs

  // Returns a list of new arrays for the rows of a time step. Leaves in `unread` get no rows and a null
  // pointer.
  Ref make_rows(npy_intp rows, PyObject* unread, std::vector<void*>* pointers) const {
    Ref all = own(PyList_New(static_cast<Py_ssize_t>(results.size())));
    for (size_t i = 0; i < results.size(); ++i) {
      PyArrayObject* leaf = as_array(results[i].get());
      std::vector<npy_intp> dims(PyArray_DIMS(leaf), PyArray_DIMS(leaf) + PyArray_NDIM(leaf));
      const bool skipped = is_true(PySet_Contains(unread, own(PyLong_FromSize_t(i)).get()));
      dims[0] = skipped ? 0 : rows;
      Py_IncRef(reinterpret_cast<PyObject*>(PyArray_DESCR(leaf)));  // PyArray_Empty takes it
      Ref array = own(PyArray_Empty(PyArray_NDIM(leaf), dims.data(), PyArray_DESCR(leaf), 0));
      pointers->push_back(dims[0] > 0 ? PyArray_DATA(as_array(array.get())) : nullptr);
      PyList_SetItem(all.get(), static_cast<Py_ssize_t>(i), array.release());
    }
    return all;
  }
};

// Returns an engine, and an array uint32 over its `State`.
Ref make_engine(PyObject* arguments) {
  Ref object = make_owner<EngineObject>();
  auto& self = own_of<EngineObject>(object.get());
  Plan& plan = self.plan;
  Arrays actions, results;
  std::vector<Ref> nonzero;
  PyObject *parent, *step_here;
  const Items read_item{arguments};
  read_item("pool_id", &plan.id);
  read_item("parent", &parent);
  read_item("fingerprint", &plan.fingerprint);
  read_item("batch_size", &plan.batch_size);
  read_item("in_order", &plan.in_order);
  read_item("all_at_once", &plan.all_at_once);
  read_item("wait_ns", &plan.wait_ns);
  read_item("step_ns", &plan.step_ns);
  read_item("generation", &plan.generation);
  read_item("actions", &actions);
  read_item("num_options", &plan.num_options);
  read_item("results", &results);
  read_item("nonzero", &nonzero);
  read_item("in_flight", &plan.in_flight);
  read_item("sent", &plan.sent);
  read_item("num_sent", &plan.num_sent);
  read_item("due", &plan.due);
  read_item("needs_reset", &plan.needs_reset);
  read_item("terminated", &plan.terminated);
  read_item("truncated", &plan.truncated);
  read_item("step_here", &step_here);
  plan.parent = &own_of<ParentEnd>(parent);
  plan.actions = std::move(actions.arrays);
  plan.results = std::move(results.arrays);
  for (size_t i = 0; i < plan.results.size(); ++i) read(nonzero[i].get(), &plan.results[i].nonzero);
  if (step_here != Py_None) plan.local = self.local = std::make_shared<PythonEnvs>(step_here);
  self.kept = share(arguments);
  self.results = std::move(results.items);
  self.num_slots = plan.parent->board.num_slots;
  self.engine = std::make_shared<Engine>(plan);
  self.engine->state.open = 1;
  publish(plan.id, self.engine);
  npy_intp size = sizeof(State) / sizeof(uint32_t);
  Ref state = own(PyArray_SimpleNewFromData(1, &size, NPY_UINT32, &self.engine->state));
  check(PyArray_SetBaseObject(as_array(state.get()), share(object.get()).release()) == 0);
  return own(Py_BuildValue("NN", object.release(), state.release()));
}

// --- Locks ---

template <auto function>
auto call(EngineObject& self) {
  return without_gil([&] { return (*self.engine.*function)(); });
}

bool engine_enter(EngineObject& self, const Slots& slots, bool exclusive, int64_t timeout_ns) {
  return without_gil([&] { return self.engine->enter(slots.data, slots.count, exclusive, timeout_ns); });
}

void engine_hold(EngineObject& self, const Slots& slots, bool alone) {
  self.engine->hold(slots.data, slots.count, alone);
}

// --- Moves ---

Ref engine_move(EngineObject& self, uint32_t verb, uint32_t caller_code, bool new_generation,
                const Slots& slots, const Generation& generation, const Slots& sent,
                std::vector<Ref>& actions, PyObject* unread) {
  std::vector<const void*> action_pointers;
  for (Ref& action : actions) {
    action = own(PyArray_FROM_OF(action.get(), NPY_ARRAY_C_CONTIGUOUS));
    action_pointers.push_back(PyArray_DATA(as_array(action.get())));
  }
  action_pointers.resize(self.plan.actions.size());  // null for reset options that the caller does not have
  std::vector<void*> result_pointers;
  Ref rows = own(PyList_New(0));
  if (verb != kSend) {
    const uint32_t count = slots.data == nullptr ? self.num_slots : slots.count;
    rows = self.make_rows(verb == kRecv ? self.plan.batch_size : count, unread, &result_pointers);
  }
  Request request{verb,
                  caller_code,
                  new_generation,
                  slots.count,
                  sent.count,
                  slots.data,
                  generation.data,
                  sent.data,
                  action_pointers.data(),
                  result_pointers.data(),
                  0};
  const Status status = without_gil([&] {
    HostTarget target;
    return self.engine->move(request, target);
  });
  if (const Ref exception = take_failure()) raise_again(exception);
  return own(Py_BuildValue("INl", static_cast<uint32_t>(status), rows.release(), request.waited_ns));
}

uint32_t engine_check_handle(EngineObject& self, const Slots& slots, const Generation& generation) {
  return static_cast<uint32_t>(self.engine->check_handle(slots.data, generation.data, slots.count));
}

uint32_t engine_check_envs(EngineObject& self, const Slots& slots, bool stepped) {
  return static_cast<uint32_t>(self.engine->check_envs(slots.data, slots.count, stepped));
}

// --- State ---

void engine_start_trace(EngineObject& self, uint32_t capacity) { self.engine->trace.start(capacity); }

// Returns the memory of the spans, and the number of all spans so far.
Ref engine_stop_trace(EngineObject& self) {
  uint64_t count;
  const std::vector<Span> spans = self.engine->trace.stop(&count);
  const auto bytes = static_cast<Py_ssize_t>(spans.size() * sizeof(Span));
  return own(Py_BuildValue("y#k", spans.data(), bytes, count));
}

void engine_close(EngineObject& self) {
  self.engine->state.open = 0;
  withdraw(self.plan.id);
  if (self.local != nullptr) self.local->close();
  self.kept.reset();
  self.results.clear();
}

}  // namespace
}  // namespace jaxvec

Ref take_failure() { return Ref(std::exchange(jaxvec::failure, nullptr)); }

void add_engine(PyObject* module) {
  using namespace jaxvec;
  make_type<ParentEnd>("jaxvec._native._ext.Parent",
                       {define<parent_send>("send"), define<parent_notify_worker>("notify_worker"),
                        define<parent_wait>("wait"), define<parent_mark_notices_seen>("mark_notices_seen"),
                        define<parent_close>("close")});
  make_type<WorkerEnd>(
      "jaxvec._native._ext.Worker",
      {define<worker_take>("take"), define<worker_post>("post"), define<worker_post_some>("post_some"),
       define<worker_mark_notice_seen>("mark_notice_seen"), define<worker_notify_parent>("notify_parent")});
  make_type<EngineObject>(
      "jaxvec._native._ext.Engine",
      {define<engine_enter>("enter"), define<call<&Engine::leave>>("leave"), define<engine_hold>("hold"),
       define<call<&Engine::holds>>("holds"), define<call<&Engine::release>>("release"),
       define<engine_move>("move"), define<engine_check_handle>("check_handle"),
       define<engine_check_envs>("check_envs"), define<call<&Engine::wait_for_copies>>("wait_for_copies"),
       define<engine_start_trace>("start_trace"), define<engine_stop_trace>("stop_trace"),
       define<engine_close>("close")});
  add_functions(module,
                {define<make_parent>("parent"), define<make_worker>("worker"),
                 define<request_short_slices>("request_short_slices"), define<make_engine>("engine")});
}
