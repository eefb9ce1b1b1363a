// Prompt templates over records, and a shuffle that is the same everywhere.
#pragma once
#include <kvlab/error.hpp>
#include <kvlab/task.hpp>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace jsonl {

inline const std::vector<std::string>& field(const kvlab::Record& record, const std::string& name,
                                             const std::string& where) {
  if (const auto it = record.find(name); it != record.end()) return it->second;
  std::string known;
  for (const auto& [key, texts] : record) known += (known.empty() ? "" : ", ") + key;
  throw kvlab::Error(kvlab::Errc::data, "got no field '" + name + "', wanted one of: " + known, where);
}

// True if the field has parts. They are fields, too: "answers.text" beside "answers".
inline bool has_parts(const kvlab::Record& record, const std::string& name) {
  const auto part = record.lower_bound(name + ".");
  return part != record.end() && part->first.rfind(name + ".", 0) == 0;
}

inline bool blank(const std::string& text) { return text.find_first_not_of(" \t\r\n") == std::string::npos; }

// A text with {field} in it; {{ and }} stand for braces. Line ends join several texts of a field.
class Template {
 public:
  Template(const std::string& text, const char* parameter) {
    const auto fail = [&](const std::string& got, std::size_t at) {
      throw kvlab::Error(kvlab::Errc::config,
                         "got " + got + " at byte " + std::to_string(at) + ", wanted {field}, or {{ and }} for braces",
                         parameter);
    };
    pieces_.emplace_back();
    for (std::size_t at = 0; at < text.size(); ++at) {
      const char c = text[at];
      if ((c == '{' || c == '}') && at + 1 < text.size() && text[at + 1] == c) {
        pieces_.back().text += c;
        ++at;
      } else if (c == '}') {
        fail("'}' without '{'", at);
      } else if (c == '{') {
        const std::size_t end = text.find_first_of("{}", at + 1);
        if (end == std::string::npos || text[end] == '{') fail("'{' without '}'", at);
        if (end == at + 1) fail("'{}'", at);
        pieces_.push_back({text.substr(at + 1, end - at - 1), {}});
        at = end;
      } else {
        pieces_.back().text += c;
      }
    }
  }

  bool empty() const { return pieces_.size() == 1 && pieces_[0].text.empty(); }

  std::string render(const kvlab::Record& record, const std::string& where) const {
    std::string out;
    for (const Piece& p : pieces_) {
      if (!p.field.empty()) {
        bool first = true;
        for (const std::string& text : field(record, p.field, where)) {
          if (!std::exchange(first, false)) out += '\n';
          out += text;
        }
      }
      out += p.text;
    }
    return out;
  }

 private:
  struct Piece {
    std::string field, text;  // the field's text comes before `text`
  };
  std::vector<Piece> pieces_;
};

// Fisher-Yates with SplitMix64.
template <class T>
void shuffle(std::vector<T>& values, std::uint64_t seed) {
  for (std::size_t i = values.size(); i > 1; --i) {
    std::uint64_t z = seed += 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    std::swap(values[i - 1], values[(z ^ (z >> 31)) % i]);
  }
}

}  // namespace jsonl
