// What a test tells the fake libcuda.so.1, and asks it, beyond the driver's own functions. Found
// with dlsym. See fake_cuda.cpp for what the fake does.
#pragma once

#include <cstddef>

extern "C" {

struct HvdFakeLaunch {
  unsigned int grid[3];
  unsigned int block[3];
  unsigned int shared_bytes;
};

// A kernel that runs on the host. `parameters` has the address of a copy of each parameter, as
// cuLaunchKernel takes them; the driver knows their sizes from the module, the fake from here.
struct HvdFakeKernel {
  const char* name;
  void (*run)(const HvdFakeLaunch* launch, void* const* parameters);
  unsigned int parameter_count;
  const size_t* parameter_sizes;
};

#define HVD_FAKE_MODULE_MAGIC "hvd-fake-module"

// A module is a table of such kernels. cuModuleLoadData takes the address of one for an image. Any
// other image (what a compiler made, for a GPU) is taken for the table that was given to
// hvd_fake_cuda_set_kernels, or else the table `hvd_fake_kernels` of the library that the
// environment variable HVD_FAKE_CUDA_KERNELS names: so code that compiles its kernels runs
// unchanged.
struct HvdFakeModule {
  char magic[16];
  unsigned int kernel_count;
  const HvdFakeKernel* kernels;
};

void hvd_fake_cuda_set_kernels(const HvdFakeModule* module);

// See faults.h; the bracket is the device. Null or empty: no faults.
void hvd_fake_cuda_set_faults(const char* faults);
// Operations that hang go on.
void hvd_fake_cuda_release_hung();
// Memory that torch, say, would have got from the driver: memory of this device from now on, or
// with 0 bytes no longer.
void hvd_fake_cuda_adopt(void* pointer, size_t bytes, int device);

// How many there are: "contexts", "streams", "events", "allocations", "modules"; "context 1":
// whether device 1 has one; "cuEventRecord": calls of that function since the last set_faults. -1:
// no such.
long hvd_fake_cuda_count(const char* what);
}
