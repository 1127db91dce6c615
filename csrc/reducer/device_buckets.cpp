#include "reducer/device_buckets.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>

#include "base/error.h"

namespace hvd {
namespace {

NcclDataType nccl_type(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return NcclDataType::float32;
    case DType::f64:
      return NcclDataType::float64;
    case DType::f16:
      return NcclDataType::float16;
    case DType::bf16:
      return NcclDataType::bfloat16;
    default:
      throw Error(ErrorKind::bad_argument, std::string("gradients on a GPU cannot be ") +
                                               name_of(dtype) + "; only floating types can be.");
  }
}

CudaPointer address(const void* pointer) { return reinterpret_cast<CudaPointer>(pointer); }

template <class Value>
size_t bytes_of(const std::vector<Value>& values) {
  return values.size() * sizeof(Value);
}

// Places in one allocation, one behind the other.
class Places {
 public:
  size_t take(size_t bytes) {
    const size_t place = bytes_;
    bytes_ += (bytes + 255) / 256 * 256;
    return place;
  }
  size_t bytes() const { return std::max<size_t>(bytes_, 256); }

 private:
  size_t bytes_ = 0;
};

}  // namespace

struct DeviceBuckets::Posted {
  uint32_t bucket = 0;
  std::vector<gpu::Segment> segments;
  std::vector<CudaEvent> ready;
  std::array<double, gpu::kWeightDigits> weight{};
  double post = 1;
  const float* scale = nullptr;
  size_t slot = 0;  // of the ring
};

// What lives as long as operations that use it. Of the launching thread, but for what is done
// while nothing runs (add, add_group) and for the events.
struct DeviceBuckets::State {
  struct Bucket {
    Bucket(const std::string& name_, const std::vector<uint64_t>& counts, DType gradients_,
           DType dtype, uint32_t rank, uint32_t ranks)
        : name(name_), gradients(gradients_), table(counts, dtype, rank, ranks) {}

    std::string name;
    DType gradients;
    BucketTable table;
    gpu::Segment* segments = nullptr;  // on the device, as all below
    gpu::Chunk* chunks = nullptr;
    uint32_t* first_chunks = nullptr;
    gpu::Partial* partials = nullptr;
    double* factor = nullptr;
    double* total_weight = nullptr;
    float* used = nullptr;
    size_t first_result = 0;
    CudaEvent done = nullptr;
    bool used_before = false;
    std::vector<gpu::Segment> uploaded;
  };
  struct Slot {
    CudaPointer memory = 0;
    size_t bytes = 0;
    CudaEvent packed = nullptr;
    CudaEvent done = nullptr;
    bool used_before = false;
  };
  // Pinned memory that a copy to the device reads from.
  struct Source {
    void* memory = nullptr;
    size_t bytes = 0;
    CudaEvent copied = nullptr;
  };
  struct Group {
    std::vector<uint32_t> buckets;
    std::vector<uint32_t> member_list;
    uint32_t* members = nullptr;
    gpu::Norm* norm = nullptr;
  };

  State(std::shared_ptr<DriverApi> driver_, std::shared_ptr<GpuKernels> kernels_, uint32_t ring)
      : driver(std::move(driver_)), kernels(std::move(kernels_)), slots(ring) {
    int least = 0;
    int greatest = 0;
    driver->check(driver->context_get_stream_priority_range(&least, &greatest),
                  "cuCtxGetStreamPriorityRange");
    driver->check(driver->stream_create(&pack_stream, kCudaStreamNonBlocking, greatest),
                  "cuStreamCreateWithPriority");
    for (Slot& slot : slots) {
      slot.packed = new_event();
      slot.done = new_event();
    }
  }

  CudaEvent new_event() {
    CudaEvent event = nullptr;
    driver->check(driver->event_create(&event, kCudaEventDisableTiming), "cuEventCreate");
    const std::lock_guard<std::mutex> lock(mutex);
    events.push_back(event);
    return event;
  }

