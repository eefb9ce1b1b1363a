// GPT-2's alphabet: vocabularies spell each byte as one printable character (space as U+0120, and so on).
#pragma once
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/utf8.hpp"

namespace kvlab {

// Printable bytes stand for themselves, the 68 others for U+0100, U+0101 ... in order.
inline const std::array<std::uint32_t, 256>& byte_alphabet() {
  static const auto table = [] {
    std::array<std::uint32_t, 256> out{};
    std::uint32_t next = 0x100;
    for (std::uint32_t b = 0; b < 256; ++b) {
      const bool printable = (b >= 0x21 && b <= 0x7e) || (b >= 0xa1 && b <= 0xac) || b >= 0xae;
      out[b] = printable ? b : next++;
    }
    return out;
  }();
  return table;
}

// The bytes that a spelled token stands for; empty if some character is not of the alphabet.
inline std::optional<std::string> spelled_bytes(std::string_view spelled) {
  static const auto back = [] {
    std::array<int, 0x144> out;
    out.fill(-1);
    for (std::size_t b = 0; b < 256; ++b) out[byte_alphabet()[b]] = static_cast<int>(b);
    return out;
  }();
  std::string bytes;
  for (std::size_t at = 0; at < spelled.size();) {
    const std::size_t length = utf8_length(spelled, at);
    if (length == 0) return {};
    const std::uint32_t c = utf8_code_point(spelled, at, length);
    if (c >= back.size() || back[c] < 0) return {};
    bytes.push_back(static_cast<char>(back[c]));
    at += length;
  }
  return bytes;
}

// SentencePiece's spelling of a byte without a character: "<0x0A>" -> 10; -1 for anything else.
inline int byte_token_value(std::string_view token) {
  const auto digit = [](char c) { return c >= '0' && c <= '9' ? c - '0' : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1; };
  if (token.size() != 6 || !token.starts_with("<0x") || token[5] != '>') return -1;
  const int high = digit(token[3]), low = digit(token[4]);
  return high < 0 || low < 0 ? -1 : high * 16 + low;
}

// SentencePiece writes a space as U+2581, so a U+2581 in a text means a space, too.
inline std::string spaces_for_marks(std::string_view text) {
  std::string out;
  for (std::size_t at = 0; at < text.size();) {
    const bool mark = text.compare(at, 3, "\u2581") == 0;
    out.push_back(mark ? ' ' : text[at]);
    at += mark ? 3 : 1;
  }
  return out;
}

}  // namespace kvlab
