// Text functions for metrics: they compare an answer with a reference.
#pragma once
#include <cctype>
#include <cstddef>
#include <string>
#include <vector>

namespace kvlab::answers {

// Returns the text in lower case. Each run of white space becomes one space, and none stays at either end.
inline std::string fold(const std::string& text) {
  std::string out;
  for (unsigned char c : text) {
    if (std::isspace(c)) {
      if (!out.empty() && out.back() != ' ') out.push_back(' ');
    } else {
      out.push_back(static_cast<char>(std::tolower(c)));
    }
  }
  while (!out.empty() && out.back() == ' ') out.pop_back();
  return out;
}

// Splits the text at every character of `at`. Empty pieces stay.
inline std::vector<std::string> split(const std::string& text, const std::string& at) {
  std::vector<std::string> out(1);
  for (const char c : text)
    if (at.find(c) != std::string::npos)
      out.emplace_back();
    else
      out.back() += c;
  return out;
}

// Removes the characters of `what` from both ends.
inline std::string trimmed(const std::string& text, const std::string& what) {
  const std::size_t begin = text.find_first_not_of(what);
  return begin == std::string::npos ? "" : text.substr(begin, text.find_last_not_of(what) - begin + 1);
}

// The first run of digits; empty when there is none.
inline std::string first_integer(const std::string& text) {
  const std::size_t begin = text.find_first_of("0123456789");
  return begin == std::string::npos ? "" : text.substr(begin, text.find_first_not_of("0123456789", begin) - begin);
}

// Whether the folded answer contains the folded reference.
inline bool contains(const std::string& answer, const std::string& reference) {
  return fold(answer).find(fold(reference)) != std::string::npos;
}

// F1 score. common: parts that both have; answer, reference: parts of each.
inline double f_score(double common, std::size_t answer, std::size_t reference) {
  if (answer == 0 || reference == 0) return answer == reference ? 1 : 0;
  if (common == 0) return 0;
  const double p = common / static_cast<double>(answer), r = common / static_cast<double>(reference);
  return 2 * p * r / (p + r);
}

}  // namespace kvlab::answers
