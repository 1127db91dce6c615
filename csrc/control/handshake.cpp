#include "control/handshake.h"

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>

#include "base/clock.h"
#include "base/error.h"

namespace hvd {
namespace {

constexpr uint32_t kProtocol = 0x48564401;  // "HVD", version 1

struct Hello {
  uint32_t protocol;
  int32_t rank;
  Token token;
};
static_assert(sizeof(Hello) == 24, "the greeting has no padding");

sockaddr_un abstract_address(const std::string& name, socklen_t* length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  // The leading zero byte makes it abstract: no file, gone with the socket.
  const size_t count = std::min(name.size(), sizeof(address.sun_path) - 1);
  std::memcpy(address.sun_path + 1, name.data(), count);
  *length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + count);
  return address;
}

int remaining_ms(uint64_t deadline_ns) {
  const uint64_t now = now_ns();
  if (now >= deadline_ns) return 0;
  return static_cast<int>(std::min<uint64_t>((deadline_ns - now) / 1'000'000u + 1, 1'000'000));
}

bool wait_readable(int fd, uint64_t deadline_ns, const Interrupt* interrupt = nullptr) {
  for (;;) {
    pollfd entry{fd, POLLIN, 0};
    const int wait_ms = remaining_ms(deadline_ns);
    const int ready = ::poll(&entry, 1, interrupt != nullptr ? std::min(wait_ms, 100) : wait_ms);
    if (ready > 0) return true;
    if (interrupt != nullptr && *interrupt) (*interrupt)();
    if (ready == 0 && now_ns() >= deadline_ns) return false;
    if (ready < 0 && errno != EINTR) {
      throw Error(ErrorKind::error, std::string("poll on a peer's socket: ") + strerror(errno));
    }
  }
}

bool same_user(int fd, pid_t* pid) {
  ucred credentials{};
  socklen_t length = sizeof credentials;
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0) return false;
  *pid = credentials.pid;
  return credentials.uid == geteuid();
}

