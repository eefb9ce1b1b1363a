// Text of answers as Unicode characters, for metrics that must agree with scorers in Python: str.lower, str.split, \w
// and \d of its regular expressions.
#pragma once
#include <algorithm>
#include <cstdint>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "kvlab/unicode_tables.hpp"

namespace kvlab::unicode {

using Text = std::u32string;
using Words = std::vector<Text>;

// Bytes that are no UTF-8 become U+FFFD each.
inline Text from_utf8(std::string_view bytes) {
  Text out;
  for (std::size_t at = 0; at < bytes.size();) {
    const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(bytes[i]); };
    const unsigned char first = byte(at);
    const std::size_t length = first < 0x80 ? 1 : first >= 0xc2 && first < 0xe0 ? 2 : first >> 4 == 14 ? 3 : 4;
    char32_t c = length == 1 ? first : first & (0x7fu >> length);
    std::size_t i = 1;
    for (; i < length && at + i < bytes.size() && (byte(at + i) & 0xc0) == 0x80; ++i) c = c << 6 | (byte(at + i) & 63);
    constexpr char32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    const bool surrogate = c >= 0xd800 && c <= 0xdfff;
    const bool sound = i == length && c >= least[length] && c <= 0x10ffff && !surrogate && first < 0xf5;
    out.push_back(sound ? c : U'\ufffd');
    at += sound ? length : 1;
  }
  return out;
}

inline bool is_space(char32_t c) {
  constexpr char32_t spaces[] = {0x85, 0xa0, 0x1680, 0x2028, 0x2029, 0x202f, 0x205f, 0x3000};
  return (c >= 0x9 && c <= 0xd) || (c >= 0x1c && c <= 0x20) || (c >= 0x2000 && c <= 0x200a) ||
         std::find(std::begin(spaces), std::end(spaces), c) != std::end(spaces);
}

// A letter, a number or _.
inline bool is_word(char32_t c) {
  if (c < 0x80) return (c >= U'a' && c <= U'z') || (c >= U'A' && c <= U'Z') || (c >= U'0' && c <= U'9') || c == U'_';
  return (std::upper_bound(std::begin(word_edges), std::end(word_edges), c) - std::begin(word_edges)) % 2 != 0;
}

// A decimal digit of any script.
inline bool is_digit(char32_t c) {
  if (c < 0x80) return c >= U'0' && c <= U'9';
  const auto* after = std::upper_bound(std::begin(zeros), std::end(zeros), c);
  return after != std::begin(zeros) && c - *(after - 1) < 10;
}

// ASCII punctuation.
inline bool is_punctuation(char32_t c) {
  return (c >= U'!' && c <= U'/') || (c >= U':' && c <= U'@') || (c >= U'[' && c <= U'`') || (c >= U'{' && c <= U'~');
}

inline char32_t lower(char32_t c) {
  if (c < 0x80) return c >= U'A' && c <= U'Z' ? c + 32 : c;
  const auto* range = std::upper_bound(std::begin(lower_ranges), std::end(lower_ranges), c,
                                       [](char32_t x, const LowerRange& r) { return x < r.first; });
  if (range == std::begin(lower_ranges)) return c;
  --range;
  if (c > range->last || (c - range->first) % range->step != 0) return c;
  return static_cast<char32_t>(static_cast<std::int32_t>(c) + range->distance);
}

// A capital sigma at a word's end becomes the final one.
inline Text lower(const Text& text) {
  Text out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const bool ends = i > 0 && is_word(text[i - 1]) && (i + 1 == text.size() || !is_word(text[i + 1]));
    if (text[i] == U'\u0130')
      out += U"i\u0307";
    else
      out.push_back(text[i] == U'\u03a3' && ends ? U'\u03c2' : lower(text[i]));
  }
  return out;
}

// Without the white space at both ends.
inline Text stripped(const Text& text) {
  const auto inner = [](char32_t c) { return !is_space(c); };
  const auto begin = std::find_if(text.begin(), text.end(), inner);
  return {begin, std::find_if(text.rbegin(), std::make_reverse_iterator(begin), inner).base()};
}

// The pieces between runs of white space; none is empty.
inline Words words(const Text& text) {
  Words out;
  bool inside = false;
  for (const char32_t c : text) {
    if (!is_space(c)) {
      if (!inside) out.emplace_back();
      out.back().push_back(c);
    }
    inside = !is_space(c);
  }
  return out;
}

// Splits at every `at`. Empty pieces stay.
inline Words split(const Text& text, char32_t at) {
  Words out(1);
  for (const char32_t c : text)
    if (c == at)
      out.emplace_back();
    else
      out.back().push_back(c);
  return out;
}

// The runs of decimal digits.
inline Words numbers(const Text& text) {
  Words out;
  bool inside = false;
  for (const char32_t c : text) {
    if (is_digit(c)) {
      if (!inside) out.emplace_back();
      out.back().push_back(c);
    }
    inside = is_digit(c);
  }
  return out;
}

// Whether `text` has `part` in it.
inline bool has(const Text& text, const Text& part) { return text.find(part) != Text::npos; }

}  // namespace kvlab::unicode
