// `kvlab report --html` as a user meets it. A script stands in for Python, but for the last case.
#include <catch2/catch.hpp>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <regex>
#include <sstream>
#include <vector>

#include "support/child.hpp"

using namespace kvlab;
using Catch::Contains;
using test::Ended;
using test::Folder;

namespace {

std::string profile() { return (test::source_root() / "experiments/retrieval/heads.h5").string(); }

std::string text_of(const std::string& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

// A script that notes its words, a line for each start, and does `packages` or `report`.
std::string python(const Folder& folder, const std::string& packages, const std::string& report) {
  const std::string file =
      folder.write("python", "#!/bin/sh\necho \"$*\" >>'" + (folder / "words") + "'\ncase $3 in packages) " + packages +
                                 " ;; report) " + report + " ;; esac\n");
  std::filesystem::permissions(file, std::filesystem::perms::owner_all);
  return file;
}

Ended report(const std::string& interpreter, const std::vector<std::string>& words) {
  std::vector<std::string> all{"report"};
  all.insert(all.end(), words.begin(), words.end());
  return test::run_kvlab(all, [&] { setenv("KVLAB_PYTHON", interpreter.c_str(), 1); });
}

}  // namespace

TEST_CASE("report --html gives Python the files and passes its exit code on") {
  const Folder folder;
  const std::string script = python(folder, "echo all there", "echo 'what it says'; exit 7");
  const std::string out = folder / "-page";
  const Ended ended = report(script, {profile(), profile(), "--html", out});
  CHECK(ended.code == 7);
  CHECK(ended.said == "what it says\n");
  CHECK_THAT(text_of(folder / "words"),
             Contains("kvlab_results packages\n") &&
                 Contains("kvlab_results report --output=" + out + " -- " + profile() + " " + profile() + "\n"));
}

TEST_CASE("report --html says what Python lacks, and ends with 3") {
  const Folder folder;
  const std::string script = python(folder, "echo noise; exit 3", "echo 'got no h5py' >&2; exit 3");
  const Ended lacking = report(script, {profile(), "--html", folder / "page"});
  CHECK(lacking.code == 3);
  CHECK(lacking.said == "got no h5py\n");
  const Ended none = report(folder / "none", {profile(), "--html", folder / "page"});
  CHECK(none.code == 3);
  CHECK_THAT(none.said, Contains("got no Python as " + (folder / "none")) && Contains("apt-get install python3 "));
}

TEST_CASE("report --html names the signal that ended Python") {
  const Folder folder;
  const Ended ended = report(python(folder, "exit 0", "kill -9 $$"), {profile(), "--html", folder / "page"});
  CHECK(ended.code == 2);
  CHECK_THAT(ended.said, Contains("got signal 9"));
}

TEST_CASE("report --html refuses bad input before Python starts") {
  const Folder folder;
  const std::string script = python(folder, "exit 0", "exit 0");
  std::string bytes = text_of(profile());
  REQUIRE(bytes.size() > 5000);
  bytes[4000] = static_cast<char>(bytes[4000] ^ 1);
  const std::string damaged = folder.write("damaged.h5", bytes);
  CHECK_THAT(report(script, {profile(), damaged, "--html", folder / "page"}).said, Contains("damaged.h5"));
  CHECK(report(script, {damaged, "--html", folder / "page"}).code == 2);
  CHECK(report(script, {folder / "none.h5", "--html", folder / "page"}).code == 2);
  CHECK(report(script, {profile(), "--html", ""}).code == 2);
  for (const char* other : {"--format=md", "--plugins", "--array=votes"})
    CHECK(report(script, {profile(), other, "--html", folder / "page"}).code == 2);
  CHECK(!std::filesystem::exists(folder / "words"));
}

TEST_CASE("report --html makes a page where Python has its packages") {
  const Folder folder;
  const Ended ended =
      test::run_kvlab({"report", profile(), "--html", folder / "page"}, [] { unsetenv("KVLAB_PYTHON"); });
  if (ended.code == 3) {
    CHECK_THAT(ended.said, Contains("apt-get install"));
    WARN("no Python with the packages: " + ended.said);
    return;
  }
  REQUIRE(ended.code == 0);
  CHECK_THAT(ended.said, Catch::EndsWith((folder / "page/index.html") + "\n"));  // fonts may be told of before
  CHECK_THAT(text_of(folder / "page/index.html"), Contains("<!DOCTYPE html>") && Contains("flexicache_heads"));
}

namespace {

using Rows = std::vector<std::vector<std::string>>;

std::string without(const std::string& text, const char* pattern) {
  return std::regex_replace(text, std::regex(pattern), "");
}

// The tables against full of `kvlab report --format md` by their titles, without the marks of footnotes.
std::map<std::string, Rows> tables_of(const std::string& markdown) {
  std::map<std::string, Rows> out;
  std::string title;
  std::istringstream in(without(markdown, R"( \\?\[\d+\\?\]|\\)"));
  for (std::string line; std::getline(in, line);) {
    if (!line.starts_with("|")) {
      if (!line.empty()) title = without(line, R"(^[*# ]+|[* ]+$)");
    } else if (title.find(", against ") != title.npos && !line.starts_with("|-") && !line.starts_with("|:")) {
      std::vector<std::string>& cells = out[title].emplace_back();
      std::istringstream row(line.substr(1));
      for (std::string cell; std::getline(row, cell, '|');) cells.push_back(without(cell, "^ +| +$"));
    }
  }
  return out;
}

// The same of a page.
std::map<std::string, Rows> tables_of_page(const std::string& html) {
  std::map<std::string, Rows> out;
  const std::regex table("<caption><span>([^<]*, against [^<]* question[^<]*)</span></caption>([\\s\\S]*?)</table>"),
      row("<tr[^>]*>([\\s\\S]*?)</tr>"), cell("<t[hd][^>]*>([^<]*)</t[hd]>");
  const auto all = [](const std::string& text, const std::regex& pattern) {
    return std::vector<std::smatch>(std::sregex_iterator(text.begin(), text.end(), pattern), {});
  };
  for (const std::smatch& t : all(html, table)) {
    const std::string body = t[2];
    for (const std::smatch& r : all(body, row)) {
      std::vector<std::string>& cells = out[t[1]].emplace_back();
      const std::string text = r[1];
      for (const std::smatch& c : all(text, cell))
        cells.push_back(std::regex_replace(c[1].str(), std::regex("&lt;"), "<"));
    }
  }
  return out;
}

}  // namespace

TEST_CASE("report --html has the differences to the full cache that the terminal's tables have, number by number") {
  const Folder folder;
  std::filesystem::copy(test::source_root() / "core/test/golden/tiny/llama-gqa3", std::filesystem::path(folder / "m"));
  std::string text;
  for (int i = 0; i < 600; ++i) text += "word" + std::to_string(i * i % 97) + " ";
  folder.write("t.txt", text);
  // Repeats and a second full measure the noise floor.
  folder.write(
      "e.yaml",
      "model: {path: m, dtype: f32}\ntasks: [text: {file: t.txt, prefix: 24, forced: 6, samples: 7}]\n"
      "policies: [full, {name: again, policy: full}, {name: newest, scorer: window, budget: {tokens: [8, 16]}}]\n"
      "metrics: [score]\nseed: [0, 1]\nrepeats: 2\nbackend: cpu\nthreads: 1\npage_size: 4\n");
  REQUIRE(test::run_kvlab({"run", folder / "e.yaml", "-o", folder / "o.h5"}).code == 0);
  const std::string small = (test::source_root() / "analysis/testdata/small.h5").string();
  for (const std::string& file : {small, folder / "o.h5"}) {
    const Ended page = test::run_kvlab({"report", file, "--html", folder / "page"}, [] { unsetenv("KVLAB_PYTHON"); });
    CAPTURE(file, page.said);
    if (page.code == 3) {
      WARN("skipped: no Python with the packages of a report");
      return;
    }
    REQUIRE(page.code == 0);
    const auto wanted = tables_of(test::run_kvlab({"report", file, "--format", "md"}).said);
    CHECK(wanted.size() == (file == small ? 2 : 1));
    CHECK(tables_of_page(text_of(folder / "page/index.html")) == wanted);
  }
}
