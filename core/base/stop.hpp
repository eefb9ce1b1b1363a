// SIGINT, SIGTERM and SIGHUP ask a run to stop. The run checks between pieces of work, drops unfinished work and exits
// with 128 + the signal's number.
#pragma once
#include <atomic>

namespace kvlab::stop {

// It is no std::exception, so that no handler on the way takes it for a failure.
struct Interrupted {
  int signal = 0;
};

namespace detail {
extern std::atomic<int> signal;
}

// From here on the first of the three signals is noted and does not end the process. A second one ends it, unless it
// follows within 0.3 s: timeout(1) and terminals send a request twice. A signal ignored before (nohup) stays ignored.
void watch();

// The signal that was received, 0 = none.
inline int requested() noexcept { return detail::signal.load(std::memory_order_relaxed); }

// Throws Interrupted if a signal was received. It costs one load of memory, so decode steps may call it.
inline void check() {
  if (const int signal = requested()) throw Interrupted{signal};
}

// "SIGINT", "SIGTERM", "SIGHUP"; "a signal" for others.
const char* name_of(int signal) noexcept;

inline int exit_code(int signal) noexcept { return 128 + signal; }

}  // namespace kvlab::stop
