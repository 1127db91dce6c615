// The hash in every form that this machine runs: the forms agree, and what differs shows.

#include "kernels/hash.h"

#include <cstdint>
#include <cstring>
#include <random>
#include <set>
#include <vector>

#include "check.h"

namespace hvd {
namespace {

std::vector<Isa> machine_isas() {
  std::vector<Isa> isas = {Isa::portable};
  if (best_isa() >= Isa::avx2) isas.push_back(Isa::avx2);
  if (best_isa() >= Isa::avx512) isas.push_back(Isa::avx512);
  return isas;
}

std::vector<char> random_bytes(size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<char> bytes(count);
  for (char& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

TEST(hash_is_the_same_on_every_instruction_set_and_at_every_alignment) {
  const std::vector<char> bytes = random_bytes(9000, 1);
  std::vector<char> moved(bytes.size() + 64);
  for (const size_t count : {0, 1, 7, 63, 64, 65, 1000, 1023, 1024, 1025, 4096, 8999}) {
    const uint64_t expected = hash_memory(bytes.data(), count, Isa::portable);
    for (const Isa isa : machine_isas()) {
      for (const size_t offset : {0, 1, 4, 33}) {
        std::memcpy(moved.data() + offset, bytes.data(), count);
        CHECK_EQ(hash_memory(moved.data() + offset, count, isa), expected);
      }
    }
  }
}

// A value from outside of this program: a change of the hash breaks the comparison of ranks that
// run different versions, and should be meant.
TEST(hash_does_not_change_between_versions) {
  std::vector<char> bytes(1500);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i * 7 % 251);
  CHECK_EQ(hash_memory(bytes.data(), bytes.size()), uint64_t{260685717229763413u});
}

TEST(hash_shows_every_flipped_bit) {
  std::vector<char> bytes = random_bytes(2000, 2);
  const uint64_t before = hash_memory(bytes.data(), bytes.size());
  std::set<uint64_t> seen = {before};
  for (size_t bit = 0; bit < bytes.size() * 8; bit += 3) {
    bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ (1 << bit % 8));
    CHECK(seen.insert(hash_memory(bytes.data(), bytes.size())).second);
    bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ (1 << bit % 8));
  }
  CHECK_EQ(hash_memory(bytes.data(), bytes.size()), before);
}

TEST(hash_shows_order_and_length) {
  std::set<uint64_t> seen;
  // The same words in another order, in one lane and across lanes; all of them in other places.
  const std::vector<char> bytes = random_bytes(2048, 3);
  for (size_t distance = 8; distance < 2048; distance += 8) {
    std::vector<char> swapped = bytes;
    std::memcpy(swapped.data(), bytes.data() + distance, 8);
    std::memcpy(swapped.data() + distance, bytes.data(), 8);
    CHECK(seen.insert(hash_memory(swapped.data(), swapped.size())).second);
  }
  const std::vector<char> zeros(5000);
  for (size_t count = 0; count <= zeros.size(); ++count) {
    CHECK(seen.insert(hash_memory(zeros.data(), count)).second);
  }
  // Small floats in a row, as weights are: one of them moved by one unit in the last place.
  std::vector<float> floats(1000, 0.5f);
  for (float& value : floats) {
    uint32_t word = 0;
    std::memcpy(&word, &value, 4);
    ++word;
    std::memcpy(&value, &word, 4);
    CHECK(seen.insert(hash_memory(floats.data(), floats.size() * 4)).second);
  }
}

}  // namespace
}  // namespace hvd
