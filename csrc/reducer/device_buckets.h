#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/nccl_communicator.h"
#include "gpu/bucket_table.h"
#include "gpu/kernels.h"

namespace hvd {

// Gradients of a GPU, reduced bucket by bucket, while the host only puts work on streams:
//
//   producing streams   gradients . event
//   pack stream                       pack . event           (high priority, ours)
//   comm stream                              ncclAllReduce . trailer . post . combine . event
//   the caller's stream                                                                  waits
//
// pack copies the gradients into a bucket of the ring, with the rank's weight and what it used
// behind them; NCCL sums bucket and trailer in one call; post writes result / sum of weights into
// the gradients' own memory. Whether the results are finite, and their squares, stay on the device
// until somebody asks (read, norm).
//
// The pack kernel is not on the producing stream, because a bucket may have several of those, and
// because a ring that is full would hold up backward there.
//
// Buckets are launched in the order of their numbers, which all ranks share, whatever order they
// were posted in. So every rank posts the same buckets in a round, null pointers for what it lacks.
//
// torch's allocator: memory of a gradient may be freed, and used again, by streams that are behind
// the one that end_round was given, as is everything that torch's own stream does afterwards. It
// has to stay until then; nothing has to be recorded with the allocator.
//
// Thread contract: one thread at a time. The communicator has to live longer.
class DeviceBuckets {
 public:
  struct Settings {
    uint32_t ring = 4;  // buckets under way at a time
  };

  // With the device's context current.
  DeviceBuckets(std::shared_ptr<NcclCommunicator> communicator, std::shared_ptr<DriverApi> driver,
                std::shared_ptr<GpuKernels> kernels, const Settings& settings);
  ~DeviceBuckets();
  DeviceBuckets(const DeviceBuckets&) = delete;
  DeviceBuckets& operator=(const DeviceBuckets&) = delete;

  // The next bucket, the same on all ranks: elements of each gradient, their type, and the type in
  // which they are sent and summed. Between rounds; waits for the device.
  uint32_t add(const std::string& name, const std::vector<uint64_t>& counts, DType gradients,
               DType bucket, const Wait& wait);
  size_t size() const;

  struct Gradients {
    std::vector<void*> memory;        // by gradient; null: gives nothing and takes nothing back
    std::vector<CudaStream> streams;  // on which they were made; what they hold by now counts
    double pre = 1;                   // the result is post * sum of pre * gradient / sum of weights
    double weight = 1;                // with pre 0 this rank's memory is not read
    double post = 1;
    const float* scale = nullptr;  // on the device: a loss scale to divide by; null: 1
  };
  // Ready, in any order; launched once all buckets before it have been posted. Never blocks.
  void post(uint32_t bucket, const Gradients& gradients);
  // Buckets of this round that have been launched: ranks that have to end a round after an
  // exception agree on the most of all, and post so many.
  uint32_t launched() const;
  // All that take part have been posted: launches the rest. From now on `stream` waits for the
  // results.
  void end_round(CudaStream stream, const Wait& wait);

  struct Result {
    std::vector<gpu::SegmentResult> gradients;
    double total_weight = 0;
  };
  // Of the bucket's last round. Waits for the device.
  Result read(uint32_t bucket, const Wait& wait);

  // Buckets whose gradients have a norm together, those of an optimizer, say. Waits for the device.
  uint32_t add_group(const std::vector<uint32_t>& buckets, const Wait& wait);
  // The norm of what the group's buckets got last, found_inf and clip coefficient, on the device;
  // there once `stream` has come so far.
  const gpu::Norm* norm(uint32_t group, double max_norm, CudaStream stream, const Wait& wait);
  // The same, and multiplies the gradients by the coefficient, where that is below 1. Their memory
  // is that of the last round.
  const gpu::Norm* clip(uint32_t group, double max_norm, CudaStream stream, const Wait& wait);

  // Waits for what runs. After an abort the device's memory is left to the driver: kernels may
  // still be at it. Idempotent.
  void close();

 private:
  struct State;
  struct Posted;

  void launch(uint32_t bucket);
  const gpu::Norm* launch_norm(uint32_t group, double max_norm, bool clip, CudaStream stream,
                               const Wait& wait);

  std::shared_ptr<NcclCommunicator> communicator_;
  std::shared_ptr<State> state_;                 // with the operations that use it
  std::vector<std::shared_ptr<Posted>> posted_;  // in this round, and not launched
  std::vector<bool> seen_;                       // in this round
  uint32_t next_ = 0;                            // the first that has not been launched
  uint32_t launched_ = 0;                        // in this round
  uint64_t ticket_ = 0;                          // of the last operation
};

}  // namespace hvd
