// One rank of a job of several processes, for the tests of the fake NCCL:
//
//   fake_rank FAKES_FOLDER ID_IN_HEX RANK RANKS DEVICE
//
// Sums, gathers and sends around a ring. Exit status 0: everything was right. 3: another rank was
// lost, which it noticed and aborted.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "gpu/driver_api.h"
#include "gpu/nccl_api.h"

namespace {

using hvd::NcclResult;

int run(const std::string& fakes, const std::string& hex, int rank, int ranks, int device) {
  hvd::LibraryRequest request = hvd::driver_library();
  request.file = fakes + "/cuda/libcuda.so.1";
  const auto driver = hvd::open_driver(request);
  driver->check(driver->init(), "cuInit");
  request = hvd::nccl_library({fakes + "/nccl_22902"});
  const auto nccl = hvd::open_nccl(request);

  hvd::NcclUniqueId id;
  for (size_t i = 0; i < sizeof(id.internal); ++i) {
    id.internal[i] = static_cast<char>(std::stoi(hex.substr(2 * i, 2), nullptr, 16));
  }
  hvd::CudaContext context = nullptr;
  driver->check(driver->primary_context_retain(&context, device), "cuDevicePrimaryCtxRetain");
  const hvd::CudaContextScope scope(*driver, context);
  hvd::CudaStream stream = nullptr;
  driver->check(driver->stream_create(&stream, hvd::kCudaStreamNonBlocking, 0), "cuStreamCreate");

  const size_t count = 50'000;  // more than one exchange
  std::vector<float> sums(count);
  std::vector<int> all(static_cast<size_t>(ranks));
  int from_left = -1;
  hvd::NcclComm comm = nullptr;
  // On the way out of a failure: what runs must not outlive the memory that it works on.
  struct Abort {
    hvd::NcclApi& nccl;
    hvd::NcclComm& comm;
    ~Abort() {
      if (comm != nullptr) static_cast<void>(nccl.comm_abort(comm));
    }
  } const abort{*nccl, comm};
  hvd::NcclConfig config;
  nccl->check(nccl->comm_init_rank_config(&comm, ranks, id, rank, &config), nullptr, "init");
  const auto settle = [&] {
    NcclResult state = NcclResult::in_progress;
    while (state == NcclResult::in_progress) {
      nccl->check(nccl->comm_get_async_error(comm, &state), comm, "ncclCommGetAsyncError");
      std::this_thread::yield();
    }
    nccl->check(state, comm, "a call");
  };
  settle();

  const auto wait = [&] {
    settle();
    while (driver->stream_query(stream) == hvd::CudaResult::not_ready) {
      settle();
      std::this_thread::yield();
    }
  };
  for (int step = 0; step < 3; ++step) {
    for (size_t i = 0; i < count; ++i) {
      sums[i] = static_cast<float>(rank) + static_cast<float>(i % 100);
    }
    nccl->check(nccl->all_reduce(sums.data(), sums.data(), count, hvd::NcclDataType::float32,
                                 hvd::NcclRedOp::sum, comm, stream),
                comm, "ncclAllReduce");
    wait();
    const float ranks_sum = static_cast<float>(ranks * (ranks - 1)) / 2;
    for (size_t i = 0; i < count; ++i) {
      if (sums[i] != ranks_sum + static_cast<float>(ranks) * static_cast<float>(i % 100)) return 1;
    }
  }
  nccl->check(nccl->all_gather(&rank, all.data(), 1, hvd::NcclDataType::int32, comm, stream), comm,
              "ncclAllGather");
  wait();
  for (int peer = 0; peer < ranks; ++peer) {
    if (all[static_cast<size_t>(peer)] != peer) return 1;
  }
  nccl->check(nccl->group_start(), comm, "ncclGroupStart");
  nccl->check(nccl->send(&rank, 1, hvd::NcclDataType::int32, (rank + 1) % ranks, comm, stream),
              comm, "ncclSend");
  nccl->check(nccl->receive(&from_left, 1, hvd::NcclDataType::int32, (rank + ranks - 1) % ranks,
                            comm, stream),
              comm, "ncclRecv");
  nccl->check(nccl->group_end(), comm, "ncclGroupEnd");
  wait();
  if (from_left != (rank + ranks - 1) % ranks) return 1;
  nccl->check(nccl->comm_finalize(comm), comm, "ncclCommFinalize");
  settle();
  nccl->check(nccl->comm_destroy(std::exchange(comm, nullptr)), nullptr, "ncclCommDestroy");
  driver->check(driver->stream_destroy(stream), "cuStreamDestroy");
  return 0;
}

}  // namespace

int main(int argument_count, char** arguments) {
  if (argument_count != 6) return 2;
  int status = 1;
  try {
    status = run(arguments[1], arguments[2], std::atoi(arguments[3]), std::atoi(arguments[4]),
                 std::atoi(arguments[5]));
  } catch (const hvd::Error& error) {
    status = error.kind() == hvd::ErrorKind::rank_failed ? 3 : 1;
    if (status == 1) std::fprintf(stderr, "rank %s: %s\n", arguments[3], error.what());
  }
  std::fflush(stderr);
  // Not exit: threads of the fakes may still wait for the rank that was lost.
  std::_Exit(status);
}
