#include "kernels/body.h"

namespace hvd {

extern constexpr KernelTable kPortableKernels = make_table();

}  // namespace hvd
