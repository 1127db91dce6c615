// One rank of a job of several processes that reduces gradients on a fake GPU:
//
//   gpu_rank FOLDER RANK RANKS
//
// The ranks find each other through files in FOLDER. Exit status 0: every step gave the right
// gradients. 3: another rank was lost, which an error said.

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "gpu_ranks.h"
#include "reducer/device_buckets.h"

namespace {

using hvd::test::GpuRank;
using hvd::test::soon;

constexpr int kSteps = 4;
const std::vector<uint64_t> kCounts = {20000, 3};

std::string read_name(const std::string& path) {
  for (int tries = 0; tries < 40'000; ++tries) {
    std::ifstream file(path);
    std::string name;
    if (file && std::getline(file, name) && !name.empty()) return name;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  throw std::runtime_error(path + " does not come");
}

void train(GpuRank& rank, int ranks) {
  const auto communicator = rank.open(hvd::test::quick_nccl());
  const int own = rank.session.rank();
  hvd::DeviceBuckets buckets(communicator, hvd::test::shared_driver(), hvd::test::fake_kernels(own),
                             {});
  std::vector<float*> memory;
  for (uint32_t bucket = 0; bucket < 2; ++bucket) {
    buckets.add("gradient bucket " + std::to_string(bucket), kCounts, hvd::DType::f32,
                hvd::DType::f32, soon());
    for (const uint64_t count : kCounts) memory.push_back(rank.gpu.allocate<float>(count));
  }
  for (int step = 0; step < kSteps; ++step) {
    for (uint32_t bucket = 0; bucket < 2; ++bucket) {
      hvd::DeviceBuckets::Gradients gradients;
      gradients.streams = {rank.gpu.stream};
      for (size_t g = 0; g < 2; ++g) {
        const std::vector<float> values(kCounts[g], static_cast<float>(own + step + 1));
        float* to = memory[bucket * 2 + g];
        hvd::test::fake_driver().check(
            hvd::test::fake_driver().copy_to_device(hvd::test::Gpu::pointer(to), values.data(),
                                                    values.size() * sizeof(float), rank.gpu.stream),
            "cuMemcpyHtoDAsync");
        rank.gpu.synchronize();  // values go
        gradients.memory.push_back(to);
      }
      buckets.post(bucket, gradients);
    }
    buckets.end_round(rank.gpu.stream, soon());
    buckets.read(1, soon());
    const float wanted = static_cast<float>(ranks - 1) / 2 + static_cast<float>(step) + 1;
    for (size_t i = 0; i < memory.size(); ++i) {
      for (const float value : rank.gpu.download(memory[i], kCounts[i % 2])) {
        if (std::abs(value - wanted) > 1e-6f) throw std::runtime_error("a wrong gradient");
      }
    }
  }
}

int run(const std::string& folder, int rank, int ranks) {
  hvd::Listener listener;
  std::ofstream(folder + "/new" + std::to_string(rank)) << listener.name() << "\n";
  std::rename((folder + "/new" + std::to_string(rank)).c_str(),
              (folder + "/" + std::to_string(rank)).c_str());
  std::vector<std::string> names;
  for (int peer = 0; peer < ranks; ++peer) {
    names.push_back(read_name(folder + "/" + std::to_string(peer)));
  }
  hvd::Token token{};
  token[0] = 7;
  hvd::Session session(rank, &listener, names, token, hvd::test::quick_settings(), nullptr);
  hvd::test::Gpu gpu(rank);
  GpuRank member{session, gpu};
  int status = 0;
  try {
    train(member, ranks);
  } catch (const hvd::Error& error) {
    std::printf("%s\n", error.what());
    status = error.kind() == hvd::ErrorKind::rank_failed ? 3 : 1;
  }
  session.close();
  return status;
}

}  // namespace

int main(int argument_count, char** arguments) {
  if (argument_count != 4) return 2;
  int status = 1;
  try {
    hvd::test::fake_nccl();
    status = run(arguments[1], std::atoi(arguments[2]), std::atoi(arguments[3]));
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
  }
  std::fflush(stdout);
  // Not exit: threads of the fakes never end.
  std::_Exit(status);
}
