// The pipeline of the shared-memory communicator where values travel in 16 bits.

#include <algorithm>
#include <cstring>

#include "comm/pieces.h"
#include "comm/shared_memory_communicator.h"
#include "kernels/wire.h"

namespace hvd {
namespace {

constexpr uint64_t kWireBytes = 2;
constexpr uint64_t kLine = 64;

uint64_t up_to(uint64_t value, uint64_t step) { return (value + step - 1) / step * step; }

}  // namespace

WireLayout::WireLayout(DType wire, DType result, int ranks, uint64_t slot_bytes)
    : type(wire), chunk_elements(slot_bytes / size_of(result) / kSliceGrain * kSliceGrain) {
  const auto owners = static_cast<uint64_t>(ranks);
  for (;; chunk_elements -= kSliceGrain) {
    const uint64_t slice = up_to(chunk_elements, owners * kSliceGrain) / owners;
    blocks = up_to(slice, kBlock) / kBlock;
    units_offset = up_to(chunk_elements * kWireBytes, kLine);
    results_offset = up_to(units_offset + owners * blocks * sizeof(double), kLine);
    if (results_offset + slice * size_of(result) <= slot_bytes) return;
  }
}

// Converts what this rank gives of one block. Chunks begin at element `first`.
void SharedMemoryCommunicator::put_block(const Active& active, Range block, int owner,
                                         uint64_t number, uint64_t first, char* slot) {
  const Work& work = *active.work;
  const Layout& layout = *work.layout;
  const WireLayout& wire = *active.wire;
  const size_t width = size_of(layout.dtype);
  double scale = 1;
  if (needs_scale(wire.type, layout.dtype)) {
    double largest = 0;
    for_pieces(layout, block.low, block.high,
               [&](size_t segment, uint64_t offset, uint64_t, uint64_t count) {
                 void* source = work.pointers[segment];
                 if (source == nullptr) return;
                 largest = std::max(largest, largest_magnitude(element(source, offset, width),
                                                               layout.dtype, count));
               });
    scale = wire_scale(wire.type, layout.dtype, largest);
  }
  char* target = slot + (block.low - first) * kWireBytes;
  for_pieces(layout, block.low, block.high,
             [&](size_t segment, uint64_t offset, uint64_t place, uint64_t count) {
               void* source = work.pointers[segment];
               char* to = target + place * kWireBytes;
               if (source == nullptr) {
                 std::memset(to, 0, count * kWireBytes);
               } else {
                 to_wire(to, wire.type, element(source, offset, width), layout.dtype, count, scale);
               }
             });
  auto* units = reinterpret_cast<double*>(slot + wire.units_offset);
  units[static_cast<uint64_t>(owner) * wire.blocks + number] = 1 / scale;
}

void SharedMemoryCommunicator::copy_in_wire(Active& active, uint64_t local, uint64_t chunk) {
  char* slot = staging_.slot(rank_, chunk);
  const Range range = chunk_range(active, local);
  const auto put = [&](Range part, int owner) {
    uint64_t number = 0;
    for (uint64_t low = part.low; low < part.high; low += WireLayout::kBlock, ++number) {
      const Range block{low, std::min(part.high, low + WireLayout::kBlock)};
      put_block(active, block, owner, number, range.low, slot);
    }
  };
  if (active.redundant) return put(range, 0);
  for (int owner = 0; owner < size_; ++owner) {
    if (owner != rank_) put(slice(range, owner), owner);
  }
}

void SharedMemoryCommunicator::reduce_wire(Active& active, uint64_t local, uint64_t chunk) {
  Work& work = *active.work;
  const Layout& layout = *work.layout;
  const WireLayout& wire = *active.wire;
  const size_t width = size_of(layout.dtype);
  const Range range = chunk_range(active, local);
  const Range own = active.redundant ? range : slice(range, rank_);
  const int owner = active.redundant ? 0 : rank_;
  const auto me = static_cast<size_t>(rank_);
  const auto ranks = static_cast<size_t>(size_);
  char* own_slot = staging_.slot(rank_, chunk);
  std::vector<const void*> sources(ranks);
  std::vector<double> factors(ranks);
  uint64_t number = 0;
  for (uint64_t low = own.low; low < own.high; low += WireLayout::kBlock, ++number) {
    const Range block{low, std::min(own.high, low + WireLayout::kBlock)};
    // Only now, so that it is read while it is in the first cache.
    if (!active.redundant && active.pre[me] != 0) {
      put_block(active, block, owner, number, range.low, own_slot);
    }
    for (size_t rank = 0; rank < ranks; ++rank) {
      const char* slot = staging_.slot(static_cast<int>(rank), chunk);
      const auto* units = reinterpret_cast<const double*>(slot + wire.units_offset);
      // What a rank that is left out has there is of another time.
      factors[rank] =
          active.pre[rank] == 0
              ? 0
              : active.pre[rank] * units[static_cast<uint64_t>(owner) * wire.blocks + number];
    }
    if (active.redundant) scratch_.resize(block.count() * width);
    char* results = own_slot + wire.results_offset + (low - own.low) * width;
    for_pieces(layout, block.low, block.high,
               [&](size_t segment, uint64_t offset, uint64_t place, uint64_t count) {
                 void* memory = work.pointers[segment];
                 char* mine = memory == nullptr ? nullptr : element(memory, offset, width);
                 for (size_t rank = 0; rank < ranks; ++rank) {
                   sources[rank] = staging_.slot(static_cast<int>(rank), chunk) +
                                   (low - range.low + place) * kWireBytes;
                 }
                 ReduceArguments arguments{};
                 if (active.redundant) {
                   arguments.out = mine != nullptr ? mine : scratch_.data();
                 } else {
                   arguments.out = results + place * width;
                   arguments.second_out = mine;
                 }
                 arguments.sources = sources.data();
                 arguments.pre = factors.data();
                 arguments.source_count = size_;
                 arguments.post = active.post;
                 arguments.count = count;
                 if (work.want_by_products) {
                   arguments.by_products =
                       active.redundant ? &work.by_products[segment] : &active.partial[segment];
                 }
                 active.kernel(arguments);
               });
  }
}

void SharedMemoryCommunicator::copy_out_wire(Active& active, uint64_t local, uint64_t chunk) {
  const Work& work = *active.work;
  const Layout& layout = *work.layout;
  const size_t width = size_of(layout.dtype);
  const Range range = chunk_range(active, local);
  for (int owner = 0; owner < size_; ++owner) {
    if (owner == rank_) continue;
    const Range part = slice(range, owner);
    const char* source = staging_.slot(owner, chunk) + active.wire->results_offset;
    for_pieces(layout, part.low, part.high,
               [&](size_t segment, uint64_t offset, uint64_t place, uint64_t count) {
                 void* target = work.pointers[segment];
                 if (target == nullptr) return;
                 std::memcpy(element(target, offset, width), source + place * width, count * width);
               });
  }
}

}  // namespace hvd
