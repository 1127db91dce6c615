#include "comm/communicator.h"

namespace hvd {

Layout::Layout(DType dtype_, std::vector<uint64_t> counts_)
    : dtype(dtype_), counts(std::move(counts_)) {
  starts.reserve(counts.size());
  for (uint64_t count : counts) {
    starts.push_back(total);
    total += count;
  }
}

}  // namespace hvd
