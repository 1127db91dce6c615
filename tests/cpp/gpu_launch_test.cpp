// Launches of the kernels, through a driver that runs their source on the host at once.

#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "gpu/bucket_table.h"
#include "gpu/kernels.h"
#include "host_kernels.h"

namespace hvd {
namespace {

// Has two multiprocessors with three blocks each.
class HostDriver final : public DriverApi {
 public:
  std::string missing;  // the kernel that the image lacks
  CudaResult load_result = CudaResult::success;
  CudaResult launch_result = CudaResult::success;
  bool context_is_gone = false;
  int modules = 0;
  int pushed = 0;
  struct Launch {
    std::string name;
    unsigned blocks;
    CudaStream stream;
  };
  std::vector<Launch> launches;

  std::string describe() const override { return "a driver on the host"; }
  int version() const override { return 12040; }
  CudaResult get_error_name(CudaResult, const char** text) override {
    *text = "CUDA_ERROR_OF_THE_TEST";
    return CudaResult::success;
  }
  CudaResult get_error_string(CudaResult, const char** text) override {
    *text = "an error of the test";
    return CudaResult::success;
  }
  CudaResult context_get_current(CudaContext* context) override {
    *context = kContext;
    return CudaResult::success;
  }
  CudaResult context_push(CudaContext context) override {
    if (context_is_gone) return CudaResult::deinitialized;
    CHECK(context == kContext);
    ++pushed;
    return CudaResult::success;
  }
  CudaResult context_pop(CudaContext*) override {
    --pushed;
    return CudaResult::success;
  }
  CudaResult device_get_attribute(int* value, CudaDeviceAttribute attribute,
                                  CudaDevice device) override {
    CHECK(attribute == CudaDeviceAttribute::multiprocessor_count && device == 3);
    *value = 2;
    return CudaResult::success;
  }
  CudaResult module_load_data(CudaModule* module, const void* image) override {
    if (load_result != CudaResult::success) return load_result;
    CHECK_EQ(std::string(static_cast<const char*>(image)), std::string("image"));
    ++modules;
    *module = reinterpret_cast<CudaModule>(this);
    return CudaResult::success;
  }
  CudaResult module_unload(CudaModule) override {
    --modules;
    return CudaResult::success;
  }
  CudaResult module_get_function(CudaFunction* function, CudaModule, const char* name) override {
    const test::HostKernel* kernel = test::find_host_kernel(name);
    if (kernel == nullptr || name == missing) return CudaResult::not_found;
    *function = reinterpret_cast<CudaFunction>(const_cast<test::HostKernel*>(kernel));
    return CudaResult::success;
  }
  CudaResult occupancy_max_active_blocks(int* blocks, CudaFunction, int block_size,
                                         size_t shared_bytes) override {
    CHECK(block_size == int{gpu::kBlockThreads} && shared_bytes == 0);
    *blocks = 3;
    return CudaResult::success;
  }
  CudaResult launch_kernel(CudaFunction function, unsigned int blocks, unsigned int threads,
                           unsigned int shared_bytes, CudaStream stream,
                           void** parameters) override {
    if (launch_result != CudaResult::success) return launch_result;
    CHECK(blocks > 0 && threads == gpu::kBlockThreads && shared_bytes == 0);
    const auto* kernel = reinterpret_cast<const test::HostKernel*>(function);
    launches.push_back({kernel->name, blocks, stream});
    test::run_host_kernel(*kernel, parameters, blocks);
    return CudaResult::success;
  }

