// Gradient buckets on fake GPUs through a fake NCCL, against sums made by hand.

#include "reducer/device_buckets.h"

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "controls.h"
#include "gpu_buckets.h"
#include "gpu_ranks.h"

namespace hvd {
namespace {

using test::contains;
using test::cuda_count;
using test::CudaFaults;
using test::fake_driver;
using test::Gpu;
using test::GpuRank;
using test::NcclFaults;
using test::quick_nccl;
using test::soon;
using test::with_gpu_ranks;

// Small whole numbers: sums and quotients by powers of two are exact in every type.
double value_of(int rank, int step, size_t gradient, size_t i) {
  return static_cast<double>(
             (static_cast<size_t>(rank) * 5 + static_cast<size_t>(step) * 3 + gradient * 7 + i) %
             17) -
         8;
}

// Gradients of one bucket of one rank, on its GPU.
class Tensors {
 public:
  Tensors(Gpu& gpu, DType dtype, const std::vector<uint64_t>& counts)
      : gpu_(gpu), dtype_(dtype), counts_(counts) {
    for (const uint64_t count : counts) {
      memory.push_back(gpu.allocate<char>(std::max<size_t>(1, count * size_of(dtype))));
      staged_.emplace_back(count * size_of(dtype));
    }
  }

  // On the stream, as backward does it: nothing is there before the stream comes to it.
  void produce(int rank, int step, CudaStream stream) {
    for (size_t g = 0; g < counts_.size(); ++g) {
      for (size_t i = 0; i < counts_[g]; ++i) {
        const double value = value_of(rank, step, g, i);
        convert(staged_[g].data() + i * size_of(dtype_), dtype_, &value, DType::f64, 1, 1.0);
      }
      if (counts_[g] == 0) continue;
      fake_driver().check(fake_driver().copy_to_device(Gpu::pointer(memory[g]), staged_[g].data(),
                                                       staged_[g].size(), stream),
                          "cuMemcpyHtoDAsync");
    }
  }

  // Waits for gpu.stream.
  double at(size_t gradient, size_t i) {
    const auto bytes = gpu_.download(static_cast<const char*>(memory[gradient]),
                                     counts_[gradient] * size_of(dtype_));
    return test::number_at(bytes.data(), dtype_, i);
  }
  template <class Expected>
  void check(Expected expected) {
    for (size_t g = 0; g < counts_.size(); ++g) {
      if (counts_[g] == 0) continue;
      const auto bytes =
          gpu_.download(static_cast<const char*>(memory[g]), counts_[g] * size_of(dtype_));
      for (size_t i = 0; i < counts_[g]; ++i) {
        CHECK_EQ(test::number_at(bytes.data(), dtype_, i), expected(g, i));
      }
    }
  }

  std::vector<void*> memory;

 private:
  Gpu& gpu_;
  DType dtype_;
  std::vector<uint64_t> counts_;
  std::vector<std::vector<char>> staged_;
};

std::unique_ptr<DeviceBuckets> open_buckets(GpuRank& rank,
                                            const std::shared_ptr<NcclCommunicator>& communicator,
                                            uint32_t ring = 4) {
  DeviceBuckets::Settings settings;
  settings.ring = ring;
  CudaDevice device = 0;
  fake_driver().check(fake_driver().context_get_device(&device), "cuCtxGetDevice");
  static_cast<void>(rank);
  return std::make_unique<DeviceBuckets>(communicator, test::shared_driver(),
                                         test::fake_kernels(device), settings);
}

const std::vector<uint64_t> kCounts = {3, 20000, 0, 8, 77};

TEST(device_bucket_of_every_type_is_the_weighted_mean) {
  const std::pair<DType, DType> types[] = {{DType::f32, DType::f32},
                                           {DType::f16, DType::f16},
                                           {DType::bf16, DType::bf16},
                                           {DType::f32, DType::bf16},
                                           {DType::f64, DType::f64}};
  with_gpu_ranks(2, [&](GpuRank& rank) {
    const auto communicator = rank.open(quick_nccl());
    const auto buckets = open_buckets(rank, communicator);
    std::vector<Tensors> tensors;
    for (const auto& [gradients, bucket] : types) {
      buckets->add("gradient bucket", kCounts, gradients, bucket, soon());
      tensors.emplace_back(rank.gpu, gradients, kCounts);
    }
    const int own = rank.session.rank();
    for (uint32_t number = 0; number < tensors.size(); ++number) {
      tensors[number].produce(own, 0, rank.gpu.stream);
      DeviceBuckets::Gradients gradients;
      gradients.memory = tensors[number].memory;
      gradients.streams = {rank.gpu.stream};
      gradients.pre = own == 0 ? 1 : 3;
      gradients.weight = own == 0 ? 1 : 3;
      gradients.post = 2;
      buckets->post(number, gradients);
    }
    buckets->end_round(rank.gpu.stream, soon());
    for (Tensors& tensor : tensors) {
      tensor.check([](size_t g, size_t i) {
        return 2 * (value_of(0, 0, g, i) + 3 * value_of(1, 0, g, i)) / 4;
      });
    }
    for (uint32_t number = 0; number < tensors.size(); ++number) {
      const DeviceBuckets::Result result = buckets->read(number, soon());
      CHECK_EQ(result.total_weight, 4.0);
      for (size_t g = 0; g < kCounts.size(); ++g) {
        double squares = 0;
        for (size_t i = 0; i < kCounts[g]; ++i) {
          const double value = 2 * (value_of(0, 0, g, i) + 3 * value_of(1, 0, g, i)) / 4;
          squares += value * value;
        }
        CHECK_EQ(result.gradients[g].finite, 1u);
        CHECK_EQ(result.gradients[g].used, 2.0f);
        CHECK(std::abs(result.gradients[g].sum_of_squares - squares) <= 1e-6 * squares);
      }
    }
    CHECK(communicator->weights_valid());
  });
}

}  // namespace
}  // namespace hvd
