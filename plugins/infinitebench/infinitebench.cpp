// Metrics of InfiniteBench's passkey and number_string, kv_retrieval, longdialogue_qa, longbook_choice and
// longbook_qa_chn (Zhang et al. 2024; compute_scores.py of OpenBMB/InfiniteBench at 88b3daa6989d).
#include <kvlab/answers.hpp>
#include <kvlab/plugin.hpp>
#include <kvlab/unicode.hpp>

#include <algorithm>
#include <initializer_list>
#include <iterator>
#include <optional>
#include <utility>

namespace {

using kvlab::unicode::from_utf8;
using kvlab::unicode::stripped;
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

// Nearly Python's str.upper: the character whose lower case it is. A ligature or a title letter stays as it is.
Text upper(const Text& text) {
  Text out;
  for (const char32_t c : text) {
    const auto* range = std::find_if(
        std::begin(kvlab::unicode::lower_ranges), std::end(kvlab::unicode::lower_ranges), [c](const auto& r) {
          const char32_t capital = c - static_cast<char32_t>(r.distance);
          return capital >= r.first && capital <= r.last && (capital - r.first) % r.step == 0;
        });
    if (c == U'\u00df')
      out += U"SS";
    else if (c < 0x80)
      out.push_back(c >= U'a' && c <= U'z' ? c - 32 : c);
    else if (range != std::end(kvlab::unicode::lower_ranges))
      out.push_back(c - static_cast<char32_t>(range->distance));
    else
      out.push_back(c == U'\u03c2' ? U'\u03a3' : c == U'\u0131' ? U'I' : c);
  }
  return out;
}

// The first reference alone counts, in capitals.
class Name final : public kvlab::AnswerMetric {
 public:
  double score(const std::string& answer, const std::vector<std::string>& references,
               const kvlab::Record& /*record*/) const override {
    const Words own = kvlab::unicode::words(upper(with_spaces_for(from_utf8(answer), marks)));
    return has(own, from_utf8(references[0]));
  }
};

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

// What the scorer calls Chinese punctuation, as ranges.
constexpr std::pair<char32_t, char32_t> chinese_marks[] = {
    {0x2013, 0x2014}, {0x2018, 0x2019}, {0x201b, 0x201f}, {0x2026, 0x2027}, {0x3001, 0x3003},
    {0x300b, 0x3011}, {0x3014, 0x301f}, {0x3030, 0x3030}, {0x303e, 0x303f}, {0xfe4f, 0xfe4f},
    {0xff01, 0xff0d}, {0xff0f, 0xff0f}, {0xff1a, 0xff20}, {0xff3b, 0xff40}, {0xff5b, 0xff64}};

// The characters that count, in order of their codes.
Text characters(const std::string& text) {
  Text out;
  for (const char32_t c : kvlab::unicode::lower(from_utf8(text)))
    if (!kvlab::unicode::is_space(c) && !kvlab::unicode::is_punctuation(c) &&
        std::none_of(std::begin(chinese_marks), std::end(chinese_marks),
                     [c](const auto& range) { return c >= range.first && c <= range.second; }))
      out.push_back(c);
  std::sort(out.begin(), out.end());
  return out;
}

double f1_characters(const std::string& answer, const std::string& reference) {
  const Text own = characters(answer), right = characters(reference);
  Text common;
  std::set_intersection(own.begin(), own.end(), right.begin(), right.end(), std::back_inserter(common));
  if (common.empty()) return 0;
  return kvlab::answers::f_score(static_cast<double>(common.size()), own.size(), right.size());
}

}  // namespace

KVLAB_PLUGIN(
    kvlab::metric<kvlab::FunctionMetric<first_integer>>("first_integer", "InfiniteBench: the first run of digits"),
    kvlab::metric<kvlab::FunctionMetric<word>>("word", "InfiniteBench's kv_retrieval: one of the answer's words"),
    kvlab::metric<Name>("infinitebench_name",
                        "InfiniteBench's longdialogue_qa: one of the answer's words, in capitals"),
    kvlab::metric<kvlab::FunctionMetric<f1_characters>>("f1_characters",
                                                        "InfiniteBench's longbook_qa_chn: F1 of the characters"),
    kvlab::metric<Choice>("infinitebench_choice", "InfiniteBench's longbook_choice: the letter or its text"))
