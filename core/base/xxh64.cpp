#include "base/xxh64.hpp"

#include <bit>
#include <cstring>

namespace kvlab {
namespace {

constexpr std::uint64_t prime1 = 0x9e3779b185ebca87ull, prime2 = 0xc2b2ae3d27d4eb4full, prime3 = 0x165667b19e3779f9ull,
                        prime4 = 0x85ebca77c2b2ae63ull, prime5 = 0x27d4eb2f165667c5ull;

template <class T>
std::uint64_t load(const char* p) {
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

std::uint64_t round(std::uint64_t lane, std::uint64_t input) { return std::rotl(lane + input * prime2, 31) * prime1; }

std::uint64_t merge(std::uint64_t hash, std::uint64_t lane) { return (hash ^ round(0, lane)) * prime1 + prime4; }

}  // namespace

std::uint64_t xxh64(std::string_view bytes) {
  const char* p = bytes.data();
  std::size_t left = bytes.size();
  std::uint64_t hash = prime5;
  if (left >= 32) {
    std::uint64_t a = prime1 + prime2, b = prime2, c = 0, d = 0 - prime1;
    for (; left >= 32; p += 32, left -= 32) {
      a = round(a, load<std::uint64_t>(p));
      b = round(b, load<std::uint64_t>(p + 8));
      c = round(c, load<std::uint64_t>(p + 16));
      d = round(d, load<std::uint64_t>(p + 24));
    }
    hash = std::rotl(a, 1) + std::rotl(b, 7) + std::rotl(c, 12) + std::rotl(d, 18);
    for (const std::uint64_t lane : {a, b, c, d}) hash = merge(hash, lane);
  }
  hash += bytes.size();
  for (; left >= 8; p += 8, left -= 8) hash = std::rotl(hash ^ round(0, load<std::uint64_t>(p)), 27) * prime1 + prime4;
  for (; left >= 4; p += 4, left -= 4) hash = std::rotl(hash ^ (load<std::uint32_t>(p) * prime1), 23) * prime2 + prime3;
  for (; left > 0; ++p, --left) hash = std::rotl(hash ^ (load<std::uint8_t>(p) * prime5), 11) * prime1;
  hash = (hash ^ (hash >> 33)) * prime2;
  hash = (hash ^ (hash >> 29)) * prime3;
  return hash ^ (hash >> 32);
}

}  // namespace kvlab
