// What csrc/gpu/kernels.cu needs of CUDA, for the host's compiler: the very source that NVRTC gets
// becomes ordinary functions. To be included right before it, by one source file.
//
// Blocks run one after the other. The threads of a block are real ones that meet at a barrier, so
// that ThreadSanitizer sees a missing __syncthreads(); a block of one thread runs in the caller.
#pragma once

#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <mutex>

namespace hvd::test {

// No std::barrier in C++17.
class BlockBarrier {
 public:
  explicit BlockBarrier(unsigned threads) : threads_(threads) {}

  void wait() {
    if (threads_ == 1) return;
    std::unique_lock<std::mutex> lock(mutex_);
    const unsigned turn = turn_;
    if (++waiting_ == threads_) {
      waiting_ = 0;
      ++turn_;
      changed_.notify_all();
      return;
    }
    changed_.wait(lock, [&] { return turn_ != turn; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  const unsigned threads_;
  unsigned waiting_ = 0;
  unsigned turn_ = 0;
};

struct Index {
  unsigned x = 0;
};

}  // namespace hvd::test

// CUDA's names, all of them.

static thread_local hvd::test::Index threadIdx, blockIdx, blockDim, gridDim;
static thread_local hvd::test::BlockBarrier* hvd_block_barrier = nullptr;

#define __device__
#define __shared__ static  // one block at a time

static inline void __syncthreads() { hvd_block_barrier->wait(); }

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

static inline unsigned __float_as_uint(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}
static inline float __uint_as_float(unsigned bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}
static inline long long __double_as_longlong(double x) {
  long long bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}
static inline double __longlong_as_double(long long bits) {
  double x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}
static inline float __fmaf_rn(float x, float y, float z) { return std::fma(x, y, z); }
static inline double __fma_rn(double x, double y, double z) { return std::fma(x, y, z); }
