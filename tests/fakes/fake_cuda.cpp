// A libcuda.so.1 over host memory.
//
// A device pointer is a host pointer. A stream is a thread with a queue, so work is asynchronous
// for real: whoever forgets to wait for an event reads what is not there yet, and ThreadSanitizer
// sees it. Like the driver, it wants cuInit and a current context, knows its handles, orders the
// legacy default stream against blocking streams, keeps returning the error that a kernel died of,
// and is useless in a forked child. HVD_FAKE_CUDA_DEVICES (8) is the number of devices; see
// faults.h for failures, fake_cuda.h for kernels.
//
// Nothing is ever torn down: its threads may run while the process exits.

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "fake_cuda_parts.h"

#define EXPORTED __attribute__((visibility("default")))

#ifndef HVD_FAKE_CUDA_VERSION
#define HVD_FAKE_CUDA_VERSION 12040
#endif

using hvd::CudaCaptureStatus;
using hvd::CudaContext;
using hvd::CudaDevice;
using hvd::CudaDeviceAttribute;
using hvd::CudaEvent;
using hvd::CudaFunction;
using hvd::CudaHostFunction;
using hvd::CudaMemoryType;
using hvd::CudaModule;
using hvd::CudaPointer;
using hvd::CudaPointerAttribute;
using hvd::CudaResult;
using hvd::CudaStream;
using namespace hvd::fakes;

