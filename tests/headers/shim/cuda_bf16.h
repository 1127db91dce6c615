// All that nccl.h wants of it: whether the type exists, which decides over one enumerator.
#pragma once
#define __CUDA_BF16_TYPES_EXIST__
