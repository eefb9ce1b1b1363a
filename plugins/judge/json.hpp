// The JSON object that a judge reads: {"answer": text, "references": [text, ...], "record": {field: [text, ...], ...}}.
#pragma once
#include <kvlab/metric.hpp>
#include <kvlab/unicode.hpp>

#include <string>
#include <vector>

namespace judge {

// In quotes, in ASCII. Bytes that are no UTF-8 become U+FFFD.
inline std::string quoted(const std::string& text) {
  std::string out = "\"";
  const auto escape = [&](char32_t unit) {
    out += "\\u";
    for (int shift = 12; shift >= 0; shift -= 4) out += "0123456789abcdef"[unit >> shift & 15];
  };
  for (const char32_t c : kvlab::unicode::from_utf8(text)) {
    if (c >= 0x10000) {
      escape(0xd7c0 + (c >> 10));
      escape(0xdc00 + (c & 0x3ff));
    } else if (c < 0x20 || c > 0x7e || c == U'"' || c == U'\\') {
      escape(c);
    } else {
      out += static_cast<char>(c);
    }
  }
  return out + "\"";
}

inline std::string quoted(const std::vector<std::string>& texts) {
  std::string out;
  for (const std::string& text : texts) out += (out.empty() ? "" : ", ") + quoted(text);
  return "[" + out + "]";
}

inline std::string question(const std::string& answer, const std::vector<std::string>& references,
                            const kvlab::Record& record) {
  std::string fields;
  for (const auto& [name, texts] : record) fields += (fields.empty() ? "" : ", ") + quoted(name) + ": " + quoted(texts);
  return "{\"answer\": " + quoted(answer) + ", \"references\": " + quoted(references) + ", \"record\": {" + fields +
         "}}\n";
}

}  // namespace judge
