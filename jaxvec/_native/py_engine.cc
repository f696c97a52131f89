// `Engine`: the engine of a pool that compiled programs step without Python. native_engine.py wraps it.
#include <cstring>
#include <utility>
#include <vector>

#include "engine.h"
#include "py_types.h"

namespace jaxvec {
namespace {

constexpr npy_intp kAlignment = 64;  // bytes, of each leaf's rows

thread_local PyObject* failure = nullptr;  // of this thread's latest `PythonEnvs::step`; an owned reference

// Envs in this process. The fields need the GIL; the engine owns their objects until `close`.
class PythonEnvs : public LocalEnvs {
 public:
  PythonEnvs(PyObject* step_slots, PyObject* all_slots) : step_slots_(step_slots), all_slots_(all_slots) {}

  bool step(const std::vector<int64_t>& slots) override {
    const WithGil gil;
    if (step_slots_ == nullptr) return false;
    const Ref function = share(step_slots_);
    try {
      own(PyObject_CallFunctionObjArgs(function.get(), to_array(slots).get(), nullptr));
    } catch (const PythonError&) {
      failure = take_exception().release();
      return false;
    }
    return step_slots_ != nullptr;
  }

  void close() { step_slots_ = all_slots_ = nullptr; }

 private:
  // Returns an array of slots, for all slots always the same one.
  Ref to_array(const std::vector<int64_t>& slots) const {
    auto count = static_cast<npy_intp>(slots.size());
    const size_t bytes = slots.size() * sizeof(int64_t);
    PyArrayObject* const all = as_array(all_slots_);
    if (PyArray_SIZE(all) == count && std::memcmp(PyArray_DATA(all), slots.data(), bytes) == 0) {
      return share(all_slots_);
    }
    Ref array = own(PyArray_SimpleNew(1, &count, NPY_INT64));
    std::memcpy(PyArray_DATA(as_array(array.get())), slots.data(), bytes);
    return array;
  }

  PyObject* step_slots_;  // function of an array [n] int64; null if the pool is closed
  PyObject* all_slots_;   // array [num_slots] int64
};

// This object holds one reference to the engine, and running programs hold others. All fields need the GIL.
struct EngineObject {
  Ref kept;                  // the arguments, which own the plan's memory; until `close`
  std::vector<Ref> results;  // leaves in the segment
  uint32_t id = 0, batch_size = 0, num_slots = 0;
  size_t num_actions = 0;
  std::shared_ptr<Engine> engine;
  std::shared_ptr<PythonEnvs> local;  // null if workers have the envs

