#pragma once

#include <memory>
#include <vector>

#include "control/host_control_plane.h"

namespace hvd {

// A RecordChannel in shared memory. A record travels in fragments of fixed size through two
// buffers per member, used in turn: a member publishes fragment n + 1 only after it has read
// everybody's fragment n, so when it has seen all fragments n + 1 nobody reads its fragment n any
// more, and that buffer may take fragment n + 2.
std::unique_ptr<RecordChannel> open_page_channel(HostControlPlane& control,
                                                 const std::vector<int>& members, uint64_t id,
                                                 uint64_t timeout_ns, const Interrupt* interrupt);

}  // namespace hvd
