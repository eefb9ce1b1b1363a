// The memory of the host that a process may still take.
#pragma once
#include <cstdint>

namespace kvlab {

// Returns the bytes of memory that the system or the limit of its container leaves free, file caches counted as free.
// Where neither tells, the greatest number.
std::int64_t free_host_bytes();

}  // namespace kvlab
