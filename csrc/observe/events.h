#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "base/clock.h"

namespace hvd {

enum class EventKind : uint8_t { fired, posted, started, done, flush_begin, flush_end };

struct Event {
  uint64_t time_ns;
  uint64_t step;    // number of the backward
  uint32_t object;  // parameter (fired) or bucket (posted, started, done)
  EventKind kind;
};

// The last events of a reducer and its communicator, for timelines and overlap figures. Several
// threads write; when it is off a write is one load. A reader copies while writers are at rest
// (between two steps).
class EventRing {
 public:
  void enable(size_t capacity) {
    events_.assign(capacity, Event{});
    count_.store(0, std::memory_order_relaxed);
    enabled_.store(capacity != 0, std::memory_order_release);
  }
  bool enabled() const { return enabled_.load(std::memory_order_acquire); }
  void write(EventKind kind, uint32_t object, uint64_t step) {
    if (!enabled()) return;
    const uint64_t place = count_.fetch_add(1, std::memory_order_relaxed);
    events_[place % events_.size()] = Event{now_ns(), step, object, kind};
  }
  // Oldest first; what did not fit is lost.
  std::vector<Event> read() const {
    std::vector<Event> copy;
    const uint64_t count = count_.load(std::memory_order_acquire);
    const uint64_t kept = events_.empty() ? 0 : (count < events_.size() ? count : events_.size());
    for (uint64_t i = count - kept; i < count; ++i) copy.push_back(events_[i % events_.size()]);
    return copy;
  }

 private:
  std::vector<Event> events_;
  std::atomic<uint64_t> count_{0};
  std::atomic<bool> enabled_{false};
};

}  // namespace hvd
