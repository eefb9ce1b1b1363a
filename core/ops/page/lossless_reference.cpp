#include <algorithm>
#include <cstring>
#include <vector>

#include "ops/page/lossless.hpp"
#include "ops/page/reference.hpp"

namespace kvlab::ops {

std::vector<std::uint8_t> lossless_side_reference(const std::vector<std::uint16_t>& x) {
  const int n = static_cast<int>(x.size());
  const auto distance = [&](int i, int base) {
    const int d = (x[static_cast<std::size_t>(i)] >> 7) % 256 - base;
    return d < 0 || d > 6 ? 7 : d;
  };
  int best = 0, fewest = n + 1;
  for (int base = 0; base + 6 < 256; ++base) {
    int exceptions = 0;
    for (int i = 0; i < n; ++i) exceptions += distance(i, base) == 7;
    if (exceptions < fewest) fewest = exceptions, best = base;
  }
  std::vector<std::uint8_t> out(16);
  std::memcpy(out.data(), &best, 4);
  std::memcpy(out.data() + 4, &fewest, 4);
  for (const std::uint16_t number : x) out.push_back(static_cast<std::uint8_t>(number / 0x8000 * 0x80 + number % 0x80));
  for (int i = 0; i < n; i += 4) {
    int byte = 0;
    for (int j = 3; j >= 0; --j) byte = 4 * byte + distance(i + j, best) % 4;
    out.push_back(static_cast<std::uint8_t>(byte));
  }
  for (int i = 0; i < n; i += 8) {
    int byte = 0;
    for (int j = 7; j >= 0; --j) byte = 2 * byte + distance(i + j, best) / 4;
    out.push_back(static_cast<std::uint8_t>(byte));
  }
  for (int i = 0; i < n; ++i)
    if (distance(i, best) == 7) out.push_back(static_cast<std::uint8_t>(x[static_cast<std::size_t>(i)] >> 7));
  if ((out.size() + 15) / 16 * 16 < static_cast<std::size_t>(2 * n)) return out;
  out.resize(static_cast<std::size_t>(2 * n));
  std::memcpy(out.data(), x.data(), out.size());
  return out;
}

}  // namespace kvlab::ops
