#include "reducer/reducer.h"

#include <algorithm>
#include <functional>

#include "base/clock.h"
#include "kernels/wire.h"

namespace hvd {
namespace {

// Slots at the top of the range, for the buckets of extra rounds.
constexpr uint32_t kExtraSlots = 64;
constexpr uint32_t kBucketSlots = Communicator::kSlots - kExtraSlots;

std::string title_of(uint32_t slot) { return "gradient bucket " + std::to_string(slot); }

std::string join(const std::vector<std::string>& parts) {
  std::string text;
  for (const std::string& part : parts) text += (text.empty() ? "" : ", ") + part;
  return text;
}

}  // namespace

Reducer::Reducer(std::shared_ptr<Communicator> communicator, std::unique_ptr<RecordChannel> channel,
                 const ReducerSettings& settings)
    : communicator_(std::move(communicator)), channel_(std::move(channel)), settings_(settings) {
  communicator_->on_started = [this](uint32_t slot, const Work& work) {
    events_.write(EventKind::started, slot, work.step);
  };
  communicator_->on_done = [this](uint32_t slot, const Work& work) {
    events_.write(EventKind::done, slot, work.step);
  };
}

Reducer::~Reducer() { close(); }

void Reducer::close() {
  if (closed_) return;
  closed_ = true;
  communicator_->close();  // before the observers above lose their object
}

void Reducer::add_parameters(const std::vector<Parameter>& parameters) {
  for (const Parameter& parameter : parameters) {
    State state;
    state.parameter = parameter;
    parameters_.push_back(std::move(state));
    plan_parameters_.push_back(
        {parameter.count, parameter.dtype, parameter.group, parameter.exact});
  }
  by_products_.resize(parameters_.size());
  has_by_products_.resize(parameters_.size());
}

void Reducer::redefine_parameter(uint32_t index, const Parameter& parameter) {
  if (!taken_.empty() || extra_) {
    throw Error(ErrorKind::error, "a parameter cannot be redefined in the middle of a backward");
  }
  State& state = parameters_[index];
  if (state.bucket >= 0) {
    Bucket& bucket = buckets_[static_cast<size_t>(state.bucket)];
    std::vector<uint32_t> rest = bucket.parameters;
    rest.erase(rest.begin() + state.place);
    for (size_t place = state.place; place < rest.size(); ++place) {
      parameters_[rest[place]].place = static_cast<uint32_t>(place);
    }
    bucket = rest.empty()
                 ? Bucket{}
                 : make_bucket(std::move(rest), title_of(static_cast<uint32_t>(state.bucket)));
    state.bucket = -1;
  }
  state.parameter = parameter;
  plan_parameters_[index] = {parameter.count, parameter.dtype, parameter.group, parameter.exact};
}

// Slots whose parameters have all been redefined: the next buckets go there.
std::vector<uint32_t> Reducer::free_slots() const {
  std::vector<uint32_t> slots;
  for (uint32_t slot = 0; slot < buckets_.size(); ++slot) {
    if (buckets_[slot].parameters.empty()) slots.push_back(slot);
  }
  return slots;
}

void Reducer::set_contribution(const Contribution& contribution) {
  const bool begun = !taken_.empty() || exchanged_;
  if (begun &&
      (contribution.pre != contribution_.pre || contribution.weight != contribution_.weight ||
       contribution.scale != contribution_.scale ||
       contribution.unscale != contribution_.unscale)) {
    throw Error(ErrorKind::error, "the weight and scale of gradients cannot change in a backward");
  }
  contribution_ = contribution;
}

void Reducer::set_wire(std::optional<DType> wire) {
  if ((!taken_.empty() || exchanged_) && wire != wire_) {
    throw Error(ErrorKind::error, "the type on the wire cannot change in a backward");
  }
  wire_ = wire;
}

bool Reducer::in_flight(uint32_t index) const {
  const State& state = parameters_[index];
  return state.bucket >= 0 && buckets_[static_cast<size_t>(state.bucket)].work != nullptr;
}

void Reducer::take(uint32_t index, void* gradient) {
  State& state = parameters_[index];
  state.gradient = gradient;
  state.taken = true;
  taken_.push_back(index);
  if (extra_) return;
  if (state.bucket < 0) {
    arrivals_.push_back(index);
    return;
  }
  const auto slot = static_cast<uint32_t>(state.bucket);
  Bucket& bucket = buckets_[slot];
  if (++bucket.ready == bucket.parameters.size()) post(slot, bucket);
}

Reducer::Bucket Reducer::make_bucket(std::vector<uint32_t> parameters,
                                     const std::string& title) const {
  Bucket bucket;
  std::vector<uint64_t> counts;
  std::vector<std::string> names;
  for (const uint32_t index : parameters) {
    const Parameter& parameter = parameters_[index].parameter;
    counts.push_back(parameter.count);
    if (names.size() < 3) names.push_back(parameter.name);
  }
  if (parameters.size() > names.size()) names.push_back("...");
  const Parameter& first = parameters_[parameters.front()].parameter;
  bucket.layout = std::make_shared<Layout>(first.dtype, counts);
  bucket.exact = first.exact;
  bucket.name = title + " (" + join(names) + ")";
  bucket.parameters = std::move(parameters);
  return bucket;
}

void Reducer::post(uint32_t slot, Bucket& bucket) {
  auto work = std::make_shared<Work>();
  work->kind = WorkKind::reduce;
  work->layout = bucket.layout;
  work->divide_by_weight = true;
  work->pre = contribution_.pre;
  work->weight = contribution_.weight;
  work->scale = contribution_.scale;
  work->unscale = contribution_.unscale;
  work->want_by_products = settings_.want_by_products;
  work->accumulate_f64 = settings_.sum_in_f64;
  work->step = round_;
  work->name = bucket.name;
  if (wire_ && !bucket.exact && has_wire_form(bucket.layout->dtype)) {
    work->wire = wire_;
    work->name = std::string("(sent as ") + name_of(*wire_) + ") " + bucket.name;
  }
  work->pointers.reserve(bucket.parameters.size());
  for (const uint32_t index : bucket.parameters) {
    work->pointers.push_back(parameters_[index].gradient);
  }
  events_.write(EventKind::posted, slot, round_);
  communicator_->post(slot, work);
  bucket.work = std::move(work);  // only now: the others are told which buckets were posted
}

std::string Reducer::seen(const std::vector<int>& members) const {
  std::vector<std::string> parts;
  const uint64_t now = now_ns();
  for (const int member : members) {
    const int rank = communicator_->members()[static_cast<size_t>(member)];
    const uint64_t last = communicator_->control().last_seen(rank);
    parts.push_back("rank " + std::to_string(rank) + " (last seen " +
                    std::to_string((now - std::min(last, now)) / 1'000'000'000u) + " s ago)");
  }
  return join(parts);
}

std::string Reducer::describe_records() const {
  std::string text =
      "the end of backward " + std::to_string(round_) + " on " + seen(channel_->missing());
  std::vector<std::string> late;
  for (uint32_t slot = 0; slot < buckets_.size(); ++slot) {
    const Bucket& bucket = buckets_[slot];
    if (!bucket.work || communicator_->missing(slot, bucket.work->step).empty()) continue;
    if (late.size() == 3) {
      late.push_back("...");
      break;
    }
    late.push_back(bucket.name);
  }
  if (!late.empty()) return text + ", not there yet: " + join(late);
  // Which reducer's it is, the parameters tell.
  for (const uint32_t index : taken_) {
    late.push_back(late.size() == 3 ? "..." : parameters_[index].parameter.name);
    if (late.size() > 3) break;
  }
  return late.empty() ? text : text + ", with gradients of " + join(late);
}

std::string Reducer::describe_work() const {
  std::vector<std::string> parts;
  const auto look = [&](const std::vector<Bucket>& buckets, uint32_t first_slot) {
    for (size_t i = 0; i < buckets.size(); ++i) {
      const Bucket& bucket = buckets[i];
      if (!bucket.work || bucket.work->finished.load(std::memory_order_acquire)) continue;
      const auto late =
          communicator_->missing(first_slot + static_cast<uint32_t>(i), bucket.work->step);
      parts.push_back(bucket.name +
                      (late.empty() ? ", posted by all ranks" : ", not posted by " + seen(late)));
    }
  };
  look(buckets_, 0);
  look(extra_buckets_, kBucketSlots);
  return "backward " + std::to_string(round_) + ": " + join(parts);
}

// Members that have not posted what this rank has; what all have posted gets done.
std::vector<int> Reducer::missing_work() const {
  std::vector<int> members;
  const auto look = [&](const std::vector<Bucket>& buckets, uint32_t first_slot) {
    for (size_t i = 0; i < buckets.size(); ++i) {
      const Bucket& bucket = buckets[i];
      if (!bucket.work || bucket.work->finished.load(std::memory_order_acquire)) continue;
      const auto late =
          communicator_->missing(first_slot + static_cast<uint32_t>(i), bucket.work->step);
      members.insert(members.end(), late.begin(), late.end());
    }
  };
  look(buckets_, 0);
  look(extra_buckets_, kBucketSlots);
  return members;
}

// Waits for the records of all ranks, of a round that this rank has begun.
void Reducer::collect_records(const Wait& settings) {
  Wait wait = settings;
  wait.describe = [this] { return describe_records(); };
  or_abandon([&] {
    wait_for([this] { return channel_->poll() ? Step::done : communicator_->drive(); },
             std::move(wait), [this] { return channel_->missing(); });
    records_.clear();
    for (const std::string& bytes : channel_->records()) {
      records_.push_back(FlushRecord::decode(bytes));
    }
  });
}

// missing: the members, as indices, that have not come to this place of the round.
void Reducer::wait_for(const std::function<Step()>& step, Wait wait,
                       const std::function<std::vector<int>()>& missing) {
  const auto ranks_missing = [&] {
    std::vector<int> ranks = missing();
    for (int& rank : ranks) rank = communicator_->members()[static_cast<size_t>(rank)];
    return ranks;
  };
  wait.channel = channel_->key();
  wait.operation = round_;
  wait.missing = std::ref(ranks_missing);
  const Communicator::Helping helping(*communicator_);
  communicator_->control().wait(step, wait, communicator_->members());
}

// Where the round cannot be ended in agreement with the others: nothing may touch the gradients
// after the exception has left.
void Reducer::or_abandon(const std::function<void()>& body) {
  try {
    body();
  } catch (...) {
    give_up();
    throw;
  }
}

void Reducer::give_up() {
  communicator_->abandon();
  broken_ = true;
  end_round();
}

// After a wait that was broken off the ranks may be in the middle of a round: nothing can follow.
void Reducer::check_usable() const {
  if (closed_) throw Error(ErrorKind::error, "this gradient reducer has been closed");
  if (!broken_) return;
  const Failure* failure = communicator_->control().failure();
  throw Error(
      ErrorKind::rank_failed,
      "rank " + std::to_string(communicator_->control().rank()) +
          " cannot reduce gradients any more: " +
          (failure != nullptr ? failure->text : std::string("an earlier wait was broken off")) +
          "; end this process, or close the session and open a new one");
}

void Reducer::check_records(const FlushRecord& own) const {
  const std::vector<int>& members = communicator_->members();
  const auto rank = [&](size_t member) { return "rank " + std::to_string(members[member]); };
  std::vector<std::string> failed;
  for (size_t member = 0; member < records_.size(); ++member) {
    const FlushRecord& record = records_[member];
    if ((record.flags & FlushRecord::kFailed) != 0) {
      failed.push_back(rank(member) + ": " + record.text);
    }
  }
  if (!failed.empty()) {
    throw Error(ErrorKind::rank_failed,
                "backward " + std::to_string(round_) + " failed on " + join(failed) +
                    "; its gradients are dropped on all ranks, which may go on with the next "
                    "step: clear the gradients and run the step again, or stop");
  }
  const std::string own_name = rank(static_cast<size_t>(communicator_->rank()));
  for (size_t member = 0; member < records_.size(); ++member) {
    const FlushRecord& record = records_[member];
    if (record.parameters != own.parameters) {
      throw Error(ErrorKind::mismatch, own_name + " trains " + std::to_string(own.parameters) +
                                           " parameters, " + rank(member) + " " +
                                           std::to_string(record.parameters) +
                                           "; all ranks must add the same parameters");
    }
    if ((record.flags & FlushRecord::kAdopts) != (own.flags & FlushRecord::kAdopts)) {
      const bool other = (record.flags & FlushRecord::kAdopts) != 0;
      throw Error(ErrorKind::mismatch,
                  "the optimizer of " + (other ? rank(member) : own_name) +
                      " has new parameters, that of " + (other ? own_name : rank(member)) +
                      " has none; all ranks must add or replace the same parameters before the "
                      "same step");
    }
    if (record.step != own.step || record.round != own.round ||
        record.step_digest != own.step_digest ||
        (record.flags & FlushRecord::kExtra) != (own.flags & FlushRecord::kExtra)) {
      const bool other_order = record.step == own.step && record.step_digest != own.step_digest;
      const auto place = [&](const FlushRecord& at) {
        std::string text = "in backward " + std::to_string(at.round) + " after optimizer step " +
                           std::to_string(at.step);
        if (other_order)
          text += " (the last one of optimizer " + std::to_string(at.optimizer) + ")";
        return text;
      };
      throw Error(
          ErrorKind::mismatch,
          own_name + " is " + place(own) + ", " + rank(member) + " " + place(record) +
              (other_order ? "; all ranks must step the same optimizers in the same order"
                           : "; all ranks must run the same number of backwards per step (a rank "
                             "that skips some should use no_sync on all)"));
    }
  }
}

FlushRecord Reducer::own_record(const Request& request) const {
  FlushRecord own;
  own.flags = request.flags;
  own.round = round_;
  own.step = request.step;
  own.step_digest = request.step_digest;
  own.optimizer = request.optimizer;
  own.parameters = static_cast<uint32_t>(parameters_.size());
  own.weight = contribution_.weight;
  own.scale = contribution_.scale;
  own.notes = notes_;
  for (const Bucket& bucket : buckets_) own.posted.push_back(bucket.work != nullptr);
  return own;
}

std::vector<uint32_t> Reducer::exchange(const Request& request, const Wait& wait) {
  check_usable();
  events_.write(EventKind::flush_begin, 0, round_);
  const uint64_t started = now_ns();
  last_request_ = request;
  FlushRecord own = own_record(request);
  own.present.resize(parameters_.size());
  for (const uint32_t index : taken_) own.present[index] = true;
  own.arrivals = arrivals_;
  channel_->begin(own.encode());
  collect_records(wait);
  try {
    check_records(own);
  } catch (const Error&) {
    drain(wait);
    throw;
  }
  exchanged_ = true;
  announced_ = 0;
  total_weight_ = 0;
  agreed_scale_ = 0;
  scales_differ_ = false;
  told_.clear();
  for (const FlushRecord& record : records_) {
    told_.push_back(record.notes);
    total_weight_ += record.weight;
    if (agreed_scale_ == 0) agreed_scale_ = record.scale;
    if (record.scale != 0 && record.scale != agreed_scale_) scales_differ_ = true;
  }
  if (agreed_scale_ == 0) agreed_scale_ = 1;
  present_.assign(parameters_.size(), false);
  for (const FlushRecord& record : records_) {
    announced_ |= record.flags;
    for (size_t index = 0; index < present_.size(); ++index) {
      if (record.present[index]) present_[index] = true;
    }
  }
  std::vector<uint32_t> missing;
  for (uint32_t index = 0; index < present_.size(); ++index) {
    if (present_[index] && !parameters_[index].taken) missing.push_back(index);
  }
  blocked_ns_ += now_ns() - started;
  return missing;
}

void Reducer::provide(uint32_t index, void* gradient) {
  State& state = parameters_[index];
  state.gradient = gradient;
  state.taken = true;
  taken_.push_back(index);
}

std::vector<std::vector<uint32_t>> Reducer::plan_extra_round() const {
  std::vector<uint32_t> order;
  // Fewer and larger buckets than usual if need be: the slots for extra rounds are few.
  uint64_t bytes = 0;
  for (uint32_t index = 0; index < present_.size(); ++index) {
    if (!present_[index]) continue;
    order.push_back(index);
    bytes += plan_parameters_[index].count * size_of(plan_parameters_[index].dtype);
  }
  const uint64_t cap = std::max(settings_.bucket_bytes, bytes / (kExtraSlots / 4) + 1);
  return plan_buckets(order, plan_parameters_, cap);
}

std::vector<std::vector<uint32_t>> Reducer::plan_arrivals() const {
  std::vector<std::vector<uint32_t>> arrivals;
  for (const FlushRecord& record : records_) arrivals.push_back(record.arrivals);
  return plan_buckets(agree_on_order(arrivals), plan_parameters_, settings_.bucket_bytes);
}

void Reducer::post_rest(std::vector<std::vector<uint32_t>> planned) {
  if (extra_) {
    for (auto& parameters : planned) {
      extra_buckets_.push_back(make_bucket(
          std::move(parameters), "extra bucket " + std::to_string(extra_buckets_.size())));
    }
    for (size_t i = 0; i < extra_buckets_.size(); ++i) {
      post(kBucketSlots + static_cast<uint32_t>(i), extra_buckets_[i]);
    }
    return;
  }
  const std::vector<uint32_t> free = free_slots();
  for (size_t number = 0; number < planned.size(); ++number) {
    auto& parameters = planned[number];
    const auto slot = number < free.size() ? free[number] : static_cast<uint32_t>(buckets_.size());
    for (size_t place = 0; place < parameters.size(); ++place) {
      State& state = parameters_[parameters[place]];
      state.bucket = slot;
      state.place = static_cast<uint32_t>(place);
    }
    if (slot == buckets_.size()) buckets_.emplace_back();
    buckets_[slot] = make_bucket(std::move(parameters), title_of(slot));
  }
  for (uint32_t slot = 0; slot < buckets_.size(); ++slot) {
    Bucket& bucket = buckets_[slot];
    if (bucket.work) continue;
    const bool wanted = std::any_of(bucket.parameters.begin(), bucket.parameters.end(),
                                    [&](uint32_t index) { return present_[index]; });
    if (wanted) post(slot, bucket);
  }
}

void Reducer::complete(const Wait& wait) {
  const uint64_t started = now_ns();
  auto planned = extra_ ? plan_extra_round() : plan_arrivals();
  // All ranks come to the same conclusion, before anything has changed.
  if (extra_ && planned.size() > kExtraSlots) {
    drain(wait);
    throw Error(ErrorKind::error, "gradients that fire twice in one backward come in more than " +
                                      std::to_string(kExtraSlots) + " types and optimizers");
  }
  if (!extra_ && buckets_.size() - free_slots().size() + planned.size() > kBucketSlots) {
    drain(wait);
    throw Error(ErrorKind::bad_argument, "the gradients need more than " +
                                             std::to_string(kBucketSlots) +
                                             " buckets; raise bucket_cap_mb");
  }
  or_abandon([&] { post_rest(std::move(planned)); });
  wait_for_work(wait);
  std::unique_ptr<Error> error;
  for (auto* buckets : {&buckets_, &extra_buckets_}) {
    for (const Bucket& bucket : *buckets) {
      if (bucket.work && bucket.work->error && !error) {
        error = std::make_unique<Error>(*bucket.work->error);
      }
    }
  }
  if (settings_.want_by_products && !error) {
    has_by_products_.assign(parameters_.size(), false);
    for (const Bucket& bucket : buckets_) {
      for (size_t place = 0; bucket.work && place < bucket.parameters.size(); ++place) {
        by_products_[bucket.parameters[place]] = bucket.work->by_products[place];
        has_by_products_[bucket.parameters[place]] = present_[bucket.parameters[place]];
      }
    }
  }
  const bool extra_follows = extra_round_needed();
  end_round();
  extra_ = extra_follows;
  blocked_ns_ += now_ns() - started;
  events_.write(EventKind::flush_end, 0, round_ - 1);
  if (error) {
    extra_ = false;
    throw Error(*error);
  }
}

void Reducer::wait_for_work(const Wait& settings) {
  Wait wait = settings;
  wait.describe = [this] { return describe_work(); };
  size_t first = 0;  // everything before it has finished
  const auto all_done = [&] {
    for (; first < buckets_.size() + extra_buckets_.size(); ++first) {
      const Bucket& bucket =
          first < buckets_.size() ? buckets_[first] : extra_buckets_[first - buckets_.size()];
      if (bucket.work && !bucket.work->finished.load(std::memory_order_acquire)) return false;
    }
    return true;
  };
  or_abandon([&] {
    wait_for([&] { return all_done() ? Step::done : communicator_->drive(); }, std::move(wait),
             [this] { return missing_work(); });
  });
}

// After records that end the round: what all ranks posted runs to its end, because some may have
// begun; what a rank did not post never will, and is taken back.
void Reducer::drain(const Wait& wait) {
  for (uint32_t slot = 0; slot < buckets_.size(); ++slot) {
    Bucket& bucket = buckets_[slot];
    if (!bucket.work) continue;
    const bool by_all =
        std::all_of(records_.begin(), records_.end(), [&](const FlushRecord& record) {
          return slot < record.posted.size() && record.posted[slot];
        });
    if (by_all) continue;
    communicator_->withdraw(slot);
    bucket.work = nullptr;
  }
  wait_for_work(wait);
  end_round();
}

void Reducer::end_round() {
  for (const uint32_t index : taken_) {
    parameters_[index].gradient = nullptr;
    parameters_[index].taken = false;
  }
  taken_.clear();
  arrivals_.clear();
  for (Bucket& bucket : buckets_) {
    bucket.ready = 0;
    bucket.work = nullptr;
  }
  extra_buckets_.clear();
  extra_ = false;
  failed_ = false;
  exchanged_ = false;
  ++round_;
}

void Reducer::fail(const std::string& text) {
  if (broken_ || closed_) return;
  if (exchanged_) {
    // The others count on what this rank announced, and post and wait accordingly.
    communicator_->control().post_failure(
        ErrorKind::rank_failed, "rank " + std::to_string(communicator_->control().rank()) +
                                    " failed in the middle of a reduction: " + text);
    give_up();
    return;
  }
  FlushRecord own = own_record(last_request_);
  own.flags = FlushRecord::kFailed;
  own.text = text;
  try {
    channel_->begin(own.encode());
    failed_ = true;
  } catch (const Error&) {
    broken_ = true;  // the session is closed, or stayed with the parent of a fork: nobody waits
  }
}

void Reducer::recover(const Wait& wait) {
  check_usable();
  collect_records(wait);
  drain(wait);
}

const ByProducts* Reducer::by_products(uint32_t index) const {
  return has_by_products_[index] ? &by_products_[index] : nullptr;
}

std::vector<std::vector<uint32_t>> Reducer::buckets() const {
  std::vector<std::vector<uint32_t>> parameters;
  for (const Bucket& bucket : buckets_) parameters.push_back(bucket.parameters);
  return parameters;
}

}  // namespace hvd
