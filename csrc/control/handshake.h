#pragma once

#include <sys/types.h>

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/descriptor.h"
#include "base/shared_memory.h"

namespace hvd {

using Token = std::array<uint8_t, 16>;

// The abstract unix socket on which a rank waits for the ranks above it. Abstract sockets have no
// permissions: what protects a job is that a peer must have our uid (SO_PEERCRED) and know the
// job's token, which travels through the job's store only.
class Listener {
 public:
  Listener();
  const std::string& name() const { return name_; }
  int descriptor() const { return descriptor_.get(); }
  void close() { descriptor_.reset(); }

 private:
  Descriptor descriptor_;
  std::string name_;
};

// What a rank says when it connects, and what it is answered.
struct Hello {
  uint32_t protocol;
  int32_t rank;  // negative: "I give up because of rank -1 - rank"
  Token token;
};
static_assert(sizeof(Hello) == 24, "the greeting has no padding");
constexpr uint32_t kHelloProtocol = 0x48564401;  // "HVD", version 1

// Connections of one rank to all others of its host, kept for the life of a session: their end
// tells that a peer is gone, and shared memory is handed over through them.
struct Mesh {
  std::vector<Descriptor> sockets;  // by rank; the own entry is empty
  std::vector<pid_t> pids;          // by rank, as this process sees them; 0 = another pid namespace
};

// Called every 100 ms while something waits; may throw, which ends the wait. May be null.
using Interrupt = std::function<void()>;

// Connects every rank with every other. All listeners must exist already, and stay until the
// connections stand: a rank whose listener is gone counts as dead. Throws Error(timeout) or
// Error(rank_failed), on every rank that is there, naming the ranks that are not.
Mesh connect_mesh(int rank, const Listener* listener, const std::vector<std::string>& names,
                  const Token& token, uint64_t timeout_ns, const Interrupt* interrupt = nullptr);

// Hands the memory's descriptor to a peer, labelled with `key`. False when the peer is gone.
[[nodiscard]] bool send_memory(int socket, uint64_t key, const SharedMemory& memory);

// A descriptor with its label, as it comes out of a socket.
struct ReceivedMemory {
  uint64_t key = 0;
  Descriptor descriptor;
};

// Never waits. Nothing: there is none yet, or, with `*ended`, there will be none any more.
std::optional<ReceivedMemory> receive_memory(int socket, bool* ended);

// Waits until there is something to read, or the end of it. False at the deadline (now_ns clock).
bool wait_readable(int socket, uint64_t deadline_ns);

}  // namespace hvd
