// What holds for plans and control records whatever goes in: random cases, the same in every run.

#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <utility>

#include "control/record_channel.h"
#include "reducer/flush_record.h"
#include "reducer/plan.h"
#include "sessions.h"

namespace hvd::test {
namespace {

using Random = std::mt19937;
using Order = std::vector<uint32_t>;

uint32_t below(Random& random, uint32_t limit) { return static_cast<uint32_t>(random() % limit); }

// Mostly small, sometimes empty, sometimes larger than any bucket.
std::vector<PlanParameter> random_parameters(Random& random) {
  static const DType kinds[] = {DType::f32, DType::f64, DType::f16, DType::bf16};
  std::vector<PlanParameter> parameters(below(random, 40));
  for (PlanParameter& parameter : parameters) {
    parameter.count = below(random, 5) == 0 ? below(random, 1000) : below(random, 20);
    parameter.dtype = kinds[below(random, 4)];
    parameter.group = below(random, 3);
  }
  return parameters;
}

Order shuffled_part(Random& random, size_t parameters) {
  Order order(parameters);
  std::iota(order.begin(), order.end(), 0u);
  std::shuffle(order.begin(), order.end(), random);
  order.resize(parameters == 0 ? 0 : random() % (parameters + 1));
  return order;
}

std::string random_bytes(Random& random, size_t length) {
  std::string bytes(length, '\0');
  for (char& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

std::vector<bool> random_bits(Random& random) {
  std::vector<bool> bits(below(random, 70));
  for (size_t i = 0; i < bits.size(); ++i) bits[i] = below(random, 2) == 1;
  return bits;
}

FlushRecord random_record(Random& random) {
  FlushRecord record;
  record.flags = static_cast<uint32_t>(random());
  record.round = (static_cast<uint64_t>(random()) << 32) | random();
  record.step = (static_cast<uint64_t>(random()) << 32) | random();
  record.parameters = static_cast<uint32_t>(random());
  record.present = random_bits(random);
  record.posted = random_bits(random);
  record.arrivals.resize(below(random, 50));
  for (uint32_t& arrival : record.arrivals) arrival = static_cast<uint32_t>(random());
  record.text = random_bytes(random, below(random, 200));
  return record;
}

// Bytes are a record, and then they mean the same after another way over the wire, or are refused.
// Returns whether they were taken.
bool is_taken_or_refused(const std::string& bytes) {
  FlushRecord record;
  try {
    record = FlushRecord::decode(bytes);
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::mismatch);
    return false;
  }
  const std::string again = record.encode();
  CHECK(again.size() <= bytes.size());
  CHECK(FlushRecord::decode(again).encode() == again);
  return true;
}

}  // namespace

// ---- plans ----

TEST(property_every_arrival_is_in_one_bucket_of_its_kind) {
  Random random(1);
  for (int round = 0; round < 2000; ++round) {
    const auto parameters = random_parameters(random);
    const Order arrivals = shuffled_part(random, parameters.size());
    const uint64_t cap = 1 + below(random, 3000);
    const auto bytes_of = [&](uint32_t index) {
      return parameters[index].count * size_of(parameters[index].dtype);
    };
    std::map<uint32_t, size_t> place;  // in the order of arrival
    for (size_t i = 0; i < arrivals.size(); ++i) place[arrivals[i]] = i;

    size_t total = 0;
    size_t first_of_previous = 0;
    std::map<std::pair<DType, uint32_t>, uint64_t> bytes_of_previous;
    const auto buckets = plan_buckets(arrivals, parameters, cap);
    for (const Order& bucket : buckets) {
      CHECK(!bucket.empty());
      total += bucket.size();
      uint64_t bytes = 0;
      for (size_t i = 0; i < bucket.size(); ++i) {
        CHECK(place.count(bucket[i]) == 1);
        CHECK(i == 0 || place[bucket[i - 1]] < place[bucket[i]]);
        CHECK(parameters[bucket[i]].dtype == parameters[bucket[0]].dtype);
        CHECK_EQ(parameters[bucket[i]].group, parameters[bucket[0]].group);
        bytes += bytes_of(bucket[i]);
      }
      // Only a parameter that is too large by itself makes a bucket too large; nothing of any size
      // joins it.
      CHECK(bytes <= cap || bytes == bytes_of(bucket[0]));
      // In the order of their first parameters, and no bucket without need: what opens one would
      // not have fitted into the one of its kind before.
      CHECK(total == bucket.size() || first_of_previous < place[bucket[0]]);
      first_of_previous = place[bucket[0]];
      const auto kind = std::make_pair(parameters[bucket[0]].dtype, parameters[bucket[0]].group);
      const auto before = bytes_of_previous.find(kind);
      if (before != bytes_of_previous.end()) {
        CHECK(before->second + bytes_of(bucket[0]) > cap);
      }
      bytes_of_previous[kind] = bytes;
    }
    CHECK_EQ(total, arrivals.size());  // with distinct places above: each exactly once
    CHECK(plan_buckets(arrivals, parameters, cap) == buckets);
  }
}

TEST(property_common_order_of_arrival) {
  Random random(2);
  for (int round = 0; round < 2000; ++round) {
    const size_t parameters = below(random, 30);
    std::vector<Order> by_rank(1 + below(random, 5));
    for (Order& arrivals : by_rank) arrivals = shuffled_part(random, parameters);
    const Order order = agree_on_order(by_rank);

    std::set<uint32_t> all;
    for (const Order& arrivals : by_rank) all.insert(arrivals.begin(), arrivals.end());
    CHECK_EQ(order.size(), all.size());
    CHECK(std::set<uint32_t>(order.begin(), order.end()) == all);
    // What rank 0 saw stands first, as it saw it; every rank's additions keep their own order.
    CHECK(std::equal(by_rank[0].begin(), by_rank[0].end(), order.begin()));
    std::set<uint32_t> known;
    size_t next = 0;
    for (const Order& arrivals : by_rank) {
      for (const uint32_t index : arrivals) {
        if (!known.insert(index).second) continue;
        CHECK_EQ(order[next], index);
        ++next;
      }
    }
  }
}

// ---- flush records ----

TEST(property_records_survive_the_wire) {
  Random random(3);
  for (int round = 0; round < 2000; ++round) {
    const FlushRecord record = random_record(random);
    const std::string bytes = record.encode();
    const FlushRecord copy = FlushRecord::decode(bytes);
    CHECK_EQ(copy.flags, record.flags);
    CHECK_EQ(copy.round, record.round);
    CHECK_EQ(copy.step, record.step);
    CHECK_EQ(copy.parameters, record.parameters);
    CHECK(copy.present == record.present);
    CHECK(copy.posted == record.posted);
    CHECK(copy.arrivals == record.arrivals);
    CHECK(copy.text == record.text);
    CHECK(copy.encode() == bytes);
    CHECK(!is_taken_or_refused(bytes.substr(0, random() % bytes.size())));
  }
}

TEST(property_bytes_that_are_no_record_are_refused) {
  Random random(4);
  int taken = 0;
  for (int round = 0; round < 20000; ++round) {
    std::string bytes;
    if (round % 4 == 0) {
      bytes = random_bytes(random, below(random, 300));
    } else {
      bytes = random_record(random).encode();
      // A record with some bytes changed, most of them in the header, where the lengths are.
      for (uint32_t change = 0; change < 1 + below(random, 4); ++change) {
        const size_t length =
            below(random, 4) == 0 ? bytes.size() : std::min<size_t>(64, bytes.size());
        bytes[random() % length] = static_cast<char>(random());
      }
      if (below(random, 3) == 0) bytes.resize(random() % (bytes.size() + 40));
    }
    taken += is_taken_or_refused(bytes) ? 1 : 0;
  }
  CHECK(taken > 100 && taken < 19000);  // both ways were gone
}

// ---- record channels ----

TEST(property_channels_carry_records_of_any_length) {
  for (const int size : {1, 2, 3}) {
    with_sessions(size, [size](Session& session) {
      auto communicator = open_communicator(session, {4096, 3});
      auto channel = session.open_channel(*communicator, 30'000'000'000u, nullptr);
      // The same lengths on all ranks, so that each knows what the others send.
      Random lengths(5);
      for (uint32_t round = 0; round < 150; ++round) {
        std::vector<std::string> expected;
        for (int rank = 0; rank < size; ++rank) {
          const uint32_t length =
              below(lengths, 6) == 0 ? below(lengths, 40'000) : below(lengths, 9'000);
          Random content(1000 * round + static_cast<uint32_t>(rank));
          expected.push_back(random_bytes(content, length));
        }
        channel->begin(expected[static_cast<size_t>(session.rank())]);
        session.control().wait([&] { return channel->poll() ? Step::done : Step::blocked; }, soon(),
                               everybody(session));
        CHECK(channel->records() == expected);
        CHECK(channel->poll());
        CHECK(channel->missing().empty());
      }
    });
  }
}

}  // namespace hvd::test
