#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "observe/events.h"
#include "reducer/flush_record.h"
#include "reducer/plan.h"

namespace hvd {

struct ReducerSettings {
  uint64_t bucket_bytes = 25u << 20;
  bool want_by_products = false;
  bool sum_in_f64 = false;
  uint64_t timeout_ns = 1'800'000'000'000u;
};

// Turns the gradients of one backward into their mean over the ranks.
//
// During backward, take() is called for each finished gradient; a bucket whose gradients are all
// there is posted and reduced while backward goes on. At the end, exchange() tells every rank what
// every rank has, and complete() posts the rest and waits. What a rank lacks counts as nothing;
// what no rank has is left alone. Buckets are formed in complete(), on all ranks at once, from
// what fired for the first time, so the first backward is not overlapped and nothing is rebuilt.
//
// A backward that ends in an exception is told to the others by fail(), which never blocks;
// recover() finishes that round before the next one begins.
//
// Thread contract: one thread at a time (the one that runs backward). The gradient memory has to
// stay alive, and unread, from take() until complete(), exchange() or recover() has returned or
// thrown.
class Reducer {
 public:
  struct Parameter {
    std::string name;
    uint64_t count;  // elements
    DType dtype;
    uint32_t group;
    bool exact = false;  // see PlanParameter
  };

  Reducer(std::shared_ptr<Communicator> communicator, std::unique_ptr<RecordChannel> channel,
          const ReducerSettings& settings);
  ~Reducer();

  // New parameters get the next indices. All ranks have to add the same ones.
  void add_parameters(const std::vector<Parameter>& parameters);
  // The parameter has another size or type from now on: it leaves its bucket and joins a new one
  // when it fires next. Between rounds only, and on all ranks between the same ones.
  void redefine_parameter(uint32_t index, const Parameter& parameter);
  size_t parameter_count() const { return parameters_.size(); }

  // Notes the time at which the gradient of a parameter was finished.
  void fired(uint32_t index) { events_.write(EventKind::fired, index, round_); }
  // The gradient of a parameter is final. In an extra round nothing is posted yet.
  void take(uint32_t index, void* gradient);
  bool taken(uint32_t index) const { return parameters_[index].taken; }
  // Belongs to a bucket, so taking it early lets it be reduced early.
  bool planned(uint32_t index) const { return parameters_[index].bucket >= 0; }
  // Of a planned parameter; how many parameters a bucket has; how many buckets have some.
  uint32_t bucket_of(uint32_t index) const {
    return static_cast<uint32_t>(parameters_[index].bucket);
  }
  size_t bucket_size(uint32_t bucket) const { return buckets_[bucket].parameters.size(); }
  size_t bucket_count() const { return buckets_.size() - free_slots().size(); }
  // Taken, and the communicator may be at work on its memory.
  bool in_flight(uint32_t index) const;

  // What this rank's gradients are worth in the rounds from now on: the result is the sum of
  // pre * gradient over the ranks, divided by the sum of the weights, with factors made for ranks
  // whose gradients have different scales (see Work). Between rounds only.
  struct Contribution {
    double pre = 1;
    double weight = 1;
    double scale = 1;
    bool unscale = false;  // the same on all ranks
  };
  void set_contribution(const Contribution& contribution);
  // The type in which gradients of f32 and f64 travel in the rounds from now on, except exact ones;
  // none: as they are. The same on all ranks, between rounds only.
  void set_wire(std::optional<DType> wire);
  // Of the last exchange: the sum of the ranks' weights, the scale of the result unless it was
  // undone, and whether the ranks came with different ones.
  double total_weight() const { return total_weight_; }
  double agreed_scale() const { return agreed_scale_; }
  bool scales_differ() const { return scales_differ_; }

  // Of this rank, told to the others in each exchange from now on.
  void set_notes(const Notes& notes) { notes_ = notes; }
  // Of all ranks, by member, as told in the last exchange that did not throw.
  const std::vector<Notes>& notes() const { return told_; }

