// Work waits until its stream is synchronized, as CUDA does not promise to run it earlier.
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
  std::size_t begun = 0;  // work that left `waiting`
  bool capturing = false;
  Stream* after = nullptr;  // its work runs after all of this stream's
};

void submit(Stream* stream, Work work);
// Submits a kernel. last_error() returns configuration errors, and a later synchronize throws all others.
void submit(Stream* stream, Launch launch, const void* kernel, Work body);
int last_error();  // 0 or a cudaError_t; the call clears it

// State of a library that plain loops replace. It is there unless its variable turns it off or names a missing one.
kvlab::LibraryState stand_in(const char* name, const char* variable);

bool allow_shared(const void* kernel, std::int64_t bytes);  // dynamic shared memory above 48 KiB

}  // namespace emulator
