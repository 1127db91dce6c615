#pragma once

#include <nanobind/nanobind.h>

#include <functional>

#include "control/control_plane.h"

namespace hvd {

void bind_session(nanobind::module_& module);
void bind_reducer(nanobind::module_& module);

// Looks for Ctrl-C. For waits, which run without the GIL.
const std::function<void()>& python_interrupt();

// A wait with a deadline (seconds; 0 = none) that Ctrl-C ends.
Wait python_wait(double timeout, bool first = false);

uint64_t nanoseconds(double seconds);

}  // namespace hvd
