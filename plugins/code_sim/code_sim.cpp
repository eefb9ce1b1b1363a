// LongBench's code_sim_score (Bai et al. 2024; metrics.py of THUDM/LongBench): fuzzywuzzy's ratio of a line of code.
#include <kvlab/plugin.hpp>
#include <kvlab/unicode.hpp>

#include <algorithm>
#include <cmath>

#include "matching.hpp"

namespace {

using kvlab::unicode::from_utf8;
using kvlab::unicode::Text;

enum class Ratio { difflib, levenshtein };

}  // namespace

template <>
struct kvlab::Choices<Ratio> {
  static constexpr std::pair<Ratio, const char*> all[] = {{Ratio::difflib, "difflib"},
                                                          {Ratio::levenshtein, "levenshtein"}};
};

namespace {

class CodeSim final : public kvlab::PairMetric {
 public:
  explicit CodeSim(const kvlab::Params& p) : ratio_(p.get<Ratio>("ratio")) {}

 protected:
  double pair(const std::string& answer, const std::string& reference, const kvlab::Record& /*record*/) const override {
    const Text a = line_of_code(from_utf8(answer)), r = from_utf8(reference);
    if (a.empty() || r.empty()) return a == r;
    const double ratio = ratio_ == Ratio::difflib ? code_sim::difflib_ratio(a, r) : code_sim::levenshtein_ratio(a, r);
    return std::nearbyint(100 * ratio) / 100;
  }

 private:
  // The first line without `, # and //; empty where there is none.
  static Text line_of_code(Text answer) {
    answer.erase(0, std::min(answer.find_first_not_of(U'\n'), answer.size()));
    for (const Text& line : kvlab::unicode::split(answer, U'\n'))
      if (line.find_first_of(U"`#") == Text::npos && line.find(U"//") == Text::npos) return line;
    return {};
  }

  Ratio ratio_;
};

}  // namespace

KVLAB_PLUGIN(kvlab::metric<CodeSim>("code_sim", "LongBench: how alike the first line of code is, in whole percent")
                 .param("ratio", Ratio::difflib, "of fuzzywuzzy: alone, or with python-Levenshtein installed"))
