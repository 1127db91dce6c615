#pragma once

#include <pthread.h>
#include <signal.h>

#include <memory>
#include <thread>
#include <utility>

namespace hvd {

// Starts a thread that takes no signals: they belong to the main thread, where Python looks for
// them. The name (at most 15 characters) is what `top -H` shows.
template <class Body>
std::unique_ptr<std::thread> start_quiet_thread(const char* name, Body body) {
  struct Masked {
    Masked() {
      sigset_t all;
      sigfillset(&all);
      pthread_sigmask(SIG_SETMASK, &all, &before);
    }
    // Also when there can be no more threads: the caller needs its signals back.
    ~Masked() { pthread_sigmask(SIG_SETMASK, &before, nullptr); }
    sigset_t before;
  };
  const Masked masked;
  auto thread = std::make_unique<std::thread>(std::move(body));
  pthread_setname_np(thread->native_handle(), name);
  return thread;
}

}  // namespace hvd
