// Control planes of ranks that are threads.
#pragma once

#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "sessions.h"

namespace hvd::test {

constexpr uint64_t kSecond = 1'000'000'000u;

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

inline void sleep_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

// Runs body(control) on every rank.
inline void with_control(int size, const std::function<void(HostControlPlane&)>& body,
                         const SessionSettings& settings = quick_settings()) {
  with_sessions(size, [&](Session& session) { body(session.control()); }, settings);
}

inline std::vector<int> ranks_up_to(int size) {
  std::vector<int> ranks;
  for (int rank = 0; rank < size; ++rank) ranks.push_back(rank);
  return ranks;
}

// All ranks have come here.
inline void meet(HostControlPlane& control, std::atomic<int>& arrived) {
  arrived.fetch_add(1);
  control.notify();
  control.wait([&] { return arrived.load() >= control.size() ? Step::done : Step::blocked; },
               soon(), {});
}

// A step that never gets done.
inline Step never() { return Step::blocked; }

}  // namespace hvd::test
