#include "gpu/nvrtc_api.h"

#include <utility>

#include "base/error.h"

namespace hvd {
namespace {

constexpr const char* kNeeded = "CUDA 11.2";

class LoadedNvrtc final : public NvrtcApi {
 public:
  explicit LoadedNvrtc(SharedLibrary library) : library_(std::move(library)) {
    library_.require("nvrtcVersion", kNeeded, &functions_.version);
    int major = 0;
    int minor = 0;
    if (functions_.version(&major, &minor) == 0) {
      library_.set_version(std::to_string(major) + "." + std::to_string(minor));
    }
    library_.require("nvrtcGetErrorString", kNeeded, &functions_.get_error_string);
    library_.require("nvrtcGetNumSupportedArchs", kNeeded, &functions_.get_num_supported_archs);
    library_.require("nvrtcGetSupportedArchs", kNeeded, &functions_.get_supported_archs);
    library_.require("nvrtcCreateProgram", kNeeded, &functions_.create_program);
    library_.require("nvrtcDestroyProgram", kNeeded, &functions_.destroy_program);
    library_.require("nvrtcCompileProgram", kNeeded, &functions_.compile_program);
    library_.require("nvrtcGetProgramLogSize", kNeeded, &functions_.get_program_log_size);
    library_.require("nvrtcGetProgramLog", kNeeded, &functions_.get_program_log);
    library_.require("nvrtcGetCUBINSize", kNeeded, &functions_.get_cubin_size);
    library_.require("nvrtcGetCUBIN", kNeeded, &functions_.get_cubin);
    library_.require("nvrtcGetPTXSize", kNeeded, &functions_.get_ptx_size);
    library_.require("nvrtcGetPTX", kNeeded, &functions_.get_ptx);
  }

  std::string describe() const override { return library_.describe(); }

  std::string error_string(Result result) const override {
    return functions_.get_error_string(result);
  }

  Result version(int* major, int* minor) const override { return functions_.version(major, minor); }

  Result supported_architectures(std::vector<int>* architectures) const override {
    int count = 0;
    if (const Result result = functions_.get_num_supported_archs(&count)) return result;
    architectures->resize(static_cast<size_t>(count));
    return functions_.get_supported_archs(architectures->data());
  }

  Result create_program(const std::vector<SourceFile>& files, Program* program) const override {
    std::vector<const char*> texts;
    std::vector<const char*> names;
    for (size_t i = 1; i < files.size(); ++i) {
      texts.push_back(files[i].text);
      names.push_back(files[i].name);
    }
    return functions_.create_program(program, files[0].text, files[0].name,
                                     static_cast<int>(texts.size()), texts.data(), names.data());
  }

  Result destroy_program(Program program) const override {
    return functions_.destroy_program(&program);
  }

  Result compile_program(Program program, const std::vector<std::string>& options) const override {
    std::vector<const char*> pointers;
    for (const std::string& option : options) pointers.push_back(option.c_str());
    return functions_.compile_program(program, static_cast<int>(pointers.size()), pointers.data());
  }

  Result program_log(Program program, std::string* log) const override {
    const Result result =
        get(functions_.get_program_log_size, functions_.get_program_log, program, log);
    while (!log->empty() && log->back() == '\0') log->pop_back();
    return result;
  }

  Result cubin(Program program, std::string* image) const override {
    return get(functions_.get_cubin_size, functions_.get_cubin, program, image);
  }

  Result ptx(Program program, std::string* image) const override {
    return get(functions_.get_ptx_size, functions_.get_ptx, program, image);
  }

 private:
  static Result get(int (*get_size)(Program, size_t*), int (*get_bytes)(Program, char*),
                    Program program, std::string* bytes) {
    size_t size = 0;
    bytes->clear();
    if (const Result result = get_size(program, &size)) return result;
    bytes->resize(size);
    return get_bytes(program, bytes->data());
  }

  SharedLibrary library_;
  NvrtcFunctions functions_{};
};

}  // namespace

std::unique_ptr<NvrtcApi> open_nvrtc(const LibraryRequest& request) {
  return std::make_unique<LoadedNvrtc>(SharedLibrary::open(request));
}

LibraryRequest nvrtc_library(int cuda_major, std::vector<std::string> folders) {
  LibraryRequest request;
  for (const int major : {13, 12}) {
    if (cuda_major == 0 || cuda_major == major) {
      request.names.push_back("libnvrtc.so." + std::to_string(major));
    }
  }
  // All versions from 11.2 on have the same name.
  if (cuda_major == 0 || cuda_major == 11) request.names.emplace_back("libnvrtc.so.11.2");
  if (request.names.empty()) {
    request.names.push_back("libnvrtc.so." + std::to_string(cuda_major));
  }
  request.folders = std::move(folders);
  request.purpose = "NVRTC, which compiles the kernels for the GPU";
  request.remedy = cuda_major == 12
                       ? "install it with: pip install nvidia-cuda-nvrtc-cu12"
                       : "install it with: pip install nvidia-cuda-nvrtc (CUDA 13) or "
                         "nvidia-cuda-nvrtc-cu12 (CUDA 12), whichever your torch is built for";
  return request;
}

}  // namespace hvd
