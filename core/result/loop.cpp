#include "result/loop.hpp"

#include <algorithm>
#include <cstddef>
#include <vector>

#include "base/utf8.hpp"

namespace kvlab {
namespace {

constexpr std::size_t times = 3, shortest = 2;  // repetitions, words of a phrase

bool is_space(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

// From the radicals on, scripts are written without spaces.
bool is_word_alone(std::uint32_t code) { return code >= 0x2e80; }

std::vector<std::string_view> words_of(std::string_view text) {
  std::vector<std::string_view> words;
  bool open = false;  // the last word goes on
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t known = utf8_length(text, at), length = std::max<std::size_t>(1, known);
    const bool alone = known && is_word_alone(utf8_code_point(text, at, known));
    if (is_space(text[at])) {
      open = false;
    } else if (open && !alone) {
      words.back() = {words.back().data(), words.back().size() + length};
    } else {
      words.push_back(text.substr(at, length));
      open = !alone;
    }
    at += length;
  }
  return words;
}

// How many of the last words equal the word `period` words before them?
std::size_t periodic(const std::vector<std::string_view>& words, std::size_t period) {
  std::size_t run = 0;
  while (run + period < words.size() && words[words.size() - 1 - run] == words[words.size() - 1 - run - period]) ++run;
  return run;
}

}  // namespace

bool ends_in_loop(std::string_view text, bool cut) {
  std::vector<std::string_view> words = words_of(text);
  if (cut && !words.empty()) words.pop_back();
  for (std::size_t period = shortest; times * period <= words.size(); ++period)
    if (periodic(words, period) >= (times - 1) * period) return true;
  return false;
}

}  // namespace kvlab
