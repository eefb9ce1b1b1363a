// Plugins that misbehave, as a user meets them. The run names plugin, callback and deed; finished cells stay.
#include <catch2/catch.hpp>
#include <map>
#include <tuple>

#include <kvlab/build_id.hpp>

#include "base/content_hash.hpp"
#include "result/results.hpp"
#include "support/child.hpp"

using namespace kvlab;
using test::Ended;
using test::Folder;

namespace {

std::string library() { return (test::build_root() / "lib" / "bad_plugins" / "libmisbehaving.so").string(); }

std::string experiment(const std::string& policies) {
  return "model: {synthetic: tiny}\n"
         "plugin_path: " +
         library() +
         "\n"
         "tasks: [random_prompts: {prompt: 40, answer: 4, samples: 1}]\n"
         "metrics: [score]\nbackend: cpu\nthreads: 1\npage_size: 4\n"
         "policies:\n" +
         policies;
}

std::string scorer(const std::string& name, const std::string& in, const std::string& deed) {
  return "  - {name: " + name + ", scorer: {bad_scorer: {in: " + in + ", deed: " + deed + "}}, budget: {tokens: 16}}\n";
}

std::string place(const std::string& plugin, const std::string& callback) {
  return "plugin " + plugin + " (" + library() + "), " + callback + "()";
}

std::map<std::string, results::SummaryRow> rows(const std::string& out) {
  std::map<std::string, results::SummaryRow> by_policy;
  for (const results::SummaryRow& row : results::read_summary(out).rows) by_policy[row.policy] = row;
  return by_policy;
}

Ended run(const Folder& folder, const std::string& policies, const std::vector<std::string>& more = {}) {
  std::vector<std::string> words{"run", folder.write("e.yaml", experiment(policies)), "-o", folder / "out.h5"};
  words.insert(words.end(), more.begin(), more.end());
  return test::run_kvlab(words);
}

}  // namespace

TEST_CASE("a cell names the plugins that it used, also after its part was deleted and made again") {
  const Folder folder;
  const std::string policies = "  - {name: mine, scorer: bad_scorer, budget: {tokens: 16, split: pyramid}}\n";
  REQUIRE(run(folder, policies).code == 0);
  std::filesystem::remove_all(folder / "out.h5.parts");
  REQUIRE(run(folder, policies + "  - full\n").code == 0);
  const std::string out = folder / "out.h5", id = rows(out)["mine"].cell;
  CHECK(results::read_cell(out, rows(out)["full"].cell).plugins.size() == 1);
  const auto plugins = results::read_cell(out, id).plugins;
  REQUIRE(plugins.size() == 3);
  const auto same = [&](std::size_t i, const char* role, const char* name, const std::filesystem::path& file) {
    CAPTURE(role, name);
    CHECK(plugins[i].role == role);
    CHECK(plugins[i].name == name);
    CHECK(plugins[i].version == KVLAB_VERSION);
    CHECK(plugins[i].sha256 == content_hashes().sha256_of(file));
  };
  same(0, "task", "random_prompts", test::plugin_folder() / "librandom_prompts.so");
  same(1, "scorer", "bad_scorer", library());
  same(2, "budget", "pyramid", test::plugin_folder() / "libpyramid.so");
}

