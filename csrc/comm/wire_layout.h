#pragma once

#include <cstdint>

#include "base/dtype.h"

namespace hvd {

// What a staging slot holds where values travel in 16 bits: the rank's values, of which every slice
// is a row of blocks; the reciprocal of each block's scale; and the rank's slice of the result, in
// the type of the work.
//
// The result is not rounded again: two of N shares of 16 bits and one of 32 fill a slot no more
// than N shares of 32 do, and everybody's values are rounded once, in one place.
struct WireLayout {
  // Few enough to stay in the first cache between the look at them and their conversion.
  static constexpr uint64_t kBlock = 8192;  // elements

  // For chunks as large as the slot allows, which has to have so many bytes.
  static uint64_t least_slot_bytes(int ranks) { return 1024 + 8 * static_cast<uint64_t>(ranks); }
  WireLayout(DType wire, DType result, int ranks, uint64_t slot_bytes);

  DType type;
  uint64_t chunk_elements;
  uint64_t blocks;  // of a slice
  // Bytes from the start of the slot; the values come first.
  uint64_t units_offset;
  uint64_t results_offset;
};

}  // namespace hvd
