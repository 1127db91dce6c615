#pragma once

#include <memory>
#include <string>

#include "gpu/driver_functions.h"
#include "gpu/shared_library.h"

namespace hvd {

// The CUDA driver, one virtual function per function of libcuda.so.1 with the same arguments and
// results: what the driver's documentation says of cuEventRecord holds for event_record. Tests put
// objects of their own in its place.
//
// Thread-safe, as the driver is. Which device a call concerns is decided by the calling thread's
// current context (see CudaContextScope).
class DriverApi {
 public:
  virtual ~DriverApi() = default;

  // "libcuda.so.1, version 12.4 (/usr/lib/libcuda.so.1)"; the version is that of the newest CUDA
  // which the driver serves.
  virtual std::string describe() const = 0;
  // That version as the driver gives it: 1000 * major + 10 * minor.
  virtual int version() const = 0;

  [[nodiscard]] virtual CudaResult init() = 0;
  [[nodiscard]] virtual CudaResult get_error_name(CudaResult result, const char** text) = 0;
  [[nodiscard]] virtual CudaResult get_error_string(CudaResult result, const char** text) = 0;

  [[nodiscard]] virtual CudaResult device_get_count(int* count) = 0;
  [[nodiscard]] virtual CudaResult device_get(CudaDevice* device, int ordinal) = 0;
  [[nodiscard]] virtual CudaResult device_get_name(char* name, int length, CudaDevice device) = 0;
  [[nodiscard]] virtual CudaResult device_get_pci_bus_id(char* id, int length,
                                                         CudaDevice device) = 0;
  [[nodiscard]] virtual CudaResult device_get_attribute(int* value, CudaDeviceAttribute attribute,
                                                        CudaDevice device) = 0;

  // The primary context is the one that torch works in. Retaining it makes it if it is not there.
  [[nodiscard]] virtual CudaResult primary_context_retain(CudaContext* context,
                                                          CudaDevice device) = 0;
  [[nodiscard]] virtual CudaResult primary_context_release(CudaDevice device) = 0;
  [[nodiscard]] virtual CudaResult primary_context_get_state(CudaDevice device, unsigned int* flags,
                                                             int* active) = 0;
  [[nodiscard]] virtual CudaResult context_push(CudaContext context) = 0;
  [[nodiscard]] virtual CudaResult context_pop(CudaContext* context) = 0;
  [[nodiscard]] virtual CudaResult context_get_current(CudaContext* context) = 0;
  [[nodiscard]] virtual CudaResult context_get_device(CudaDevice* device) = 0;
  // Smaller numbers come first: *greatest <= *least.
  [[nodiscard]] virtual CudaResult context_get_stream_priority_range(int* least, int* greatest) = 0;

  [[nodiscard]] virtual CudaResult stream_create(CudaStream* stream, unsigned int flags,
                                                 int priority) = 0;
  [[nodiscard]] virtual CudaResult stream_destroy(CudaStream stream) = 0;
  [[nodiscard]] virtual CudaResult stream_wait_event(CudaStream stream, CudaEvent event) = 0;
  [[nodiscard]] virtual CudaResult stream_query(CudaStream stream) = 0;
  [[nodiscard]] virtual CudaResult stream_synchronize(CudaStream stream) = 0;
  [[nodiscard]] virtual CudaResult stream_is_capturing(CudaStream stream,
                                                       CudaCaptureStatus* status) = 0;
  [[nodiscard]] virtual CudaResult launch_host_function(CudaStream stream,
                                                        CudaHostFunction function,
                                                        void* argument) = 0;

  [[nodiscard]] virtual CudaResult event_create(CudaEvent* event, unsigned int flags) = 0;
  [[nodiscard]] virtual CudaResult event_destroy(CudaEvent event) = 0;
  [[nodiscard]] virtual CudaResult event_record(CudaEvent event, CudaStream stream) = 0;
  [[nodiscard]] virtual CudaResult event_query(CudaEvent event) = 0;
  [[nodiscard]] virtual CudaResult event_synchronize(CudaEvent event) = 0;

  [[nodiscard]] virtual CudaResult memory_allocate(CudaPointer* pointer, size_t bytes) = 0;
  [[nodiscard]] virtual CudaResult memory_free(CudaPointer pointer) = 0;
  [[nodiscard]] virtual CudaResult memory_get_info(size_t* free_bytes, size_t* total_bytes) = 0;
  [[nodiscard]] virtual CudaResult host_allocate(void** pointer, size_t bytes,
                                                 unsigned int flags) = 0;
  [[nodiscard]] virtual CudaResult host_free(void* pointer) = 0;
  [[nodiscard]] virtual CudaResult host_register(void* pointer, size_t bytes,
                                                 unsigned int flags) = 0;
  [[nodiscard]] virtual CudaResult host_unregister(void* pointer) = 0;
  [[nodiscard]] virtual CudaResult host_get_device_pointer(CudaPointer* pointer, void* host) = 0;
  [[nodiscard]] virtual CudaResult pointer_get_attribute(void* value,
                                                         CudaPointerAttribute attribute,
                                                         CudaPointer pointer) = 0;
  [[nodiscard]] virtual CudaResult copy(CudaPointer to, CudaPointer from, size_t bytes,
                                        CudaStream stream) = 0;
  [[nodiscard]] virtual CudaResult copy_to_device(CudaPointer to, const void* from, size_t bytes,
                                                  CudaStream stream) = 0;
  [[nodiscard]] virtual CudaResult copy_to_host(void* to, CudaPointer from, size_t bytes,
                                                CudaStream stream) = 0;
  [[nodiscard]] virtual CudaResult fill(CudaPointer to, unsigned char value, size_t bytes,
                                        CudaStream stream) = 0;

  [[nodiscard]] virtual CudaResult module_load_data(CudaModule* module, const void* image) = 0;
  [[nodiscard]] virtual CudaResult module_unload(CudaModule module) = 0;
  [[nodiscard]] virtual CudaResult module_get_function(CudaFunction* function, CudaModule module,
                                                       const char* name) = 0;
  [[nodiscard]] virtual CudaResult occupancy_max_active_blocks(int* blocks, CudaFunction function,
                                                               int block_size,
                                                               size_t dynamic_shared_bytes) = 0;
  // A grid and blocks of one dimension; `parameters` has one address per parameter.
  [[nodiscard]] virtual CudaResult launch_kernel(CudaFunction function, unsigned int blocks,
                                                 unsigned int threads_per_block,
                                                 unsigned int shared_bytes, CudaStream stream,
                                                 void** parameters) = 0;

  // Throws Error where `result` is not success: `call` as the driver names it, the driver's name
  // and words for the error, and the library.
  void check(CudaResult result, const char* call);
  // Those name and words: "CUDA_ERROR_OUT_OF_MEMORY (out of memory)".
  std::string text_of(CudaResult result);
};

// Where the driver is looked for. Its library comes with the driver and in no package.
LibraryRequest driver_library();

// Opens the library and looks every function up; initializes nothing. Throws Error if the library
// is not there, or older than CUDA 11.0.
std::unique_ptr<DriverApi> open_driver(const LibraryRequest& request);

// Makes a context the calling thread's own for as long as it lives, and then the one before it:
// callers of ours, torch among them, must not find another device current after a call.
class CudaContextScope {
 public:
  CudaContextScope(DriverApi& driver, CudaContext context);
  ~CudaContextScope();
  CudaContextScope(const CudaContextScope&) = delete;
  CudaContextScope& operator=(const CudaContextScope&) = delete;

 private:
  DriverApi& driver_;
};

}  // namespace hvd
