#!/usr/bin/env bash
# Builds and runs the C++ tests: cpp_tests.sh [plain] [thread] [address]
#
# "thread" is ThreadSanitizer, "address" is AddressSanitizer with UndefinedBehaviorSanitizer.
# Needs no Python. CPP_TESTS_TIMEOUT (seconds, 300) bounds each run.
set -euo pipefail
cd "$(dirname "$0")/.."

jobs=$(nproc)
# GCC up to 13 knows fewer mmap layouts than newer kernels give: without address randomization the
# sanitizers start everywhere. Not every container may switch it off, nor needs to.
fixed_layout=()
if setarch "$(uname -m)" -R true 2>/dev/null; then
  fixed_layout=(setarch "$(uname -m)" -R)
fi
export TSAN_OPTIONS="halt_on_error=1 second_deadlock_stack=1 die_after_fork=0 ${TSAN_OPTIONS:-}"
# GCC before 13.3 misaligns 64-byte vectors on the stack that this check uses (its bug 110027).
export ASAN_OPTIONS="detect_stack_use_after_return=0 ${ASAN_OPTIONS:-}"
export UBSAN_OPTIONS="print_stacktrace=1 ${UBSAN_OPTIONS:-}"

run_tests() {  # folder, and what to start programs with
  local folder=$1
  shift
  timeout --kill-after=10 "${CPP_TESTS_TIMEOUT:-300}" "$@" "$folder/cpp_tests"
  if [ -x "$folder/nvrtc_tests" ]; then
    timeout --kill-after=10 "${CPP_TESTS_TIMEOUT:-300}" "$folder/nvrtc_tests"
  fi
}

# The tests mostly wait, so those of one variant run while the next one is built.
running=
tests=
finish_tests() {
  if [ -n "$running" ]; then
    local failed=0
    wait "$tests" || failed=$?
    echo "== C++ tests: $running"
    cat "build/cpp-$running/tests.log"
    running=
    [ "$failed" = 0 ] || exit "$failed"
  fi
}
trap '[ -z "$running" ] || kill "$tests" 2>/dev/null || true' EXIT

for variant in "${@:-plain}"; do
  folder="build/cpp-$variant"
  sanitize=$variant
  runner=("${fixed_layout[@]}")
  if [ "$variant" = plain ]; then
    sanitize=
    runner=()
  fi
  echo "== building the C++ tests: $variant"
  mkdir -p "$folder"
  # Quiet unless it fails.
  cmake -S . -B "$folder" -G Ninja -DHVD_BUILD_MODULE=OFF -DHVD_BUILD_TESTS=ON \
    -DHVD_SANITIZE="$sanitize" >"$folder/configure.log" || { cat "$folder/configure.log"; exit 1; }
  cmake --build "$folder" -j "$jobs" >"$folder/build.log" || { cat "$folder/build.log"; exit 1; }
  finish_tests
  running=$variant
  run_tests "$folder" "${runner[@]}" >"$folder/tests.log" 2>&1 &
  tests=$!
done
finish_tests
