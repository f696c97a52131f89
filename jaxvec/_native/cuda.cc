#include "cuda.h"

#include <dlfcn.h>

#include <atomic>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <type_traits>
#include <vector>

#include "interrupts.h"

namespace jaxvec {
namespace {

constexpr int kSuccess = 0;             // CUDA_SUCCESS
constexpr unsigned kPortable = 1;       // CU_MEMHOSTALLOC_PORTABLE
constexpr unsigned kDisableTiming = 2;  // CU_EVENT_DISABLE_TIMING

using Address = uint64_t;  // CUdeviceptr
Address address(const void* pointer) { return reinterpret_cast<Address>(pointer); }

// The driver's functions that we use. Contexts, streams and events are opaque pointers.
struct Driver {
  struct Symbol {
    void* address;
    template <typename Function>
    operator Function*() const {
      return reinterpret_cast<Function*>(address);
    }
  };

  Symbol find(const char* name) const { return {dlsym(library, name)}; }

  void* library;
  int (*get_error_name)(int, const char**) = find("cuGetErrorName");
  int (*get_error_string)(int, const char**) = find("cuGetErrorString");
  int (*get_current)(void** context) = find("cuCtxGetCurrent");
  int (*set_current)(void* context) = find("cuCtxSetCurrent");
  int (*context_of)(void* stream, void** context) = find("cuStreamGetCtx");
  int (*synchronize)(void* stream) = find("cuStreamSynchronize");
  int (*allocate)(void** memory, size_t bytes, unsigned flags) = find("cuMemHostAlloc");
  int (*create_event)(void** event, unsigned flags) = find("cuEventCreate");
  int (*record)(void* event, void* stream) = find("cuEventRecord");
  int (*query)(void* event) = find("cuEventQuery");
  int (*await)(void* event) = find("cuEventSynchronize");
  int (*to_host)(void* to, Address from, size_t bytes, void* stream) = find("cuMemcpyDtoHAsync_v2");
  int (*to_device)(Address to, const void* from, size_t bytes, void* stream) = find("cuMemcpyHtoDAsync_v2");
  int (*fill)(Address to, unsigned char value, size_t count, void* stream) = find("cuMemsetD8Async");
};

// Calls the driver's functions. After the first failure it stores an error text and makes no further calls.
struct DriverCalls {
  explicit DriverCalls(const Driver& driver) : driver(driver) {}

  template <typename... Arguments>
  bool operator()(const char* name, int (*function)(Arguments...),
                  std::common_type_t<Arguments>... arguments) {
    if (!error.empty()) return false;
    const int code = function(arguments...);
    if (code == kSuccess) return true;
    const char *symbol = nullptr, *text = nullptr;
    driver.get_error_name(code, &symbol);
    driver.get_error_string(code, &text);
    error = std::string(name) + ": " + (symbol == nullptr ? "CUDA error " + std::to_string(code) : symbol) +
            (text == nullptr ? "" : std::string(" (") + text + ")");
    return false;
  }

  const Driver& driver;
  std::string error;
};

// Makes a context current in its scope. XLA's threads have it current already.
class Activation {
 public:
  Activation(const Driver& driver, void* context) : driver_(driver) {
    changed_ = driver.get_current(&before_) == kSuccess && before_ != context &&
               driver.set_current(context) == kSuccess;
  }
  ~Activation() {
    if (changed_) driver_.set_current(before_);
  }
  Activation(const Activation&) = delete;

