// csrc/gpu/nccl_functions.h against an official nccl.h of any version from 2.14 on. Compiled by
// tests/unit/test_gpu_headers.py.

#include <nccl.h>

#include "gpu/nccl_functions.h"
#include "official.h"

HVD_STANDS_FOR(hvd::NcclResult, ncclResult_t);
HVD_STANDS_FOR(hvd::NcclDataType, ncclDataType_t);
HVD_STANDS_FOR(hvd::NcclRedOp, ncclRedOp_t);
HVD_STANDS_FOR(hvd::NcclComm, ncclComm_t);
HVD_STANDS_FOR(hvd::NcclUniqueId, ncclUniqueId);
HVD_STANDS_FOR(hvd::CudaStream, cudaStream_t);
static_assert(std::is_trivially_copyable_v<hvd::NcclUniqueId>);  // it is passed by value
// Sizes differ by version, on purpose.
template <>
struct hvd::headers::OfficialType<hvd::NcclConfig> {
  static_assert(alignof(hvd::NcclConfig) == alignof(ncclConfig_t));
  using type = ncclConfig_t;
};
#if NCCL_VERSION_CODE >= 22700
HVD_STANDS_FOR(hvd::NcclWindow, ncclWindow_t);
#endif

// A function that the version does not have is not checked, and must not be in its header either:
// then the version in our table would be wrong. The preprocessor cannot compare inside of a list,
// so one macro per step of versions decides.
#define HVD_SINCE_21400(function) HVD_SAME_SIGNATURE(hvd::NcclFunctions, function)
#if NCCL_VERSION_CODE >= 21800
#define HVD_SINCE_21800(function) HVD_SAME_SIGNATURE(hvd::NcclFunctions, function)
#else
#define HVD_SINCE_21800(function) HVD_ABSENT(function)
#endif
#if NCCL_VERSION_CODE >= 21900
#define HVD_SINCE_21900(function) HVD_SAME_SIGNATURE(hvd::NcclFunctions, function)
#else
#define HVD_SINCE_21900(function) HVD_ABSENT(function)
#endif
#if NCCL_VERSION_CODE >= 22700
#define HVD_SINCE_22700(function) HVD_SAME_SIGNATURE(hvd::NcclFunctions, function)
#else
#define HVD_SINCE_22700(function) HVD_ABSENT(function)
#endif
#if NCCL_VERSION_CODE >= 22807
#define HVD_SINCE_22807(function) HVD_SAME_SIGNATURE(hvd::NcclFunctions, function)
#else
#define HVD_SINCE_22807(function) HVD_ABSENT(function)
#endif
#if NCCL_VERSION_CODE >= 22902
#define HVD_SINCE_22902(function) HVD_SAME_SIGNATURE(hvd::NcclFunctions, function)
#else
#define HVD_SINCE_22902(function) HVD_ABSENT(function)
#endif
// Declaring the name as something else clashes with a function of that name.
#define HVD_ABSENT(function) extern const char* const function;

#define HVD_CHECK(function, since, code) HVD_SINCE_##code(function)
HVD_NCCL_REQUIRED_FUNCTIONS(HVD_CHECK)
HVD_NCCL_OPTIONAL_FUNCTIONS(HVD_CHECK)

HVD_SAME_VALUE(hvd::NcclResult::success, ncclSuccess)
HVD_SAME_VALUE(hvd::NcclResult::unhandled_cuda_error, ncclUnhandledCudaError)
HVD_SAME_VALUE(hvd::NcclResult::system_error, ncclSystemError)
HVD_SAME_VALUE(hvd::NcclResult::internal_error, ncclInternalError)
HVD_SAME_VALUE(hvd::NcclResult::invalid_argument, ncclInvalidArgument)
HVD_SAME_VALUE(hvd::NcclResult::invalid_usage, ncclInvalidUsage)
HVD_SAME_VALUE(hvd::NcclResult::remote_error, ncclRemoteError)
HVD_SAME_VALUE(hvd::NcclResult::in_progress, ncclInProgress)

