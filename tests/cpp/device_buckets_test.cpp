// Gradient buckets on fake GPUs through a fake NCCL, against sums made by hand.

#include "reducer/device_buckets.h"

#include <atomic>
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

  // What produce() writes to next; a stream may still read the one before.
  void renew_source() {
    old_.push_back(std::move(staged_));
    staged_.clear();
    for (const uint64_t count : counts_) staged_.emplace_back(count * size_of(dtype_));
  }

  std::vector<void*> memory;

 private:
  Gpu& gpu_;
  DType dtype_;
  std::vector<uint64_t> counts_;
  std::vector<std::vector<char>> staged_;
  std::vector<std::vector<std::vector<char>>> old_;
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

DeviceBuckets::Gradients gradients_of(const Tensors& tensors, CudaStream stream) {
  DeviceBuckets::Gradients gradients;
  gradients.memory = tensors.memory;
  gradients.streams = {stream};
  return gradients;
}

// Buckets of several types, posted in another order on each rank and in each step, through a ring
// that is smaller than their number.
TEST(device_buckets_of_many_steps_never_make_the_host_wait) {
  constexpr int kRanks = 3;
  constexpr int kSteps = 12;
  constexpr uint32_t kBuckets = 5;
  const std::vector<uint64_t> counts = {9000, 5};
  const DType types[kBuckets] = {DType::f32, DType::f16, DType::f32, DType::bf16, DType::f32};
  std::atomic<int> warm{0};
  std::atomic<int> begun{0};
  std::atomic<int> done{0};
  std::atomic<int> counted{0};
  with_gpu_ranks(kRanks, [&](GpuRank& rank) {
    const auto communicator = rank.open(quick_nccl());
    const auto buckets = open_buckets(rank, communicator, 2);
    const int own = rank.session.rank();
    // What every step left, copied by the stream before the next one comes.
    std::vector<std::vector<std::vector<char>>> kept(kSteps + 1);
    std::vector<Tensors> tensors;
    for (const DType type : types) {
      buckets->add("gradient bucket", counts, type, type, soon());
      tensors.emplace_back(rank.gpu, type, counts);
    }
    const auto step = [&](int number) {
      for (uint32_t i = 0; i < kBuckets; ++i) {
        const uint32_t bucket = (i * 2 + static_cast<uint32_t>(own + number)) % kBuckets;
        tensors[bucket].produce(own, number, rank.gpu.stream);
        buckets->post(bucket, gradients_of(tensors[bucket], rank.gpu.stream));
      }
      buckets->end_round(rank.gpu.stream, soon());
      for (uint32_t bucket = 0; bucket < kBuckets; ++bucket) {
        auto& copy =
            kept[static_cast<size_t>(number)].emplace_back(counts[0] * size_of(types[bucket]));
        fake_driver().check(
            fake_driver().copy_to_host(copy.data(), Gpu::pointer(tensors[bucket].memory[0]),
                                       copy.size(), rank.gpu.stream),
            "cuMemcpyDtoHAsync");
      }
    };
    // The buffers that gradients are made from are read by the stream: one step at a time there.
    step(0);
    rank.gpu.synchronize();
    test::meet(rank.session.control(), warm);
    static std::unique_ptr<CudaFaults> counter;
    if (own == 0) counter = std::make_unique<CudaFaults>("");  // counts from zero
    test::meet(rank.session.control(), begun);
    for (int number = 1; number <= kSteps; ++number) {
      // New source buffers, as the stream still reads the old ones; the same gradients.
      for (Tensors& tensor : tensors) tensor.renew_source();
      step(number);
    }
    test::meet(rank.session.control(), done);
    if (own == 0) {
      for (const char* call : {"cuStreamSynchronize", "cuEventSynchronize", "cuMemAlloc_v2",
                               "cuMemFree_v2", "cuMemHostAlloc", "cuModuleLoadData"}) {
        if (cuda_count(call) != 0) {
          throw test::CheckFailure(__FILE__, __LINE__, std::string("a step called ") + call);
        }
      }
      CHECK(cuda_count("cuLaunchKernel") >= kRanks * kSteps * long{kBuckets} * 4);
      CHECK(cuda_count("cuEventRecord") > 0);
      counter.reset();
    }
    test::meet(rank.session.control(), counted);
    rank.gpu.synchronize();
    for (int number = 0; number <= kSteps; ++number) {
      for (uint32_t bucket = 0; bucket < kBuckets; ++bucket) {
        const auto& copy = kept[static_cast<size_t>(number)][bucket];
        for (size_t i = 0; i < counts[0]; ++i) {
          double sum = 0;
          for (int peer = 0; peer < kRanks; ++peer) sum += value_of(peer, number, 0, i);
          double wanted = sum / kRanks;
          std::vector<char> rounded(8);
          convert(rounded.data(), types[bucket], &wanted, DType::f64, 1, 1.0);
          const double found = test::number_at(copy.data(), types[bucket], i);
          const double nearest = test::number_at(rounded.data(), types[bucket], 0);
          // The factor 1/3 is rounded as well.
          CHECK(std::abs(found - nearest) <= 0.008 * std::abs(nearest));
          if (types[bucket] == DType::f32) CHECK(std::abs(found - wanted) <= 1e-6);
        }
      }
    }
  });
}

