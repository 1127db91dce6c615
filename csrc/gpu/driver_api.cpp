#include "gpu/driver_api.h"

#include <utility>

#include "base/error.h"

namespace hvd {
namespace {

class LoadedDriver final : public DriverApi {
 public:
  explicit LoadedDriver(SharedLibrary library) : library_(std::move(library)) {
    // Asked first, so that an error about another function can tell it.
    library_.require("cuDriverGetVersion", "a driver for CUDA 8.0", &functions_.cuDriverGetVersion);
    if (functions_.cuDriverGetVersion(&version_) == CudaResult::success) {
      library_.set_version(std::to_string(version_ / 1000) + "." +
                           std::to_string(version_ % 1000 / 10));
    }
#define HVD_LOAD(function, since) \
  library_.require(#function, "a driver for CUDA " since, &functions_.function);
    HVD_DRIVER_FUNCTIONS(HVD_LOAD)
#undef HVD_LOAD
  }

  std::string describe() const override { return library_.describe(); }
  int version() const override { return version_; }

  CudaResult init() override { return functions_.cuInit(0); }
  CudaResult get_error_name(CudaResult result, const char** text) override {
    return functions_.cuGetErrorName(result, text);
  }
  CudaResult get_error_string(CudaResult result, const char** text) override {
    return functions_.cuGetErrorString(result, text);
  }

  CudaResult device_get_count(int* count) override { return functions_.cuDeviceGetCount(count); }
  CudaResult device_get(CudaDevice* device, int ordinal) override {
    return functions_.cuDeviceGet(device, ordinal);
  }
  CudaResult device_get_name(char* name, int length, CudaDevice device) override {
    return functions_.cuDeviceGetName(name, length, device);
  }
  CudaResult device_get_pci_bus_id(char* id, int length, CudaDevice device) override {
    return functions_.cuDeviceGetPCIBusId(id, length, device);
  }
  CudaResult device_get_attribute(int* value, CudaDeviceAttribute attribute,
                                  CudaDevice device) override {
    return functions_.cuDeviceGetAttribute(value, attribute, device);
  }

  CudaResult primary_context_retain(CudaContext* context, CudaDevice device) override {
    return functions_.cuDevicePrimaryCtxRetain(context, device);
  }
  CudaResult primary_context_release(CudaDevice device) override {
    return functions_.cuDevicePrimaryCtxRelease_v2(device);
  }
  CudaResult primary_context_get_state(CudaDevice device, unsigned int* flags,
                                       int* active) override {
    return functions_.cuDevicePrimaryCtxGetState(device, flags, active);
  }
  CudaResult context_push(CudaContext context) override {
    return functions_.cuCtxPushCurrent_v2(context);
  }
  CudaResult context_pop(CudaContext* context) override {
    return functions_.cuCtxPopCurrent_v2(context);
  }
  CudaResult context_get_current(CudaContext* context) override {
    return functions_.cuCtxGetCurrent(context);
  }
  CudaResult context_get_device(CudaDevice* device) override {
    return functions_.cuCtxGetDevice(device);
  }
  CudaResult context_get_stream_priority_range(int* least, int* greatest) override {
    return functions_.cuCtxGetStreamPriorityRange(least, greatest);
  }

  CudaResult stream_create(CudaStream* stream, unsigned int flags, int priority) override {
    return functions_.cuStreamCreateWithPriority(stream, flags, priority);
  }
  CudaResult stream_destroy(CudaStream stream) override {
    return functions_.cuStreamDestroy_v2(stream);
  }
  CudaResult stream_wait_event(CudaStream stream, CudaEvent event) override {
    return functions_.cuStreamWaitEvent(stream, event, 0);
  }
  CudaResult stream_query(CudaStream stream) override { return functions_.cuStreamQuery(stream); }
  CudaResult stream_synchronize(CudaStream stream) override {
    return functions_.cuStreamSynchronize(stream);
  }
  CudaResult stream_is_capturing(CudaStream stream, CudaCaptureStatus* status) override {
    return functions_.cuStreamIsCapturing(stream, status);
  }
  CudaResult launch_host_function(CudaStream stream, CudaHostFunction function,
                                  void* argument) override {
    return functions_.cuLaunchHostFunc(stream, function, argument);
  }

  CudaResult event_create(CudaEvent* event, unsigned int flags) override {
    return functions_.cuEventCreate(event, flags);
  }
  CudaResult event_destroy(CudaEvent event) override { return functions_.cuEventDestroy_v2(event); }
  CudaResult event_record(CudaEvent event, CudaStream stream) override {
    return functions_.cuEventRecord(event, stream);
  }
  CudaResult event_query(CudaEvent event) override { return functions_.cuEventQuery(event); }
  CudaResult event_synchronize(CudaEvent event) override {
    return functions_.cuEventSynchronize(event);
  }

  CudaResult memory_allocate(CudaPointer* pointer, size_t bytes) override {
    return functions_.cuMemAlloc_v2(pointer, bytes);
  }
  CudaResult memory_free(CudaPointer pointer) override { return functions_.cuMemFree_v2(pointer); }
  CudaResult memory_get_info(size_t* free_bytes, size_t* total_bytes) override {
    return functions_.cuMemGetInfo_v2(free_bytes, total_bytes);
  }
  CudaResult host_allocate(void** pointer, size_t bytes, unsigned int flags) override {
    return functions_.cuMemHostAlloc(pointer, bytes, flags);
  }
  CudaResult host_free(void* pointer) override { return functions_.cuMemFreeHost(pointer); }
  CudaResult host_register(void* pointer, size_t bytes, unsigned int flags) override {
    return functions_.cuMemHostRegister_v2(pointer, bytes, flags);
  }
  CudaResult host_unregister(void* pointer) override {
    return functions_.cuMemHostUnregister(pointer);
  }
  CudaResult host_get_device_pointer(CudaPointer* pointer, void* host) override {
    return functions_.cuMemHostGetDevicePointer_v2(pointer, host, 0);
  }
  CudaResult pointer_get_attribute(void* value, CudaPointerAttribute attribute,
                                   CudaPointer pointer) override {
    return functions_.cuPointerGetAttribute(value, attribute, pointer);
  }
  CudaResult copy(CudaPointer to, CudaPointer from, size_t bytes, CudaStream stream) override {
    return functions_.cuMemcpyAsync(to, from, bytes, stream);
  }
  CudaResult copy_to_device(CudaPointer to, const void* from, size_t bytes,
                            CudaStream stream) override {
    return functions_.cuMemcpyHtoDAsync_v2(to, from, bytes, stream);
  }
  CudaResult copy_to_host(void* to, CudaPointer from, size_t bytes, CudaStream stream) override {
    return functions_.cuMemcpyDtoHAsync_v2(to, from, bytes, stream);
  }
  CudaResult fill(CudaPointer to, unsigned char value, size_t bytes, CudaStream stream) override {
    return functions_.cuMemsetD8Async(to, value, bytes, stream);
  }

  CudaResult module_load_data(CudaModule* module, const void* image) override {
    return functions_.cuModuleLoadData(module, image);
  }
  CudaResult module_unload(CudaModule module) override { return functions_.cuModuleUnload(module); }
  CudaResult module_get_function(CudaFunction* function, CudaModule module,
                                 const char* name) override {
    return functions_.cuModuleGetFunction(function, module, name);
  }
  CudaResult occupancy_max_active_blocks(int* blocks, CudaFunction function, int block_size,
                                         size_t dynamic_shared_bytes) override {
    return functions_.cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, block_size,
                                                                  dynamic_shared_bytes);
  }
  CudaResult launch_kernel(CudaFunction function, unsigned int blocks,
                           unsigned int threads_per_block, unsigned int shared_bytes,
                           CudaStream stream, void** parameters) override {
    return functions_.cuLaunchKernel(function, blocks, 1, 1, threads_per_block, 1, 1, shared_bytes,
                                     stream, parameters, nullptr);
  }

