#include "reducer/plan.h"

#include <map>
#include <set>
#include <tuple>

namespace hvd {

std::vector<std::vector<uint32_t>> plan_buckets(const std::vector<uint32_t>& arrivals,
                                                const std::vector<PlanParameter>& parameters,
                                                uint64_t bucket_bytes) {
  std::vector<std::vector<uint32_t>> buckets;
  struct Open {
    size_t bucket;
    uint64_t bytes;
  };
  std::map<std::tuple<DType, uint32_t, bool>, Open> open;
  for (const uint32_t index : arrivals) {
    const PlanParameter& parameter = parameters[index];
    const uint64_t bytes = parameter.count * size_of(parameter.dtype);
    const auto key = std::make_tuple(parameter.dtype, parameter.group, parameter.exact);
    auto found = open.find(key);
    if (found == open.end() || found->second.bytes + bytes > bucket_bytes) {
      buckets.emplace_back();
      found = open.insert_or_assign(key, Open{buckets.size() - 1, 0}).first;
    }
    buckets[found->second.bucket].push_back(index);
    found->second.bytes += bytes;
  }
  return buckets;
}

std::vector<uint32_t> agree_on_order(const std::vector<std::vector<uint32_t>>& by_rank) {
  std::vector<uint32_t> order;
  std::set<uint32_t> known;
  for (const auto& arrivals : by_rank) {
    for (const uint32_t index : arrivals) {
      if (known.insert(index).second) order.push_back(index);
    }
  }
  return order;
}

}  // namespace hvd
