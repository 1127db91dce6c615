#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "gpu/kernel_arguments.h"

namespace hvd {

// How a bucket on a GPU is divided: made once per bucket, uploaded, and used in every step.
struct BucketTable {
  // `counts`: elements of each segment. `rank_count`: ranks whose weights travel behind them; with
  // 0 there is no trailer. `dtype` is the type of the bucket. Every segment starts at a place that
  // is aligned to 16 bytes, so that vector access is only a matter of the segments' own memory.
  BucketTable(const std::vector<uint64_t>& counts, DType dtype, uint32_t rank, uint32_t rank_count);

  DType dtype;
  std::vector<gpu::Chunk> chunks;
  std::vector<uint32_t> first_chunks;  // of each segment; one more for the end
  std::vector<uint64_t> places;        // of each segment's first element in the bucket
  gpu::Trailer trailer{};
  uint64_t elements = 0;  // of the bucket, all told
};

// A rank's weight as it travels in a bucket of that type: exact in float64, rounded to 24 bits
// in the others. Throws Error(bad_argument) unless the weight is a number from 0 on that a float
// has.
std::array<double, gpu::kWeightDigits> encode_weight(DType dtype, double weight);

// Names of the kernels for the types of segment and bucket. Throws Error(bad_argument) for types
// that are not floating.
std::string pack_kernel(DType segment, DType bucket);
std::string post_kernel(DType segment, DType bucket);
std::string trailer_kernel(DType bucket);
std::string rescale_kernel(DType segment);
constexpr const char* kCombineKernel = "hvd_combine";
constexpr const char* kNormKernel = "hvd_norm";

}  // namespace hvd