  CudaEvent take_event() {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      if (!free_events.empty()) {
        const CudaEvent event = free_events.back();
        free_events.pop_back();
        return event;
      }
    }
    return new_event();
  }

  // A stream that was told to wait for an event waits for what it stood for then.
  void give_back(const std::vector<CudaEvent>& known) {
    const std::lock_guard<std::mutex> lock(mutex);
    free_events.insert(free_events.end(), known.begin(), known.end());
  }

  CudaPointer allocate(size_t bytes) {
    CudaPointer pointer = 0;
    driver->check(driver->memory_allocate(&pointer, bytes), "cuMemAlloc");
    allocations.push_back(pointer);
    return pointer;
  }

  void free(CudaPointer pointer) {
    allocations.erase(std::remove(allocations.begin(), allocations.end(), pointer),
                      allocations.end());
    driver->check(driver->memory_free(pointer), "cuMemFree");
  }

  void wait_event(CudaStream stream, CudaEvent event) {
    driver->check(driver->stream_wait_event(stream, event), "cuStreamWaitEvent");
  }
  void record(CudaEvent event, CudaStream stream) {
    driver->check(driver->event_record(event, stream), "cuEventRecord");
  }
  // `from` stays as it is until the copy has been made.
  void upload(void* to, const void* from, size_t bytes) {
    if (bytes == 0) return;
    driver->check(driver->copy_to_device(address(to), from, bytes, pack_stream),
                  "cuMemcpyHtoDAsync");
  }

  // A source that no copy reads from any more.
  Source& source(size_t bytes) {
    for (Source& known : sources) {
      if (known.bytes >= bytes && driver->event_query(known.copied) == CudaResult::success) {
        return known;
      }
    }
    return add_source(bytes);
  }

  Source& add_source(size_t bytes) {
    Source made;
    made.bytes = (bytes + 4095) / 4096 * 4096;
    made.copied = new_event();
    driver->check(driver->host_allocate(&made.memory, made.bytes, kCudaHostPortable),
                  "cuMemHostAlloc");
    sources.push_back(made);
    return sources.back();
  }

  void prepare(Posted& posted, CudaStream comm_stream);
  void finish(const Posted& posted, CudaStream comm_stream);
  void* memory_of(const Posted& posted) const {
    return reinterpret_cast<void*>(slots[posted.slot].memory);
  }
  void free_everything();

  std::shared_ptr<DriverApi> driver;
  std::shared_ptr<GpuKernels> kernels;
  CudaStream pack_stream = nullptr;
  std::vector<std::unique_ptr<Bucket>> buckets;
  std::vector<Slot> slots;
  uint64_t next_slot = 0;
  std::vector<Source> sources;
  std::vector<std::unique_ptr<Group>> groups;
  gpu::SegmentResult* results = nullptr;
  size_t result_count = 0;
  size_t result_capacity = 0;
  void* host_results = nullptr;  // pinned
  size_t host_bytes = 0;
  std::vector<CudaPointer> allocations;

  std::mutex mutex;  // of the events
  std::vector<CudaEvent> events;
  std::vector<CudaEvent> free_events;
};

void DeviceBuckets::State::prepare(Posted& posted, CudaStream comm_stream) {
  Bucket& bucket = *buckets[posted.bucket];
  posted.slot = next_slot++ % slots.size();
  Slot& slot = slots[posted.slot];
  const auto same = [](const gpu::Segment& a, const gpu::Segment& b) {
    return a.memory == b.memory && a.factor == b.factor;
  };
  if (!std::equal(posted.segments.begin(), posted.segments.end(), bucket.uploaded.begin(),
                  bucket.uploaded.end(), same)) {
    // The bucket's last round reads the table until it is done.
    if (bucket.used_before) wait_event(pack_stream, bucket.done);
    const size_t bytes = bytes_of(posted.segments);
    if (bytes > 0) {
      Source& from = source(bytes);
      std::memcpy(from.memory, posted.segments.data(), bytes);
      upload(bucket.segments, from.memory, bytes);
      record(from.copied, pack_stream);
    }
    bucket.uploaded = posted.segments;
  }
  for (const CudaEvent event : posted.ready) wait_event(pack_stream, event);
  give_back(posted.ready);
  posted.ready.clear();
  if (slot.used_before) wait_event(pack_stream, slot.done);
  gpu::PackArguments pack{};
  pack.segments = bucket.segments;
  pack.chunks = bucket.chunks;
  pack.chunk_count = static_cast<uint32_t>(bucket.table.chunks.size());
  pack.bucket = memory_of(posted);
  pack.trailer = bucket.table.trailer;
  std::copy(posted.weight.begin(), posted.weight.end(), pack.weight);
  kernels->pack(bucket.gradients, bucket.table.dtype, pack, pack_stream);
  record(slot.packed, pack_stream);
  wait_event(comm_stream, slot.packed);
}

