// The emulator's version of base/cuda_runtime.cu: memory, streams, graphs and the entry of the library.
#include "runtime.hpp"

#include <sys/mman.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>

#include "base/backend.hpp"
#include "base/cuda.cuh"
#include "base/device_op.hpp"
#include "base/kept_memory.hpp"

namespace emulator {
namespace {

constexpr std::size_t page = 4096;
constexpr unsigned char slack_byte = 0xa6;

// Inaccessible pages enclose device memory. finish() checks the slack bytes between its end and such a page.
struct Allocation {
  std::byte* mapped;
  std::size_t mapped_bytes, bytes, slack;
};
std::recursive_mutex mutex;
std::map<std::byte*, Allocation> allocations;
std::set<Stream*> streams;
std::unordered_map<const void*, std::int64_t> allowed;
std::size_t in_use = 0;  // bytes of allocations
// Mappings of released memory by their size, inaccessible. The system zeroes a new one page by page.
std::unordered_multimap<std::size_t, std::byte*> released;
std::size_t released_bytes = 0;
constexpr std::size_t most_released = std::size_t{1} << 29;
int error = 0;

[[noreturn]] void throw_device(const std::string& what) {
  throw kvlab::Error(kvlab::Errc::device, what, "emulated CUDA");
}

bool on_device(const void* p) {
  auto found = allocations.upper_bound(static_cast<std::byte*>(const_cast<void*>(p)));
  if (found == allocations.begin()) return false;
  --found;
  return static_cast<const std::byte*>(p) < found->first + found->second.bytes;
}

int number(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text && std::atoi(text) > 0 ? std::atoi(text) : otherwise;
}

std::size_t free_bytes() {
  static const std::size_t all = static_cast<std::size_t>(number("KVLAB_EMULATED_MEMORY", 2048)) << 20;
  const std::lock_guard lock(mutex);
  return all - in_use;
}

void no_capture(const char* what) {
  for (const Stream* s : streams)
    if (s->capturing) throw_device(std::string("got ") + what + " while a graph is captured");
}

void* allocate(std::size_t bytes) {
  const std::lock_guard lock(mutex);
  no_capture("an allocation");
  if (bytes > free_bytes()) return nullptr;
  const std::size_t room = (bytes + 255) / 256 * 256, pages = (room + page - 1) / page * page;
  std::byte* begin;
  if (const auto found = released.find(pages); found != released.end()) {
    begin = found->second;
    released.erase(found);
    released_bytes -= pages;
  } else {
    void* mapped = mmap(nullptr, pages + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) return nullptr;
    begin = static_cast<std::byte*>(mapped);
    if (pages >= std::size_t{4} << 20) madvise(begin + page, pages, MADV_HUGEPAGE);  // fewer page faults
  }
  if (mprotect(begin + page, pages, PROT_READ | PROT_WRITE)) {
    munmap(begin, pages + 2 * page);
    return nullptr;
  }
  std::byte* memory = begin + page + pages - room;
  std::memset(memory, 0xff, bytes);
  std::memset(memory + bytes, slack_byte, room - bytes);
  allocations[memory] = {begin, pages + 2 * page, bytes, room - bytes};
  in_use += bytes;
  return memory;
}

void check_slack() {
  for (const auto& [memory, a] : allocations)
    for (std::size_t i = 0; i < a.slack; ++i)
      if (memory[a.bytes + i] != std::byte{slack_byte}) {
        std::memset(memory + a.bytes, slack_byte, a.slack);
        throw_device("got a write " + std::to_string(i) + " bytes past device memory of " + std::to_string(a.bytes));
      }
}

void finish(Stream* s) {
  const std::lock_guard lock(mutex);
  if (s->capturing) throw_device("got a wait for a stream while a graph is captured from it");
  if (s->after) finish(s->after);
  std::vector<Work> work = std::exchange(s->waiting, {});
  s->begun += work.size();
  for (const Work& w : work) w();
  check_slack();
}
// For destructors: prints the error and leaves it to the next synchronize.
std::string left;
void finish_quietly(Stream* s) {
  try {
    finish(s);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    left = e.what();
  }
}

void release(void* p) {
  const std::lock_guard lock(mutex);
  const auto found = allocations.find(static_cast<std::byte*>(p));
  if (found == allocations.end()) return;
  const Allocation a = found->second;
  in_use -= a.bytes;
  allocations.erase(found);
  const std::size_t pages = a.mapped_bytes - 2 * page;
  if (released_bytes + pages > most_released || mprotect(a.mapped + page, pages, PROT_NONE)) {
    munmap(a.mapped, a.mapped_bytes);
    return;
  }
  released.emplace(pages, a.mapped);
  released_bytes += pages;
}

Stream* stream_of(void* handle) {
  if (!handle) throw_device("got no stream");
  return static_cast<Stream*>(handle);
}

// Reads host memory at once, a graph's copy when it is captured. Reads device memory when the stream's turn comes.
void copy(void* to, const void* from, std::size_t bytes, void* handle) {
  const std::lock_guard lock(mutex);
  Stream* s = stream_of(handle);
  if (on_device(from)) return submit(s, [=] { std::memcpy(to, from, bytes); });
  const auto* begin = static_cast<const std::byte*>(from);
  submit(s, [to, kept = std::vector<std::byte>(begin, begin + bytes)] { std::memcpy(to, kept.data(), kept.size()); });
}

struct Event {
  Stream* stream = nullptr;
  std::size_t behind = 0;  // work given to the stream until then
  int asked = 0;           // whether it has passed
  std::chrono::steady_clock::time_point at;
};

// Work of a stream that waited for another runs as late as it may: when that one waits for it.
void wait(Event* event, Stream* s) {
  const std::lock_guard lock(mutex);
  Stream* other = event->stream;
  if (other == nullptr || other == s) return;
  if (other->after != s) {
    s->after = other;
    s->capturing = s->capturing || other->capturing;
    return;
  }
  if (event->behind <= other->begun) return;
  const auto end = other->waiting.begin() + static_cast<std::ptrdiff_t>(event->behind - other->begun);
  s->waiting.insert(s->waiting.end(), other->waiting.begin(), end);
  other->waiting.erase(other->waiting.begin(), end);
  other->begun = event->behind;
}

struct Graph {
  std::vector<Work> work;
};

// Ends the capture of the streams that wait for `s`, too. Work of theirs that `s` did not wait for is an error.
void end_capture(Stream* s) {
  s->capturing = false;
  for (Stream* other : streams) {
    if (other->after != s || !other->capturing) continue;
    other->capturing = false;
    if (const std::size_t left = std::exchange(other->waiting, {}).size())
      throw_device("got " + std::to_string(left) + " pieces of work that a captured stream did not wait for");
  }
}

void* capture(void* handle, void (*work)(void*), void* context) {
  Stream* s = stream_of(handle);
  for (Stream* other : streams)
    if (other->after == s) finish(other);
  finish(s);
  s->capturing = true;
  try {
    work(context);
  } catch (...) {
    s->waiting.clear();
    end_capture(s);
    throw;
  }
  end_capture(s);
  s->begun += s->waiting.size();
  return new Graph{std::exchange(s->waiting, {})};
}

kvlab::KeptMemory& kept_memory() {
  kvlab::KeptMemory::Device device;
  device.allocate = allocate;
  device.free = release;
  device.free_bytes = free_bytes;
  device.zero = [](void* p, std::size_t bytes, void*) { std::memset(p, 0, bytes); };
  device.wait = [](void* stream) { finish(stream_of(stream)); };
  static auto& all = *new kvlab::KeptMemory(device);
  return all;
}

}  // namespace

void submit(Stream* stream, Work work) {
  const std::lock_guard lock(mutex);
  stream_of(stream)->waiting.push_back(std::move(work));
}

void submit(Stream* stream, Launch l, const void* kernel, Work body) {
  const std::lock_guard lock(mutex);
  const auto limit = allowed.contains(kernel) ? allowed[kernel] : static_shared_of_block;
  if (l.grid.x < 1 || l.grid.y < 1 || l.grid.z < 1 || l.grid.x > 0x7fffffffu || l.grid.y > 65535 || l.grid.z > 65535 ||
      l.block.x < 1 || l.block.y != 1 || l.block.z != 1 || l.block.x > 1024 ||
      static_cast<std::int64_t>(l.shared) > limit) {
    error = cudaErrorInvalidConfiguration;
    return;
  }
  submit(stream, [launch = std::move(l), body = std::move(body)] { run(launch, body); });
}

int last_error() { return std::exchange(error, 0); }

bool allow_shared(const void* kernel, std::int64_t bytes) {
  const std::lock_guard lock(mutex);
  if (bytes < 0 || bytes > shared_of_block) return false;
  allowed[kernel] = bytes;
  return true;
}

kvlab::LibraryState stand_in(const char* name, const char* variable) {
  kvlab::LibraryState state;
  const char* chosen = std::getenv(variable);
  state.there = !chosen || !*chosen || kvlab::open_library(variable, {}, state);
  if (state.there) state.text = std::string(name) + ", emulated";
  return state;
}

}  // namespace emulator

