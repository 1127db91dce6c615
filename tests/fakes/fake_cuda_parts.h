// What the parts of the fake CUDA driver share; fake_cuda.cpp says what it is.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "fake_cuda.h"
#include "faults.h"
#include "gpu/driver_functions.h"

namespace hvd::fakes {

struct Device;

struct Stream {
  Device* device = nullptr;
  bool legacy = false;    // the default stream
  bool blocking = false;  // ordered against the default stream
  std::deque<std::function<void()>> queue;
  uint64_t submitted = 0;
  uint64_t completed = 0;
  bool closed = false;
};
using StreamRef = std::shared_ptr<Stream>;

struct Event {
  StreamRef stream;  // null: never recorded, which counts as over
  uint64_t ticket = 0;
};

struct Device {
  int ordinal = 0;
  int context_uses = 0;  // retained so many times
  CudaResult sticky = CudaResult::success;
  StreamRef legacy_stream;
};

struct Allocation {
  size_t bytes = 0;
  int device = -1;  // -1: host memory that devices may use
  bool own = false;
};

struct Module {
  const HvdFakeModule* table = nullptr;
};

constexpr size_t kDeviceBytes = size_t{16} << 30;

struct Driver {
  std::mutex mutex;
  std::condition_variable changed;
  std::atomic<pid_t> pid{0};  // of the process that called cuInit
  std::vector<Device> devices;
  std::map<Stream*, StreamRef> streams;
  std::set<Event*> events;
  std::set<Module*> modules;
  std::map<uintptr_t, Allocation> allocations;
  size_t allocated = 0;
  const HvdFakeModule* kernels = nullptr;
  uint64_t released_hangs = 0;
  Faults faults;
};
Driver& driver();

// Of the calling thread; the last one is current.
extern thread_local std::vector<Device*> context_stack;

using Lock = std::unique_lock<std::mutex>;

StreamRef start_stream(Device* device, bool legacy, bool blocking);
// An operation that waits until another stream has come so far.
std::function<void()> wait_for(StreamRef other, uint64_t ticket);
// With the lock held. Keeps the order between the default stream and the blocking ones; gives the
// ticket by which the operation is over.
uint64_t enqueue(const StreamRef& stream, Fault fault, std::function<void()> operation);

CudaResult check_process();

// What every call of a function that works on the current device begins with: the fault that is
// due, and whether there is a device. Holds the lock from then on.
class Call {
 public:
  Call(const char* function, bool needs_context) {
    result = check_process();
    if (result != CudaResult::success) return;
    device = context_stack.empty() ? nullptr : context_stack.back();
    fault = driver().faults.at_call(function, device != nullptr ? device->ordinal : 0);
    if (fault.kind == Fault::Kind::result) {
      result = static_cast<CudaResult>(fault.value);
      return;
    }
    lock = Lock(driver().mutex);
    if (needs_context && device == nullptr) {
      result = CudaResult::invalid_context;
    } else if (needs_context && device->sticky != CudaResult::success) {
      result = device->sticky;
    }
  }

  bool failed() const { return result != CudaResult::success; }

  // The stream that a handle means: null is the default stream of the current device.
  StreamRef stream(CudaStream handle) {
    if (handle == nullptr) {
      if (!device->legacy_stream) device->legacy_stream = start_stream(device, true, false);
      return device->legacy_stream;
    }
    const auto found = driver().streams.find(reinterpret_cast<Stream*>(handle));
    if (found == driver().streams.end()) {
      result = CudaResult::invalid_handle;
      return nullptr;
    }
    return found->second;
  }

  Event* event(CudaEvent handle) {
    auto* found = reinterpret_cast<Event*>(handle);
    if (driver().events.count(found) == 0) {
      result = CudaResult::invalid_handle;
      return nullptr;
    }
    return found;
  }

  CudaResult result = CudaResult::success;
  Device* device = nullptr;
  Fault fault;
  Lock lock;
};
// Blocks until a stream is through with what has been put on it. An error that comes up meanwhile
// is the result.
CudaResult wait_here(Call& call, const StreamRef& stream, uint64_t ticket);
// The whole of a call that puts something on a stream.
CudaResult put(const char* function, CudaStream handle, std::function<void()> operation);

}  // namespace hvd::fakes
