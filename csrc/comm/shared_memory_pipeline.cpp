// The pipeline of the shared-memory communicator: copy in, reduce, copy out, chunk by chunk.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/clock.h"
#include "comm/pieces.h"
#include "comm/shared_memory_communicator.h"

namespace hvd {

SharedMemoryCommunicator::Active* SharedMemoryCommunicator::at(const Cursor& cursor) {
  const uint64_t index = cursor.operation - first_operation_;
  return index < active_.size() ? &active_[index] : nullptr;
}

void SharedMemoryCommunicator::advance(Cursor& cursor, const Active& active) {
  ++cursor.chunk;
  if (++cursor.local == active.chunks) {
    cursor.local = 0;
    ++cursor.operation;
  }
}

uint64_t SharedMemoryCommunicator::least(std::atomic<uint64_t> Progress::* counter) const {
  uint64_t least = std::numeric_limits<uint64_t>::max();
  for (int rank = 0; rank < size_; ++rank) {
    least = std::min(least, (staging_.progress(rank).*counter).load(std::memory_order_acquire));
  }
  return least;
}

SharedMemoryCommunicator::Range SharedMemoryCommunicator::chunk_range(const Active& active,
                                                                      uint64_t local) const {
  const uint64_t low = local * active.chunk_elements;
  return {low, std::min(low + active.chunk_elements, active.work->layout->total)};
}

SharedMemoryCommunicator::Range SharedMemoryCommunicator::slice(Range chunk, int owner) const {
  const uint64_t ranks = static_cast<uint64_t>(size_);
  const uint64_t share =
      (chunk.count() + ranks * kSliceGrain - 1) / (ranks * kSliceGrain) * kSliceGrain;
  const uint64_t low = std::min(chunk.high, chunk.low + share * static_cast<uint64_t>(owner));
  return {low, std::min(chunk.high, low + share)};
}

Step SharedMemoryCommunicator::drive() {
  // Who waits for work that was dropped would wait for ever.
  check_open();
  return try_drive();
}

Step SharedMemoryCommunicator::try_drive() {
  std::unique_lock<std::mutex> lock(drive_mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return Step::elsewhere;
  return drive_locked();
}

Step SharedMemoryCommunicator::drive_locked() {
  absorb();
  if (active_.empty()) return Step::blocked;
  // The last stage first: what it frees lets the others go on, and its data is still in a cache.
  const bool worked = try_copy_out() || try_reduce() || try_copy_in();
  return worked ? Step::progressed : Step::blocked;
}

bool SharedMemoryCommunicator::try_copy_in() {
  Active* active = at(in_);
  if (active == nullptr) return false;
  // The slot was last used `slots` chunks ago; nobody may read it any more.
  if (in_.chunk >= staging_.slots() &&
      least(&Progress::copied_out) <= in_.chunk - staging_.slots()) {
    return false;
  }
  if (in_.local >= active->data_chunks) {
    // By-products are complete once this rank has reduced its slices of all chunks before.
    if (reduce_.operation != in_.operation || reduce_.local < active->data_chunks) return false;
  }
  copy_in(*active, in_.local, in_.chunk);
  advance(in_, *active);
  staging_.progress(rank_).copied_in.store(in_.chunk, std::memory_order_release);
  control_->notify();
  return true;
}

bool SharedMemoryCommunicator::try_reduce() {
  if (reduce_.chunk >= in_.chunk) return false;
  Active* active = at(reduce_);
  const bool reduces = active->work->kind == WorkKind::reduce || active->redundant;
  if (reduces && least(&Progress::copied_in) <= reduce_.chunk) return false;
  if (active->kernel != nullptr && !active->work->error && reduce_.local < active->data_chunks) {
    reduce(*active, reduce_.local, reduce_.chunk);
  }
  const bool others_wait = !active->redundant;
  advance(reduce_, *active);
  staging_.progress(rank_).reduced.store(reduce_.chunk, std::memory_order_release);
  if (others_wait) control_->notify();
  return true;
}

bool SharedMemoryCommunicator::try_copy_out() {
  if (out_.chunk >= reduce_.chunk) return false;
  Active* active = at(out_);
  const Work& work = *active->work;
  if (!active->redundant) {
    if (work.kind == WorkKind::broadcast) {
      const auto& root = staging_.progress(work.root).copied_in;
      if (root.load(std::memory_order_acquire) <= out_.chunk) return false;
    } else if (work.kind == WorkKind::allgather || out_.local >= active->data_chunks) {
      if (least(&Progress::copied_in) <= out_.chunk) return false;
    } else if (least(&Progress::reduced) <= out_.chunk) {
      return false;
    }
    copy_out(*active, out_.local, out_.chunk);
  }
  const bool last = out_.local + 1 == active->chunks;
  advance(out_, *active);
  if (last) finish_front();
  staging_.progress(rank_).copied_out.store(out_.chunk, std::memory_order_release);
  control_->notify();
  return true;
}

void SharedMemoryCommunicator::finish_front() {
  Active done = std::move(active_.front());
  active_.pop_front();
  ++first_operation_;
  Work& work = *done.work;
  work.done_ns = now_ns();
  if (active_.empty()) {
    busy_ns_.fetch_add(work.done_ns - busy_since_, std::memory_order_relaxed);
  }
  if (done.slot < kSlots) {
    if (on_done) on_done(done.slot, work);
    outstanding_.fetch_sub(1, std::memory_order_relaxed);
  }
  // Release: who sees it may use the result and free the memory.
  work.finished.store(true, std::memory_order_release);
}

void SharedMemoryCommunicator::copy_in(Active& active, uint64_t local, uint64_t chunk) {
  Work& work = *active.work;
  char* slot = staging_.slot(rank_, chunk);
  if (work.error || work.kind == WorkKind::barrier) return;
  if (work.kind == WorkKind::allgather) {
    const uint64_t size = work.sizes[static_cast<size_t>(rank_)];
    const uint64_t low = std::min(size, local * active.chunk_elements);
    const uint64_t high = std::min(size, low + active.chunk_elements);
    if (high > low) std::memcpy(slot, static_cast<const char*>(work.send) + low, high - low);
    return;
  }
  if (local >= active.data_chunks) {
    // NaN stands for "not finite", which a sum of squares of finite values never is.
    const uint64_t per_slot = staging_.slot_bytes() / sizeof(double);
    const uint64_t low = (local - active.data_chunks) * per_slot;
    const uint64_t high = std::min<uint64_t>(low + per_slot, active.partial.size());
    auto* sums = reinterpret_cast<double*>(slot);
    for (uint64_t i = low; i < high; ++i) {
      const ByProducts& partial = active.partial[i];
      sums[i - low] =
          partial.finite ? partial.sum_of_squares : std::numeric_limits<double>::quiet_NaN();
    }
    return;
  }
  const bool gives = work.kind == WorkKind::broadcast ? work.root == rank_
                                                      : active.pre[static_cast<size_t>(rank_)] != 0;
  if (!gives) return;
  if (active.wire) return copy_in_wire(active, local, chunk);
  const Layout& layout = *work.layout;
  const size_t width = size_of(layout.dtype);
  const Range range = chunk_range(active, local);
  const auto copy = [&](Range part) {
    char* target = slot + (part.low - range.low) * width;
    for_pieces(layout, part.low, part.high,
               [&](size_t segment, uint64_t offset, uint64_t place, uint64_t count) {
                 void* source = work.pointers[segment];
                 if (source == nullptr) {
                   std::memset(target + place * width, 0, count * width);
                 } else {
                   std::memcpy(target + place * width, element(source, offset, width),
                               count * width);
                 }
               });
  };
  if (work.kind == WorkKind::broadcast || active.redundant) {
    copy(range);
    return;
  }
  for (int owner = 0; owner < size_; ++owner) {
    if (owner != rank_) copy(slice(range, owner));
  }
}

void SharedMemoryCommunicator::reduce(Active& active, uint64_t local, uint64_t chunk) {
  if (active.wire) return reduce_wire(active, local, chunk);
  Work& work = *active.work;
  const Layout& layout = *work.layout;
  const size_t width = size_of(layout.dtype);
  const Range range = chunk_range(active, local);
  const Range own = active.redundant ? range : slice(range, rank_);
  const uint64_t slot_offset = (own.low - range.low) * width;
  std::vector<const void*> sources(static_cast<size_t>(size_));
  std::vector<double> pre = active.pre;
  char* const own_slot = staging_.slot(rank_, chunk) + slot_offset;
  if (active.redundant) scratch_.resize(own.count() * width);

  for_pieces(layout, own.low, own.high,
             [&](size_t segment, uint64_t offset, uint64_t place, uint64_t count) {
               void* memory = work.pointers[segment];
               char* mine = memory == nullptr ? nullptr : element(memory, offset, width);
               for (int rank = 0; rank < size_; ++rank) {
                 sources[static_cast<size_t>(rank)] =
                     staging_.slot(rank, chunk) + slot_offset + place * width;
               }
               ReduceArguments arguments{};
               if (active.redundant) {
                 // Every rank reads the same slots, its own as well, so that all get the same bits.
                 arguments.out = mine != nullptr ? mine : scratch_.data();
               } else {
                 sources[static_cast<size_t>(rank_)] = mine;
                 pre[static_cast<size_t>(rank_)] =
                     mine != nullptr ? active.pre[static_cast<size_t>(rank_)] : 0.0;
                 arguments.out = own_slot + place * width;
                 arguments.second_out = mine;
               }
               arguments.sources = sources.data();
               arguments.pre = pre.data();
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

void SharedMemoryCommunicator::copy_out(Active& active, uint64_t local, uint64_t chunk) {
  Work& work = *active.work;
  if (work.error) return;
  if (work.kind == WorkKind::allgather) {
    char* target = static_cast<char*>(work.receive);
    for (int rank = 0; rank < size_; ++rank) {
      const uint64_t size = work.sizes[static_cast<size_t>(rank)];
      const uint64_t low = std::min(size, local * active.chunk_elements);
      const uint64_t high = std::min(size, low + active.chunk_elements);
      if (high > low) std::memcpy(target + low, staging_.slot(rank, chunk), high - low);
      target += size;
    }
    return;
  }
  if (local >= active.data_chunks) {
    combine_by_products(active, local, chunk);
    return;
  }
  if (active.wire) return copy_out_wire(active, local, chunk);
  const Layout& layout = *work.layout;
  const size_t width = size_of(layout.dtype);
  const Range range = chunk_range(active, local);
  const auto copy = [&](Range part, int owner) {
    const char* source = staging_.slot(owner, chunk) + (part.low - range.low) * width;
    for_pieces(layout, part.low, part.high,
               [&](size_t segment, uint64_t offset, uint64_t place, uint64_t count) {
                 void* target = work.pointers[segment];
                 if (target == nullptr) return;
                 std::memcpy(element(target, offset, width), source + place * width, count * width);
               });
  };
  if (work.kind == WorkKind::broadcast) {
    if (work.root != rank_) copy(range, work.root);
    return;
  }
  for (int owner = 0; owner < size_; ++owner) {
    if (owner != rank_) copy(slice(range, owner), owner);
  }
}

// Sums of squares of all ranks' slices, added in rank order: the same bits everywhere.
void SharedMemoryCommunicator::combine_by_products(Active& active, uint64_t local, uint64_t chunk) {
  std::vector<ByProducts>& total = active.work->by_products;
  const uint64_t per_slot = staging_.slot_bytes() / sizeof(double);
  const uint64_t low = (local - active.data_chunks) * per_slot;
  const uint64_t high = std::min<uint64_t>(low + per_slot, total.size());
  for (int rank = 0; rank < size_; ++rank) {
    const auto* sums = reinterpret_cast<const double*>(staging_.slot(rank, chunk));
    for (uint64_t i = low; i < high; ++i) {
      const double sum = sums[i - low];
      total[i].sum_of_squares += sum;
      total[i].finite = total[i].finite && !std::isnan(sum);
    }
  }
}

}  // namespace hvd
