// Ranks as threads of one process, each with a session of its own.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "session/session.h"

namespace hvd::test {

inline SessionSettings quick_settings() {
  SessionSettings settings;
  settings.connect_timeout_ns = 30'000'000'000u;
  settings.control.abort_grace_ns = 0;  // a thread that ends its process would end the tests
  return settings;
}

// Runs body(session) on `size` ranks. A rank that throws tells the others, so that they do not
// wait for it.
inline void with_sessions(int size, const std::function<void(Session&)>& body,
                          const SessionSettings& settings = quick_settings()) {
  std::vector<std::unique_ptr<Listener>> listeners;
  std::vector<std::string> names;
  for (int rank = 0; rank < size; ++rank) {
    listeners.push_back(std::make_unique<Listener>());
    names.push_back(listeners.back()->name());
  }
  Token token{};
  token[0] = 42;
  run_ranks(size, [&](int rank) {
    Session session(rank, listeners[static_cast<size_t>(rank)].get(), names, token, settings,
                    nullptr);
    try {
      body(session);
    } catch (const std::exception& error) {
      session.control().post_failure(ErrorKind::rank_failed, error.what());
      throw;
    }
    session.close();
  });
}

inline std::vector<int> everybody(const Session& session) {
  std::vector<int> ranks;
  for (int rank = 0; rank < session.size(); ++rank) ranks.push_back(rank);
  return ranks;
}

inline std::shared_ptr<Communicator> open_communicator(Session& session,
                                                       const StagingSettings& settings = {}) {
  return session.open_communicator(everybody(session), settings, 30'000'000'000u, nullptr);
}

// A wait that gives up long before the test's own deadline.
inline Wait soon() {
  Wait wait;
  wait.timeout_ns = 40'000'000'000u;
  return wait;
}

}  // namespace hvd::test
