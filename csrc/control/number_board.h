#pragma once

#include <memory>
#include <vector>

#include "control/host_control_plane.h"

namespace hvd {

// A NumberBoard in shared memory.
std::unique_ptr<NumberBoard> open_page_board(HostControlPlane& control,
                                             const std::vector<int>& members, uint64_t id,
                                             uint32_t places, uint64_t timeout_ns,
                                             const Interrupt* interrupt);

}  // namespace hvd
