// Promises of every metric.
#include "support/contract.hpp"
#include "support/library_under_test.hpp"
#include "support/metric_fixture.hpp"

using namespace kvlab;

namespace {

using List = std::vector<std::string>;

const Record record{{"all_classes", {"A", "B"}}};

// References that the metric can score; none where it refuses all of these.
List accepted(const AnswerMetric& metric) {
  for (const List& references : {List{"A", "B"}, List{"Paragraph 3"}, List{"\u6bb5\u843d3"}, List{"1: A"}}) {
    try {
      metric.check(references, record);
      return references;
    } catch (const Error&) {
    }
  }
  return {};
}

// The metrics under test that can score something without parameters.
List metrics() {
  Registry registry(test::library_under_test());
  List out;
  for (const PluginInfo* p : registry.list(Role::metric)) {
    if (!test::under_test(*p)) continue;
    try {
      if (!accepted(*test::metric(p->name)).empty()) out.push_back(p->name);
    } catch (const Error&) {
    }
  }
  if (test::on_cuda())
    out.clear(), test::skip("about metrics, which know no device: the suite on the CPU asks them");
  else if (out.empty())
    test::skip("about metrics: the library has none that needs no parameters");
  return out;
}

}  // namespace

TEST_CASE("a metric gives every answer the same score from 0 to 1, whenever it is asked", "[cpu]") {
  const List answers{"",
                     " \r\n",
                     "...",
                     "A",
                     "\xff\xfe\x80",
                     "\u201cThe\u201d \u6bb5\u843d3 \U0001f363",
                     "Paragraph 3\n",
                     "\\boxed{",
                     test::repeated("A. b\n", 20000),
                     test::repeated("x", 100000)};
  for (const std::string& name : metrics()) {
    CAPTURE(name);
    const auto one = test::metric(name), other = test::metric(name);
    const List references = accepted(*one);
    std::vector<double> scores;
    for (const std::string& answer : answers) scores.push_back(one->score(answer, references, record));
    for (std::size_t i = answers.size(); i-- > 0;) {
      CAPTURE(answers[i].substr(0, 20));
      INFO("usual cause: the metric keeps something of the answer before. A score follows from its arguments alone.");
      CHECK(other->score(answers[i], references, record) == scores[i]);
      CHECK((scores[i] >= 0 && scores[i] <= 1));
    }
  }
}
