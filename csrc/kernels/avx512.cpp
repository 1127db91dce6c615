#include "kernels/body.h"

#if !(defined(__AVX512F__) && defined(__AVX512DQ__) && defined(__AVX512BW__))
#error "sources.cmake has the flags that this file is to be compiled with"
#endif

namespace hvd {

extern constexpr KernelTable kAvx512Kernels = make_table();

}  // namespace hvd