HVD_SAME_VALUE(hvd::NcclDataType::int8, ncclInt8)
HVD_SAME_VALUE(hvd::NcclDataType::uint8, ncclUint8)
HVD_SAME_VALUE(hvd::NcclDataType::int32, ncclInt32)
HVD_SAME_VALUE(hvd::NcclDataType::uint32, ncclUint32)
HVD_SAME_VALUE(hvd::NcclDataType::int64, ncclInt64)
HVD_SAME_VALUE(hvd::NcclDataType::uint64, ncclUint64)
HVD_SAME_VALUE(hvd::NcclDataType::float16, ncclFloat16)
HVD_SAME_VALUE(hvd::NcclDataType::float32, ncclFloat32)
HVD_SAME_VALUE(hvd::NcclDataType::float64, ncclFloat64)
HVD_SAME_VALUE(hvd::NcclDataType::bfloat16, ncclBfloat16)

HVD_SAME_VALUE(hvd::NcclRedOp::sum, ncclSum)
HVD_SAME_VALUE(hvd::NcclRedOp::prod, ncclProd)
HVD_SAME_VALUE(hvd::NcclRedOp::max, ncclMax)
HVD_SAME_VALUE(hvd::NcclRedOp::min, ncclMin)

// The configuration: what both sides know lies at the same place.
#define HVD_SAME_FIELD(ours, theirs)                                                       \
  static_assert(                                                                           \
      offsetof(hvd::NcclConfig, ours) == offsetof(ncclConfig_t, theirs) &&                 \
          std::is_same_v<decltype(hvd::NcclConfig::ours), decltype(ncclConfig_t::theirs)>, \
      #theirs " lies elsewhere in ncclConfig_t");
constexpr ncclConfig_t official_config = NCCL_CONFIG_INITIALIZER;
constexpr hvd::NcclConfig our_config;
HVD_SAME_FIELD(size, size)
HVD_SAME_FIELD(magic, magic)
HVD_SAME_FIELD(version, version)
HVD_SAME_FIELD(blocking, blocking)
HVD_SAME_VALUE(our_config.magic, official_config.magic)
#if NCCL_VERSION_CODE >= 21700
HVD_SAME_FIELD(cga_cluster_size, cgaClusterSize)
HVD_SAME_FIELD(min_ctas, minCTAs)
HVD_SAME_FIELD(max_ctas, maxCTAs)
HVD_SAME_FIELD(net_name, netName)
static_assert(official_config.netName == our_config.net_name);
HVD_SAME_VALUE(our_config.min_ctas, official_config.minCTAs)
#endif
#if NCCL_VERSION_CODE >= 21800
HVD_SAME_FIELD(split_share, splitShare)
HVD_SAME_VALUE(hvd::kNcclSplitNoColor, NCCL_SPLIT_NOCOLOR)
HVD_SAME_VALUE(hvd::kNcclUndefined, NCCL_CONFIG_UNDEF_INT)
#endif
#if NCCL_VERSION_CODE >= 22700
HVD_SAME_FIELD(traffic_class, trafficClass)
HVD_SAME_FIELD(comm_name, commName)
HVD_SAME_FIELD(collnet_enable, collnetEnable)
HVD_SAME_FIELD(cta_policy, CTAPolicy)
HVD_SAME_FIELD(shrink_share, shrinkShare)
HVD_SAME_FIELD(nvls_ctas, nvlsCTAs)
HVD_SAME_VALUE(hvd::kNcclWindowSymmetric, NCCL_WIN_COLL_SYMMETRIC)
HVD_SAME_VALUE(hvd::kNcclShrinkAbort, NCCL_SHRINK_ABORT)
static_assert(sizeof(hvd::NcclConfig) <= sizeof(ncclConfig_t));
#else
static_assert(sizeof(hvd::NcclConfig) > sizeof(ncclConfig_t));
#endif
#if NCCL_VERSION_CODE >= 22700 && NCCL_VERSION_CODE < 22800
// The version that ours is the layout of.
static_assert(sizeof(hvd::NcclConfig) == sizeof(ncclConfig_t));
#endif
#if NCCL_VERSION_CODE >= 22807
HVD_SAME_VALUE(0, NCCL_REVOKE_DEFAULT)
#endif
