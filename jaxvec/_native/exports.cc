// What Python calls through ctypes: plain C, no Python in here.
#include "handoff.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

// Sizes of the structs that Python mirrors, so that a mismatch is found when the library is loaded.
EXPORT uint32_t jaxvec_sizeof_parent() { return sizeof(jaxvec::Parent); }
EXPORT uint32_t jaxvec_sizeof_worker() { return sizeof(jaxvec::Worker); }

EXPORT void jaxvec_send(jaxvec::Parent* parent, uint32_t worker, uint32_t operation, const int64_t* slots,
                        uint32_t count) {
  jaxvec::send(*parent, worker, operation, slots, count);
}

EXPORT void jaxvec_knock(jaxvec::Parent* parent, uint32_t worker) { jaxvec::knock(*parent, worker); }

EXPORT int32_t jaxvec_receive(jaxvec::Parent* parent, uint32_t count, int64_t* slots, int64_t timeout_ns) {
  return jaxvec::receive(*parent, count, slots, timeout_ns);
}

EXPORT void jaxvec_take(jaxvec::Worker* worker, uint32_t* operation, int64_t* slots, uint32_t* count) {
  jaxvec::take(*worker, operation, slots, count);
}

EXPORT void jaxvec_post(jaxvec::Worker* worker, const int64_t* slots, uint32_t count) {
  jaxvec::post(*worker, slots, count);
}

EXPORT void jaxvec_ring(jaxvec::Worker* worker) { jaxvec::ring(worker->board); }
