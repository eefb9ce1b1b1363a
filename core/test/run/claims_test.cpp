// Claims between processes: one owner, whatever happens to it.
#include "run/claims.hpp"

#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>
#include <catch2/catch.hpp>
#include <csignal>
#include <fstream>
#include <sstream>

#include "base/new_file.hpp"
#include "run/gpus.hpp"
#include "support/temporary_folder.hpp"

using namespace kvlab;
using test::TemporaryFolder;

namespace {

// A process that takes the claim, says whether it got it, and holds it until it is told to end.
class Holder {
 public:
  Holder(const std::string& folder, const std::string& id) {
    if (pipe(said_) != 0 || pipe(told_) != 0) throw std::runtime_error("no pipe");
    pid_ = fork();
    if (pid_ == 0) {
      close(told_[1]), close(said_[0]);
      {
        const auto claim = Claim::take(folder, id);
        const char got = claim ? 'y' : 'n';
        if (write(said_[1], &got, 1) != 1) _exit(2);
        char word = 0;
        if (read(told_[0], &word, 1) < 0) _exit(3);
      }
      _exit(0);
    }
    close(told_[0]), close(said_[1]);
    char got = 0;
    if (read(said_[0], &got, 1) == 1) got_ = got == 'y';
  }
  ~Holder() {
    if (pid_ > 0) end();
    close(said_[0]);
  }
  bool got() const { return got_; }
  pid_t pid() const { return pid_; }
  void end() {
    close(told_[1]);
    waitpid(std::exchange(pid_, -1), nullptr, 0);
  }
  void kill_it() {
    kill(pid_, SIGKILL);
    waitpid(std::exchange(pid_, -1), nullptr, 0);
    close(told_[1]);
  }

 private:
  pid_t pid_ = -1;
  int said_[2] = {}, told_[2] = {};
  bool got_ = false;
};

std::string text_of(const std::string& file) {
  std::ifstream in(file);
  return {std::istreambuf_iterator<char>(in), {}};
}

// When the process began, as the kernel tells it to ps: field 22, behind the name in brackets.
std::string start_of(pid_t process) {
  std::istringstream in(text_of("/proc/" + std::to_string(process) + "/stat"));
  std::string field;
  for (int i = 0; i < 22; ++i) in >> field;  // the name of a test program has no blank
  return field;
}

}  // namespace

TEST_CASE("claims: while one process holds a cell, no other one gets it, and a cell that was given back is free") {
  const TemporaryFolder folder;
  const std::string file = folder / "a.claim";
  Holder holder(folder / ".", "a");
  REQUIRE(holder.got());
  CHECK_FALSE(Claim::take(folder / ".", "a"));
  CHECK(Claim::take(folder / ".", "b"));
  CHECK_FALSE(std::filesystem::exists(folder / "b.claim"));
  CHECK(forget_ended(folder / ".") == 0);
  CHECK(std::filesystem::exists(file));
  holder.end();
  CHECK_FALSE(std::filesystem::exists(file));
  const auto claim = Claim::take(folder / ".", "a");
  REQUIRE(claim);
  CHECK(claim->ended() == 0);
  CHECK_FALSE(Claim::take(folder / ".", "a"));  // not twice in one process either
}

TEST_CASE("claims: the file names host, boot, process, its start and its job") {
  const TemporaryFolder folder;
  setenv("SLURM_JOB_ID", "4711", 1);
  Holder holder(folder / ".", "a");
  unsetenv("SLURM_JOB_ID");
  REQUIRE(holder.got());
  std::string boot = text_of("/proc/sys/kernel/random/boot_id");
  boot.pop_back();
  CHECK(text_of(folder / "a.claim") == "kvlab claim\nhost " + host_name() + "\nboot " + boot + "\nprocess " +
                                           std::to_string(holder.pid()) + "\nstarted " + start_of(holder.pid()) +
                                           "\njob 4711\nended 0\n");
}

TEST_CASE("claims: a killed owner's cell goes to the next process, which learns how many owners have ended") {
  const TemporaryFolder folder;
  for (int ends = 1; ends <= 3; ++ends) {
    Holder holder(folder / ".", "a");
    REQUIRE(holder.got());
    const std::string name = "process " + std::to_string(holder.pid()) + " of " + host_name();
    CHECK(any_held(folder / "."));
    holder.kill_it();
    CHECK_FALSE(any_held(folder / "."));
    CHECK(claims_in(folder / ".").size() == 1);
    if (ends < 3) continue;
    const auto claim = Claim::take(folder / ".", "a");
    REQUIRE(claim);
    CHECK(claim->ended() == 3);
    CHECK(claim->last() == name);
  }
  CHECK_FALSE(std::filesystem::exists(folder / "a.claim"));
}

TEST_CASE("claims: a run that begins forgets the claims of ended owners and leaves the others") {
  const TemporaryFolder folder;
  Holder lives(folder / ".", "lives"), killed(folder / ".", "killed");
  killed.kill_it();
  std::ofstream(folder / "empty.claim");  // its owner ended before it wrote its name
  CHECK(forget_ended(folder / ".") == 2);
  CHECK(std::filesystem::exists(folder / "lives.claim"));
  const auto again = Claim::take(folder / ".", "killed");
  REQUIRE(again);
  CHECK(again->ended() == 0);
}

