// Runs that cannot go on, because a disk is full or a cell gets no process. No cell is at fault, so none is lost.
#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <filesystem>
#include <map>

#include "result/results.hpp"
#include "support/child.hpp"

using namespace kvlab;
using Catch::Contains;
using test::Ended;
using test::Folder;
namespace fs = std::filesystem;

namespace {

using Words = std::vector<std::string>;

std::string cells(const std::string& budgets = "24", const std::string& metrics = "score") {
  return "model: {synthetic: tiny}\n"
         "tasks: [random_prompts: {prompt: 40, answer: 64, samples: 1}]\n"
         "policies: [full, window: {budget: {tokens: [" +
         budgets + "]}}]\nmetrics: [" + metrics + "]\nbackend: cpu\nthreads: 1\npage_size: 8\n";
}

// Budgets for 37 cells with `full`, more than end before a slow signal arrives.
const std::string many = [] {
  std::string budgets = "24";
  for (int tokens = 25; tokens < 60; ++tokens) budgets += ", " + std::to_string(tokens);
  return budgets;
}();

// Two cells, written to out.h5.
struct Scene {
  explicit Scene(const std::string& experiment = cells()) { folder.write("e.yaml", experiment); }

  Words words(const Words& more = {}) const {
    Words all{"run", folder / "e.yaml", "-q", "-o", out};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
  Ended run(const Words& more = {}, const std::function<void()>& setup = {}) const {
    return test::run_kvlab(words(more), setup);
  }
  // [name] = bytes
  std::map<std::string, std::string> parts() const {
    std::map<std::string, std::string> found;
    for (const auto& entry : fs::directory_iterator(out + ".parts")) {
      if (entry.path().extension() != ".h5") continue;
      std::ifstream in(entry.path(), std::ios::binary);
      found[entry.path().filename()] = {std::istreambuf_iterator<char>(in), {}};
    }
    return found;
  }
  std::map<std::string, results::SummaryRow> rows() const {  // by cell
    std::map<std::string, results::SummaryRow> found;
    for (const results::SummaryRow& row : results::read_summary(out).rows) found[row.cell] = row;
    return found;
  }
  bool all_ok(std::size_t count) const {
    const auto found = rows();
    return found.size() == count &&
           std::all_of(found.begin(), found.end(), [](const auto& r) { return r.second.status == "ok"; });
  }

  Folder folder;
  std::string out = folder / "out.h5";
};

std::function<void()> limited(__rlimit_resource what, rlim_t most) {
  return [=] {
    const rlimit limit{most, most};
    if (setrlimit(what, &limit) != 0) _exit(125);
  };
}

// Limits each file to so many bytes, like a disk without more room.
std::function<void()> room_for(std::uint64_t bytes) { return limited(RLIMIT_FSIZE, bytes); }

// Bytes of the smallest part. One byte less has room for the part of a failed cell, but for none of a good one.
std::uint64_t smallest_part(const Scene& scene) {
  std::uint64_t smallest = ~0ull;
  for (const auto& [name, bytes] : scene.parts()) smallest = std::min<std::uint64_t>(smallest, bytes.size());
  return smallest;
}

const Words none, isolated{"--isolate"};

}  // namespace

TEST_CASE("a disk without room for a part stops the run, with processes of the cells too, and it goes on later") {
  const Words how = GENERATE(none, isolated);
  CAPTURE(how);
  const Scene whole, scene;
  REQUIRE(whole.run().code == 0);
  const Ended full = scene.run(how, room_for(smallest_part(whole) - 1));
  INFO(full.said);
  CHECK(full.code == 1);
  CHECK_THAT(full.said, Contains("could not be written: " + scene.out + ".parts/") && Contains("File too large") &&
                            Contains("the run stops here, and the same command goes on from there"));
  CHECK(scene.parts().empty());
  const Ended again = scene.run(how);
  INFO(again.said);
  CHECK(again.code == 0);
  CHECK(scene.all_ok(2));
}

TEST_CASE("a TMPDIR without room for reference logits stops the run by name, and it goes on later") {
  const Words how = GENERATE(none, isolated);
  CAPTURE(how);
  const Scene scene(cells("24", "score, fidelity"));
  const std::string folder = scene.folder / "";
  const bool full = GENERATE(true, false);  // false: TMPDIR does not exist
  const Ended stopped = scene.run(how, [&] {
    setenv("TMPDIR", full ? folder.c_str() : "/nowhere/at/all", 1);
    if (full) room_for(std::uint64_t{50} << 10)();  // less than 64 rows of logits, more than a part
  });
  INFO(stopped.said);
  CHECK(stopped.code == 1);
  CHECK_THAT(stopped.said, Contains(full ? folder : "/nowhere/at/all") && Contains("reference logits") &&
                               Contains("TMPDIR") &&
                               Contains("the run stops here, and the same command goes on from there"));
  CHECK(scene.parts().empty());
  const Ended again = scene.run(how);
  INFO(again.said);
  CHECK(again.code == 0);
  CHECK(scene.all_ok(2));
}

TEST_CASE("--fresh on a full disk loses no finished cell") {
  const Words how = GENERATE(none, isolated);
  CAPTURE(how);
  const Scene scene;
  REQUIRE(scene.run().code == 0);
  const auto before = scene.parts();
  REQUIRE(before.size() == 2);
  Words fresh = how;
  fresh.emplace_back("--fresh");
  const Ended full = scene.run(fresh, room_for(smallest_part(scene) - 1));
  INFO(full.said);
  CHECK(full.code == 1);
  CHECK_THAT(full.said, Contains("could not be written") && Contains("without --fresh"));
  CHECK((scene.parts() == before));
  CHECK(scene.all_ok(2));
  CHECK_THAT(scene.run().said, !Contains("error"));
  CHECK((scene.parts() == before));

  const Ended done = scene.run(fresh);  // every cell runs again
  INFO(done.said);
  CHECK(done.code == 0);
  const auto after = scene.parts();
  REQUIRE(after.size() == 2);
  for (const auto& [name, bytes] : before) CHECK((after.at(name) != bytes));
  CHECK(scene.all_ok(2));
}

// Starts a run and stops it with SIGTERM once its parts differ from `before`. On a busy machine the run may end first.
// Then another run starts, and `before` gets the parts of then.
template <class Parts>
Ended stopped(const Scene& scene, const Words& words, Parts& before) {
  for (int tries = 1;; ++tries) {
    test::Child child(test::kvlab_command(words));
    REQUIRE(child.reaches([&] { return scene.parts() != before; }));
    child.kill(SIGTERM);
    const Ended ended = child.wait();
    if (ended.code != 0 || tries == 5) return ended;
    before = scene.parts();
  }
}

TEST_CASE("--fresh that is stopped keeps the cells that it did not run again, and they count as finished") {
  const Words how = GENERATE(none, isolated);
  CAPTURE(how);
  const Scene scene(cells(many));
  REQUIRE(scene.run().code == 0);
  auto before = scene.parts();
  REQUIRE(before.size() == 37);
  Words fresh = how;
  fresh.emplace_back("--fresh");
  const Ended ended = stopped(scene, scene.words(fresh), before);
  INFO(ended.said);
  CHECK(ended.code == 128 + SIGTERM);
  const auto left = scene.parts();
  REQUIRE(left.size() == 37);
  CHECK(std::any_of(before.begin(), before.end(), [&](const auto& p) { return left.at(p.first) != p.second; }));
  CHECK(std::any_of(before.begin(), before.end(), [&](const auto& p) { return left.at(p.first) == p.second; }));
  CHECK(scene.all_ok(37));
  CHECK(results::read_summary(scene.out).warnings.empty());

  const Ended again = scene.run();
  INFO(again.said);
  CHECK(again.code == 0);
  CHECK((scene.parts() == left));
}

TEST_CASE("a stopped --fresh says what is new and what the next run does") {
  const Scene scene(cells(many));
  REQUIRE(scene.run().code == 0);
  auto before = scene.parts();
  const Ended ended = stopped(scene, {"run", scene.folder / "e.yaml", "-o", scene.out, "--fresh"}, before);
  INFO(ended.said);
  CHECK_THAT(ended.said, Contains("37 of 37 cells are finished (") && Contains(" by earlier runs)") &&
                             Contains("the same command without --fresh"));
}

TEST_CASE("--isolate: an experiment file that goes away stops the run, and no cell fails of it") {
  const Scene scene(cells(many));
  const std::string file = scene.folder / "e.yaml", away = scene.folder / "away.yaml";
  test::Child child(test::kvlab_command(scene.words({"--isolate"})));
  REQUIRE(child.reaches([&] { return fs::exists(scene.out + ".parts") && !scene.parts().empty(); }));
  fs::rename(file, away);
  const Ended ended = child.wait();
  INFO(ended.said);
  CHECK(ended.code == 1);
  CHECK_THAT(ended.said, Contains("wanted it to come to its cell") && Contains("the run stops here"));
  const std::size_t finished = scene.parts().size();
  CHECK(finished < 37);
  CHECK(scene.all_ok(finished));
  fs::rename(away, file);
  CHECK(scene.run({"--isolate"}).code == 0);
  CHECK(scene.all_ok(37));
}

TEST_CASE("--isolate: a cell that gets no process stops the run, and OUT has what is finished") {
  const Scene scene;
  REQUIRE(scene.run({"--set", "window.budget.tokens=32"}).code == 0);  // `full` is finished
  bool stopped = false;
  for (rlim_t files = 4; files < 24; ++files) {
    CAPTURE(files);
    fs::remove(scene.out);
    const Ended ended = scene.run(isolated, limited(RLIMIT_NOFILE, files));
    INFO(ended.said);
    REQUIRE(ended.signal == 0);
    const bool no_process = ended.said.find("to a cell's process") != std::string::npos;
    if (!no_process) continue;
    CHECK(ended.code == 1);
    CHECK_THAT(ended.said, Contains("the run stops here, and the same command goes on from there"));
    stopped |= fs::exists(scene.out) && scene.all_ok(1);
  }
  CHECK(stopped);
  const Ended again = scene.run(isolated);
  INFO(again.said);
  CHECK(again.code == 0);
  CHECK(scene.all_ok(2));
}

TEST_CASE("--isolate: a part that is damaged when the run reads it stops the run, and OUT has what is finished") {
  const Folder folder;
  const std::string library = (test::build_root() / "lib" / "bad_plugins" / "libmisbehaving.so").string();
  const std::string out = folder / "out.h5",
                    file = folder.write("e.yaml", "model: {synthetic: tiny}\nplugin_path: " + library +
                                                      "\ntasks: [random_prompts: {prompt: 40, answer: 4, samples: 1}]\n"
                                                      "policies:\n"
                                                      "  - full\n"
                                                      "  - {name: cut, scorer: bad_scorer, budget: {tokens: 16}}\n"
                                                      "metrics: [score]\nbackend: cpu\nthreads: 1\npage_size: 4\n");
  const Words words{"run", file, "-o", out, "--isolate"};
  const auto full = [&] {
    const auto rows = results::read_summary(out).rows;
    return std::count_if(rows.begin(), rows.end(), [](const auto& r) { return r.policy == "full"; }) == 1;
  };
  const Ended ended =
      test::run_kvlab(words, [&] { setenv("KVLAB_TEST_CUT_PART_AT_EXIT", (out + ".parts").c_str(), 1); });
  INFO(ended.said);
  CHECK(ended.code == 1);
  CHECK_THAT(ended.said, Contains("could not be read: " + out + ".parts/") &&
                             Contains("the run stops here, and the same command goes on from there"));
  REQUIRE(fs::exists(out));
  CHECK(full());
  const Ended again = test::run_kvlab(words);
  INFO(again.said);
  CHECK(again.code == 0);
  CHECK(results::read_summary(out).rows.size() == 2);
}
