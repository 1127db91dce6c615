// The table of NVRTC's functions, what the kernels are compiled for, and the kernels compiled by
// NVIDIA's own compiler, for which no GPU is needed.

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <regex>
#include <sstream>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "check.h"
#include "fake_nvrtc.h"
#include "gpu/kernel_compiler.h"
#include "gpu/kernel_source.h"
#include "gpu/nvrtc_api.h"
#include "host_kernels.h"

#if __has_include(<nvrtc.h>)
#include <nvrtc.h>
#define HVD_HAS_NVRTC_HEADER 1
#else
#define HVD_HAS_NVRTC_HEADER 0
#endif

namespace hvd {
namespace {

#if HVD_HAS_NVRTC_HEADER

// Whether a function of type Theirs can be called as one of type Ours: the same types, with int for
// an enumeration and void* for an opaque pointer.
template <class Ours, class Theirs>
constexpr bool is_same_to_the_machine() {
  if constexpr (std::is_same_v<Ours, Theirs>) {
    return true;
  } else if constexpr (std::is_enum_v<Theirs>) {
    return std::is_same_v<Ours, int> && sizeof(Theirs) == sizeof(int);
  } else if constexpr (std::is_pointer_v<Ours> && std::is_pointer_v<Theirs>) {
    using Target = std::remove_pointer_t<Ours>;
    return std::is_void_v<Target> ||
           is_same_to_the_machine<Target, std::remove_pointer_t<Theirs>>();
  } else {
    return false;
  }
}
template <class Ours, class Theirs>
struct SameSignature : std::false_type {};
template <class R, class... A, class S, class... B>
struct SameSignature<R (*)(A...), S(B...)> {
  static constexpr bool all() {
    if constexpr (sizeof...(A) != sizeof...(B)) {
      return false;
    } else {
      return is_same_to_the_machine<R, S>() && (is_same_to_the_machine<A, B>() && ...);
    }
  }
  static constexpr bool value = all();
};
#define SAME_AS_IN_THE_HEADER(member, function)                                             \
  static_assert(SameSignature<decltype(NvrtcFunctions::member), decltype(function)>::value, \
                #function " has another type in NVIDIA's header")
SAME_AS_IN_THE_HEADER(get_error_string, nvrtcGetErrorString);
SAME_AS_IN_THE_HEADER(version, nvrtcVersion);
SAME_AS_IN_THE_HEADER(get_num_supported_archs, nvrtcGetNumSupportedArchs);
SAME_AS_IN_THE_HEADER(get_supported_archs, nvrtcGetSupportedArchs);
SAME_AS_IN_THE_HEADER(create_program, nvrtcCreateProgram);
SAME_AS_IN_THE_HEADER(destroy_program, nvrtcDestroyProgram);
SAME_AS_IN_THE_HEADER(compile_program, nvrtcCompileProgram);
SAME_AS_IN_THE_HEADER(get_program_log_size, nvrtcGetProgramLogSize);
SAME_AS_IN_THE_HEADER(get_program_log, nvrtcGetProgramLog);
SAME_AS_IN_THE_HEADER(get_cubin_size, nvrtcGetCUBINSize);
SAME_AS_IN_THE_HEADER(get_cubin, nvrtcGetCUBIN);
SAME_AS_IN_THE_HEADER(get_ptx_size, nvrtcGetPTXSize);
SAME_AS_IN_THE_HEADER(get_ptx, nvrtcGetPTX);
static_assert(NVRTC_SUCCESS == 0);
static_assert(!SameSignature<int (*)(int*), decltype(nvrtcVersion)>::value);
static_assert(!SameSignature<int (*)(int*, long*), decltype(nvrtcVersion)>::value);
static_assert(!SameSignature<long (*)(int*, int*), decltype(nvrtcVersion)>::value);

#endif

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(nvrtc_types_are_those_of_the_header) {
  if (!HVD_HAS_NVRTC_HEADER) throw test::Skipped("no nvrtc.h: pip install nvidia-cuda-nvrtc-cu12");
}

TEST(nvrtc_that_lacks_a_function_is_named) {
  LibraryRequest request = nvrtc_library(12, {});
  request.file = std::string(HVD_FAKES_DIR) + "/third/libhvd_third_probe.so.1";
  const std::string text = CHECK_THROWS(open_nvrtc(request), ErrorKind::error).what();
  CHECK(contains(text, "libhvd_third_probe.so.1"));
  CHECK(contains(text, "nvrtcVersion"));
  CHECK(contains(text, "CUDA 11.2"));
}

TEST(nvrtc_is_asked_for_by_the_cuda_version_of_torch) {
  CHECK(nvrtc_library(13, {}).names == std::vector<std::string>{"libnvrtc.so.13"});
  CHECK(nvrtc_library(12, {}).names == std::vector<std::string>{"libnvrtc.so.12"});
  CHECK(nvrtc_library(11, {}).names == std::vector<std::string>{"libnvrtc.so.11.2"});
  CHECK(nvrtc_library(14, {}).names == std::vector<std::string>{"libnvrtc.so.14"});
  CHECK_EQ(nvrtc_library(0, {}).names.size(), size_t{3});
}

TEST(nvrtc_target_of_a_device) {
  test::FakeNvrtc nvrtc;
  nvrtc.architectures = {75, 80, 86, 90, 100};
  CHECK_EQ(choose_target(80, nvrtc).name, std::string("sm_80"));
  CHECK_EQ(choose_target(80, nvrtc).cubin, true);
  // Newer than the library: text that the driver compiles.
  CHECK_EQ(choose_target(89, nvrtc).name, std::string("compute_86"));
  CHECK_EQ(choose_target(89, nvrtc).cubin, false);
  CHECK_EQ(choose_target(120, nvrtc).name, std::string("compute_100"));
  const std::string text = CHECK_THROWS(choose_target(70, nvrtc), ErrorKind::error).what();
  CHECK(contains(text, "sm_70") && contains(text, "sm_75") && contains(text, "a fake NVRTC"));
}

TEST(nvrtc_gets_the_source_as_it_is) {
  CHECK_EQ(std::string(kernel_source()[0].name), std::string("gpu/kernels.cu"));
  for (const SourceFile& file : kernel_source()) {
    std::ifstream stream(std::string(HVD_SOURCE_FOLDER) + "/csrc/" + file.name);
    std::stringstream text;
    text << stream.rdbuf();
    CHECK(stream.good());
    CHECK(text.str() == file.text);
  }
}

// ---- NVIDIA's own compiler
// -----------------------------------------------------------------------

std::vector<std::string> nvrtc_libraries() {
  std::vector<std::string> libraries;
  std::stringstream list(HVD_NVRTC_LIBRARIES);
  for (std::string file; std::getline(list, file, ':');) libraries.push_back(file);
  return libraries;
}

std::unique_ptr<NvrtcApi> load(const std::string& library) {
  LibraryRequest request = nvrtc_library(0, {});
  request.file = library;
  return open_nvrtc(request);
}

// All but that sm_70 is old.
std::string warnings_in(const std::string& log) {
  std::string warnings;
  std::stringstream lines(log);
  for (std::string line; std::getline(lines, line);) {
    if (contains(line, "warning") && !contains(line, "are deprecated")) warnings += line + "\n";
  }
  return warnings;
}

struct Usage {
  int registers = 0;
  int stack_bytes = 0;
  int spilled_bytes = 0;
};

// What the assembler tells of each kernel.
std::map<std::string, Usage> usage_from(const std::string& log) {
  std::map<std::string, Usage> usage;
  Usage* kernel = nullptr;
  std::stringstream lines(log);
  std::smatch match;
  static const std::regex entry("entry function '(\\w+)'");
  static const std::regex memory(
      "(\\d+) bytes stack frame, (\\d+) bytes spill stores, (\\d+) bytes spill loads");
  static const std::regex registers("Used (\\d+) registers");
  for (std::string line; std::getline(lines, line);) {
    if (std::regex_search(line, match, entry)) kernel = &usage[match[1]];
    if (kernel == nullptr) continue;
    if (std::regex_search(line, match, memory)) {
      kernel->stack_bytes = std::stoi(match[1]);
      kernel->spilled_bytes = std::stoi(match[2]) + std::stoi(match[3]);
    }
    if (std::regex_search(line, match, registers)) kernel->registers = std::stoi(match[1]);
  }
  return usage;
}

// Compiles for one architecture, checks the result, and returns the most registers of a kernel.
int check_compiled(const NvrtcApi& nvrtc, int architecture) {
  const KernelTarget target = choose_target(architecture, nvrtc);
  CHECK(target.cubin);
  std::vector<std::string> options = kernel_options(target);
  options.emplace_back("--ptxas-options=--verbose");
  NvrtcApi::Program program = nullptr;
  CHECK_EQ(nvrtc.create_program(kernel_source(), &program), 0);
  const NvrtcApi::Result result = nvrtc.compile_program(program, options);
  std::string log, image, ptx;
  CHECK_EQ(nvrtc.program_log(program, &log), 0);
  if (result != 0) throw test::CheckFailure(__FILE__, __LINE__, target.name + ": " + log);
  CHECK_EQ(warnings_in(log), std::string());
  CHECK_EQ(nvrtc.cubin(program, &image), 0);
  CHECK_EQ(nvrtc.ptx(program, &ptx), 0);
  nvrtc.destroy_program(program);

  CHECK_EQ(image.substr(0, 4), std::string("\x7f"
                                           "ELF"));
  // Vector access; nothing that would need another than the plain way to launch.
  CHECK(contains(ptx, "ld.v4.") || contains(ptx, "ld.global.v4."));
  CHECK(contains(ptx, "st.v4.") || contains(ptx, "st.global.v4."));
  CHECK(!contains(ptx, "\tatom.") && !contains(ptx, "\tred.") && !contains(ptx, ".cluster"));

  const std::map<std::string, Usage> usage = usage_from(log);
  int most = 0;
  for (const test::HostKernel& kernel : test::host_kernels()) {
    const auto found = usage.find(kernel.name);
    if (found == usage.end()) {
      throw test::CheckFailure(__FILE__, __LINE__, target.name + ": no kernel " + kernel.name);
    }
    CHECK_EQ(found->second.stack_bytes, 0);
    CHECK_EQ(found->second.spilled_bytes, 0);
    CHECK(found->second.registers > 0);
    most = std::max(most, found->second.registers);
  }
  CHECK_EQ(usage.size(), test::host_kernels().size());
  // Four blocks of 256 threads then have room on a multiprocessor, of every architecture.
  CHECK(most <= 64);
  return most;
}

TEST(nvrtc_compiles_the_kernels_for_every_architecture) {
  const std::vector<std::string> libraries = nvrtc_libraries();
  if (libraries.empty()) {
    throw test::Skipped("no NVRTC is installed: pip install nvidia-cuda-nvrtc-cu12");
  }
  const std::vector<int> wanted = {70, 80, 86, 90, 100, 120};
  std::map<int, bool> compiled;
  std::printf("\n");
  for (const std::string& library : libraries) {
    const std::unique_ptr<NvrtcApi> nvrtc = load(library);
    std::vector<int> supported;
    CHECK_EQ(nvrtc->supported_architectures(&supported), 0);
    std::vector<int> here;
    for (const int architecture : wanted) {
      if (std::count(supported.begin(), supported.end(), architecture) != 0) {
        here.push_back(architecture);
      }
    }
    std::atomic<size_t> next{0};
    std::mutex mutex;
    std::map<int, int> registers;
    test::run_ranks(
        2,
        [&](int) {
          for (size_t i = next++; i < here.size(); i = next++) {
            const int most = check_compiled(*nvrtc, here[i]);
            const std::lock_guard<std::mutex> lock(mutex);
            registers[here[i]] = most;
          }
        },
        300);
    for (const auto& [architecture, most] : registers) {
      compiled[architecture] = true;
      std::printf("    %s: sm_%d, at most %d registers\n", nvrtc->describe().c_str(), architecture,
                  most);
    }
  }
  std::string lacking;
  for (const int architecture : wanted) {
    if (!compiled[architecture]) lacking += " sm_" + std::to_string(architecture);
  }
  if (!lacking.empty()) throw test::Skipped("no installed NVRTC knows" + lacking);
}

TEST(nvrtc_of_the_machine_through_the_cache) {
  const std::vector<std::string> libraries = nvrtc_libraries();
  if (libraries.empty()) {
    throw test::Skipped("no NVRTC is installed: pip install nvidia-cuda-nvrtc-cu12");
  }
  const std::unique_ptr<NvrtcApi> nvrtc = load(libraries[0]);
  CHECK(contains(nvrtc->describe(), libraries[0]));
  const test::TemporaryFolder folder;
  // Between the architectures that are known: PTX.
  std::vector<int> supported;
  CHECK_EQ(nvrtc->supported_architectures(&supported), 0);
  const int unknown = supported.back() + 1;
  const KernelCache cache(folder.path());
  const CompiledKernels first = compile_kernels(*nvrtc, unknown, cache);
  CHECK_EQ(first.target, "compute_" + std::to_string(supported.back()));
  CHECK(contains(first.image, ".visible .entry hvd_pack_f32_f32"));
  CHECK_EQ(first.image.back(), '\0');
  CHECK_EQ(first.from_cache, false);
  CHECK_EQ(first.cache_problem, std::string());
  const CompiledKernels second = compile_kernels(*nvrtc, unknown, cache);
  CHECK(second.from_cache);
  CHECK(second.image == first.image);
}

}  // namespace
}  // namespace hvd
