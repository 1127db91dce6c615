// The CUDA kernels' own source, run on the host, against the CPU kernels. Numbers are compared bit
// for bit, apart from which NaN a NaN is.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "check.h"
#include "gpu/bucket_table.h"
#include "gpu/kernel_arguments.h"
#include "host_kernels.h"
#include "kernels/convert.h"
#include "kernels/reduce.h"
#include "kernels/rescale.h"

namespace hvd {
namespace {

const DType kFloatTypes[] = {DType::f32, DType::f64, DType::f16, DType::bf16};
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// ---- Memory and numbers ----

double number_at(const void* memory, DType dtype, size_t index) {
  double value = 0;
  convert(&value, DType::f64, static_cast<const char*>(memory) + index * size_of(dtype), dtype, 1,
          1.0);
  return value;
}

bool equal_numbers(const void* left, const void* right, DType dtype, size_t index) {
  const size_t size = size_of(dtype);
  const char* a = static_cast<const char*>(left) + index * size;
  const char* b = static_cast<const char*>(right) + index * size;
  if (std::memcmp(a, b, size) == 0) return true;
  return std::isnan(number_at(a, dtype, 0)) && std::isnan(number_at(b, dtype, 0));
}

void check_numbers(const std::string& what, const void* found, const void* wanted, DType dtype,
                   size_t count) {
  for (size_t i = 0; i < count; ++i) {
    if (equal_numbers(found, wanted, dtype, i)) continue;
    throw test::CheckFailure(__FILE__, __LINE__,
                             what + ", " + name_of(dtype) + " element " + std::to_string(i) + ": " +
                                 test::describe(number_at(found, dtype, i)) + " and " +
                                 test::describe(number_at(wanted, dtype, i)) + " differ");
  }
}

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 2 + 1) {}
  uint64_t next() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return state_ >> 17;
  }
  uint64_t below(uint64_t end) { return next() % end; }

 private:
  uint64_t state_;
};

// Any bits at all: NaN, infinities and subnormal numbers are among them, the more the narrower the
// type is. With `ordinary` only numbers of the size of gradients.
void fill(void* memory, DType dtype, size_t count, Random& random, bool ordinary) {
  for (size_t i = 0; i < count; ++i) {
    char* to = static_cast<char*>(memory) + i * size_of(dtype);
    if (ordinary) {
      const double value = (static_cast<double>(random.below(2000001)) - 1e6) * 1e-6;
      convert(to, dtype, &value, DType::f64, 1, 1.0);
      continue;
    }
    uint64_t bits = random.next() ^ (random.next() << 32);
    // Some of the wide ones where the narrow types end: subnormal, rounding to infinity, ties.
    const uint64_t kind = random.below(8);
    if (kind < 4 && size_of(dtype) >= 4) {
      const double limits[] = {6e-8, 6.1e-5, 65520, 3.39e38};
      double value = limits[kind] * std::ldexp(1.0 + static_cast<double>(random.below(64)) / 64,
                                               static_cast<int>(random.below(4)) - 2);
      if ((bits & 1) != 0) value = -value;
      convert(to, dtype, &value, DType::f64, 1, 1.0);
      continue;
    }
    if (kind == 4 && dtype == DType::f32) bits &= 0xffff0000u | 0x8000u;  // ties of bfloat16
    if (kind == 5 && dtype == DType::f32) bits &= 0xffffe000u | 0x1000u;  // ties of half
    std::memcpy(to, &bits, size_of(dtype));
  }
}

// Gradients of one rank, each with its own alignment, in guarded memory.
class Gradients {
 public:
  // Gradient i starts `shift(i)` elements behind a place that is aligned to 16 bytes.
  template <class Shift>
  Gradients(DType dtype, const std::vector<uint64_t>& counts, Shift shift)
      : dtype_(dtype), counts_(counts) {
    for (size_t i = 0; i < counts.size(); ++i) {
      offsets_.push_back(memory_.size() + kGuard + shift(i) * size_of(dtype));
      memory_.resize((offsets_.back() + counts[i] * size_of(dtype) + kGuard + 15) / 16 * 16, kByte);
    }
    aligned_.resize(memory_.size() / 16 + 1);
    std::memcpy(aligned_.data(), memory_.data(), memory_.size());
  }

