#include "base/stop.hpp"

#include <cerrno>
#include <csignal>
#include <cstdint>
#include <ctime>

namespace kvlab::stop {

std::atomic<int> detail::signal{0};

namespace {

constexpr int signals[] = {SIGINT, SIGTERM, SIGHUP};
constexpr std::int64_t same_request_ns = 300'000'000;

std::atomic<std::int64_t> first_ns{0};
static_assert(std::atomic<std::int64_t>::is_always_lock_free && std::atomic<int>::is_always_lock_free);

std::int64_t now_ns() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * std::int64_t{1'000'000'000} + t.tv_nsec;
}

void received(int number) {
  const int before = errno;
  int none = 0;
  if (detail::signal.compare_exchange_strong(none, number)) {
    first_ns = now_ns();
  } else if (first_ns > 0 && now_ns() - first_ns > same_request_ns) {
    std::signal(number, SIG_DFL);
    raise(number);  // is delivered when this handler returns
  }
  errno = before;
}

}  // namespace

void watch() {
  for (const int number : signals) {
    struct sigaction old {};
    if (sigaction(number, nullptr, &old) == 0 && old.sa_handler == SIG_IGN) continue;
    struct sigaction action {};
    action.sa_handler = received;
    action.sa_flags = SA_RESTART;
    sigaction(number, &action, nullptr);
  }
}

const char* name_of(int number) noexcept {
  switch (number) {
    case SIGINT: return "SIGINT";
    case SIGTERM: return "SIGTERM";
    case SIGHUP: return "SIGHUP";
    default: return "a signal";
  }
}

}  // namespace kvlab::stop
