// The CUDA kernels' own source, run on the host, against the CPU kernels. Numbers are compared bit
// for bit, apart from which NaN a NaN is.

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "check.h"
#include "gpu_buckets.h"

namespace hvd {
namespace {

using namespace test;

TEST(gpu_pack_rounds_as_the_cpu_kernels_do) {
  Random random(1);
  for (const DType from : kFloatTypes) {
    for (const DType to : kFloatTypes) {
      for (const double factor : {1.0, 1.0 / 3, -1024.0}) {
        Gradients gradients(from, kCounts, kMisaligned);
        gradients.fill_all(random, false);
        const BucketTable table(kCounts, to, 0, 0);
        Bucket bucket(to, table.elements);
        const auto segments = segments_of(gradients, factor);
        launch(pack_kernel(from, to), pack_arguments(segments, table, bucket), 5);
        for (size_t i = 0; i < kCounts.size(); ++i) {
          const uint64_t count = kCounts[i];
          std::vector<char> wanted(count * size_of(to) + 1);
          // By way of bytes that are not aligned, which the CPU kernels do not mind.
          convert(wanted.data(), to, gradients.at(i), from, count, factor);
          check_numbers(pack_kernel(from, to), bucket.at(table.places[i]), wanted.data(), to,
                        count);
          for (uint64_t place = count; place % gpu::kUnit != 0; ++place) {
            CHECK_EQ(number_at(bucket.at(table.places[i] + place), to, 0), 0.0);
          }
        }
        gradients.check_guards();
      }
    }
  }
}

TEST(gpu_post_rounds_as_the_cpu_kernels_do_and_tells_what_the_result_is_like) {
  Random random(2);
  for (const DType to : kFloatTypes) {
    for (const DType from : kFloatTypes) {
      for (const bool ordinary : {true, false}) {
        const double factor = ordinary ? 0.125 / 3 : 1.5;
        const BucketTable table(kCounts, from, 0, 0);
        Bucket bucket(from, table.elements);
        for (size_t i = 0; i < kCounts.size(); ++i) {
          fill(bucket.at(table.places[i]), from, kCounts[i], random, ordinary);
        }
        Gradients gradients(to, kCounts, kMisaligned);
        const PostResult found = run_post(segments_of(gradients, 0), to, table, bucket, factor);
        for (size_t i = 0; i < kCounts.size(); ++i) {
          std::vector<char> wanted(kCounts[i] * size_of(to) + 1);
          convert(wanted.data(), to, bucket.at(table.places[i]), from, kCounts[i], factor);
          check_numbers(post_kernel(to, from), gradients.at(i), wanted.data(), to, kCounts[i]);
          check_by_products(found.segments[i], by_products_of(wanted.data(), to, kCounts[i]));
        }
        gradients.check_guards();
      }
    }
  }
}

TEST(gpu_kernels_know_every_16_bit_number) {
  std::vector<uint64_t> counts = {65536};
  for (const DType narrow : {DType::f16, DType::bf16}) {
    std::vector<uint16_t> all(65536);
    for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
    Gradients gradients(narrow, counts, kAligned);
    std::memcpy(gradients.at(0), all.data(), all.size() * 2);
    // To float, and the float's neighbours and the ties between two of them back again.
    const BucketTable wide_table(counts, DType::f32, 0, 0);
    Bucket wide(DType::f32, wide_table.elements);
    const auto segments = segments_of(gradients, 1);
    launch(pack_kernel(narrow, DType::f32), pack_arguments(segments, wide_table, wide), 4);
    std::vector<float> wanted(65536);
    convert(wanted.data(), DType::f32, all.data(), narrow, all.size(), 1.0);
    check_numbers("all to float", wide.data(), wanted.data(), DType::f32, wanted.size());

    for (const int steps : {-1, 0, 1, 0x0fff, 0x1000, 0x1001, 0x7fff, 0x8000, 0x8001}) {
      std::vector<float> near(65536);
      for (size_t i = 0; i < near.size(); ++i) {
        uint32_t bits;
        std::memcpy(&bits, &wanted[i], 4);
        bits += static_cast<uint32_t>(steps);
        std::memcpy(&near[i], &bits, 4);
      }
      for (const DType from : {DType::f32, DType::f64}) {
        std::vector<double> values(65536);
        // Doubles are put off the tie by less than a float can tell.
        convert(values.data(), from, near.data(), DType::f32, near.size(),
                from == DType::f64 ? 1 + 1e-12 : 1.0);
        Gradients input(from, counts, kAligned);
        std::memcpy(input.at(0), values.data(), values.size() * size_of(from));
        const BucketTable table(counts, narrow, 0, 0);
        Bucket bucket(narrow, table.elements);
        launch(pack_kernel(from, narrow), pack_arguments(segments_of(input, 1), table, bucket), 4);
        std::vector<uint16_t> rounded(65536);
        convert(rounded.data(), narrow, values.data(), from, rounded.size(), 1.0);
        check_numbers("near all", bucket.data(), rounded.data(), narrow, rounded.size());
      }
    }
  }
}

TEST(gpu_results_do_not_depend_on_blocks_threads_or_alignment) {
  Random random(3);
  const std::vector<uint64_t> counts = {20001, 5, 8192, 1000, 70000};
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const BucketTable table(counts, dtype, 0, 0);
    Bucket bucket(dtype, table.elements);
    for (size_t i = 0; i < counts.size(); ++i) {
      fill(bucket.at(table.places[i]), dtype, counts[i], random, true);
    }
    Gradients first_gradients(dtype, counts, kAligned);
    const PostResult first =
        run_post(segments_of(first_gradients, 1), dtype, table, bucket, 0.7, 1, 1);
    struct Form {
      unsigned blocks, threads;
      bool aligned, memory;
    };
    for (const Form form : {Form{2, 1, false, true}, Form{100, 1, true, false},
                            Form{3, 4, false, true}, Form{1, 3, true, true}}) {
      Gradients gradients(dtype, counts,
                          [&](size_t i) { return form.aligned ? size_t{0} : 1 + i % 3; });
      auto segments = segments_of(gradients, 1);
      if (!form.memory) segments[0].memory = nullptr;
      const PostResult other =
          run_post(segments, dtype, table, bucket, 0.7, form.blocks, form.threads);
      CHECK(std::memcmp(first.segments.data(), other.segments.data(),
                        first.segments.size() * sizeof(gpu::SegmentResult)) == 0);
      for (size_t i = form.memory ? 0 : 1; i < counts.size(); ++i) {
        CHECK(std::memcmp(first_gradients.at(i), gradients.at(i), counts[i] * size_of(dtype)) == 0);
      }
      gradients.check_guards();

      // The same for pack.
      Bucket packed(dtype, table.elements);
      launch(pack_kernel(dtype, dtype), pack_arguments(segments, table, packed), form.blocks,
             form.threads);
      for (size_t i = form.memory ? 0 : 1; i < counts.size(); ++i) {
        CHECK(std::memcmp(packed.at(table.places[i]), gradients.at(i),
                          counts[i] * size_of(dtype)) == 0);
      }
    }
  }
}

TEST(gpu_absent_segments_are_zero_and_not_read) {
  const std::vector<uint64_t> counts = {100, 8200, 3};
  for (const DType dtype : kFloatTypes) {
    const BucketTable table(counts, dtype, 0, 0);
    Gradients gradients(dtype, counts, kAligned);
    for (size_t i = 0; i < counts.size(); ++i) {
      std::memset(gradients.at(i), 0xff, counts[i] * size_of(dtype));  // NaN
    }
    auto segments = segments_of(gradients, 0);
    segments[1].memory = nullptr;
    segments[1].factor = 1;
    Bucket bucket(dtype, table.elements);
    launch(pack_kernel(dtype, dtype), pack_arguments(segments, table, bucket), 2);
    for (uint64_t i = 0; i < table.elements; ++i) {
      CHECK_EQ(number_at(bucket.data(), dtype, i), 0.0);
    }
  }
}

TEST(gpu_pack_takes_a_factor_from_the_device) {
  const std::vector<uint64_t> counts = {50, 4};
  const BucketTable table(counts, DType::f32, 0, 0);
  Gradients gradients(DType::f32, counts, kAligned);
  Random random(4);
  gradients.fill_all(random, true);
  for (const double on_device : {0.25, 0.0, kNan}) {
    Bucket bucket(DType::f32, table.elements);
    auto segments = segments_of(gradients, 3);
    segments[1].memory = nullptr;
    auto arguments = pack_arguments(segments, table, bucket);
    arguments.factor = &on_device;
    launch(pack_kernel(DType::f32, DType::f32), arguments, 1);
    std::vector<float> wanted(50);
    convert(wanted.data(), DType::f32, gradients.at(0), DType::f32, 50, 3 * on_device);
    if (on_device == 0) wanted.assign(50, 0.0f);
    check_numbers("factor", bucket.data(), wanted.data(), DType::f32, 50);
    // Whatever the factor is, nothing times it is nothing.
    for (uint64_t i = 50; i < table.elements; ++i) {
      CHECK_EQ(number_at(bucket.data(), DType::f32, i), 0.0);
    }
  }
}

TEST(gpu_squares_of_every_size) {
  // Sizes at which squares of floats overflow, underflow, or do neither, alone and mixed.
  const double sizes[] = {0, 1e-45, 1e-38,  1e-30,  1e-20, 8.8e-16, 1e-10,
                          1, 1e10,  1.2e18, 1.8e19, 1e25,  3e38};
  for (const double size : sizes) {
    for (const double other : sizes) {
      const std::vector<uint64_t> counts = {1000};
      const BucketTable table(counts, DType::f32, 0, 0);
      Bucket bucket(DType::f32, table.elements);
      std::vector<float> values(1000);
      for (size_t i = 0; i < values.size(); ++i) {
        values[i] = static_cast<float>((i % 3 == 0 ? size : other) * (0.5 + 0.0005 * double(i)));
      }
      std::memcpy(bucket.data(), values.data(), 4000);
      Gradients gradients(DType::f32, counts, kAligned);
      const PostResult found = run_post(segments_of(gradients, 1), DType::f32, table, bucket, 1.0);
      check_by_products(found.segments[0], by_products_of(values.data(), DType::f32, 1000));
    }
  }
  // Doubles whose squares overflow are still finite; one that is not shows, wherever it is.
  for (const double value : {1e200, kNan, -kInfinity}) {
    for (const size_t place : {size_t{0}, size_t{8191}, size_t{8192}, size_t{19999}}) {
      for (const DType dtype : kFloatTypes) {
        if (value == 1e200 && dtype != DType::f64) continue;
        const std::vector<uint64_t> counts = {20000};
        const BucketTable table(counts, dtype, 0, 0);
        Bucket bucket(dtype, table.elements);
        std::memset(bucket.data(), 0, 20000 * size_of(dtype));
        convert(bucket.at(place), dtype, &value, DType::f64, 1, 1.0);
        Gradients gradients(dtype, counts, kAligned);
        const PostResult found = run_post(segments_of(gradients, 1), dtype, table, bucket, 1.0);
        CHECK_EQ(found.segments[0].finite != 0, value == 1e200);
      }
    }
  }
}

TEST(gpu_thousands_of_segments) {
  Random random(6);
  std::vector<uint64_t> counts;
  for (int i = 0; i < 5000; ++i) counts.push_back(random.below(i % 100 == 0 ? 10000 : 70));
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const BucketTable table(counts, dtype, 0, 0);
    Gradients gradients(dtype, counts, kMisaligned);
    gradients.fill_all(random, true);
    Gradients back(dtype, counts, kMisaligned);
    Bucket bucket(dtype, table.elements);
    const auto segments = segments_of(gradients, 1);
    launch(pack_kernel(dtype, dtype), pack_arguments(segments, table, bucket), 17);
    const PostResult found = run_post(segments_of(back, 1), dtype, table, bucket, 1.0, 13);
    for (size_t i = 0; i < counts.size(); ++i) {
      CHECK(std::memcmp(gradients.at(i), back.at(i), counts[i] * size_of(dtype)) == 0);
      check_by_products(found.segments[i], by_products_of(back.at(i), dtype, counts[i]));
    }
    back.check_guards();
  }
}

