#include "kernels/body.h"

#if !(defined(__AVX2__) && defined(__F16C__))
#error "sources.cmake has the flags that this file is to be compiled with"
#endif

namespace hvd {

extern constexpr KernelTable kAvx2Kernels = make_table();

}  // namespace hvd
