#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/reduce.h"

namespace hvd {

// A 64-bit hash of a piece of memory, for telling replicas apart that ought to be the same. Two
// pieces that differ within one block of 64 bytes never have the same hash; otherwise equal hashes
// of different pieces are a matter of chance. It does not withstand anybody who looks for them.
// The same on every Isa, on machines of one byte order.
uint64_t hash_memory(const void* memory, size_t bytes);

// The form for one Isa, which has to be no better than what the machine runs.
uint64_t hash_memory(const void* memory, size_t bytes, Isa isa);

}  // namespace hvd