  CudaResult init() override { return unused(); }
  CudaResult device_get_count(int*) override { return unused(); }
  CudaResult device_get(CudaDevice*, int) override { return unused(); }
  CudaResult device_get_name(char*, int, CudaDevice) override { return unused(); }
  CudaResult device_get_pci_bus_id(char*, int, CudaDevice) override { return unused(); }
  CudaResult primary_context_retain(CudaContext*, CudaDevice) override { return unused(); }
  CudaResult primary_context_release(CudaDevice) override { return unused(); }
  CudaResult primary_context_get_state(CudaDevice, unsigned int*, int*) override {
    return unused();
  }
  CudaResult context_get_device(CudaDevice*) override { return unused(); }
  CudaResult context_get_stream_priority_range(int*, int*) override { return unused(); }
  CudaResult stream_create(CudaStream*, unsigned int, int) override { return unused(); }
  CudaResult stream_destroy(CudaStream) override { return unused(); }
  CudaResult stream_wait_event(CudaStream, CudaEvent) override { return unused(); }
  CudaResult stream_query(CudaStream) override { return unused(); }
  CudaResult stream_synchronize(CudaStream) override { return unused(); }
  CudaResult stream_is_capturing(CudaStream, CudaCaptureStatus*) override { return unused(); }
  CudaResult launch_host_function(CudaStream, CudaHostFunction, void*) override { return unused(); }
  CudaResult event_create(CudaEvent*, unsigned int) override { return unused(); }
  CudaResult event_destroy(CudaEvent) override { return unused(); }
  CudaResult event_record(CudaEvent, CudaStream) override { return unused(); }
  CudaResult event_query(CudaEvent) override { return unused(); }
  CudaResult event_synchronize(CudaEvent) override { return unused(); }
  CudaResult memory_allocate(CudaPointer*, size_t) override { return unused(); }
  CudaResult memory_free(CudaPointer) override { return unused(); }
  CudaResult memory_get_info(size_t*, size_t*) override { return unused(); }
  CudaResult host_allocate(void**, size_t, unsigned int) override { return unused(); }
  CudaResult host_free(void*) override { return unused(); }
  CudaResult host_register(void*, size_t, unsigned int) override { return unused(); }
  CudaResult host_unregister(void*) override { return unused(); }
  CudaResult host_get_device_pointer(CudaPointer*, void*) override { return unused(); }
  CudaResult pointer_get_attribute(void*, CudaPointerAttribute, CudaPointer) override {
    return unused();
  }
  CudaResult copy(CudaPointer, CudaPointer, size_t, CudaStream) override { return unused(); }
  CudaResult copy_to_device(CudaPointer, const void*, size_t, CudaStream) override {
    return unused();
  }
  CudaResult copy_to_host(void*, CudaPointer, size_t, CudaStream) override { return unused(); }
  CudaResult fill(CudaPointer, unsigned char, size_t, CudaStream) override { return unused(); }

