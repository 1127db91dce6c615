#include "host_kernels.h"

#include <thread>

#include "cuda_shim.h"

namespace hvd::test {
namespace {

std::vector<HostKernel>& registry() {
  static std::vector<HostKernel> kernels;
  return kernels;
}

bool add(const char* name, void (*body)(void**)) {
  registry().push_back({name, body});
  return true;
}

}  // namespace
}  // namespace hvd::test

#define HVD_KERNEL(name, Arguments)                                                           \
  static void name(const Arguments& arguments);                                               \
  [[maybe_unused]] static const bool added_##name = hvd::test::add(                           \
      #name, [](void** parameters) { name(*static_cast<const Arguments*>(parameters[0])); }); \
  static void name(const Arguments& arguments)

#include "gpu/kernels.cu"

namespace hvd::test {

const std::vector<HostKernel>& host_kernels() { return registry(); }

const HostKernel* find_host_kernel(const std::string& name) {
  for (const HostKernel& kernel : registry()) {
    if (kernel.name == name) return &kernel;
  }
  return nullptr;
}

void run_host_kernel(const HostKernel& kernel, void** parameters, unsigned blocks,
                     unsigned threads) {
  static std::mutex mutex;  // what is __shared__ exists once
  const std::lock_guard<std::mutex> lock(mutex);
  BlockBarrier barrier(threads);
  const auto run = [&](unsigned thread) {
    threadIdx.x = thread;
    blockDim.x = threads;
    gridDim.x = blocks;
    hvd_block_barrier = &barrier;
    for (unsigned block = 0; block < blocks; ++block) {
      blockIdx.x = block;
      kernel.body(parameters);
      barrier.wait();
    }
  };
  std::vector<std::thread> others;
  for (unsigned thread = 1; thread < threads; ++thread) others.emplace_back(run, thread);
  run(0);
  for (std::thread& other : others) other.join();
}

}  // namespace hvd::test
