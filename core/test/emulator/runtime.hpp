// Streams: work waits until the stream is synchronized, as nothing promises that it runs earlier.
#pragma once
#include <functional>
#include <memory>
#include <vector>

#include "base/library_state.hpp"
#include "emulator.hpp"

namespace emulator {

using Work = std::function<void()>;

struct Stream {
  std::vector<Work> waiting;
  bool capturing = false;
};

void submit(Stream* stream, Work work);
// A kernel: configuration errors are those of the launch (last_error), all others those of a later synchronize.
void submit(Stream* stream, Launch launch, const void* kernel, Work body);
int last_error();  // 0 or a cudaError_t; forgotten with the call

// Of a library that plain loops stand in for: there unless its variable turns it off or names one that is not there.
kvlab::LibraryState stand_in(const char* name, const char* variable);

bool allow_shared(const void* kernel, std::int64_t bytes);  // dynamic shared memory above 48 KiB

}  // namespace emulator
