// Metrics of questions whose reference is a letter.
#include <kvlab/answers.hpp>
#include <kvlab/plugin.hpp>

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

}  // namespace

KVLAB_PLUGIN(kvlab::metric<kvlab::FunctionMetric<choice>>("choice",
                                                          "the answer's first letter A to D that stands alone"),
             kvlab::metric<LongBenchV2>("longbench_v2_choice",
                                        "LongBench v2: the letter after 'The correct answer is'"))
