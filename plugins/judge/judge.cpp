// A score by a program of the user's, for example one that asks a language model. Nothing is asked where no experiment
// names the program.
#include <kvlab/plugin.hpp>

#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>

#include "json.hpp"

namespace fs = std::filesystem;

namespace {

[[noreturn]] void fail(const std::string& got) {
  throw kvlab::Error(kvlab::Errc::data, "got " + got + ", wanted a judge that prints a number from 0 to 1");
}

// A folder that only this user can read. It goes with the object.
class Folder {
 public:
  Folder() : path_(fs::temp_directory_path() / ("kvlab-judge-" + std::to_string(std::random_device()()))) {
    if (!fs::create_directory(path_)) fail("the folder " + path_.string() + " of somebody else");
    fs::permissions(path_, fs::perms::owner_all);
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
  constexpr int late = 124, per_code = 256;  // the exit code of timeout, and how std::system encodes it
  const Folder folder;
  if (!(std::ofstream(folder.file("in"), std::ios::binary) << input << std::flush)) fail("no room for a judge's input");
  const std::string line = "timeout -k 1 " + std::to_string(seconds) + " sh -c " + word(command) + " < " +
                           word(folder.file("in")) + " > " + word(folder.file("out"));
  const int status = std::system(line.c_str());
  if (status == late * per_code) fail("no answer of the judge in " + std::to_string(seconds) + " seconds");
  if (status != 0)
    fail(status > 0 && status % per_code == 0 ? "a judge with exit code " + std::to_string(status / per_code)
                                              : "a judge that did not end by itself");
  std::ifstream file(folder.file("out"), std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
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
