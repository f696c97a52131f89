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

// How much a piece of memory takes of a call's staging: each begins where any array may.
size_t padded(size_t bytes) {
  constexpr size_t kAlignment = 64;
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// Page-locked memory for one call at a time, to which it belongs until its copies are done. Also the copies
// themselves, as the pool knows them: they are done when the event is. Serves any GPU of this process.
class Staging : public Copies {
 public:
  // Where no memory can be page-locked it is any: the driver then copies from it before it returns, which is
  // as safe, and slower.
  Staging(const Driver& driver, size_t size) : driver_(driver), size_(size) {
    void* memory = nullptr;
    const bool locked = driver_.allocate(&memory, size_, kPortable) == kSuccess;
    if (!locked) memory = std::aligned_alloc(padded(1), size_);
    if (memory == nullptr) throw std::bad_alloc();
    memory_ = static_cast<char*>(memory);
  }

  const Driver& driver() const { return driver_; }
  size_t size() const { return size_; }

  // Memory for the call, which takes no more in all than the staging has.
  void* take(size_t bytes) {
    void* const memory = memory_ + taken_;
    taken_ += padded(bytes);
    return memory;
  }

  // What was begun on the stream so far is what this stands for.
  bool record(Calls& calls, void* context, void* stream) {
    Event& event = events_.try_emplace(context, Event{context, nullptr}).first->second;
    if (event.event == nullptr &&
        !calls("cuEventCreate", driver_.create_event, &event.event, kDisableTiming)) {
      return false;
    }
    recorded_ = &event;
    return calls("cuEventRecord", driver_.record, event.event, stream);
  }

  // An event that fails says that the device has, and nothing is copied any more.
  bool done() override {
    const Event* const recorded = recorded_;
    if (recorded == nullptr) return true;
    const Activation activation(driver_, recorded->context);
    return driver_.query(recorded->event) != kNotReady;
  }
  void wait() override {
    const Event* const recorded = recorded_;
    if (recorded == nullptr) return;
    const Activation activation(driver_, recorded->context);
    driver_.await(recorded->event);
  }

  void reuse() { taken_ = 0; }

 private:
  static constexpr int kNotReady = 600;  // CUDA_ERROR_NOT_READY

  struct Event {
    void* context;
    void* event;
  };

  const Driver& driver_;
  const size_t size_;
  char* memory_;
  size_t taken_ = 0;
  std::map<void*, Event> events_;                // of each context that it has served
  std::atomic<const Event*> recorded_{nullptr};  // the latest; a pool that waits for copies may ask meanwhile
};

// All that is not in use. It is kept for good, since to page-lock memory takes long, and may wait for all
// GPUs of the process: so what programs need is made before they run, and a call makes some only if they are
// short.
class Stagings {
 public:
  std::shared_ptr<Staging> take(const Driver& driver, size_t bytes) {
    {
      const std::lock_guard lock(lock_);
      auto best = free_.end();  // the smallest, so that what large calls need is left to them
      for (auto each = free_.begin(); each != free_.end(); ++each) {
        if (!fits(**each, driver, bytes) || (best != free_.end() && (*best)->size() <= (*each)->size()))
          continue;
        if ((*each)->done()) best = each;
      }
      if (best != free_.end()) {
        std::shared_ptr<Staging> staging = std::move(*best);
        free_.erase(best);
        staging->reuse();
        return staging;
      }
    }
    return std::make_shared<Staging>(driver, size_for(bytes));
  }

  void give(std::shared_ptr<Staging> staging) {
    const std::lock_guard lock(lock_);
    free_.push_back(std::move(staging));
  }

  // Sees to it that there are so many for calls of so many bytes. Not under the lock: a call that waits for
  // it would keep the GPU waiting for which we may have to wait.
  void prepare(const Driver& driver, size_t count, size_t bytes) {
    size_t there = 0;
    {
      const std::lock_guard lock(lock_);
      for (const auto& each : free_) there += fits(*each, driver, bytes);
    }
    for (; there < count; ++there) give(std::make_shared<Staging>(driver, size_for(bytes)));
  }

 private:
  static bool fits(const Staging& staging, const Driver& driver, size_t bytes) {
    return &staging.driver() == &driver && staging.size() >= bytes;
  }

  // Of few sizes, so that one serves calls of several programs.
  static size_t size_for(size_t bytes) {
    size_t size = 256 * 1024;
    while (size < bytes) size *= 2;
    return size;
  }

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

  // Whether a result on the GPU is among these, and where it is gathered.
  bool has(const Array& result) const {
    const size_t offset = address(result.data) - address(there);
    return offset < bytes && bytes_of(result) <= bytes - offset;
  }
  void* here_of(const Array& result) const { return here + (address(result.data) - address(there)); }
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
  CudaTarget(Calls& calls, void* context, void* stream, std::shared_ptr<Staging> staging,
             const Packed& packed)
      : calls_(calls), context_(context), stream_(stream), staging_(std::move(staging)), packed_(packed) {}

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
    if (!staging_->record(calls_, context_, stream_)) calls_.driver.synchronize(stream_);
    return staging_;
  }

 private:
  static constexpr size_t kLarge = 16 * 1024;

  void copy(void* to, const void* from, size_t bytes) {
    if (bytes == 0) return;
    calls_("cuMemcpyHtoDAsync", calls_.driver.to_device, address(to), from, bytes, stream_);
  }

  Calls& calls_;
  void* const context_;
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

void prepare_cuda(uint32_t calls, const uint64_t* bytes, uint32_t count) {
  std::string error;  // which the program's first call meets, too
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
  Calls calls(*driver);
  void* context = nullptr;
  if (!calls("cuStreamGetCtx", driver->context_of, stream, &context)) return calls.error;
  const Activation activation(*driver, context);

  std::vector<Array> operands(call.operands, call.operands + call.num_operands);
  const std::vector<Array> on_device(call.results, call.results + call.num_results);
  std::vector<Array> results = on_device;
  Packed packed{static_cast<char*>(call.packed), nullptr, call.packed_bytes};
  if (packed.there == nullptr && !results.empty()) {
    packed = {static_cast<char*>(results[0].data), nullptr, bytes_of(results[0])};
  }
  std::vector<size_t> alone;  // results that are copied by themselves
  size_t needed = padded(packed.bytes);
  for (const Array& operand : operands) needed += padded(bytes_of(operand));
  for (size_t i = 0; i < results.size(); ++i) {
    if (packed.has(results[i])) continue;
    alone.push_back(i);
    needed += padded(bytes_of(results[i]));
  }
  const std::shared_ptr<Staging> staging = stagings().take(*driver, needed);

  // All operands come over at once, because the token has to be looked at before the actions may be
  // written, and to wait for the stream twice would take longer than to copy actions once more.
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

  packed.here = static_cast<char*>(staging->take(packed.bytes));
  for (Array& result : results) {
    if (packed.has(result)) result.data = packed.here_of(result);
  }
  CudaTarget target(calls, context, stream, staging, packed);
  const std::shared_ptr<Pool> pool = pool_of(operands);
  Status status = Status::kElsewhere;
  // A pool whose segment was not page-locked before the program ran is Python's, which then does it.
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
