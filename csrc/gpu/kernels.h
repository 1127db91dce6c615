#pragma once

#include <array>
#include <memory>
#include <string>

#include "base/dtype.h"
#include "gpu/driver_api.h"
#include "gpu/kernel_arguments.h"

namespace hvd {

// The kernels, loaded into one context, and their launches. Each launch is a single call of the
// driver, puts the kernel into the stream and returns; pointers in the arguments are the device's,
// and what they point at has to stay until the kernel has run. kernel_arguments.h says what the
// arguments mean.
//
// Thread contract: launches from any thread, with the context current there.
class GpuKernels {
 public:
  // `image` is of compile_kernels, for this device, whose context is the calling thread's current
  // one. Throws Error if the driver does not take it.
  GpuKernels(std::shared_ptr<DriverApi> driver, CudaDevice device, const std::string& image);
  // What was launched has to have finished.
  ~GpuKernels();
  GpuKernels(const GpuKernels&) = delete;
  GpuKernels& operator=(const GpuKernels&) = delete;

  void pack(DType segment, DType bucket, const gpu::PackArguments& arguments,
            CudaStream stream) const;
  void read_trailer(DType bucket, const gpu::TrailerArguments& arguments, CudaStream stream) const;
  void post(DType segment, DType bucket, const gpu::PostArguments& arguments,
            CudaStream stream) const;
  void combine(const gpu::CombineArguments& arguments, CudaStream stream) const;
  void norm(const gpu::NormArguments& arguments, CudaStream stream) const;
  void rescale(DType segment, const gpu::RescaleArguments& arguments, CudaStream stream) const;

 private:
  struct Kernel {
    CudaFunction function = nullptr;
    unsigned most_blocks = 1;  // that run at the same time
  };
  static constexpr size_t kTypes = 4;

  Kernel find(const std::string& name, int multiprocessors) const;
  template <class Arguments>
  void launch(const Kernel& kernel, uint64_t blocks, const Arguments& arguments,
              CudaStream stream) const;

  std::shared_ptr<DriverApi> driver_;
  CudaContext context_ = nullptr;
  CudaModule module_ = nullptr;
  std::array<std::array<Kernel, kTypes>, kTypes> pack_;  // [segment][bucket]
  std::array<std::array<Kernel, kTypes>, kTypes> post_;
  std::array<Kernel, kTypes> trailer_;
  std::array<Kernel, kTypes> rescale_;
  Kernel combine_;
  Kernel norm_;
};

}  // namespace hvd
