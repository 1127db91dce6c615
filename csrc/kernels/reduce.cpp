#include "kernels/reduce.h"

#include <cstdlib>
#include <cstring>
#include <string>

#include "base/error.h"
#include "kernels/kernel_table.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace hvd {
namespace {

Isa machine_isa() {
#if defined(__x86_64__)
  // The builtin knows F16C only in newer compilers. It does ask whether the system saves the wide
  // registers, which F16C needs as well.
  unsigned a = 0, b = 0, c = 0, d = 0;
  const bool f16c = __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
  __builtin_cpu_init();
  if (f16c && __builtin_cpu_supports("avx2")) {
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
      return Isa::avx512;
    }
    return Isa::avx2;
  }
#endif
  return Isa::portable;
}

Isa choose_isa() {
  const Isa best = machine_isa();
  const char* wanted = std::getenv("HVD_ISA");
  if (wanted == nullptr || *wanted == '\0') return best;
  for (const Isa isa : {Isa::portable, Isa::avx2, Isa::avx512}) {
    if (std::strcmp(wanted, name_of(isa)) == 0) return isa < best ? isa : best;
  }
  throw Error(ErrorKind::bad_argument, "HVD_ISA is \"" + std::string(wanted) +
                                           "\"; set it to portable, avx2 or avx512, or unset it.");
}

}  // namespace

const char* name_of(Isa isa) {
  switch (isa) {
    case Isa::avx512:
      return "avx512";
    case Isa::avx2:
      return "avx2";
    case Isa::portable:
      break;
  }
  return "portable";
}

Isa best_isa() {
  static const Isa isa = choose_isa();
  return isa;
}

const KernelTable& kernel_table(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::avx512) return kAvx512Kernels;
  if (isa == Isa::avx2) return kAvx2Kernels;
#endif
  static_cast<void>(isa);
  return kPortableKernels;
}

ReduceKernel find_reduce_kernel(DType dtype, ReduceOp op, bool accumulate_f64) {
  return find_reduce_kernel(dtype, op, accumulate_f64, best_isa());
}

ReduceKernel find_reduce_kernel(DType dtype, ReduceOp op, bool accumulate_f64, Isa isa) {
  const KernelTable& table = kernel_table(isa);
  if (accumulate_f64 && op == ReduceOp::sum && is_floating(dtype)) {
    return table.sum_in_double[static_cast<size_t>(dtype)];
  }
  return table.reduce[static_cast<size_t>(dtype)][static_cast<size_t>(op)];
}

}  // namespace hvd
