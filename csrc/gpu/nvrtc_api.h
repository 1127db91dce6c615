#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "gpu/shared_library.h"

namespace hvd {

// NVRTC's functions as they are in the library, with its opaque types as void* and its enumeration
// as int. nvrtc_test.cpp holds them against NVIDIA's header.
struct NvrtcFunctions {
  using Program = void*;
  const char* (*get_error_string)(int result);
  int (*version)(int* major, int* minor);
  int (*get_num_supported_archs)(int* count);
  int (*get_supported_archs)(int* architectures);
  int (*create_program)(Program* program, const char* source, const char* name, int header_count,
                        const char* const* headers, const char* const* include_names);
  int (*destroy_program)(Program* program);
  int (*compile_program)(Program program, int option_count, const char* const* options);
  int (*get_program_log_size)(Program program, size_t* bytes);
  int (*get_program_log)(Program program, char* log);
  int (*get_cubin_size)(Program program, size_t* bytes);
  int (*get_cubin)(Program program, char* cubin);
  int (*get_ptx_size)(Program program, size_t* bytes);
  int (*get_ptx)(Program program, char* ptx);
};

// A file of source text. The first one is compiled, the others can be included by their names.
struct SourceFile {
  const char* name;
  const char* text;
};

// The part of NVRTC, the compiler for CUDA C++, that we use. Results are NVRTC's: 0 is success,
// error_string tells the others. Programs of several threads do not disturb each other.
class NvrtcApi {
 public:
  using Result = int;
  using Program = void*;

  virtual ~NvrtcApi() = default;

  // The library with its version and file, for messages.
  virtual std::string describe() const = 0;

  virtual std::string error_string(Result result) const = 0;
  [[nodiscard]] virtual Result version(int* major, int* minor) const = 0;
  // 90 for sm_90, ascending.
  [[nodiscard]] virtual Result supported_architectures(std::vector<int>* architectures) const = 0;
  [[nodiscard]] virtual Result create_program(const std::vector<SourceFile>& files,
                                              Program* program) const = 0;
  virtual Result destroy_program(Program program) const = 0;
  [[nodiscard]] virtual Result compile_program(Program program,
                                               const std::vector<std::string>& options) const = 0;
  [[nodiscard]] virtual Result program_log(Program program, std::string* log) const = 0;
  // Machine code, if the options name a real architecture (sm_90).
  [[nodiscard]] virtual Result cubin(Program program, std::string* image) const = 0;
  // Text that the driver compiles; ends with a zero byte, as the driver wants it.
  [[nodiscard]] virtual Result ptx(Program program, std::string* image) const = 0;
};

// Where NVRTC is looked for when torch is built for this major version of CUDA; 0: any. NVRTC may
// not be newer than the driver's major version, and torch's is not.
LibraryRequest nvrtc_library(int cuda_major, std::vector<std::string> folders);

// Opens the library and looks all functions up. Throws Error if it is not there, or older than
// CUDA 11.2.
std::unique_ptr<NvrtcApi> open_nvrtc(const LibraryRequest& request);

}  // namespace hvd
