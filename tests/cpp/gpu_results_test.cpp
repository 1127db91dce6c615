// What follows a collective on a GPU: weights that rode in the bucket, the norm, clipping.

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "check.h"
#include "gpu_buckets.h"

namespace hvd {
namespace {

using namespace test;

// The mean of several ranks, as NCCL would have a part in it: by the CPU's sum over the buckets.
void check_weighted_mean(DType dtype, DType wire, const std::vector<double>& weights,
                         double tolerance) {
  const auto ranks = static_cast<uint32_t>(weights.size());
  std::vector<uint64_t> counts = {1000, 3, 9000, 1};
  Random random(5);
  std::vector<Gradients> gradients;
  std::vector<Bucket> buckets;
  const float loss_scale = 8;
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    gradients.emplace_back(dtype, counts, kAligned);
    gradients.back().fill_all(random, true);
  }
  std::vector<std::vector<double>> wanted(counts.size());
  double total = 0;
  for (const double weight : weights) total += weight;
  for (size_t i = 0; i < counts.size(); ++i) {
    for (uint64_t element = 0; element < counts[i]; ++element) {
      double sum = 0;
      for (uint32_t rank = 0; rank < ranks; ++rank) {
        const bool absent = i == 1 && rank == 1;
        if (!absent) sum += weights[rank] * number_at(gradients[rank].at(i), dtype, element);
      }
      wanted[i].push_back(sum / total / loss_scale);
    }
  }
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    const BucketTable table(counts, wire, rank, ranks);
    buckets.emplace_back(wire, table.elements);
    // Of the size of the mean, so that a 16-bit sum has no overflow.
    auto segments = segments_of(gradients[rank], weights[rank] / total);
    if (rank == 1) segments[1].memory = nullptr;
    auto arguments = pack_arguments(segments, table, buckets.back());
    arguments.trailer = table.trailer;
    const auto digits = encode_weight(wire, weights[rank]);
    std::copy(digits.begin(), digits.end(), arguments.weight);
    launch(pack_kernel(dtype, wire), arguments, 1 + rank);
  }
  const BucketTable table(counts, wire, 0, ranks);
  std::vector<const void*> sources;
  for (Bucket& bucket : buckets) sources.push_back(bucket.data());
  const std::vector<double> ones(ranks, 1.0);
  ReduceArguments sum{};
  sum.out = buckets[0].data();
  sum.sources = sources.data();
  sum.pre = ones.data();
  sum.source_count = static_cast<int>(ranks);
  sum.post = 1;
  sum.count = table.elements;
  find_reduce_kernel(wire, ReduceOp::sum)(sum);

  double factor = 0;
  double total_found = 0;
  std::vector<float> used(counts.size());
  gpu::TrailerArguments trailer{};
  trailer.bucket = buckets[0].data();
  trailer.trailer = table.trailer;
  trailer.post = total;
  trailer.scale = &loss_scale;
  trailer.factor = &factor;
  trailer.total_weight = &total_found;
  trailer.used = used.data();
  launch(trailer_kernel(wire), trailer, 1, 3);
  double exact = 0;
  for (const double weight : weights) {
    exact += wire == DType::f64 ? weight : static_cast<double>(static_cast<float>(weight));
  }
  CHECK(std::fabs(total_found - exact) <= 1e-15 * exact);
  CHECK(std::fabs(factor - total / total_found / 8) <= 1e-15 * factor);
  for (size_t i = 0; i < counts.size(); ++i) {
    const auto givers = ranks - (i == 1 && ranks > 1 ? 1u : 0u);
    CHECK_EQ(static_cast<uint32_t>(used[i]), givers);
  }

  const auto segments = segments_of(gradients[0], 0);
  gpu::PostArguments post{};
  post.segments = segments.data();
  post.chunks = table.chunks.data();
  post.chunk_count = static_cast<uint32_t>(table.chunks.size());
  post.bucket = buckets[0].data();
  post.factor = &factor;
  post.post = 1;
  launch(post_kernel(dtype, wire), post, 2);
  for (size_t i = 0; i < counts.size(); ++i) {
    for (uint64_t element = 0; element < counts[i]; ++element) {
      CHECK(std::fabs(number_at(gradients[0].at(i), dtype, element) - wanted[i][element]) <=
            tolerance);
    }
  }
}

TEST(gpu_weights_ride_in_the_bucket) {
  check_weighted_mean(DType::f32, DType::f32, {1, 1, 1, 1}, 1e-7);
  check_weighted_mean(DType::f32, DType::f32, {123457, 1, 0.1, 16777215}, 1e-7);
  check_weighted_mean(DType::f64, DType::f64, {123456789.5, 0.1, 7}, 1e-15);
  check_weighted_mean(DType::bf16, DType::bf16, {123457, 99999, 131071}, 2e-3);
  check_weighted_mean(DType::f16, DType::f16, {1e6, 1e-6, 33333.3}, 3e-4);
  check_weighted_mean(DType::f32, DType::f16, {1000003, 70000, 0.3}, 3e-4);
  check_weighted_mean(DType::f32, DType::bf16, std::vector<double>(40, 1.0 / 3), 4e-2);
  check_weighted_mean(DType::f16, DType::f32, {1e30, 3e29}, 3e-4);
}