  void* at(size_t i) { return base() + offsets_[i]; }
  DType dtype() const { return dtype_; }
  const std::vector<uint64_t>& counts() const { return counts_; }
  void fill_all(Random& random, bool ordinary) {
    for (size_t i = 0; i < counts_.size(); ++i) fill(at(i), dtype_, counts_[i], random, ordinary);
  }

  // What lies around the gradients is as it was.
  void check_guards() {
    std::vector<char> inside(memory_.size(), 0);
    for (size_t i = 0; i < counts_.size(); ++i) {
      std::fill_n(inside.begin() + static_cast<ptrdiff_t>(offsets_[i]),
                  counts_[i] * size_of(dtype_), char{1});
    }
    for (size_t i = 0; i < inside.size(); ++i) {
      CHECK(inside[i] != 0 || base()[i] == kByte);
    }
  }

 private:
  struct alignas(16) Piece {
    char bytes[16];
  };
  static constexpr size_t kGuard = 32;
  static constexpr char kByte = 0x5a;

  char* base() { return aligned_.data()->bytes; }

  DType dtype_;
  std::vector<uint64_t> counts_;
  std::vector<size_t> offsets_;
  std::vector<char> memory_;
  std::vector<Piece> aligned_;
};

// 16-byte aligned memory for a bucket, full of NaN.
class Bucket {
 public:
  Bucket(DType dtype, uint64_t elements)
      : dtype_(dtype), units_(elements * size_of(dtype) / 16 + 1) {
    std::memset(data(), 0xff, units_.size() * 16);
  }
  char* data() { return units_.data()->bytes; }
  void* at(uint64_t element) { return data() + element * size_of(dtype_); }

 private:
  struct alignas(16) Unit {
    char bytes[16];
  };
  DType dtype_;
  std::vector<Unit> units_;
};

// ---- Launches ----

template <class Arguments>
void launch(const std::string& name, Arguments arguments, unsigned blocks, unsigned threads = 1) {
  const test::HostKernel* kernel = test::find_host_kernel(name);
  if (kernel == nullptr) throw test::CheckFailure(__FILE__, __LINE__, "no kernel named " + name);
  void* parameters[] = {&arguments};
  test::run_host_kernel(*kernel, parameters, blocks, threads);
}

std::vector<gpu::Segment> segments_of(Gradients& gradients, double factor) {
  std::vector<gpu::Segment> segments;
  for (size_t i = 0; i < gradients.counts().size(); ++i) {
    segments.push_back({gradients.at(i), factor});
  }
  return segments;
}

gpu::PackArguments pack_arguments(const std::vector<gpu::Segment>& segments,
                                  const BucketTable& table, Bucket& bucket) {
  gpu::PackArguments arguments{};
  arguments.segments = segments.data();
  arguments.chunks = table.chunks.data();
  arguments.chunk_count = static_cast<uint32_t>(table.chunks.size());
  arguments.bucket = bucket.data();
  return arguments;
}

struct PostResult {
  std::vector<gpu::Partial> partials;
  std::vector<gpu::SegmentResult> segments;
};

PostResult run_post(const std::vector<gpu::Segment>& segments, DType dtype,
                    const BucketTable& table, Bucket& bucket, double factor, unsigned blocks = 3,
                    unsigned threads = 1) {
  PostResult result;
  result.partials.resize(table.chunks.size());
  result.segments.resize(segments.size());
  gpu::PostArguments post{};
  post.segments = segments.data();
  post.chunks = table.chunks.data();
  post.chunk_count = static_cast<uint32_t>(table.chunks.size());
  post.bucket = bucket.data();
  post.post = factor;
  post.partials = result.partials.data();
  launch(post_kernel(dtype, table.dtype), post, blocks, threads);
  gpu::CombineArguments combine{};
  combine.partials = result.partials.data();
  combine.first_chunks = table.first_chunks.data();
  combine.segment_count = static_cast<uint32_t>(segments.size());
  combine.results = result.segments.data();
  launch(kCombineKernel, combine, blocks, threads);
  return result;
}

