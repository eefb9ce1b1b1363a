#include "base/sha256.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

namespace kvlab {
namespace {

using Words = std::array<std::uint32_t, 64>;

// The constants are the fractions of square and cube roots of the first primes, so they are computed, not typed.
std::uint32_t fraction(long double root) {
  return static_cast<std::uint32_t>((root - std::floor(root)) * 4294967296.0L);
}

std::array<int, 64> first_primes() {
  std::array<int, 64> primes{};
  int count = 0;
  for (int n = 2; count < 64; ++n) {
    bool prime = true;
    for (int i = 0; i < count && prime; ++i) prime = n % primes[static_cast<std::size_t>(i)] != 0;
    if (prime) primes[static_cast<std::size_t>(count++)] = n;
  }
  return primes;
}

void block(const unsigned char* p, const Words& k, std::array<std::uint32_t, 8>& h) {
  Words w{};
  for (std::size_t i = 0; i < 16; ++i)
    w[i] = std::uint32_t{p[4 * i]} << 24 | std::uint32_t{p[4 * i + 1]} << 16 | std::uint32_t{p[4 * i + 2]} << 8 |
           p[4 * i + 3];
  for (std::size_t i = 16; i < 64; ++i) {
    const std::uint32_t a = w[i - 15], b = w[i - 2];
    w[i] = w[i - 16] + w[i - 7] + (std::rotr(a, 7) ^ std::rotr(a, 18) ^ (a >> 3)) +
           (std::rotr(b, 17) ^ std::rotr(b, 19) ^ (b >> 10));
  }
  auto s = h;
  for (std::size_t i = 0; i < 64; ++i) {
    const std::uint32_t t1 = s[7] + (std::rotr(s[4], 6) ^ std::rotr(s[4], 11) ^ std::rotr(s[4], 25)) +
                             ((s[4] & s[5]) ^ (~s[4] & s[6])) + k[i] + w[i];
    const std::uint32_t t2 = (std::rotr(s[0], 2) ^ std::rotr(s[0], 13) ^ std::rotr(s[0], 22)) +
                             ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
    s = {t1 + t2, s[0], s[1], s[2], s[3] + t1, s[4], s[5], s[6]};
  }
  for (std::size_t i = 0; i < 8; ++i) h[i] += s[i];
}

const Words& constants() {
  static const Words k = [] {
    const std::array<int, 64> primes = first_primes();
    Words out{};
    for (std::size_t i = 0; i < 64; ++i) out[i] = fraction(std::cbrt(static_cast<long double>(primes[i])));
    return out;
  }();
  return k;
}

const unsigned char* bytes_of(std::string_view text) { return reinterpret_cast<const unsigned char*>(text.data()); }

}  // namespace

Sha256::Sha256() {
  const std::array<int, 64> primes = first_primes();
  for (std::size_t i = 0; i < 8; ++i) h_[i] = fraction(std::sqrt(static_cast<long double>(primes[i])));
}

void Sha256::add(std::string_view bytes) {
  bytes_ += bytes.size();
  if (!rest_.empty()) {
    const std::size_t more = std::min(64 - rest_.size(), bytes.size());
    rest_.append(bytes.substr(0, more));
    bytes.remove_prefix(more);
    if (rest_.size() < 64) return;
    block(bytes_of(rest_), constants(), h_);
    rest_.clear();
  }
  for (; bytes.size() >= 64; bytes.remove_prefix(64)) block(bytes_of(bytes), constants(), h_);
  rest_ = bytes;
}

std::string Sha256::hex() {
  const std::uint64_t bits = bytes_ * 8;
  std::string end(1, '\x80');
  while ((bytes_ + end.size()) % 64 != 56) end.push_back('\0');
  for (int i = 7; i >= 0; --i) end.push_back(static_cast<char>(bits >> (8 * i)));
  add(end);
  std::string hex;
  for (std::uint32_t word : h_)
    for (int i = 7; i >= 0; --i) hex.push_back("0123456789abcdef"[(word >> (4 * i)) & 15]);
  return hex;
}

std::string sha256_hex(std::string_view bytes) {
  Sha256 sha;
  sha.add(bytes);
  return sha.hex();
}

}  // namespace kvlab