  // Returns a list of new arrays for the rows of a time step. Leaves in `unread` get no rows and a null
  // pointer. All rows are one allocation, since each allocation costs time.
  Ref make_rows(npy_intp rows, PyObject* unread, std::vector<void*>* pointers) const {
    std::vector<npy_intp> counts, offsets;
    npy_intp size = 0;
    for (size_t i = 0; i < results.size(); ++i) {
      const int skipped = PySet_Contains(unread, own(PyLong_FromSize_t(i)).get());
      if (skipped < 0) throw PythonError();
      counts.push_back(skipped != 0 ? 0 : rows);
      offsets.push_back(size);
      PyArrayObject* leaf = as_array(results[i].get());
      const npy_intp bytes = counts[i] * (PyArray_NBYTES(leaf) / PyArray_DIM(leaf, 0));
      size += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    }
    const Ref memory = own(PyArray_SimpleNew(1, &size, NPY_UINT8));
    Ref all = own(PyList_New(static_cast<Py_ssize_t>(results.size())));
    for (size_t i = 0; i < results.size(); ++i) {
      PyArrayObject* leaf = as_array(results[i].get());
      std::vector<npy_intp> dims(PyArray_DIMS(leaf), PyArray_DIMS(leaf) + PyArray_NDIM(leaf));
      dims[0] = counts[i];
      void* const data = PyArray_BYTES(as_array(memory.get())) + offsets[i];
      pointers->push_back(dims[0] > 0 ? data : nullptr);
      Ref array = make_array(PyArray_DESCR(leaf), dims, data);
      if (PyArray_SetBaseObject(as_array(array.get()), Py_NewRef(memory.get())) < 0) throw PythonError();
      PyList_SetItem(all.get(), static_cast<Py_ssize_t>(i), array.release());
    }
    return all;
  }
};

// A converter for "O&".
template <typename T>
int convert(PyObject* from, void* to) try {
  read(from, static_cast<T*>(to));
  return 1;
} catch (const PythonError&) {
  return 0;
}

PyObject* make_engine(PyObject*, PyObject* args, PyObject* kwargs) try {
  static const char* names[] = {"pool_id",     "parent",    "fingerprint", "batch_size", "in_order",
                                "all_at_once", "wait_ns",   "step_ns",     "generation", "actions",
                                "num_options", "results",   "nonzero",     "in_flight",  "sent",
                                "num_sent",    "due",       "needs_reset", "terminated", "truncated",
                                "step_here",   "all_slots", nullptr};
  Plan plan{};
  Arrays actions, results;
  std::vector<Ref> nonzero;
  PyObject *parent, *step_here, *all_slots;
  if (!PyArg_ParseTupleAndKeywords(
          args, kwargs, "$IO!lIppllO&O&IO&O&O&O&O&O&O&O&O&OO!:engine", const_cast<char**>(names), &plan.id,
          type_of<ParentEnd>, &parent, &plan.fingerprint, &plan.batch_size, &plan.in_order, &plan.all_at_once,
          &plan.wait_ns, &plan.step_ns, convert<uint32_t*>, &plan.generation, convert<Arrays>, &actions,
          &plan.num_options, convert<Arrays>, &results, convert<std::vector<Ref>>, &nonzero,
          convert<uint8_t*>, &plan.in_flight, convert<int64_t*>, &plan.sent, convert<uint32_t*>,
          &plan.num_sent, convert<int64_t*>, &plan.due, convert<uint8_t*>, &plan.needs_reset,
          convert<const uint8_t*>, &plan.terminated, convert<const uint8_t*>, &plan.truncated, &step_here,
          &PyArray_Type, &all_slots)) {
    return nullptr;
  }
  Ref object = make_owner<EngineObject>();
  auto& self = own_of<EngineObject>(object.get());
  plan.parent = &own_of<ParentEnd>(parent).parent;
  plan.actions = std::move(actions.arrays);
  plan.results = std::move(results.arrays);
  for (size_t i = 0; i < plan.results.size(); ++i) read(nonzero[i].get(), &plan.results[i].nonzero);
  if (step_here != Py_None) plan.local = self.local = std::make_shared<PythonEnvs>(step_here, all_slots);
  self.kept = share(kwargs);
  self.results = std::move(results.items);
  self.id = plan.id;
  self.batch_size = plan.batch_size;
  self.num_slots = plan.parent->board.num_slots;
  self.num_actions = plan.actions.size();
  self.engine = std::make_shared<Engine>(plan);
  self.engine->state.open = 1;
  publish(plan.id, self.engine);
  return object.release();
} catch (const PythonError&) {
  return nullptr;
}

// --- Locks ---

template <void (Engine::*function)()>
void call(EngineObject& self) {
  without_gil([&] { (*self.engine.*function)(); });
}

bool engine_enter(EngineObject& self, const Slots& slots, bool exclusive, int64_t timeout_ns) {
  return without_gil([&] { return self.engine->enter(slots.data, slots.count, exclusive, timeout_ns); });
}

void engine_hold(EngineObject& self, const Slots& slots, bool alone) {
  without_gil([&] { self.engine->hold(slots.data, slots.count, alone); });
}

bool engine_holds(EngineObject& self) {
  return without_gil([&] { return self.engine->holds(); });
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
  action_pointers.resize(self.num_actions);  // null for reset options that the caller does not have
  std::vector<void*> result_pointers;
  Ref rows = own(PyList_New(0));
  if (verb != kSend) {
    const uint32_t count = slots.data == nullptr ? self.num_slots : slots.count;
    rows = self.make_rows(verb == kRecv ? self.batch_size : count, unread, &result_pointers);
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
  const auto check = [&] { return self.engine->check_handle(slots.data, generation.data, slots.count); };
  return static_cast<uint32_t>(without_gil(check));
}

uint32_t engine_check_envs(EngineObject& self, const Slots& slots, bool stepped) {
  const auto check = [&] { return self.engine->check_envs(slots.data, slots.count, stepped); };
  return static_cast<uint32_t>(without_gil(check));
}

// --- State ---

void engine_close_fast_path(EngineObject& self) { self.engine->state.open = 0; }

void engine_allow_gpu(EngineObject& self) { self.engine->state.devices = 1; }

void engine_count_success(EngineObject& self) {
  self.engine->state.num_served.fetch_add(1, std::memory_order_relaxed);
}

uint32_t engine_num_served(EngineObject& self) { return self.engine->state.num_served; }

uint32_t engine_last_caller(EngineObject& self) { return self.engine->state.last_caller; }

void engine_set_last_caller(EngineObject& self, uint32_t code) { self.engine->state.last_caller = code; }

void engine_start_trace(EngineObject& self, uint32_t capacity) {
  without_gil([&] { self.engine->trace.start(capacity); });
}

Ref engine_stop_trace(EngineObject& self) {
  uint64_t num_lost;
  const std::vector<Span> spans = without_gil([&] { return self.engine->trace.stop(&num_lost); });
  Ref all = own(PyList_New(0));
  for (const Span& span : spans) {
    const Ref row = own(Py_BuildValue("IllI", span.what, span.start_ns, span.end_ns, span.thread));
    if (PyList_Append(all.get(), row.get()) < 0) throw PythonError();
  }
  return own(Py_BuildValue("Nk", all.release(), num_lost));
}

void engine_close(EngineObject& self) {
  self.engine->state.open = 0;
  withdraw(self.id);
  if (self.local != nullptr) self.local->close();
  self.kept.reset();
  self.results.clear();
}

PyMethodDef methods[] = {
    define<engine_enter>("enter"),
    define<call<&Engine::leave>>("leave"),
    define<engine_hold>("hold"),
    define<engine_holds>("holds"),
    define<call<&Engine::release>>("release"),
    define<engine_move>("move"),
    define<engine_check_handle>("check_handle"),
    define<engine_check_envs>("check_envs"),
    define<call<&Engine::wait_for_copies>>("wait_for_copies"),
    define<engine_close_fast_path>("close_fast_path"),
    define<engine_allow_gpu>("allow_gpu"),
    define<engine_count_success>("count_success"),
    define<engine_num_served>("num_served"),
    define<engine_last_caller>("last_caller"),
    define<engine_set_last_caller>("set_last_caller"),
    define<engine_start_trace>("start_trace"),
    define<engine_stop_trace>("stop_trace"),
    define<engine_close>("close"),
    {nullptr, nullptr, 0, nullptr},
};

PyMethodDef functions[] = {
    {"engine", as_method(make_engine), METH_VARARGS | METH_KEYWORDS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

Ref take_failure() { return Ref(std::exchange(failure, nullptr)); }

}  // namespace jaxvec

bool add_engine(PyObject* module) {
  using namespace jaxvec;
  return make_type<EngineObject>("jaxvec._native._ext.Engine", {Py_tp_methods, methods}) &&
         PyModule_AddFunctions(module, functions) == 0;
}
