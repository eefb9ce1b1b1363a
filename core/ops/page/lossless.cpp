#include "ops/page/lossless.hpp"

#include <kvlab/error.hpp>

#include <algorithm>
#include <array>
#include <cstring>

#include "base/device_op.hpp"
#include "ops/page/check.hpp"

namespace kvlab::ops {
namespace {

int exponent_of(std::uint16_t x) { return x >> 7 & 0xff; }

// The base whose distances 0 to 6 have most of the exponents, and how many have another.
struct Base {
  int base = 0, exceptions = 0;
};
Base base_of(const std::uint16_t* x, int n) {
  std::array<int, 256> count{};
  for (int i = 0; i < n; ++i) ++count[static_cast<std::size_t>(exponent_of(x[i]))];
  int most = -1, sum = 0;
  Base out;
  for (std::size_t end = 0; end < count.size(); ++end) {
    sum += count[end] - (end >= lossless_exception ? count[end - lossless_exception] : 0);
    if (end + 1 >= lossless_exception && sum > most)
      most = sum, out.base = static_cast<int>(end) + 1 - lossless_exception;
  }
  out.exceptions = n - most;
  return out;
}

// Returns the bytes that the side takes.
std::int32_t pack_side(const std::byte* from, int n, std::byte* to) {
  const auto* x = reinterpret_cast<const std::uint16_t*>(from);
  const Base of = base_of(x, n);
  const std::int32_t bytes = lossless_bytes(n, of.exceptions);
  if (bytes >= 2 * n) {
    std::memcpy(to, from, static_cast<std::size_t>(2 * n));
    return 2 * n;
  }
  const std::int32_t header[] = {of.base, of.exceptions, 0, 0};
  std::memcpy(to, header, sizeof header);
  auto* rest = reinterpret_cast<std::uint8_t*>(to + lossless_header);
  auto* low = reinterpret_cast<std::uint16_t*>(rest + n);
  std::uint8_t *high = rest + n + n / 4, *exceptions = high + n / 8;
  for (int eight = 0; eight < n / 8; ++eight) {
    unsigned lows = 0, highs = 0;
    for (int i = 0; i < 8; ++i) {
      const std::uint16_t number = x[8 * eight + i];
      const int distance = exponent_of(number) - of.base;
      const bool inside = distance >= 0 && distance < lossless_exception;
      const unsigned code = inside ? static_cast<unsigned>(distance) : unsigned{lossless_exception};
      rest[8 * eight + i] = static_cast<std::uint8_t>((number >> 8 & 0x80u) | (number & 0x7fu));
      lows |= (code & 3u) << 2 * i, highs |= code >> 2 << i;
      if (!inside) *exceptions++ = static_cast<std::uint8_t>(exponent_of(number));
    }
    low[eight] = static_cast<std::uint16_t>(lows), high[eight] = static_cast<std::uint8_t>(highs);
  }
  return bytes;
}

void unpack_side(const std::byte* from, int n, std::int32_t bytes, std::byte* to) {
  if (bytes == 2 * n) {
    std::memcpy(to, from, static_cast<std::size_t>(2 * n));
    return;
  }
  std::int32_t base;
  std::memcpy(&base, from, sizeof base);
  const auto* rest = reinterpret_cast<const std::uint8_t*>(from + lossless_header);
  const auto* low = reinterpret_cast<const std::uint16_t*>(rest + n);
  const std::uint8_t *high = rest + n + n / 4, *exceptions = high + n / 8;
  auto* x = reinterpret_cast<std::uint16_t*>(to);
  for (int i = 0; i < n; ++i) {
    const unsigned code = (low[i / 8] >> 2 * (i % 8) & 3u) | (high[i / 8] >> (i % 8) & 1u) << 2;
    const unsigned exponent = code == lossless_exception ? unsigned{*exceptions++} : static_cast<unsigned>(base) + code;
    x[i] = static_cast<std::uint16_t>((rest[i] & 0x80u) << 8 | exponent << 7 | (rest[i] & 0x7fu));
  }
}

void check(const LosslessPages& a, const char* op) {
  const PageLayout& l = a.layout;
  if (l.dtype != DType::bf16 || l.codec.k.bits || l.codec.v.bits || l.page_size * l.head_dim % lossless_run)
    fail(Errc::unsupported, op,
         "got another layout, wanted bf16 without codes and pages of a multiple of " + std::to_string(lossless_run) +
             " numbers");
}

// Calls f(side's offset, side, source, target) for both sides, and copies what lies behind them.
template <class F>
void for_pages(const LosslessPages& a, const F& f) {
  const PageLayout& l = a.layout;
  const std::int64_t end = l.v + 2 * std::int64_t{l.page_size} * l.head_dim;
#pragma omp parallel for schedule(static)
  for (int page = 0; page < a.pages; ++page) {
    const std::byte* from = a.from + std::int64_t{a.from_frames[page]} * granule_bytes;
    std::byte* to = a.to + std::int64_t{a.to_frames[page]} * granule_bytes;
    for (const int side : {0, 1}) {
      const std::int64_t at = side ? l.v : l.k;
      f(from + at, to + at, a.bytes[2 * page + side]);
    }
    std::memcpy(to + end, from + end, static_cast<std::size_t>(l.bytes - end));
  }
}

}  // namespace

void lossless_pack(const LosslessPages& a, Stream s) {
  check(a, "lossless_pack");
  if (s.device() == Device::cuda) return on_cuda<lossless_pack>(a, s);
  const int n = a.layout.page_size * a.layout.head_dim;
  for_pages(a, [&](const std::byte* from, std::byte* to, std::int32_t& bytes) { bytes = pack_side(from, n, to); });
}

void lossless_unpack(const LosslessPages& a, Stream s) {
  check(a, "lossless_unpack");
  if (s.device() == Device::cuda) return on_cuda<lossless_unpack>(a, s);
  const int n = a.layout.page_size * a.layout.head_dim;
  for_pages(a, [&](const std::byte* from, std::byte* to, std::int32_t bytes) { unpack_side(from, n, bytes, to); });
}

}  // namespace kvlab::ops
