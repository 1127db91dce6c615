#include "control/process.h"

#include <dirent.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace hvd {
namespace {

constexpr unsigned long kForkedNoExec = 0x40;  // PF_FORKNOEXEC, the kernel's accounting flag

std::vector<pid_t> all_processes() {
  std::vector<pid_t> pids;
  DIR* folder = opendir("/proc");
  while (const dirent* entry = folder != nullptr ? readdir(folder) : nullptr) {
    if (std::isdigit(static_cast<unsigned char>(entry->d_name[0])) != 0) {
      pids.push_back(static_cast<pid_t>(std::atoi(entry->d_name)));
    }
  }
  if (folder != nullptr) closedir(folder);
  return pids;
}

}  // namespace

void kill_forked_children(const std::vector<pid_t>& except) {
  std::vector<pid_t> parents{getpid()};
  const std::vector<pid_t> pids = all_processes();
  // A list that grows while it is gone through: those found are parents themselves.
  for (size_t i = 0; i < parents.size(); ++i) {
    for (const pid_t pid : pids) {
      const ProcessState process = read_process(pid);
      if (process.parent != parents[i] || !process.forked || process.state == 'Z') continue;
      if (std::find(except.begin(), except.end(), pid) != except.end()) continue;
      parents.push_back(pid);
    }
  }
  for (size_t i = parents.size(); i-- > 1;) kill(parents[i], SIGKILL);
}

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
  // third field, the parent the fourth, the flags are the ninth, the start time the 22nd, the exit
  // status the 52nd and last.
  char* field = std::strrchr(text, ')');
  for (int number = 3; field != nullptr; ++number) {
    field = std::strchr(field, ' ');
    if (field == nullptr) break;
    ++field;
    if (number == 3) process.state = *field;
    if (number == 4) process.parent = static_cast<pid_t>(std::atoi(field));
    if (number == 9) process.forked = (std::strtoul(field, nullptr, 10) & kForkedNoExec) != 0;
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
