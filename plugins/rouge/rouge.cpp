// ROUGE-1, ROUGE-2 and ROUGE-L (Lin 2004): F1 as the package rouge-score counts it, without stems. Words are runs of
// a-z and 0-9 in lower case.
#include <kvlab/answers.hpp>
#include <kvlab/plugin.hpp>
#include <kvlab/unicode.hpp>

#include <map>
#include <set>
#include <string>
#include <vector>

#include "sentences.hpp"
#include "subsequence.hpp"

namespace {

using rouge::Numbers;
using Known = std::map<std::string, int>;  // word -> number

// The words as numbers; new words get the next ones.
Numbers words(const std::string& text, Known& known) {
  Numbers out;
  std::string word;
  kvlab::unicode::Text all = kvlab::unicode::lower(kvlab::unicode::from_utf8(text));
  all.push_back(U' ');
  for (const char32_t c : all) {
    if (c < 0x80 && c != U'_' && kvlab::unicode::is_word(c)) {
      word.push_back(static_cast<char>(c));
    } else if (!word.empty()) {
      out.push_back(known.emplace(word, static_cast<int>(known.size())).first->second);
      word.clear();
    }
  }
  return out;
}

double f1(std::size_t common, std::size_t answer, std::size_t reference) {
  if (common == 0) return 0;
  const double p = static_cast<double>(common) / static_cast<double>(answer);
  const double r = static_cast<double>(common) / static_cast<double>(reference);
  return 2 * p * r / (p + r);
}

Numbers gram(const Numbers& words, std::size_t at, std::size_t n) {
  const auto begin = words.begin() + static_cast<std::ptrdiff_t>(at);
  return {begin, begin + static_cast<std::ptrdiff_t>(n)};
}

template <std::size_t n>
double rouge_n(const std::string& answer, const std::string& reference) {
  Known known;
  const Numbers a = words(answer, known), r = words(reference, known);
  if (a.size() < n || r.size() < n) return 0;
  std::map<Numbers, std::size_t> left;  // n-grams of the reference that are not matched
  for (std::size_t i = 0; i + n <= r.size(); ++i) ++left[gram(r, i, n)];
  std::size_t common = 0;
  for (std::size_t i = 0; i + n <= a.size(); ++i) {
    const auto it = left.find(gram(a, i, n));
    if (it != left.end() && it->second > 0) --it->second, ++common;
  }
  return f1(common, a.size() - n + 1, r.size() - n + 1);
}

double rouge_l(const std::string& answer, const std::string& reference) {
  Known known;
  const Numbers a = words(answer, known), r = words(reference, known);
  rouge::Subsequence common(a);
  for (const int word : r) common.add(word);
  return f1(common.length(), a.size(), r.size());
}

// The words of each line.
std::vector<Numbers> lines(const std::string& text, Known& known) {
  std::vector<Numbers> out;
  for (const std::string& line : kvlab::answers::split(text, "\n"))
    if (!line.empty()) out.push_back(words(line, known));
  return out;
}

// How often each word stands in the lines.
std::map<int, std::size_t> counts(const std::vector<Numbers>& lines) {
  std::map<int, std::size_t> out;
  for (const Numbers& line : lines)
    for (const int word : line) ++out[word];
  return out;
}

// Of each line of the reference, the words count that a common subsequence with any line of the answer has, but no word
// more often than in either text.
double rouge_lsum(const std::string& answer, const std::string& reference) {
  Known known;
  const auto own = lines(answer, known), right = lines(reference, known);
  auto left = counts(own), left_right = counts(right);
  std::size_t hits = 0, in_own = 0, in_right = 0;
  for (const auto& count : left) in_own += count.second;
  for (const auto& count : left_right) in_right += count.second;
  for (const Numbers& line : right) {
    std::set<std::size_t> places;
    for (const Numbers& other : own)
      rouge::each_common(other, line, [&](std::size_t, std::size_t place) { places.insert(place); });
    for (const std::size_t place : places)
      if (left[line[place]] > 0 && left_right[line[place]] > 0) --left[line[place]], --left_right[line[place]], ++hits;
  }
  return f1(hits, in_own, in_right);
}

// The first line begins at the first character that ends no line.
class LongBenchRouge final : public kvlab::PairMetric {
 public:
  explicit LongBenchRouge(const kvlab::Params& p) : first_line_(p.get<bool>("first_line")) {}

 protected:
  double pair(const std::string& answer, const std::string& reference, const kvlab::Record& /*record*/) const override {
    const std::size_t begin = first_line_ ? std::min(answer.find_first_not_of('\n'), answer.size()) : 0;
    return rouge::summary_level(answer.substr(begin, first_line_ ? answer.find('\n', begin) - begin : answer.npos),
                                reference);
  }

 private:
  bool first_line_;
};

}  // namespace

KVLAB_PLUGIN(kvlab::metric<kvlab::FunctionMetric<rouge_n<1>>>("rouge_1", "ROUGE-1 F1: words in common"),
             kvlab::metric<kvlab::FunctionMetric<rouge_n<2>>>("rouge_2", "ROUGE-2 F1: pairs of words in common"),
             kvlab::metric<kvlab::FunctionMetric<rouge_l>>("rouge_l", "ROUGE-L F1: longest common subsequence"),
             kvlab::metric<kvlab::FunctionMetric<rouge_lsum>>("rouge_lsum", "ROUGE-Lsum F1: the same, line by line"),
             kvlab::metric<LongBenchRouge>("longbench_rouge", "LongBench: ROUGE-L of distinct words over sentences")
                 .param("first_line", false, "score the answer's first line alone, as for samsum"),
             kvlab::metric<LongBenchRouge>("longbench_rouge_first_line", "longbench_rouge of the answer's first line")
                 .param("first_line", true, "as of longbench_rouge"))
