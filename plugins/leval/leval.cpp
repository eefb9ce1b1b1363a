// Metrics of L-Eval's closed tasks (An et al. 2024), by the rules of Evaluation/auto_eval.py and em.py of
// OpenLMLab/LEval at cd34b0502691.
#include <kvlab/plugin.hpp>
#include <kvlab/unicode.hpp>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <iterator>
#include <optional>
#include <utility>

namespace {

using kvlab::unicode::from_utf8;
using kvlab::unicode::has;
using kvlab::unicode::is_digit;
using kvlab::unicode::is_space;
using kvlab::unicode::Text;
using kvlab::unicode::Words;

bool is_option(char32_t c) { return c >= U'A' && c <= U'D'; }

Text replaced(Text text, const Text& old, const Text& by) {
  for (std::size_t at = 0; (at = text.find(old, at)) != text.npos; at += by.size()) text.replace(at, old.size(), by);
  return text;
}

Text joined(const Words& words) {
  Text out;
  for (const Text& word : words) out += (out.empty() ? U"" : U" ") + word;
  return out;
}

// Without punctuation and articles. Capital articles stay.
Text bare(const Text& text) {
  Text kept, word;
  const auto end = [&] {
    kept += word == U"a" || word == U"an" || word == U"the" ? U" " : word;
    word.clear();
  };
  for (const char32_t c : text) {
    if (kvlab::unicode::is_punctuation(c)) continue;
    if (kvlab::unicode::is_word(c)) {
      word.push_back(c);
    } else {
      end();
      kept.push_back(c);
    }
  }
  end();
  return joined(kvlab::unicode::words(kept));
}

// As Python's float() reads a text, but for underscores between digits.
std::optional<double> number(const Text& text) {
  const Words words = kvlab::unicode::words(text);
  if (words.size() != 1) return {};
  std::string digits;
  for (const char32_t c : words[0]) {
    const auto* zero = std::upper_bound(std::begin(kvlab::unicode::zeros), std::end(kvlab::unicode::zeros), c);
    digits += static_cast<char>(c < 0x80 ? c : is_digit(c) ? U'0' + (c - *(zero - 1)) : U'?');
  }
  if (digits.size() > 1 && digits[0] == '+' && digits[1] != '-') digits.erase(0, 1);
  double out = 0;
  const auto read = std::from_chars(digits.data(), digits.data() + digits.size(), out);
  if (read.ec == std::errc::invalid_argument || read.ptr != digits.data() + digits.size() || digits.back() == ')')
    return {};
  return read.ec == std::errc() ? out : HUGE_VAL;
}

// The exact match: of options, where the reference is capitals A to D alone; of numbers; else of a part.
double exact(const Text& answer, const Text& reference) {
  const Text own = bare(answer), right = bare(reference);
  if (std::all_of(right.begin(), right.end(), is_option)) {
    if (own == right) return 1;
    return std::all_of(own.begin(), own.end(), [&](char32_t c) { return has(right, Text(1, c)); }) ? 0.25 : 0;
  }
  const std::optional<double> a = number(answer), r = number(reference);
  if (a && r) return *a == *r;
  const auto tight = [](const Text& text) { return replaced(kvlab::unicode::lower(text), U" ", U""); };
  return has(tight(answer), tight(reference));
}

// The options of the reference's first word. Without one the scorer takes A, here and in answers.
Text right_options(const std::string& reference) {
  const Words words = kvlab::unicode::words(from_utf8(reference));
  Text out = words.empty() ? Text() : words[0];
  std::erase_if(out, [](char32_t c) { return !is_option(c); });
  return out.empty() ? U"A" : out;
}

Text sorted_set(Text text) {
  std::sort(text.begin(), text.end());
  text.erase(std::unique(text.begin(), text.end()), text.end());
  return text;
}

const Text all = U"ABCD";

double choice(const std::string& answer, const std::string& reference) {
  Text text = from_utf8(answer);
  if (kvlab::unicode::words(text).empty()) return 0;
  if (!has(all, text)) {
    const auto first = std::find_if(text.begin(), text.end(), is_option);
    text = first == text.end() ? U"A" : Text(1, *first);
  }
  return exact(text, right_options(reference));
}

// Options that begin the answer, else those before white space, a dot or a bracket, else the first run of them.
Text options(Text text) {
  if (has(all, text)) return text;
  const std::size_t begin = std::min(text.find_first_not_of(all), text.size());
  if (begin > 1) return sorted_set(text.substr(0, begin));
  Text found = text.substr(0, begin);
  text = text.substr(begin);
  text = text.substr(0, text.find(U"Question"));
  for (std::size_t i = 0; i + 1 < text.size(); ++i)
    if (is_option(text[i]) && (is_space(text[i + 1]) || text[i + 1] == U'.' || text[i + 1] == U')')) found += text[i];
  if (!found.empty()) return sorted_set(found);
  const std::size_t run = text.find_first_of(all);
  return run == text.npos ? U"A" : text.substr(run, text.find_first_not_of(all, run) - run);
}

double letters(const std::string& answer, const std::string& reference) {
  const Text text = from_utf8(answer);
  return kvlab::unicode::words(text).empty() ? 0 : exact(options(text), right_options(reference));
}

// The digits before the first dot of the word behind the phrase, else of the last word with a digit before a blank
// line.
Text result(const Text& text) {
  const Text phrase = U"The answer is ";
  Text word;
  for (std::size_t at = text.find(phrase); at != text.npos && word.empty(); at = text.find(phrase, at + 1))
    for (std::size_t i = at + phrase.size(); i < text.size() && !is_space(text[i]); ++i) word.push_back(text[i]);
  if (word.empty())
    for (const Text& piece : kvlab::unicode::split(text.substr(0, text.find(U"\n\n")), U' '))
      if (std::any_of(piece.begin(), piece.end(), is_digit)) word = piece;
  word = word.substr(0, word.find(U'.'));
  std::erase_if(word, [](char32_t c) { return !is_digit(c); });
  return word;
}

double math(const std::string& answer, const std::string& reference) {
  return exact(result(from_utf8(answer)), result(from_utf8(reference)));
}

Text output(const std::string& text) {
  Text out;
  for (const char32_t c : from_utf8(text))
    if (!is_space(c) || out.empty() || out.back() != U' ') out.push_back(is_space(c) ? U' ' : c);
  for (const auto& [old, by] : {std::pair<Text, Text>{U",", U""},
                                {U"'", U""},
                                {U"\\", U""},
                                {U".0", U""},
                                {U"] [", U"]["},
                                {U"[ [", U"[["},
                                {U"] ]", U"]]"}})
    out = replaced(out, old, by);
  return out;
}

// As many words as the reference has and three: those behind the last "the final output", else the last ones.
double code(const std::string& answer, const std::string& reference) {
  Text text = output(answer);
  for (const Text filler :
       {U"will be", U"of the code", U"is", U"would be", U"the value of", U"the result of", U"printed"})
    text = replaced(text, filler, U"");
  const Text phrase = U"the final output";
  const std::size_t at = text.rfind(phrase), most = kvlab::unicode::words(from_utf8(reference)).size() + 3;
  text = at == text.npos ? text : text.substr(at + phrase.size());
  Words words = kvlab::unicode::words(text);
  if (!text.empty() && text[0] == U' ')
    words.insert(words.begin(), Text());  // the scorer's pieces have an empty one there
  if (!text.empty() && text.back() == U' ') words.emplace_back();
  const std::size_t kept = std::min(most, words.size());
  const auto begin = at == text.npos ? words.end() - static_cast<std::ptrdiff_t>(kept) : words.begin();
  return exact(joined(Words(begin, begin + static_cast<std::ptrdiff_t>(kept))), output(reference));
}

// The first word with true or false in it, before what the answer says of the world.
double judgment(const std::string& answer, const std::string& reference) {
  const Text text = kvlab::unicode::lower(from_utf8(answer));
  for (const Text& word : kvlab::unicode::words(text.substr(0, text.find(U"[fact:"))))
    for (const Text truth : {U"true", U"false"})
      if (has(word, truth)) return exact(truth, kvlab::unicode::lower(from_utf8(reference)));
  return 0;
}

double part(const std::string& answer, const std::string& reference) {
  return exact(from_utf8(answer), from_utf8(reference));
}

template <double (*function)(const std::string&, const std::string&)>
constexpr auto metric(const char* name, const char* help) {
  return kvlab::metric<kvlab::FunctionMetric<function>>(name, help);
}

}  // namespace

KVLAB_PLUGIN(metric<choice>("leval_choice", "L-Eval's quality and tpo: the answer's first letter A to D"),
             metric<letters>("leval_letters",
                             "L-Eval's coursera: several letters A to D; 0.25 for some of them and no other"),
             metric<math>("leval_math", "L-Eval's gsm100: the number after 'The answer is', else the last one"),
             metric<code>("leval_code", "L-Eval's codeU: the output, in the answer's last words"),
             metric<judgment>("leval_judgment", "L-Eval's sci_fi: the first true or false"),
             metric<part>("leval_part", "L-Eval's topic_retrieval: a part of the answer, or an equal number"))
