// The reporter of `kvlab conform` (-r promises). Each promise gets a line, a broken one also its first failure.
// Promises that do not apply are counted by the reason.
#define CATCH_CONFIG_EXTERNAL_INTERFACES
#include <catch2/catch.hpp>
#include <set>
#include <utility>

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
  static std::string getDescription() { return "a line for each promise, with -v high also for those skipped"; }
  static std::set<Catch::Verbosity> getSupportedVerbosities() {
    return {Catch::Verbosity::Normal, Catch::Verbosity::High};
  }
  void assertionStarting(const Catch::AssertionInfo&) override {}
  bool assertionEnded(const Catch::AssertionStats& stats) override {
    const Catch::AssertionResult& result = stats.assertionResult;
    if (result.getResultType() == Catch::ResultWas::Warning) warnings_.emplace_back(result.getMessage());
    if (!result.isOk() && failures_++ == 0) first_ = text_of(stats);
    return true;
  }
  void testCaseStarting(const Catch::TestCaseInfo& info) override {
    StreamingReporterBase::testCaseStarting(info);
    failures_ = 0;
    warnings_.clear();
    skipped().clear();
  }
  void testCaseEnded(const Catch::TestCaseStats& stats) override {
    const bool passed = failures_ == 0 && stats.totals.testCases.failed == 0, skips = passed && !skipped().empty();
    if (skips)
      skip();
    else
      ++(passed ? passes_ : fails_);
    if (!skips || verbose())
      stream << (skips ? "skip   " : passed ? "pass   " : "FAIL   ") << stats.testInfo.name << "\n";
    if (!passed) stream << first_;
    if (failures_ > 1) stream << "       " << failures_ - 1 << " more checks of it failed\n";
    if (verbose())
      for (const std::string& warning : warnings_) stream << "       " << kvlab::printable(warning) << "\n";
    else if (!warnings_.empty())
      stream << "       " << warnings_.size() << " not tested (--verbose names them)\n";
    stream << std::flush;
    StreamingReporterBase::testCaseEnded(stats);
  }
  void testRunEnded(const Catch::TestRunStats& stats) override {
    int skips = 0;
    for (const auto& [reason, count] : reasons_) {
      stream << "skip   " << count << (count == 1 ? " promise " : " promises ") << reason << "\n";
      skips += count;
    }
    stream << passes_ << " passed, " << fails_ << " failed, " << skips << " skipped"
           << (skips > 0 && !verbose() ? " (--verbose names them)" : "") << "\n"
           << std::flush;
    StreamingReporterBase::testRunEnded(stats);
  }

 private:
  bool verbose() const { return m_config->verbosity() == Catch::Verbosity::High; }
  void skip() {
    for (auto& [reason, count] : reasons_)
      if (reason == skipped()) {
        ++count;
        return;
      }
    reasons_.emplace_back(skipped(), 1);
  }

  int failures_ = 0, passes_ = 0, fails_ = 0;
  std::string first_;
  std::vector<std::string> warnings_;                 // of the running case
  std::vector<std::pair<std::string, int>> reasons_;  // why cases were skipped, and how many
};

}  // namespace

CATCH_REGISTER_REPORTER("promises", Promises)
