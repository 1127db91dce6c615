// The collectives and messages of the fake NCCL, over shared memory.

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/dtype.h"
#include "fake_nccl_parts.h"
#include "kernels/convert.h"

namespace hvd::fakes {

bool element_of(NcclDataType type, size_t* bytes) {
  switch (type) {
    case NcclDataType::int8:
    case NcclDataType::uint8:
      *bytes = 1;
      return true;
    case NcclDataType::float16:
    case NcclDataType::bfloat16:
      *bytes = 2;
      return true;
    case NcclDataType::int32:
    case NcclDataType::uint32:
    case NcclDataType::float32:
      *bytes = 4;
      return true;
    case NcclDataType::int64:
    case NcclDataType::uint64:
    case NcclDataType::float64:
      *bytes = 8;
      return true;
  }
  return false;
}

template <class Value>
Value combine(NcclRedOp op, Value left, Value right) {
  switch (op) {
    case NcclRedOp::sum:
      return static_cast<Value>(left + right);
    case NcclRedOp::prod:
      return static_cast<Value>(left * right);
    case NcclRedOp::max:
      return left < right ? right : left;
    case NcclRedOp::min:
      return right < left ? right : left;
  }
  return left;
}

template <class Value>
void combine_all(NcclRedOp op, void* into, const void* from, size_t count) {
  auto* left = static_cast<Value*>(into);
  const auto* right = static_cast<const Value*>(from);
  for (size_t i = 0; i < count; ++i) left[i] = combine(op, left[i], right[i]);
}

// 16-bit floats: every sum is rounded, as it is between two GPUs.
void combine_short(hvd::DType dtype, NcclRedOp op, void* into, const void* from, size_t count) {
  std::vector<float> left(count);
  std::vector<float> right(count);
  hvd::convert(left.data(), hvd::DType::f32, into, dtype, count, 1.0);
  hvd::convert(right.data(), hvd::DType::f32, from, dtype, count, 1.0);
  combine_all<float>(op, left.data(), right.data(), count);
  hvd::convert(into, dtype, left.data(), hvd::DType::f32, count, 1.0);
}

void combine_all(NcclDataType type, NcclRedOp op, void* into, const void* from, size_t count) {
  switch (type) {
    case NcclDataType::int8:
      return combine_all<int8_t>(op, into, from, count);
    case NcclDataType::uint8:
      return combine_all<uint8_t>(op, into, from, count);
    case NcclDataType::int32:
      return combine_all<int32_t>(op, into, from, count);
    case NcclDataType::uint32:
      return combine_all<uint32_t>(op, into, from, count);
    case NcclDataType::int64:
      return combine_all<int64_t>(op, into, from, count);
    case NcclDataType::uint64:
      return combine_all<uint64_t>(op, into, from, count);
    case NcclDataType::float16:
      return combine_short(hvd::DType::f16, op, into, from, count);
    case NcclDataType::bfloat16:
      return combine_short(hvd::DType::bf16, op, into, from, count);
    case NcclDataType::float32:
      return combine_all<float>(op, into, from, count);
    case NcclDataType::float64:
      return combine_all<double>(op, into, from, count);
  }
}

// One exchange: every rank's part of at most a slot, then `take(slots)` where all are there.
bool exchange(Comm& comm, const Header& header, const void* part, size_t bytes,
              const std::function<void(char (*slots)[kChunkBytes])>& take) {
  Region& region = *comm.region;
  const uint64_t round = comm.rounds++;
  const auto all = [&](std::atomic<uint64_t> Member::* counter, uint64_t value) {
    return [&region, &comm, counter, value] {
      for (int peer = 0; peer < comm.ranks; ++peer) {
        if ((region.members[peer].*counter).load() < value) return false;
      }
      return true;
    };
  };
  // Nobody reads the slot any more.
  if (!wait_until(comm, all(&Member::consumed, round))) return false;
  Member& own = region.members[comm.rank];
  own.header = header;
  if (bytes > 0) std::memcpy(region.slots[comm.rank], part, bytes);
  own.posted = round + 1;
  ring(comm);
  if (!wait_until(comm, all(&Member::posted, round + 1))) return false;
  for (int peer = 0; peer < comm.ranks; ++peer) {
    if (region.members[peer].header == header) continue;
    fail_all(comm, NcclResult::invalid_usage,
             "rank " + std::to_string(peer) + " calls another collective");
    return false;
  }
  take(region.slots);
  own.consumed = round + 1;
  ring(comm);
  return true;
}

void run_collective(Comm& comm, const Operation& operation) {
  const Header& header = operation.header;
  size_t element = 0;
  element_of(header.type, &element);
  const auto* send = static_cast<const char*>(operation.send);
  auto* receive = static_cast<char*>(operation.receive);
  const size_t at_once = kChunkBytes / element;
  const bool scatter = header.kind == Kind::reduce_scatter;

  for (int part = 0; part < (scatter ? comm.ranks : 1); ++part) {
    size_t done = 0;
    do {  // one exchange even if there is nothing: it is what the ranks meet in
      const size_t count = std::min<size_t>(header.count - done, at_once);
      const size_t bytes = count * element;
      const size_t begin = done * element;
      const size_t from =
          begin + (scatter ? static_cast<size_t>(part) * header.count * element : 0);
      const bool gives = header.kind != Kind::broadcast || comm.rank == header.root;
      const bool went_well =
          exchange(comm, header, send + from, gives ? bytes : 0, [&](char (*slots)[kChunkBytes]) {
            switch (header.kind) {
              case Kind::all_reduce:
              case Kind::reduce_scatter: {
                if (scatter && part != comm.rank) break;
                std::vector<char> sum(slots[0], slots[0] + bytes);
                for (int peer = 1; peer < comm.ranks; ++peer) {
                  combine_all(header.type, header.op, sum.data(), slots[peer], count);
                }
                if (bytes > 0) std::memcpy(receive + begin, sum.data(), bytes);
                break;
              }
              case Kind::broadcast:
                if (bytes > 0) std::memcpy(receive + begin, slots[header.root], bytes);
                break;
              case Kind::all_gather:
                for (int peer = 0; peer < comm.ranks && bytes > 0; ++peer) {
                  std::memcpy(receive + static_cast<size_t>(peer) * header.count * element + begin,
                              slots[peer], bytes);
                }
                break;
              case Kind::send:
              case Kind::receive:
                break;
            }
          });
      if (!went_well) return;
      done += count;
    } while (done < header.count);
  }
}

// Sends and receives of one group make progress together.
void run_messages(Comm& comm, const std::vector<Operation>& operations) {
  struct Progress {
    const Operation* operation;
    size_t bytes;
    size_t done;
  };
  std::vector<Progress> open;
  for (const Operation& operation : operations) {
    size_t element = 0;
    element_of(operation.header.type, &element);
    open.push_back({&operation, operation.header.count * element, 0});
  }
  // At most one step per pair and direction at a time: messages of a pair keep their order.
  const auto step = [&comm, &open] {
    bool moved = false;
    std::set<std::pair<Kind, int>> taken;
    for (Progress& progress : open) {
      const Operation& operation = *progress.operation;
      if (progress.done == progress.bytes) continue;
      if (!taken.insert({operation.header.kind, operation.peer}).second) continue;
      const bool sends = operation.header.kind == Kind::send;
      Mailbox& box = sends ? comm.region->mail[operation.peer][comm.rank]
                           : comm.region->mail[comm.rank][operation.peer];
      const uint64_t written = box.written.load();
      const uint64_t read = box.read.load();
      const uint64_t position = sends ? written : read;
      const uint64_t available = sends ? kMailBytes - (written - read) : written - read;
      const size_t count = std::min<size_t>(
          {progress.bytes - progress.done, available, kMailBytes - position % kMailBytes});
      if (count == 0) continue;
      char* inside = box.data + position % kMailBytes;
      if (sends) {
        std::memcpy(inside, static_cast<const char*>(operation.send) + progress.done, count);
        box.written = written + count;
      } else {
        std::memcpy(static_cast<char*>(operation.receive) + progress.done, inside, count);
        box.read = read + count;
      }
      progress.done += count;
      moved = true;
    }
    return moved;
  };
  const auto over = [&open] {
    return std::all_of(open.begin(), open.end(),
                       [](const Progress& progress) { return progress.done == progress.bytes; });
  };
  while (!over()) {
    if (!wait_until(comm, step)) return;
    ring(comm);
  }
}

}  // namespace hvd::fakes
