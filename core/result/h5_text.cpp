#include "result/h5_text.hpp"

#include "base/utf8.hpp"

namespace kvlab::h5 {

std::string valid_utf8(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t n = text[at] == '\0' ? 0 : utf8_length(text, at);
    if (n)
      out.append(text.substr(at, n));
    else
      out += "\xef\xbf\xbd";
    at += n ? n : 1;
  }
  return out;
}

}  // namespace kvlab::h5
