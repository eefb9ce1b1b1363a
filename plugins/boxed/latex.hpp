// Equality of short LaTeX answers, as math_equivalence.py of MATH defines it (Hendrycks et al. 2021).
#pragma once
#include <kvlab/unicode.hpp>

#include <optional>
#include <string_view>

namespace latex {

using kvlab::unicode::Text;

// What the last \boxed{...} (else the last \fbox{...}) holds. Nothing where its braces do not close, or where other
// text than a brace follows \boxed; nothing for \fbox, which the scorer finds and then does not open.
inline std::optional<Text> last_box(const Text& text) {
  const Text open = U"\\boxed{";
  const std::size_t at = text.rfind(U"\\boxed");
  if (at == Text::npos || text.compare(at, open.size(), open) != 0) return std::nullopt;
  int depth = 1;
  for (std::size_t i = at + open.size(); i < text.size(); ++i) {
    depth += text[i] == U'{';
    depth -= text[i] == U'}';
    if (depth == 0) return text.substr(at + open.size(), i - at - open.size());
  }
  return std::nullopt;
}

inline void replace(Text& text, std::u32string_view from, std::u32string_view to) {
  for (std::size_t at = text.find(from); at != Text::npos; at = text.find(from, at + to.size()))
    text.replace(at, from.size(), to);
}

// The pieces between the occurrences of `at`.
inline kvlab::unicode::Words split(const Text& text, std::u32string_view at) {
  kvlab::unicode::Words out;
  std::size_t begin = 0;
  for (std::size_t i = text.find(at); i != Text::npos; i = text.find(at, begin)) {
    out.push_back(text.substr(begin, i - begin));
    begin = i + at.size();
  }
  out.push_back(text.substr(begin));
  return out;
}

// \sqrt3 becomes \sqrt{3}. Nothing where the text ends with \sqrt.
inline std::optional<Text> with_roots(const Text& text) {
  const auto pieces = split(text, U"\\sqrt");
  Text out = pieces.front();
  for (std::size_t i = 1; i < pieces.size(); ++i) {
    const Text& piece = pieces[i];
    if (piece.empty()) return std::nullopt;
    out += U"\\sqrt";
    out += piece[0] == U'{' ? piece : U"{" + piece.substr(0, 1) + U"}" + piece.substr(1);
  }
  return out;
}

// \frac12 becomes \frac{1}{2}, \frac1{72} becomes \frac{1}{72}. Nothing where \frac has nothing after it; the text as
// it was where it has one character.
inline std::optional<Text> with_fractions(const Text& text) {
  const auto pieces = split(text, U"\\frac");
  Text out = pieces.front();
  for (std::size_t i = 1; i < pieces.size(); ++i) {
    const Text& piece = pieces[i];
    if (piece.empty()) return std::nullopt;
    out += U"\\frac";
    if (piece[0] == U'{') {
      out += piece;
      continue;
    }
    if (piece.size() < 2) return text;
    out += U"{" + piece.substr(0, 1) + U"}";
    out += piece[1] == U'{' ? piece.substr(1) : U"{" + piece.substr(1, 1) + U"}" + piece.substr(2);
  }
  return out;
}

// As Python prints an integer.
inline bool is_integer(const Text& text) {
  const std::size_t first = !text.empty() && text[0] == U'-';
  if (text.size() == first || text.find_first_not_of(U"0123456789", first) != Text::npos) return false;
  return text[first] != U'0' || text.size() == 1;
}

// 3/4 becomes \frac{3}{4}.
inline Text with_slash(const Text& text) {
  const auto sides = kvlab::unicode::split(text, U'/');
  if (sides.size() != 2 || !is_integer(sides[0]) || !is_integer(sides[1])) return text;
  return U"\\frac{" + sides[0] + U"}{" + sides[1] + U"}";
}

// Nothing where the scorer ends with an error.
inline std::optional<Text> normalized(Text text) {
  for (const auto& [from, to] : {std::pair{U"\n", U""},
                                 {U"\\!", U""},
                                 {U"\\\\", U"\\"},
                                 {U"tfrac", U"frac"},
                                 {U"dfrac", U"frac"},
                                 {U"\\left", U""},
                                 {U"\\right", U""},
                                 {U"^{\\circ}", U""},
                                 {U"^\\circ", U""},
                                 {U"\\$", U""}})
    replace(text, from, to);
  const auto units = split(text, U"\\text{ ");
  if (units.size() > 2) return std::nullopt;
  text = units.front();
  for (const auto& [from, to] : {std::pair{U"\\%", U""}, {U" .", U" 0."}, {U"{.", U"{0."}}) replace(text, from, to);
  if (text.empty()) return text;
  if (text[0] == U'.') text.insert(0, U"0");
  if (const auto sides = kvlab::unicode::split(text, U'='); sides.size() == 2 && sides[0].size() <= 2) text = sides[1];
  auto rooted = with_roots(text);
  if (!rooted) return std::nullopt;
  replace(*rooted, U" ", U"");
  const auto fractions = with_fractions(*rooted);
  if (!fractions) return std::nullopt;
  return with_slash(*fractions == U"0.5" ? Text(U"\\frac{1}{2}") : *fractions);
}

// Where one of the two cannot be normalized, they are compared as they are.
inline bool equal(const Text& a, const Text& b) {
  const auto left = normalized(a), right = normalized(b);
  return left && right ? *left == *right : a == b;
}

}  // namespace latex
