#include "gpu/kernel_compiler.h"

#include <cstring>

#include "base/error.h"
#include "gpu/kernel_source.h"
#include "kernels/hash.h"

namespace hvd {
namespace {

[[noreturn]] void fail(const NvrtcApi& nvrtc, const std::string& action, NvrtcApi::Result result,
                       const std::string& log) {
  std::string message =
      nvrtc.describe() + " cannot " + action + ": " + nvrtc.error_string(result) + ".";
  if (!log.empty()) message += " It says:\n" + log;
  throw Error(ErrorKind::error, message);
}

// Destroys the program at the end of the scope.
class Program {
 public:
  explicit Program(const NvrtcApi& nvrtc) : nvrtc_(nvrtc) {
    const NvrtcApi::Result result = nvrtc.create_program(kernel_source(), &handle_);
    if (result != 0) fail(nvrtc, "take the source of the kernels", result, "");
  }
  ~Program() { nvrtc_.destroy_program(handle_); }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  NvrtcApi::Program get() const { return handle_; }

 private:
  const NvrtcApi& nvrtc_;
  NvrtcApi::Program handle_ = nullptr;
};

std::string describe_inputs(const NvrtcApi& nvrtc, const std::vector<std::string>& options) {
  int major = 0;
  int minor = 0;
  if (const NvrtcApi::Result result = nvrtc.version(&major, &minor)) {
    fail(nvrtc, "tell its version", result, "");
  }
  std::string key = "NVRTC " + std::to_string(major) + "." + std::to_string(minor) + "\n";
  for (const std::string& option : options) key += option + "\n";
  for (const SourceFile& file : kernel_source()) {
    const size_t bytes = std::strlen(file.text);
    key += std::string(file.name) + " " + std::to_string(bytes) + " " +
           std::to_string(hash_memory(file.text, bytes)) + "\n";
  }
  return key;
}

}  // namespace

KernelTarget choose_target(int architecture, const NvrtcApi& nvrtc) {
  std::vector<int> supported;
  if (const NvrtcApi::Result result = nvrtc.supported_architectures(&supported)) {
    fail(nvrtc, "tell which devices it knows", result, "");
  }
  int best = 0;
  for (const int known : supported) {
    if (known <= architecture && known > best) best = known;
  }
  if (best == 0) {
    throw Error(ErrorKind::error, nvrtc.describe() + " has no code for this GPU (sm_" +
                                      std::to_string(architecture) +
                                      "): the oldest it knows is sm_" +
                                      std::to_string(supported.empty() ? 0 : supported.front()) +
                                      ". Use a torch that is built for an older CUDA.");
  }
  if (best == architecture) return {"sm_" + std::to_string(best), true};
  return {"compute_" + std::to_string(best), false};
}

std::vector<std::string> kernel_options(const KernelTarget& target) {
  // Without products that are fused unasked every architecture comes to the same bits.
  return {"--gpu-architecture=" + target.name, "--std=c++17", "--fmad=false"};
}

CompiledKernels compile_kernels(const NvrtcApi& nvrtc, int architecture, const KernelCache& cache) {
  const KernelTarget target = choose_target(architecture, nvrtc);
  const std::vector<std::string> options = kernel_options(target);
  const std::string key = describe_inputs(nvrtc, options);
  CompiledKernels result;
  result.target = target.name;
  if (auto image = cache.find(key)) {
    result.image = std::move(*image);
    result.from_cache = true;
    return result;
  }
  const Program program(nvrtc);
  const NvrtcApi::Result compiled = nvrtc.compile_program(program.get(), options);
  // Of a log that cannot be had nothing is said: the result is what counts.
  static_cast<void>(nvrtc.program_log(program.get(), &result.log));
  if (compiled != 0) fail(nvrtc, "compile the kernels for " + target.name, compiled, result.log);
  const NvrtcApi::Result taken = target.cubin ? nvrtc.cubin(program.get(), &result.image)
                                              : nvrtc.ptx(program.get(), &result.image);
  if (taken != 0) fail(nvrtc, "hand out the kernels for " + target.name, taken, result.log);
  result.cache_problem = cache.store(key, result.image);
  return result;
}

}  // namespace hvd