// What the CPU kernels say of memory: a sum of one rank's, which changes nothing.
ByProducts by_products_of(void* memory, DType dtype, uint64_t count) {
  return rescale(memory, dtype, count, 1.0);
}

void check_by_products(const gpu::SegmentResult& found, const ByProducts& wanted) {
  CHECK_EQ(found.finite != 0, wanted.finite);
  if (!std::isfinite(wanted.sum_of_squares)) {
    CHECK(!std::isfinite(found.sum_of_squares));
    return;
  }
  // Half a unit of float for each of the eight squares that are summed in it.
  CHECK(std::fabs(found.sum_of_squares - wanted.sum_of_squares) <= 4.8e-7 * wanted.sum_of_squares);
}

const std::vector<uint64_t> kCounts = {1,  7,    8,    9,    0,   16,    33, 255, 2047,
                                       63, 8191, 8192, 8193, 100, 16400, 3,  129, 20001};
// Odd ones are aligned no better than their elements are.
const auto kMisaligned = [](size_t i) { return i % 2 == 0 ? size_t{0} : 1 + i % 3; };
const auto kAligned = [](size_t) { return size_t{0}; };

// ---- Tests ----

TEST(gpu_pack_rounds_as_the_cpu_kernels_do) {
  Random random(1);
  for (const DType from : kFloatTypes) {
    for (const DType to : kFloatTypes) {
      for (const double factor : {1.0, 1.0 / 3, -1024.0}) {
        Gradients gradients(from, kCounts, kMisaligned);
        gradients.fill_all(random, false);
        const BucketTable table(kCounts, to, 0, 0);
        Bucket bucket(to, table.elements);
        const auto segments = segments_of(gradients, factor);
        launch(pack_kernel(from, to), pack_arguments(segments, table, bucket), 5);
        for (size_t i = 0; i < kCounts.size(); ++i) {
          const uint64_t count = kCounts[i];
          std::vector<char> wanted(count * size_of(to) + 1);
          // By way of bytes that are not aligned, which the CPU kernels do not mind.
          convert(wanted.data(), to, gradients.at(i), from, count, factor);
          check_numbers(pack_kernel(from, to), bucket.at(table.places[i]), wanted.data(), to,
                        count);
          for (uint64_t place = count; place % gpu::kUnit != 0; ++place) {
            CHECK_EQ(number_at(bucket.at(table.places[i] + place), to, 0), 0.0);
          }
        }
        gradients.check_guards();
      }
    }
  }
}

TEST(gpu_post_rounds_as_the_cpu_kernels_do_and_tells_what_the_result_is_like) {
  Random random(2);
  for (const DType to : kFloatTypes) {
    for (const DType from : kFloatTypes) {
      for (const bool ordinary : {true, false}) {
        const double factor = ordinary ? 0.125 / 3 : 1.5;
        const BucketTable table(kCounts, from, 0, 0);
        Bucket bucket(from, table.elements);
        for (size_t i = 0; i < kCounts.size(); ++i) {
          fill(bucket.at(table.places[i]), from, kCounts[i], random, ordinary);
        }
        Gradients gradients(to, kCounts, kMisaligned);
        const PostResult found = run_post(segments_of(gradients, 0), to, table, bucket, factor);
        for (size_t i = 0; i < kCounts.size(); ++i) {
          std::vector<char> wanted(kCounts[i] * size_of(to) + 1);
          convert(wanted.data(), to, bucket.at(table.places[i]), from, kCounts[i], factor);
          check_numbers(post_kernel(to, from), gradients.at(i), wanted.data(), to, kCounts[i]);
          check_by_products(found.segments[i], by_products_of(wanted.data(), to, kCounts[i]));
        }
        gradients.check_guards();
      }
    }
  }
}

