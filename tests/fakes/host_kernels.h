// The CUDA kernels of csrc/gpu/kernels.cu, compiled for the host.
#pragma once

#include <string>
#include <vector>

namespace hvd::test {

// A kernel by its CUDA name; null if there is none. `parameters` is what cuLaunchKernel gets: one
// pointer to the arguments, as every kernel takes one struct.
struct HostKernel {
  std::string name;
  void (*body)(void** parameters);
};
const HostKernel* find_host_kernel(const std::string& name);
const std::vector<HostKernel>& host_kernels();

// Returns when it has run. Launches from several threads run one after the other. The results are
// the same for any number of blocks and of threads.
void run_host_kernel(const HostKernel& kernel, void** parameters, unsigned blocks,
                     unsigned threads = 1);

}  // namespace hvd::test
