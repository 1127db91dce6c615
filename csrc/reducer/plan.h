#pragma once

#include <cstdint>
#include <vector>

#include "base/dtype.h"

namespace hvd {

struct PlanParameter {
  uint64_t count;  // elements
  DType dtype;
  uint32_t group;      // parameters of different groups (optimizers) never share a bucket
  bool exact = false;  // never in 16 bits on the wire: no bucket together with those that may be
};

// Divides newly arrived parameters into buckets: in the order of arrival, each bucket of one type,
// one group and one exactness, and of at most `bucket_bytes` unless a single parameter is larger. A
// pure function of its arguments, so ranks that agree on them agree on the buckets. Returns
// parameter indices per bucket, buckets in the order of their first parameter.
std::vector<std::vector<uint32_t>> plan_buckets(const std::vector<uint32_t>& arrivals,
                                                const std::vector<PlanParameter>& parameters,
                                                uint64_t bucket_bytes);

// The common order of arrival: that of the lowest rank for what it saw, then that of the next
// rank for what it adds, and so on.
std::vector<uint32_t> agree_on_order(const std::vector<std::vector<uint32_t>>& by_rank);

}  // namespace hvd
