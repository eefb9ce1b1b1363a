// Demands on the entries of a long answer (LongGenBench, Wu et al. 2024), by rule. The published scorer asks a language
// model whether an entry meets its demand; here it must contain the demand's text. References are "N: text".
#include <kvlab/answers.hpp>
#include <kvlab/plugin.hpp>

#include <cctype>
#include <map>

namespace {

using Entries = std::map<std::string, std::string>;  // by number

// Entries begin with #*# and their number. The prompt ends with the first one's heading, so the answer begins in it.
Entries marked(const std::string& answer) {
  constexpr std::string_view mark = "#*#";
  Entries entries;
  for (std::size_t at = 0;;) {
    const std::size_t end = answer.find(mark, at);
    const std::string entry = answer.substr(at, end - at);
    entries[at == 0 ? "1" : kvlab::answers::first_integer(entry)] = entry;
    if (end == std::string::npos) break;
    at = end + mark.size();
  }
  return entries;
}

// An entry is the first line that begins with its number.
Entries lines(const std::string& answer) {
  Entries entries;
  for (const std::string& line : kvlab::answers::split(answer, "\n"))
    if (const std::string item = kvlab::answers::trimmed(line, " \t\r");
        !item.empty() && std::isdigit(static_cast<unsigned char>(item[0])))
      entries.emplace(kvlab::answers::first_integer(item), item);
  return entries;
}

template <Entries (*entries_of)(const std::string& answer)>
class Demands final : public kvlab::AnswerMetric {
 public:
  void check(const std::vector<std::string>& references, const kvlab::Record& /*record*/) const override {
    for (const std::string& reference : references) {
      const std::size_t colon = reference.find(':');
      if (colon == 0 || colon == reference.npos || colon != reference.find_first_not_of("0123456789") ||
          text_of(reference).empty())
        throw kvlab::Error(kvlab::Errc::data, "got the reference '" + reference + "', wanted 'N: text' of entry N");
    }
  }
  double score(const std::string& answer, const std::vector<std::string>& references,
               const kvlab::Record& /*record*/) const override {
    const Entries entries = entries_of(answer);
    double met = 0;
    for (const std::string& reference : references) {
      const auto entry = entries.find(kvlab::answers::first_integer(reference));
      met += entry != entries.end() && kvlab::answers::contains(entry->second, text_of(reference));
    }
    return met / static_cast<double>(references.size());
  }

 private:
  static std::string text_of(const std::string& reference) {
    return kvlab::answers::trimmed(reference.substr(reference.find(':') + 1), " ");
  }
};

}  // namespace

KVLAB_PLUGIN(kvlab::metric<Demands<marked>>("demands",
                                            "the share of demands 'N: text' whose entry, behind #*#, has the text"),
             kvlab::metric<Demands<lines>>("listed_demands",
                                           "the share of demands 'N: text' whose line, with number N, has the text"))
