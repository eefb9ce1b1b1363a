// Metrics of questions whose reference is a letter.
#include <kvlab/answers.hpp>
#include <kvlab/plugin.hpp>
#include <kvlab/unicode.hpp>

#include <cctype>

namespace {

bool is_letter(const std::string& text) { return text.size() == 1 && text[0] >= 'A' && text[0] <= 'D'; }

// A capital letter goes before a small one, which may be the article.
double choice(const std::string& answer, const std::string& reference) {
  const auto is_part = [&](std::size_t i) {
    return i < answer.size() && std::isalnum(static_cast<unsigned char>(answer[i]));
  };
  for (const char first : {'A', 'a'})
    for (std::size_t i = 0; i < answer.size(); ++i)
      if (answer[i] >= first && answer[i] <= first + 3 && !is_part(i + 1) && (i == 0 || !is_part(i - 1)))
        return kvlab::answers::fold(reference) == std::string(1, static_cast<char>(std::tolower(answer[i])));
  return 0;
}

// pred.py of LongBench v2 (Bai et al. 2024): the first letter in brackets after the phrase, else the first one without.
// Asterisks do not count.
class LongBenchV2 final : public kvlab::PairMetric {
 public:
  void check(const std::vector<std::string>& references, const kvlab::Record& /*record*/) const override {
    for (const std::string& reference : references)
      if (!is_letter(reference))
        throw kvlab::Error(kvlab::Errc::data, "got the reference '" + reference + "', wanted A, B, C or D");
  }

 protected:
  double pair(const std::string& answer, const std::string& reference, const kvlab::Record& /*record*/) const override {
    std::string text = answer;
    std::erase(text, '*');
    std::string letter = letter_between(text, "The correct answer is (", ")");
    if (letter.empty()) letter = letter_between(text, "The correct answer is ", "");
    return letter == reference;
  }

 private:
  // The first letter A to D between the two texts; empty where there is none.
  static std::string letter_between(const std::string& text, const std::string& before, const std::string& after) {
    for (std::size_t at = text.find(before); at != text.npos; at = text.find(before, at + 1)) {
      const std::size_t place = at + before.size();
      const std::string letter = text.substr(place, 1);
      if (is_letter(letter) && text.compare(place + 1, after.size(), after) == 0) return letter;
    }
    return "";
  }
};

// run_baseline.py of GPQA (Rein et al. 2023): one character in brackets behind the first phrase that has A to D there.
// Of each phrase the first such place counts, whatever its character is.
double gpqa_choice(const std::string& answer, const std::string& reference) {
  using kvlab::unicode::Text;
  const Text text = kvlab::unicode::from_utf8(answer);
  for (const Text phrase : {U"answer is (", U"Answer: (", U"answer: (", U"answer (", U"("})
    for (std::size_t at = text.find(phrase); at != Text::npos; at = text.find(phrase, at + 1)) {
      const std::size_t place = at + phrase.size();
      if (place + 1 >= text.size() || text[place] == U'\n' || text[place + 1] != U')') continue;
      if (text[place] >= U'A' && text[place] <= U'D')
        return Text(1, text[place]) == kvlab::unicode::from_utf8(reference);
      break;
    }
  return 0;
}

// compute_accuracy.py of MMLU-Pro (Wang et al. 2024; TIGER-AI-Lab/MMLU-Pro at 453c1d99646a) has ten letters and three
// rules. Of earlier files, as at 05c6997b92b6, the third takes a letter inside a word, too. For an answer without one
// it draws one, always with the same seed: G.
class MmluPro final : public kvlab::PairMetric {
 public:
  explicit MmluPro(const kvlab::Params& p) : drawn_(p.get<bool>("guess") ? U'G' : U'\0') {}
  void check(const std::vector<std::string>& references, const kvlab::Record& /*record*/) const override {
    for (const std::string& reference : references)
      if (reference.size() != 1 || !is_letter(reference[0]))
        throw kvlab::Error(kvlab::Errc::data, "got the reference '" + reference + "', wanted a letter A to J");
  }

 protected:
  double pair(const std::string& answer, const std::string& reference, const kvlab::Record& /*record*/) const override {
    const Text text = kvlab::unicode::from_utf8(answer);
    char32_t letter = after_is(text);
    if (!letter) letter = after_colon(text);
    if (!letter) letter = last_alone(text);
    if (!letter) letter = drawn_;
    return letter == static_cast<unsigned char>(reference[0]);
  }

 private:
  using Text = kvlab::unicode::Text;
  static bool is_letter(char32_t c) { return c >= U'A' && c <= U'J'; }
  static char32_t letter_at(const Text& text, std::size_t at) {
    return at < text.size() && is_letter(text[at]) ? text[at] : 0;
  }
  // "answer is X" or "answer is (X": the first.
  static char32_t after_is(const Text& text) {
    const Text phrase = U"answer is ";
    for (std::size_t at = text.find(phrase); at != Text::npos; at = text.find(phrase, at + 1)) {
      const std::size_t place = at + phrase.size();
      if (const char32_t c = letter_at(text, place + (place < text.size() && text[place] == U'('))) return c;
    }
    return 0;
  }
  // "answer:", white space, X: the last of the first line that has one.
  static char32_t after_colon(const Text& text) {
    const Text phrase = U"nswer:";
    char32_t found = 0;
    for (std::size_t at = text.find(phrase), line = 0; at != Text::npos; at = text.find(phrase, at + 1)) {
      const std::size_t end = text.find(U'\n', line);
      if (end < at) {
        if (found) break;
        line = text.rfind(U'\n', at) + 1;
      }
      std::size_t place = at + phrase.size();
      while (place < text.size() && kvlab::unicode::is_space(text[place])) ++place;
      const char32_t c = letter_at(text, place);
      if (c && at > 0 && (text[at - 1] == U'a' || text[at - 1] == U'A')) found = c;
    }
    return found;
  }
  static char32_t last_alone(const Text& text) {
    const auto is_part = [&](std::size_t i) { return i < text.size() && kvlab::unicode::is_word(text[i]); };
    for (std::size_t i = text.size(); i-- > 0;)
      if (is_letter(text[i]) && !is_part(i + 1) && !(i > 0 && is_part(i - 1))) return text[i];
    return 0;
  }

  char32_t drawn_;
};

}  // namespace

KVLAB_PLUGIN(
    kvlab::metric<kvlab::FunctionMetric<choice>>("choice", "the answer's first letter A to D that stands alone"),
    kvlab::metric<kvlab::FunctionMetric<gpqa_choice>>("gpqa_choice",
                                                      "GPQA: the letter in brackets, behind 'answer is' or alone"),
    kvlab::metric<LongBenchV2>("longbench_v2_choice", "LongBench v2: the letter after 'The correct answer is'"),
    kvlab::metric<MmluPro>("choice_pro", "MMLU-Pro: the letter A to J of 'the answer is (X)'")
        .param("guess", true, "an answer without a letter counts as G, as in the scorer; false: it is wrong"))
