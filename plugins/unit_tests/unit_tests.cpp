// Whether an answer's code passes the tests of its question: HumanEval+ and MBPP+ (Liu et al. 2023). References are
// programs that fail if the code in front of them is wrong. The code runs in confinement, and where that cannot be had,
// it does not run.
#include <kvlab/confined.hpp>
#include <kvlab/plugin.hpp>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <random>
#include <set>

#include "harness.hpp"

namespace {

using kvlab::Errc;

std::string secret() {
  std::random_device random;
  std::string out = "passed ";
  for (int i = 0; i < 32; ++i) out += "0123456789abcdef"[random() % 16];
  return out;
}

// The lines of a program that import something.
std::string imports_of(const std::string& program) {
  std::string out;
  for (std::size_t at = 0; at < program.size();) {
    const std::size_t end = std::min(program.find('\n', at), program.size());
    const std::string line = program.substr(at, end - at);
    if (line.rfind("import ", 0) == 0 || line.rfind("from ", 0) == 0) out += line + "\n";
    at = end + 1;
  }
  return out;
}

class UnitTests final : public kvlab::AnswerMetric {
 public:
  explicit UnitTests(const kvlab::Params& p)
      : allowed_(p.get<bool>("execute_code")),
        python_(p.get<std::string>("python")),
        entry_(p.get<std::string>("entry_point")),
        before_(p.get<std::string>("before")),
        seconds_(p.get<double>("timeout")),
        memory_(std::int64_t{p.get<int>("memory")} << 20) {}

  void check(const std::vector<std::string>& references, const kvlab::Record& record) const override {
    if (!allowed_)
      throw kvlab::Error(Errc::config,
                         "got execute_code: false, wanted true: this metric runs the code that a model wrote, each "
                         "answer in a process without network, rights and your files, which time and memory limit "
                         "(metric: {unit_tests: {execute_code: true}})");
    if (!before_.empty() && field(record, before_).empty())
      throw kvlab::Error(Errc::data,
                         "got no text in the field '" + before_ + "', wanted what stands before the answer");
    const std::lock_guard lock(mutex_);
    for (const std::string& tests : references)
      if (const std::string imports = imports_of(tests); tried_.count(imports) == 0) {
        try_imports(imports);
        tried_.insert(imports);
      }
  }

  double score(const std::string& answer, const std::vector<std::string>& references,
               const kvlab::Record& record) const override {
    check(references, record);
    const std::string before = field(record, before_), end = secret();
    for (const std::string& tests : references) {
      const std::string input = end + '\0' + field(record, entry_) + '\0' + (before.empty() ? "" : before + "\n") +
                                '\0' + tests + '\0' + answer;
      if (run(unit_tests::harness, input, seconds_).said.find(end) != std::string::npos) return 1;
    }
    return 0;
  }

 private:
  static std::string field(const kvlab::Record& record, const std::string& name) {
    const auto it = record.find(name);
    return it == record.end() || it->second.empty() ? "" : it->second.front();
  }

  kvlab::ConfinedEnd run(const std::string& program, const std::string& input, double seconds) const {
    kvlab::ConfinedProgram python{.words = {python_, "-I", "-W", "ignore", "-c", program}, .input = input};
    python.variables = {{"HOME", "/tmp"}, {"LANG", "C.UTF-8"}, {"PATH", "/usr/bin:/bin"}};
    for (const char* threads : {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"})
      python.variables[threads] = "1";
    python.seconds = seconds;
    python.memory = memory_;
    return kvlab::run_confined(python);
  }

  // A test that cannot import its own modules would call every answer wrong.
  void try_imports(const std::string& imports) const {
    const std::string end = secret();
    const kvlab::ConfinedEnd ended = run(imports + "print('" + end + "')", "", std::max(seconds_, 30.));
    if (ended.said.find(end) != std::string::npos) return;
    const std::size_t last = ended.said.find_last_not_of('\n'), line = ended.said.rfind('\n', last);
    const std::string said = last == std::string::npos ? "nothing" : ended.said.substr(line + 1, last - line);
    throw kvlab::Error(Errc::unsupported, "got '" + said + "' of " + python_ +
                                              ", wanted a Python that starts and has what the tests import "
                                              "(python: names another)");
  }

  bool allowed_;
  std::string python_, entry_, before_;
  double seconds_;
  std::int64_t memory_;
  mutable std::mutex mutex_;
  mutable std::set<std::string> tried_;
};

}  // namespace

KVLAB_PLUGIN(
    kvlab::metric<UnitTests>("unit_tests", "1 if the answer's code passes the question's tests; it runs that code")
        .param("execute_code", false, "run the code that a model wrote, in confinement; without it no score is given")
        .param("python", std::string("python3"), "the Python that runs it: a path, or a program of PATH")
        .param("entry_point", std::string("entry_point"),
               "the record's field with the function's name; without the field all definitions stay")
        .param("before", std::string(),
               "the record's field with the code that an answer goes on from, such as input; empty: answers are whole")
        .param("timeout", 30.0, 0.01, 3600.,
               "most seconds for an answer; one that takes longer scores 0, with a warning")
        .param("memory", 4096, 64, 1 << 20, "most MiB for each of at most 16 processes"))
