// Streams of the fake CUDA driver: a thread and a queue each.

#include <unistd.h>

#include <chrono>
#include <thread>
#include <utility>

#include "fake_cuda_parts.h"

namespace hvd::fakes {

Driver& driver() {
  static Driver* const instance = new Driver;
  return *instance;
}
thread_local std::vector<Device*> context_stack;

namespace {

void run_stream(const StreamRef& stream) {
  Driver& state = driver();
  Lock lock(state.mutex);
  while (true) {
    state.changed.wait(lock, [&] { return !stream->queue.empty() || stream->closed; });
    if (stream->queue.empty()) return;
    std::function<void()> operation = std::move(stream->queue.front());
    stream->queue.pop_front();
    const bool dead = stream->device->sticky != CudaResult::success;
    lock.unlock();
    if (!dead) operation();
    operation = nullptr;
    lock.lock();
    ++stream->completed;
    state.changed.notify_all();
  }
}
}  // namespace

StreamRef start_stream(Device* device, bool legacy, bool blocking) {
  auto stream = std::make_shared<Stream>();
  stream->device = device;
  stream->legacy = legacy;
  stream->blocking = blocking;
  std::thread(run_stream, stream).detach();
  return stream;
}

// With the lock held.
uint64_t push(const StreamRef& stream, std::function<void()> operation) {
  stream->queue.push_back(std::move(operation));
  driver().changed.notify_all();
  return ++stream->submitted;
}

std::function<void()> wait_for(StreamRef other, uint64_t ticket) {
  return [other = std::move(other), ticket] {
    Lock lock(driver().mutex);
    driver().changed.wait(lock, [&] { return other->completed >= ticket; });
  };
}

// What a fault makes of an operation.
std::function<void()> with_fault(const StreamRef& stream, Fault fault,
                                 std::function<void()> operation) {
  switch (fault.kind) {
    case Fault::Kind::slow:
      return [fault, operation = std::move(operation)] {
        std::this_thread::sleep_for(std::chrono::milliseconds(fault.value));
        operation();
      };
    case Fault::Kind::hang:
      return [operation = std::move(operation), seen = driver().released_hangs] {
        Lock lock(driver().mutex);
        driver().changed.wait(lock, [&] { return driver().released_hangs > seen; });
        lock.unlock();
        operation();
      };
    case Fault::Kind::async:
      return [stream, fault] {
        const Lock lock(driver().mutex);
        stream->device->sticky = static_cast<CudaResult>(fault.value);
      };
    default:
      return operation;
  }
}

// With the lock held. Keeps the order between the default stream and the blocking ones.
uint64_t enqueue(const StreamRef& stream, Fault fault, std::function<void()> operation) {
  if (stream->legacy) {
    for (const auto& entry : driver().streams) {
      const StreamRef& other = entry.second;
      if (other->blocking && other->device == stream->device && other->submitted > 0) {
        push(stream, wait_for(other, other->submitted));
      }
    }
  } else if (stream->blocking && stream->device->legacy_stream) {
    const StreamRef& legacy = stream->device->legacy_stream;
    push(stream, wait_for(legacy, legacy->submitted));
  }
  return push(stream, with_fault(stream, fault, std::move(operation)));
}
CudaResult check_process() {
  const pid_t pid = driver().pid;
  return pid != 0 && pid == getpid() ? CudaResult::success : CudaResult::not_initialized;
}
// Blocks until a stream is through with what has been put on it. An error that comes up meanwhile
// is the result.
CudaResult wait_here(Call& call, const StreamRef& stream, uint64_t ticket) {
  driver().changed.wait(call.lock, [&] { return stream->completed >= ticket; });
  return stream->device->sticky;
}

CudaResult put(const char* function, CudaStream handle, std::function<void()> operation) {
  Call call(function, true);
  if (call.failed()) return call.result;
  const StreamRef stream = call.stream(handle);
  if (stream) enqueue(stream, call.fault, std::move(operation));
  return call.result;
}

}  // namespace hvd::fakes