void DeviceBuckets::State::finish(const Posted& posted, CudaStream comm_stream) {
  Bucket& bucket = *buckets[posted.bucket];
  Slot& slot = slots[posted.slot];
  gpu::TrailerArguments trailer{};
  trailer.bucket = memory_of(posted);
  trailer.trailer = bucket.table.trailer;
  trailer.post = posted.post;
  trailer.scale = posted.scale;
  trailer.factor = bucket.factor;
  trailer.total_weight = bucket.total_weight;
  trailer.used = bucket.used;
  kernels->read_trailer(bucket.table.dtype, trailer, comm_stream);
  gpu::PostArguments post{};
  post.segments = bucket.segments;
  post.chunks = bucket.chunks;
  post.chunk_count = static_cast<uint32_t>(bucket.table.chunks.size());
  post.bucket = memory_of(posted);
  post.factor = bucket.factor;
  post.post = 1;
  post.partials = bucket.partials;
  kernels->post(bucket.gradients, bucket.table.dtype, post, comm_stream);
  gpu::CombineArguments combine{};
  combine.partials = bucket.partials;
  combine.first_chunks = bucket.first_chunks;
  combine.segment_count = bucket.table.trailer.segment_count;
  combine.used = bucket.used;
  combine.results = results + bucket.first_result;
  kernels->combine(combine, comm_stream);
  record(slot.done, comm_stream);
  record(bucket.done, comm_stream);
  slot.used_before = bucket.used_before = true;
}

void DeviceBuckets::State::free_everything() {
  for (const CudaPointer pointer : allocations) static_cast<void>(driver->memory_free(pointer));
  for (const Source& known : sources) static_cast<void>(driver->host_free(known.memory));
  if (host_results != nullptr) static_cast<void>(driver->host_free(host_results));
  for (const CudaEvent event : events) static_cast<void>(driver->event_destroy(event));
  static_cast<void>(driver->stream_destroy(pack_stream));
}

DeviceBuckets::DeviceBuckets(std::shared_ptr<NcclCommunicator> communicator,
                             std::shared_ptr<DriverApi> driver, std::shared_ptr<GpuKernels> kernels,
                             const Settings& settings)
    : communicator_(std::move(communicator)) {
  if (settings.ring < 1 || settings.ring > 64) {
    throw Error(ErrorKind::bad_argument,
                "the ring takes 1 to 64 buckets, not " + std::to_string(settings.ring));
  }
  state_ = std::make_shared<State>(std::move(driver), std::move(kernels), settings.ring);
}

DeviceBuckets::~DeviceBuckets() { close(); }

size_t DeviceBuckets::size() const { return state_ ? state_->buckets.size() : 0; }

uint32_t DeviceBuckets::launched() const { return launched_; }

