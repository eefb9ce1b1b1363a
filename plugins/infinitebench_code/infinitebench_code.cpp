// Metrics of InfiniteBench's math_calc, math_find, code_run and code_debug (Zhang et al. 2024; compute_scores.py of
// OpenBMB/InfiniteBench at 88b3daa6989d).
#include <kvlab/plugin.hpp>
#include <kvlab/unicode.hpp>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <iterator>

namespace {

using kvlab::unicode::from_utf8;
using kvlab::unicode::is_digit;
using kvlab::unicode::stripped;
using kvlab::unicode::Text;

constexpr const char* digits = "0123456789";

// Runs of digits as numbers, without leading zeros. signs: a minus in front counts.
std::vector<std::string> integers(const std::string& text, bool signs) {
  std::vector<std::string> out;
  for (std::size_t at = 0, end = 0; (at = text.find_first_of(digits, end)) != text.npos;) {
    end = std::min(text.find_first_not_of(digits, at), text.size());
    const std::size_t begin = std::min(text.find_first_not_of('0', at), end - 1);
    out.push_back((signs && at > 0 && text[at - 1] == '-' ? "-" : "") + text.substr(begin, end - begin));
  }
  return out;
}

class OfNumbers : public kvlab::PairMetric {
 public:
  void check(const std::vector<std::string>& references, const kvlab::Record& /*record*/) const override {
    for (const std::string& reference : references)
      if (integers(reference, true).empty())
        throw kvlab::Error(kvlab::Errc::data, "got the reference '" + reference + "', wanted numbers");
  }
};

// The reference is a list of numbers.
class LeadingNumbers final : public OfNumbers {
 protected:
  // The share of its numbers before the first that the answer's numbers miss, place by place.
  double pair(const std::string& answer, const std::string& reference, const kvlab::Record& /*record*/) const override {
    const std::vector<std::string> own = integers(answer, false), right = integers(reference, true);
    const auto first_wrong = std::mismatch(right.begin(), right.end(), own.begin(), own.end()).first;
    return static_cast<double>(first_wrong - right.begin()) / static_cast<double>(right.size());
  }
};

// Digits of any script as those of ASCII; other characters beyond it as one that no number has.
std::string ascii(const Text& text) {
  std::string out;
  for (const char32_t c : text) {
    const auto* zero = std::upper_bound(std::begin(kvlab::unicode::zeros), std::end(kvlab::unicode::zeros), c);
    out += static_cast<char>(c < 0x80 ? c : is_digit(c) ? U'0' + (c - *(zero - 1)) : U'?');
  }
  return out;
}

double number_of(const std::string& text) {
  double out = 0;
  std::from_chars(text.data(), text.data() + text.size(), out);
  return out;
}

// The first number, with its fraction. A fraction where the reference has none ends the scorer; here it is wrong.
class FirstNumber final : public OfNumbers {
 protected:
  double pair(const std::string& answer, const std::string& reference, const kvlab::Record& /*record*/) const override {
    const std::string text = ascii(from_utf8(answer));
    const std::size_t begin = text.find_first_of(digits);
    if (begin == text.npos) return 0;
    std::size_t end = std::min(text.find_first_not_of(digits, begin), text.size());
    const bool fraction =
        end + 1 < text.size() && text[end] == '.' && std::isdigit(static_cast<unsigned char>(text[end + 1]));
    if (fraction) end = std::min(text.find_first_not_of(digits, end + 1), text.size());
    const std::string number = text.substr(begin, end - begin);
    if (reference.find('.') != reference.npos) return number_of(number) == number_of(reference);
    return !fraction && integers(number, false) == integers(reference, true);
  }
};

Text with_spaces_for(Text text, const Text& characters) {
  for (char32_t& c : text)
    if (characters.find(c) != Text::npos) c = U' ';
  return text;
}

// The last word, as Python's int() reads it: a sign, and digits with single underscores between them.
double last_integer(const std::string& answer, const std::string& reference) {
  const kvlab::unicode::Words words = kvlab::unicode::words(with_spaces_for(from_utf8(answer), U"\n.`'\":"));
  if (words.empty()) return 0;
  std::string word = ascii(words.back());
  const bool minus = word[0] == '-';
  if (minus || word[0] == '+') word.erase(0, 1);
  if (word.find("__") != word.npos || word.empty() || word[0] == '_' || word.back() == '_') return 0;
  std::erase(word, '_');
  if (word.find_first_not_of(digits) != word.npos) return 0;
  const std::vector<std::string> own =
      integers((minus && word.find_first_not_of('0') != word.npos ? "-" : "") + word, true);
  return own == integers(reference, true);
}

// References: the option's letter, and its text. The answer begins with the letter, or has one of them behind a phrase.
class Option final : public kvlab::AnswerMetric {
 public:
  double score(const std::string& answer, const std::vector<std::string>& references,
               const kvlab::Record& /*record*/) const override {
    Text text = stripped(from_utf8(answer));
    const Text start = text.substr(0, 2), letter = from_utf8(references[0]);
    if (start == letter + U'.' || start == letter + U':') return 1;
    for (const Text word : {U"\n", U"`", U"'", U"\"", U"-", U"*", U"Option", U"option"})
      for (std::size_t at = 0; (at = text.find(word, at)) != text.npos; ++at) text.replace(at, word.size(), U" ");
    text.erase(std::unique(text.begin(), text.end(), [](char32_t a, char32_t b) { return a == U' ' && b == U' '; }),
               text.end());
    for (const Text phrase : {U"answer is:", U"is:", U"answer:"})
      if (const std::size_t at = text.find(phrase); at != text.npos) {
        const Text rest = text.substr(std::min(at + phrase.size() + 1, text.size()));
        return std::any_of(references.begin(), references.end(),
                           [&](const auto& r) { return rest.rfind(from_utf8(r), 0) == 0; });
      }
    return 0;
  }
};

}  // namespace

KVLAB_PLUGIN(
    kvlab::metric<LeadingNumbers>("leading_numbers",
                                  "InfiniteBench's math_calc: the share of numbers before the first wrong one"),
    kvlab::metric<FirstNumber>("first_number", "InfiniteBench's math_find: the first number, with its fraction"),
    kvlab::metric<kvlab::FunctionMetric<last_integer>>("last_integer", "InfiniteBench's code_run: the last word"),
    kvlab::metric<Option>("infinitebench_option",
                          "InfiniteBench's code_debug: the letter or the text behind 'answer is:'"))
