// An NVRTC that compiles nothing and counts what it is asked; a folder that goes away.
#pragma once

#include <stdlib.h>

#include <atomic>
#include <filesystem>
#include <string>
#include <vector>

#include "gpu/nvrtc_api.h"

namespace hvd::test {

class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "hvd-test-XXXXXX").string();
    path_ = mkdtemp(pattern.data());
  }
  ~TemporaryFolder() { std::filesystem::remove_all(path_); }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

class FakeNvrtc final : public NvrtcApi {
 public:
  std::vector<int> architectures = {70, 80, 90};
  int major = 12;
  int minor = 9;
  Result compile_result = 0;
  std::string log;
  mutable std::atomic<int> compilations{0};
  mutable std::atomic<int> programs{0};  // that live

  std::string describe() const override { return "a fake NVRTC"; }
  std::string error_string(Result result) const override {
    return "FAKE_ERROR_" + std::to_string(result);
  }
  Result version(int* major_out, int* minor_out) const override {
    *major_out = major;
    *minor_out = minor;
    return 0;
  }
  Result supported_architectures(std::vector<int>* out) const override {
    *out = architectures;
    return 0;
  }
  Result create_program(const std::vector<SourceFile>&, Program* program) const override {
    ++programs;
    *program = new std::string;
    return 0;
  }
  Result destroy_program(Program program) const override {
    --programs;
    delete static_cast<std::string*>(program);
    return 0;
  }
  Result compile_program(Program program, const std::vector<std::string>& options) const override {
    ++compilations;
    for (const std::string& option : options) *static_cast<std::string*>(program) += option;
    return compile_result;
  }
  Result program_log(Program, std::string* out) const override {
    *out = log;
    return 0;
  }
  // As large as the real one.
  Result cubin(Program program, std::string* image) const override {
    *image = "cubin " + *static_cast<std::string*>(program) + std::string(400000, 'x');
    return 0;
  }
  Result ptx(Program program, std::string* image) const override {
    *image = "ptx " + *static_cast<std::string*>(program);
    return 0;
  }
};

}  // namespace hvd::test
