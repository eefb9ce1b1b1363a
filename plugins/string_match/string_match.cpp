// Metrics that look for references in an answer.
#include <kvlab/answers.hpp>
#include <kvlab/plugin.hpp>
#include <kvlab/unicode.hpp>

namespace {

using namespace kvlab::answers;
using kvlab::unicode::stripped;
using kvlab::unicode::Text;

double has(const std::string& answer, const std::string& reference) { return contains(answer, reference); }

std::string first_line(const std::string& text) {
  const std::size_t begin = text.find_first_not_of(" \t\r\n");
  return begin == std::string::npos ? "" : text.substr(begin, text.find('\n', begin) - begin);
}

double exact(const std::string& answer, const std::string& reference) {
  return fold(first_line(answer)) == fold(reference);
}

double prefix(const std::string& answer, const std::string& reference) {
  return fold(answer).rfind(fold(reference), 0) == 0;
}

// RULER cleans an answer (scripts/eval/evaluate.py) before it looks for references (synthetic/constants.py).
double string_match(const std::string& answer, const std::string& reference) {
  Text text = stripped(kvlab::unicode::from_utf8(answer));
  for (char32_t& c : text)
    if (c < 0x20) c = U'\n';
  const Text wanted = kvlab::unicode::lower(kvlab::unicode::from_utf8(reference));
  return kvlab::unicode::has(kvlab::unicode::lower(stripped(text)), wanted);
}

// The share of the references that `function` finds.
template <double (*function)(const std::string& answer, const std::string& reference)>
class Share final : public kvlab::AnswerMetric {
 public:
  double score(const std::string& answer, const std::vector<std::string>& references,
               const kvlab::Record& /*record*/) const override {
    double found = 0;
    for (const std::string& reference : references) found += function(answer, reference);
    return found / static_cast<double>(references.size());
  }
};

}  // namespace

KVLAB_PLUGIN(kvlab::metric<kvlab::FunctionMetric<has>>("contains",
                                                       "the answer has a reference, case and white space folded"),
             kvlab::metric<Share<has>>("contains_all", "the share of the references that `contains` finds"),
             kvlab::metric<kvlab::FunctionMetric<exact>>("exact", "the answer's first line is a reference, folded"),
             kvlab::metric<kvlab::FunctionMetric<prefix>>("prefix", "the answer begins with a reference, folded"),
             kvlab::metric<kvlab::FunctionMetric<string_match>>("string_match_part",
                                                                "RULER: the answer has a reference"),
             kvlab::metric<Share<string_match>>("string_match_all", "RULER: the share of the references in the answer"))
