#include "result/h5_text.hpp"

#include <cstddef>
#include <cstdint>

namespace kvlab::h5 {
namespace {

// Bytes of the code point that begins at `at`; 0 = not valid UTF-8 (overlong forms, surrogates and > U+10FFFF
// included).
std::size_t sequence_length(std::string_view text, std::size_t at) {
  const auto byte = [&](std::size_t i) { return static_cast<std::uint8_t>(text[at + i]); };
  const std::uint8_t lead = byte(0);
  if (lead < 0x80) return lead != 0;
  const std::size_t length = lead >= 0xc2 && lead <= 0xdf   ? 2
                             : (lead & 0xf0) == 0xe0        ? 3
                             : lead >= 0xf0 && lead <= 0xf4 ? 4
                                                            : 0;
  if (length == 0 || at + length > text.size()) return 0;
  for (std::size_t i = 1; i < length; ++i)
    if ((byte(i) & 0xc0) != 0x80) return 0;
  const bool bad = (lead == 0xe0 && byte(1) < 0xa0) || (lead == 0xed && byte(1) > 0x9f) ||
                   (lead == 0xf0 && byte(1) < 0x90) || (lead == 0xf4 && byte(1) > 0x8f);
  return bad ? 0 : length;
}

}  // namespace

std::string valid_utf8(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t n = sequence_length(text, at);
    if (n)
      out.append(text.substr(at, n));
    else
      out += "\xef\xbf\xbd";
    at += n ? n : 1;
  }
  return out;
}

}  // namespace kvlab::h5