TEST_CASE("--plugin-path finds plugins for check and run, before the file's plugin_path, also with --isolate") {
  const Folder folder;
  const std::string file =
      folder.write("e.yaml", "model: {synthetic: tiny}\nplugin_path: " + test::plugin_folder().string() +
                                 "\ntasks: [random_prompts: {prompt: 40, answer: 4, samples: 1}]\n"
                                 "metrics: [score]\nbackend: cpu\nthreads: 1\npage_size: 4\n"
                                 "policies:\n  - {name: mine, scorer: bad_scorer, budget: {tokens: 16}}\n");
  const Ended without = test::run_kvlab({"check", file});
  CHECK(without.code == 2);
  CHECK_THAT(without.said, Catch::Contains("bad_scorer"));
  CHECK(test::run_kvlab({"check", file, "--plugin-path", library()}).code == 0);
  const Ended absent = test::run_kvlab({"check", file, "--plugin-path", folder / "none.so"});
  CHECK(absent.code == 2);
  CHECK_THAT(absent.said, Catch::Contains(folder / "none.so"));
  for (const std::vector<std::string>& more : {std::vector<std::string>{}, {"--isolate", "--fresh"}}) {
    std::vector<std::string> words{"run", file, "-o", folder / "out.h5", "--plugin-path", library()};
    words.insert(words.end(), more.begin(), more.end());
    const Ended ended = test::run_kvlab(words);
    INFO(ended.said);
    CHECK(ended.code == 0);
    CHECK(rows(folder / "out.h5")["mine"].status == "ok");
  }
  const Ended report = test::run_kvlab({"report", folder / "out.h5", "--plugins", "--format", "csv"});
  CHECK(report.code == 0);
  CHECK_THAT(report.said, Catch::StartsWith("role,name,version,sha256,cells\n") &&
                              Catch::Contains("scorer,bad_scorer," KVLAB_VERSION "," +
                                              content_hashes().sha256_of(library()) + ",1\n"));
}

TEST_CASE("several profiles are reported by the heads that they have in common, and one by its pictures or an array") {
  const Folder folder;
  const std::string file = folder.write("e.yaml",
                                        "model: {synthetic: tiny}\nbackend: cpu\nthreads: 1\npage_size: 4\n"
                                        "tasks: [random_prompts: {prompt: 40, answer: 12, samples: 1}]\n"
                                        "profilers: [flexicache_heads: {top_pages: 2, window: 4}]\n");
  const std::string a = folder / "a.h5", b = folder / "b.h5";
  REQUIRE(test::run_kvlab({"profile", file, "-o", a}).code == 0);
  REQUIRE(test::run_kvlab({"profile", file, "-o", b, "--set", "seed=1"}).code == 0);
  const Ended both = test::run_kvlab({"report", a, b, "--format", "md"});
  CHECK(both.code == 0);
  CHECK_THAT(both.said,
             Catch::Contains("| heads of | files | a | b | mean of the others |") && Catch::Contains(" | 1.00 |"));
  const Ended one = test::run_kvlab({"report", a});
  CHECK(one.code == 0);
  CHECK_THAT(one.said, Catch::Contains("flexicache_heads stability") && Catch::Contains("* unstable") &&
                           Catch::Contains("steps after the first  unstable"));
  const Ended map = test::run_kvlab({"report", a, "--array", "votes"});
  CHECK(map.code == 0);
  CHECK_THAT(map.said, Catch::Contains("flexicache_heads votes"));
  for (const char* option : {"--plugins", "--array=votes"}) CHECK(test::run_kvlab({"report", a, b, option}).code == 2);
  CHECK(test::run_kvlab({"report", a, file}).code == 2);
}

TEST_CASE("list --matrix is a page, and report --memory has the bytes of each codec of a run") {
  const Ended page = test::run_kvlab({"list", "--matrix"});
  CHECK(page.code == 0);
  CHECK_THAT(page.said, Catch::StartsWith("# Codecs beside methods\n") && Catch::Contains("\n| `full` | ok |"));
  CHECK_THAT(page.said, Catch::Contains("\n| `kivi2` | **none saved**: functional |") &&
                            Catch::Contains("\n| `kivi2_pages` | saved: pages store the codes |"));
  const Folder folder;
  REQUIRE(run(folder, "  - full\n  - {name: coded, policy: full, codec: k8v4}\n").code == 0);
  const Ended memory = test::run_kvlab({"report", folder / "out.h5", "--memory", "--format", "csv"});
  CHECK(memory.code == 0);
  CHECK_THAT(memory.said,
             Catch::Contains(",coded,device,k8v4,codec_metadata,") && Catch::Contains(",full,device,bf16,keys,"));
  CHECK(test::run_kvlab({"report", folder / "out.h5", "--memory", "--plugins"}).code == 2);
}