namespace {

// The allocation that a pointer points into.
const Allocation* allocation_at(uintptr_t address) {
  auto& allocations = driver().allocations;
  auto next = allocations.upper_bound(address);
  if (next == allocations.begin()) return nullptr;
  --next;
  return address < next->first + next->second.bytes ? &next->second : nullptr;
}

void* host(CudaPointer pointer) { return reinterpret_cast<void*>(pointer); }

const HvdFakeModule* registered_kernels() {
  if (driver().kernels == nullptr) {
    if (const char* file = std::getenv("HVD_FAKE_CUDA_KERNELS")) {
      void* library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
      if (library == nullptr) {
        std::fprintf(stderr, "HVD_FAKE_CUDA_KERNELS: %s\n", dlerror());
        std::abort();
      }
      driver().kernels = static_cast<const HvdFakeModule*>(dlsym(library, "hvd_fake_kernels"));
    }
  }
  return driver().kernels;
}

struct ErrorText {
  CudaResult result;
  const char* name;
  const char* text;
};
const ErrorText kErrors[] = {
    {CudaResult::success, "CUDA_SUCCESS", "no error"},
    {CudaResult::invalid_value, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CudaResult::out_of_memory, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CudaResult::not_initialized, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {CudaResult::no_device, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {CudaResult::invalid_device, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CudaResult::invalid_image, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {CudaResult::invalid_context, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CudaResult::invalid_handle, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {CudaResult::not_found, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {CudaResult::not_ready, "CUDA_ERROR_NOT_READY", "device not ready"},
    {CudaResult::illegal_address, "CUDA_ERROR_ILLEGAL_ADDRESS", "illegal memory access"},
    {CudaResult::launch_failed, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
};

Device* device_at(CudaDevice ordinal) {
  auto& devices = driver().devices;
  return ordinal >= 0 && ordinal < static_cast<int>(devices.size())
             ? &devices[static_cast<size_t>(ordinal)]
             : nullptr;
}

}  // namespace

// ---- The driver's functions

extern "C" {

EXPORTED CudaResult cuInit(unsigned int flags) {
  if (flags != 0) return CudaResult::invalid_value;
  Driver& state = driver();
  if (state.pid != 0) return check_process();
  const Fault fault = state.faults.at_call("cuInit", 0);
  if (fault.kind == Fault::Kind::result) return static_cast<CudaResult>(fault.value);
  const Lock lock(state.mutex);
  const char* text = std::getenv("HVD_FAKE_CUDA_DEVICES");
  state.devices.resize(static_cast<size_t>(text != nullptr ? std::atoi(text) : 8));
  if (state.devices.empty()) return CudaResult::no_device;
  for (size_t i = 0; i < state.devices.size(); ++i) {
    state.devices[i].ordinal = static_cast<int>(i);
  }
  state.pid = getpid();
  return CudaResult::success;
}

EXPORTED CudaResult cuDriverGetVersion(int* version) {
  *version = HVD_FAKE_CUDA_VERSION;
  return CudaResult::success;
}

EXPORTED CudaResult cuGetErrorName(CudaResult result, const char** text) {
  for (const ErrorText& known : kErrors) {
    if (known.result != result) continue;
    *text = known.name;
    return CudaResult::success;
  }
  *text = nullptr;
  return CudaResult::invalid_value;
}

EXPORTED CudaResult cuGetErrorString(CudaResult result, const char** text) {
  for (const ErrorText& known : kErrors) {
    if (known.result != result) continue;
    *text = known.text;
    return CudaResult::success;
  }
  *text = nullptr;
  return CudaResult::invalid_value;
}

EXPORTED CudaResult cuDeviceGetCount(int* count) {
  Call call("cuDeviceGetCount", false);
  if (!call.failed()) *count = static_cast<int>(driver().devices.size());
  return call.result;
}

EXPORTED CudaResult cuDeviceGet(CudaDevice* device, int ordinal) {
  Call call("cuDeviceGet", false);
  if (call.failed()) return call.result;
  if (device_at(ordinal) == nullptr) return CudaResult::invalid_device;
  *device = ordinal;
  return CudaResult::success;
}

EXPORTED CudaResult cuDeviceGetName(char* name, int length, CudaDevice device) {
  Call call("cuDeviceGetName", false);
  if (call.failed()) return call.result;
  if (device_at(device) == nullptr) return CudaResult::invalid_device;
  std::snprintf(name, static_cast<size_t>(length), "Fake GPU %d", device);
  return CudaResult::success;
}

EXPORTED CudaResult cuDeviceGetPCIBusId(char* id, int length, CudaDevice device) {
  Call call("cuDeviceGetPCIBusId", false);
  if (call.failed()) return call.result;
  if (device_at(device) == nullptr) return CudaResult::invalid_device;
  std::snprintf(id, static_cast<size_t>(length), "0000:%02X:00.0", device + 1);
  return CudaResult::success;
}

EXPORTED CudaResult cuDeviceGetAttribute(int* value, CudaDeviceAttribute attribute,
                                         CudaDevice device) {
  Call call("cuDeviceGetAttribute", false);
  if (call.failed()) return call.result;
  if (device_at(device) == nullptr) return CudaResult::invalid_device;
  switch (attribute) {
    case CudaDeviceAttribute::max_threads_per_block:
      *value = 1024;
      return CudaResult::success;
    case CudaDeviceAttribute::max_shared_memory_per_block:
      *value = 48 << 10;
      return CudaResult::success;
    case CudaDeviceAttribute::multiprocessor_count:
      *value = 2;
      return CudaResult::success;
    case CudaDeviceAttribute::compute_capability_major:
      *value = 9;
      return CudaResult::success;
    case CudaDeviceAttribute::compute_capability_minor:
      *value = 0;
      return CudaResult::success;
  }
  return CudaResult::invalid_value;
}

EXPORTED CudaResult cuDevicePrimaryCtxRetain(CudaContext* context, CudaDevice ordinal) {
  Call call("cuDevicePrimaryCtxRetain", false);
  if (call.failed()) return call.result;
  Device* device = device_at(ordinal);
  if (device == nullptr) return CudaResult::invalid_device;
  ++device->context_uses;
  *context = reinterpret_cast<CudaContext>(device);
  return CudaResult::success;
}

// The old driver is one from before this function.
#if HVD_FAKE_CUDA_VERSION >= 11000
EXPORTED CudaResult cuDevicePrimaryCtxRelease_v2(CudaDevice ordinal) {
  Call call("cuDevicePrimaryCtxRelease_v2", false);
  if (call.failed()) return call.result;
  Device* device = device_at(ordinal);
  if (device == nullptr) return CudaResult::invalid_device;
  if (device->context_uses == 0) return CudaResult::invalid_context;
  --device->context_uses;
  return CudaResult::success;
}
#endif

EXPORTED CudaResult cuDevicePrimaryCtxGetState(CudaDevice ordinal, unsigned int* flags,
                                               int* active) {
  Call call("cuDevicePrimaryCtxGetState", false);
  if (call.failed()) return call.result;
  Device* device = device_at(ordinal);
  if (device == nullptr) return CudaResult::invalid_device;
  *flags = 0;
  *active = device->context_uses > 0 ? 1 : 0;
  return CudaResult::success;
}

EXPORTED CudaResult cuCtxPushCurrent_v2(CudaContext context) {
  Call call("cuCtxPushCurrent_v2", false);
  if (call.failed()) return call.result;
  if (context == nullptr) return CudaResult::invalid_context;
  auto* device = reinterpret_cast<Device*>(context);
  if (device->context_uses == 0) return CudaResult::invalid_context;
  context_stack.push_back(device);
  return CudaResult::success;
}

EXPORTED CudaResult cuCtxPopCurrent_v2(CudaContext* context) {
  Call call("cuCtxPopCurrent_v2", false);
  if (call.failed()) return call.result;
  if (context_stack.empty()) return CudaResult::invalid_context;
  if (context != nullptr) *context = reinterpret_cast<CudaContext>(context_stack.back());
  context_stack.pop_back();
  return CudaResult::success;
}

EXPORTED CudaResult cuCtxGetCurrent(CudaContext* context) {
  Call call("cuCtxGetCurrent", false);
  if (!call.failed()) *context = reinterpret_cast<CudaContext>(call.device);
  return call.result;
}

EXPORTED CudaResult cuCtxGetDevice(CudaDevice* device) {
  Call call("cuCtxGetDevice", true);
  if (!call.failed()) *device = call.device->ordinal;
  return call.result;
}

EXPORTED CudaResult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  Call call("cuCtxGetStreamPriorityRange", true);
  if (call.failed()) return call.result;
  *least = 0;
  *greatest = -5;
  return CudaResult::success;
}

EXPORTED CudaResult cuStreamCreateWithPriority(CudaStream* stream, unsigned int flags, int) {
  Call call("cuStreamCreateWithPriority", true);
  if (call.failed()) return call.result;
  if (flags > hvd::kCudaStreamNonBlocking) return CudaResult::invalid_value;
  StreamRef made = start_stream(call.device, false, flags == 0);
  *stream = reinterpret_cast<CudaStream>(made.get());
  driver().streams[made.get()] = std::move(made);
  return CudaResult::success;
}

EXPORTED CudaResult cuStreamDestroy_v2(CudaStream handle) {
  Call call("cuStreamDestroy_v2", true);
  if (call.failed()) return call.result;
  if (handle == nullptr) return CudaResult::invalid_handle;
  const StreamRef stream = call.stream(handle);
  if (!stream) return call.result;
  stream->closed = true;  // once its queue is empty
  driver().streams.erase(stream.get());
  driver().changed.notify_all();
  return CudaResult::success;
}

EXPORTED CudaResult cuStreamWaitEvent(CudaStream handle, CudaEvent event_handle,
                                      unsigned int flags) {
  Call call("cuStreamWaitEvent", true);
  if (call.failed()) return call.result;
  if (flags != 0) return CudaResult::invalid_value;
  const StreamRef stream = call.stream(handle);
  const Event* event = call.event(event_handle);
  // What the event stands for now counts, whatever becomes of it later.
  if (stream && event != nullptr && event->stream) {
    enqueue(stream, call.fault, wait_for(event->stream, event->ticket));
  }
  return call.result;
}

EXPORTED CudaResult cuStreamQuery(CudaStream handle) {
  Call call("cuStreamQuery", true);
  if (call.failed()) return call.result;
  const StreamRef stream = call.stream(handle);
  if (!stream) return call.result;
  return stream->completed == stream->submitted ? CudaResult::success : CudaResult::not_ready;
}

EXPORTED CudaResult cuStreamSynchronize(CudaStream handle) {
  Call call("cuStreamSynchronize", true);
  if (call.failed()) return call.result;
  const StreamRef stream = call.stream(handle);
  if (!stream) return call.result;
  return wait_here(call, stream, stream->legacy ? enqueue(stream, {}, [] {}) : stream->submitted);
}

EXPORTED CudaResult cuStreamIsCapturing(CudaStream handle, CudaCaptureStatus* status) {
  Call call("cuStreamIsCapturing", true);
  if (call.failed()) return call.result;
  if (call.stream(handle)) *status = CudaCaptureStatus::none;
  return call.result;
}

EXPORTED CudaResult cuLaunchHostFunc(CudaStream handle, CudaHostFunction function, void* argument) {
  return put("cuLaunchHostFunc", handle, [function, argument] { function(argument); });
}

EXPORTED CudaResult cuEventCreate(CudaEvent* event, unsigned int) {
  Call call("cuEventCreate", true);
  if (call.failed()) return call.result;
  auto* made = new Event;
  driver().events.insert(made);
  *event = reinterpret_cast<CudaEvent>(made);
  return CudaResult::success;
}

EXPORTED CudaResult cuEventDestroy_v2(CudaEvent handle) {
  Call call("cuEventDestroy_v2", true);
  if (call.failed()) return call.result;
  Event* event = call.event(handle);
  if (event == nullptr) return call.result;
  driver().events.erase(event);
  delete event;
  return CudaResult::success;
}

EXPORTED CudaResult cuEventRecord(CudaEvent event_handle, CudaStream handle) {
  Call call("cuEventRecord", true);
  if (call.failed()) return call.result;
  Event* event = call.event(event_handle);
  const StreamRef stream = call.stream(handle);
  if (event == nullptr || !stream) return call.result;
  event->ticket = enqueue(stream, call.fault, [] {});
  event->stream = stream;
  return CudaResult::success;
}

EXPORTED CudaResult cuEventQuery(CudaEvent handle) {
  Call call("cuEventQuery", true);
  if (call.failed()) return call.result;
  const Event* event = call.event(handle);
  if (event == nullptr) return call.result;
  const bool over = !event->stream || event->stream->completed >= event->ticket;
  return over ? CudaResult::success : CudaResult::not_ready;
}

EXPORTED CudaResult cuEventSynchronize(CudaEvent handle) {
  Call call("cuEventSynchronize", true);
  if (call.failed()) return call.result;
  const Event* event = call.event(handle);
  if (event == nullptr || !event->stream) return call.result;
  const StreamRef stream = event->stream;
  return wait_here(call, stream, event->ticket);
}

EXPORTED CudaResult cuMemAlloc_v2(CudaPointer* pointer, size_t bytes) {
  Call call("cuMemAlloc_v2", true);
  if (call.failed()) return call.result;
  if (bytes == 0) return CudaResult::invalid_value;
  if (driver().allocated + bytes > kDeviceBytes) return CudaResult::out_of_memory;
  // Not a byte more than was asked for: AddressSanitizer watches the end.
  void* memory = nullptr;
  if (posix_memalign(&memory, 256, bytes) != 0) return CudaResult::out_of_memory;
  // Fresh device memory is not zero.
  std::memset(memory, 0xa5, bytes);
  driver().allocations[reinterpret_cast<uintptr_t>(memory)] = {bytes, call.device->ordinal, true};
  driver().allocated += bytes;
  *pointer = reinterpret_cast<CudaPointer>(memory);
  return CudaResult::success;
}

EXPORTED CudaResult cuMemFree_v2(CudaPointer pointer) {
  Call call("cuMemFree_v2", true);
  if (call.failed()) return call.result;
  if (pointer == 0) return CudaResult::success;
  const auto found = driver().allocations.find(static_cast<uintptr_t>(pointer));
  if (found == driver().allocations.end() || !found->second.own || found->second.device < 0) {
    return CudaResult::invalid_value;
  }
  // As in the driver, freeing waits for everything on the device.
  std::vector<std::pair<StreamRef, uint64_t>> busy;
  for (const auto& entry : driver().streams) {
    if (entry.second->device == call.device) {
      busy.emplace_back(entry.second, entry.second->submitted);
    }
  }
  const StreamRef legacy = call.device->legacy_stream;
  if (legacy) busy.emplace_back(legacy, legacy->submitted);
  driver().allocated -= found->second.bytes;
  driver().allocations.erase(found);
  for (const auto& [stream, ticket] : busy) static_cast<void>(wait_here(call, stream, ticket));
  std::free(host(pointer));
  return CudaResult::success;
}

EXPORTED CudaResult cuMemGetInfo_v2(size_t* free_bytes, size_t* total_bytes) {
  Call call("cuMemGetInfo_v2", true);
  if (call.failed()) return call.result;
  *free_bytes = kDeviceBytes - driver().allocated;
  *total_bytes = kDeviceBytes;
  return CudaResult::success;
}

EXPORTED CudaResult cuMemHostAlloc(void** pointer, size_t bytes, unsigned int) {
  Call call("cuMemHostAlloc", true);
  if (call.failed()) return call.result;
  if (bytes == 0) return CudaResult::invalid_value;
  if (posix_memalign(pointer, 4096, bytes) != 0) return CudaResult::out_of_memory;
  driver().allocations[reinterpret_cast<uintptr_t>(*pointer)] = {bytes, -1, true};
  return CudaResult::success;
}

EXPORTED CudaResult cuMemFreeHost(void* pointer) {
  Call call("cuMemFreeHost", true);
  if (call.failed()) return call.result;
  const auto found = driver().allocations.find(reinterpret_cast<uintptr_t>(pointer));
  if (found == driver().allocations.end() || !found->second.own || found->second.device >= 0) {
    return CudaResult::invalid_value;
  }
  driver().allocations.erase(found);
  std::free(pointer);
  return CudaResult::success;
}

EXPORTED CudaResult cuMemHostRegister_v2(void* pointer, size_t bytes, unsigned int) {
  Call call("cuMemHostRegister_v2", true);
  if (call.failed()) return call.result;
  if (bytes == 0 || allocation_at(reinterpret_cast<uintptr_t>(pointer)) != nullptr) {
    return CudaResult::invalid_value;
  }
  driver().allocations[reinterpret_cast<uintptr_t>(pointer)] = {bytes, -1, false};
  return CudaResult::success;
}

EXPORTED CudaResult cuMemHostUnregister(void* pointer) {
  Call call("cuMemHostUnregister", true);
  if (call.failed()) return call.result;
  const auto found = driver().allocations.find(reinterpret_cast<uintptr_t>(pointer));
  if (found == driver().allocations.end() || found->second.own || found->second.device >= 0) {
    return CudaResult::invalid_value;
  }
  driver().allocations.erase(found);
  return CudaResult::success;
}

EXPORTED CudaResult cuMemHostGetDevicePointer_v2(CudaPointer* pointer, void* memory, unsigned int) {
  Call call("cuMemHostGetDevicePointer_v2", true);
  if (call.failed()) return call.result;
  const Allocation* allocation = allocation_at(reinterpret_cast<uintptr_t>(memory));
  if (allocation == nullptr || allocation->device >= 0) return CudaResult::invalid_value;
  *pointer = reinterpret_cast<CudaPointer>(memory);
  return CudaResult::success;
}

EXPORTED CudaResult cuPointerGetAttribute(void* value, CudaPointerAttribute attribute,
                                          CudaPointer pointer) {
  Call call("cuPointerGetAttribute", true);
  if (call.failed()) return call.result;
  const Allocation* allocation = allocation_at(static_cast<uintptr_t>(pointer));
  if (allocation == nullptr)
    return CudaResult::invalid_value;  // memory the driver knows nothing of
  const int device = std::max(allocation->device, 0);
  switch (attribute) {
    case CudaPointerAttribute::context:
      *static_cast<CudaContext*>(value) = reinterpret_cast<CudaContext>(device_at(device));
      return CudaResult::success;
    case CudaPointerAttribute::memory_type:
      *static_cast<CudaMemoryType*>(value) =
          allocation->device >= 0 ? CudaMemoryType::device : CudaMemoryType::host;
      return CudaResult::success;
    case CudaPointerAttribute::device_ordinal:
      *static_cast<int*>(value) = device;
      return CudaResult::success;
  }
  return CudaResult::invalid_value;
}

EXPORTED CudaResult cuMemcpyAsync(CudaPointer to, CudaPointer from, size_t bytes,
                                  CudaStream stream) {
  return put("cuMemcpyAsync", stream, [=] { std::memcpy(host(to), host(from), bytes); });
}

EXPORTED CudaResult cuMemcpyHtoDAsync_v2(CudaPointer to, const void* from, size_t bytes,
                                         CudaStream stream) {
  return put("cuMemcpyHtoDAsync_v2", stream, [=] { std::memcpy(host(to), from, bytes); });
}

EXPORTED CudaResult cuMemcpyDtoHAsync_v2(void* to, CudaPointer from, size_t bytes,
                                         CudaStream stream) {
  return put("cuMemcpyDtoHAsync_v2", stream, [=] { std::memcpy(to, host(from), bytes); });
}

EXPORTED CudaResult cuMemsetD8Async(CudaPointer to, unsigned char value, size_t bytes,
                                    CudaStream stream) {
  return put("cuMemsetD8Async", stream, [=] { std::memset(host(to), value, bytes); });
}

EXPORTED CudaResult cuModuleLoadData(CudaModule* module, const void* image) {
  Call call("cuModuleLoadData", true);
  if (call.failed()) return call.result;
  if (image == nullptr) return CudaResult::invalid_value;
  const auto* table = static_cast<const HvdFakeModule*>(image);
  if (std::strncmp(static_cast<const char*>(image), HVD_FAKE_MODULE_MAGIC,
                   sizeof(HVD_FAKE_MODULE_MAGIC)) != 0) {
    // A program for a GPU is an ELF file or text that begins like PTX.
    const auto* text = static_cast<const char*>(image);
    const bool program = std::strncmp(text,
                                      "\x7f"
                                      "ELF",
                                      4) == 0 ||
                         std::strncmp(text, "//", 2) == 0 || std::strncmp(text, ".version", 8) == 0;
    table = program ? registered_kernels() : nullptr;
  }
  if (table == nullptr) return CudaResult::invalid_image;
  auto* made = new Module{table};
  driver().modules.insert(made);
  *module = reinterpret_cast<CudaModule>(made);
  return CudaResult::success;
}

EXPORTED CudaResult cuModuleUnload(CudaModule handle) {
  Call call("cuModuleUnload", true);
  if (call.failed()) return call.result;
  auto* module = reinterpret_cast<Module*>(handle);
  if (driver().modules.erase(module) == 0) return CudaResult::invalid_handle;
  delete module;
  return CudaResult::success;
}

EXPORTED CudaResult cuModuleGetFunction(CudaFunction* function, CudaModule handle,
                                        const char* name) {
  Call call("cuModuleGetFunction", true);
  if (call.failed()) return call.result;
  auto* module = reinterpret_cast<Module*>(handle);
  if (driver().modules.count(module) == 0) return CudaResult::invalid_handle;
  for (unsigned int i = 0; i < module->table->kernel_count; ++i) {
    const HvdFakeKernel* kernel = &module->table->kernels[i];
    if (std::strcmp(kernel->name, name) != 0) continue;
    *function = reinterpret_cast<CudaFunction>(const_cast<HvdFakeKernel*>(kernel));
    return CudaResult::success;
  }
  return CudaResult::not_found;
}

EXPORTED CudaResult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CudaFunction,
                                                                int block_size, size_t) {
  Call call("cuOccupancyMaxActiveBlocksPerMultiprocessor", true);
  if (call.failed()) return call.result;
  if (block_size <= 0 || block_size > 1024) return CudaResult::invalid_value;
  *blocks = 2048 / block_size;
  return CudaResult::success;
}

EXPORTED CudaResult cuLaunchKernel(CudaFunction function, unsigned int grid_x, unsigned int grid_y,
                                   unsigned int grid_z, unsigned int block_x, unsigned int block_y,
                                   unsigned int block_z, unsigned int shared_bytes,
                                   CudaStream stream, void** parameters, void** extra) {
  const auto* kernel = reinterpret_cast<const HvdFakeKernel*>(function);
  const HvdFakeLaunch launch = {
      {grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes};
  const uint64_t blocks = uint64_t{grid_x} * grid_y * grid_z;
  const uint64_t threads = uint64_t{block_x} * block_y * block_z;
  if (kernel == nullptr || extra != nullptr || blocks == 0 || threads == 0 || threads > 1024 ||
      grid_y > 65535 || grid_z > 65535 || (kernel->parameter_count > 0 && parameters == nullptr)) {
    return CudaResult::invalid_value;
  }
  // The caller's parameters may be gone when the kernel runs.
  std::vector<std::vector<char>> values;
  for (unsigned int i = 0; i < kernel->parameter_count; ++i) {
    const auto* from = static_cast<const char*>(parameters[i]);
    values.emplace_back(from, from + kernel->parameter_sizes[i]);
  }
  return put("cuLaunchKernel", stream, [kernel, launch, values = std::move(values)]() mutable {
    std::vector<void*> addresses;
    for (std::vector<char>& value : values) addresses.push_back(value.data());
    kernel->run(&launch, addresses.data());
  });
}

// ---- For the tests

EXPORTED void hvd_fake_cuda_set_kernels(const HvdFakeModule* module) {
  const Lock lock(driver().mutex);
  driver().kernels = module;
}

EXPORTED void hvd_fake_cuda_set_faults(const char* faults) {
  driver().faults.set(faults != nullptr ? faults : "");
}

EXPORTED void hvd_fake_cuda_release_hung() {
  const Lock lock(driver().mutex);
  ++driver().released_hangs;
  driver().changed.notify_all();
}

EXPORTED void hvd_fake_cuda_adopt(void* pointer, size_t bytes, int device) {
  const Lock lock(driver().mutex);
  if (bytes == 0) {
    driver().allocations.erase(reinterpret_cast<uintptr_t>(pointer));
  } else {
    driver().allocations[reinterpret_cast<uintptr_t>(pointer)] = {bytes, device, false};
  }
}

EXPORTED long hvd_fake_cuda_count(const char* what) {
  const std::string name = what;
  if (name.rfind("cu", 0) == 0) return driver().faults.calls(name);
  const Lock lock(driver().mutex);
  if (name == "streams") return static_cast<long>(driver().streams.size());
  if (name == "events") return static_cast<long>(driver().events.size());
  if (name == "modules") return static_cast<long>(driver().modules.size());
  if (name == "allocations") {
    return std::count_if(driver().allocations.begin(), driver().allocations.end(),
                         [](const auto& entry) { return entry.second.own; });
  }
  if (name == "contexts") {
    return std::count_if(driver().devices.begin(), driver().devices.end(),
                         [](const Device& device) { return device.context_uses > 0; });
  }
  if (name.rfind("context ", 0) == 0) {
    const Device* device = device_at(std::atoi(name.c_str() + 8));
    return device != nullptr ? static_cast<long>(device->context_uses > 0) : -1;
  }
  return -1;
}
}

// The fake is called through the product's own table: the two must agree.
#define HVD_SAME(function, since) \
  static_assert(std::is_same_v<decltype(&function), decltype(hvd::DriverFunctions::function)>);
#if HVD_FAKE_CUDA_VERSION >= 11000
HVD_DRIVER_FUNCTIONS(HVD_SAME)
#endif
