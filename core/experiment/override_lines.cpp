#include "experiment/override_lines.hpp"

#include <string_view>

namespace kvlab {
namespace {

constexpr std::string_view mark = "# --set ", separator = "# overrides:";

// Where the last line begins. The text's final newline ends that line.
std::size_t last_line(const std::string& text) {
  if (text.size() < 2) return 0;
  const std::size_t before = text.rfind('\n', text.size() - 2);
  return before == std::string::npos ? 0 : before + 1;
}

}  // namespace

std::string add_overrides(const std::string& text, const std::vector<std::string>& sets) {
  std::string out = text;
  const std::string_view last = std::string_view(text).substr(last_line(text));
  const bool alike = last.starts_with(mark) || last.starts_with(separator);
  if ((alike || !sets.empty()) && !out.empty() && out.back() != '\n') out += '\n';
  if (alike) out.append(separator) += '\n';
  for (const std::string& set : sets) out.append(mark).append(set) += '\n';
  return out;
}

std::vector<std::string> take_overrides(std::string& text) {
  std::vector<std::string> sets;
  while (text.ends_with('\n')) {
    const std::size_t begin = last_line(text);
    const std::string line = text.substr(begin, text.size() - 1 - begin);
    const bool is_override = line.starts_with(mark) && line.find('=') != std::string::npos;
    if (!is_override && line != separator) break;
    text.erase(begin);
    if (!is_override) break;
    sets.insert(sets.begin(), line.substr(mark.size()));
  }
  return sets;
}

}  // namespace kvlab
