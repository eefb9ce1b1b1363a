// Exact match and token F1 of SQuAD (Rajpurkar et al. 2016), as its evaluation scripts count them, and LongBench's F1
// (Bai et al. 2024), which normalizes words in the same way.
#include <kvlab/answers.hpp>
#include <kvlab/plugin.hpp>
#include <kvlab/unicode.hpp>

namespace {

using kvlab::unicode::Text;
using kvlab::unicode::Words;

// The words in lower case, without ASCII punctuation and then without articles. An article ends where letters and
// numbers do: at a curly quote, for example.
Words words(const std::string& text) {
  Text bare = kvlab::unicode::lower(kvlab::unicode::from_utf8(text)), kept, run;
  std::erase_if(bare, kvlab::unicode::is_punctuation);
  bare.push_back(U' ');
  for (const char32_t c : bare) {
    if (kvlab::unicode::is_word(c)) {
      run.push_back(c);
      continue;
    }
    const bool article = run == U"a" || run == U"an" || run == U"the";
    kept += article ? U" " : run;
    kept.push_back(c);
    run.clear();
  }
  return kvlab::unicode::words(kept);
}

// How many words of `a` can be matched, each with another one of `b`.
std::size_t common(Words a, Words b) {
  std::sort(a.begin(), a.end());
  std::sort(b.begin(), b.end());
  Words both;
  std::set_intersection(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(both));
  return both.size();
}

// Two texts without words are equal.
double f1(const std::string& answer, const std::string& reference) {
  const Words a = words(answer), r = words(reference);
  return kvlab::answers::f_score(static_cast<double>(common(a, r)), a.size(), r.size());
}

double exact_match(const std::string& answer, const std::string& reference) {
  return words(answer) == words(reference);
}

class LongBenchF1 final : public kvlab::PairMetric {
 public:
  explicit LongBenchF1(const kvlab::Params& p) : first_line_(p.get<bool>("first_line")) {}

 protected:
  double pair(const std::string& answer, const std::string& reference, const kvlab::Record& /*record*/) const override {
    const std::size_t begin = first_line_ ? std::min(answer.find_first_not_of('\n'), answer.size()) : 0;
    const Words a = words(answer.substr(begin, first_line_ ? answer.find('\n', begin) - begin : answer.npos));
    const Words r = words(reference);
    const std::size_t both = common(a, r);
    return both == 0 ? 0 : kvlab::answers::f_score(static_cast<double>(both), a.size(), r.size());
  }

 private:
  bool first_line_;
};

}  // namespace

KVLAB_PLUGIN(kvlab::metric<kvlab::FunctionMetric<f1>>("f1", "SQuAD 2.0: F1 of words without articles and punctuation"),
             kvlab::metric<kvlab::FunctionMetric<exact_match>>("exact_match",
                                                               "SQuAD: the words of a reference, in order"),
             kvlab::metric<LongBenchF1>("longbench_f1",
                                        "LongBench's qa_f1_score: as f1, but 0 where a text has no words")
                 .param("first_line", false, "score the answer's first line alone, as for triviaqa"),
             kvlab::metric<LongBenchF1>("longbench_f1_first_line", "longbench_f1 of the answer's first line")
                 .param("first_line", true, "as of longbench_f1"))