TEST(gpu_bucket_tables) {
  const BucketTable table({0, 3, gpu::kChunkElements + 1, 8}, DType::f16, 1, 2);
  CHECK_EQ(table.chunks.size(), size_t{4});
  CHECK(table.first_chunks == (std::vector<uint32_t>{0, 0, 1, 3, 4}));
  CHECK(table.places == (std::vector<uint64_t>{0, 0, 8, 8 + gpu::kChunkElements + 8}));
  CHECK_EQ(table.chunks[0].padding, 5u);
  CHECK_EQ(table.chunks[1].padding, 0u);
  CHECK_EQ(table.chunks[2].offset, uint64_t{gpu::kChunkElements});
  CHECK_EQ(table.chunks[2].padding, 7u);
  CHECK_EQ(table.trailer.place, table.places[3] + 8);
  // Two ranks with four digits each, four counts.
  CHECK_EQ(table.trailer.padding, 4u);
  CHECK_EQ(table.elements, table.trailer.place + 16);
  for (const DType dtype : {DType::i32, DType::boolean}) {
    CHECK_THROWS(pack_kernel(dtype, DType::f32), ErrorKind::bad_argument);
  }
}

TEST(gpu_kernel_names_are_those_of_the_source) {
  size_t names = 2;
  CHECK(test::find_host_kernel(kCombineKernel) != nullptr);
  CHECK(test::find_host_kernel(kNormKernel) != nullptr);
  for (const DType segment : kFloatTypes) {
    CHECK(test::find_host_kernel(trailer_kernel(segment)) != nullptr);
    CHECK(test::find_host_kernel(rescale_kernel(segment)) != nullptr);
    names += 2;
    for (const DType bucket : kFloatTypes) {
      CHECK(test::find_host_kernel(pack_kernel(segment, bucket)) != nullptr);
      CHECK(test::find_host_kernel(post_kernel(segment, bucket)) != nullptr);
      names += 2;
    }
  }
  CHECK_EQ(test::host_kernels().size(), names);
}

}  // namespace
}  // namespace hvd
