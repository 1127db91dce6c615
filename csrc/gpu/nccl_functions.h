// The functions of libnccl.so.2 that we call, with types of our own in place of nccl.h, whose
// layout depends on the version that it came with. tests/unit/test_gpu_headers.py compiles this
// file together with the official headers and compares every signature, size, offset and value.
#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>

#include "gpu/driver_functions.h"

namespace hvd {

enum class NcclResult : int {
  success = 0,
  unhandled_cuda_error = 1,
  system_error = 2,
  internal_error = 3,
  invalid_argument = 4,
  invalid_usage = 5,
  remote_error = 6,  // another rank failed or left
  in_progress = 7,   // a nonblocking communicator is still at it: no error
};

enum class NcclDataType : int {
  int8 = 0,
  uint8 = 1,
  int32 = 2,
  uint32 = 3,
  int64 = 4,
  uint64 = 5,
  float16 = 6,
  float32 = 7,
  float64 = 8,
  bfloat16 = 9,
};

// ncclAvg is left out on purpose, as are operators with a factor: both switch NVLink SHARP and the
// symmetric kernels off. Factors are the business of our own kernels.
enum class NcclRedOp : int { sum = 0, prod = 1, max = 2, min = 3 };

using NcclComm = struct NcclCommObject*;
using NcclWindow = struct NcclWindowObject*;

struct NcclUniqueId {
  char internal[128];
};

constexpr int kNcclUndefined = INT_MIN;
constexpr unsigned int kNcclConfigMagic = 0xcafebeef;
// The version up to which NcclConfig knows the fields.
constexpr unsigned int kNcclConfigVersion = 22700;

// ncclConfig_t of NCCL 2.27. A library reads as many bytes as both sides know, and trusts those
// fields that the version in it had: size, magic and version make this struct good for any library
// from 2.14 on. Later fields keep the library's defaults.
struct NcclConfig {
  size_t size = sizeof(NcclConfig);
  unsigned int magic = kNcclConfigMagic;
  unsigned int version = kNcclConfigVersion;
  int blocking = 0;                       // ours never block; before 2.17 "undefined" was no choice
  int cga_cluster_size = kNcclUndefined;  // 2.17
  int min_ctas = kNcclUndefined;          // 2.17; rejected unless max_ctas is set as well
  int max_ctas = kNcclUndefined;          // 2.17
  const char* net_name = nullptr;         // 2.17
  int split_share = kNcclUndefined;       // 2.18
  int traffic_class = kNcclUndefined;     // 2.25
  const char* comm_name = nullptr;        // 2.27 and the rest
  int collnet_enable = kNcclUndefined;
  int cta_policy = kNcclUndefined;
  int shrink_share = kNcclUndefined;
  int nvls_ctas = kNcclUndefined;
};
static_assert(sizeof(NcclConfig) == 72, "72 bytes in NCCL 2.27");

// For ncclCommWindowRegister: all ranks register the same, and NCCL uses its symmetric kernels.
constexpr int kNcclWindowSymmetric = 1;
// For ncclCommShrink: the parent has failed, abort what runs on it first.
constexpr int kNcclShrinkAbort = 1;
constexpr int kNcclSplitNoColor = -1;

struct NcclFunctions {
  NcclResult (*ncclGetVersion)(int* version);
  const char* (*ncclGetErrorString)(NcclResult result);
  const char* (*ncclGetLastError)(NcclComm comm);
  NcclResult (*ncclGetUniqueId)(NcclUniqueId* id);

  NcclResult (*ncclCommInitRankConfig)(NcclComm* comm, int ranks, NcclUniqueId id, int rank,
                                       NcclConfig* config);
  NcclResult (*ncclCommGetAsyncError)(NcclComm comm, NcclResult* result);
  NcclResult (*ncclCommFinalize)(NcclComm comm);
  NcclResult (*ncclCommDestroy)(NcclComm comm);
  NcclResult (*ncclCommAbort)(NcclComm comm);

