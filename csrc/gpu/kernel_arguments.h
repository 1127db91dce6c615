// What the CUDA kernels read and write. The host compiler and NVRTC read this file alike, so it
// includes nothing and uses only types that have one size on both sides; static_asserts hold that.
#pragma once

namespace hvd::gpu {

// Threads of a block, in every kernel.
constexpr unsigned kBlockThreads = 256;
// Elements that a thread takes at once: at least 16 bytes of the narrowest type.
constexpr unsigned kUnit = 8;
// Most elements of a chunk, a multiple of kUnit: each thread takes four units of it.
constexpr unsigned kChunkElements = 4 * kUnit * kBlockThreads;
// Threads that add up the chunks of one segment.
constexpr unsigned kSegmentThreads = 32;
// Elements of the bucket in which a rank's weight travels, at most.
constexpr unsigned kWeightDigits = 4;

// One gradient, in this step. Uploaded whenever pointers change.
struct alignas(16) Segment {
  // Aligned as its elements are. Null: this rank gives nothing (zero) and takes nothing back.
  void* memory;
  // What pack multiplies it by; with 0 the memory is not read.
  double factor;
};

// What one block works on: a part of a segment, and its place in the bucket. A table of these is
// made once per bucket; kernels take chunk after chunk, so that a few large segments and many
// small ones keep all processors busy alike. The chunks of a segment follow each other.
struct alignas(16) Chunk {
  unsigned long long place;   // of its first element, in the bucket
  unsigned long long offset;  // of its first element, in the segment: a multiple of kUnit
  unsigned segment;
  unsigned count;    // elements, at most kChunkElements
  unsigned padding;  // elements of the bucket behind it that pack sets to zero
  unsigned reserved;
};

// Of one chunk, by number.
struct alignas(16) Partial {
  double sum_of_squares;
  unsigned not_finite;  // 0 or 1
  unsigned reserved;
};

// Of one segment, by number.
struct alignas(16) SegmentResult {
  double sum_of_squares;  // of the rounded values that were stored
  unsigned finite;        // 0 once a NaN or an infinity was stored
  // Ranks that gave something; 0: none did. From 256 ranks on a bfloat16 bucket counts roughly.
  float used;
};

// Behind the gradients, the bucket carries what the ranks have to tell each other: first the ranks'
// weights, each in elements of its own, to which the others add zero, so that they arrive as they
// were sent whatever the type of the bucket; then one element per segment, to which each rank that
// gives something adds one.
struct Trailer {
  unsigned long long place;  // of its first element, in the bucket
  unsigned rank;
  unsigned rank_count;  // 0: the bucket has no trailer
  unsigned segment_count;
  unsigned padding;  // elements behind it that pack sets to zero
};

struct PackArguments {
  const Segment* segments;
  const Chunk* chunks;
  unsigned chunk_count;
  unsigned reserved;
  void* bucket;          // aligned to 16 bytes
  const double* factor;  // on the device: times the segments' own factors; null: 1
  Trailer trailer;
  // This rank's weight, from encode_weight for the type of the bucket.
  double weight[kWeightDigits];
};

struct TrailerArguments {
  const void* bucket;
  Trailer trailer;
  double post;
  const float* scale;    // on the device, a loss scale to divide by as well; null: 1
  double* factor;        // receives post / (total weight * scale); a total of 0 counts as 1
  double* total_weight;  // receives the sum of the ranks' weights; null: not wanted
  float* used;           // receives segment_count counts; null: not wanted
};

struct PostArguments {
  const Segment* segments;  // their factors are not looked at
  const Chunk* chunks;
  unsigned chunk_count;
  unsigned reserved;
  const void* bucket;
  const double* factor;  // on the device; null: 1
  double post;           // times that
  Partial* partials;     // receives one per chunk; null: not wanted
};

struct CombineArguments {
  const Partial* partials;
  const unsigned* first_chunks;  // segment_count + 1
  unsigned segment_count;
  unsigned reserved;
  const float* used;  // from the trailer; null: taken as 1
  SegmentResult* results;
};

struct alignas(16) Norm {
  double sum_of_squares;
  // What to multiply by so that the norm is at most max_norm: max_norm / (norm + 1e-6) as in
  // torch, 1 where that is more. A NaN in the gradients makes it one.
  double coefficient;
  float norm;
  float found_inf;  // 1 or 0, as torch.amp.GradScaler has it
  unsigned reserved[2];
};

struct NormArguments {
  const SegmentResult* results;
  const unsigned* members;  // numbers of the segments that count; null: the first ones
  unsigned count;
  unsigned reserved;
  double max_norm;
  Norm* norm;
};

struct RescaleArguments {
  const Segment* segments;  // their factors are not looked at
  const Chunk* chunks;
  unsigned chunk_count;
  unsigned reserved;
  const double* coefficient;  // on the device; from 1 on nothing is touched
};

static_assert(sizeof(void*) == 8, "the kernels are for 64-bit machines");
static_assert(sizeof(Segment) == 16 && sizeof(Chunk) == 32 && sizeof(Partial) == 16, "layout");
static_assert(sizeof(SegmentResult) == 16 && sizeof(Norm) == 32, "layout");
static_assert(sizeof(Trailer) == 24 && sizeof(PackArguments) == 96, "layout");
static_assert(sizeof(TrailerArguments) == 72 && sizeof(PostArguments) == 56, "layout");
static_assert(sizeof(CombineArguments) == 40 && sizeof(NormArguments) == 40, "layout");
static_assert(sizeof(RescaleArguments) == 32, "layout");

}  // namespace hvd::gpu
