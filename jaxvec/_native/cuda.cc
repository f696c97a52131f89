#include "cuda.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <type_traits>
#include <vector>

namespace jaxvec {
namespace {

constexpr int kSuccess = 0;             // CUDA_SUCCESS
constexpr unsigned kPortable = 1;       // CU_MEMHOSTALLOC_PORTABLE
constexpr unsigned kDisableTiming = 2;  // CU_EVENT_DISABLE_TIMING

using Address = uint64_t;  // CUdeviceptr
Address address(const void* pointer) { return reinterpret_cast<Address>(pointer); }

// What we use of the driver. Contexts, streams and events are opaque pointers.
struct Driver {
  int (*get_error_name)(int, const char**);
  int (*get_error_string)(int, const char**);
  int (*get_current)(void** context);
  int (*set_current)(void* context);
  int (*context_of)(void* stream, void** context);
  int (*synchronize)(void* stream);
  int (*allocate)(void** memory, size_t bytes, unsigned flags);
  int (*create_event)(void** event, unsigned flags);
  int (*record)(void* event, void* stream);
  int (*query)(void* event);
  int (*await)(void* event);
  int (*to_host)(void* to, Address from, size_t bytes, void* stream);
  int (*to_device)(Address to, const void* from, size_t bytes, void* stream);
  int (*fill)(Address to, unsigned char value, size_t count, void* stream);
};

// Opens the driver, or says why there is none. It stays open.
const Driver* open_driver(const char* library, std::string* error) {
  void* const handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    *error = std::string("CUDA's driver can't be opened: ") + dlerror();
    return nullptr;
  }
  auto driver = std::make_unique<Driver>();
  bool complete = true;
  const auto find = [&](auto* function, const char* name) {
    *reinterpret_cast<void**>(function) = dlsym(handle, name);
    if (*function != nullptr) return;
    *error = std::string("CUDA's driver has no ") + name;
    complete = false;
  };
  find(&driver->get_error_name, "cuGetErrorName");
  find(&driver->get_error_string, "cuGetErrorString");
  find(&driver->get_current, "cuCtxGetCurrent");
  find(&driver->set_current, "cuCtxSetCurrent");
  find(&driver->context_of, "cuStreamGetCtx");
  find(&driver->synchronize, "cuStreamSynchronize");
  find(&driver->allocate, "cuMemHostAlloc");
  find(&driver->create_event, "cuEventCreate");
  find(&driver->record, "cuEventRecord");
  find(&driver->query, "cuEventQuery");
  find(&driver->await, "cuEventSynchronize");
  find(&driver->to_host, "cuMemcpyDtoHAsync_v2");
  find(&driver->to_device, "cuMemcpyHtoDAsync_v2");
  find(&driver->fill, "cuMemsetD8Async");
  return complete ? driver.release() : nullptr;
}

// Calls the driver until something fails, and says what.
class Calls {
 public:
  explicit Calls(const Driver& driver) : driver(driver) {}

  template <typename... Arguments>
  bool operator()(const char* name, int (*function)(Arguments...),
                  std::common_type_t<Arguments>... arguments) {
    if (!error.empty()) return false;
    const int code = function(arguments...);
    if (code == kSuccess) return true;
    const char *what = nullptr, *why = nullptr;
    driver.get_error_name(code, &what);
    driver.get_error_string(code, &why);
    error = std::string(name) + ": " + (what == nullptr ? "CUDA error " + std::to_string(code) : what) +
            (why == nullptr ? "" : std::string(" (") + why + ")");
    return false;
  }

  const Driver& driver;
  std::string error;
};

// Makes a context current, as it is already where XLA has seen to it.
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
  Activation& operator=(const Activation&) = delete;

 private:
  const Driver& driver_;
  void* before_ = nullptr;
  bool changed_ = false;
};

// Page-locked memory for one call at a time, to which it belongs until its copies are done. Also the copies
// themselves, as the pool knows them: they are done when the event is.
class Staging : public Copies {
 public:
  explicit Staging(const Driver& driver, void* context) : driver_(driver), context_(context) {}

  const Driver& driver() const { return driver_; }
  void* context() const { return context_; }

