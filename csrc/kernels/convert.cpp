#include "kernels/convert.h"

#include <cstring>
#include <string>

#include "base/error.h"
#include "kernels/kernel_table.h"

namespace hvd {

void convert(void* dst, DType to, const void* src, DType from, size_t count, double factor) {
  convert(dst, to, src, from, count, factor, best_isa());
}

void convert(void* dst, DType to, const void* src, DType from, size_t count, double factor,
             Isa isa) {
  if (to == from && factor == 1) {
    if (dst != src && count != 0) std::memcpy(dst, src, count * size_of(to));
    return;
  }
  if (!is_floating(to) || !is_floating(from)) {
    throw Error(ErrorKind::bad_argument, std::string("cannot convert ") + name_of(from) + " to " +
                                             name_of(to) +
                                             " with a factor; only floating types are converted.");
  }
  kernel_table(isa).convert[static_cast<size_t>(from)][static_cast<size_t>(to)](dst, src, count,
                                                                                factor);
}

}  // namespace hvd
