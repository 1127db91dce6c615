// The driver's table, and the fake driver that the tests of everything on a GPU rest on: what is
// asynchronous on a GPU has to be asynchronous here.

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <string>
#include <vector>

#include "fakes.h"
#include "gpu/driver_api.h"

namespace hvd {
namespace {

using test::cuda_count;
using test::CudaFaults;
using test::eventually;
using test::fake_driver;
using test::Gpu;

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// Something on a stream that waits until it is told to go on.
class Gate {
 public:
  void close_on(CudaStream stream) {
    fake_driver().check(fake_driver().launch_host_function(stream, wait, this), "cuLaunchHostFunc");
  }
  void open() { open_ = true; }
  ~Gate() { open(); }

 private:
  static void wait(void* gate) {
    while (!static_cast<Gate*>(gate)->open_) std::this_thread::yield();
  }
  std::atomic<bool> open_{false};
};

CudaEvent new_event() {
  CudaEvent event = nullptr;
  fake_driver().check(fake_driver().event_create(&event, kCudaEventDisableTiming), "cuEventCreate");
  return event;
}

// ---- The table

TEST(driver_is_opened_by_name_and_says_its_version) {
  LibraryRequest request = driver_library();
  CHECK_EQ(request.names.front(), "libcuda.so.1");
  fake_driver();  // loaded from now on, as by torch
  const std::unique_ptr<DriverApi> driver = open_driver(request);
  CHECK_EQ(driver->version(), 12040);
  CHECK_EQ(driver->describe(),
           "libcuda.so.1, version 12.4 (" + test::fake_file("cuda", "libcuda.so.1") + ")");
}

TEST(driver_that_is_too_old_is_named_with_its_version_and_what_is_needed) {
  LibraryRequest request = driver_library();
  request.file = test::fake_file("cuda_old", "libcuda.so.1");
  const std::string text = CHECK_THROWS(open_driver(request), ErrorKind::error).what();
  CHECK(contains(text, "libcuda.so.1, version 10.2 (" + request.file + ")"));
  CHECK(contains(text, "has no function cuDevicePrimaryCtxRelease_v2"));
  CHECK(contains(text, "a driver for CUDA 11.0 or newer is needed"));
}

TEST(driver_errors_carry_call_name_text_and_library) {
  const Gpu gpu(0);
  DriverApi& driver = fake_driver();
  CHECK_EQ(driver.text_of(CudaResult::out_of_memory), "CUDA_ERROR_OUT_OF_MEMORY (out of memory)");
  CHECK_EQ(driver.text_of(static_cast<CudaResult>(998)), "CUDA error 998");
  driver.check(CudaResult::success, "cuEventQuery");
  const std::string text =
      CHECK_THROWS(driver.check(driver.event_query(nullptr), "cuEventQuery"), ErrorKind::error)
          .what();
  CHECK(contains(text, "cuEventQuery failed: CUDA_ERROR_INVALID_HANDLE (invalid resource handle)"));
  CHECK(contains(text, "libcuda.so.1, version 12.4"));
}

TEST(driver_knows_its_devices) {
  DriverApi& driver = fake_driver();
  int count = 0;
  CHECK(driver.device_get_count(&count) == CudaResult::success);
  CHECK_EQ(count, 8);
  CudaDevice device = -1;
  CHECK(driver.device_get(&device, 8) == CudaResult::invalid_device);
  CHECK(driver.device_get(&device, 3) == CudaResult::success);
  char name[64] = {};
  CHECK(driver.device_get_name(name, sizeof(name), device) == CudaResult::success);
  CHECK_EQ(std::string(name), "Fake GPU 3");
  char bus[64] = {};
  CHECK(driver.device_get_pci_bus_id(bus, sizeof(bus), device) == CudaResult::success);
  CHECK_EQ(std::string(bus), "0000:04:00.0");
  int major = 0;
  CHECK(driver.device_get_attribute(&major, CudaDeviceAttribute::compute_capability_major,
                                    device) == CudaResult::success);
  CHECK_EQ(major, 9);
}

// ---- Contexts

TEST(context_scope_restores_the_context_before_it) {
  DriverApi& driver = fake_driver();
  const long before = cuda_count("contexts");
  CudaContext current = nullptr;
  {
    const Gpu first(4);
    CHECK_EQ(cuda_count("context 4"), 1);
    CHECK_EQ(cuda_count("context 5"), 0);  // no stray context anywhere else
    {
      const Gpu second(5);
      CudaDevice device = -1;
      CHECK(driver.context_get_device(&device) == CudaResult::success);
      CHECK_EQ(device, 5);
      unsigned int flags = 9;
      int active = 0;
      CHECK(driver.primary_context_get_state(5, &flags, &active) == CudaResult::success);
      CHECK_EQ(active, 1);
    }
    CHECK(driver.context_get_current(&current) == CudaResult::success);
    CHECK_EQ(current, first.context());
  }
  CHECK(driver.context_get_current(&current) == CudaResult::success);
  CHECK(current == nullptr);
  CHECK_EQ(cuda_count("contexts"), before);
  CudaStream stream = nullptr;
  CHECK(driver.stream_create(&stream, 0, 0) == CudaResult::invalid_context);
  CHECK_THROWS(CudaContextScope(driver, nullptr), ErrorKind::error);
}

// ---- Streams and events

TEST(streams_are_asynchronous_and_keep_their_order) {
  Gpu gpu(0);
  DriverApi& driver = fake_driver();
  int* memory = gpu.allocate<int>(1000);
  std::vector<int> values(1000, 7);
  std::vector<int> got(1000, 0);
  Gate gate;
  gate.close_on(gpu.stream);
  const size_t bytes = values.size() * sizeof(int);
  CHECK(driver.copy_to_device(Gpu::pointer(memory), values.data(), bytes, gpu.stream) ==
        CudaResult::success);
  CHECK(driver.fill(Gpu::pointer(memory), 0, 4, gpu.stream) == CudaResult::success);
  CHECK(driver.copy_to_host(got.data(), Gpu::pointer(memory), bytes, gpu.stream) ==
        CudaResult::success);
  CHECK(driver.stream_query(gpu.stream) == CudaResult::not_ready);
  gate.open();
  gpu.synchronize();
  CHECK(driver.stream_query(gpu.stream) == CudaResult::success);
  CHECK_EQ(got[0], 0);
  CHECK_EQ(got[1], 7);
  CHECK_EQ(got[999], 7);
}

TEST(event_orders_two_streams_and_stands_for_its_last_record) {
  Gpu gpu(0);
  DriverApi& driver = fake_driver();
  const CudaStream other = gpu.new_stream();
  const CudaEvent event = new_event();
  CHECK(driver.event_query(event) == CudaResult::success);  // never recorded: over
  CHECK(driver.stream_wait_event(other, event) == CudaResult::success);
  CHECK(driver.stream_synchronize(other) == CudaResult::success);

  std::vector<int> source(100, 3);
  std::vector<int> got(100, 0);
  int* memory = gpu.allocate<int>(100);
  Gate gate;
  gate.close_on(gpu.stream);
  CHECK(driver.copy_to_device(Gpu::pointer(memory), source.data(), 400, gpu.stream) ==
        CudaResult::success);
  CHECK(driver.event_record(event, gpu.stream) == CudaResult::success);
  CHECK(driver.event_query(event) == CudaResult::not_ready);
  CHECK(driver.stream_wait_event(other, event) == CudaResult::success);
  CHECK(driver.copy_to_host(got.data(), Gpu::pointer(memory), 400, other) == CudaResult::success);

  // Recorded anew while the first is still waited for: the wait is for the first.
  Gate second;
  second.close_on(gpu.stream);
  CHECK(driver.event_record(event, gpu.stream) == CudaResult::success);
  gate.open();
  CHECK(driver.stream_synchronize(other) == CudaResult::success);
  CHECK_EQ(got[99], 3);
  CHECK(driver.event_query(event) == CudaResult::not_ready);
  second.open();
  CHECK(driver.event_synchronize(event) == CudaResult::success);
  CHECK(driver.event_destroy(event) == CudaResult::success);
  CHECK(driver.event_destroy(event) == CudaResult::invalid_handle);
  CHECK(driver.event_record(event, gpu.stream) == CudaResult::invalid_handle);
}

TEST(default_stream_orders_itself_against_blocking_streams_only) {
  Gpu gpu(1);
  DriverApi& driver = fake_driver();
  const CudaStream blocking = gpu.new_stream(0);
  Gate gate;
  gate.close_on(blocking);
  int* memory = gpu.allocate<int>(1);
  CHECK(driver.fill(Gpu::pointer(memory), 1, 4, nullptr) == CudaResult::success);
  CHECK(driver.fill(Gpu::pointer(memory), 2, 4, gpu.stream) == CudaResult::success);
  CHECK(driver.stream_synchronize(gpu.stream) == CudaResult::success);
  CHECK(driver.stream_query(nullptr) == CudaResult::not_ready);
  gate.open();
  CHECK(driver.stream_synchronize(nullptr) == CudaResult::success);
  CHECK_EQ(gpu.download(memory, 1)[0], 0x01010101);
}

TEST(host_functions_and_capture_state) {
  Gpu gpu(0);
  std::atomic<int> calls{0};
  const auto count = [](void* argument) { ++*static_cast<std::atomic<int>*>(argument); };
  CHECK(fake_driver().launch_host_function(gpu.stream, count, &calls) == CudaResult::success);
  gpu.synchronize();
  CHECK_EQ(calls.load(), 1);
  CudaCaptureStatus status = CudaCaptureStatus::active;
  CHECK(fake_driver().stream_is_capturing(gpu.stream, &status) == CudaResult::success);
  CHECK(status == CudaCaptureStatus::none);
  int least = -9;
  int greatest = 9;
  CHECK(fake_driver().context_get_stream_priority_range(&least, &greatest) == CudaResult::success);
  CHECK(greatest < least);
}

// ---- Memory

TEST(pointers_tell_what_they_point_to) {
  Gpu gpu(2);
  DriverApi& driver = fake_driver();
  char* memory = gpu.allocate<char>(64);
  int device = -1;
  CHECK(driver.pointer_get_attribute(&device, CudaPointerAttribute::device_ordinal,
                                     Gpu::pointer(memory + 63)) == CudaResult::success);
  CHECK_EQ(device, 2);
  CudaMemoryType type = CudaMemoryType::host;
  CHECK(driver.pointer_get_attribute(&type, CudaPointerAttribute::memory_type,
                                     Gpu::pointer(memory)) == CudaResult::success);
  CHECK(type == CudaMemoryType::device);
  std::vector<char> ordinary(64);
  CHECK(driver.pointer_get_attribute(&type, CudaPointerAttribute::memory_type,
                                     Gpu::pointer(ordinary.data())) == CudaResult::invalid_value);
  CHECK(driver.host_register(ordinary.data(), ordinary.size(), kCudaHostPortable) ==
        CudaResult::success);
  CudaPointer mapped = 0;
  CHECK(driver.host_get_device_pointer(&mapped, ordinary.data()) == CudaResult::success);
  CHECK(driver.pointer_get_attribute(&type, CudaPointerAttribute::memory_type, mapped) ==
        CudaResult::success);
  CHECK(type == CudaMemoryType::host);
  CHECK(driver.host_unregister(ordinary.data()) == CudaResult::success);
  CHECK(driver.host_unregister(ordinary.data()) == CudaResult::invalid_value);

  void* pinned = nullptr;
  CHECK(driver.host_allocate(&pinned, 100, kCudaHostPortable) == CudaResult::success);
  CHECK(driver.memory_free(Gpu::pointer(pinned)) == CudaResult::invalid_value);
  CHECK(driver.host_free(pinned) == CudaResult::success);

  const auto adopt =
      test::fake_function<void(void*, size_t, int)>("cuda", "libcuda.so.1", "hvd_fake_cuda_adopt");
  adopt(ordinary.data(), ordinary.size(), 2);
  CHECK(driver.pointer_get_attribute(&type, CudaPointerAttribute::memory_type,
                                     Gpu::pointer(ordinary.data())) == CudaResult::success);
  CHECK(type == CudaMemoryType::device);
  adopt(ordinary.data(), 0, 2);

  size_t free_bytes = 0;
  size_t total_bytes = 0;
  CHECK(driver.memory_get_info(&free_bytes, &total_bytes) == CudaResult::success);
  CHECK(free_bytes < total_bytes);
  CudaPointer too_much = 0;
  CHECK(driver.memory_allocate(&too_much, total_bytes) == CudaResult::out_of_memory);
}

TEST(nothing_is_left_behind_by_a_gpu_scope) {
  const long allocations = cuda_count("allocations");
  const long streams = cuda_count("streams");
  {
    Gpu gpu(0);
    gpu.allocate<float>(10);
    CHECK_EQ(cuda_count("allocations"), allocations + 1);
    CHECK_EQ(cuda_count("streams"), streams + 1);
  }
  CHECK_EQ(cuda_count("allocations"), allocations);
  CHECK_EQ(cuda_count("streams"), streams);
}

// ---- Kernels

void scale(const HvdFakeLaunch* launch, void* const* parameters) {
  auto* values = *static_cast<float* const*>(parameters[0]);
  const float factor = *static_cast<const float*>(parameters[1]);
  const unsigned int count = *static_cast<const unsigned int*>(parameters[2]);
  for (unsigned int block = 0; block < launch->grid[0]; ++block) {
    for (unsigned int thread = 0; thread < launch->block[0]; ++thread) {
      const unsigned int i = block * launch->block[0] + thread;
      if (i < count) values[i] *= factor;
    }
  }
}
const size_t kScaleSizes[] = {sizeof(float*), sizeof(float), sizeof(unsigned int)};
const HvdFakeKernel kKernels[] = {{"scale", scale, 3, kScaleSizes}};
const HvdFakeModule kModule = {HVD_FAKE_MODULE_MAGIC, 1, kKernels};

TEST(kernels_of_a_module_run_on_the_stream_with_the_parameters_of_the_launch) {
  Gpu gpu(0);
  DriverApi& driver = fake_driver();
  CudaModule module = nullptr;
  CHECK(driver.module_load_data(&module, "no module at all") == CudaResult::invalid_image);
  CHECK(driver.module_load_data(&module, &kModule) == CudaResult::success);
  CudaFunction function = nullptr;
  CHECK(driver.module_get_function(&function, module, "no_such") == CudaResult::not_found);
  CHECK(driver.module_get_function(&function, module, "scale") == CudaResult::success);
  int blocks = 0;
  CHECK(driver.occupancy_max_active_blocks(&blocks, function, 256, 0) == CudaResult::success);
  CHECK_EQ(blocks, 8);

  float* values = gpu.upload(std::vector<float>(1000, 2.0f));
  Gate gate;
  gate.close_on(gpu.stream);
  {
    float factor = 3.0f;
    unsigned int count = 999;
    void* parameters[] = {&values, &factor, &count};
    CHECK(driver.launch_kernel(function, 4, 256, 0, gpu.stream, parameters) == CudaResult::success);
    factor = 100.0f;  // the launch has its own copy
    CHECK(driver.launch_kernel(function, 0, 256, 0, gpu.stream, parameters) ==
          CudaResult::invalid_value);
    CHECK(driver.launch_kernel(function, 4, 2048, 0, gpu.stream, parameters) ==
          CudaResult::invalid_value);
  }
  gate.open();
  const std::vector<float> got = gpu.download(values, 1000);
  CHECK_EQ(got[0], 6.0f);
  CHECK_EQ(got[998], 6.0f);
  CHECK_EQ(got[999], 2.0f);
  CHECK(driver.module_unload(module) == CudaResult::success);
  CHECK(driver.module_unload(module) == CudaResult::invalid_handle);
}

TEST(compiled_programs_find_the_kernels_that_the_test_has_registered) {
  const Gpu gpu(0);
  const auto set_kernels = test::fake_function<void(const HvdFakeModule*)>(
      "cuda", "libcuda.so.1", "hvd_fake_cuda_set_kernels");
  set_kernels(&kModule);
  for (const char* image : {"\x7f"
                            "ELF and so on",
                            "//\n// PTX", ".version 8.0"}) {
    CudaModule module = nullptr;
    CHECK(fake_driver().module_load_data(&module, image) == CudaResult::success);
    CudaFunction function = nullptr;
    CHECK(fake_driver().module_get_function(&function, module, "scale") == CudaResult::success);
    CHECK(fake_driver().module_unload(module) == CudaResult::success);
  }
  set_kernels(nullptr);
}

// ---- Failures

TEST(faults_strike_at_the_call_and_device_they_name) {
  const Gpu gpu(3);
  DriverApi& driver = fake_driver();
  CudaPointer pointer = 0;
  const CudaFaults faults("cuMemAlloc_v2@2=2; cuEventCreate[4]=3 ;cuEventCreate[3]@2+=1");
  CHECK(driver.memory_allocate(&pointer, 16) == CudaResult::success);
  CudaPointer second = 0;
  CHECK(driver.memory_allocate(&second, 16) == CudaResult::out_of_memory);
  CHECK(driver.memory_free(pointer) == CudaResult::success);
  CudaEvent event = nullptr;
  CHECK(driver.event_create(&event, 0) == CudaResult::success);
  CHECK(driver.event_destroy(event) == CudaResult::success);
  CHECK(driver.event_create(&event, 0) == CudaResult::invalid_value);
  CHECK(driver.event_create(&event, 0) == CudaResult::invalid_value);
  CHECK_EQ(cuda_count("cuMemAlloc_v2"), 2);
  CHECK_EQ(cuda_count("cuEventCreate"), 3);
}

TEST(work_that_hangs_holds_up_its_stream_only) {
  Gpu gpu(0);
  DriverApi& driver = fake_driver();
  const CudaStream other = gpu.new_stream();
  int* memory = gpu.allocate<int>(1);
  const CudaFaults faults("cuMemsetD8Async@1=hang; cuMemsetD8Async@3=slow:5");
  CHECK(driver.fill(Gpu::pointer(memory), 1, 4, gpu.stream) == CudaResult::success);
  CHECK(driver.fill(Gpu::pointer(memory), 2, 4, other) == CudaResult::success);
  CHECK(driver.fill(Gpu::pointer(memory), 3, 4, other) == CudaResult::success);
  CHECK(driver.stream_synchronize(other) == CudaResult::success);
  CHECK(driver.stream_query(gpu.stream) == CudaResult::not_ready);
  test::fake_function<void()>("cuda", "libcuda.so.1", "hvd_fake_cuda_release_hung")();
  gpu.synchronize();
  CHECK_EQ(gpu.download(memory, 1)[0], 0x01010101);
}

// What a kernel dies of stays with the device, so this takes one that no other test uses.
TEST(a_kernel_that_dies_takes_its_device_with_it) {
  Gpu gpu(7);
  DriverApi& driver = fake_driver();
  const CudaFaults faults("cuMemsetD8Async@1=async:700");
  int* memory = gpu.allocate<int>(1);
  CHECK(driver.fill(Gpu::pointer(memory), 1, 4, gpu.stream) == CudaResult::success);
  CHECK(driver.stream_synchronize(gpu.stream) == CudaResult::illegal_address);
  CHECK(driver.fill(Gpu::pointer(memory), 1, 4, gpu.stream) == CudaResult::illegal_address);
  const Gpu healthy(6);
  CHECK(driver.stream_query(healthy.stream) == CudaResult::success);
}

TEST(forked_child_has_no_driver) {
  const Gpu gpu(0);
  const pid_t child = fork();
  if (child == 0) {
    CudaEvent event = nullptr;
    const bool refused = fake_driver().event_create(&event, 0) == CudaResult::not_initialized &&
                         fake_driver().init() == CudaResult::not_initialized;
    _exit(refused ? 0 : 1);
  }
  int status = -1;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
}

}  // namespace
}  // namespace hvd
