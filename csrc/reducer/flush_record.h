#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace hvd {

// Numbers of the front's own that travel with a record.
using Notes = std::array<uint64_t, 2>;

// What a rank tells the others at the end of a backward.
struct FlushRecord {
  enum : uint32_t {
    kFailed = 1,    // an exception ended the backward; `text` says which
    kMore = 2,      // some parameter fired again after its bucket had left: an extra round follows
    kExtra = 4,     // this is the extra round
    kAtGate = 8,    // sent by an optimizer step, not by a backward
    kAdopts = 16,   // the optimizer has parameters that are new to the reducer
    kSparse = 32,   // this rank has sparse gradients, which the front reduces after the round
    kChanged = 64,  // parameters were replaced or converted: the front has to agree on them
  };
  uint32_t flags = 0;
  uint64_t round = 0;        // number of the flush
  uint64_t step = 0;         // optimizer steps seen so far
  uint64_t step_digest = 0;  // which optimizers made them, in which order
  uint32_t optimizer = 0;    // the one that made the last of them; 0 = none
  uint32_t parameters = 0;
  double weight = 1;               // of this rank in the mean
  double scale = 0;                // of its gradients; 0 = it has none of its own
  Notes notes{};                   // what the front tells the other ranks' fronts
  std::vector<bool> present;       // by parameter: this rank has a gradient
  std::vector<bool> posted;        // by bucket: this rank has posted it
  std::vector<uint32_t> arrivals;  // parameters without a bucket, in the order they fired
  std::string text;

  std::string encode() const;
  // Throws Error(mismatch) when the bytes are not a record.
  static FlushRecord decode(const std::string& bytes);
};

}  // namespace hvd
