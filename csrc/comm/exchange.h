#pragma once

#include <string>
#include <vector>

#include "comm/communicator.h"

namespace hvd {

// Every member gives a record of any length and gets those of all members, by member index.
// All members have to call it in the same order as their other collectives.
std::vector<std::string> exchange(Communicator& communicator, const std::string& record,
                                  const Wait& settings);

}  // namespace hvd