// Fresh gradients lie elsewhere in every step, and the host is steps ahead of a slow device.
TEST(device_buckets_follow_pointers_that_change) {
  constexpr int kSteps = 8;
  const CudaFaults faults("cuMemcpyHtoDAsync_v2=slow:1");
  with_gpu_ranks(2, [&](GpuRank& rank) {
    const auto communicator = rank.open(quick_nccl());
    const auto buckets = open_buckets(rank, communicator, 1);
    buckets->add("gradient bucket 0", {300, 7}, DType::f32, DType::f32, soon());
    buckets->add("gradient bucket 1", {300, 7}, DType::f32, DType::f32, soon());
    const int own = rank.session.rank();
    std::vector<Tensors> tensors;
    for (int i = 0; i < 2 * kSteps; ++i) {
      tensors.emplace_back(rank.gpu, DType::f32, std::vector<uint64_t>{300, 7});
    }
    for (int step = 0; step < kSteps; ++step) {
      for (uint32_t bucket = 0; bucket < 2; ++bucket) {
        Tensors& tensor = tensors[static_cast<size_t>(step) * 2 + bucket];
        tensor.produce(own, step, rank.gpu.stream);
        DeviceBuckets::Gradients gradients = gradients_of(tensor, rank.gpu.stream);
        gradients.pre = 1 << (step % 3);
        buckets->post(bucket, gradients);
      }
      buckets->end_round(rank.gpu.stream, soon());
    }
    for (int i = 0; i < 2 * kSteps; ++i) {
      tensors[static_cast<size_t>(i)].check([&](size_t g, size_t at) {
        const int step = i / 2;
        return (1 << (step % 3)) * (value_of(0, step, g, at) + value_of(1, step, g, at)) / 2;
      });
    }
  });
}

TEST(device_bucket_counts_ranks_that_give_nothing) {
  with_gpu_ranks(2, [&](GpuRank& rank) {
    const auto communicator = rank.open(quick_nccl());
    const auto buckets = open_buckets(rank, communicator);
    const std::vector<uint64_t> counts = {10, 10, 10};
    buckets->add("gradient bucket 0", counts, DType::f32, DType::f32, soon());
    const int own = rank.session.rank();
    Tensors tensors(rank.gpu, DType::f32, counts);
    // The first gradient both have, the second one only rank 1, the third nobody.
    tensors.produce(own, 0, rank.gpu.stream);
    DeviceBuckets::Gradients gradients = gradients_of(tensors, rank.gpu.stream);
    if (own == 0) gradients.memory[1] = nullptr;
    gradients.memory[2] = nullptr;
    buckets->post(0, gradients);
    buckets->end_round(rank.gpu.stream, soon());
    CHECK_EQ(tensors.at(0, 4), (value_of(0, 0, 0, 4) + value_of(1, 0, 0, 4)) / 2);
    // Where this rank took nothing back, its memory is as it was.
    CHECK_EQ(tensors.at(1, 4), own == 0 ? value_of(0, 0, 1, 4) : value_of(1, 0, 1, 4) / 2);
    CHECK_EQ(tensors.at(2, 4), value_of(own, 0, 2, 4));
    DeviceBuckets::Result result = buckets->read(0, soon());
    CHECK_EQ(result.gradients[0].used, 2.0f);
    CHECK_EQ(result.gradients[1].used, 1.0f);
    CHECK_EQ(result.gradients[2].used, 0.0f);
    CHECK_EQ(result.total_weight, 2.0);

    // A rank whose weight is nothing, and whose memory is full of NaN.
    tensors.produce(own, 1, rank.gpu.stream);
    gradients = gradients_of(tensors, rank.gpu.stream);
    if (own == 1) {
      const std::vector<float> nan(10, std::nanf(""));
      fake_driver().check(fake_driver().copy_to_device(Gpu::pointer(tensors.memory[0]), nan.data(),
                                                       40, rank.gpu.stream),
                          "cuMemcpyHtoDAsync");
      rank.gpu.synchronize();
      gradients.pre = gradients.weight = 0;
    }
    buckets->post(0, gradients);
    buckets->end_round(rank.gpu.stream, soon());
    tensors.check([](size_t g, size_t i) { return value_of(0, 1, g, i); });
    result = buckets->read(0, soon());
    CHECK_EQ(result.total_weight, 1.0);
    CHECK_EQ(result.gradients[0].used, 1.0f);
    CHECK_EQ(result.gradients[0].finite, 1u);
  });
}

