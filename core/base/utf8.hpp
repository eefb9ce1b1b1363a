// UTF-8 as Unicode defines it: no overlong forms, no surrogates, nothing above U+10FFFF.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace kvlab {

// Bytes of the well-formed character that starts at text[at]; 0 if there is none.
inline std::size_t utf8_length(std::string_view text, std::size_t at) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const std::size_t left = text.size() - at;
  const unsigned first = byte(at);
  if (first < 0x80) return 1;
  const auto tail = [&](std::size_t i) { return (byte(at + i) & 0xc0) == 0x80; };
  if (first >= 0xc2 && first <= 0xdf) return left >= 2 && tail(1) ? 2 : 0;
  if (first >= 0xe0 && first <= 0xef) {
    if (left < 3 || !tail(1) || !tail(2)) return 0;
    if (first == 0xe0 && byte(at + 1) < 0xa0) return 0;
    if (first == 0xed && byte(at + 1) > 0x9f) return 0;
    return 3;
  }
  if (first >= 0xf0 && first <= 0xf4) {
    if (left < 4 || !tail(1) || !tail(2) || !tail(3)) return 0;
    if (first == 0xf0 && byte(at + 1) < 0x90) return 0;
    if (first == 0xf4 && byte(at + 1) > 0x8f) return 0;
    return 4;
  }
  return 0;
}

// The code point of the well-formed character of `length` bytes at text[at].
inline std::uint32_t utf8_code_point(std::string_view text, std::size_t at, std::size_t length) {
  const auto byte = [&](std::size_t i) { return static_cast<std::uint32_t>(static_cast<unsigned char>(text[at + i])); };
  switch (length) {
    case 1: return byte(0);
    case 2: return (byte(0) & 31) << 6 | (byte(1) & 63);
    case 3: return (byte(0) & 15) << 12 | (byte(1) & 63) << 6 | (byte(2) & 63);
    default: return (byte(0) & 7) << 18 | (byte(1) & 63) << 12 | (byte(2) & 63) << 6 | (byte(3) & 63);
  }
}

}  // namespace kvlab