uint32_t DeviceBuckets::add(const std::string& name, const std::vector<uint64_t>& counts,
                            DType gradients, DType dtype, const Wait& wait) {
  if (std::find(seen_.begin(), seen_.end(), true) != seen_.end()) {
    throw Error(ErrorKind::error, "a bucket cannot be added in the middle of a round");
  }
  static_cast<void>(nccl_type(gradients));
  static_cast<void>(nccl_type(dtype));
  // Now nobody else is at the state, neither the launching thread nor the device.
  communicator_->wait(ticket_, wait);
  const CudaContextScope scope(communicator_->driver(), communicator_->context());
  State& state = *state_;
  auto bucket = std::make_unique<State::Bucket>(name, counts, gradients, dtype,
                                                static_cast<uint32_t>(communicator_->rank()),
                                                static_cast<uint32_t>(communicator_->size()));
  const BucketTable& table = bucket->table;
  const size_t bytes = table.elements * size_of(dtype);
  for (State::Slot& slot : state.slots) {
    if (slot.bytes >= bytes) continue;
    const CudaPointer before = std::exchange(slot.memory, state.allocate(bytes));
    slot.bytes = bytes;
    if (before != 0) state.free(before);
  }
  if (state.result_count + counts.size() > state.result_capacity) {
    const size_t capacity = std::max(2 * state.result_capacity, state.result_count + counts.size());
    const CudaPointer before = address(state.results);
    const CudaPointer made = state.allocate(capacity * sizeof(gpu::SegmentResult));
    if (before != 0) {
      state.driver->check(
          state.driver->copy(made, before, state.result_count * sizeof(gpu::SegmentResult),
                             state.pack_stream),
          "cuMemcpyAsync");
      state.free(before);  // waits for the copy
    }
    state.results = reinterpret_cast<gpu::SegmentResult*>(made);
    state.result_capacity = capacity;
  }
  bucket->first_result = state.result_count;
  state.result_count += counts.size();

  Places places;
  const size_t segments = places.take(counts.size() * sizeof(gpu::Segment));
  const size_t chunks = places.take(bytes_of(table.chunks));
  const size_t first_chunks = places.take(bytes_of(table.first_chunks));
  const size_t partials = places.take(table.chunks.size() * sizeof(gpu::Partial));
  const size_t factor = places.take(sizeof(double));
  const size_t total_weight = places.take(sizeof(double));
  const size_t used = places.take(counts.size() * sizeof(float));
  auto* memory = reinterpret_cast<char*>(state.allocate(places.bytes()));
  bucket->segments = reinterpret_cast<gpu::Segment*>(memory + segments);
  bucket->chunks = reinterpret_cast<gpu::Chunk*>(memory + chunks);
  bucket->first_chunks = reinterpret_cast<uint32_t*>(memory + first_chunks);
  bucket->partials = reinterpret_cast<gpu::Partial*>(memory + partials);
  bucket->factor = reinterpret_cast<double*>(memory + factor);
  bucket->total_weight = reinterpret_cast<double*>(memory + total_weight);
  bucket->used = reinterpret_cast<float*>(memory + used);
  bucket->done = state.new_event();
  // For the pointers of two rounds. Only a host that is further ahead of the device makes more.
  for (int i = 0; i < 2 && !counts.empty(); ++i)
    state.add_source(counts.size() * sizeof(gpu::Segment));
  // From the bucket's own tables, which stay.
  state.upload(bucket->chunks, table.chunks.data(), bytes_of(table.chunks));
  state.upload(bucket->first_chunks, table.first_chunks.data(), bytes_of(table.first_chunks));
  state.buckets.push_back(std::move(bucket));
  posted_.emplace_back();
  seen_.push_back(false);
  return static_cast<uint32_t>(state.buckets.size() - 1);
}

void DeviceBuckets::post(uint32_t number, const Gradients& gradients) {
  communicator_->check();
  if (number >= size() || seen_[number]) {
    throw Error(ErrorKind::bad_argument,
                "gradient bucket " + std::to_string(number) +
                    (number >= size() ? " does not exist" : " was posted twice in a round"));
  }
  State& state = *state_;
  const State::Bucket& bucket = *state.buckets[number];
  if (gradients.memory.size() != bucket.table.places.size()) {
    throw Error(ErrorKind::bad_argument,
                bucket.name + " has " + std::to_string(bucket.table.places.size()) +
                    " gradients, not " + std::to_string(gradients.memory.size()));
  }
  const CudaContextScope scope(communicator_->driver(), communicator_->context());
  auto posted = std::make_shared<Posted>();
  posted->bucket = number;
  posted->weight = encode_weight(bucket.table.dtype, gradients.weight);
  posted->post = gradients.post;
  posted->scale = gradients.scale;
  for (void* memory : gradients.memory) posted->segments.push_back({memory, gradients.pre});
  for (const CudaStream stream : gradients.streams) {
    CudaCaptureStatus capture = CudaCaptureStatus::none;
    state.driver->check(state.driver->stream_is_capturing(stream, &capture), "cuStreamIsCapturing");
    if (capture != CudaCaptureStatus::none) {
      throw Error(ErrorKind::error,
                  "gradients cannot be reduced while their stream is captured into a CUDA graph, "
                  "which would leave the other ranks waiting; end the capture before backward");
    }
    const CudaEvent event = state.take_event();
    posted->ready.push_back(event);
    state.record(event, stream);
  }
  posted_[number] = std::move(posted);
  seen_[number] = true;
  while (next_ < posted_.size() && posted_[next_]) launch(next_++);
}