void wait_a_little(void*) { std::this_thread::sleep_for(std::chrono::milliseconds(5)); }

TEST(device_buckets_wait_for_every_stream_that_made_gradients) {
  with_gpu_ranks(2, [&](GpuRank& rank) {
    const auto communicator = rank.open(quick_nccl());
    const auto buckets = open_buckets(rank, communicator, 1);
    const std::vector<uint64_t> counts = {1000};
    buckets->add("gradient bucket 0", {1000, 1000}, DType::f32, DType::f32, soon());
    buckets->add("gradient bucket 1", {1000}, DType::f32, DType::f32, soon());
    const int own = rank.session.rank();
    std::vector<Tensors> tensors;
    std::vector<CudaStream> streams;
    for (int i = 0; i < 3; ++i) {
      tensors.emplace_back(rank.gpu, DType::f32, counts);
      streams.push_back(rank.gpu.new_stream());
    }
    for (size_t i = 0; i < 3; ++i) {
      fake_driver().check(fake_driver().launch_host_function(streams[i], wait_a_little, nullptr),
                          "cuLaunchHostFunc");
      tensors[i].produce(own, static_cast<int>(i), streams[i]);
    }
    DeviceBuckets::Gradients gradients;
    gradients.memory = {tensors[0].memory[0], tensors[1].memory[0]};
    gradients.streams = {streams[0], streams[1]};
    buckets->post(0, gradients);
    buckets->post(1, gradients_of(tensors[2], streams[2]));
    buckets->end_round(rank.gpu.stream, soon());
    for (int step = 0; step < 3; ++step) {
      tensors[static_cast<size_t>(step)].check([&](size_t g, size_t i) {
        return (value_of(0, step, g, i) + value_of(1, step, g, i)) / 2;
      });
    }
  });
}

TEST(device_buckets_unscale_and_clip_on_the_device) {
  with_gpu_ranks(2, [&](GpuRank& rank) {
    const auto communicator = rank.open(quick_nccl());
    const auto buckets = open_buckets(rank, communicator);
    const std::vector<uint64_t> counts = {1000, 50};
    const int own = rank.session.rank();
    std::vector<Tensors> tensors;
    for (int i = 0; i < 3; ++i) {
      buckets->add("gradient bucket " + std::to_string(i), counts, DType::f16, DType::f16, soon());
      tensors.emplace_back(rank.gpu, DType::f16, counts);
    }
    // Of the second and third bucket: the first one belongs to another optimizer.
    const uint32_t group = buckets->add_group({1, 2}, soon());
    float* scale = rank.gpu.upload(std::vector<float>{4.0f});
    const auto step = [&](bool overflow) {
      for (uint32_t i = 0; i < 3; ++i) {
        tensors[i].produce(own, static_cast<int>(i), rank.gpu.stream);
        DeviceBuckets::Gradients gradients = gradients_of(tensors[i], rank.gpu.stream);
        gradients.scale = scale;
        if (overflow && own == 1) gradients.pre = 60000;  // infinite in fp16
        buckets->post(i, gradients);
      }
      buckets->end_round(rank.gpu.stream, soon());
    };
    const auto mean = [](int bucket, size_t g, size_t i) {
      return (value_of(0, bucket, g, i) + value_of(1, bucket, g, i)) / 8;
    };
    double squares = 0;
    for (const int bucket : {1, 2}) {
      for (size_t g = 0; g < 2; ++g) {
        for (size_t i = 0; i < counts[g]; ++i) squares += std::pow(mean(bucket, g, i), 2);
      }
    }
    step(false);
    const gpu::Norm* place = buckets->norm(group, 1.0, rank.gpu.stream, soon());
    gpu::Norm norm = rank.gpu.download(place, 1)[0];
    CHECK_EQ(norm.found_inf, 0.0f);
    CHECK(std::abs(norm.sum_of_squares - squares) <= 1e-6 * squares);
    CHECK_EQ(norm.norm, static_cast<float>(std::sqrt(norm.sum_of_squares)));
    tensors[2].check([&](size_t g, size_t i) { return mean(2, g, i); });

    place = buckets->clip(group, 0.5, rank.gpu.stream, soon());
    norm = rank.gpu.download(place, 1)[0];
    CHECK(std::abs(norm.coefficient - 0.5 / (std::sqrt(squares) + 1e-6)) <= 1e-6);
    for (const int bucket : {0, 2}) {
      for (size_t i = 0; i < 50; i += 7) {
        const double wanted = mean(bucket, 1, i) * (bucket == 0 ? 1 : norm.coefficient);
        CHECK(std::abs(tensors[static_cast<size_t>(bucket)].at(1, i) - wanted) <=
              1e-3 * std::abs(wanted));
      }
    }
    // The next round finds all tables as it needs them.
    step(false);
    tensors[1].check([&](size_t g, size_t i) { return mean(1, g, i); });

    step(true);
    norm = rank.gpu.download(buckets->norm(group, 1.0, rank.gpu.stream, soon()), 1)[0];
    CHECK_EQ(norm.found_inf, 1.0f);
  });
}

