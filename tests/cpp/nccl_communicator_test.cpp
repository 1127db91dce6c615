// The life of an NCCL communicator on fakes: how it comes about, what ends it, and what the ranks
// are told.

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <string>
#include <vector>

#include "controls.h"
#include "gpu_ranks.h"

namespace hvd {
namespace {

using test::contains;
using test::cuda_count;
using test::CudaFaults;
using test::eventually;
using test::fake_driver;
using test::GpuRank;
using test::NcclFaults;
using test::quick_nccl;
using test::sleep_ms;
using test::soon;
using test::sum_operation;
using test::with_gpu_ranks;

long nccl_count(const char* what) {
  return test::fake_function<long(const char*)>("nccl_22902", "libnccl.so.2",
                                                "hvd_fake_nccl_count")(what);
}

// What `call` throws, of whatever kind.
template <class Call>
std::string text_of(Call call, ErrorKind* kind = nullptr) {
  try {
    call();
  } catch (const Error& error) {
    if (kind != nullptr) *kind = error.kind();
    return error.what();
  }
  throw test::CheckFailure(__FILE__, __LINE__, "it threw nothing");
}

struct Sum {
  explicit Sum(GpuRank& rank_)
      : rank(rank_),
        values(
            rank.gpu.upload(std::vector<float>(100, static_cast<float>(1 + rank.session.rank())))) {
  }
  uint64_t launch(NcclCommunicator& communicator, const std::string& name = "a sum") {
    return communicator.launch(sum_operation(name, values, 100));
  }
  GpuRank& rank;
  float* values;
};

TEST(nccl_communicator_sums_and_leaves_in_good_order) {
  with_gpu_ranks(3, [&](GpuRank& rank) {
    const auto communicator = rank.open(quick_nccl());
    CHECK_EQ(communicator->rank(), rank.session.rank());
    CHECK_EQ(communicator->size(), 3);
    Sum sum(rank);
    for (int i = 0; i < 20; ++i) static_cast<void>(sum.launch(*communicator));
    const uint64_t last = sum.launch(*communicator);
    CHECK_EQ(last, uint64_t{21});
    communicator->stream_wait(rank.gpu.stream, last, soon());
    const float wanted = 6.0f * std::pow(3.0f, 20.0f);
    CHECK_EQ(rank.gpu.download(sum.values, 100)[99], wanted);
    communicator->wait(last, soon());
    communicator->stream_wait(rank.gpu.stream, last, soon());  // long over
    CHECK(communicator->await_end(last));
    communicator->close();
    communicator->close();
    CHECK(communicator->weights_valid());
    CHECK(contains(text_of([&] { sum.launch(*communicator); }),
                   "has closed the NCCL communicator \"gradients\""));
  });
  CHECK_EQ(nccl_count("comms"), 0L);
}

TEST(nccl_communicator_of_some_of_the_ranks) {
  with_gpu_ranks(3, [&](GpuRank& rank) {
    if (rank.session.rank() == 1) return;
    const auto communicator =
        rank.session.open_nccl_communicator({0, 2}, test::shared_driver(), test::shared_nccl(),
                                            rank.gpu.context(), quick_nccl(), nullptr);
    CHECK_EQ(communicator->rank(), rank.session.rank() / 2);
    Sum sum(rank);
    communicator->wait(sum.launch(*communicator), soon());
    CHECK_EQ(rank.gpu.download(sum.values, 1)[0], 4.0f);
    CHECK_THROWS(
        rank.session.open_nccl_communicator({2, 0}, test::shared_driver(), test::shared_nccl(),
                                            rank.gpu.context(), quick_nccl(), nullptr),
        ErrorKind::bad_argument);
  });
}

// ---- How it may not come about ----

// Every rank is told of the one on which it failed, and the session goes on.
void check_failed_start(const std::string& fault, int culprit, const std::string& reason) {
  auto faults = std::make_unique<NcclFaults>(fault);
  std::atomic<int> failed{0};
  std::atomic<int> cleared{0};
  with_gpu_ranks(3, [&](GpuRank& rank) {
    const int own = rank.session.rank();
    ErrorKind kind = ErrorKind::error;
    const std::string text = text_of([&] { rank.open(quick_nccl("first")); }, &kind);
    CHECK(kind == (own == culprit ? ErrorKind::error : ErrorKind::rank_failed));
    CHECK(contains(text, "the NCCL communicator \"first\" did not come about on rank " +
                             std::to_string(own) + "; rank " + std::to_string(culprit) + ": "));
    CHECK(contains(text, reason));
    test::meet(rank.session.control(), failed);
    if (own == 0) faults.reset();
    test::meet(rank.session.control(), cleared);
    const auto second = rank.open(quick_nccl("second"));
    Sum sum(rank);
    second->wait(sum.launch(*second), soon());
    CHECK_EQ(rank.gpu.download(sum.values, 1)[0], 6.0f);
  });
  CHECK_EQ(nccl_count("comms"), 0L);
}

TEST(nccl_start_that_fails_on_one_rank_is_told_to_all) {
  check_failed_start("ncclGetUniqueId=2", 0, "ncclGetUniqueId failed");
  check_failed_start("ncclCommInitRankConfig[1]=2", 1, "ncclCommInitRankConfig failed: ");
  check_failed_start("ncclCommInitRankConfig[2]=async:3", 2, "ncclCommInitRankConfig failed: ");
}

TEST(nccl_start_that_hangs_ends_with_the_deadline) {
  const NcclFaults faults("ncclCommInitRankConfig[1]=hang");
  with_gpu_ranks(2, [&](GpuRank& rank) {
    NcclSettings settings = quick_nccl();
    settings.init_timeout_ns = 300'000'000u;
    const std::string text = CHECK_THROWS(rank.open(settings), ErrorKind::timeout).what();
    CHECK(contains(text,
                   "ncclCommInitRankConfig of \"gradients\", called and not done on ranks 0, 1"));
    CHECK(contains(text, "gave up after the timeout of 0.3 s"));
  });
  CHECK_EQ(nccl_count("comms"), 0L);
}

TEST(nccl_start_names_the_rank_that_does_not_come) {
  std::atomic<int> over{0};
  with_gpu_ranks(3, [&](GpuRank& rank) {
    if (rank.session.rank() == 1) {
      CHECK(eventually([&] { return over == 2; }));
      return;
    }
    NcclSettings settings = quick_nccl();
    settings.init_timeout_ns = 300'000'000u;
    const std::string text = CHECK_THROWS(rank.open(settings), ErrorKind::timeout).what();
    CHECK(contains(text, "the start of the NCCL communicator \"gradients\" on rank 1"));
    ++over;
  });
}

// ---- What ends it ----

// Both ranks launch `good` sums that finish, then one more each; what rank 0 and rank 1 are told.
struct Told {
  std::string text[2];
  ErrorKind kind[2];
  std::string again[2];
  bool valid[2];
};
Told break_second_sum(const std::string& fault, const NcclSettings& settings = quick_nccl()) {
  Told told;
  const NcclFaults faults(fault);
  std::atomic<int> first{0};
  with_gpu_ranks(2, [&](GpuRank& rank) {
    const auto own = static_cast<size_t>(rank.session.rank());
    const auto communicator = rank.open(settings);
    Sum sum(rank);
    communicator->wait(sum.launch(*communicator, "the first sum"), soon());
    test::meet(rank.session.control(), first);
    told.text[own] =
        text_of([&] { communicator->wait(sum.launch(*communicator, "the second sum"), soon()); },
                &told.kind[own]);
    told.again[own] = text_of([&] { sum.launch(*communicator, "the third sum"); });
    told.valid[own] = communicator->weights_valid();
    // The stream comes to its end: whatever ran has been ended.
    CHECK(eventually(
        [&] { return fake_driver().stream_query(communicator->stream()) == CudaResult::success; }));
  });
  CHECK_EQ(nccl_count("comms"), 0L);
  return told;
}

TEST(nccl_error_at_a_call_is_raised_on_all_ranks) {
  const Told told = break_second_sum("ncclAllReduce[1]@2=3");
  CHECK(told.kind[1] == ErrorKind::error && told.kind[0] == ErrorKind::rank_failed);
  for (const int rank : {0, 1}) {
    CHECK(contains(told.text[rank], "rank " + std::to_string(rank) + " cannot go on: "));
    CHECK(contains(told.text[rank],
                   "the second sum (operation 2 of the NCCL communicator \"gradients\") could not "
                   "be launched: the call of NCCL failed: "));
    CHECK(contains(told.again[rank], "start again from the last checkpoint"));
  }
  CHECK(contains(told.text[0], "rank 1: the second sum"));
  CHECK(!told.valid[1]);
  CHECK(contains(told.again[1], "may be garbage, so do not save them"));
}

TEST(nccl_asynchronous_error_is_raised_on_all_ranks) {
  const Told told = break_second_sum("ncclAllReduce[0]@2=async:2");
  for (const int rank : {0, 1}) {
    CHECK(contains(told.text[rank],
                   "the second sum (operation 2 of the NCCL communicator "
                   "\"gradients\") failed: ncclCommGetAsyncError failed: "));
  }
  // Rank 1 may have heard of it before it came to anything.
  CHECK(!told.valid[0]);
  CHECK(contains(told.again[0], "do not save them"));
  CHECK(told.kind[0] == ErrorKind::error && told.kind[1] == ErrorKind::rank_failed);
}

// NCCL knows that some rank is gone, the control plane which one.
TEST(nccl_remote_error_waits_for_the_name_of_the_rank) {
  const NcclFaults faults("ncclAllReduce[0]@2=async:6");
  std::atomic<int> first{0};
  with_gpu_ranks(2, [&](GpuRank& rank) {
    const auto communicator = rank.open(quick_nccl());
    Sum sum(rank);
    communicator->wait(sum.launch(*communicator), soon());
    test::meet(rank.session.control(), first);
    sum.launch(*communicator);
    if (rank.session.rank() == 1) {
      sleep_ms(20);
      rank.session.control().post_failure(ErrorKind::rank_failed, "rank 1 was killed");
    }
    ErrorKind kind = ErrorKind::error;
    const std::string text = text_of([&] { communicator->wait(2, soon()); }, &kind);
    CHECK(kind == ErrorKind::rank_failed);
    CHECK(contains(text, "rank 1 was killed"));
  });
}

TEST(nccl_operation_that_hangs_ends_with_the_deadline) {
  NcclSettings settings = quick_nccl();
  settings.timeout_ns = 1'000'000'000u;
  const Told told = break_second_sum("ncclAllReduce[1]@2=hang", settings);
  for (const int rank : {0, 1}) {
    CHECK(told.kind[rank] == ErrorKind::timeout);
    CHECK(contains(told.text[rank],
                   "gave up after the timeout of 1 s on the second sum "
                   "(operation 2 of the NCCL communicator \"gradients\"), launched "
                   "by all ranks, but not finished on ranks 0, 1"));
    CHECK(!told.valid[rank]);
  }
}

TEST(nccl_deadline_tells_who_has_not_launched) {
  std::atomic<int> over{0};
  with_gpu_ranks(3, [&](GpuRank& rank) {
    NcclSettings settings = quick_nccl();
    settings.timeout_ns = 300'000'000u;
    settings.stall_warning_ns = 100'000'000u;
    const auto communicator = rank.open(settings);
    Sum sum(rank);
    communicator->wait(sum.launch(*communicator, "the first sum"), soon());
    if (rank.session.rank() == 1) {
      CHECK(eventually([&] { return over == 2; }));
      // This rank was at nothing: it learns of it at its next call, and its weights are good.
      const std::string text = text_of([&] { sum.launch(*communicator); });
      CHECK(contains(text, "never launched by rank 1"));
      CHECK(contains(text, "nothing was under way, so the weights are as they were"));
      CHECK(communicator->weights_valid());
      return;
    }
    const std::string text =
        text_of([&] { communicator->wait(sum.launch(*communicator, "the second sum"), soon()); });
    CHECK(contains(text,
                   "the second sum (operation 2 of the NCCL communicator \"gradients\"), "
                   "never launched by rank 1"));
    CHECK(!communicator->weights_valid());
    ++over;
  });
}

void check_leaving(bool first_the_session, const std::string& how) {
  with_gpu_ranks(2, [&](GpuRank& rank) {
    const auto communicator = rank.open(quick_nccl());
    Sum sum(rank);
    communicator->wait(sum.launch(*communicator), soon());
    if (rank.session.rank() == 1) {
      if (first_the_session) rank.session.close();
      return;
    }
    ErrorKind kind = ErrorKind::error;
    const std::string text = text_of(
        [&] { communicator->wait(sum.launch(*communicator, "the second sum"), soon()); }, &kind);
    CHECK(kind == ErrorKind::rank_failed);
    CHECK(contains(text, "rank 1 has " + how + " and never launched the second sum"));
  });
}

TEST(nccl_rank_that_leaves_is_named) {
  check_leaving(true, "left the job");
  check_leaving(false, "closed its part of the communicator");
}

TEST(nccl_operation_ends_when_another_rank_gives_up) {
  std::atomic<int> first{0};
  std::atomic<int> begun{0};
  with_gpu_ranks(2, [&](GpuRank& rank) {
    const auto communicator = rank.open(quick_nccl());
    Sum sum(rank);
    communicator->wait(sum.launch(*communicator), soon());
    test::meet(rank.session.control(), first);
    if (rank.session.rank() == 1) {
      // An exception in the user's code, say.
      CHECK(eventually([&] { return begun == 1; }));
      rank.session.control().post_failure(ErrorKind::rank_failed, "rank 1 raised ValueError");
    } else {
      // Nobody waits for it here: the watchdog aborts by itself.
      const uint64_t second = sum.launch(*communicator, "the second sum");
      communicator->stream_wait(rank.gpu.stream, second, soon());  // launched
      begun = 1;
      CHECK(eventually([&] { return !communicator->weights_valid(); }));
      CHECK(eventually([&] {
        return fake_driver().stream_query(communicator->stream()) == CudaResult::success;
      }));
    }
    ErrorKind kind = ErrorKind::error;
    const std::string text = text_of([&] { sum.launch(*communicator); }, &kind);
    CHECK(kind == ErrorKind::rank_failed);
    CHECK(contains(text, "rank 1 raised ValueError"));
    CHECK_EQ(communicator->weights_valid(), rank.session.rank() == 1);
  });
}

TEST(nccl_slow_rank_and_slow_abort_do_no_harm) {
  const NcclFaults faults("ncclAllReduce[1]=slow:20; ncclCommAbort=slow:50");
  with_gpu_ranks(2, [&](GpuRank& rank) {
    const auto communicator = rank.open(quick_nccl());
    Sum sum(rank);
    for (int i = 0; i < 3; ++i) sum.launch(*communicator);
    communicator->wait(sum.launch(*communicator), soon());
    CHECK_EQ(rank.gpu.download(sum.values, 1)[0], 24.0f);
    CHECK(communicator->weights_valid());
  });
}

TEST(nccl_work_of_the_device_that_dies_is_told) {
  // What comes behind the sum takes rank 1's device down.
  const CudaFaults faults("cuMemsetD8Async[6]=async:700");
  with_gpu_ranks(
      2,
      [&](GpuRank& rank) {
        const auto communicator = rank.open(quick_nccl());
        Sum sum(rank);
        auto operation = sum_operation("the sum", sum.values, 100);
        const CudaPointer place = test::Gpu::pointer(sum.values);
        operation.finish = [place](CudaStream stream) {
          fake_driver().check(fake_driver().fill(place, 0, 4, stream), "cuMemsetD8Async");
        };
        const std::string text = text_of([&] {
          communicator->wait(communicator->launch(std::move(operation)), soon());
          // Rank 0 may have got its sum, but no other.
          communicator->wait(sum.launch(*communicator), soon());
        });
        CHECK(contains(text, "CUDA_ERROR_ILLEGAL_ADDRESS"));
      },
      5);
}

TEST(nccl_close_in_the_middle_of_work_is_no_hang) {
  std::atomic<int> closed{0};
  with_gpu_ranks(2, [&](GpuRank& rank) {
    NcclSettings settings = quick_nccl();
    settings.close_timeout_ns = 100'000'000u;
    const auto communicator = rank.open(settings);
    Sum sum(rank);
    if (rank.session.rank() == 0) {
      sum.launch(*communicator, "a sum that rank 1 does not know of");
      communicator->close();
      CHECK(!communicator->weights_valid());
      CHECK(contains(text_of([&] { communicator->check(); }),
                     "was closed in the middle of its work"));
      closed = 1;
    } else {
      CHECK(eventually([&] { return closed == 1; }));
      CHECK(contains(text_of([&] { sum.launch(*communicator); }),
                     "rank 0: the NCCL communicator \"gradients\" was closed in the middle"));
    }
  });
}

// ---- Two communicators ----

// The ranks give work to two communicators in opposite orders, and wait for the one before they
// give anything to the other.
TEST(nccl_two_communicators_do_not_wait_for_each_other) {
  with_gpu_ranks(2, [&](GpuRank& rank) {
    const auto gradients = rank.open(quick_nccl("gradients"));
    const auto collectives = rank.open(quick_nccl("collectives"));
    CHECK(gradients->stream() != collectives->stream());
    Sum first(rank);
    Sum second(rank);
    for (int round = 0; round < 5; ++round) {
      if (rank.session.rank() == 0) {
        const uint64_t bucket = first.launch(*gradients, "a bucket");
        const uint64_t sum = second.launch(*collectives, "a collective");
        gradients->wait(bucket, soon());
        collectives->wait(sum, soon());
      } else {
        collectives->wait(second.launch(*collectives, "a collective"), soon());
        gradients->wait(first.launch(*gradients, "a bucket"), soon());
      }
    }
    CHECK_EQ(rank.gpu.download(first.values, 1)[0], 48.0f);
    CHECK_EQ(rank.gpu.download(second.values, 1)[0], 48.0f);
  });
}

TEST(nccl_second_communicator_needs_a_hardware_queue_of_its_own) {
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1", 1);
  with_gpu_ranks(2, [&](GpuRank& rank) {
    const auto first = rank.open(quick_nccl("gradients"));
    const std::string text = text_of([&] { rank.open(quick_nccl("collectives")); });
    CHECK(contains(text, "CUDA_DEVICE_MAX_CONNECTIONS is 1"));
    first->close();
    const auto second = rank.open(quick_nccl("collectives"));  // one at a time is good
  });
  unsetenv("CUDA_DEVICE_MAX_CONNECTIONS");
}

// One rank waits for NCCL, the other one for shared memory.
TEST(nccl_wait_and_another_wait_for_each_other) {
  SessionSettings settings = test::quick_settings();
  settings.control.deadlock_ns = 100'000'000u;
  with_gpu_ranks(
      2,
      [&](GpuRank& rank) {
        const auto communicator = rank.open(quick_nccl());
        const auto host = test::open_communicator(rank.session);
        Sum sum(rank);
        ErrorKind kind = ErrorKind::error;
        const std::string text = text_of(
            [&] {
              if (rank.session.rank() == 0) {
                communicator->wait(sum.launch(*communicator, "the sum"), soon());
              } else {
                auto barrier = std::make_shared<Work>();
                barrier->kind = WorkKind::barrier;
                barrier->name = "a barrier";
                host->run(barrier, soon());
              }
            },
            &kind);
        CHECK(kind == ErrorKind::mismatch);
        CHECK(contains(text,
                       "rank 0 waits for the sum (operation 1 of the NCCL communicator "
                       "\"gradients\"), never launched by rank 1"));
        CHECK(contains(text, "rank 1 waits for a barrier"));
      },
      0, settings);
}

// ---- Fork ----

TEST(nccl_communicator_is_inert_in_a_forked_child) {
  with_gpu_ranks(1, [&](GpuRank& rank) {
    auto communicator = rank.open(quick_nccl());
    Sum sum(rank);
    communicator->wait(sum.launch(*communicator), soon());
    const pid_t child = fork();
    if (child == 0) {
      int status = 1;
      try {
        sum.launch(*communicator);
      } catch (const Error& error) {
        status = contains(error.what(), "CUDA and NCCL stayed with the parent") ? 0 : 2;
      }
      communicator->close();
      communicator.reset();
      _exit(status);
    }
    int status = -1;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
    communicator->wait(sum.launch(*communicator), soon());
  });
}

}  // namespace
}  // namespace hvd
