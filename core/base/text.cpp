#include "base/text.hpp"

#include <algorithm>
#include <cstdio>
#include <numeric>

#include "base/utf8.hpp"

namespace kvlab {
namespace {

bool harmless(std::uint32_t c) {
  if (c < 0x20) return c == '\n' || c == '\t';
  const bool control = c >= 0x7f && c < 0xa0;
  const bool direction = c == 0x200e || c == 0x200f || (c >= 0x202a && c <= 0x202e) || (c >= 0x2066 && c <= 0x2069);
  const bool line_end = c == 0x2028 || c == 0x2029;
  return !control && !direction && !line_end;
}

std::string escaped(std::uint32_t c) {
  char text[8];
  std::snprintf(text, sizeof text, c < 0x100 ? "\\x%02x" : "\\u%04x", static_cast<unsigned>(c));
  return text;
}

}  // namespace

std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> before(b.size() + 1), last(b.size() + 1), row(b.size() + 1);  // rows i - 2, i - 1, i
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    before.swap(last);
    last.swap(row);
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + (a[i - 1] != b[j - 1])});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) row[j] = std::min(row[j], before[j - 2] + 1);
    }
  }
  return row[b.size()];
}

std::optional<std::string> nearest(std::string_view word, const std::vector<std::string>& known) {
  std::optional<std::string> best;
  std::size_t best_distance = 0;
  for (const std::string& k : known) {
    const std::size_t allowed = std::max<std::size_t>(1, std::max(word.size(), k.size()) / 3);
    const std::size_t d = edit_distance(word, k);
    // "policy" for "policies": an ending is wrong, not a letter.
    const bool same_start = word.size() >= 5 && k.starts_with(word.substr(0, word.size() - 1));
    if ((d <= allowed || same_start) && (!best || d < best_distance)) {
      best = k;
      best_distance = d;
    }
  }
  return best;
}

std::string did_you_mean(std::string_view word, const std::vector<std::string>& known) {
  const auto near = nearest(word, known);
  return near ? " (did you mean '" + *near + "'?)" : "";
}

std::string join(const std::vector<std::string>& words, std::string_view between) {
  std::string text;
  for (const std::string& w : words) {
    if (!text.empty()) text += between;
    text += w;
  }
  return text;
}

std::string printable(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t n = utf8_length(text, at);
    if (n == 0) {
      out += "\xef\xbf\xbd";
    } else if (const std::uint32_t c = utf8_code_point(text, at, n); harmless(c)) {
      out.append(text.substr(at, n));
    } else {
      out += escaped(c);
    }
    at += n ? n : 1;
  }
  return out;
}

std::string one_line(std::string_view text) {
  constexpr std::size_t longest = 2000;
  std::string line;
  for (const char c : printable(text.substr(0, longest)))
    c == '\n' ? line += "\\n" : c == '\t' ? line += ' ' : line += c;
  return text.size() > longest ? line + " ..." : line;
}

}  // namespace kvlab
