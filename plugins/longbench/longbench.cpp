// Metrics of LongBench's classes, paragraphs and counts (Bai et al. 2024; metrics.py and eval.py of THUDM/LongBench). A
// reference without a paragraph's number ends that scorer; here the question is refused.
#include <kvlab/plugin.hpp>
#include <kvlab/unicode.hpp>

#include <algorithm>

namespace {

using kvlab::unicode::from_utf8;
using kvlab::unicode::Text;
using kvlab::unicode::Words;

// From the first character that ends no line to the end of its line.
std::string first_line(const std::string& answer) {
  const std::size_t begin = std::min(answer.find_first_not_of('\n'), answer.size());
  return answer.substr(begin, answer.find('\n', begin) - begin);
}

// One over the number of classes in the answer, if the right one is among them. A class that is a part of the right one
// does not count. The scorer removes it while it walks the list, and so passes over the class that comes next.
class Classification final : public kvlab::PairMetric {
 public:
  explicit Classification(const kvlab::Params& p)
      : first_line_(p.get<bool>("first_line")), classes_(p.get<std::string>("classes")) {}
  void check(const std::vector<std::string>& /*references*/, const kvlab::Record& record) const override {
    classes(record);
  }

 protected:
  double pair(const std::string& answer, const std::string& reference, const kvlab::Record& record) const override {
    const std::string text = first_line_ ? first_line(answer) : answer;
    std::vector<std::string> named;
    for (const std::string& one : classes(record))
      if (text.find(one) != text.npos) named.push_back(one);
    for (std::size_t i = 0; i < named.size(); ++i)
      if (named[i] != reference && reference.find(named[i]) != reference.npos)
        named.erase(std::find(named.begin(), named.end(), named[i]));
    const bool right = std::find(named.begin(), named.end(), reference) != named.end();
    return right ? 1 / static_cast<double>(named.size()) : 0;
  }

 private:
  const std::vector<std::string>& classes(const kvlab::Record& record) const {
    const auto field = record.find(classes_);
    if (field == record.end() || field->second.empty())
      throw kvlab::Error(kvlab::Errc::data, "got no texts in the field '" + classes_ + "', wanted the classes");
    return field->second;
  }

  bool first_line_;
  std::string classes_;
};

// The share of the answer's numbers that are `right`; 0 without numbers.
double share_of_numbers(const std::string& answer, const Text& right) {
  const Words numbers = kvlab::unicode::numbers(from_utf8(answer));
  if (numbers.empty()) return 0;
  return static_cast<double>(std::count(numbers.begin(), numbers.end(), right)) / static_cast<double>(numbers.size());
}

double count(const std::string& answer, const std::string& reference) {
  return share_of_numbers(answer, from_utf8(reference));
}

constexpr const char32_t english[] = U"Paragraph ", chinese[] = U"\u6bb5\u843d";

template <const char32_t* word>
class Retrieval final : public kvlab::PairMetric {
 public:
  void check(const std::vector<std::string>& references, const kvlab::Record& /*record*/) const override {
    for (const std::string& reference : references) paragraph(reference);
  }

 protected:
  double pair(const std::string& answer, const std::string& reference, const kvlab::Record& /*record*/) const override {
    return share_of_numbers(answer, paragraph(reference));
  }

 private:
  // The number after the first `word` that has one.
  static Text paragraph(const std::string& reference) {
    const Text text = from_utf8(reference), before = word;
    for (std::size_t at = text.find(before); at != Text::npos; at = text.find(before, at + 1)) {
      const std::size_t begin = at + before.size();
      if (begin < text.size() && kvlab::unicode::is_digit(text[begin]))
        return kvlab::unicode::numbers(text.substr(begin)).front();
    }
    throw kvlab::Error(kvlab::Errc::data, "got the reference '" + reference + "', wanted a paragraph and its number");
  }
};

}  // namespace

KVLAB_PLUGIN(kvlab::metric<Classification>("classification", "LongBench: one over the classes in the answer, if right")
                 .param("first_line", false, "score the answer's first line alone, as for trec and lsht")
                 .param("classes", std::string("all_classes"), "the record's field with all classes"),
             kvlab::metric<Classification>("classification_first_line", "classification of the answer's first line")
                 .param("first_line", true, "as of classification")
                 .param("classes", std::string("all_classes"), "as of classification"),
             kvlab::metric<kvlab::FunctionMetric<count>>("count",
                                                         "LongBench: the share of the answer's numbers that are right"),
             kvlab::metric<Retrieval<english>>("retrieval",
                                               "LongBench: the share of numbers that are of 'Paragraph N'"),
             kvlab::metric<Retrieval<chinese>>("retrieval_zh",
                                               "LongBench: the share of numbers that are of the Chinese paragraph"))
