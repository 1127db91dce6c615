#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/reduce.h"

namespace hvd {

constexpr int kDTypeCount = 10;
constexpr int kFloatTypeCount = 4;  // the first ones of DType
constexpr int kReduceOpCount = 3;

using HashKernel = uint64_t (*)(const void* memory, size_t bytes);
using ConvertKernel = void (*)(void* dst, const void* src, size_t count, double factor);
using LargestKernel = double (*)(const void* src, size_t count);

// All kernels of one instruction set, indexed by the values of the enumerations.
struct KernelTable {
  ReduceKernel reduce[kDTypeCount][kReduceOpCount];
  ReduceKernel sum_in_double[kFloatTypeCount];
  ConvertKernel convert[kFloatTypeCount][kFloatTypeCount];  // [from][to]
  LargestKernel largest[2];                                 // of DType f32 and f64
  ConvertKernel to_finite_bf16;                             // from f32
  ReduceKernel sum_of_wire[2][3];  // [f16, bf16][f32 in float, f32 in double, f64 in double]
  HashKernel hash;
};

extern const KernelTable kPortableKernels;
#if defined(__x86_64__)
extern const KernelTable kAvx2Kernels;
extern const KernelTable kAvx512Kernels;
#endif

const KernelTable& kernel_table(Isa isa);

}  // namespace hvd
