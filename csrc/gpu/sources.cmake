# The source of the CUDA kernels becomes a part of the library: a wheel has no other files, and
# nothing has to be found at run time. Included by the top-level CMakeLists.txt.

set(HVD_KERNEL_FILES gpu/kernels.cu gpu/kernel_arguments.h gpu/kernel_formats.h)
set(HVD_KERNEL_TEXTS "")
foreach(name IN LISTS HVD_KERNEL_FILES)
  set(path "${CMAKE_CURRENT_SOURCE_DIR}/csrc/${name}")
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${path}")
  file(READ "${path}" text)
  string(FIND "${text}" ")hvd_kernels\"" end)
  if(NOT end EQUAL -1)
    message(FATAL_ERROR "${path} contains the end of the string that it would become.")
  endif()
  string(APPEND HVD_KERNEL_TEXTS "      {\"${name}\", R\"hvd_kernels(${text})hvd_kernels\"},\n")
endforeach()
set(HVD_KERNEL_SOURCE_FILE "${CMAKE_CURRENT_BINARY_DIR}/CMakeFiles/hvd_generated/kernel_source.cpp")
configure_file(csrc/gpu/kernel_source.cpp.in "${HVD_KERNEL_SOURCE_FILE}" @ONLY)
