// SIGINT, SIGTERM and SIGHUP ask a run to stop. It looks between pieces of work, drops what is under way and leaves
// with 128 + the signal's number.
#pragma once
#include <atomic>

namespace kvlab::stop {

// No std::exception, so that nobody on the way takes it for a failure.
struct Interrupted {
  int signal = 0;
};

namespace detail {
extern std::atomic<int> signal;
}

// From here on the three signals are noted and no longer end the process. A second one does, unless it follows within
// 0.3 s: timeout(1) and terminals send the same request twice. A signal that was ignored before (nohup) stays ignored.
void watch();

// The signal that was received, 0 = none.
inline int requested() noexcept { return detail::signal.load(std::memory_order_relaxed); }

// Throws Interrupted once a signal was received. One load of memory otherwise: decode steps may call it.
inline void check() {
  if (const int signal = requested()) throw Interrupted{signal};
}

// "SIGINT", "SIGTERM", "SIGHUP"; "a signal" for others.
const char* name_of(int signal) noexcept;

inline int exit_code(int signal) noexcept { return 128 + signal; }

}  // namespace kvlab::stop
