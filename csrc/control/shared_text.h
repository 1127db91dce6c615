#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <string>

#include "base/clock.h"

namespace hvd {

// A short text in shared memory that its owner replaces at any time and others read at any time,
// without a lock: a rank that was stopped in the middle of writing must not stop those who read.
//
// A sequence lock. The number is odd while the text is being written. The writer's release fence
// keeps the words behind the odd number, its release store keeps them before the even one; the
// reader's acquire load keeps its look at the words behind its first look at the number, its
// acquire fence keeps them before the second. So a reader that sees the same even number twice
// has seen the words of one text. The words are atomics because they are read while they change.
//
// One writer at a time; the memory starts all zero, which is the empty text.
class SharedText {
 public:
  static constexpr size_t kBytes = 192;

  // Cut to fit, but not inside a UTF-8 sequence.
  void write(const std::string& text) {
    char bytes[kBytes] = {};
    size_t count = std::min(text.size(), kBytes - 1);
    while (count > 0 && count < text.size() && (text[count] & 0xC0) == 0x80) --count;
    std::memcpy(bytes, text.data(), count);
    const uint32_t number = number_.load(std::memory_order_relaxed);
    number_.store(number + 1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
    since_ns_.store(now_ns(), std::memory_order_relaxed);
    for (size_t i = 0; i < kWords; ++i) {
      uint64_t word = 0;
      std::memcpy(&word, bytes + i * sizeof word, sizeof word);
      words_[i].store(word, std::memory_order_relaxed);
      if (word == 0) break;  // the end of the text: what follows is not read
    }
    number_.store(number + 2, std::memory_order_release);
  }

  // The text and since when it stands. Empty when its owner does not get on with writing it.
  std::string read(uint64_t* since_ns) const {
    for (int look = 0; look < 1000; ++look) {
      const uint32_t number = number_.load(std::memory_order_acquire);
      if (number % 2 != 0) continue;
      char bytes[kBytes] = {};
      *since_ns = since_ns_.load(std::memory_order_relaxed);
      for (size_t i = 0; i < kWords; ++i) {
        const uint64_t word = words_[i].load(std::memory_order_relaxed);
        std::memcpy(bytes + i * sizeof word, &word, sizeof word);
        if (word == 0) break;
      }
      std::atomic_thread_fence(std::memory_order_acquire);
      if (number_.load(std::memory_order_relaxed) != number) continue;
      return std::string(bytes, strnlen(bytes, kBytes));
    }
    *since_ns = now_ns();
    return "";
  }

 private:
  static constexpr size_t kWords = kBytes / sizeof(uint64_t);

  std::atomic<uint32_t> number_{0};
  std::atomic<uint64_t> since_ns_{0};
  std::atomic<uint64_t> words_[kWords] = {};
};

}  // namespace hvd
