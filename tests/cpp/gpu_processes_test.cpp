// Gradients on fake GPUs with a process per rank, one of which may be killed.

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "check.h"

extern char** environ;

namespace hvd {
namespace {

class Job {
 public:
  explicit Job(int ranks) : ranks_(ranks) {
    folder_ = (std::filesystem::temp_directory_path() / "hvd-gpu-ranks-XXXXXX").string();
    CHECK(mkdtemp(folder_.data()) != nullptr);
  }
  ~Job() {
    for (int rank = 0; rank < ranks_; ++rank) {
      unlink((folder_ + "/" + std::to_string(rank)).c_str());
      unlink(output(rank).c_str());
    }
    rmdir(folder_.c_str());
  }

  void start(const std::string& faults) {
    for (int rank = 0; rank < ranks_; ++rank) {
      std::string words[] = {std::string(HVD_FAKES_DIR) + "/gpu_rank", folder_,
                             std::to_string(rank), std::to_string(ranks_)};
      char* arguments[] = {words[0].data(), words[1].data(), words[2].data(), words[3].data(),
                           nullptr};
      std::string setting = "HVD_FAKE_FAULTS=" + faults;
      std::vector<char*> variables = {setting.data()};
      for (char** known = environ; *known != nullptr; ++known) variables.push_back(*known);
      variables.push_back(nullptr);
      posix_spawn_file_actions_t actions;
      posix_spawn_file_actions_init(&actions);
      posix_spawn_file_actions_addopen(&actions, 1, output(rank).c_str(),
                                       O_CREAT | O_WRONLY | O_TRUNC, 0600);
      posix_spawn_file_actions_adddup2(&actions, 1, 2);
      pid_t child = 0;
      const int failed =
          posix_spawn(&child, words[0].c_str(), &actions, nullptr, arguments, variables.data());
      posix_spawn_file_actions_destroy(&actions);
      CHECK_EQ(failed, 0);
      children_.push_back(child);
    }
  }

  int status_of(int rank) {
    int status = -1;
    const pid_t child = children_[static_cast<size_t>(rank)];
    CHECK_EQ(waitpid(child, &status, 0), child);
    return status;
  }

  std::string text_of(int rank) const {
    std::ostringstream text;
    text << std::ifstream(output(rank)).rdbuf();
    return text.str();
  }

 private:
  std::string output(int rank) const { return folder_ + "/output" + std::to_string(rank); }

  int ranks_;
  std::string folder_;
  std::vector<pid_t> children_;
};

TEST(gpu_ranks_as_processes_reduce_gradients) {
  Job job(3);
  job.start("");
  for (int rank = 0; rank < 3; ++rank) {
    const int status = job.status_of(rank);
    if (status != 0) throw test::CheckFailure(__FILE__, __LINE__, job.text_of(rank));
  }
}

// Killed in the call of NCCL of its second step.
TEST(gpu_rank_that_is_killed_is_named_on_the_others) {
  Job job(3);
  job.start("ncclAllReduce[1]@4=die");
  CHECK(WIFSIGNALED(job.status_of(1)));
  for (const int rank : {0, 2}) {
    const int status = job.status_of(rank);
    const std::string text = job.text_of(rank);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 3 ||
        text.find("rank " + std::to_string(rank) + " cannot go on: rank 1 (pid ") ==
            std::string::npos) {
      throw test::CheckFailure(__FILE__, __LINE__, text);
    }
  }
}

}  // namespace
}  // namespace hvd
