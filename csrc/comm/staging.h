#pragma once

#include <atomic>
#include <cstdint>

#include "comm/communicator.h"

namespace hvd {

// What lies in the shared memory of a shared-memory communicator. All zero is the initial state,
// so memory fresh from the kernel needs no set-up.

constexpr uint32_t kInOrderSlots = 32;  // collectives that are called in order use these in turn
constexpr uint32_t kAllSlots = Communicator::kSlots + kInOrderSlots;
constexpr uint64_t kLogEntries = 2048;
// An entry of the log may be overwritten once every rank has read it. A rank that has not read
// entry k has work outstanding for every entry after k, and a slot holds one work: so no more than
// kAllSlots entries can follow k.
static_assert(kLogEntries > kAllSlots, "the log must hold one entry per slot");
// A rank is at most `slots` chunks, hence operations, ahead of the slowest: a record of an
// operation called in order may be overwritten kInOrderSlots operations later.
constexpr uint32_t kMostRingSlots = kInOrderSlots - 1;

// How far a rank has come, in chunks since the communicator exists. Each counter is written by its
// rank with release after the memory it speaks of, and read by the others with acquire; each has
// a cache line of its own because they are polled at different times.
struct Progress {
  alignas(64) std::atomic<uint64_t> copied_in{0};   // the rank's share lies in its staging slot
  alignas(64) std::atomic<uint64_t> reduced{0};     // its slice of the result lies there as well
  alignas(64) std::atomic<uint64_t> copied_out{0};  // it reads no slot of that chunk any more
};

constexpr size_t kNameBytes = 72;

// A rank's announcement that its work for a slot may start.
struct PostRecord {
  std::atomic<uint64_t> ticket{0};  // 1 + step of the work; written last
  uint64_t signature = 0;
  double pre = 0;
  double weight = 0;
  double scale = 0;
  uint64_t bytes = 0;  // allgather: what this rank gives
  char name[kNameBytes + 8] = {};
};
static_assert(sizeof(PostRecord) == 128, "two cache lines");

// Memory of one communicator: progress and records of every rank, the log, the staging ring.
class Staging {
 public:
  Staging(char* base, int ranks, uint32_t slots, uint64_t slot_bytes)
      : base_(base), ranks_(ranks), slots_(slots), slot_bytes_(slot_bytes) {}

  static uint64_t bytes_needed(int ranks, uint32_t slots, uint64_t slot_bytes) {
    return ring_offset(ranks) + static_cast<uint64_t>(ranks) * slots * slot_bytes;
  }
  Progress& progress(int rank) const { return reinterpret_cast<Progress*>(base_)[rank]; }
  // The order in which slots are served: entry k holds (k + 1) << 16 | slot.
  std::atomic<uint64_t>& log(uint64_t k) const {
    return reinterpret_cast<std::atomic<uint64_t>*>(base_ + log_offset(ranks_))[k % kLogEntries];
  }
  PostRecord& record(uint32_t slot, int rank) const {
    return reinterpret_cast<PostRecord*>(
        base_ +
        records_offset(ranks_))[static_cast<uint64_t>(slot) * static_cast<uint64_t>(ranks_) +
                                static_cast<uint64_t>(rank)];
  }
  char* slot(int rank, uint64_t chunk) const {
    return base_ + ring_offset(ranks_) +
           (static_cast<uint64_t>(rank) * slots_ + chunk % slots_) * slot_bytes_;
  }
  uint32_t slots() const { return slots_; }
  uint64_t slot_bytes() const { return slot_bytes_; }

 private:
  static uint64_t log_offset(int ranks) { return sizeof(Progress) * static_cast<uint64_t>(ranks); }
  static uint64_t records_offset(int ranks) { return log_offset(ranks) + 8 * kLogEntries; }
  static uint64_t ring_offset(int ranks) {
    const uint64_t end =
        records_offset(ranks) + sizeof(PostRecord) * kAllSlots * static_cast<uint64_t>(ranks);
    return (end + 4095) / 4096 * 4096;
  }

  char* base_;
  int ranks_;
  uint32_t slots_;
  uint64_t slot_bytes_;
};

}  // namespace hvd
