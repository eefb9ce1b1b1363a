// A score by a program of the user's, for example one that asks a language model. Nothing is asked where no experiment
// names the program.
#include <kvlab/plugin.hpp>

#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "json.hpp"

namespace fs = std::filesystem;

namespace {

[[noreturn]] void fail(const std::string& got) {
  throw kvlab::Error(kvlab::Errc::data, "got " + got + ", wanted a judge that prints a number from 0 to 1");
}

// A folder that only this user can read. It goes with the object.
class Folder {
 public:
  Folder() {
    std::string name = (fs::temp_directory_path() / "kvlab-judge-XXXXXX").string();
    if (!mkdtemp(name.data())) fail("no folder like " + name);
    path_ = name;
  }
  ~Folder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  Folder(const Folder&) = delete;
  std::string file(const char* name) const { return (path_ / name).string(); }

 private:
  fs::path path_;
};

// As one word of the shell.
std::string word(const std::string& text) {
  std::string out = "'";
  for (const char c : text) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return out + "'";
}

// What the command prints for this input.
std::string output_of(const std::string& command, const std::string& input, double seconds) {
  constexpr int late = 124, per_code = 256;  // the exit code of timeout, and how pclose encodes it
  const Folder folder;
  if (!(std::ofstream(folder.file("in"), std::ios::binary) << input << std::flush)) fail("no room for a judge's input");
  // Ctrl-C is kvlab's to see: the judge may end, and the run stops after it.
  const std::string line = "trap '' INT; timeout -k 1 " + std::to_string(seconds) + " sh -c " + word(command) + " < " +
                           word(folder.file("in"));
  std::FILE* pipe = popen(line.c_str(), "r");
  if (!pipe) fail("no process for a judge");
  constexpr std::size_t most = 1 << 20;  // of what it prints; a number is shorter
  std::string printed, part(4096, ' ');
  for (std::size_t n; (n = std::fread(part.data(), 1, part.size(), pipe)) > 0;)
    if (printed.size() < most) printed.append(part, 0, n);
  const int status = pclose(pipe);
  if (status == late * per_code) fail("no answer of the judge in " + std::to_string(seconds) + " seconds");
  if (status != 0)
    fail(status > 0 && status % per_code == 0 ? "a judge with exit code " + std::to_string(status / per_code)
                                              : "a judge that did not end by itself");
  return printed;
}

// The number that the program printed. Anything else is an error: an answer without a score is not a wrong one.
double number_of(const std::string& printed) {
  const std::size_t begin = printed.find_first_not_of(" \t\r\n");
  const std::size_t end = begin == printed.npos ? begin : printed.find_last_not_of(" \t\r\n") + 1;
  const std::string text = begin == printed.npos ? "" : printed.substr(begin, end - begin);
  double number = 0;
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || stop != text.data() + text.size() || !(number >= 0 && number <= 1))
    fail("'" + text.substr(0, 200) + "'");
  return number;
}

class Judge final : public kvlab::AnswerMetric {
 public:
  explicit Judge(const kvlab::Params& p) : command_(p.get<std::string>("command")), seconds_(p.get<double>("timeout")) {
    if (command_.empty())
      throw kvlab::Error(kvlab::Errc::config,
                         "got no command, wanted a program that reads JSON and prints a number from 0 to 1");
  }

  double score(const std::string& answer, const std::vector<std::string>& references,
               const kvlab::Record& record) const override {
    return number_of(output_of(command_, judge::question(answer, references, record), seconds_));
  }

 private:
  std::string command_;
  double seconds_;
};

}  // namespace

KVLAB_PLUGIN(kvlab::metric<Judge>("judge",
                                  "a program's score: it reads answer, references and record, and prints 0 to 1")
                 .param("command", std::string(),
                        "of the shell; JSON on its standard input, one object for each answer")
                 .param("timeout", 60.0, 0.01, kvlab::any, "most seconds for an answer"))
