#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

namespace hvd {

// What /proc tells of a process.
struct ProcessState {
  char state = 0;        // R, S, D, T, t, Z, ...; 0: there is no such process (any more)
  uint64_t started = 0;  // in the kernel's clock ticks; tells a process from a later one of its pid
  pid_t parent = 0;
  bool forked = false;  // runs the program of its parent, and has not executed another one
  int exit_status = 0;  // as long as it is a zombie
};

ProcessState read_process(pid_t pid);

// The state in words: "stopped by a signal", "running", ...
std::string describe_state(char state);

// Kills what this process has forked, and what that has forked: the workers of a DataLoader, say.
// For a process that is about to end itself without the chance to end them in good order. Programs
// that it has started are left alone, and so are those of `except`.
void kill_forked_children(const std::vector<pid_t>& except);

}  // namespace hvd
