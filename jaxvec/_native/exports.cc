// What Python calls through ctypes: plain C, no Python in here.
#include "call.h"
#include "cuda.h"
#include "ffi.h"
#include "handoff.h"
#include "interrupts.h"
#include "pool.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void jaxvec_send(jaxvec::Parent* parent, uint32_t worker, uint32_t operation, const int64_t* slots,
                        uint32_t count) {
  jaxvec::send(*parent, worker, operation, slots, count);
}

EXPORT void jaxvec_pass_on(jaxvec::Parent* parent, uint32_t worker, const int64_t* requests,
                           const int64_t* slots, uint32_t count) {
  jaxvec::pass_on(*parent, worker, requests, slots, count);
}

EXPORT void jaxvec_notify_worker(jaxvec::Parent* parent, uint32_t worker) {
  jaxvec::notify_worker(*parent, worker);
}

EXPORT int32_t jaxvec_wait(jaxvec::Parent* parent, const int64_t* slots, uint32_t num_slots, uint32_t count,
                           int64_t timeout_ns) {
  return jaxvec::wait(*parent, slots, num_slots, count, timeout_ns);
}

EXPORT void jaxvec_take(jaxvec::Worker* worker, uint32_t* operation, int64_t* slots, uint32_t* count) {
  jaxvec::take(*worker, operation, slots, count);
}

EXPORT void jaxvec_post(jaxvec::Worker* worker, const int64_t* slots, uint32_t count) {
  jaxvec::post(*worker, slots, count);
}

EXPORT void jaxvec_mark_notices_seen(jaxvec::Parent* parent) { jaxvec::mark_notices_seen(*parent); }

EXPORT void jaxvec_notify_parent(jaxvec::Board* board) { jaxvec::notify_parent(*board); }

// Pools. Python's object holds one reference to the pool; programs that run hold others.
using SharedPool = std::shared_ptr<jaxvec::Pool>;

EXPORT SharedPool* jaxvec_pool_open(const jaxvec::Plan* plan) {
  auto* pool = new SharedPool(std::make_shared<jaxvec::Pool>(*plan));
  jaxvec::publish(plan->id, *pool);
  return pool;
}

EXPORT void jaxvec_pool_withdraw(uint32_t id) { jaxvec::withdraw(id); }
EXPORT void jaxvec_pool_free(SharedPool* pool) { delete pool; }
EXPORT jaxvec::State* jaxvec_pool_state(SharedPool* pool) { return &(*pool)->state; }
EXPORT int32_t jaxvec_pool_enter(SharedPool* pool, const int64_t* slots, uint32_t count, int32_t exclusive,
                                 int64_t timeout_ns) {
  return (*pool)->enter(slots, count, exclusive, timeout_ns);
}
EXPORT void jaxvec_pool_leave(SharedPool* pool) { (*pool)->leave(); }
EXPORT void jaxvec_pool_hold(SharedPool* pool, const int64_t* slots, uint32_t count, int32_t alone) {
  (*pool)->hold(slots, count, alone);
}
EXPORT int32_t jaxvec_pool_holds(SharedPool* pool) { return (*pool)->holds(); }
EXPORT void jaxvec_pool_release(SharedPool* pool) { (*pool)->release(); }
EXPORT uint32_t jaxvec_pool_move(SharedPool* pool, jaxvec::Request* request) {
  jaxvec::HostTarget target;
  return static_cast<uint32_t>((*pool)->move(*request, target));
}
EXPORT uint32_t jaxvec_pool_check_handle(SharedPool* pool, const int64_t* slots, const uint32_t* generation,
                                         uint32_t count) {
  return static_cast<uint32_t>((*pool)->check_handle(slots, generation, count));
}
EXPORT uint32_t jaxvec_pool_check_envs(SharedPool* pool, const int64_t* slots, uint32_t count,
                                       int32_t stepped) {
  return static_cast<uint32_t>((*pool)->check_envs(slots, count, stepped));
}
EXPORT void jaxvec_pool_wait_for_copies(SharedPool* pool) { (*pool)->wait_for_copies(); }

EXPORT void jaxvec_trace_start(SharedPool* pool, uint32_t capacity) { (*pool)->trace.start(capacity); }
EXPORT uint64_t jaxvec_trace_stop(SharedPool* pool, jaxvec::Span* spans) {
  return (*pool)->trace.stop(spans);
}

EXPORT void jaxvec_watch_interrupts() { jaxvec::watch_signals(); }
EXPORT uint32_t jaxvec_interrupts() { return jaxvec::interrupts(); }

// Programs.
EXPORT void jaxvec_set_python(const jaxvec::Python* python) { jaxvec::set_python(python); }
EXPORT void jaxvec_fail(jaxvec::Call* call, const char* error) { *call->error = error; }
EXPORT uint32_t jaxvec_ffi_version() { return jaxvec::ffi_version(); }
EXPORT void jaxvec_cuda_prepare(uint32_t calls, const uint64_t* bytes, uint32_t count) {
  jaxvec::prepare_cuda(calls, bytes, count);
}

// For tests: another driver, null for the machine's, and a call as XLA would make it.
EXPORT void jaxvec_cuda_use(const char* driver) { jaxvec::use_driver(driver); }
EXPORT int32_t jaxvec_cuda_call(jaxvec::Call* call, void* stream, char* error, uint32_t size) {
  const std::string text = jaxvec::answer_on_cuda(*call, stream);
  error[text.copy(error, size - 1)] = 0;
  return text.empty();
}
