// Stands in for CUDA's driver: a "device" whose memory is this process's, and whose streams put off all
// that can be put off until somebody waits. So whoever reuses memory too early gets caught.
//
// It notes every call, and fails on request. What it asks for that the real one may not: a current context
// in every call but those that need none.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kNotReady = 600;
constexpr int kInvalidContext = 201;
constexpr int kInvalidHandle = 400;

struct Event {
  void* stream = nullptr;
  uint64_t position = 0;  // in its stream
};

struct Stream {
  std::deque<std::function<void()>> late;
  uint64_t begun = 0;  // and `begun - late.size()` are done
};

std::mutex lock;
std::map<void*, Stream> streams;
std::map<const void*, size_t> registered;
std::string calls;
std::map<std::string, int> failures;
thread_local void* current = nullptr;

// Whether the call may go on; else `*code` says why not.
bool begin(const std::string& name, int* code, bool needs_context = true, const std::string& more = "") {
  calls += name + more + "\n";
  const auto failure = failures.find(name);
  *code = failure != failures.end()             ? failure->second
          : needs_context && current == nullptr ? kInvalidContext
                                                : 0;
  return *code == 0;
}

void run(Stream& stream, uint64_t until) {
  while (stream.begun - stream.late.size() < until) {
    stream.late.front()();
    stream.late.pop_front();
  }
}

int later(void* handle, std::function<void()> work) {
  Stream& stream = streams[handle];
  stream.late.push_back(std::move(work));
  ++stream.begun;
  return 0;
}

bool ready(const Event& event) {
  const Stream& stream = streams[event.stream];
  return stream.begun - stream.late.size() >= event.position;
}

}  // namespace

// What tests ask for.
EXPORT void fake_reset() {
  const std::lock_guard guard(lock);
  calls.clear();
  failures.clear();
  for (auto& [handle, stream] : streams) stream.late.clear();
}
EXPORT void fake_flush(void* stream) {
  const std::lock_guard guard(lock);
  run(streams[stream], streams[stream].begun);
}
EXPORT uint32_t fake_advance(void* stream) {  // by one piece of work; returns how much is left
  const std::lock_guard guard(lock);
  Stream& late = streams[stream];
  if (!late.late.empty()) run(late, late.begun - late.late.size() + 1);
  return static_cast<uint32_t>(late.late.size());
}
EXPORT void fake_fail(const char* name, int code) {
  const std::lock_guard guard(lock);
  failures[name] = code;
}
EXPORT uint32_t fake_take_calls(char* text, uint32_t size) {
  const std::lock_guard guard(lock);
  text[calls.copy(text, size - 1)] = 0;
  const auto length = static_cast<uint32_t>(calls.size());
  calls.clear();
  return length;
}
EXPORT uint32_t fake_registered() {
  const std::lock_guard guard(lock);
  return static_cast<uint32_t>(registered.size());
}

// The driver.
EXPORT int cuInit(unsigned) {
  const std::lock_guard guard(lock);
  int code;
  begin("cuInit", &code, false);
  return code;
}
EXPORT int cuGetErrorName(int code, const char** text) {
  *text = code == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : code == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : nullptr;
  return *text == nullptr;
}
EXPORT int cuGetErrorString(int code, const char** text) {
  *text = code == 700 ? "an illegal memory access" : code == 2 ? "out of memory" : nullptr;
  return *text == nullptr;
}
EXPORT int cuCtxGetCurrent(void** context) {
  *context = current;
  return 0;
}
EXPORT int cuCtxSetCurrent(void* context) {
  current = context;
  return 0;
}
EXPORT int cuDeviceGet(int* device, int ordinal) {
  const std::lock_guard guard(lock);
  int code;
  if (begin("cuDeviceGet", &code, false)) *device = ordinal;
  return code;
}
EXPORT int cuDevicePrimaryCtxRetain(void** context, int) {
  const std::lock_guard guard(lock);
  int code;
  if (begin("cuDevicePrimaryCtxRetain", &code, false)) *context = reinterpret_cast<void*>(0x1000);
  return code;
}
// Streams are numbers; those of a thousand belong to one context.
EXPORT int cuStreamGetCtx(void* stream, void** context) {
  *context = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(stream) / 0x1000 * 0x1000);
  return 0;
}
EXPORT int cuStreamSynchronize(void* stream) {
  const std::lock_guard guard(lock);
  int code;
  if (begin("cuStreamSynchronize", &code)) run(streams[stream], streams[stream].begun);
  return code;
}
EXPORT int cuMemHostAlloc(void** memory, size_t bytes, unsigned) {
  const std::lock_guard guard(lock);
  int code;
  if (begin("cuMemHostAlloc", &code)) *memory = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
  return code;
}
EXPORT int cuMemHostRegister_v2(void* memory, size_t bytes, unsigned flags) {
  const std::lock_guard guard(lock);
  int code;
  if (begin("cuMemHostRegister_v2", &code, true, " " + std::to_string(bytes) + " " + std::to_string(flags))) {
    if (!registered.emplace(memory, bytes).second) return 712;  // CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
  }
  return code;
}
EXPORT int cuMemHostUnregister(void* memory) {
  const std::lock_guard guard(lock);
  int code;
  if (begin("cuMemHostUnregister", &code)) {
    if (registered.erase(memory) == 0) return 713;              // CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED
    const volatile char touched = *static_cast<char*>(memory);  // must still be mapped
    (void)touched;
  }
  return code;
}
EXPORT int cuEventCreate(void** event, unsigned) {
  const std::lock_guard guard(lock);
  int code;
  if (begin("cuEventCreate", &code)) *event = new Event;
  return code;
}
EXPORT int cuEventRecord(void* event, void* stream) {
  const std::lock_guard guard(lock);
  int code;
  if (!begin("cuEventRecord", &code)) return code;
  if (reinterpret_cast<uintptr_t>(stream) / 0x1000 * 0x1000 != reinterpret_cast<uintptr_t>(current)) {
    return kInvalidHandle;
  }
  *static_cast<Event*>(event) = {stream, streams[stream].begun};
  return 0;
}
EXPORT int cuEventQuery(void* event) {
  const std::lock_guard guard(lock);
  int code;
  if (!begin("cuEventQuery", &code)) return code;
  return ready(*static_cast<Event*>(event)) ? 0 : kNotReady;
}
EXPORT int cuEventSynchronize(void* event) {
  const std::lock_guard guard(lock);
  int code;
  if (!begin("cuEventSynchronize", &code)) return code;
  const Event& awaited = *static_cast<Event*>(event);
  run(streams[awaited.stream], awaited.position);
  return 0;
}
EXPORT int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, void* stream) {
  const std::lock_guard guard(lock);
  int code;
  if (!begin("cuMemcpyHtoDAsync_v2", &code)) return code;
  return later(stream, [=] { std::memcpy(reinterpret_cast<void*>(to), from, bytes); });
}
EXPORT int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, void* stream) {
  const std::lock_guard guard(lock);
  int code;
  if (!begin("cuMemcpyDtoHAsync_v2", &code)) return code;
  return later(stream, [=] { std::memcpy(to, reinterpret_cast<const void*>(from), bytes); });
}
EXPORT int cuMemsetD8Async(uint64_t to, unsigned char value, size_t count, void* stream) {
  const std::lock_guard guard(lock);
  int code;
  if (!begin("cuMemsetD8Async", &code)) return code;
  return later(stream, [=] { std::memset(reinterpret_cast<void*>(to), value, count); });
}