namespace kvlab::cuda {

LeftFree left_free;
int multiprocessors() {
  static const int count = emulator::number("KVLAB_EMULATED_MULTIPROCESSORS", 132);
  return count;
}
std::int64_t shared_bytes() { return emulator::shared_of_block; }
void* zeroed(void* stream, const char* tag, std::size_t bytes) {
  return emulator::kept_memory().get(stream, tag, bytes, true);
}
void* kept(void* stream, const char* tag, std::size_t bytes) {
  return emulator::kept_memory().get(stream, tag, bytes, false);
}

}  // namespace kvlab::cuda

extern "C" bool kvlab_cuda_backend(kvlab::CudaBackend* table, std::string* state) {
  using namespace emulator;
  *state = "emulated on the CPU, " + std::to_string(kvlab::cuda::multiprocessors()) + " multiprocessors";
  std::snprintf(table->device_name, sizeof table->device_name, "emulated GPU");
  kvlab::CudaRuntime& r = table->runtime;
  r.allocate = r.allocate_pinned = allocate;
  r.free = r.free_pinned = [](void* p) {
    for (Stream* s : streams) finish_quietly(s);
    release(p);
  };
  r.free_bytes = free_bytes;
  r.copy = copy;
  r.fill = [](void* to, int byte, std::size_t bytes, void* stream) {
    submit(stream_of(stream), [=] { std::memset(to, byte, bytes); });
  };
  r.new_stream = [](bool) -> void* { return *streams.insert(new Stream).first; };
  r.delete_stream = [](void* stream) {
    Stream* s = stream_of(stream);
    finish_quietly(s);
    kept_memory().drop(s);
    streams.erase(s);
    for (Stream* other : streams)
      if (other->after == s) other->after = nullptr;
    delete s;
  };
  r.synchronize = [](void* stream) {
    if (!left.empty()) throw_device(std::exchange(left, {}));
    finish(stream_of(stream));
  };
  r.capture = capture;
  r.launch = [](void* graph, void* stream) {
    for (const Work& w : static_cast<Graph*>(graph)->work) submit(stream_of(stream), w);
  };
  r.delete_graph = [](void* graph) { delete static_cast<Graph*>(graph); };
  r.scratch_moves = [] { return kept_memory().moves(); };
  r.time_graph = [](void*, void*, int, float*) { throw_device("got a measurement, wanted a GPU"); };
  r.time = [](void* stream, void (*work)(void*), void* context) {  // time on the CPU, for tests that benches run
    const auto begin = std::chrono::steady_clock::now();
    work(context);
    finish(stream_of(stream));
    return std::chrono::duration<float, std::milli>(std::chrono::steady_clock::now() - begin).count();
  };
  r.new_event = []() -> void* { return new Event; };
  r.delete_event = [](void* e) {
    auto* event = static_cast<Event*>(e);
    if (event->stream) finish_quietly(event->stream);  // work of its stream writes to the event
    delete event;
  };
  r.record = [](void* e, void* stream) {
    auto* event = static_cast<Event*>(e);
    event->stream = stream_of(stream);
    submit(event->stream, [event] { event->at = std::chrono::steady_clock::now(); });
    event->behind = event->stream->begun + event->stream->waiting.size();
    event->asked = 0;
  };
  r.record_at_launch = r.record;
  r.wait = [](void* event, void* stream) { wait(static_cast<Event*>(event), stream_of(stream)); };
  r.elapsed = [](void* begin, void* end) {
    auto *from = static_cast<Event*>(begin), *to = static_cast<Event*>(end);
    finish(to->stream);
    return std::chrono::duration<float, std::milli>(to->at - from->at).count();
  };
  // Work that nobody waits for is done when its event is asked for the third time.
  r.passed = [](void* e) {
    auto* event = static_cast<Event*>(e);
    if (!event->stream || event->behind <= event->stream->begun) return true;
    if (++event->asked < 3) return false;
    finish(event->stream);
    return true;
  };
  r.read_rate = [](std::size_t, void*) -> double { throw_device("got a measurement, wanted a GPU"); };
  table->announced = kvlab::announced_cuda_ops;
  return true;
}
