// XXH64 (https://github.com/Cyan4973/xxHash, doc/xxhash_spec.md) with seed 0: several GB/s per thread. It tells
// contents apart and is no defence against someone who wants a collision.
#pragma once
#include <cstdint>
#include <string_view>

namespace kvlab {

std::uint64_t xxh64(std::string_view bytes);

}  // namespace kvlab