TEST_CASE("claims: of many processes that take one cell at the same time, one gets it") {
  const TemporaryFolder folder;
  for (int round = 0; round < 20; ++round) {
    const std::string id = std::to_string(round);
    if (round % 2) std::ofstream(folder / (id + ".claim")) << "kvlab claim\nprocess 1\nhost gone\nended 0\n";
    constexpr int many = 8;
    int go[2], got[2];
    REQUIRE((pipe(go) == 0 && pipe(got) == 0));
    std::vector<pid_t> all;
    for (int i = 0; i < many; ++i) {
      all.push_back(fork());
      if (all.back() != 0) continue;
      close(go[1]);
      char word = 0;
      if (read(go[0], &word, 1) < 0) _exit(2);
      const auto claim = Claim::take(folder / ".", id);
      const char says = claim ? 'y' : 'n';
      if (write(got[1], &says, 1) != 1) _exit(3);
      if (claim) pause();
      _exit(0);
    }
    close(go[0]), close(go[1]), close(got[1]);
    int owners = 0;
    for (int i = 0; i < many; ++i) {
      char says = 0;
      REQUIRE(read(got[0], &says, 1) == 1);
      owners += says == 'y';
    }
    close(got[0]);
    for (const pid_t child : all) kill(child, SIGKILL), waitpid(child, nullptr, 0);
    CHECK(owners == 1);
  }
}

TEST_CASE("claims: a file of another program stays, and the error names it") {
  const TemporaryFolder folder;
  std::ofstream(folder / "a.claim") << "mine";
  CHECK_THROWS_WITH(Claim::take(folder / ".", "a"), Catch::Contains("a.claim") && Catch::Contains("move it away"));
  CHECK(forget_ended(folder / ".") == 0);
  CHECK(text_of(folder / "a.claim") == "mine");
}

TEST_CASE("claims: a process runs beside a cell while it lives and holds another one") {
  const TemporaryFolder folder;
  CHECK_FALSE(runs_beside({folder / "."}, "a"));
  const auto own = Claim::take(folder / ".", "a");
  CHECK_FALSE(runs_beside({folder / "."}, "a"));
  Holder other(folder / ".", "b");
  CHECK(runs_beside({folder / "."}, "a"));
  other.kill_it();
  CHECK_FALSE(runs_beside({folder / "."}, "a"));
}

TEST_CASE("claims: a neighbour that began and ended between two looks was there, too") {
  const TemporaryFolder folder;
  const auto own = Claim::take(folder / ".", "a");
  Neighbours alone({folder / "."}, "a");
  std::ofstream(folder / "a.h5") << "a part";
  claim_gpu("0123", folder / ".");
  CHECK_FALSE(alone.any());
  { Holder other(folder / ".", "b"); }
  CHECK_FALSE(runs_beside({folder / "."}, "a"));
  CHECK(alone.any());
  CHECK(alone.any());

  Neighbours after({folder / "."}, "a");
  CHECK_FALSE(after.any());
  Holder killed(folder / ".", "c");
  killed.kill_it();
  CHECK(after.any());
  Neighbours taken_over({folder / "."}, "a");  // the file of the killed one is there already
  CHECK_FALSE(taken_over.any());
  { Holder next(folder / ".", "c"); }
  CHECK(taken_over.any());
  Holder there(folder / ".", "d");
  CHECK(Neighbours({folder / "."}, "a").any());
}

TEST_CASE("claims: a neighbour may run a cell of another output of the pool, also one of the same id") {
  const TemporaryFolder folder;
  const std::vector<std::string> pool{folder / "own", folder / "other"};
  const auto own = Claim::take(pool[0], "a");
  { Holder made(pool[1], "b"); }
  Neighbours alone(pool, "a");
  CHECK_FALSE(runs_beside(pool, "a"));
  CHECK_FALSE(alone.any());
  { Holder same(pool[1], "a"); }
  CHECK(alone.any());
  CHECK_FALSE(Neighbours({pool[0]}, "a").any());
  Holder there(pool[1], "a");
  CHECK(runs_beside(pool, "a"));
  CHECK_FALSE(runs_beside({pool[0]}, "a"));
}

TEST_CASE("claims: a GPU that measures times has one worker, and a killed worker's GPU is free") {
  const TemporaryFolder folder;
  Holder other(folder / "gpus", "0123");
  REQUIRE(other.got());
  CHECK_THROWS_WITH(claim_gpu("0123", folder / "."), Catch::Contains("wanted a GPU for each worker"));
  const Claim own = claim_gpu("4567", folder / ".");
  CHECK(claims_in(folder / ".").empty());  // it is no cell
  other.kill_it();
  CHECK_NOTHROW(claim_gpu("0123", folder / "."));
}

TEST_CASE("claims: the GPUs of a process are those that CUDA_VISIBLE_DEVICES names") {
  const char* before = std::getenv("CUDA_VISIBLE_DEVICES");
  const std::string kept = before ? before : "";
  const std::vector<std::string> two{"3", "GPU-5"};
  setenv("CUDA_VISIBLE_DEVICES", "3,GPU-5", 1);
  CHECK(gpu_names() == two);
  setenv("CUDA_VISIBLE_DEVICES", "3,GPU-5,-1,7", 1);  // CUDA ignores what follows a name that is none
  CHECK(gpu_names() == two);
  setenv("CUDA_VISIBLE_DEVICES", "", 1);
  CHECK(gpu_names().empty());
  before ? setenv("CUDA_VISIBLE_DEVICES", kept.c_str(), 1) : unsetenv("CUDA_VISIBLE_DEVICES");
}

TEST_CASE("claims: a process of another machine, of another boot or of another start is not this one") {
  const ProcessName own = process_name(getpid());
  CHECK(lives(own));
  ProcessName other = own;
  ++other.started;
  CHECK_FALSE(lives(other));
  other = own, other.boot = "another";
  CHECK_FALSE(lives(other));
  other = own, other.host += "2";
  CHECK_FALSE(lives(other));
}