  // Memory for the call, aligned for whatever it is. Where none can be page-locked it is any: the driver
  // then copies from it before it returns, which is as safe, and slower.
  void* take(size_t bytes) {
    bytes = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    for (Chunk& chunk : chunks_) {
      if (chunk.size - chunk.taken < bytes) continue;
      chunk.taken += bytes;
      return chunk.memory + chunk.taken - bytes;
    }
    const size_t size = std::max(bytes, kChunk);
    void* memory = nullptr;
    if (driver_.allocate(&memory, size, kPortable) != kSuccess) memory = std::aligned_alloc(kAlignment, size);
    if (memory == nullptr) throw std::bad_alloc();
    chunks_.push_back({static_cast<char*>(memory), size, bytes});
    return memory;
  }

  // What was begun on the stream so far is what this stands for.
  bool record(Calls& calls, void* stream) {
    if (event_ == nullptr && !calls("cuEventCreate", driver_.create_event, &event_, kDisableTiming)) {
      return false;
    }
    return calls("cuEventRecord", driver_.record, event_, stream);
  }

  // An event that fails says that the device has, and nothing is copied any more.
  bool done() override {
    const Activation activation(driver_, context_);
    return event_ == nullptr || driver_.query(event_) != kNotReady;
  }
  void wait() override {
    const Activation activation(driver_, context_);
    if (event_ != nullptr) driver_.await(event_);
  }

  void reuse() {
    for (Chunk& chunk : chunks_) chunk.taken = 0;
  }

 private:
  static constexpr size_t kAlignment = 64;
  static constexpr size_t kChunk = 256 * 1024;
  static constexpr int kNotReady = 600;  // CUDA_ERROR_NOT_READY

  struct Chunk {
    char* memory;
    size_t size, taken;
  };

  const Driver& driver_;
  void* const context_;
  std::vector<Chunk> chunks_;
  void* event_ = nullptr;
};

// As many as there were calls at once, for good: to page-lock memory takes long.
class Stagings {
 public:
  std::shared_ptr<Staging> take(const Driver& driver, void* context) {
    {
      const std::lock_guard lock(lock_);
      for (auto each = free_.begin(); each != free_.end(); ++each) {
        if (&(*each)->driver() != &driver || (*each)->context() != context || !(*each)->done()) continue;
        std::shared_ptr<Staging> staging = std::move(*each);
        free_.erase(each);
        staging->reuse();
        return staging;
      }
    }
    return std::make_shared<Staging>(driver, context);
  }

  void give(std::shared_ptr<Staging> staging) {
    const std::lock_guard lock(lock_);
    free_.push_back(std::move(staging));
  }

 private:
  std::mutex lock_;
  std::vector<std::shared_ptr<Staging>> free_;
};

Stagings& stagings() {
  static auto* all = new Stagings;  // outlives every thread
  return *all;
}

// The results that reach the GPU by one copy: the token, and what the program has packed with it.
struct Packed {
  char* there;  // on the GPU
  char* here;   // in the call's staging
  size_t bytes;

  // Where a result on the GPU is gathered; null if it is not among these.
  void* here_of(const Array& result) const {
    const size_t offset = address(result.data) - address(there);
    return offset < bytes && bytes_of(result) <= bytes - offset ? here + offset : nullptr;
  }
  bool holds(const void* memory) const { return address(memory) - address(here) < bytes; }
};

// Results on a GPU.
//
// Large ones go there straight from the segment, and nobody waits for them: not the step, which has returned
// before they are read. So a worker could write the next step's rows over them. What prevents it is the
// token: it follows all rows on the same stream, so whoever reads it on the device, or gets it from there,
// does so after the rows were read; and only who has it can move these envs again. A call reads its
// token on the host, waiting for its stream, before it hands anything to a worker. So steps in a row need
// no second set of results, and no wait but for the actions. The other side of the race: who needs no token
// (the host's verbs, a reset that starts from the pool, `close`) calls `Pool::wait_for_copies` first.
//
// Small ones are gathered first, beside the token, and go there with it.
class CudaTarget : public Target {
 public:
  CudaTarget(Calls& calls, void* stream, std::shared_ptr<Staging> staging, const Packed& packed)
      : calls_(calls), stream_(stream), staging_(std::move(staging)), packed_(packed) {}

