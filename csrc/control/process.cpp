#include "control/process.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace hvd {

ProcessState read_process(pid_t pid) {
  ProcessState process;
  char text[1024];
  std::snprintf(text, sizeof text, "/proc/%d/stat", static_cast<int>(pid));
  std::FILE* file = pid > 0 ? std::fopen(text, "re") : nullptr;
  if (file == nullptr) return process;
  const size_t count = std::fread(text, 1, sizeof text - 1, file);
  std::fclose(file);
  text[count] = 0;
  // The name stands in brackets and may itself contain brackets and blanks; the state is the
  // third field, the start time the 22nd, the exit status the 52nd and last.
  char* field = std::strrchr(text, ')');
  for (int number = 3; field != nullptr; ++number) {
    field = std::strchr(field, ' ');
    if (field == nullptr) break;
    ++field;
    if (number == 3) process.state = *field;
    if (number == 22) process.started = std::strtoull(field, nullptr, 10);
    if (number == 52) process.exit_status = std::atoi(field);
  }
  return process;
}

std::string describe_state(char state) {
  switch (state) {
    case 'R':
      return "running";
    case 'S':
      return "sleeping";
    case 'D':
      return "waiting for a device or file system";
    case 'T':
      return "stopped by a signal";
    case 't':
      return "stopped by a debugger";
    case 'Z':
    case 'X':
      return "ended";
    default:
      return "not visible";
  }
}

}  // namespace hvd