TEST(gpu_weights_of_many_ranks_in_every_type) {
  // More ranks than threads; what other ranks add to a rank's place is zero.
  constexpr uint32_t kRanks = 700;
  for (const DType dtype : kFloatTypes) {
    const BucketTable table({1}, dtype, 0, kRanks);
    Bucket bucket(dtype, table.elements);
    const uint64_t digits = size_of(dtype) == 2 ? gpu::kWeightDigits : 1;
    double total = 0;
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      const float weight =
          rank % 5 == 0 ? 0.0f : std::ldexp(1.0f + 1e-7f * float(rank), int(rank % 40) - 20);
      total += weight;
      const auto encoded = encode_weight(dtype, weight);
      for (uint64_t digit = 0; digit < digits; ++digit) {
        convert(bucket.at(table.trailer.place + rank * digits + digit), dtype, &encoded[digit],
                DType::f64, 1, 1.0);
      }
    }
    double factor = 0;
    double found = 0;
    gpu::TrailerArguments arguments{};
    arguments.bucket = bucket.data();
    arguments.trailer = table.trailer;
    arguments.post = 1;
    arguments.factor = &factor;
    arguments.total_weight = &found;
    launch(trailer_kernel(dtype), arguments, 1);
    CHECK(std::fabs(found - total) <= 1e-14 * total);
    CHECK_EQ(factor, 1 / found);
  }
  for (const double bad : {-1.0, kNan, kInfinity, 1e39}) {
    const std::string text =
        CHECK_THROWS(encode_weight(DType::bf16, bad), ErrorKind::bad_argument).what();
    CHECK(text.find("weight of a rank") != std::string::npos);
  }
}

TEST(gpu_nobody_with_a_weight_leaves_the_factor_alone) {
  const BucketTable table({1}, DType::bf16, 0, 3);
  Bucket bucket(DType::bf16, table.elements);
  std::memset(bucket.data(), 0, table.elements * 2);
  double factor = 0;
  gpu::TrailerArguments arguments{};
  arguments.bucket = bucket.data();
  arguments.trailer = table.trailer;
  arguments.post = 0.5;
  arguments.factor = &factor;
  launch(trailer_kernel(DType::bf16), arguments, 1);
  CHECK_EQ(factor, 0.5);
}

TEST(gpu_norm_and_clipping) {
  Random random(7);
  for (const DType dtype : kFloatTypes) {
    const BucketTable table(kCounts, dtype, 0, 0);
    Bucket bucket(dtype, table.elements);
    for (size_t i = 0; i < kCounts.size(); ++i) {
      fill(bucket.at(table.places[i]), dtype, kCounts[i], random, true);
    }
    Gradients gradients(dtype, kCounts, kMisaligned);
    auto segments = segments_of(gradients, 1);
    PostResult results = run_post(segments, dtype, table, bucket, 1.0);
    std::vector<uint32_t> members;
    double sum = 0;
    for (size_t i = 0; i < kCounts.size(); i += 2) {
      members.push_back(static_cast<uint32_t>(i));
      sum += by_products_of(gradients.at(i), dtype, kCounts[i]).sum_of_squares;
    }
    gpu::Norm norm{};
    gpu::NormArguments arguments{};
    arguments.results = results.segments.data();
    arguments.members = members.data();
    arguments.count = static_cast<uint32_t>(members.size());
    arguments.max_norm = 0.5;
    arguments.norm = &norm;
    launch(kNormKernel, arguments, 1, 2);
    CHECK(std::fabs(norm.norm - std::sqrt(sum)) <= 1e-6 * std::sqrt(sum));
    CHECK_EQ(norm.found_inf, 0.0f);
    CHECK(std::fabs(norm.coefficient - 0.5 / (std::sqrt(sum) + 1e-6)) <= 1e-6);

    // A multiplication in place; the segment without memory is left out.
    Gradients wanted(dtype, kCounts, kMisaligned);
    for (size_t i = 0; i < kCounts.size(); ++i) {
      std::memcpy(wanted.at(i), gradients.at(i), kCounts[i] * size_of(dtype));
      if (i != 3) rescale(wanted.at(i), dtype, kCounts[i], norm.coefficient);
    }
    segments[3].memory = nullptr;
    gpu::RescaleArguments clip{};
    clip.segments = segments.data();
    clip.chunks = table.chunks.data();
    clip.chunk_count = static_cast<uint32_t>(table.chunks.size());
    clip.coefficient = &norm.coefficient;
    launch(rescale_kernel(dtype), clip, 7, 2);
    for (size_t i = 0; i < kCounts.size(); ++i) {
      check_numbers("clipping", gradients.at(i), wanted.at(i), dtype, kCounts[i]);
    }
    gradients.check_guards();

    // From 1 on nothing is touched, not even what a multiplication by one would change.
    arguments.max_norm = 1e6;
    launch(kNormKernel, arguments, 1);
    CHECK_EQ(norm.coefficient, 1.0);
    std::memset(gradients.at(1), 0xff, size_of(dtype));
    if (dtype == DType::f32) {
      const uint32_t signalling = 0x7f800001;
      std::memcpy(gradients.at(1), &signalling, 4);
    }
    std::vector<char> before(static_cast<char*>(gradients.at(1)),
                             static_cast<char*>(gradients.at(1)) + 7 * size_of(dtype));
    launch(rescale_kernel(dtype), clip, 2);
    CHECK(std::memcmp(before.data(), gradients.at(1), before.size()) == 0);

    // All segments, one of them with a NaN: the norm and what follows are NaN as in torch.
    results.segments[5].finite = 0;
    results.segments[5].sum_of_squares = kNan;
    arguments.members = nullptr;
    arguments.count = static_cast<uint32_t>(kCounts.size());
    launch(kNormKernel, arguments, 1);
    CHECK_EQ(norm.found_inf, 1.0f);
    CHECK(std::isnan(norm.coefficient));
    launch(rescale_kernel(dtype), clip, 2);
    CHECK(std::isnan(number_at(gradients.at(0), dtype, 0)));
  }
}

}  // namespace
}  // namespace hvd
