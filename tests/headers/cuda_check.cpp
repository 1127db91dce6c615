// csrc/gpu/driver_functions.h against the official cuda.h. Compiled by
// tests/unit/test_gpu_headers.py.

#include <cuda.h>

#include "gpu/driver_functions.h"
#include "official.h"

HVD_STANDS_FOR(hvd::CudaResult, CUresult);
HVD_STANDS_FOR(hvd::CudaDeviceAttribute, CUdevice_attribute);
HVD_STANDS_FOR(hvd::CudaPointerAttribute, CUpointer_attribute);
HVD_STANDS_FOR(hvd::CudaCaptureStatus, CUstreamCaptureStatus);
HVD_STANDS_FOR(hvd::CudaContext, CUcontext);
HVD_STANDS_FOR(hvd::CudaStream, CUstream);
HVD_STANDS_FOR(hvd::CudaEvent, CUevent);
HVD_STANDS_FOR(hvd::CudaModule, CUmodule);
HVD_STANDS_FOR(hvd::CudaFunction, CUfunction);
static_assert(std::is_same_v<hvd::CudaDevice, CUdevice>);
static_assert(std::is_same_v<hvd::CudaPointer, CUdeviceptr>);
static_assert(std::is_same_v<hvd::CudaHostFunction, CUhostFn>);
static_assert(sizeof(hvd::CudaMemoryType) == sizeof(CUmemorytype));

#define HVD_CHECK(function, since) HVD_SAME_SIGNATURE(hvd::DriverFunctions, function)
HVD_DRIVER_FUNCTIONS(HVD_CHECK)

HVD_SAME_VALUE(hvd::CudaResult::success, CUDA_SUCCESS)
HVD_SAME_VALUE(hvd::CudaResult::invalid_value, CUDA_ERROR_INVALID_VALUE)
HVD_SAME_VALUE(hvd::CudaResult::out_of_memory, CUDA_ERROR_OUT_OF_MEMORY)
HVD_SAME_VALUE(hvd::CudaResult::not_initialized, CUDA_ERROR_NOT_INITIALIZED)
HVD_SAME_VALUE(hvd::CudaResult::deinitialized, CUDA_ERROR_DEINITIALIZED)
HVD_SAME_VALUE(hvd::CudaResult::no_device, CUDA_ERROR_NO_DEVICE)
HVD_SAME_VALUE(hvd::CudaResult::invalid_device, CUDA_ERROR_INVALID_DEVICE)
HVD_SAME_VALUE(hvd::CudaResult::invalid_image, CUDA_ERROR_INVALID_IMAGE)
HVD_SAME_VALUE(hvd::CudaResult::invalid_context, CUDA_ERROR_INVALID_CONTEXT)
HVD_SAME_VALUE(hvd::CudaResult::no_binary_for_gpu, CUDA_ERROR_NO_BINARY_FOR_GPU)
HVD_SAME_VALUE(hvd::CudaResult::invalid_handle, CUDA_ERROR_INVALID_HANDLE)
HVD_SAME_VALUE(hvd::CudaResult::not_found, CUDA_ERROR_NOT_FOUND)
HVD_SAME_VALUE(hvd::CudaResult::not_ready, CUDA_ERROR_NOT_READY)
HVD_SAME_VALUE(hvd::CudaResult::illegal_address, CUDA_ERROR_ILLEGAL_ADDRESS)
HVD_SAME_VALUE(hvd::CudaResult::launch_failed, CUDA_ERROR_LAUNCH_FAILED)

HVD_SAME_VALUE(hvd::CudaDeviceAttribute::max_threads_per_block,
               CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK)
HVD_SAME_VALUE(hvd::CudaDeviceAttribute::max_shared_memory_per_block,
               CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK)
HVD_SAME_VALUE(hvd::CudaDeviceAttribute::multiprocessor_count,
               CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
HVD_SAME_VALUE(hvd::CudaDeviceAttribute::compute_capability_major,
               CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
HVD_SAME_VALUE(hvd::CudaDeviceAttribute::compute_capability_minor,
               CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)

HVD_SAME_VALUE(hvd::CudaPointerAttribute::context, CU_POINTER_ATTRIBUTE_CONTEXT)
HVD_SAME_VALUE(hvd::CudaPointerAttribute::memory_type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE)
HVD_SAME_VALUE(hvd::CudaPointerAttribute::device_ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
HVD_SAME_VALUE(hvd::CudaMemoryType::host, CU_MEMORYTYPE_HOST)
HVD_SAME_VALUE(hvd::CudaMemoryType::device, CU_MEMORYTYPE_DEVICE)
HVD_SAME_VALUE(hvd::CudaMemoryType::array, CU_MEMORYTYPE_ARRAY)
HVD_SAME_VALUE(hvd::CudaMemoryType::unified, CU_MEMORYTYPE_UNIFIED)
HVD_SAME_VALUE(hvd::CudaCaptureStatus::none, CU_STREAM_CAPTURE_STATUS_NONE)
HVD_SAME_VALUE(hvd::CudaCaptureStatus::active, CU_STREAM_CAPTURE_STATUS_ACTIVE)
HVD_SAME_VALUE(hvd::CudaCaptureStatus::invalidated, CU_STREAM_CAPTURE_STATUS_INVALIDATED)
HVD_SAME_VALUE(hvd::kCudaStreamNonBlocking, CU_STREAM_NON_BLOCKING)
HVD_SAME_VALUE(hvd::kCudaEventDisableTiming, CU_EVENT_DISABLE_TIMING)
HVD_SAME_VALUE(hvd::kCudaHostPortable, CU_MEMHOSTALLOC_PORTABLE)
HVD_SAME_VALUE(hvd::kCudaHostPortable, CU_MEMHOSTREGISTER_PORTABLE)