 private:
  SharedLibrary library_;
  DriverFunctions functions_ = {};
  int version_ = 0;
};

}  // namespace

std::string DriverApi::text_of(CudaResult result) {
  const char* name = nullptr;
  const char* words = nullptr;
  // The driver knows more errors than we do, but not those of a newer library.
  if (get_error_name(result, &name) != CudaResult::success || name == nullptr) {
    return "CUDA error " + std::to_string(static_cast<int>(result));
  }
  std::string text = name;
  if (get_error_string(result, &words) == CudaResult::success && words != nullptr) {
    text += std::string(" (") + words + ")";
  }
  return text;
}

void DriverApi::check(CudaResult result, const char* call) {
  if (result == CudaResult::success) return;
  throw Error(ErrorKind::error,
              std::string(call) + " failed: " + text_of(result) + "; driver: " + describe());
}

LibraryRequest driver_library() {
  LibraryRequest request;
  request.names = {"libcuda.so.1"};
  request.purpose = "the CUDA driver, through which the core works on GPUs";
  request.remedy = "install the NVIDIA driver; a container needs it mounted (--gpus all)";
  return request;
}

std::unique_ptr<DriverApi> open_driver(const LibraryRequest& request) {
  return std::make_unique<LoadedDriver>(SharedLibrary::open(request));
}

CudaContextScope::CudaContextScope(DriverApi& driver, CudaContext context) : driver_(driver) {
  driver_.check(driver_.context_push(context), "cuCtxPushCurrent");
}

CudaContextScope::~CudaContextScope() {
  CudaContext popped = nullptr;
  // Fails only where the process is about to end and the driver has gone before us.
  static_cast<void>(driver_.context_pop(&popped));
}

}  // namespace hvd
