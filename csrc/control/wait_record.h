#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>

namespace hvd {

// Where a rank waits inside the engine, in a form that the others can compare with where they do.
struct WaitRecord {
  static constexpr int kRanks = 256;  // of those above nothing is told

  uint64_t wait = 0;       // which wait of this rank it is; 0: it does not wait, or not for long
  uint64_t since_ns = 0;   // it has been in this wait, and nothing has moved, at least since then
  uint64_t looked_ns = 0;  // when it began to look who is missing
  uint64_t channel = 0;    // the operation that it waits in: a number that all members agree on,
  uint64_t operation = 0;  // and which one of that channel
  uint64_t missing[kRanks / 64] = {};  // session ranks that had not come to it at that look

  bool is_missing(int rank) const {
    return rank < kRanks && (missing[rank / 64] >> (rank % 64) & 1) != 0;
  }
  void add_missing(int rank) {
    if (rank < kRanks) missing[rank / 64] |= uint64_t{1} << (rank % 64);
  }
};

// The same in shared memory: a sequence lock, see SharedText. One writer at a time; all zero at
// first, which says that the rank does not wait.
class SharedWaitRecord {
 public:
  void write(const WaitRecord& record) {
    uint64_t words[kWords];
    std::memcpy(words, &record, sizeof record);
    const uint64_t number = number_.load(std::memory_order_relaxed);
    number_.store(number + 1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
    for (size_t i = 0; i < kWords; ++i) words_[i].store(words[i], std::memory_order_relaxed);
    number_.store(number + 2, std::memory_order_release);
  }

  // One that does not wait when its owner does not get on with writing it.
  WaitRecord read() const {
    WaitRecord record;
    for (int look = 0; look < 1000; ++look) {
      const uint64_t number = number_.load(std::memory_order_acquire);
      if (number % 2 != 0) continue;
      uint64_t words[kWords];
      for (size_t i = 0; i < kWords; ++i) words[i] = words_[i].load(std::memory_order_relaxed);
      std::atomic_thread_fence(std::memory_order_acquire);
      if (number_.load(std::memory_order_relaxed) != number) continue;
      std::memcpy(&record, words, sizeof record);
      return record;
    }
    return record;
  }

 private:
  static constexpr size_t kWords = sizeof(WaitRecord) / sizeof(uint64_t);
  static_assert(sizeof(WaitRecord) == kWords * sizeof(uint64_t), "words, and no padding");

  std::atomic<uint64_t> number_{0};
  std::atomic<uint64_t> words_[kWords] = {};
};

}  // namespace hvd