TEST(gpu_kernels_know_every_16_bit_number) {
  std::vector<uint64_t> counts = {65536};
  for (const DType narrow : {DType::f16, DType::bf16}) {
    std::vector<uint16_t> all(65536);
    for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
    Gradients gradients(narrow, counts, kAligned);
    std::memcpy(gradients.at(0), all.data(), all.size() * 2);
    // To float, and the float's neighbours and the ties between two of them back again.
    const BucketTable wide_table(counts, DType::f32, 0, 0);
    Bucket wide(DType::f32, wide_table.elements);
    const auto segments = segments_of(gradients, 1);
    launch(pack_kernel(narrow, DType::f32), pack_arguments(segments, wide_table, wide), 4);
    std::vector<float> wanted(65536);
    convert(wanted.data(), DType::f32, all.data(), narrow, all.size(), 1.0);
    check_numbers("all to float", wide.data(), wanted.data(), DType::f32, wanted.size());

    for (const int steps : {-1, 0, 1, 0x0fff, 0x1000, 0x1001, 0x7fff, 0x8000, 0x8001}) {
      std::vector<float> near(65536);
      for (size_t i = 0; i < near.size(); ++i) {
        uint32_t bits;
        std::memcpy(&bits, &wanted[i], 4);
        bits += static_cast<uint32_t>(steps);
        std::memcpy(&near[i], &bits, 4);
      }
      for (const DType from : {DType::f32, DType::f64}) {
        std::vector<double> values(65536);
        // Doubles are put off the tie by less than a float can tell.
        convert(values.data(), from, near.data(), DType::f32, near.size(),
                from == DType::f64 ? 1 + 1e-12 : 1.0);
        Gradients input(from, counts, kAligned);
        std::memcpy(input.at(0), values.data(), values.size() * size_of(from));
        const BucketTable table(counts, narrow, 0, 0);
        Bucket bucket(narrow, table.elements);
        launch(pack_kernel(from, narrow), pack_arguments(segments_of(input, 1), table, bucket), 4);
        std::vector<uint16_t> rounded(65536);
        convert(rounded.data(), narrow, values.data(), from, rounded.size(), 1.0);
        check_numbers("near all", bucket.data(), rounded.data(), narrow, rounded.size());
      }
    }
  }
}

TEST(gpu_results_do_not_depend_on_blocks_threads_or_alignment) {
  Random random(3);
  const std::vector<uint64_t> counts = {20001, 5, 8192, 1000, 70000};
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const BucketTable table(counts, dtype, 0, 0);
    Bucket bucket(dtype, table.elements);
    for (size_t i = 0; i < counts.size(); ++i) {
      fill(bucket.at(table.places[i]), dtype, counts[i], random, true);
    }
    Gradients first_gradients(dtype, counts, kAligned);
    const PostResult first =
        run_post(segments_of(first_gradients, 1), dtype, table, bucket, 0.7, 1, 1);
    struct Form {
      unsigned blocks, threads;
      bool aligned, memory;
    };
    for (const Form form : {Form{2, 1, false, true}, Form{100, 1, true, false},
                            Form{3, 4, false, true}, Form{1, 3, true, true}}) {
      Gradients gradients(dtype, counts,
                          [&](size_t i) { return form.aligned ? size_t{0} : 1 + i % 3; });
      auto segments = segments_of(gradients, 1);
      if (!form.memory) segments[0].memory = nullptr;
      const PostResult other =
          run_post(segments, dtype, table, bucket, 0.7, form.blocks, form.threads);
      CHECK(std::memcmp(first.segments.data(), other.segments.data(),
                        first.segments.size() * sizeof(gpu::SegmentResult)) == 0);
      for (size_t i = form.memory ? 0 : 1; i < counts.size(); ++i) {
        CHECK(std::memcmp(first_gradients.at(i), gradients.at(i), counts[i] * size_of(dtype)) == 0);
      }
      gradients.check_guards();

      // The same for pack.
      Bucket packed(dtype, table.elements);
      launch(pack_kernel(dtype, dtype), pack_arguments(segments, table, packed), form.blocks,
             form.threads);
      for (size_t i = form.memory ? 0 : 1; i < counts.size(); ++i) {
        CHECK(std::memcmp(packed.at(table.places[i]), gradients.at(i),
                          counts[i] * size_of(dtype)) == 0);
      }
    }
  }
}

