// The hash. Included by body.h, once for each instruction set; see vector.h for what that forbids.
//
// Eight lanes of 64 bits read a block of 64 bytes at a time. Each lane keeps two sums: of its
// words, so that a change of a single word always shows, and of products of the halves of its words
// with a key that changes from block to block, so that their order shows. Every sixteen blocks the
// sums are stirred by a function that can be undone, so that no later word makes up for an earlier
// one by plain arithmetic. What remains is bound by memory, not by arithmetic.
#pragma once

#include "kernels/vector.h"

namespace hvd {
namespace {

constexpr size_t kHashBlock = 64;
constexpr size_t kHashStir = 16;  // blocks
constexpr int kHashVectors = static_cast<int>(kHashBlock) / kVectorBytes;

// Odd numbers without a pattern: digits of the golden ratio, of e and of the square root of 2.
constexpr uint64_t kHashStep = 0x9e3779b97f4a7c15u;
constexpr uint64_t kHashStirring = 0xadf85458a2bb4a9bu;
constexpr uint64_t kHashEnd = 0x6a09e667f3bcc909u;

// The product of the lower and the upper half of each word.
HVD_INLINE LongWords multiply_halves(LongWords words) {
#if defined(__AVX512F__)
  return reinterpret_cast<LongWords>(
      _mm512_mul_epu32(reinterpret_cast<__m512i>(words), reinterpret_cast<__m512i>(words >> 32)));
#elif defined(__AVX2__)
  return reinterpret_cast<LongWords>(
      _mm256_mul_epu32(reinterpret_cast<__m256i>(words), reinterpret_cast<__m256i>(words >> 32)));
#elif defined(__x86_64__)
  return reinterpret_cast<LongWords>(
      _mm_mul_epu32(reinterpret_cast<__m128i>(words), reinterpret_cast<__m128i>(words >> 32)));
#else
  return (words & 0xffffffffu) * (words >> 32);
#endif
}

struct HashState {
  LongWords sums[kHashVectors];
  LongWords products[kHashVectors];
  LongWords keys[kHashVectors];
};

HVD_INLINE void hash_block(HashState* state, const char* block) {
  for (int i = 0; i < kHashVectors; ++i) {
    const LongWords words = load<LongWords>(block + i * kVectorBytes);
    state->sums[i] += words;
    state->products[i] += multiply_halves(words ^ state->keys[i]);
    state->keys[i] += kHashStep;
  }
}

HVD_INLINE void stir(HashState* state) {
  for (int i = 0; i < kHashVectors; ++i) {
    state->sums[i] = (state->sums[i] ^ (state->sums[i] >> 29)) * kHashStirring;
    state->products[i] = (state->products[i] ^ (state->products[i] >> 29)) * kHashStirring;
  }
}

HVD_INLINE uint64_t end_mix(uint64_t hash, uint64_t word) {
  hash = (hash ^ word) * kHashEnd;
  return hash ^ (hash >> 32);
}

uint64_t hash_kernel(const void* memory, size_t bytes) {
  const char* from = static_cast<const char*>(memory);
  uint64_t keys[8];
  for (uint64_t lane = 0; lane < 8; ++lane) keys[lane] = (lane + 1) * kHashEnd;
  HashState state{};
  __builtin_memcpy(state.keys, keys, sizeof(keys));
  size_t blocks = bytes / kHashBlock;
  for (; blocks >= kHashStir; blocks -= kHashStir) {
    for (size_t i = 0; i < kHashStir; ++i, from += kHashBlock) hash_block(&state, from);
    stir(&state);
  }
  for (; blocks > 0; --blocks, from += kHashBlock) hash_block(&state, from);
  if (bytes % kHashBlock != 0) {
    char tail[kHashBlock] = {};
    __builtin_memcpy(tail, from, bytes % kHashBlock);
    hash_block(&state, tail);
  }
  uint64_t sums[8];
  uint64_t products[8];
  __builtin_memcpy(sums, state.sums, sizeof(sums));
  __builtin_memcpy(products, state.products, sizeof(products));
  // The length counts: zeros at the end are not nothing.
  uint64_t hash = end_mix(kHashStep, bytes);
  for (int lane = 0; lane < 8; ++lane) {
    hash = end_mix(hash, sums[lane]);
    hash = end_mix(hash, products[lane]);
  }
  return hash;
}

}  // namespace
}  // namespace hvd
