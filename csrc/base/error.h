#pragma once

#include <stdexcept>
#include <string>

namespace hvd {

// What kind of failure an Error reports; the bindings map each kind to one Python class.
enum class ErrorKind {
  error,         // anything that none of the others describes
  bad_argument,  // the caller passed something that cannot be used
  timeout,       // a deadline passed
  rank_failed,   // another rank died or gave up
  mismatch,      // the ranks do not agree about what to do
  stall,         // a rank stayed away for so long that the job was given up
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}

  ErrorKind kind() const noexcept { return kind_; }

 private:
  ErrorKind kind_;
};

}  // namespace hvd
