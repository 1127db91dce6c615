# Sources of the kernels, relative to the top of the repository, each with the flags it needs.
# Included by the top-level CMakeLists.txt.

set(HVD_KERNEL_SOURCES
    csrc/kernels/convert.cpp
    csrc/kernels/hash.cpp
    csrc/kernels/portable.cpp
    csrc/kernels/reduce.cpp
    csrc/kernels/rescale.cpp
    csrc/kernels/wire.cpp)

# Without contraction to fused multiply-adds every instruction set gives the same bits.
set(HVD_KERNEL_OPTIONS -O3 -ffp-contract=off)
set_source_files_properties(csrc/kernels/portable.cpp PROPERTIES
    COMPILE_OPTIONS "${HVD_KERNEL_OPTIONS}")

if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  list(APPEND HVD_KERNEL_SOURCES csrc/kernels/avx2.cpp csrc/kernels/avx512.cpp)
  set_source_files_properties(csrc/kernels/avx2.cpp PROPERTIES
      COMPILE_OPTIONS "${HVD_KERNEL_OPTIONS};-mavx2;-mf16c")
  # The intrinsics of GCC 12 and older trip its own warning.
  set(HVD_FALSE_ALARM "$<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>")
  set_source_files_properties(csrc/kernels/avx512.cpp PROPERTIES
      COMPILE_OPTIONS "${HVD_KERNEL_OPTIONS};-mavx2;-mf16c;-mavx512f;-mavx512bw;-mavx512dq;-mavx512vl;${HVD_FALSE_ALARM}")
endif()