TEST(device_buckets_may_join_later_and_leave_nothing_behind) {
  struct Left {
    long allocations = cuda_count("allocations");
    long streams = cuda_count("streams");
    long events = cuda_count("events");
  };
  fake_driver();
  const Left before;
  with_gpu_ranks(2, [&](GpuRank& rank) {
    const auto communicator = rank.open(quick_nccl());
    const auto buckets = open_buckets(rank, communicator, 2);
    const int own = rank.session.rank();
    std::vector<Tensors> tensors;
    for (uint64_t count = 10; count <= 100000; count *= 100) {
      buckets->add("gradient bucket of " + std::to_string(count), {count}, DType::f32, DType::f32,
                   soon());
      tensors.emplace_back(rank.gpu, DType::f32, std::vector<uint64_t>{count});
      for (uint32_t i = 0; i < tensors.size(); ++i) {
        tensors[i].produce(own, static_cast<int>(count), rank.gpu.stream);
        buckets->post(i, gradients_of(tensors[i], rank.gpu.stream));
      }
      buckets->end_round(rank.gpu.stream, soon());
      for (Tensors& tensor : tensors) {
        tensor.check([&](size_t g, size_t i) {
          const int step = static_cast<int>(count);
          return (value_of(0, step, g, i) + value_of(1, step, g, i)) / 2;
        });
      }
      // What it was before the table of results grew.
      CHECK_EQ(buckets->read(0, soon()).gradients[0].used, 2.0f);
    }
  });
  CHECK_EQ(cuda_count("allocations"), before.allocations);
  CHECK_EQ(cuda_count("streams"), before.streams);
  CHECK_EQ(cuda_count("events"), before.events);
}

TEST(device_buckets_are_launched_in_the_order_of_their_numbers) {
  with_gpu_ranks(2, [&](GpuRank& rank) {
    const auto communicator = rank.open(quick_nccl());
    const auto buckets = open_buckets(rank, communicator);
    const int own = rank.session.rank();
    std::vector<Tensors> tensors;
    for (int i = 0; i < 4; ++i) {
      buckets->add("gradient bucket " + std::to_string(i), {20}, DType::f32, DType::f32, soon());
      tensors.emplace_back(rank.gpu, DType::f32, std::vector<uint64_t>{20});
      tensors.back().produce(own, i, rank.gpu.stream);
    }
    const auto post = [&](uint32_t bucket) {
      buckets->post(bucket, gradients_of(tensors[bucket], rank.gpu.stream));
    };
    // Nobody has bucket 1 in this round.
    post(own == 0 ? 3 : 0);
    CHECK_EQ(buckets->launched(), own == 0 ? 0u : 1u);
    post(own == 0 ? 0 : 3);
    CHECK_EQ(buckets->launched(), 1u);
    post(2);
    CHECK_EQ(buckets->launched(), 1u);
    CHECK_THROWS(post(2), ErrorKind::bad_argument);
    CHECK_THROWS(buckets->add("late", {1}, DType::f32, DType::f32, soon()), ErrorKind::error);
    buckets->end_round(rank.gpu.stream, soon());
    CHECK_EQ(buckets->launched(), 0u);
    for (const int bucket : {0, 2, 3}) {
      tensors[static_cast<size_t>(bucket)].check([&](size_t g, size_t i) {
        return (value_of(0, bucket, g, i) + value_of(1, bucket, g, i)) / 2;
      });
    }
    tensors[1].check([&](size_t g, size_t i) { return value_of(own, 1, g, i); });
    buckets->end_round(rank.gpu.stream, soon());  // a round without any
  });
}