void DeviceBuckets::launch(uint32_t number) {
  const std::shared_ptr<State> state = state_;
  const std::shared_ptr<Posted> posted = std::move(posted_[number]);
  const BucketTable& table = state->buckets[number]->table;
  NcclApi& nccl = communicator_->nccl();
  NcclCommunicator::Operation operation;
  operation.name = state->buckets[number]->name;
  operation.prepare = [state, posted](CudaStream stream) { state->prepare(*posted, stream); };
  operation.collective = [state, posted, &table, &nccl](NcclComm comm, CudaStream stream) {
    void* memory = state->memory_of(*posted);
    return nccl.all_reduce(memory, memory, table.elements, nccl_type(table.dtype), NcclRedOp::sum,
                           comm, stream);
  };
  operation.finish = [state, posted](CudaStream stream) { state->finish(*posted, stream); };
  ticket_ = communicator_->launch(std::move(operation));
  ++launched_;
}

void DeviceBuckets::end_round(CudaStream stream, const Wait& wait) {
  for (uint32_t number = next_; number < posted_.size(); ++number) {
    if (posted_[number]) launch(number);
  }
  next_ = launched_ = 0;
  seen_.assign(seen_.size(), false);
  communicator_->stream_wait(stream, ticket_, wait);
}

DeviceBuckets::Result DeviceBuckets::read(uint32_t number, const Wait& wait) {
  communicator_->check();
  State& state = *state_;
  if (number >= size()) {
    throw Error(ErrorKind::bad_argument,
                "gradient bucket " + std::to_string(number) + " does not exist");
  }
  const State::Bucket& bucket = *state.buckets[number];
  const size_t count = bucket.table.places.size();
  const size_t bytes = sizeof(double) + count * sizeof(gpu::SegmentResult);
  if (state.host_bytes < bytes) {
    const CudaContextScope scope(communicator_->driver(), communicator_->context());
    if (state.host_results != nullptr) {
      state.driver->check(state.driver->host_free(std::exchange(state.host_results, nullptr)),
                          "cuMemFreeHost");
    }
    state.host_bytes = 0;
    state.driver->check(state.driver->host_allocate(&state.host_results, bytes, kCudaHostPortable),
                        "cuMemHostAlloc");
    state.host_bytes = bytes;
  }
  auto* to = static_cast<char*>(state.host_results);
  NcclCommunicator::Operation operation;
  operation.name = "the results of " + bucket.name;
  operation.prepare = [kept = state_, &bucket, to, count](CudaStream stream) {
    kept->driver->check(
        kept->driver->copy_to_host(to, address(bucket.total_weight), sizeof(double), stream),
        "cuMemcpyDtoHAsync");
    if (count == 0) return;
    kept->driver->check(kept->driver->copy_to_host(to + sizeof(double),
                                                   address(kept->results + bucket.first_result),
                                                   count * sizeof(gpu::SegmentResult), stream),
                        "cuMemcpyDtoHAsync");
  };
  ticket_ = communicator_->launch(std::move(operation));
  communicator_->wait(ticket_, wait);
  Result result;
  result.gradients.resize(count);
  std::memcpy(&result.total_weight, to, sizeof(double));
  std::memcpy(result.gradients.data(), to + sizeof(double), bytes_of(result.gradients));
  return result;
}

