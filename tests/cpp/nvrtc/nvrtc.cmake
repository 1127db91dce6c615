# nvrtc_tests: the kernels through NVIDIA's own compiler. A program of its own, because NVRTC crashes
# in one in which hundreds of threads have come and gone, as the other tests' have.
#
# Where it finds NVRTC: in the packages of the Python that is on the PATH, if they are installed
# there. HVD_NVRTC_LIBRARIES can name others (a list of files).

set(HVD_NVRTC_LIBRARIES "" CACHE STRING "Files libnvrtc.so.* that the tests compile with")
set(hvd_nvrtc_include "")
if(NOT HVD_NVRTC_LIBRARIES)
  find_program(HVD_TEST_PYTHON NAMES python3 python)
  if(HVD_TEST_PYTHON)
    execute_process(
      COMMAND "${HVD_TEST_PYTHON}" -c
        "import sys; print(*(path + '/nvidia' for path in sys.path if path), sep=';', end='')"
      OUTPUT_VARIABLE hvd_nvidia_folders ERROR_QUIET)
  endif()
  foreach(folder IN LISTS hvd_nvidia_folders)
    file(GLOB found
      "${folder}/cuda_nvrtc/lib/libnvrtc.so.*" "${folder}/cu1[0-9]/lib/libnvrtc.so.*")
    list(APPEND HVD_NVRTC_LIBRARIES ${found})
  endforeach()
endif()
foreach(library IN LISTS HVD_NVRTC_LIBRARIES)
  get_filename_component(folder "${library}" DIRECTORY)
  if(EXISTS "${folder}/../include/nvrtc.h")
    set(hvd_nvrtc_include "${folder}/../include")
  endif()
endforeach()

# The functions' types are held against the header when the tests are built.
list(JOIN HVD_NVRTC_LIBRARIES ":" hvd_nvrtc_files)
add_executable(nvrtc_tests tests/cpp/main.cpp tests/cpp/nvrtc/nvrtc_test.cpp)
target_include_directories(nvrtc_tests PRIVATE tests/cpp)
target_compile_options(nvrtc_tests PRIVATE -Wall -Wextra)
target_compile_definitions(nvrtc_tests PRIVATE "HVD_FAKES_DIR=\"${CMAKE_BINARY_DIR}/fakes\"")
target_link_libraries(nvrtc_tests PRIVATE hvd_core host_kernels)
add_dependencies(nvrtc_tests probe_third)
set_source_files_properties(tests/cpp/nvrtc/nvrtc_test.cpp PROPERTIES
  INCLUDE_DIRECTORIES "${hvd_nvrtc_include}"
  COMPILE_DEFINITIONS
    "HVD_NVRTC_LIBRARIES=\"${hvd_nvrtc_files}\";HVD_SOURCE_FOLDER=\"${CMAKE_CURRENT_SOURCE_DIR}\"")
