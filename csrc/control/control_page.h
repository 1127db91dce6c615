#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "control/bells.h"
#include "control/shared_text.h"
#include "control/wait_record.h"

namespace hvd {

// The layout of the control plane's shared memory, which is all zero before anybody comes.
constexpr size_t kFailureText = 1400;  // bytes
constexpr size_t kSaidEntries = 512;

static_assert(std::atomic<uint64_t>::is_always_lock_free, "a lock would not be shared");

struct alignas(64) RankCell {
  enum : uint32_t { kUnknown = 0, kJoined = 1, kLeft = 2 };

  std::atomic<uint32_t> state{kUnknown};
  std::atomic<uint64_t> last_seen_ns{0};
  SharedText activity;  // what the rank is about outside the engine
  SharedText wait;      // what it waits for inside; empty when it does not, or not for long
  SharedWaitRecord wait_record;  // the same for machines
  // Written once by the owner of the cell, before first_failure points at it.
  int32_t culprit = 0;
  int32_t failure_kind = 0;
  uint64_t failed_ns = 0;
  char failure_text[kFailureText] = {};
};

struct ControlPage {
  std::atomic<uint32_t> magic{0};
  std::atomic<int32_t> first_failure{0};   // 1 + the rank whose cell tells; set once
  std::atomic<uint64_t> stop_asked_ns{0};  // when the end of a run was asked for
  alignas(64) std::atomic<uint64_t> stop_line{0};
  // Digests of the texts that some rank has printed for all: an open hash table, 0 = free entry.
  std::atomic<uint64_t> said[kSaidEntries] = {};
  RankCell cells[1];  // `size` of them, then the bells
};

inline size_t page_bytes(int size) {
  return sizeof(ControlPage) + sizeof(RankCell) * static_cast<size_t>(size) +
         sizeof(Bell) * static_cast<size_t>(size);
}

inline Bell* bells_of(ControlPage* page, int size) {
  return reinterpret_cast<Bell*>(page->cells + size + 1);
}

}  // namespace hvd