 private:
  static constexpr const char* kUnused = "the kernels do not need this function of the driver";
  static inline const CudaContext kContext = reinterpret_cast<CudaContext>(0x1000);
  static CudaResult unused() { throw test::CheckFailure(__FILE__, __LINE__, kUnused); }
};

TEST(gpu_launches_reduce_a_bucket) {
  auto driver = std::make_shared<HostDriver>();
  auto kernels = std::make_unique<GpuKernels>(driver, 3, "image");
  const auto stream = reinterpret_cast<CudaStream>(0x2000);
  const std::vector<uint64_t> counts = {3, 100000, 0, 5};
  std::vector<std::vector<float>> gradients;
  std::vector<gpu::Segment> segments;
  for (const uint64_t count : counts) {
    gradients.emplace_back(count, 3.0f);
    segments.push_back({gradients.back().data(), 2.0});
  }
  const BucketTable table(counts, DType::f32, 0, 1);
  CHECK_EQ(table.chunks.size(), size_t{15});
  std::vector<double> bucket(table.elements);  // aligned, and more than enough
  double factor = 0;
  std::vector<gpu::Partial> partials(table.chunks.size());
  std::vector<gpu::SegmentResult> results(counts.size());
  gpu::Norm norm{};

  gpu::PackArguments pack{};
  pack.segments = segments.data();
  pack.chunks = table.chunks.data();
  pack.chunk_count = 15;
  pack.bucket = bucket.data();
  pack.trailer = table.trailer;
  pack.weight[0] = encode_weight(DType::f32, 6)[0];
  kernels->pack(DType::f32, DType::f32, pack, stream);
  gpu::TrailerArguments trailer{};
  trailer.bucket = bucket.data();
  trailer.trailer = table.trailer;
  trailer.post = 1;
  trailer.factor = &factor;
  kernels->read_trailer(DType::f32, trailer, stream);
  gpu::PostArguments post{};
  post.segments = segments.data();
  post.chunks = table.chunks.data();
  post.chunk_count = 15;
  post.bucket = bucket.data();
  post.factor = &factor;
  post.post = 1;
  post.partials = partials.data();
  kernels->post(DType::f32, DType::f32, post, stream);
  gpu::CombineArguments combine{};
  combine.partials = partials.data();
  combine.first_chunks = table.first_chunks.data();
  combine.segment_count = 4;
  combine.results = results.data();
  kernels->combine(combine, stream);
  gpu::NormArguments norms{};
  norms.results = results.data();
  norms.count = 4;
  norms.max_norm = 1;
  norms.norm = &norm;
  kernels->norm(norms, stream);
  for (const auto& gradient : gradients) {
    for (const float value : gradient) CHECK_EQ(value, 1.0f);
  }
  CHECK_EQ(norm.sum_of_squares, 100008.0);
  gpu::RescaleArguments clip{};
  clip.segments = segments.data();
  clip.chunks = table.chunks.data();
  clip.chunk_count = 15;
  clip.coefficient = &norm.coefficient;
  kernels->rescale(DType::f32, clip, stream);
  CHECK_EQ(gradients[1][99999], static_cast<float>(norm.coefficient));

  const std::vector<std::string> names = {"hvd_pack_f32_f32", "hvd_trailer_f32", "hvd_post_f32_f32",
                                          "hvd_combine",      "hvd_norm",        "hvd_rescale_f32"};
  const std::vector<unsigned> blocks = {6, 1, 6, 1, 1, 6};
  CHECK_EQ(driver->launches.size(), names.size());
  for (size_t i = 0; i < names.size(); ++i) {
    CHECK_EQ(driver->launches[i].name, names[i]);
    CHECK_EQ(driver->launches[i].blocks, blocks[i]);
    CHECK(driver->launches[i].stream == stream);
  }

  // Nothing to do: no launch, but for the trailer, which the other ranks wait for.
  post.chunk_count = clip.chunk_count = combine.segment_count = pack.chunk_count = 0;
  kernels->post(DType::f32, DType::f32, post, stream);
  kernels->rescale(DType::f32, clip, stream);
  kernels->combine(combine, stream);
  CHECK_EQ(driver->launches.size(), names.size());
  kernels->pack(DType::f32, DType::f32, pack, stream);
  CHECK_EQ(driver->launches.back().blocks, 1u);

  clip.chunk_count = 15;
  CHECK_THROWS(kernels->rescale(DType::i32, clip, stream), ErrorKind::bad_argument);
  driver->launch_result = CudaResult::launch_failed;
  const std::string text = CHECK_THROWS(kernels->norm(norms, stream), ErrorKind::error).what();
  CHECK(text.find("cuLaunchKernel failed: CUDA_ERROR_OF_THE_TEST") != std::string::npos);

  CHECK_EQ(driver->modules, 1);
  kernels.reset();
  CHECK_EQ(driver->modules, 0);
  CHECK_EQ(driver->pushed, 0);
}

TEST(gpu_kernels_that_the_driver_does_not_take) {
  auto driver = std::make_shared<HostDriver>();
  driver->load_result = CudaResult::no_binary_for_gpu;
  const std::string image = CHECK_THROWS(GpuKernels(driver, 3, "image"), ErrorKind::error).what();
  CHECK(image.find("cuModuleLoadData failed") != std::string::npos);
  driver->load_result = CudaResult::success;
  driver->missing = "hvd_post_bf16_f32";
  const std::string lacking = CHECK_THROWS(GpuKernels(driver, 3, "image"), ErrorKind::error).what();
  CHECK(lacking.find("cuModuleGetFunction of hvd_post_bf16_f32 failed") != std::string::npos);
  CHECK_EQ(driver->modules, 0);
}

TEST(gpu_kernels_outlive_the_context) {
  auto driver = std::make_shared<HostDriver>();
  auto kernels = std::make_unique<GpuKernels>(driver, 3, "image");
  driver->context_is_gone = true;
  kernels.reset();
  CHECK_EQ(driver->modules, 1);  // went with the context
}

}  // namespace
}  // namespace hvd
