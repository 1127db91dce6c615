// NCCL's table, and the fake NCCL: ranks as threads, each with a device of its own, and ranks as
// processes.

#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "fakes.h"
#include "gpu/nccl_api.h"

extern char** environ;

namespace hvd {
namespace {

using test::eventually;
using test::fake_driver;
using test::fake_nccl;
using test::Gpu;
using test::join_nccl;
using test::NcclFaults;
using test::new_id;
using test::run_ranks;
using test::settled;

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

void ok(NcclResult result) {
  if (result != NcclResult::success) {
    throw test::CheckFailure(__FILE__, __LINE__, fake_nccl().get_error_string(result));
  }
}

// A call whose work may begin in the background: NCCL's answer once it has begun.
void launched(NcclResult result, NcclComm comm) {
  ok(result == NcclResult::in_progress ? settled(fake_nccl(), comm) : result);
}

void leave(NcclComm comm) {
  NcclApi& nccl = fake_nccl();
  nccl.check(nccl.comm_finalize(comm), comm, "ncclCommFinalize");
  ok(settled(nccl, comm));
  ok(nccl.comm_destroy(comm));
}

// body(rank, gpu, comm) in one thread per rank.
template <class Body>
void with_ranks(int ranks, Body body) {
  const NcclUniqueId id = new_id(fake_nccl());
  run_ranks(ranks, [&](int rank) {
    Gpu gpu(rank);
    NcclComm comm = join_nccl(fake_nccl(), id, rank, ranks);
    body(rank, gpu, comm);
  });
}

// ---- The table

TEST(nccl_is_found_in_an_installed_package_and_says_what_it_has) {
  fake_driver();
  const std::unique_ptr<NcclApi> nccl =
      open_nccl(nccl_library({"/no/such", std::string(HVD_FAKES_DIR) + "/nccl_22902"}));
  CHECK_EQ(nccl->version(), 22902);
  CHECK_EQ(nccl->describe(),
           "libnccl.so.2, version 2.29.2 (" + test::fake_file("nccl_22902", "libnccl.so.2") + ")");
  for (const NcclFeature feature : {NcclFeature::split, NcclFeature::memory, NcclFeature::shrink,
                                    NcclFeature::window, NcclFeature::revoke, NcclFeature::grow}) {
    CHECK(nccl->has(feature));
  }
}

TEST(nccl_that_lacks_features_says_which_version_has_them) {
  const std::unique_ptr<NcclApi> middle = test::open_fake_nccl("nccl_22304");
  CHECK(middle->has(NcclFeature::split) && middle->has(NcclFeature::memory));
  CHECK(!middle->has(NcclFeature::shrink) && !middle->has(NcclFeature::window));

  const std::unique_ptr<NcclApi> old = test::open_fake_nccl("nccl_21403");
  CHECK_EQ(old->version(), 21403);
  for (const NcclFeature feature : {NcclFeature::split, NcclFeature::memory, NcclFeature::shrink,
                                    NcclFeature::window, NcclFeature::revoke, NcclFeature::grow}) {
    CHECK(!old->has(feature));
  }
  NcclComm comm = nullptr;
  const auto why = [&](auto call) {
    return std::string(CHECK_THROWS(call(), ErrorKind::error).what());
  };
  std::string text = why([&] { return old->comm_split(nullptr, 0, 0, &comm, nullptr); });
  CHECK(contains(text, "libnccl.so.2, version 2.14.3 (" +
                           test::fake_file("nccl_21403", "libnccl.so.2") + ")"));
  CHECK(contains(text, "has no function ncclCommSplit: NCCL 2.18 or newer is needed"));
  void* pointer = nullptr;
  CHECK(contains(why([&] { return old->memory_allocate(&pointer, 1); }), "NCCL 2.19 or newer"));
  CHECK(contains(why([&] { return old->comm_shrink(nullptr, {}, &comm, nullptr, 0); }),
                 "NCCL 2.27 or newer"));
  CHECK(contains(why([&] { return old->comm_revoke(nullptr); }), "NCCL 2.28.7 or newer"));
  CHECK(contains(why([&] { return old->comm_grow(nullptr, 2, nullptr, 0, &comm, nullptr); }),
                 "NCCL 2.29.2 or newer"));
}

TEST(nccl_that_is_too_old_or_incomplete_is_refused) {
  std::string text = CHECK_THROWS(test::open_fake_nccl("nccl_21304"), ErrorKind::error).what();
  CHECK(contains(text, "libnccl.so.2, version 2.13.4 ("));
  CHECK(contains(text, "is too old: NCCL 2.14 or newer is needed"));
  text = CHECK_THROWS(test::open_fake_nccl("nccl_broken"), ErrorKind::error).what();
  CHECK(contains(text, "has no function ncclBroadcast"));
  CHECK_EQ(nccl_version_text(2804), "2.8.4");
  CHECK_EQ(nccl_version_text(22105), "2.21.5");
  CHECK_EQ(nccl_version_text(23203), "2.32.3");
}

// An old library reads the head of our configuration only, and its "undefined" is not known there.
TEST(configuration_is_good_for_every_version) {
  for (const char* folder : {"nccl_21403", "nccl_22304", "nccl_22902"}) {
    const std::unique_ptr<NcclApi> nccl = test::open_fake_nccl(folder);
    const Gpu gpu(0);
    NcclConfig config;
    NcclComm comm = nullptr;
    const NcclUniqueId id = new_id(*nccl);
    CHECK(nccl->comm_init_rank_config(&comm, 1, id, 0, &config) == NcclResult::in_progress);
    CHECK(settled(*nccl, comm) == NcclResult::success);
    CHECK(nccl->comm_abort(comm) == NcclResult::success);
    config.magic = 0;
    CHECK(nccl->comm_init_rank_config(&comm, 1, id, 0, &config) == NcclResult::invalid_argument);
  }
  NcclConfig config;
  config.min_ctas = 4;
  NcclComm comm = nullptr;
  const Gpu gpu(0);
  CHECK(fake_nccl().comm_init_rank_config(&comm, 1, new_id(fake_nccl()), 0, &config) ==
        NcclResult::invalid_argument);
}

TEST(nccl_errors_carry_call_account_and_library) {
  NcclApi& nccl = fake_nccl();
  nccl.check(NcclResult::success, nullptr, "ncclAllReduce");
  nccl.check(NcclResult::in_progress, nullptr, "ncclAllReduce");
  std::string text =
      CHECK_THROWS(nccl.check(nccl.comm_abort(nullptr), nullptr, "ncclCommAbort"), ErrorKind::error)
          .what();
  CHECK(contains(text, "ncclCommAbort failed: invalid argument (not a communicator"));
  CHECK(contains(text, "libnccl.so.2, version 2.29.2"));
  text = CHECK_THROWS(nccl.check(NcclResult::remote_error, nullptr, "ncclAllReduce"),
                      ErrorKind::rank_failed)
             .what();
  CHECK(contains(text, "remote process exited"));
}

// ---- Collectives

template <class Value>
void check_all_reduce(NcclDataType type, NcclRedOp op, std::vector<Value> (*input)(int rank),
                      std::vector<Value> (*expected)(int ranks)) {
  constexpr int kRanks = 3;
  with_ranks(kRanks, [&](int rank, Gpu& gpu, NcclComm comm) {
    const std::vector<Value> values = input(rank);
    Value* from = gpu.upload(values);
    Value* to = gpu.allocate<Value>(values.size());
    launched(fake_nccl().all_reduce(from, to, values.size(), type, op, comm, gpu.stream), comm);
    CHECK(gpu.download(to, values.size()) == expected(kRanks));
    // In place, and a second time.
    launched(fake_nccl().all_reduce(from, from, values.size(), type, op, comm, gpu.stream), comm);
    CHECK(gpu.download(from, values.size()) == expected(kRanks));
    leave(comm);
  });
}

TEST(nccl_all_reduce_sums_and_compares) {
  check_all_reduce<float>(
      NcclDataType::float32, NcclRedOp::sum,
      [](int rank) { return std::vector<float>(40'000, static_cast<float>(rank) + 0.5f); },
      [](int) { return std::vector<float>(40'000, 4.5f); });
  check_all_reduce<double>(
      NcclDataType::float64, NcclRedOp::prod,
      [](int rank) { return std::vector<double>(17, rank + 2.0); },
      [](int) { return std::vector<double>(17, 24.0); });
  check_all_reduce<int64_t>(
      NcclDataType::int64, NcclRedOp::max,
      [](int rank) { return std::vector<int64_t>{rank, -rank, 1LL << (40 + rank)}; },
      [](int) { return std::vector<int64_t>{2, 0, 1LL << 42}; });
  check_all_reduce<uint8_t>(
      NcclDataType::uint8, NcclRedOp::min,
      [](int rank) { return std::vector<uint8_t>{uint8_t(7 + rank), uint8_t(255 - rank)}; },
      [](int) { return std::vector<uint8_t>{7, 253}; });
  // 1, 2 and 4 as half and as bfloat16: 7.
  check_all_reduce<uint16_t>(
      NcclDataType::float16, NcclRedOp::sum,
      [](int rank) { return std::vector<uint16_t>(9, uint16_t(0x3c00 + 0x400 * rank)); },
      [](int) { return std::vector<uint16_t>(9, 0x4700); });
  check_all_reduce<uint16_t>(
      NcclDataType::bfloat16, NcclRedOp::sum,
      [](int rank) { return std::vector<uint16_t>(9, uint16_t(0x3f80 + 0x80 * rank)); },
      [](int) { return std::vector<uint16_t>(9, 0x40e0); });
}

TEST(nccl_gathers_scatters_and_broadcasts) {
  constexpr int kRanks = 3;
  constexpr size_t kCount = 30'000;  // several exchanges
  with_ranks(kRanks, [&](int rank, Gpu& gpu, NcclComm comm) {
    NcclApi& nccl = fake_nccl();
    const int* own = gpu.upload(std::vector<int>(kCount, rank));
    int* all = gpu.allocate<int>(kRanks * kCount);
    launched(nccl.all_gather(own, all, kCount, NcclDataType::int32, comm, gpu.stream), comm);
    const std::vector<int> gathered = gpu.download(all, kRanks * kCount);
    for (size_t i = 0; i < gathered.size(); ++i)
      CHECK_EQ(gathered[i], static_cast<int>(i / kCount));

    // Part p of every rank is p; so rank p gets 3 p.
    int* part = gpu.allocate<int>(kCount);
    launched(nccl.reduce_scatter(all, part, kCount, NcclDataType::int32, NcclRedOp::sum, comm,
                                 gpu.stream),
             comm);
    CHECK(gpu.download(part, kCount) == std::vector<int>(kCount, 3 * rank));

    launched(nccl.broadcast(rank == 1 ? own : nullptr, part, kCount, NcclDataType::int32, 1, comm,
                            gpu.stream),
             comm);
    CHECK(gpu.download(part, kCount) == std::vector<int>(kCount, 1));
    // Nothing at all is a collective as well.
    launched(
        nccl.all_reduce(nullptr, nullptr, 0, NcclDataType::int32, NcclRedOp::sum, comm, gpu.stream),
        comm);
    gpu.synchronize();
    leave(comm);
  });
}

TEST(nccl_messages_of_a_group_pass_each_other) {
  constexpr int kRanks = 3;
  constexpr size_t kCount = 20'000;  // more than fits on the way
  with_ranks(kRanks, [&](int rank, Gpu& gpu, NcclComm comm) {
    NcclApi& nccl = fake_nccl();
    const int* own = gpu.upload(std::vector<int>(kCount, rank));
    std::vector<int*> from;
    ok(nccl.group_start());
    for (int peer = 0; peer < kRanks; ++peer) {
      if (peer == rank) continue;
      from.push_back(gpu.allocate<int>(kCount));
      ok(nccl.send(own, kCount, NcclDataType::int32, peer, comm, gpu.stream));
      ok(nccl.receive(from.back(), kCount, NcclDataType::int32, peer, comm, gpu.stream));
    }
    launched(nccl.group_end(), comm);
    gpu.synchronize();
    for (int peer = 0, i = 0; peer < kRanks; ++peer) {
      if (peer == rank) continue;
      CHECK(gpu.download(from[static_cast<size_t>(i++)], kCount) == std::vector<int>(kCount, peer));
    }
    leave(comm);
  });
}

TEST(nccl_collectives_keep_their_order_over_streams_and_wait_for_the_data) {
  with_ranks(2, [&](int rank, Gpu& gpu, NcclComm comm) {
    NcclApi& nccl = fake_nccl();
    const CudaStream other = gpu.new_stream();
    float* values = gpu.upload(std::vector<float>(100, 1.0f));
    // Rank 1's data are late: the sum has them nevertheless, through the event alone.
    const test::CudaFaults late("cuMemsetD8Async[1]=slow:20");
    CudaEvent ready = nullptr;
    CHECK(fake_driver().event_create(&ready, kCudaEventDisableTiming) == CudaResult::success);
    CHECK(fake_driver().fill(Gpu::pointer(values), 0, 400, other) == CudaResult::success);
    CHECK(fake_driver().event_record(ready, other) == CudaResult::success);
    CHECK(fake_driver().stream_wait_event(gpu.stream, ready) == CudaResult::success);
    launched(nccl.all_reduce(values, values, 100, NcclDataType::float32, NcclRedOp::sum, comm,
                             gpu.stream),
             comm);
    CHECK(gpu.download(values, 100) == std::vector<float>(100, 0.0f));
    // The second collective is called second on both, though on different streams.
    float* first = gpu.upload(std::vector<float>(50'000, 1.0f));
    float* second = gpu.upload(std::vector<float>(10, 2.0f));
    const CudaStream streams[] = {gpu.stream, other};
    ok(nccl.all_reduce(first, first, 50'000, NcclDataType::float32, NcclRedOp::sum, comm,
                       streams[rank]));
    ok(nccl.all_reduce(second, second, 10, NcclDataType::float32, NcclRedOp::sum, comm,
                       streams[1 - rank]));
    CHECK(fake_driver().stream_synchronize(other) == CudaResult::success);
    CHECK(gpu.download(first, 50'000) == std::vector<float>(50'000, 2.0f));
    CHECK(gpu.download(second, 10) == std::vector<float>(10, 4.0f));
    CHECK(fake_driver().event_destroy(ready) == CudaResult::success);
    leave(comm);
  });
}

// ---- Life

TEST(nonblocking_communicator_refuses_calls_while_it_is_at_one) {
  NcclApi& nccl = fake_nccl();
  const NcclUniqueId id = new_id(nccl);
  Gpu gpu(0);
  NcclComm comm = nullptr;
  NcclConfig config;
  CHECK(nccl.comm_init_rank_config(&comm, 2, id, 0, &config) == NcclResult::in_progress);
  NcclResult state = NcclResult::success;
  ok(nccl.comm_get_async_error(comm, &state));
  CHECK(state == NcclResult::in_progress);  // the other rank is not there
  int* value = gpu.upload(std::vector<int>(1, 1));
  const auto sum = [&] {
    return nccl.all_reduce(value, value, 1, NcclDataType::int32, NcclRedOp::sum, comm, gpu.stream);
  };
  CHECK(sum() == NcclResult::invalid_argument);
  CHECK(contains(nccl.get_last_error(comm), "still at its last call"));
  run_ranks(2, [&](int thread) {
    if (thread == 1) {
      Gpu other(1);
      NcclComm theirs = join_nccl(nccl, id, 1, 2);
      int* their_value = other.upload(std::vector<int>(1, 2));
      launched(nccl.all_reduce(their_value, their_value, 1, NcclDataType::int32, NcclRedOp::sum,
                               theirs, other.stream),
               theirs);
      CHECK_EQ(other.download(their_value, 1)[0], 3);
      leave(theirs);
    } else {
      const CudaContextScope scope(fake_driver(), gpu.context());
      ok(settled(nccl, comm));
      // The first collective connects the ranks in the background.
      CHECK(sum() == NcclResult::in_progress);
      ok(settled(nccl, comm));
      CHECK_EQ(gpu.download(value, 1)[0], 3);
      leave(comm);
    }
  });
  CHECK(nccl.comm_destroy(comm) == NcclResult::invalid_argument);  // it is gone
}

TEST(blocking_communicator_answers_when_it_is_done) {
  const NcclUniqueId id = new_id(fake_nccl());
  run_ranks(2, [&](int rank) {
    Gpu gpu(rank);
    NcclComm comm = join_nccl(fake_nccl(), id, rank, 2, 1);
    int* value = gpu.upload(std::vector<int>(1, rank));
    ok(fake_nccl().all_reduce(value, value, 1, NcclDataType::int32, NcclRedOp::max, comm,
                              gpu.stream));
    CHECK_EQ(gpu.download(value, 1)[0], 1);
    ok(fake_nccl().comm_finalize(comm));
    ok(fake_nccl().comm_destroy(comm));
  });
}

TEST(nccl_refuses_two_ranks_on_one_gpu_and_ranks_that_differ) {
  NcclApi& nccl = fake_nccl();
  const NcclUniqueId same = new_id(nccl);
  run_ranks(2, [&](int rank) {
    const Gpu gpu(0);
    CHECK_THROWS(join_nccl(nccl, same, rank, 2), ErrorKind::error);
  });
  const NcclUniqueId differ = new_id(nccl);
  run_ranks(2, [&](int rank) {
    Gpu gpu(rank);
    NcclComm comm = join_nccl(nccl, differ, rank, 2);
    int* value = gpu.upload(std::vector<int>(2, rank));
    const NcclResult called =
        nccl.all_reduce(value, value, static_cast<size_t>(1 + rank), NcclDataType::int32,
                        NcclRedOp::sum, comm, gpu.stream);
    CHECK(called == NcclResult::in_progress);
    CHECK(eventually([&] {
      NcclResult state = NcclResult::success;
      ok(nccl.comm_get_async_error(comm, &state));
      return state == NcclResult::invalid_usage;
    }));
    CHECK(contains(nccl.get_last_error(comm), "calls another collective"));
    gpu.synchronize();
    ok(nccl.comm_abort(comm));
  });
  const Gpu gpu(0);
  NcclComm comm = nullptr;
  NcclConfig config;
  CHECK(nccl.comm_init_rank_config(&comm, 2, NcclUniqueId{}, 0, &config) ==
        NcclResult::system_error);
  CHECK(nccl.comm_init_rank_config(&comm, 2, differ, 2, &config) == NcclResult::invalid_argument);
}

TEST(abort_ends_an_initialization_that_waits_for_a_rank) {
  NcclApi& nccl = fake_nccl();
  const Gpu gpu(0);
  NcclComm comm = nullptr;
  NcclConfig config;
  CHECK(nccl.comm_init_rank_config(&comm, 2, new_id(nccl), 0, &config) == NcclResult::in_progress);
  ok(nccl.comm_abort(comm));
  CHECK(nccl.comm_abort(comm) == NcclResult::invalid_argument);
}

TEST(abort_ends_what_runs_and_leaves_garbage) {
  with_ranks(2, [&](int rank, Gpu& gpu, NcclComm comm) {
    NcclApi& nccl = fake_nccl();
    float* values = gpu.upload(std::vector<float>(10, 1.0f));
    if (rank == 0) {
      // The other rank does not come.
      launched(nccl.all_reduce(values, values, 10, NcclDataType::float32, NcclRedOp::sum, comm,
                               gpu.stream),
               comm);
      CHECK(fake_driver().stream_query(gpu.stream) == CudaResult::not_ready);
      ok(nccl.comm_abort(comm));
      gpu.synchronize();
      CHECK(std::isnan(gpu.download(values, 10)[0]));
    } else {
      ok(nccl.comm_abort(comm));
    }
  });
}

TEST(split_makes_communicators_of_the_ranks_of_one_color) {
  with_ranks(4, [&](int rank, Gpu& gpu, NcclComm comm) {
    NcclApi& nccl = fake_nccl();
    NcclComm half = nullptr;
    const NcclResult made = nccl.comm_split(comm, rank % 2, -rank, &half, nullptr);
    CHECK(made == NcclResult::in_progress);
    ok(settled(nccl, half));
    // By key: the higher rank comes first.
    int* own = gpu.upload(std::vector<int>(1, rank));
    int* both = gpu.allocate<int>(2);
    launched(nccl.all_gather(own, both, 1, NcclDataType::int32, half, gpu.stream), half);
    CHECK(gpu.download(both, 2) == (std::vector<int>{2 + rank % 2, rank % 2}));
    leave(half);

    NcclComm none = nullptr;
    const int color = rank == 0 ? 0 : kNcclSplitNoColor;
    CHECK(nccl.comm_split(comm, color, 0, &none, nullptr) ==
          (rank == 0 ? NcclResult::in_progress : NcclResult::success));
    CHECK((none != nullptr) == (rank == 0));
    if (none != nullptr) {
      ok(settled(nccl, none));
      leave(none);
    }
    leave(comm);
  });
}

TEST(shrink_leaves_the_survivors_with_new_ranks) {
  with_ranks(3, [&](int rank, Gpu& gpu, NcclComm comm) {
    NcclApi& nccl = fake_nccl();
    int* own = gpu.upload(std::vector<int>(1, rank));
    if (rank == 1) {
      ok(nccl.comm_abort(comm));
      return;
    }
    // Rank 1 is lost in the middle of a collective.
    launched(nccl.all_reduce(own, own, 1, NcclDataType::int32, NcclRedOp::sum, comm, gpu.stream),
             comm);
    NcclComm smaller = nullptr;
    if (rank == 0) {
      ok(nccl.comm_revoke(comm));
      CHECK(nccl.all_reduce(own, own, 1, NcclDataType::int32, NcclRedOp::sum, comm, gpu.stream) ==
            NcclResult::invalid_usage);
    }
    const int flags = rank == 0 ? 0 : kNcclShrinkAbort;
    CHECK(nccl.comm_shrink(comm, {1}, &smaller, nullptr, flags) == NcclResult::in_progress);
    ok(settled(nccl, smaller));
    gpu.synchronize();
    int* fresh = gpu.upload(std::vector<int>(1, rank + 10));
    int* both = gpu.allocate<int>(2);
    launched(nccl.all_gather(fresh, both, 1, NcclDataType::int32, smaller, gpu.stream), smaller);
    CHECK(gpu.download(both, 2) == (std::vector<int>{10, 12}));
    leave(smaller);
    ok(nccl.comm_abort(comm));
  });
}

TEST(grow_takes_new_ranks_in) {
  NcclApi& nccl = fake_nccl();
  const NcclUniqueId first = new_id(nccl);
  NcclUniqueId wider;
  std::atomic<bool> known{false};
  run_ranks(3, [&](int rank) {
    Gpu gpu(rank);
    NcclComm grown = nullptr;
    NcclConfig config;
    if (rank == 2) {
      CHECK(eventually([&] { return known.load(); }));
      CHECK(nccl.comm_grow(nullptr, 3, &wider, 2, &grown, &config) == NcclResult::in_progress);
    } else {
      NcclComm comm = join_nccl(nccl, first, rank, 2);
      if (rank == 0) {
        ok(nccl.comm_get_unique_id(comm, &wider));
        known = true;
      }
      CHECK(nccl.comm_grow(comm, 3, rank == 0 ? &wider : nullptr, -1, &grown, &config) ==
            NcclResult::in_progress);
      ok(settled(nccl, grown));
      ok(nccl.comm_destroy(comm));
    }
    ok(settled(nccl, grown));
    int* own = gpu.upload(std::vector<int>(1, rank));
    int* all = gpu.allocate<int>(3);
    launched(nccl.all_gather(own, all, 1, NcclDataType::int32, grown, gpu.stream), grown);
    CHECK(gpu.download(all, 3) == (std::vector<int>{0, 1, 2}));
    leave(grown);
  });
}

TEST(nccl_memory_and_registrations) {
  NcclApi& nccl = fake_nccl();
  const Gpu gpu(0);
  NcclComm comm = join_nccl(nccl, new_id(nccl), 0, 1);
  const long before = test::cuda_count("allocations");
  void* memory = nullptr;
  ok(nccl.memory_allocate(&memory, 4096));
  CHECK_EQ(test::cuda_count("allocations"), before + 1);
  void* handle = nullptr;
  ok(nccl.comm_register(comm, memory, 4096, &handle));
  ok(nccl.comm_deregister(comm, handle));
  CHECK(nccl.comm_deregister(comm, handle) == NcclResult::invalid_argument);
  NcclWindow window = nullptr;
  ok(nccl.window_register(comm, memory, 4096, &window, kNcclWindowSymmetric));
  ok(nccl.window_deregister(comm, window));
  ok(nccl.memory_free(memory));
  CHECK_EQ(test::cuda_count("allocations"), before);
  leave(comm);
}

// ---- Failures

TEST(nccl_faults_strike_one_rank) {
  const NcclFaults faults("ncclAllReduce[1]@2=1; ncclAllReduce[0]@3=slow:5");
  with_ranks(2, [&](int rank, Gpu& gpu, NcclComm comm) {
    NcclApi& nccl = fake_nccl();
    int* value = gpu.upload(std::vector<int>(1, 1));
    const auto sum = [&] {
      return nccl.all_reduce(value, value, 1, NcclDataType::int32, NcclRedOp::sum, comm,
                             gpu.stream);
    };
    launched(sum(), comm);
    gpu.synchronize();
    if (rank == 1) {
      CHECK(sum() == NcclResult::unhandled_cuda_error);
      CHECK(contains(nccl.get_last_error(comm), "asked for by a test"));
    }
    launched(sum(), comm);
    launched(sum(), comm);
    gpu.synchronize();
    CHECK_EQ(gpu.download(value, 1)[0], 8);
    leave(comm);
  });
}

TEST(nccl_operation_that_hangs_or_fails_ends_with_the_abort) {
  const NcclFaults faults("ncclAllReduce[0]@1=hang; ncclAllReduce[1]@1=async:6");
  with_ranks(2, [&](int rank, Gpu& gpu, NcclComm comm) {
    NcclApi& nccl = fake_nccl();
    int* value = gpu.upload(std::vector<int>(1, 1));
    const NcclResult called =
        nccl.all_reduce(value, value, 1, NcclDataType::int32, NcclRedOp::sum, comm, gpu.stream);
    if (called != NcclResult::success) CHECK(called == NcclResult::in_progress);
    if (rank == 1) {
      CHECK(eventually([&] {
        NcclResult state = NcclResult::success;
        ok(nccl.comm_get_async_error(comm, &state));
        return state == NcclResult::remote_error;
      }));
    } else {
      ok(settled(nccl, comm));
    }
    CHECK(fake_driver().stream_query(gpu.stream) == CudaResult::not_ready);
    ok(nccl.comm_abort(comm));
    gpu.synchronize();
  });
}

TEST(nccl_initialization_that_fails_or_hangs) {
  NcclApi& nccl = fake_nccl();
  const Gpu gpu(0);
  NcclConfig config;
  NcclComm comm = nullptr;
  const NcclFaults faults(
      "ncclCommInitRankConfig@1=2; ncclCommInitRankConfig@2=hang; "
      "ncclCommInitRankConfig@3=async:3");
  CHECK(nccl.comm_init_rank_config(&comm, 1, new_id(nccl), 0, &config) == NcclResult::system_error);
  CHECK(comm == nullptr);
  CHECK(nccl.comm_init_rank_config(&comm, 1, new_id(nccl), 0, &config) == NcclResult::in_progress);
  NcclResult state = NcclResult::success;
  ok(nccl.comm_get_async_error(comm, &state));
  CHECK(state == NcclResult::in_progress);
  ok(nccl.comm_abort(comm));
  CHECK(nccl.comm_init_rank_config(&comm, 1, new_id(nccl), 0, &config) == NcclResult::in_progress);
  CHECK(settled(nccl, comm) == NcclResult::internal_error);
  ok(nccl.comm_abort(comm));
}

// ---- Ranks as processes

pid_t start_rank(const NcclUniqueId& id, int rank, int ranks, int device,
                 const std::vector<std::string>& environment) {
  std::string hex;
  for (const char byte : id.internal) {
    char digits[3];
    std::snprintf(digits, sizeof(digits), "%02x", static_cast<unsigned char>(byte));
    hex += digits;
  }
  std::vector<std::string> words = {test::fake_file("", "fake_rank"),
                                    HVD_FAKES_DIR,
                                    hex,
                                    std::to_string(rank),
                                    std::to_string(ranks),
                                    std::to_string(device)};
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  std::vector<std::string> extra = environment;
  std::vector<char*> variables;
  for (std::string& variable : extra) variables.push_back(variable.data());
  for (char** variable = environ; *variable != nullptr; ++variable) variables.push_back(*variable);
  variables.push_back(nullptr);
  pid_t child = 0;
  CHECK_EQ(
      posix_spawn(&child, words[0].c_str(), nullptr, nullptr, arguments.data(), variables.data()),
      0);
  return child;
}

int status_of(pid_t child) {
  int status = -1;
  CHECK_EQ(waitpid(child, &status, 0), child);
  return status;
}

TEST(nccl_ranks_as_processes) {
  const NcclUniqueId id = new_id(fake_nccl());
  std::vector<pid_t> children;
  for (int rank = 0; rank < 3; ++rank) children.push_back(start_rank(id, rank, 3, rank, {}));
  for (const pid_t child : children) CHECK_EQ(status_of(child), 0);
}

TEST(nccl_ranks_as_processes_on_one_gpu) {
  const NcclUniqueId id = new_id(fake_nccl());
  std::vector<pid_t> children;
  for (int rank = 0; rank < 2; ++rank) {
    children.push_back(start_rank(id, rank, 2, 0, {"NCCL_HOSTID=host" + std::to_string(rank)}));
  }
  for (const pid_t child : children) CHECK_EQ(status_of(child), 0);
}

TEST(nccl_rank_that_is_killed_shows_as_a_remote_error) {
  const NcclUniqueId id = new_id(fake_nccl());
  std::vector<pid_t> children;
  for (int rank = 0; rank < 3; ++rank) {
    children.push_back(
        start_rank(id, rank, 3, rank,
                   {"HVD_FAKE_NCCL_REMOTE_ERRORS=1", "HVD_FAKE_FAULTS=ncclAllReduce[1]@2=die"}));
  }
  CHECK(WIFSIGNALED(status_of(children[1])));
  for (const int rank : {0, 2}) {
    const int status = status_of(children[static_cast<size_t>(rank)]);
    CHECK(WIFEXITED(status));
    CHECK_EQ(WEXITSTATUS(status), 3);
  }
}

}  // namespace
}  // namespace hvd