 private:
  const Driver& driver_;
  void* before_ = nullptr;
  bool changed_ = false;
};

// Returns the space of an array in a staging buffer, where each array is aligned.
size_t padded(size_t bytes) {
  constexpr size_t kAlignment = 64;
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// A buffer of page-locked memory. One call at a time owns it, until its copies are done; as `Copies` it
// represents these. It works with every GPU of this process.
class Staging : public Copies {
 public:
  // If no memory can be page-locked, ordinary memory is used. The driver then copies from it before it
  // returns, which is as safe and slower.
  Staging(const Driver& driver, size_t size) : driver(driver), size(size) {
    void* memory = nullptr;
    const bool locked = driver.allocate(&memory, size, kPortable) == kSuccess;
    if (!locked) memory = std::aligned_alloc(padded(1), size);
    if (memory == nullptr) throw std::bad_alloc();
    memory_ = static_cast<char*>(memory);
  }

  // Returns memory for the call. The total never exceeds `size`.
  void* take(size_t bytes) {
    void* const memory = memory_ + taken_;
    taken_ += padded(bytes);
    return memory;
  }

  // Makes this represent all work on the stream so far.
  bool record(DriverCalls& calls, void* context, void* stream) {
    Event& event = events_.try_emplace(context, Event{context, nullptr}).first->second;
    if (event.event == nullptr) {
      if (!calls("cuEventCreate", driver.create_event, &event.event, kDisableTiming)) return false;
    }
    recorded_ = &event;
    return calls("cuEventRecord", driver.record, event.event, stream);
  }

  // If the event has failed, so has the device, and nothing is copied any more.
  bool done() override { return call_with_event(driver.query) != kNotReady; }
  void wait() override { call_with_event(driver.await); }

  void reuse() { taken_ = 0; }

  const Driver& driver;
  const size_t size;

 private:
  static constexpr int kNotReady = 600;  // CUDA_ERROR_NOT_READY

  struct Event {
    void* context;
    void* event;
  };

  int call_with_event(int (*function)(void* event)) {
    const Event* const recorded = recorded_;
    if (recorded == nullptr) return kSuccess;
    const Activation activation(driver, recorded->context);
    return function(recorded->event);
  }

  char* memory_;
  size_t taken_ = 0;
  std::map<void*, Event> events_;                // by context
  std::atomic<const Event*> recorded_{nullptr};  // written by the call; pools read it in `done` and `wait`
};

// The unused staging buffers. They are never freed: page-locking takes long and may wait for all GPUs of the
// process. So buffers are made before programs run, and a call makes one only if none is left.
class StagingPool {
 public:
  std::shared_ptr<Staging> take(const Driver& driver, size_t bytes) {
    {
      const std::lock_guard lock(lock_);
      for (auto entry = free_.lower_bound(bytes); entry != free_.end(); ++entry) {
        if (!entry->second->done()) continue;
        std::shared_ptr<Staging> staging = std::move(entry->second);
        free_.erase(entry);
        staging->reuse();
        return staging;
      }
    }
    return std::make_shared<Staging>(driver, size_for(bytes));
  }

  void give(std::shared_ptr<Staging> staging) {
    const std::lock_guard lock(lock_);
    free_.emplace(staging->size, std::move(staging));
  }

  // Makes buffers until `count` fit calls of `bytes`. Allocates without the lock: page-locking may wait for a
  // GPU, and that GPU may wait for a call that needs the lock.
  void prepare(const Driver& driver, size_t count, size_t bytes) {
    size_t existing = 0;
    {
      const std::lock_guard lock(lock_);
      existing = std::distance(free_.lower_bound(bytes), free_.end());
    }
    for (; existing < count; ++existing) give(std::make_shared<Staging>(driver, size_for(bytes)));
  }

  // Drops the buffers, which belong to another driver.
  void clear() {
    const std::lock_guard lock(lock_);
    free_.clear();
  }

 private:
  // Rounds up to a power of two, so that calls of several programs can share a buffer.
  static size_t size_for(size_t bytes) {
    size_t size = 256 * 1024;
    while (size < bytes) size *= 2;
    return size;
  }

  std::mutex lock_;
  std::multimap<size_t, std::shared_ptr<Staging>> free_;  // by size; under the lock
};

StagingPool& stagings() {
  static auto* all = new StagingPool;  // outlives every thread
  return *all;
}

// The small results, which one copy moves to the GPU: the token and those packed with it.
struct Packed {
  char* device;
  char* host;  // in the call's staging buffer
  size_t bytes;

  bool contains(const Array& result) const {  // a result on the GPU
    const size_t offset = address(result.data) - address(device);
    return offset < bytes && bytes_of(result) <= bytes - offset;
  }
  bool contains_host(const void* memory) const { return address(memory) - address(host) < bytes; }
};

// The memory of results on a GPU.
//
// Large results are copied straight from the segment, and the step returns before these copies are done. So a
// worker of the next step could overwrite rows that are still being read. The token prevents this: it is
// copied after all rows on the same stream, so a caller that has the token, on the device or on the host, has
// it after the rows were read, and only a caller with the token can move these envs again. A call waits for
// its stream to read its token on the host before it dispatches anything. So successive steps need no second
// set of results and wait only for their actions. The other side of this race: callers without a token
// (functions of the host, a reset that starts from the pool, `close`) call `Engine::wait_for_copies` first.
//
// Small results are gathered in the packed buffer and copied together with the token.
class CudaTarget : public Target {
 public:
  CudaTarget(DriverCalls& calls, void* context, void* stream, std::shared_ptr<Staging> staging,
             const Packed& packed)
      : calls_(calls), context_(context), stream_(stream), staging_(std::move(staging)), packed_(packed) {}

  void put(void* to, const std::vector<Run>& runs) override {
    if (packed_.contains_host(to)) return host_.put(to, runs);
    size_t bytes = 0;
    for (const Run& run : runs) bytes += run.bytes;
    if (bytes == 0) return;
    char* target = static_cast<char*>(to);
    if (bytes < runs.size() * kLarge && runs.size() > 1) {
      // Starting a copy takes about as long as copying kLarge bytes, so smaller pieces are gathered first.
      void* const gathered = staging_->take(bytes);
      host_.put(gathered, runs);
      copy(target, gathered, bytes);
      return;
    }
    for (const Run& run : runs) {
      if (run.from != nullptr) {
        copy(target, run.from, run.bytes);
      } else {
        calls_("cuMemsetD8Async", calls_.driver.fill, address(target), 0, run.bytes, stream_);
      }
      target += run.bytes;
    }
  }

  std::shared_ptr<Copies> finish() override {
    copy(packed_.device, packed_.host, packed_.bytes);
    if (!staging_->record(calls_, context_, stream_)) calls_.driver.synchronize(stream_);
    return staging_;
  }

 private:
  static constexpr size_t kLarge = 16 * 1024;

  void copy(void* to, const void* from, size_t bytes) {
    if (bytes == 0) return;
    calls_("cuMemcpyHtoDAsync", calls_.driver.to_device, address(to), from, bytes, stream_);
  }

  DriverCalls& calls_;
  void* const context_;
  void* const stream_;
  const std::shared_ptr<Staging> staging_;
  const Packed packed_;
  HostTarget host_;
};

std::mutex driver_lock;  // guards the two variables below
std::string driver_library = "libcuda.so.1";
const Driver* opened = nullptr;

// Returns the driver, which is never closed; null with an error's text if it can't be opened.
const Driver* get_driver(std::string* error) {
  const std::lock_guard lock(driver_lock);
  if (opened != nullptr) return opened;
  void* const library = dlopen(driver_library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    *error = std::string("CUDA's driver can't be opened: ") + dlerror();
  } else {
    opened = new Driver{library};
  }
  return opened;
}

}  // namespace

void use_driver(const char* library) {
  const std::lock_guard lock(driver_lock);
  driver_library = library;
  opened = nullptr;
  stagings().clear();
}

void prepare_cuda(uint32_t calls, const uint64_t* bytes, uint32_t count) {
  std::string error;  // unused: the program's first call reports it, too
  const Driver* const driver = get_driver(&error);
  if (driver == nullptr) return;
  size_t needed = 0;
  for (uint32_t i = 0; i < count; ++i) needed += padded(bytes[i]);
  stagings().prepare(*driver, calls, needed);
}

std::string answer_on_cuda(Call& call, void* stream) {
  std::string error;
  const Driver* const driver = get_driver(&error);
  if (driver == nullptr) return error;
  DriverCalls calls(*driver);
  void* context = nullptr;
  if (!calls("cuStreamGetCtx", driver->context_of, stream, &context)) return calls.error;
  const Activation activation(*driver, context);

  // Both are replaced by arrays in host memory below, except for large results.
  std::vector<Array>&operands = call.operands, &results = call.results;
  const std::vector<Array> on_device = results;
  Packed packed{static_cast<char*>(call.packed), nullptr, call.packed_bytes};
  std::vector<size_t> large;  // indices of results that are not packed
  size_t needed = padded(packed.bytes);
  for (const Array& operand : operands) needed += padded(bytes_of(operand));
  for (size_t i = 0; i < results.size(); ++i) {
    if (packed.contains(results[i])) continue;
    large.push_back(i);
    needed += padded(bytes_of(results[i]));
  }
  const std::shared_ptr<Staging> staging = stagings().take(*driver, needed);

  // Copy all operands at once. The token must be checked before actions are written to the segment, and a
  // second wait for the stream would take longer than copying the actions once more.
  for (Array& operand : operands) {
    const size_t bytes = bytes_of(operand);
    void* const host = staging->take(bytes);
    if (bytes > 0) {
      calls("cuMemcpyDtoHAsync", driver->to_host, host, address(operand.data), bytes, stream);
    }
    operand.data = host;
  }
  calls("cuStreamSynchronize", driver->synchronize, stream);
  if (!calls.error.empty()) return calls.error;  // leaks the staging buffer, which copies may still write to

  packed.host = static_cast<char*>(staging->take(packed.bytes));
  for (Array& result : results) {
    if (packed.contains(result)) result.data = packed.host + (address(result.data) - address(packed.device));
  }
  CudaTarget target(calls, context, stream, staging, packed);
  const std::shared_ptr<Engine> engine = engine_of(call);
  Status status = Status::kElsewhere;
  // Without page-locked memory the call goes to Python, which page-locks the segment first.
  if (engine != nullptr && engine->state.devices.load(std::memory_order_acquire)) {
    status = engine->answer(call.verb, call.fingerprint, operands, results, target, &call.waited_ns);
  }
  if (status != Status::kDone || interrupted()) {
    if (status != Status::kDone) {  // Python writes the results to the staging buffer
      for (const size_t i : large) results[i].data = staging->take(bytes_of(results[i]));
    }
    call.on_device = 1;
    error = ask_python(call, status, engine.get());
    if (error.empty() && status != Status::kDone) {
      for (const size_t i : large) {
        const size_t bytes = bytes_of(results[i]);
        if (bytes > 0) target.put(on_device[i].data, {{results[i].data, bytes}});
      }
      target.finish();
    }
  }
  stagings().give(staging);
  return error.empty() ? calls.error : error;
}

}  // namespace jaxvec