TEST_CASE("KVLAB_ROWS names the kernels of stored rows, and another word is refused") {
  const Folder folder;
  const std::string file = folder.write("e.yaml", experiment("  - full\n"));
  const auto with = [&](const char* word) {
    return test::run_kvlab({"run", file, "-o", folder / (std::string(word) + ".h5")},
                           [word] { setenv("KVLAB_ROWS", word, 1); });
  };
  CHECK(with("portable").code == 0);
  const Ended wrong = with("sse");
  CHECK(wrong.code == 2);
  CHECK_THAT(wrong.said, Catch::Contains("got KVLAB_ROWS=sse, wanted avx512, avx2 or portable"));
}

TEST_CASE("conform counts what it skips by the reason, and names it with --verbose") {
  const std::string profilers = (test::plugin_folder() / "libhead_stats.so").string();
  const Ended ended = test::run_kvlab({"conform", profilers, "--case", "generated", "--backend", "cpu"});
  INFO(ended.said);
  CHECK(ended.code == 0);
  const std::string summary =
      "skip   4 promises about tasks with the parameter `context`: the library has none\n"
      "0 passed, 0 failed, 4 skipped";
  CHECK_THAT(ended.said, Catch::EndsWith(" on cpu\n" + summary + " (--verbose names them)\n"));
  const Ended verbose = test::run_kvlab({"conform", profilers, "--case", "GENERATED", "--backend", "cpu", "--verbose"});
  INFO(verbose.said);
  CHECK_THAT(verbose.said, Catch::Contains("skip   a generated prompt follows from seed and index alone\n") &&
                               Catch::EndsWith(summary + "\n"));
}

TEST_CASE("conform --case without a promise of that name names the promises there are") {
  const Ended ended =
      test::run_kvlab({"conform", (test::plugin_folder() / "libhead_stats.so").string(), "--case", "nosuch"});
  INFO(ended.said);
  CHECK(ended.code == 2);
  CHECK_THAT(ended.said, Catch::StartsWith("error: --case: got 'nosuch', wanted") &&
                             Catch::Contains("\n  every token has a score, and none is NaN\n") &&
                             !Catch::Contains("passed"));
}

TEST_CASE("conform says the usual cause of the failure that it saw, and no other one's") {
  const auto conform = [](const char* name) {
    const auto broken = test::build_root() / "lib" / "broken_policies" / ("lib" + std::string(name) + ".so");
    return test::run_kvlab({"conform", broken.string(), "--case", "device memory", "--backend", "cpu"});
  };
  const Ended read = conform("host_reader"), unsorted = conform("unsorted");
  INFO(read.said << unsorted.said);
  CHECK(read.code == 1);
  CHECK_THAT(read.said, Catch::Contains("usual cause: the host reads or writes a view") &&
                            !Catch::Contains("in the order of their scores") && !Catch::Contains("a call of exit()"));
  CHECK(unsorted.code == 1);
  CHECK_THAT(unsorted.said, Catch::Contains("usual cause: the list's entries are in the order of their scores") &&
                                !Catch::Contains("reads or writes a view"));
}

TEST_CASE("inspect and conform refuse what is no plugin of this build, and say what is wrong") {
  const std::string folder = (test::build_root() / "lib" / "bad_plugins").string();
  const auto ended = [&](const char* command, const char* name) {
    return test::run_kvlab({command, folder + "/lib" + name + ".so"});
  };
  for (const char* name : {"not_elf", "empty", "nowhere", "no_note"}) {
    CAPTURE(name);
    CHECK(ended("inspect", name).code == 2);
    CHECK(ended("conform", name).code == 2);
  }
  CHECK(ended("inspect", "old_abi").code == 0);
  CHECK(ended("inspect", "crashing").code == 0);
  const Ended old = ended("conform", "old_abi");
  CHECK(old.code == 2);
  CHECK_THAT(old.said, Catch::Contains("got plugin ABI") && Catch::Contains("older kvlab"));
}

