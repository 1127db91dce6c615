#pragma once

#include <time.h>

#include <cstdint>

namespace hvd {

// Nanoseconds of CLOCK_MONOTONIC, which all processes of one machine share: times taken in
// different ranks may be compared.
inline uint64_t now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(now.tv_nsec);
}

}  // namespace hvd
