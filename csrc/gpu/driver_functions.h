// The functions of libcuda.so.1 that we call, with types of our own in place of cuda.h: the core
// compiles on machines that have never seen CUDA. tests/unit/test_gpu_headers.py compiles this file
// together with the official header and compares every signature, size and value.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hvd {

// Only the results that we tell apart; a library may return others.
enum class CudaResult : int {
  success = 0,
  invalid_value = 1,
  out_of_memory = 2,
  not_initialized = 3,
  deinitialized = 4,
  no_device = 100,
  invalid_device = 101,
  invalid_image = 200,
  invalid_context = 201,
  no_binary_for_gpu = 209,
  invalid_handle = 400,
  not_found = 500,
  not_ready = 600,
  illegal_address = 700,
  launch_failed = 719,
};

enum class CudaDeviceAttribute : int {
  max_threads_per_block = 1,
  max_shared_memory_per_block = 8,
  multiprocessor_count = 16,
  compute_capability_major = 75,
  compute_capability_minor = 76,
};

enum class CudaPointerAttribute : int {
  context = 1,
  memory_type = 2,
  device_ordinal = 9,
};

// What CudaPointerAttribute::memory_type gives.
enum class CudaMemoryType : unsigned int { host = 1, device = 2, array = 3, unified = 4 };

enum class CudaCaptureStatus : int { none = 0, active = 1, invalidated = 2 };

using CudaDevice = int;
using CudaPointer = unsigned long long;  // an address in a device's memory
using CudaContext = struct CudaContextObject*;
using CudaStream = struct CudaStreamObject*;
using CudaEvent = struct CudaEventObject*;
using CudaModule = struct CudaModuleObject*;
using CudaFunction = struct CudaFunctionObject*;
using CudaHostFunction = void (*)(void* argument);

// A stream that does not wait for the legacy default stream, as all of torch's own.
constexpr unsigned int kCudaStreamNonBlocking = 1;
// An event that is only waited for: without a timestamp it is cheaper.
constexpr unsigned int kCudaEventDisableTiming = 2;
// Host memory that every context may use.
constexpr unsigned int kCudaHostPortable = 1;

struct DriverFunctions {
  CudaResult (*cuInit)(unsigned int flags);
  CudaResult (*cuDriverGetVersion)(int* version);
  CudaResult (*cuGetErrorName)(CudaResult result, const char** text);
  CudaResult (*cuGetErrorString)(CudaResult result, const char** text);

  CudaResult (*cuDeviceGetCount)(int* count);
  CudaResult (*cuDeviceGet)(CudaDevice* device, int ordinal);
  CudaResult (*cuDeviceGetName)(char* name, int length, CudaDevice device);
  CudaResult (*cuDeviceGetPCIBusId)(char* id, int length, CudaDevice device);
  CudaResult (*cuDeviceGetAttribute)(int* value, CudaDeviceAttribute attribute, CudaDevice device);

  CudaResult (*cuDevicePrimaryCtxRetain)(CudaContext* context, CudaDevice device);
  CudaResult (*cuDevicePrimaryCtxRelease_v2)(CudaDevice device);
  CudaResult (*cuDevicePrimaryCtxGetState)(CudaDevice device, unsigned int* flags, int* active);
  CudaResult (*cuCtxPushCurrent_v2)(CudaContext context);
  CudaResult (*cuCtxPopCurrent_v2)(CudaContext* context);
  CudaResult (*cuCtxGetCurrent)(CudaContext* context);
  CudaResult (*cuCtxGetDevice)(CudaDevice* device);
  CudaResult (*cuCtxGetStreamPriorityRange)(int* least, int* greatest);

  CudaResult (*cuStreamCreateWithPriority)(CudaStream* stream, unsigned int flags, int priority);
  CudaResult (*cuStreamDestroy_v2)(CudaStream stream);
  CudaResult (*cuStreamWaitEvent)(CudaStream stream, CudaEvent event, unsigned int flags);
  CudaResult (*cuStreamQuery)(CudaStream stream);
  CudaResult (*cuStreamSynchronize)(CudaStream stream);
  CudaResult (*cuStreamIsCapturing)(CudaStream stream, CudaCaptureStatus* status);
  CudaResult (*cuLaunchHostFunc)(CudaStream stream, CudaHostFunction function, void* argument);

  CudaResult (*cuEventCreate)(CudaEvent* event, unsigned int flags);
  CudaResult (*cuEventDestroy_v2)(CudaEvent event);
  CudaResult (*cuEventRecord)(CudaEvent event, CudaStream stream);
  CudaResult (*cuEventQuery)(CudaEvent event);
  CudaResult (*cuEventSynchronize)(CudaEvent event);