bool receive_hello(int fd, const Token& token, uint64_t deadline_ns, Hello* hello) {
  // A stranger who connects and says nothing may not hold the job up for long.
  const uint64_t limit = std::min<uint64_t>(deadline_ns, now_ns() + 5'000'000'000u);
  if (!wait_readable(fd, limit)) return false;
  if (recv(fd, hello, sizeof *hello, MSG_WAITALL) != static_cast<ssize_t>(sizeof *hello)) {
    return false;
  }
  return hello->protocol == kProtocol && hello->token == token;
}

void send_hello(int fd, int rank, const Token& token) {
  const Hello hello{kProtocol, rank, token};
  if (send(fd, &hello, sizeof hello, MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof hello)) {
    throw Error(ErrorKind::rank_failed,
                std::string("a peer closed its socket during the handshake: ") + strerror(errno));
  }
}

std::string list(const std::vector<int>& ranks) {
  std::string text;
  for (int rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return text;
}

}  // namespace

Listener::Listener() : descriptor_(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
  // A random name: no two jobs meet, whatever else runs on this host.
  uint8_t random[16];
  if (getrandom(random, sizeof random, 0) != static_cast<ssize_t>(sizeof random)) {
    throw Error(ErrorKind::error, std::string("getrandom: ") + strerror(errno));
  }
  name_ = "hvd-";
  for (uint8_t byte : random) {
    name_ += "0123456789abcdef"[byte >> 4];
    name_ += "0123456789abcdef"[byte & 15];
  }
  socklen_t length = 0;
  const sockaddr_un address = abstract_address(name_, &length);
  if (!descriptor_ ||
      bind(descriptor_.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0 ||
      listen(descriptor_.get(), 1024) != 0) {
    throw Error(ErrorKind::error,
                std::string("cannot listen on an abstract unix socket: ") + strerror(errno));
  }
}

Mesh connect_mesh(int rank, const Listener* listener, const std::vector<std::string>& names,
                  const Token& token, uint64_t timeout_ns, const Interrupt* interrupt) {
  const int size = static_cast<int>(names.size());
  const uint64_t deadline = now_ns() + timeout_ns;
  Mesh mesh;
  mesh.sockets.resize(size);
  mesh.pids.assign(size, 0);
  mesh.pids[rank] = getpid();

  // Connecting first cannot deadlock: a listening socket takes connections into its backlog
  // before its owner accepts them.
  for (int peer = 0; peer < rank; ++peer) {
    Descriptor fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    socklen_t length = 0;
    const sockaddr_un address = abstract_address(names[peer], &length);
    if (!fd || connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) {
      throw Error(ErrorKind::rank_failed, "rank " + std::to_string(rank) + " cannot reach rank " +
                                              std::to_string(peer) +
                                              " on this host: " + strerror(errno));
    }
    pid_t pid = 0;
    if (!same_user(fd.get(), &pid)) {
      throw Error(ErrorKind::rank_failed, "the process behind rank " + std::to_string(peer) +
                                              " runs as another user; all ranks of a job must "
                                              "run as the same one");
    }
    send_hello(fd.get(), rank, token);
    mesh.pids[peer] = pid;
    mesh.sockets[peer] = std::move(fd);
  }
  int expected = size - 1 - rank;
  while (expected > 0) {
    if (!wait_readable(listener->descriptor(), deadline, interrupt)) {
      std::vector<int> missing;
      for (int peer = rank + 1; peer < size; ++peer) {
        if (!mesh.sockets[peer]) missing.push_back(peer);
      }
      throw Error(ErrorKind::timeout,
                  "rank " + std::to_string(rank) + " waited in vain for rank " + list(missing) +
                      " to connect; look at what they printed: they died, hang, or run on "
                      "another host");
    }
    Descriptor fd(accept4(listener->descriptor(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!fd) continue;
    pid_t pid = 0;
    Hello hello{};
    // Whoever does not prove to be of this job is turned away, and the wait goes on.
    if (!same_user(fd.get(), &pid) || !receive_hello(fd.get(), token, deadline, &hello)) continue;
    if (hello.rank <= rank || hello.rank >= size || mesh.sockets[hello.rank]) continue;
    mesh.pids[hello.rank] = pid;
    mesh.sockets[hello.rank] = std::move(fd);
    --expected;
  }
  // The answer proves to the connecting side that it was the rank it meant, with the same token.
  for (int peer = rank + 1; peer < size; ++peer) send_hello(mesh.sockets[peer].get(), rank, token);
  for (int peer = 0; peer < rank; ++peer) {
    Hello hello{};
    if (!wait_readable(mesh.sockets[peer].get(), deadline, interrupt) ||
        !receive_hello(mesh.sockets[peer].get(), token, deadline, &hello) || hello.rank != peer) {
      throw Error(ErrorKind::rank_failed, "rank " + std::to_string(rank) +
                                              " got no valid answer from rank " +
                                              std::to_string(peer) + " during the handshake");
    }
  }
  return mesh;
}

void send_memory(int socket, uint64_t key, const SharedMemory& memory) {
  iovec part{&key, sizeof key};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  const int fd = memory.descriptor();
  std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
  while (sendmsg(socket, &message, MSG_NOSIGNAL) < 0) {
    if (errno == EINTR) continue;
    throw Error(ErrorKind::rank_failed,
                std::string("cannot hand shared memory to a peer: ") + strerror(errno));
  }
}

ReceivedMemory receive_memory(int socket, uint64_t deadline_ns) {
  ReceivedMemory received;
  if (!wait_readable(socket, deadline_ns)) return received;
  iovec part{&received.key, sizeof received.key};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  const ssize_t count = recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_WAITALL);
  cmsghdr* header = count > 0 ? CMSG_FIRSTHDR(&message) : nullptr;
  if (count != static_cast<ssize_t>(sizeof received.key) || header == nullptr ||
      header->cmsg_type != SCM_RIGHTS) {
    throw Error(ErrorKind::rank_failed, "a peer ended while it was to hand over shared memory");
  }
  int fd = -1;
  std::memcpy(&fd, CMSG_DATA(header), sizeof fd);
  received.descriptor = Descriptor(fd);
  return received;
}

}  // namespace hvd
