// Programs that do harm, confined. Each of them does its harm where nothing confines it.
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <kvlab/confined.hpp>
#include <kvlab/error.hpp>
#include <thread>

#include "base/program.hpp"
#include "base/stop.hpp"
#include "support/temporary_folder.hpp"

using namespace kvlab;
namespace fs = std::filesystem;

namespace {

ConfinedProgram script(const std::string& text) { return {.words = {"/bin/bash", "-c", text}}; }
ConfinedEnd run(const std::string& text, double seconds = 20) {
  ConfinedProgram program = script(text);
  program.seconds = seconds;
  return run_confined(program);
}

// Whether this machine confines programs. Where it does not, the case is skipped, and its name and the reason are
// printed.
bool confines() {
  try {
    run("true");
    return true;
  } catch (const Error& error) {
    if (error.code() != Errc::unsupported) throw;
    WARN("skipped: " << Catch::getResultCapture().getCurrentTestName() << ": " << error.what());
    return false;
  }
}

double seconds_of(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Processes of this machine with the name.
int running(const std::string& name) {
  int count = 0;
  for (const fs::directory_entry& process : fs::directory_iterator("/proc")) {
    std::string own;
    std::getline(std::ifstream(process.path() / "comm"), own);
    count += own == name;
  }
  return count;
}

}  // namespace

TEST_CASE("confined: a program gets its words, input and variables, and ends as it likes") {
  if (!confines()) return;
  ConfinedProgram program = script("cat; echo \"$A $0 $1\"; echo more >&2; exit 7");
  program.words.insert(program.words.end(), {"zero", "one"});
  program.variables = {{"A", "b"}};
  program.input = std::string(1 << 20, 'x') + "\n";
  const ConfinedEnd end = run_confined(program);
  CHECK((end.code == 7 && end.signal == 0 && !end.late));
  CHECK(end.said.size() == 1 << 16);  // the last part
  CHECK(end.said.substr(end.said.size() - 18) == "x\nb zero one\nmore\n");
  CHECK(run("kill -SEGV $$").signal == SIGSEGV);
  CHECK(run("echo $HOME $PATH_OF_NOBODY").said == "\n");
  program.words = {"true"};
  CHECK(run_confined(program).code == 0);  // of PATH
}

TEST_CASE("confined: a program that cannot be started is an error") {
  CHECK_THROWS_WITH(run_confined({.words = {"/no/such"}}), Catch::Contains("got no program '/no/such'"));
  if (!confines()) return;
  test::TemporaryFolder folder;
  const std::string path = folder / "no-program";
  std::ofstream(path) << "\x01\x02";
  fs::permissions(path, fs::perms::all);
  CHECK_THROWS_WITH(run_confined({.words = {path}}), Catch::Contains(path) && Catch::Contains("wanted to start it"));
}

TEST_CASE("confined: a loop and a sleep end with the time") {
  if (!confines()) return;
  for (const char* text : {"while :; do :; done", "sleep 60", "trap '' TERM INT HUP XCPU; while :; do :; done"}) {
    CAPTURE(text);
    ConfinedEnd end;
    CHECK(seconds_of([&] { end = run(text, 0.5); }) < 20);
    CHECK(end.late);
  }
}

TEST_CASE("confined: a request to stop ends the program") {
  if (!confines()) return;
  stop::detail::signal = SIGINT;
  CHECK(seconds_of([] { CHECK_THROWS_AS(run("sleep 60", 60), stop::Interrupted); }) < 20);
  stop::detail::signal = 0;
}

TEST_CASE("confined: a program that takes memory ends, and so does one that fills its folder") {
  if (!confines()) return;
  ConfinedProgram memory = script("x=0123456789abcdef; while :; do x=$x$x; done");
  memory.memory = 100 << 20;
  memory.seconds = 60;
  const ConfinedEnd end = run_confined(memory);
  CHECK((!end.late && (end.code != 0 || end.signal != 0)));
  ConfinedProgram disk = script("head -c 3000000 /dev/zero > a; head -c 3000000 /dev/zero > b; cat a b | wc -c");
  disk.storage = 4 << 20;
  const std::string said = run_confined(disk).said;
  CHECK(std::stol(said.substr(said.rfind('\n', said.size() - 2) + 1)) <= 4 << 20);
  CHECK_THAT(said, Catch::Contains("No space left on device"));
}

TEST_CASE("confined: a program that multiplies itself ends with the time, and all of its processes end") {
  if (!confines()) return;
  const std::string mark = "kc" + std::to_string(getpid());  // a copy of sleep under a name of its own
  int most = 0;
  std::thread other([&] {
    for (int i = 0; i < 20; ++i, std::this_thread::sleep_for(std::chrono::milliseconds(50)))
      most = std::max(most, running(mark));
  });
  const ConfinedEnd end = run("cp /bin/sleep ./" + mark + "; while :; do ./" + mark + " 60 & done 2>/dev/null", 1);
  other.join();
  CHECK(end.late);
  CHECK((most > 2 && most <= 16));
  CHECK(running(mark) == 0);
  CHECK(run("f() { f | f & }; f; sleep 60", 1).late);
  const ConfinedEnd orphan = run("setsid sleep 60 > /dev/null 2>&1 & echo $!");
  CHECK((orphan.code == 0 && !orphan.late));
}

TEST_CASE("confined: a program has no network") {
  if (!confines()) return;
  const int listening = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  REQUIRE(bind(listening, reinterpret_cast<sockaddr*>(&address), size) == 0);
  REQUIRE(listen(listening, 4) == 0);
  REQUIRE(getsockname(listening, reinterpret_cast<sockaddr*>(&address), &size) == 0);
  const std::string text = "exec 3<>/dev/tcp/127.0.0.1/" + std::to_string(ntohs(address.sin_port)) + " && echo open";
  CHECK(run_program({"/bin/bash", "-c", text}).said == "open\n");
  const ConfinedEnd end = run(text);
  CHECK(end.code != 0);
  CHECK_THAT(end.said, Catch::Contains("Operation not permitted") && !Catch::Contains("open\n"));
  close(listening);
}

TEST_CASE("confined: a program writes to its own folder alone, and sees no file of a user") {
  if (!confines()) return;
  CHECK(run("ls -A; echo x > a && cat a; pwd").said == "x\n/tmp\n");
  CHECK(run("ls -A").said.empty());  // nothing stays
  test::TemporaryFolder folder;
  const std::string secret = folder / "secret";
  std::ofstream(secret) << "secret";
  CHECK(run("cat " + secret).code != 0);
  for (const char* place : {"/x", "/usr/x", "/etc/x", "/dev/x"}) {
    CAPTURE(place);
    const ConfinedEnd end = run("echo x >> " + std::string(place));
    CHECK(end.code != 0);
    CHECK_THAT(end.said, Catch::Contains("Read-only file system"));
  }
  for (const char* place : {"/proc", "/sys", "/root", "/home", "/etc/passwd", "/run", "/var"}) {
    CAPTURE(place);
    CHECK(run("test -e " + std::string(place)).code == 1);
  }
  CHECK(run("id -u; id -G").said == "65534\n65534\n");
  CHECK(run("mount -t tmpfs none /usr || umount /tmp || unshare -r true || echo refused").said.find("refused") !=
        std::string::npos);
}

TEST_CASE("confined: a program sees its own installation, and holds none of this process's files") {
  if (!confines()) return;
  test::TemporaryFolder folder;
  const fs::path own = fs::path(fs::canonical(folder / "")) / "own";
  for (const char* name : {"bin", "lib", "../other"}) fs::create_directories(own / name);
  fs::copy_file("/bin/bash", own / "bin/program");
  std::ofstream(own / "lib/part") << "part";
  fs::create_symlink(own / "bin/program", own.parent_path() / "link");
  fs::permissions(folder / "", fs::perms::all);
  for (const fs::path& path : {own / "bin/program", own.parent_path() / "link"}) {
    CAPTURE(path.string());
    const std::string part = (own / "lib/part").string(), other = (own.parent_path() / "other").string();
    const std::string text = "cat " + part + "; test -e " + other + " || echo ' alone'; echo x > " + part;
    const ConfinedEnd end = run_confined({.words = {path.string(), "-c", text}});
    CHECK(end.said.rfind("part alone\n", 0) == 0);
    CHECK_THAT(end.said, Catch::Contains("Read-only file system"));
  }
  const int held = fcntl(STDIN_FILENO, F_DUPFD, 20);  // not closed by exec
  CHECK_THAT(run("true <&" + std::to_string(held)).said, Catch::Contains("Bad file descriptor"));
  CHECK(run_program({"/bin/bash", "-c", "true <&" + std::to_string(held)}).good());
  close(held);
}
