#include "kernels/rescale.h"

#include <algorithm>
#include <string>

#include "base/error.h"

namespace hvd {

ByProducts rescale(void* memory, DType dtype, size_t count, double factor) {
  if (!is_floating(dtype)) {
    throw Error(ErrorKind::bad_argument,
                std::string("cannot rescale ") + name_of(dtype) + "; only floating types can be.");
  }
  const ReduceKernel kernel = find_reduce_kernel(dtype, ReduceOp::sum);
  ByProducts result;
  // Where nothing changes the results go to a place that stays in the first cache.
  constexpr size_t kPieceBytes = 8192;
  alignas(64) char unused[kPieceBytes];
  const bool keep = factor == 1.0;
  const size_t width = size_of(dtype);
  const size_t piece = keep ? kPieceBytes / width : count;
  for (size_t done = 0; done < count; done += piece) {
    void* part = static_cast<char*>(memory) + done * width;
    const void* source = part;
    const double one = 1.0;
    ReduceArguments arguments{};
    arguments.out = keep ? unused : part;
    arguments.sources = &source;
    arguments.pre = &one;
    arguments.source_count = 1;
    arguments.post = factor;
    arguments.count = std::min(piece, count - done);
    arguments.by_products = &result;
    kernel(arguments);
  }
  return result;
}

}  // namespace hvd
