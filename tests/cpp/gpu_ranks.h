// Ranks as threads, each with a session and a GPU of the fake driver, and the kernels' own source
// on it.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/nccl_communicator.h"
#include "fakes.h"
#include "gpu/kernels.h"
#include "host_kernels.h"
#include "sessions.h"

namespace hvd::test {

// The fakes live as long as the process.
inline std::shared_ptr<DriverApi> shared_driver() {
  return {&fake_driver(), [](DriverApi*) {}};
}
inline std::shared_ptr<NcclApi> shared_nccl() {
  return {&fake_nccl(), [](NcclApi*) {}};
}

// ---- The kernels, as a module of the fake driver ----

constexpr size_t kMostHostKernels = 64;

template <size_t Index>
void run_kernel(const HvdFakeLaunch* launch, void* const* parameters) {
  run_host_kernel(host_kernels()[Index], const_cast<void**>(parameters), launch->grid[0]);
}

template <size_t... Index>
constexpr std::array<void (*)(const HvdFakeLaunch*, void* const*), sizeof...(Index)> kernel_runners(
    std::index_sequence<Index...>) {
  return {run_kernel<Index>...};
}

inline const size_t* parameter_bytes(const std::string& name) {
  static const size_t pack = sizeof(gpu::PackArguments);
  static const size_t post = sizeof(gpu::PostArguments);
  static const size_t trailer = sizeof(gpu::TrailerArguments);
  static const size_t rescale = sizeof(gpu::RescaleArguments);
  static const size_t combine = sizeof(gpu::CombineArguments);
  static const size_t norm = sizeof(gpu::NormArguments);
  if (name.find("hvd_pack") == 0) return &pack;
  if (name.find("hvd_post") == 0) return &post;
  if (name.find("hvd_trailer") == 0) return &trailer;
  if (name.find("hvd_rescale") == 0) return &rescale;
  return name == "hvd_combine" ? &combine : &norm;
}

// For the device that is current.
inline std::shared_ptr<GpuKernels> fake_kernels(CudaDevice device) {
  static const HvdFakeModule module = [] {
    static const auto runners = kernel_runners(std::make_index_sequence<kMostHostKernels>());
    static std::vector<HvdFakeKernel> kernels;
    CHECK(host_kernels().size() <= kMostHostKernels);
    for (size_t i = 0; i < host_kernels().size(); ++i) {
      const HostKernel& kernel = host_kernels()[i];
      kernels.push_back({kernel.name.c_str(), runners[i], 1, parameter_bytes(kernel.name)});
    }
    return HvdFakeModule{HVD_FAKE_MODULE_MAGIC, static_cast<unsigned>(kernels.size()),
                         kernels.data()};
  }();
  fake_function<void(const HvdFakeModule*)>("cuda", "libcuda.so.1",
                                            "hvd_fake_cuda_set_kernels")(&module);
  return std::make_shared<GpuKernels>(shared_driver(), device,
                                      "\x7f"
                                      "ELF of the test");
}

// ---- Ranks ----

struct GpuRank {
  Session& session;
  Gpu& gpu;

  std::shared_ptr<NcclCommunicator> open(const NcclSettings& settings) {
    return session.open_nccl_communicator(everybody(session), shared_driver(), shared_nccl(),
                                          gpu.context(), settings, nullptr);
  }
};

inline NcclSettings quick_nccl(const std::string& name = "gradients") {
  NcclSettings settings;
  settings.name = name;
  settings.init_timeout_ns = 40'000'000'000u;
  settings.timeout_ns = 40'000'000'000u;
  settings.close_timeout_ns = 30'000'000'000u;
  settings.poll_ns = 200'000;
  return settings;
}

// body(rank) on `size` ranks, with GPUs from `first_gpu` on. An exception that a body lets out ends
// the others' waits.
inline void with_gpu_ranks(int size, const std::function<void(GpuRank&)>& body, int first_gpu = 0,
                           const SessionSettings& settings = quick_settings()) {
  fake_driver();
  fake_nccl();
  with_sessions(
      size,
      [&](Session& session) {
        Gpu gpu(first_gpu + session.rank());
        GpuRank rank{session, gpu};
        try {
          body(rank);
        } catch (const std::exception& error) {
          session.control().post_failure(ErrorKind::rank_failed, error.what());
          session.close();
          throw;
        }
        session.close();  // before the GPU goes
      },
      settings);
}

// ---- A collective by hand ----

// Sums `count` floats in place.
inline NcclCommunicator::Operation sum_operation(const std::string& name, float* values,
                                                 size_t count) {
  NcclCommunicator::Operation operation;
  operation.name = name;
  operation.collective = [values, count](NcclComm comm, CudaStream stream) {
    return fake_nccl().all_reduce(values, values, count, NcclDataType::float32, NcclRedOp::sum,
                                  comm, stream);
  };
  return operation;
}

}  // namespace hvd::test
