#include "gpu/kernels.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "gpu/bucket_table.h"

namespace hvd {
namespace {

constexpr DType kFloatTypes[] = {DType::f32, DType::f64, DType::f16, DType::bf16};

// The floating types are the first ones of DType.
size_t index_of(DType dtype) {
  if (!is_floating(dtype)) {
    throw Error(ErrorKind::bad_argument, std::string("there are no GPU kernels for ") +
                                             name_of(dtype) + ", only for floating types.");
  }
  return static_cast<size_t>(dtype);
}

}  // namespace

GpuKernels::GpuKernels(std::shared_ptr<DriverApi> driver, CudaDevice device,
                       const std::string& image)
    : driver_(std::move(driver)) {
  int multiprocessors = 0;
  driver_->check(driver_->context_get_current(&context_), "cuCtxGetCurrent");
  driver_->check(driver_->device_get_attribute(&multiprocessors,
                                               CudaDeviceAttribute::multiprocessor_count, device),
                 "cuDeviceGetAttribute");
  driver_->check(driver_->module_load_data(&module_, image.data()), "cuModuleLoadData");
  try {
    for (const DType segment : kFloatTypes) {
      const size_t row = index_of(segment);
      trailer_[row] = find(trailer_kernel(segment), multiprocessors);
      rescale_[row] = find(rescale_kernel(segment), multiprocessors);
      for (const DType bucket : kFloatTypes) {
        pack_[row][index_of(bucket)] = find(pack_kernel(segment, bucket), multiprocessors);
        post_[row][index_of(bucket)] = find(post_kernel(segment, bucket), multiprocessors);
      }
    }
    combine_ = find(kCombineKernel, multiprocessors);
    norm_ = find(kNormKernel, multiprocessors);
  } catch (...) {
    static_cast<void>(driver_->module_unload(module_));
    throw;
  }
}

GpuKernels::~GpuKernels() {
  // The context may be gone already, at exit or after a fatal error, and the module with it.
  if (driver_->context_push(context_) != CudaResult::success) return;
  static_cast<void>(driver_->module_unload(module_));
  CudaContext before = nullptr;
  static_cast<void>(driver_->context_pop(&before));
}

GpuKernels::Kernel GpuKernels::find(const std::string& name, int multiprocessors) const {
  Kernel kernel;
  driver_->check(driver_->module_get_function(&kernel.function, module_, name.c_str()),
                 ("cuModuleGetFunction of " + name).c_str());
  int blocks = 0;
  driver_->check(driver_->occupancy_max_active_blocks(&blocks, kernel.function,
                                                      static_cast<int>(gpu::kBlockThreads), 0),
                 "cuOccupancyMaxActiveBlocksPerMultiprocessor");
  kernel.most_blocks = static_cast<unsigned>(std::max(1, blocks * multiprocessors));
  return kernel;
}

template <class Arguments>
void GpuKernels::launch(const Kernel& kernel, uint64_t blocks, const Arguments& arguments,
                        CudaStream stream) const {
  // The driver copies the arguments before it returns.
  void* parameters[] = {const_cast<Arguments*>(&arguments)};
  const auto count = static_cast<unsigned>(std::min<uint64_t>(blocks, kernel.most_blocks));
  driver_->check(
      driver_->launch_kernel(kernel.function, count, gpu::kBlockThreads, 0, stream, parameters),
      "cuLaunchKernel");
}

void GpuKernels::pack(DType segment, DType bucket, const gpu::PackArguments& arguments,
                      CudaStream stream) const {
  // Without chunks there may still be a trailer to write.
  launch(pack_[index_of(segment)][index_of(bucket)], std::max(1u, arguments.chunk_count), arguments,
         stream);
}

void GpuKernels::read_trailer(DType bucket, const gpu::TrailerArguments& arguments,
                              CudaStream stream) const {
  launch(trailer_[index_of(bucket)], 1, arguments, stream);
}

void GpuKernels::post(DType segment, DType bucket, const gpu::PostArguments& arguments,
                      CudaStream stream) const {
  if (arguments.chunk_count == 0) return;  // a grid of no blocks is an error
  launch(post_[index_of(segment)][index_of(bucket)], arguments.chunk_count, arguments, stream);
}

void GpuKernels::combine(const gpu::CombineArguments& arguments, CudaStream stream) const {
  if (arguments.segment_count == 0) return;
  constexpr uint64_t kSegments = gpu::kBlockThreads / gpu::kSegmentThreads;
  launch(combine_, (arguments.segment_count + kSegments - 1) / kSegments, arguments, stream);
}

void GpuKernels::norm(const gpu::NormArguments& arguments, CudaStream stream) const {
  launch(norm_, 1, arguments, stream);
}

void GpuKernels::rescale(DType segment, const gpu::RescaleArguments& arguments,
                         CudaStream stream) const {
  if (arguments.chunk_count == 0) return;
  launch(rescale_[index_of(segment)], arguments.chunk_count, arguments, stream);
}

}  // namespace hvd
