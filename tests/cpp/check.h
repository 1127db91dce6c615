// A small test framework. TEST(name) { ... } registers a test by itself; CHECK and its kin throw
// at the first failure, from any thread that run_ranks started or from the test's own.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "base/error.h"

namespace hvd::test {

struct Test {
  const char* name;
  void (*body)();
};

inline std::vector<Test>& all_tests() {
  static std::vector<Test> tests;
  return tests;
}

inline bool register_test(const char* name, void (*body)()) {
  all_tests().push_back({name, body});
  return true;
}

class CheckFailure : public std::runtime_error {
 public:
  CheckFailure(const char* file, int line, const std::string& what)
      : std::runtime_error(std::string(file) + ":" + std::to_string(line) + ": " + what) {}
};

// Thrown by a test that cannot run here; the text says what is missing.
class Skipped : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

template <class Value, class = void>
struct IsPrintable : std::false_type {};
template <class Value>
struct IsPrintable<
    Value, std::void_t<decltype(std::declval<std::ostream&>() << std::declval<const Value&>())>>
    : std::true_type {};

template <class Value>
std::string describe(const Value& value) {
  std::ostringstream text;
  text.precision(17);
  if constexpr (std::is_enum_v<Value>) {
    text << static_cast<long long>(value);
  } else if constexpr (std::is_same_v<Value, std::nullptr_t>) {
    text << "nullptr";
  } else if constexpr (std::is_integral_v<Value> && sizeof(Value) == 1) {
    text << static_cast<int>(value);
  } else if constexpr (IsPrintable<Value>::value) {
    text << value;
  } else {
    text << "(a value that cannot be printed)";
  }
  return text.str();
}

template <class Left, class Right>
void check_equal(const char* file, int line, const char* text, const Left& left,
                 const Right& right) {
  if (left == right) return;
  throw CheckFailure(
      file, line,
      std::string(text) + ": " + describe(left) + " and " + describe(right) + " differ");
}

inline const char* name_of(ErrorKind kind) {
  static const char* const names[] = {"error",       "bad_argument", "timeout",
                                      "rank_failed", "mismatch",     "stall"};
  return names[static_cast<size_t>(kind)];
}

// The error that `body` throws, for checks of its text.
template <class Body>
Error check_throws(const char* file, int line, const char* text, ErrorKind kind, Body&& body) {
  try {
    body();
  } catch (const Error& error) {
    if (error.kind() == kind) return error;
    throw CheckFailure(file, line,
                       std::string(text) + " threw " + name_of(error.kind()) + " instead of " +
                           name_of(kind) + ": " + error.what());
  } catch (const std::exception& error) {
    throw CheckFailure(file, line,
                       std::string(text) + " threw no hvd::Error, but: " + error.what());
  }
  throw CheckFailure(file, line, std::string(text) + " did not throw " + name_of(kind));
}

// Runs body(rank) in one thread per rank and waits for all of them, then throws what the first
// rank to fail threw. Ranks that still run at the deadline cannot be stopped from outside: the
// program is aborted, and its message names them.
inline void run_ranks(int size, const std::function<void(int rank)>& body, double seconds = 60) {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<bool> done(static_cast<size_t>(size), false);
  int running = size;
  int first_failed = -1;
  std::exception_ptr failure;

  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      std::exception_ptr own;
      try {
        body(rank);
      } catch (...) {
        own = std::current_exception();
      }
      const std::lock_guard<std::mutex> lock(mutex);
      if (own && !failure) {
        failure = own;
        first_failed = rank;
      }
      done[static_cast<size_t>(rank)] = true;
      --running;
      changed.notify_all();
    });
  }
  {
    std::unique_lock<std::mutex> lock(mutex);
    const auto deadline = std::chrono::duration<double>(seconds);
    if (!changed.wait_for(lock, deadline, [&] { return running == 0; })) {
      std::fprintf(stderr, "run_ranks: after %g s these of %d ranks still run:", seconds, size);
      for (int rank = 0; rank < size; ++rank) {
        if (!done[static_cast<size_t>(rank)]) std::fprintf(stderr, " %d", rank);
      }
      std::fprintf(stderr, "\n");
      if (failure) {
        try {
          std::rethrow_exception(failure);
        } catch (const std::exception& error) {
          std::fprintf(stderr, "rank %d had failed: %s\n", first_failed, error.what());
        } catch (...) {
          std::fprintf(stderr, "rank %d had failed\n", first_failed);
        }
      }
      std::abort();
    }
  }
  for (std::thread& thread : threads) thread.join();
  if (failure) std::rethrow_exception(failure);
}

}  // namespace hvd::test

#define TEST(name)                                       \
  static void test_##name();                             \
  [[maybe_unused]] static const bool registered_##name = \
      ::hvd::test::register_test(#name, test_##name);    \
  static void test_##name()

#define CHECK(condition)                                                                          \
  do {                                                                                            \
    if (!(condition)) {                                                                           \
      throw ::hvd::test::CheckFailure(__FILE__, __LINE__, "CHECK(" #condition ") does not hold"); \
    }                                                                                             \
  } while (false)

#define CHECK_EQ(left, right) \
  ::hvd::test::check_equal(__FILE__, __LINE__, "CHECK_EQ(" #left ", " #right ")", left, right)

// Gives the error back: CHECK_THROWS(f(), ErrorKind::timeout).what()
#define CHECK_THROWS(expression, kind)                             \
  ::hvd::test::check_throws(__FILE__, __LINE__, #expression, kind, \
                            [&] { static_cast<void>(expression); })
