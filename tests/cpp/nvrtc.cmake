# Where the tests find NVIDIA's own NVRTC: in the packages of the Python that is on the PATH, if
# they are installed there. HVD_NVRTC_LIBRARIES can name others (a list of files).

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
set_source_files_properties(tests/cpp/nvrtc_test.cpp PROPERTIES
  INCLUDE_DIRECTORIES "${hvd_nvrtc_include}"
  COMPILE_DEFINITIONS
    "HVD_NVRTC_LIBRARIES=\"${hvd_nvrtc_files}\";HVD_SOURCE_FOLDER=\"${CMAKE_CURRENT_SOURCE_DIR}\"")
