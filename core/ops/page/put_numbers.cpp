#include <kvlab/step_numbers.hpp>

#include "base/stream_memory.hpp"

namespace kvlab::ops {

void put_numbers(void* to, const void* from, std::size_t bytes, Stream s) {
  if (bytes > 0) copy_memory(to, from, bytes, s);
}

}  // namespace kvlab::ops