TEST(gpu_absent_segments_are_zero_and_not_read) {
  const std::vector<uint64_t> counts = {100, 8200, 3};
  for (const DType dtype : kFloatTypes) {
    const BucketTable table(counts, dtype, 0, 0);
    Gradients gradients(dtype, counts, kAligned);
    for (size_t i = 0; i < counts.size(); ++i) {
      std::memset(gradients.at(i), 0xff, counts[i] * size_of(dtype));  // NaN
    }
    auto segments = segments_of(gradients, 0);
    segments[1].memory = nullptr;
    segments[1].factor = 1;
    Bucket bucket(dtype, table.elements);
    launch(pack_kernel(dtype, dtype), pack_arguments(segments, table, bucket), 2);
    for (uint64_t i = 0; i < table.elements; ++i) {
      CHECK_EQ(number_at(bucket.data(), dtype, i), 0.0);
    }
  }
}

TEST(gpu_pack_takes_a_factor_from_the_device) {
  const std::vector<uint64_t> counts = {50, 4};
  const BucketTable table(counts, DType::f32, 0, 0);
  Gradients gradients(DType::f32, counts, kAligned);
  Random random(4);
  gradients.fill_all(random, true);
  for (const double on_device : {0.25, 0.0, kNan}) {
    Bucket bucket(DType::f32, table.elements);
    auto segments = segments_of(gradients, 3);
    segments[1].memory = nullptr;
    auto arguments = pack_arguments(segments, table, bucket);
    arguments.factor = &on_device;
    launch(pack_kernel(DType::f32, DType::f32), arguments, 1);
    std::vector<float> wanted(50);
    convert(wanted.data(), DType::f32, gradients.at(0), DType::f32, 50, 3 * on_device);
    if (on_device == 0) wanted.assign(50, 0.0f);
    check_numbers("factor", bucket.data(), wanted.data(), DType::f32, 50);
    // Whatever the factor is, nothing times it is nothing.
    for (uint64_t i = 50; i < table.elements; ++i) {
      CHECK_EQ(number_at(bucket.data(), DType::f32, i), 0.0);
    }
  }
}

TEST(gpu_squares_of_every_size) {
  // Sizes at which squares of floats overflow, underflow, or do neither, alone and mixed.
  const double sizes[] = {0,     1e-45, 1e-38, 1e-30,  1e-20, 8.8e-16,
                          1e-10, 1,     1e10,  1.2e18, 1e25,  3e38};
  for (const double size : sizes) {
    for (const double other : sizes) {
      const std::vector<uint64_t> counts = {1000};
      const BucketTable table(counts, DType::f32, 0, 0);
      Bucket bucket(DType::f32, table.elements);
      std::vector<float> values(1000);
      for (size_t i = 0; i < values.size(); ++i) {
        values[i] = static_cast<float>((i % 3 == 0 ? size : other) * (0.5 + 0.0005 * double(i)));
      }
      std::memcpy(bucket.data(), values.data(), 4000);
      Gradients gradients(DType::f32, counts, kAligned);
      const PostResult found = run_post(segments_of(gradients, 1), DType::f32, table, bucket, 1.0);
      check_by_products(found.segments[0], by_products_of(values.data(), DType::f32, 1000));
    }
  }
  // Doubles whose squares overflow are still finite; one that is not shows, wherever it is.
  for (const double value : {1e200, kNan, -kInfinity}) {
    for (const size_t place : {size_t{0}, size_t{8191}, size_t{8192}, size_t{19999}}) {
      for (const DType dtype : kFloatTypes) {
        if (value == 1e200 && dtype != DType::f64) continue;
        const std::vector<uint64_t> counts = {20000};
        const BucketTable table(counts, dtype, 0, 0);
        Bucket bucket(dtype, table.elements);
        std::memset(bucket.data(), 0, 20000 * size_of(dtype));
        convert(bucket.at(place), dtype, &value, DType::f64, 1, 1.0);
        Gradients gradients(dtype, counts, kAligned);
        const PostResult found = run_post(segments_of(gradients, 1), dtype, table, bucket, 1.0);
        CHECK_EQ(found.segments[0].finite != 0, value == 1e200);
      }
    }
  }
}

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