TEST_CASE("cells of plugins that throw or give wrong numbers fail by name; the others run") {
  const Folder folder;
  std::string policies = scorer("int", "score", "throw_int") + scorer("text", "score", "throw") +
                         scorer("memory", "score", "no_memory") + scorer("nan", "score", "nan") +
                         scorer("inf", "score", "inf") + scorer("fine", "nowhere", "nothing");
  for (const char* deed : {"far", "negative", "long"})
    policies += "  - {name: list_" + std::string(deed) + ", selector: {bad_selector: {in: select, deed: " + deed +
                "}}, budget: {tokens: 16}}\n";
  for (const char* deed : {"negative", "long", "everything"})
    policies += "  - {name: keep_" + std::string(deed) +
                ", scorer: bad_scorer, budget: {tokens: 8, split: {bad_budget: " + "{in: allot, deed: " + deed +
                "}}}}\n";
  policies += "  - bad_policy: {in: observe, deed: far}\n";
  const Ended ended = run(folder, policies);
  INFO(ended.said);
  REQUIRE(ended.code == 1);
  auto row = rows(folder / "out.h5");
  REQUIRE(row.size() == 13);
  CHECK(row["fine"].status == "ok");
  CHECK(row["inf"].status == "ok");
  const auto failed = [&](const std::string& policy, const std::string& where, const std::string& what) {
    CAPTURE(policy, row[policy].error);
    CHECK(row[policy].status == "failed");
    CHECK_THAT(row[policy].error, Catch::Contains(where) && Catch::Contains(what));
  };
  failed("int", place("bad_scorer", "score"), "no std::exception");
  failed("text", place("bad_scorer", "score"), "red\\x1b[31m\\nbell\\x07");
  CHECK(row["memory"].status == "oom");
  CHECK_THAT(row["memory"].error, Catch::Contains(place("bad_scorer", "score")));
  failed("nan", place("bad_scorer", "score"),
         "got NaN as the score of the token at position 5 (layer 1, KV head 1), wanted");
  failed("list_far", place("bad_selector", "select"), "got page");
  failed("list_negative", place("bad_selector", "select"), "got page -1");
  failed("list_long", place("bad_selector", "select"), "got a count of 1048576");
  failed("keep_negative", place("bad_budget", "allot"), "got -1 tokens to keep in layer 0, KV head 0");
  failed("keep_long", place("bad_budget", "allot"), "tokens to keep in layer 0, KV head 0");
  failed("keep_everything", place("bad_budget", "allot"), "over all layers and KV heads");
  failed("bad_policy", place("bad_policy", "observe"), "got index 1048576");
  CHECK(ended.said.find('\x1b') == std::string::npos);
  CHECK(ended.said.find('\a') == std::string::npos);
  const Ended report = test::run_kvlab({"report", folder / "out.h5"});
  CHECK(report.said.find('\x1b') == std::string::npos);
}

TEST_CASE("what a plugin does before the first cell is refused by name, and nothing is written") {
  for (const auto& [in, deed, code] : {std::tuple{"every", "negative", 2},
                                       {"pins", "negative", 2},
                                       {"pins", "throw", 2},
                                       {"constructor", "throw_int", 2},
                                       {"needs", "throw_int", 2},
                                       {"pins", "exit", 1}}) {
    CAPTURE(in, deed);
    const Folder folder;
    const Ended ended = run(folder, scorer("bad", in, deed));
    INFO(ended.said);
    CHECK(ended.code == code);
    CHECK_THAT(ended.said, Catch::Contains(place("bad_scorer", in)) && !Catch::Contains("a bug in kvlab"));
    CHECK(ended.said.find('\x1b') == std::string::npos);
    CHECK(!std::filesystem::exists(folder / "out.h5"));
  }
}