  void put(void* to, const std::vector<Run>& runs) override {
    if (packed_.holds(to)) {
      host_.put(to, runs);
      return;
    }
    size_t bytes = 0;
    for (const Run& run : runs) bytes += run.bytes;
    if (bytes == 0) return;
    char* target = static_cast<char*>(to);
    if (bytes < runs.size() * kLarge && runs.size() > 1) {
      // To begin a copy takes about as long as to copy so much. So small pieces are gathered.
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
    copy(packed_.there, packed_.here, packed_.bytes);
    if (!staging_->record(calls_, stream_)) calls_.driver.synchronize(stream_);
    return staging_;
  }

 private:
  static constexpr size_t kLarge = 16 * 1024;

  void copy(void* to, const void* from, size_t bytes) {
    if (bytes == 0) return;
    calls_("cuMemcpyHtoDAsync", calls_.driver.to_device, address(to), from, bytes, stream_);
  }

  Calls& calls_;
  void* const stream_;
  const std::shared_ptr<Staging> staging_;
  const Packed packed_;
  HostTarget host_;
};

std::mutex driver_lock;
std::string driver_library = "libcuda.so.1";
const Driver* opened = nullptr;

const Driver* get_driver(std::string* error) {
  const std::lock_guard lock(driver_lock);
  if (opened == nullptr) opened = open_driver(driver_library.c_str(), error);
  return opened;
}

}  // namespace

void use_driver(const char* library) {
  const std::lock_guard lock(driver_lock);
  driver_library = library == nullptr ? "libcuda.so.1" : library;
  opened = nullptr;
}

std::string answer_on_cuda(Call& call, void* stream) {
  std::string error;
  const Driver* const driver = get_driver(&error);
  if (driver == nullptr) return error;
  Calls calls(*driver);
  void* context = nullptr;
  if (!calls("cuStreamGetCtx", driver->context_of, stream, &context)) return calls.error;
  const Activation activation(*driver, context);
  const std::shared_ptr<Staging> staging = stagings().take(*driver, context);

  // All operands come over at once, because the token has to be looked at before the actions may be
  // written, and to wait for the stream twice would take longer than to copy actions once more.
  std::vector<Array> operands(call.operands, call.operands + call.num_operands);
  for (Array& operand : operands) {
    const size_t bytes = bytes_of(operand);
    void* const host = staging->take(bytes);
    if (bytes > 0) {
      calls("cuMemcpyDtoHAsync", driver->to_host, host, address(operand.data), bytes, stream);
    }
    operand.data = host;
  }
  calls("cuStreamSynchronize", driver->synchronize, stream);
  if (!calls.error.empty()) return calls.error;  // the staging is given up: who knows what copies to it

  const std::vector<Array> on_device(call.results, call.results + call.num_results);
  std::vector<Array> results = on_device;
  Packed packed{static_cast<char*>(call.packed), nullptr, call.packed_bytes};
  if (packed.there == nullptr && !results.empty()) {
    packed = {static_cast<char*>(results[0].data), nullptr, bytes_of(results[0])};
  }
  packed.here = static_cast<char*>(staging->take(packed.bytes));
  std::vector<size_t> alone;  // results that are copied by themselves
  for (size_t i = 0; i < results.size(); ++i) {
    if (void* const here = packed.here_of(results[i])) {
      results[i].data = here;
    } else {
      alone.push_back(i);
    }
  }
  CudaTarget target(calls, stream, staging, packed);
  const std::shared_ptr<Pool> pool = pool_of(operands);
  Status status = Status::kElsewhere;
  // A pool's first call is Python's, which page-locks the segment.
  if (pool != nullptr && pool->state.devices.load(std::memory_order_acquire)) {
    status = pool->answer(call.verb, call.fingerprint, operands, results, target, &call.waited_ns);
  }
  if (status != Status::kDone || interrupted()) {
    if (status != Status::kDone) {  // then Python fills in the results
      for (const size_t i : alone) results[i].data = staging->take(bytes_of(results[i]));
    }
    call.on_device = 1;
    call.operands = operands.data();
    call.results = results.data();
    error = ask_python(call, status, pool.get());
    if (error.empty() && status != Status::kDone) {
      for (const size_t i : alone) {
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
