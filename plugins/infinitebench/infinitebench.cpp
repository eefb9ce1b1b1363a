// Metrics of InfiniteBench's passkey and number_string, kv_retrieval and longbook_choice (Zhang et al. 2024;
// compute_scores.py of OpenBMB/InfiniteBench at 88b3daa6989d).
#include <kvlab/answers.hpp>
#include <kvlab/plugin.hpp>
#include <kvlab/unicode.hpp>

#include <initializer_list>
#include <optional>

namespace {

using kvlab::unicode::from_utf8;
using kvlab::unicode::Text;
using kvlab::unicode::Words;

double first_integer(const std::string& answer, const std::string& reference) {
  return kvlab::answers::first_integer(answer) == reference;
}

Text with_spaces_for(Text text, const Text& characters) {
  for (char32_t& c : text)
    if (characters.find(c) != Text::npos) c = U' ';
  return text;
}

bool has(const Words& words, const Text& word) { return std::find(words.begin(), words.end(), word) != words.end(); }

constexpr const char32_t marks[] = U"\n:\"'.,?!{}";

double word(const std::string& answer, const std::string& reference) {
  return has(kvlab::unicode::words(with_spaces_for(from_utf8(answer), marks)), from_utf8(reference));
}

Text stripped(const Text& text) {
  std::size_t begin = 0, end = text.size();
  while (begin < end && kvlab::unicode::is_space(text[begin])) ++begin;
  while (end > begin && kvlab::unicode::is_space(text[end - 1])) --end;
  return text.substr(begin, end - begin);
}

// One blank for each run of blanks.
Text single_spaced(const Text& text) {
  Text out;
  for (const char32_t c : text)
    if (c != U' ' || out.empty() || out.back() != U' ') out.push_back(c);
  return out;
}

// What follows the first of the phrases that the text has, and one character more. Nothing where it has none.
std::optional<Text> after_phrase(const Text& text, std::initializer_list<Text> phrases) {
  for (const Text& phrase : phrases)
    if (const std::size_t at = text.find(phrase); at != Text::npos)
      return text.size() <= at + phrase.size() ? Text() : text.substr(at + phrase.size() + 1);
  return std::nullopt;
}

// References: the letter, and texts that stand for it.
class Choice final : public kvlab::AnswerMetric {
 public:
  double score(const std::string& answer, const std::vector<std::string>& references,
               const kvlab::Record& /*record*/) const override {
    Words right;
    for (const std::string& reference : references) right.push_back(from_utf8(reference));
    Text text = stripped(from_utf8(answer));
    if (text.empty()) return 0;
    if (text[0] >= U'A' && text[0] <= U'D') return has(right, text.substr(0, 1));
    if (has(right, text)) return 1;
    text = single_spaced(with_spaces_for(text, U"\n\"'.,?!{}"));
    if (const auto after = after_phrase(text, {U"answer is:", U"answer:", U"answer is", U"option is"}))
      return std::any_of(right.begin(), right.end(), [&](const Text& r) { return after->rfind(r, 0) == 0; });
    for (const Text& one : kvlab::unicode::words(text))
      if (Text(U"ABCD").find(one) != Text::npos) return has(right, one);
    return 0;
  }
};

}  // namespace

KVLAB_PLUGIN(kvlab::metric<kvlab::FunctionMetric<first_integer>>("first_integer",
                                                                 "InfiniteBench: the first run of digits"),
             kvlab::metric<kvlab::FunctionMetric<word>>("word",
                                                        "InfiniteBench's kv_retrieval: one of the answer's words"),
             kvlab::metric<Choice>("infinitebench_choice", "InfiniteBench's longbook_choice: the letter or its text"))
