// Failures that a fake library produces on request.
//
//   HVD_FAKE_FAULTS="cuMemAlloc_v2@2=2; ncclAllReduce[1]@3=hang; cuLaunchKernel=slow:20"
//
// Each one names a function, optionally [the rank (NCCL) or device (CUDA)] it is for, optionally @
// the call that it concerns ("@3" the third, "@3+" the third and all after it; otherwise every
// one), and what happens: a number is the result of the call; "hang": what was put on the stream
// never ends by itself; "slow:MS": it ends so much later; "async:CODE": the call succeeds, and what
// was put on the stream fails with that code; "die": the process is killed on the spot.
#pragma once

#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace hvd::fakes {

struct Fault {
  enum class Kind { none, result, hang, slow, async };
  Kind kind = Kind::none;
  int value = 0;  // a result, or milliseconds
};

class Faults {
 public:
  Faults() {
    if (const char* text = std::getenv("HVD_FAKE_FAULTS")) set(text);
  }

  // Replaces all faults and counts calls from zero.
  void set(const std::string& text) {
    const std::lock_guard<std::mutex> lock(mutex_);
    rules_.clear();
    counts_.clear();
    size_t begin = 0;
    while (begin < text.size()) {
      size_t end = text.find(';', begin);
      if (end == std::string::npos) end = text.size();
      add(text.substr(begin, end - begin));
      begin = end + 1;
    }
  }

  // To be asked once per call of a function.
  Fault at_call(const char* function, int where) {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++counts_[function];
    Fault fault;
    for (Rule& rule : rules_) {
      if (rule.function != function || (rule.where >= 0 && rule.where != where)) continue;
      ++rule.calls;
      const bool hit = rule.first == 0 || rule.calls == rule.first ||
                       (rule.and_later && rule.calls > rule.first);
      if (!hit || fault.kind != Fault::Kind::none) continue;
      if (rule.die) kill(getpid(), SIGKILL);
      fault = rule.fault;
    }
    return fault;
  }

  long calls(const std::string& function) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return counts_[function];
  }

 private:
  struct Rule {
    std::string function;
    int where = -1;
    long first = 0;
    bool and_later = false;
    bool die = false;
    Fault fault;
    long calls = 0;
  };

  void add(std::string text) {
    text.erase(0, text.find_first_not_of(' '));
    if (text.empty()) return;
    const size_t equals = text.find('=');
    if (equals == std::string::npos) wrong(text);
    std::string target = text.substr(0, equals);
    const std::string action = text.substr(equals + 1);
    Rule rule;
    const size_t at = target.find('@');
    if (at != std::string::npos) {
      rule.first = std::atol(target.c_str() + at + 1);
      rule.and_later = target.back() == '+';
      target.resize(at);
      if (rule.first <= 0) wrong(text);
    }
    const size_t bracket = target.find('[');
    if (bracket != std::string::npos) {
      rule.where = std::atoi(target.c_str() + bracket + 1);
      target.resize(bracket);
    }
    rule.function = target;
    if (action == "hang") {
      rule.fault.kind = Fault::Kind::hang;
    } else if (action == "die") {
      rule.die = true;
    } else if (action.rfind("slow:", 0) == 0) {
      rule.fault = {Fault::Kind::slow, std::atoi(action.c_str() + 5)};
    } else if (action.rfind("async:", 0) == 0) {
      rule.fault = {Fault::Kind::async, std::atoi(action.c_str() + 6)};
    } else {
      rule.fault = {Fault::Kind::result, std::atoi(action.c_str())};
      if (rule.fault.value == 0) wrong(text);
    }
    rules_.push_back(rule);
  }

  // A fault that is not understood would make a test pass that tests nothing.
  [[noreturn]] static void wrong(const std::string& text) {
    std::fprintf(stderr, "HVD_FAKE_FAULTS: cannot read '%s'\n", text.c_str());
    std::abort();
  }

  std::mutex mutex_;
  std::vector<Rule> rules_;
  std::map<std::string, long> counts_;
};

}  // namespace hvd::fakes
