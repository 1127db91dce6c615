#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

namespace hvd {

// What /proc tells of a process.
struct ProcessState {
  char state = 0;        // R, S, D, T, t, Z, ...; 0: there is no such process (any more)
  uint64_t started = 0;  // in the kernel's clock ticks; tells a process from a later one of its pid
  int exit_status = 0;   // as long as it is a zombie
};

ProcessState read_process(pid_t pid);

// The state in words: "stopped by a signal", "running", ...
std::string describe_state(char state);

}  // namespace hvd