uint32_t DeviceBuckets::add_group(const std::vector<uint32_t>& buckets, const Wait& wait) {
  auto group = std::make_unique<State::Group>();
  group->buckets = buckets;
  State& state = *state_;
  for (const uint32_t number : buckets) {
    if (number >= size()) {
      throw Error(ErrorKind::bad_argument,
                  "gradient bucket " + std::to_string(number) + " does not exist");
    }
    const State::Bucket& bucket = *state.buckets[number];
    for (size_t i = 0; i < bucket.table.places.size(); ++i) {
      group->member_list.push_back(static_cast<uint32_t>(bucket.first_result + i));
    }
  }
  communicator_->wait(ticket_, wait);
  const CudaContextScope scope(communicator_->driver(), communicator_->context());
  Places places;
  const size_t members = places.take(bytes_of(group->member_list));
  const size_t norm = places.take(sizeof(gpu::Norm));
  auto* memory = reinterpret_cast<char*>(state.allocate(places.bytes()));
  group->members = reinterpret_cast<uint32_t*>(memory + members);
  group->norm = reinterpret_cast<gpu::Norm*>(memory + norm);
  state.upload(group->members, group->member_list.data(), bytes_of(group->member_list));
  // The norm comes on the other stream.
  const CudaEvent uploaded = state.take_event();
  state.record(uploaded, state.pack_stream);
  state.wait_event(communicator_->stream(), uploaded);
  state.give_back({uploaded});
  state.groups.push_back(std::move(group));
  return static_cast<uint32_t>(state.groups.size() - 1);
}

const gpu::Norm* DeviceBuckets::launch_norm(uint32_t number, double max_norm, bool clip,
                                            CudaStream stream, const Wait& wait) {
  if (number >= state_->groups.size()) {
    throw Error(ErrorKind::bad_argument, "there is no group " + std::to_string(number));
  }
  State::Group& group = *state_->groups[number];
  NcclCommunicator::Operation operation;
  operation.name = "the norm of gradients";
  operation.prepare = [state = state_, &group, max_norm, clip](CudaStream comm_stream) {
    gpu::NormArguments norm{};
    norm.results = state->results;
    norm.members = group.members;
    norm.count = static_cast<uint32_t>(group.member_list.size());
    norm.max_norm = max_norm;
    norm.norm = group.norm;
    state->kernels->norm(norm, comm_stream);
    for (size_t i = 0; clip && i < group.buckets.size(); ++i) {
      State::Bucket& bucket = *state->buckets[group.buckets[i]];
      gpu::RescaleArguments rescale{};
      rescale.segments = bucket.segments;
      rescale.chunks = bucket.chunks;
      rescale.chunk_count = static_cast<uint32_t>(bucket.table.chunks.size());
      rescale.coefficient = &group.norm->coefficient;
      state->kernels->rescale(bucket.gradients, rescale, comm_stream);
      // The table of gradients is read until now.
      state->record(bucket.done, comm_stream);
    }
  };
  ticket_ = communicator_->launch(std::move(operation));
  communicator_->stream_wait(stream, ticket_, wait);
  return group.norm;
}

const gpu::Norm* DeviceBuckets::norm(uint32_t group, double max_norm, CudaStream stream,
                                     const Wait& wait) {
  return launch_norm(group, max_norm, false, stream, wait);
}

const gpu::Norm* DeviceBuckets::clip(uint32_t group, double max_norm, CudaStream stream,
                                     const Wait& wait) {
  return launch_norm(group, max_norm, true, stream, wait);
}

void DeviceBuckets::close() {
  const std::shared_ptr<State> state = std::exchange(state_, nullptr);
  if (!state || !communicator_->usable()) return;
  if (!communicator_->await_end(ticket_)) return;
  DriverApi& driver = *state->driver;
  // The context may be gone at exit, and all that was in it.
  if (driver.context_push(communicator_->context()) != CudaResult::success) return;
  state->free_everything();
  CudaContext before = nullptr;
  static_cast<void>(driver.context_pop(&before));
}

}  // namespace hvd
