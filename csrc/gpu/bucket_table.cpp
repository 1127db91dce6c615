#include "gpu/bucket_table.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"

namespace hvd {
namespace {

uint64_t round_up(uint64_t count) { return (count + gpu::kUnit - 1) / gpu::kUnit * gpu::kUnit; }

uint32_t weight_digits(DType dtype) { return size_of(dtype) == 2 ? gpu::kWeightDigits : 1; }

std::string suffix(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return "_f32";
    case DType::f64:
      return "_f64";
    case DType::f16:
      return "_f16";
    case DType::bf16:
      return "_bf16";
    default:
      throw Error(ErrorKind::bad_argument, std::string("gradients on a GPU cannot be ") +
                                               name_of(dtype) + "; only floating types can be.");
  }
}

}  // namespace

BucketTable::BucketTable(const std::vector<uint64_t>& counts, DType dtype_, uint32_t rank,
                         uint32_t rank_count)
    : dtype(dtype_) {
  for (size_t segment = 0; segment < counts.size(); ++segment) {
    places.push_back(elements);
    first_chunks.push_back(static_cast<uint32_t>(chunks.size()));
    const uint64_t count = counts[segment];
    for (uint64_t offset = 0; offset < count; offset += gpu::kChunkElements) {
      gpu::Chunk chunk{};
      chunk.place = elements + offset;
      chunk.offset = offset;
      chunk.segment = static_cast<uint32_t>(segment);
      chunk.count = static_cast<uint32_t>(std::min<uint64_t>(count - offset, gpu::kChunkElements));
      chunk.padding = static_cast<uint32_t>(round_up(chunk.count) - chunk.count);
      chunks.push_back(chunk);
    }
    elements += round_up(count);
  }
  first_chunks.push_back(static_cast<uint32_t>(chunks.size()));
  if (rank_count == 0) return;
  trailer.place = elements;
  trailer.rank = rank;
  trailer.rank_count = rank_count;
  trailer.segment_count = static_cast<uint32_t>(counts.size());
  const uint64_t length = uint64_t{rank_count} * weight_digits(dtype) + counts.size();
  trailer.padding = static_cast<uint32_t>(round_up(length) - length);
  elements += round_up(length);
}

std::array<double, gpu::kWeightDigits> encode_weight(DType dtype, double weight) {
  const float rounded = static_cast<float>(weight);
  if (!(weight >= 0) || !std::isfinite(rounded)) {
    throw Error(ErrorKind::bad_argument, "the weight of a rank is " + std::to_string(weight) +
                                             "; it has to be a finite number from 0 on.");
  }
  if (dtype == DType::f64) return {weight};
  if (weight_digits(dtype) == 1 || rounded == 0) return {rounded};
  // Digits below 256 and an exponent below 256: every 16-bit type has them exactly.
  int exponent = 0;
  const auto mantissa = static_cast<uint32_t>(std::ldexp(std::frexp(rounded, &exponent), 24));
  return {static_cast<double>(exponent - 24), static_cast<double>(mantissa >> 16),
          static_cast<double>((mantissa >> 8) & 255u), static_cast<double>(mantissa & 255u)};
}

std::string pack_kernel(DType segment, DType bucket) {
  return "hvd_pack" + suffix(segment) + suffix(bucket);
}
std::string post_kernel(DType segment, DType bucket) {
  return "hvd_post" + suffix(segment) + suffix(bucket);
}
std::string trailer_kernel(DType bucket) { return "hvd_trailer" + suffix(bucket); }
std::string rescale_kernel(DType segment) { return "hvd_rescale" + suffix(segment); }

}  // namespace hvd
