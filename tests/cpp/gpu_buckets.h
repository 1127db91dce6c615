// Gradients and buckets in host memory, and launches of the CUDA kernels' source on the host.
#pragma once

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

namespace hvd::test {

inline const DType kFloatTypes[] = {DType::f32, DType::f64, DType::f16, DType::bf16};
inline constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

// ---- Memory and numbers ----

inline double number_at(const void* memory, DType dtype, size_t index) {
  double value = 0;
  convert(&value, DType::f64, static_cast<const char*>(memory) + index * size_of(dtype), dtype, 1,
          1.0);
  return value;
}

inline bool equal_numbers(const void* left, const void* right, DType dtype, size_t index) {
  const size_t size = size_of(dtype);
  const char* a = static_cast<const char*>(left) + index * size;
  const char* b = static_cast<const char*>(right) + index * size;
  if (std::memcmp(a, b, size) == 0) return true;
  return std::isnan(number_at(a, dtype, 0)) && std::isnan(number_at(b, dtype, 0));
}

inline void check_numbers(const std::string& what, const void* found, const void* wanted,
                          DType dtype, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    if (equal_numbers(found, wanted, dtype, i)) continue;
    throw CheckFailure(__FILE__, __LINE__,
                       what + ", " + name_of(dtype) + " element " + std::to_string(i) + ": " +
                           describe(number_at(found, dtype, i)) + " and " +
                           describe(number_at(wanted, dtype, i)) + " differ");
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
inline void fill(void* memory, DType dtype, size_t count, Random& random, bool ordinary) {
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
  const HostKernel* kernel = find_host_kernel(name);
  if (kernel == nullptr) throw CheckFailure(__FILE__, __LINE__, "no kernel named " + name);
  void* parameters[] = {&arguments};
  run_host_kernel(*kernel, parameters, blocks, threads);
}

inline std::vector<gpu::Segment> segments_of(Gradients& gradients, double factor) {
  std::vector<gpu::Segment> segments;
  for (size_t i = 0; i < gradients.counts().size(); ++i) {
    segments.push_back({gradients.at(i), factor});
  }
  return segments;
}

inline gpu::PackArguments pack_arguments(const std::vector<gpu::Segment>& segments,
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

inline PostResult run_post(const std::vector<gpu::Segment>& segments, DType dtype,
                           const BucketTable& table, Bucket& bucket, double factor,
                           unsigned blocks = 3, unsigned threads = 1) {
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
inline ByProducts by_products_of(void* memory, DType dtype, uint64_t count) {
  return rescale(memory, dtype, count, 1.0);
}

inline void check_by_products(const gpu::SegmentResult& found, const ByProducts& wanted) {
  CHECK_EQ(found.finite != 0, wanted.finite);
  if (!std::isfinite(wanted.sum_of_squares)) {
    CHECK(!std::isfinite(found.sum_of_squares));
    return;
  }
  // Half a unit of float for each of the eight squares that are summed in it.
  CHECK(std::fabs(found.sum_of_squares - wanted.sum_of_squares) <= 4.8e-7 * wanted.sum_of_squares);
}

inline const std::vector<uint64_t> kCounts = {1,  7,    8,    9,    0,   16,    33, 255, 2047,
                                              63, 8191, 8192, 8193, 100, 16400, 3,  129, 20001};
// Odd ones are aligned no better than their elements are.
inline const auto kMisaligned = [](size_t i) { return i % 2 == 0 ? size_t{0} : 1 + i % 3; };
inline const auto kAligned = [](size_t) { return size_t{0}; };

}  // namespace hvd::test
