// The reporter of `kvlab conform` (-r promises). Each promise gets a line, a broken one also its first failure.
#define CATCH_CONFIG_EXTERNAL_INTERFACES
#include <catch2/catch.hpp>

#include "base/text.hpp"
#include "support/contract.hpp"

namespace {

using kvlab::test::skipped;

std::string shortened(const std::string& text) {
  constexpr std::size_t longest = 160;
  return kvlab::printable(text.size() <= longest ? text : text.substr(0, longest) + " ...");
}

std::string text_of(const Catch::AssertionStats& stats) {
  const Catch::AssertionResult& result = stats.assertionResult;
  std::string causes, values;
  for (const Catch::MessageInfo& info : stats.infoMessages) {
    if (info.type != Catch::ResultWas::Info) continue;
    if (info.message.find(" := ") == std::string::npos)
      causes += "       " + kvlab::printable(info.message) + "\n";
    else
      values += (values.empty() ? "" : ", ") + shortened(info.message);
  }
  std::string text = causes;
  if (!values.empty()) text += "       where: " + values + "\n";
  if (result.hasExpression() && result.getResultType() != Catch::ResultWas::ThrewException) {
    text += "       wanted: " + std::string(result.getExpression()) + "\n";
    if (result.hasExpandedExpression()) text += "       got: " + shortened(result.getExpandedExpression()) + "\n";
  }
  if (result.hasMessage()) text += "       got: " + shortened(std::string(result.getMessage())) + "\n";
  return text;
}

class Promises final : public Catch::StreamingReporterBase<Promises> {
 public:
  using StreamingReporterBase::StreamingReporterBase;
  static std::string getDescription() { return "a line for each promise"; }
  void noMatchingTestCases(const std::string& spec) override {
    stream << "error: got no promise that fits " << spec << ", wanted some; `kvlab conform --list` names them\n";
  }
  void assertionStarting(const Catch::AssertionInfo&) override {}
  bool assertionEnded(const Catch::AssertionStats& stats) override {
    if (!stats.assertionResult.isOk() && failures_++ == 0) first_ = text_of(stats);
    return true;
  }
  void testCaseStarting(const Catch::TestCaseInfo& info) override {
    StreamingReporterBase::testCaseStarting(info);
    failures_ = 0;
    skipped().clear();
  }
  void testCaseEnded(const Catch::TestCaseStats& stats) override {
    const bool passed = failures_ == 0 && stats.totals.testCases.failed == 0, skips = passed && !skipped().empty();
    stream << (skips    ? "skip   "
               : passed ? "pass   "
                        : "FAIL   ")
           << stats.testInfo.name << (skips ? " [" + skipped() + "]" : "") << "\n";
    if (!passed) stream << first_;
    if (failures_ > 1) stream << "       " << failures_ - 1 << " more checks of it failed\n";
    stream << std::flush;
    ++(skips ? skips_ : passed ? passes_ : fails_);
    StreamingReporterBase::testCaseEnded(stats);
  }
  void testRunEnded(const Catch::TestRunStats& stats) override {
    stream << passes_ << " passed, " << fails_ << " failed, " << skips_ << " skipped\n" << std::flush;
    StreamingReporterBase::testRunEnded(stats);
  }

 private:
  int failures_ = 0, passes_ = 0, fails_ = 0, skips_ = 0;
  std::string first_;
};

}  // namespace

CATCH_REGISTER_REPORTER("promises", Promises)
