// Opens the NCCL library of a folder through the product's table and asks it what it can answer
// without a GPU. Compiled and run by tests/unit/test_gpu_headers.py.

#include <cstdio>

#include "base/error.h"
#include "gpu/nccl_api.h"

int main(int, char** arguments) {
  const auto nccl = hvd::open_nccl(hvd::nccl_library({arguments[1]}));
  std::printf("%s\n", nccl->describe().c_str());
  std::printf("version %d split %d memory %d shrink %d window %d revoke %d grow %d\n",
              nccl->version(), nccl->has(hvd::NcclFeature::split),
              nccl->has(hvd::NcclFeature::memory), nccl->has(hvd::NcclFeature::shrink),
              nccl->has(hvd::NcclFeature::window), nccl->has(hvd::NcclFeature::revoke),
              nccl->has(hvd::NcclFeature::grow));
  hvd::NcclUniqueId first = {};
  hvd::NcclUniqueId second = {};
  nccl->check(nccl->get_unique_id(&first), nullptr, "ncclGetUniqueId");
  nccl->check(nccl->get_unique_id(&second), nullptr, "ncclGetUniqueId");
  int different = 0;
  for (size_t i = 0; i < sizeof(first.internal); ++i) {
    different += first.internal[i] != second.internal[i] ? 1 : 0;
  }
  std::printf("ids differ %d\n", different > 0 ? 1 : 0);
  std::fflush(stdout);
}