TEST(device_buckets_refuse_what_they_cannot_reduce) {
  with_gpu_ranks(1, [&](GpuRank& rank) {
    const auto communicator = rank.open(quick_nccl());
    CHECK_THROWS(open_buckets(rank, communicator, 0), ErrorKind::bad_argument);
    const auto buckets = open_buckets(rank, communicator);
    CHECK_THROWS(buckets->add("integers", {1}, DType::i32, DType::f32, soon()),
                 ErrorKind::bad_argument);
    buckets->add("gradient bucket 0", {4}, DType::f32, DType::f32, soon());
    Tensors tensors(rank.gpu, DType::f32, {4});
    DeviceBuckets::Gradients gradients = gradients_of(tensors, rank.gpu.stream);
    CHECK_THROWS(buckets->post(1, gradients), ErrorKind::bad_argument);
    gradients.weight = -1;
    CHECK_THROWS(buckets->post(0, gradients), ErrorKind::bad_argument);
    gradients.weight = 1;
    gradients.memory.push_back(nullptr);
    CHECK_THROWS(buckets->post(0, gradients), ErrorKind::bad_argument);
    CHECK_THROWS(buckets->add_group({7}, soon()), ErrorKind::bad_argument);
    CHECK_THROWS(buckets->norm(0, 1.0, rank.gpu.stream, soon()), ErrorKind::bad_argument);
    CHECK_THROWS(buckets->read(1, soon()), ErrorKind::bad_argument);
    // After all of it one rank alone still works.
    tensors.produce(0, 0, rank.gpu.stream);
    buckets->post(0, gradients_of(tensors, rank.gpu.stream));
    buckets->end_round(rank.gpu.stream, soon());
    tensors.check([](size_t g, size_t i) { return value_of(0, 0, g, i); });
  });
}

// The driver refuses a kernel in the second step on rank 1: both raise it, and memory that kernels
// may still write to is not given back.
TEST(device_bucket_that_cannot_be_launched_ends_the_job_on_all_ranks) {
  // A bucket takes four launches: pack, trailer, post, combine.
  const CudaFaults faults("cuLaunchKernel[1]@5=719");
  std::atomic<int> first_step{0};
  with_gpu_ranks(2, [&](GpuRank& rank) {
    const auto communicator = rank.open(quick_nccl());
    const auto buckets = open_buckets(rank, communicator);
    buckets->add("gradient bucket 0 (w)", {100}, DType::f32, DType::f32, soon());
    Tensors tensors(rank.gpu, DType::f32, {100});
    const auto step = [&] {
      tensors.produce(rank.session.rank(), 0, rank.gpu.stream);
      rank.gpu.synchronize();
      buckets->post(0, gradients_of(tensors, rank.gpu.stream));
      buckets->end_round(rank.gpu.stream, soon());
    };
    step();
    rank.gpu.synchronize();
    test::meet(rank.session.control(), first_step);
    const bool own = rank.session.rank() == 1;
    const auto step_and_read = [&] {
      step();
      return buckets->read(0, soon());
    };
    const ErrorKind kind = own ? ErrorKind::error : ErrorKind::rank_failed;
    const std::string text = CHECK_THROWS(step_and_read(), kind).what();
    CHECK(contains(text, "rank " + std::to_string(rank.session.rank()) + " cannot go on"));
    CHECK(contains(text,
                   "gradient bucket 0 (w) (operation 2 of the NCCL communicator "
                   "\"gradients\") could not be launched: cuLaunchKernel failed"));
    // Rank 0 may have heard of it before it came to anything.
    if (own) CHECK(!communicator->weights_valid());
    const std::string again = CHECK_THROWS(step(), kind).what();
    CHECK_EQ(contains(again, "do not save them"), !communicator->weights_valid());
    CHECK(contains(again, "start again from the last checkpoint"));
  });
}

}  // namespace
}  // namespace hvd