TEST(gpu_thousands_of_segments) {
  Random random(6);
  std::vector<uint64_t> counts;
  for (int i = 0; i < 5000; ++i) counts.push_back(random.below(i % 100 == 0 ? 10000 : 70));
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const BucketTable table(counts, dtype, 0, 0);
    Gradients gradients(dtype, counts, kMisaligned);
    gradients.fill_all(random, true);
    Gradients back(dtype, counts, kMisaligned);
    Bucket bucket(dtype, table.elements);
    const auto segments = segments_of(gradients, 1);
    launch(pack_kernel(dtype, dtype), pack_arguments(segments, table, bucket), 17);
    const PostResult found = run_post(segments_of(back, 1), dtype, table, bucket, 1.0, 13);
    for (size_t i = 0; i < counts.size(); ++i) {
      CHECK(std::memcmp(gradients.at(i), back.at(i), counts[i] * size_of(dtype)) == 0);
      check_by_products(found.segments[i], by_products_of(back.at(i), dtype, counts[i]));
    }
    back.check_guards();
  }
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

TEST(gpu_bucket_tables) {
  const BucketTable table({0, 3, gpu::kChunkElements + 1, 8}, DType::f16, 1, 2);
  CHECK_EQ(table.chunks.size(), size_t{4});
  CHECK(table.first_chunks == (std::vector<uint32_t>{0, 0, 1, 3, 4}));
  CHECK(table.places == (std::vector<uint64_t>{0, 0, 8, 8 + gpu::kChunkElements + 8}));
  CHECK_EQ(table.chunks[0].padding, 5u);
  CHECK_EQ(table.chunks[1].padding, 0u);
  CHECK_EQ(table.chunks[2].offset, uint64_t{gpu::kChunkElements});
  CHECK_EQ(table.chunks[2].padding, 7u);
  CHECK_EQ(table.trailer.place, table.places[3] + 8);
  // Two ranks with four digits each, four counts.
  CHECK_EQ(table.trailer.padding, 4u);
  CHECK_EQ(table.elements, table.trailer.place + 16);
  for (const DType dtype : {DType::i32, DType::boolean}) {
    CHECK_THROWS(pack_kernel(dtype, DType::f32), ErrorKind::bad_argument);
  }
}

TEST(gpu_kernel_names_are_those_of_the_source) {
  size_t names = 2;
  CHECK(test::find_host_kernel(kCombineKernel) != nullptr);
  CHECK(test::find_host_kernel(kNormKernel) != nullptr);
  for (const DType segment : kFloatTypes) {
    CHECK(test::find_host_kernel(trailer_kernel(segment)) != nullptr);
    CHECK(test::find_host_kernel(rescale_kernel(segment)) != nullptr);
    names += 2;
    for (const DType bucket : kFloatTypes) {
      CHECK(test::find_host_kernel(pack_kernel(segment, bucket)) != nullptr);
      CHECK(test::find_host_kernel(post_kernel(segment, bucket)) != nullptr);
      names += 2;
    }
  }
  CHECK_EQ(test::host_kernels().size(), names);
}

}  // namespace
}  // namespace hvd
