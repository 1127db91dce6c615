#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "comm/communicator.h"

namespace hvd {

constexpr uint64_t kSliceGrain = 64;  // elements; slices begin on cache lines

// Calls use(segment, offset in the segment, place behind `low`, count) for every piece of a
// segment that lies in [low, high), all in elements.
template <class Use>
void for_pieces(const Layout& layout, uint64_t low, uint64_t high, Use use) {
  if (low >= high) return;
  size_t segment =
      static_cast<size_t>(std::upper_bound(layout.starts.begin(), layout.starts.end(), low) -
                          layout.starts.begin() - 1);
  for (uint64_t place = low; place < high; ++segment) {
    const uint64_t offset = place - layout.starts[segment];
    if (offset >= layout.counts[segment]) continue;  // an empty segment
    const uint64_t count = std::min(high - place, layout.counts[segment] - offset);
    use(segment, offset, place - low, count);
    place += count;
  }
}

inline char* element(void* base, uint64_t index, size_t width) {
  return static_cast<char*>(base) + index * width;
}

}  // namespace hvd
