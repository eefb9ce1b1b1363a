#include "base/memory_reserve.hpp"

#include <omp.h>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <new>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "base/memory_map.hpp"
#include "base/stream_memory.hpp"

namespace kvlab {

std::atomic<bool> detail::reserve_used{false};

namespace {

constexpr std::int64_t reserve_bytes = std::int64_t{16} << 20;

// A mapping, since memory freed through malloc may stay with one thread's later calls.
std::atomic<std::byte*> reserve{nullptr};

std::atomic<int> attempts{0};

// operator new tries again when this returns.
void give_back() {
  detail::reserve_used = true;
  if (std::byte* memory = reserve.exchange(nullptr)) {
    release_memory(memory, reserve_bytes);
  } else if (constexpr int most = 64; attempts++ < most) {
    std::this_thread::yield();  // another thread may be about to free it
  } else {
    std::set_new_handler(nullptr);  // operator new then throws std::bad_alloc
  }
}

}  // namespace

void detail::no_reserve() {
  throw NoRoom("got no memory from the system, wanted more: the last of it was used to end in order");
}

bool keep_reserve() {
  detail::reserve_used = false;
  attempts = 0;
  std::set_new_handler(nullptr);
  try {
    if (!reserve) reserve = reserve_memory(reserve_bytes);
  } catch (const std::bad_alloc&) {
    return false;
  }
  std::set_new_handler(give_back);
  return true;
}

FreedReserve::FreedReserve() : kept_(std::get_new_handler() == give_back) {
  std::set_new_handler(nullptr);
  release_memory(reserve.exchange(nullptr), reserve_bytes);
}

FreedReserve::~FreedReserve() {
  if (kept_) keep_reserve();
}

void start_threads() {
  const int wanted = omp_get_max_threads();
  std::mutex mutex;
  std::condition_variable all;
  bool done = false;
  std::string refused;
  std::vector<std::thread> tried;
  try {
    tried.reserve(static_cast<std::size_t>(wanted));
    for (int i = 1; i < wanted; ++i)
      tried.emplace_back([&] {
        std::unique_lock lock(mutex);
        all.wait(lock, [&] { return done; });
      });
  } catch (const std::system_error& e) {
    refused = e.what();
  }
  {
    const std::lock_guard lock(mutex);
    done = true;
  }
  all.notify_all();
  const std::size_t got = tried.size() + 1;
  for (std::thread& t : tried) t.join();
  if (!refused.empty())
    throw NoRoom("got " + std::to_string(got) + " threads (" + refused + "), wanted " + std::to_string(wanted) +
                 ": their stacks need memory, or set threads");
#pragma omp parallel
  {}
}

}  // namespace kvlab