  CudaResult (*cuMemAlloc_v2)(CudaPointer* pointer, size_t bytes);
  CudaResult (*cuMemFree_v2)(CudaPointer pointer);
  CudaResult (*cuMemGetInfo_v2)(size_t* free_bytes, size_t* total_bytes);
  CudaResult (*cuMemHostAlloc)(void** pointer, size_t bytes, unsigned int flags);
  CudaResult (*cuMemFreeHost)(void* pointer);
  CudaResult (*cuMemHostRegister_v2)(void* pointer, size_t bytes, unsigned int flags);
  CudaResult (*cuMemHostUnregister)(void* pointer);
  CudaResult (*cuMemHostGetDevicePointer_v2)(CudaPointer* pointer, void* host, unsigned int flags);
  CudaResult (*cuPointerGetAttribute)(void* value, CudaPointerAttribute attribute,
                                      CudaPointer pointer);
  CudaResult (*cuMemcpyAsync)(CudaPointer to, CudaPointer from, size_t bytes, CudaStream stream);
  CudaResult (*cuMemcpyHtoDAsync_v2)(CudaPointer to, const void* from, size_t bytes,
                                     CudaStream stream);
  CudaResult (*cuMemcpyDtoHAsync_v2)(void* to, CudaPointer from, size_t bytes, CudaStream stream);
  CudaResult (*cuMemsetD8Async)(CudaPointer to, unsigned char value, size_t bytes,
                                CudaStream stream);

  CudaResult (*cuModuleLoadData)(CudaModule* module, const void* image);
  CudaResult (*cuModuleUnload)(CudaModule module);
  CudaResult (*cuModuleGetFunction)(CudaFunction* function, CudaModule module, const char* name);
  CudaResult (*cuOccupancyMaxActiveBlocksPerMultiprocessor)(int* blocks, CudaFunction function,
                                                            int block_size,
                                                            size_t dynamic_shared_bytes);
  CudaResult (*cuLaunchKernel)(CudaFunction function, unsigned int grid_x, unsigned int grid_y,
                               unsigned int grid_z, unsigned int block_x, unsigned int block_y,
                               unsigned int block_z, unsigned int shared_bytes, CudaStream stream,
                               void** parameters, void** extra);
};

// F(function, first CUDA version whose driver has it) for each of them.
#define HVD_DRIVER_FUNCTIONS(F)                         \
  F(cuInit, "8.0")                                      \
  F(cuDriverGetVersion, "8.0")                          \
  F(cuGetErrorName, "8.0")                              \
  F(cuGetErrorString, "8.0")                            \
  F(cuDeviceGetCount, "8.0")                            \
  F(cuDeviceGet, "8.0")                                 \
  F(cuDeviceGetName, "8.0")                             \
  F(cuDeviceGetPCIBusId, "8.0")                         \
  F(cuDeviceGetAttribute, "8.0")                        \
  F(cuDevicePrimaryCtxRetain, "8.0")                    \
  F(cuDevicePrimaryCtxRelease_v2, "11.0")               \
  F(cuDevicePrimaryCtxGetState, "8.0")                  \
  F(cuCtxPushCurrent_v2, "8.0")                         \
  F(cuCtxPopCurrent_v2, "8.0")                          \
  F(cuCtxGetCurrent, "8.0")                             \
  F(cuCtxGetDevice, "8.0")                              \
  F(cuCtxGetStreamPriorityRange, "8.0")                 \
  F(cuStreamCreateWithPriority, "8.0")                  \
  F(cuStreamDestroy_v2, "8.0")                          \
  F(cuStreamWaitEvent, "8.0")                           \
  F(cuStreamQuery, "8.0")                               \
  F(cuStreamSynchronize, "8.0")                         \
  F(cuStreamIsCapturing, "10.0")                        \
  F(cuLaunchHostFunc, "10.0")                           \
  F(cuEventCreate, "8.0")                               \
  F(cuEventDestroy_v2, "8.0")                           \
  F(cuEventRecord, "8.0")                               \
  F(cuEventQuery, "8.0")                                \
  F(cuEventSynchronize, "8.0")                          \
  F(cuMemAlloc_v2, "8.0")                               \
  F(cuMemFree_v2, "8.0")                                \
  F(cuMemGetInfo_v2, "8.0")                             \
  F(cuMemHostAlloc, "8.0")                              \
  F(cuMemFreeHost, "8.0")                               \
  F(cuMemHostRegister_v2, "8.0")                        \
  F(cuMemHostUnregister, "8.0")                         \
  F(cuMemHostGetDevicePointer_v2, "8.0")                \
  F(cuPointerGetAttribute, "8.0")                       \
  F(cuMemcpyAsync, "8.0")                               \
  F(cuMemcpyHtoDAsync_v2, "8.0")                        \
  F(cuMemcpyDtoHAsync_v2, "8.0")                        \
  F(cuMemsetD8Async, "8.0")                             \
  F(cuModuleLoadData, "8.0")                            \
  F(cuModuleUnload, "8.0")                              \
  F(cuModuleGetFunction, "8.0")                         \
  F(cuOccupancyMaxActiveBlocksPerMultiprocessor, "8.0") \
  F(cuLaunchKernel, "8.0")

}  // namespace hvd