  NcclResult (*ncclAllReduce)(const void* send, void* receive, size_t count, NcclDataType type,
                              NcclRedOp op, NcclComm comm, CudaStream stream);
  NcclResult (*ncclBroadcast)(const void* send, void* receive, size_t count, NcclDataType type,
                              int root, NcclComm comm, CudaStream stream);
  NcclResult (*ncclAllGather)(const void* send, void* receive, size_t send_count, NcclDataType type,
                              NcclComm comm, CudaStream stream);
  NcclResult (*ncclReduceScatter)(const void* send, void* receive, size_t receive_count,
                                  NcclDataType type, NcclRedOp op, NcclComm comm,
                                  CudaStream stream);
  NcclResult (*ncclSend)(const void* send, size_t count, NcclDataType type, int peer, NcclComm comm,
                         CudaStream stream);
  NcclResult (*ncclRecv)(void* receive, size_t count, NcclDataType type, int peer, NcclComm comm,
                         CudaStream stream);
  NcclResult (*ncclGroupStart)();
  NcclResult (*ncclGroupEnd)();

  // From here on null where the library is too old.
  NcclResult (*ncclCommSplit)(NcclComm comm, int color, int key, NcclComm* new_comm,
                              NcclConfig* config);
  NcclResult (*ncclMemAlloc)(void** pointer, size_t bytes);
  NcclResult (*ncclMemFree)(void* pointer);
  NcclResult (*ncclCommRegister)(const NcclComm comm, void* buffer, size_t bytes, void** handle);
  NcclResult (*ncclCommDeregister)(const NcclComm comm, void* handle);
  NcclResult (*ncclCommShrink)(NcclComm comm, int* excluded, int excluded_count, NcclComm* new_comm,
                               NcclConfig* config, int flags);
  NcclResult (*ncclCommWindowRegister)(NcclComm comm, void* buffer, size_t bytes,
                                       NcclWindow* window, int flags);
  NcclResult (*ncclCommWindowDeregister)(NcclComm comm, NcclWindow window);
  NcclResult (*ncclCommRevoke)(NcclComm comm, int flags);
  NcclResult (*ncclCommGetUniqueId)(NcclComm comm, NcclUniqueId* id);
  NcclResult (*ncclCommGrow)(NcclComm comm, int ranks, const NcclUniqueId* id, int rank,
                             NcclComm* new_comm, NcclConfig* config);
};

// F(function, version that brought it, the same as NCCL's version code).
#define HVD_NCCL_REQUIRED_FUNCTIONS(F)     \
  F(ncclGetVersion, "2.14", 21400)         \
  F(ncclGetErrorString, "2.14", 21400)     \
  F(ncclGetLastError, "2.14", 21400)       \
  F(ncclGetUniqueId, "2.14", 21400)        \
  F(ncclCommInitRankConfig, "2.14", 21400) \
  F(ncclCommGetAsyncError, "2.14", 21400)  \
  F(ncclCommFinalize, "2.14", 21400)       \
  F(ncclCommDestroy, "2.14", 21400)        \
  F(ncclCommAbort, "2.14", 21400)          \
  F(ncclAllReduce, "2.14", 21400)          \
  F(ncclBroadcast, "2.14", 21400)          \
  F(ncclAllGather, "2.14", 21400)          \
  F(ncclReduceScatter, "2.14", 21400)      \
  F(ncclSend, "2.14", 21400)               \
  F(ncclRecv, "2.14", 21400)               \
  F(ncclGroupStart, "2.14", 21400)         \
  F(ncclGroupEnd, "2.14", 21400)
#define HVD_NCCL_OPTIONAL_FUNCTIONS(F)       \
  F(ncclCommSplit, "2.18", 21800)            \
  F(ncclMemAlloc, "2.19", 21900)             \
  F(ncclMemFree, "2.19", 21900)              \
  F(ncclCommRegister, "2.19", 21900)         \
  F(ncclCommDeregister, "2.19", 21900)       \
  F(ncclCommShrink, "2.27", 22700)           \
  F(ncclCommWindowRegister, "2.27", 22700)   \
  F(ncclCommWindowDeregister, "2.27", 22700) \
  F(ncclCommRevoke, "2.28.7", 22807)         \
  F(ncclCommGetUniqueId, "2.29.2", 22902)    \
  F(ncclCommGrow, "2.29.2", 22902)

}  // namespace hvd
