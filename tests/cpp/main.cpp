// Runs all tests, or those whose names contain the first argument.

#include <cstdio>
#include <cstring>
#include <exception>

#include "base/clock.h"
#include "check.h"

int main(int argument_count, char** arguments) {
  const char* wanted = argument_count > 1 ? arguments[1] : "";
  int passed = 0;
  int failed = 0;
  int skipped = 0;
  for (const hvd::test::Test& test : hvd::test::all_tests()) {
    if (std::strstr(test.name, wanted) == nullptr) continue;
    // The name goes out first, so that a test which takes the program down is known.
    std::printf("%-60s ", test.name);
    std::fflush(stdout);
    const uint64_t start = hvd::now_ns();
    const char* outcome = "ok";
    std::string reason;
    try {
      test.body();
      ++passed;
    } catch (const hvd::test::Skipped& skip) {
      outcome = "skipped";
      reason = skip.what();
      ++skipped;
    } catch (const std::exception& error) {
      outcome = "FAILED";
      reason = error.what();
      ++failed;
    } catch (...) {
      outcome = "FAILED";
      reason = "threw something that is no exception";
      ++failed;
    }
    std::printf("%-7s %8.1f ms\n", outcome, static_cast<double>(hvd::now_ns() - start) / 1e6);
    if (!reason.empty()) std::printf("    %s\n", reason.c_str());
    std::fflush(stdout);
  }
  std::printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
  // A name that matches nothing is a mistake, not a success.
  return failed == 0 && passed > 0 ? 0 : 1;
}