TEST_CASE("a callback that ends the process names itself, and the finished cells stay") {
  for (const auto& [deed, code, signal] : {std::tuple{"exit", 1, 0},
                                           {"_exit", 1, 0},
                                           {"quick_exit", 1, 0},
                                           {"abort", -1, SIGABRT},
                                           {"segv", -1, SIGSEGV},
                                           {"fpe", -1, SIGFPE},
                                           {"overflow", -1, SIGSEGV}}) {
    CAPTURE(deed);
    const Folder folder;
    const Ended ended = run(folder, "  - full\n" + scorer("bad", "score", deed));
    INFO(ended.said);
    CHECK(ended.code == code);
    CHECK(ended.signal == signal);
    CHECK_THAT(ended.said, Catch::Contains("error: " + place("bad_scorer", "score") + ": got "));
    CHECK(rows(folder / "out.h5").count("full") == 1);
  }
}

TEST_CASE("--isolate: a cell whose process ends is a failed cell, the run goes on, and nothing is run twice") {
  const Folder folder;
  std::string policies = scorer("first", "nowhere", "nothing");
  const std::map<std::string, std::string> ends = {{"exit", "got a call of exit()"},
                                                   {"_exit", "got a call of _exit()"},
                                                   {"segv", "got signal 11"},
                                                   {"abort", "got signal 6"},
                                                   {"overflow", "got signal 11"}};
  for (const auto& [deed, what] : ends) policies += scorer(deed, "score", deed);
  policies +=
      scorer("kill", "score", "kill") + scorer("int", "score", "throw_int") + scorer("last", "nowhere", "nothing");
  const Ended ended = run(folder, policies, {"--isolate"});
  INFO(ended.said);
  CHECK(ended.code == 1);
  auto row = rows(folder / "out.h5");
  REQUIRE(row.size() == ends.size() + 4);
  CHECK(row["first"].status == "ok");
  CHECK(row["last"].status == "ok");
  for (const auto& [deed, what] : ends) {
    CAPTURE(deed, row[deed].error);
    CHECK(row[deed].status == "failed");
    CHECK_THAT(row[deed].error, Catch::Contains(place("bad_scorer", "score")) && Catch::Contains(what));
  }
  CHECK(row["kill"].status != "ok");
  CHECK_THAT(row["kill"].error, Catch::Contains("signal 9"));
  CHECK_THAT(row["int"].error, Catch::Contains("no std::exception"));

  const Ended again = run(folder, policies);  // the ids do not depend on --isolate
  CHECK_THAT(again.said, Catch::Contains("9 of 9 cells were finished already"));
}

TEST_CASE("--isolate: a signal reaches the cell's process, and the finished cells stay") {
  const Folder folder;
  std::string budgets = "32";  // enough cells that a slow signal finds some unfinished
  for (int tokens = 33; tokens < 80; ++tokens) budgets += ", " + std::to_string(tokens);
  const std::string file = folder.write("e.yaml",
                                        "model: {path: bundled/recall}\n"
                                        "tasks: [niah: {context: 256, samples: 2, max_new_tokens: 8}]\n"
                                        "policies: [full, streaming_llm: {budget: {tokens: [" +
                                            budgets +
                                            "]}}]\n"
                                            "metrics: [score]\nbackend: cpu\nthreads: 1\n");
  test::Child child(test::kvlab_command({"run", file, "-o", folder / "out.h5", "--isolate"}));
  REQUIRE(child.reaches([&] { return folder.files("out.h5.parts", ".h5") >= 1; }));
  child.kill(SIGTERM);
  const Ended ended = child.wait();
  INFO(ended.said);
  CHECK(ended.code == 128 + SIGTERM);
  CHECK(results::read_summary(folder / "out.h5").rows.size() == folder.files("out.h5.parts", ".h5"));
}
