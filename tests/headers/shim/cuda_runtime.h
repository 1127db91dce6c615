// All that nccl.h wants of the CUDA runtime, whose own header needs a CUDA compiler's folder.
#pragma once
#include <stddef.h>
#define CUDART_VERSION 12000
typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;