  struct Request {
    // Optimizer steps seen so far, a digest of which optimizers made them in which order, and the
    // last of these: the same on all ranks, or a mismatch.
    uint64_t step = 0;
    uint32_t flags = 0;  // of FlushRecord, except kFailed
    uint64_t step_digest = 0;
    uint32_t optimizer = 0;
  };
  // Ends the collection of this round. Returns the parameters that other ranks have and this one
  // lacks: provide() has to be called for each of them. Throws when the ranks do not agree or one
  // has failed; then the round is over.
  std::vector<uint32_t> exchange(const Request& request, const Wait& wait);
  // Flags of FlushRecord that some rank has set in the last exchange.
  uint32_t announced() const { return announced_; }
  // Some rank announced an extra round (kMore).
  bool extra_round_needed() const { return (announced_ & FlushRecord::kMore) != 0; }
  // Memory that takes the result; what is in it counts as this rank's contribution.
  void provide(uint32_t index, void* gradient);
  // Reduces what is left, waits for all of it. The round is over whether it throws or not.
  void complete(const Wait& wait);

  void fail(const std::string& text);
  bool must_recover() const { return failed_; }
  void recover(const Wait& wait);

  // Of the last completed round, by parameter: only those that were reduced.
  const ByProducts* by_products(uint32_t index) const;

  // After it no memory of gradients is touched any more. Idempotent.
  void close();

  uint64_t rounds() const { return round_; }
  uint64_t blocked_ns() const { return blocked_ns_; }
  uint64_t busy_ns() const { return communicator_->busy_ns(); }
  // Parameter indices of each bucket.
  std::vector<std::vector<uint32_t>> buckets() const;
  EventRing& events() { return events_; }

 private:
  struct State {
    Parameter parameter;
    int64_t bucket = -1;
    uint32_t place = 0;  // in the bucket
    void* gradient = nullptr;
    bool taken = false;
  };
  struct Bucket {
    std::vector<uint32_t> parameters;
    std::shared_ptr<const Layout> layout;
    std::string name;
    bool exact = false;
    uint32_t ready = 0;
    std::shared_ptr<Work> work;  // posted in this round
  };

  Bucket make_bucket(std::vector<uint32_t> parameters, const std::string& title) const;
  void post(uint32_t slot, Bucket& bucket);
  void collect_records(const Wait& wait);
  void wait_for(const std::function<Step()>& step, Wait wait,
                const std::function<std::vector<int>()>& missing);
  void or_abandon(const std::function<void()>& body);
  void give_up();
  FlushRecord own_record(const Request& request) const;
  std::vector<uint32_t> free_slots() const;
  std::vector<std::vector<uint32_t>> plan_arrivals() const;
  std::vector<std::vector<uint32_t>> plan_extra_round() const;
  void post_rest(std::vector<std::vector<uint32_t>> planned);
  void wait_for_work(const Wait& wait);
  std::string describe_records() const;
  std::string describe_work() const;
  std::vector<int> missing_work() const;
  std::string seen(const std::vector<int>& members) const;
  void check_usable() const;
  void check_records(const FlushRecord& own) const;
  void drain(const Wait& wait);
  void end_round();

  std::shared_ptr<Communicator> communicator_;
  std::unique_ptr<RecordChannel> channel_;
  ReducerSettings settings_;
  std::vector<State> parameters_;
  std::vector<PlanParameter> plan_parameters_;
  std::vector<Bucket> buckets_;
  std::vector<Bucket> extra_buckets_;
  std::vector<uint32_t> taken_;     // of this round
  std::vector<uint32_t> arrivals_;  // of this round: taken without a bucket
  std::vector<FlushRecord> records_;
  std::vector<bool> present_;  // by parameter: some rank has it
  bool extra_ = false;
  uint32_t announced_ = 0;
  bool failed_ = false;
  bool exchanged_ = false;  // the ranks know what each will post in this round
  bool closed_ = false;
  bool broken_ = false;
  uint64_t round_ = 0;
  Request last_request_;
  Contribution contribution_;
  std::optional<DType> wire_;
  Notes notes_{};
  std::vector<Notes> told_;
  double total_weight_ = 0;
  double agreed_scale_ = 1;
  bool scales_differ_ = false;
  uint64_t blocked_ns_ = 0;
  std::vector<ByProducts> by_products_;
  std::vector<bool> has_by_products_;
  EventRing events_;
};

}  // namespace hvd
