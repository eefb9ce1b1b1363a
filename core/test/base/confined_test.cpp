// Programs that do harm, confined. Each of them does its harm where nothing confines it.
#include <fcntl.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <catch2/catch.hpp>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <kvlab/confined.hpp>
#include <kvlab/error.hpp>
#include <thread>

#include "base/confine.hpp"
#include "base/log.hpp"
#include "base/program.hpp"
#include "base/stop.hpp"
#include "support/skipped.hpp"
#include "support/temporary_folder.hpp"

using namespace kvlab;
using test::confines;
namespace fs = std::filesystem;

namespace {

ConfinedProgram script(const std::string& text) { return {.words = {"/bin/bash", "-c", text}}; }
ConfinedEnd run(const std::string& text, double seconds = 20) {
  ConfinedProgram program = script(text);
  program.seconds = seconds;
  return run_confined(program);
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
    const log::Collected said;
    CHECK(seconds_of([&] { end = run(text, 0.5); }) < 20);
    CHECK(end.late);
    REQUIRE(said.warnings().size() == 1);
    CHECK_THAT(said.warnings()[0], Catch::Contains("bash, was ended after its 0.5 s"));
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
  std::atomic<bool> over = false;
  std::thread other([&] {
    for (; !over; std::this_thread::sleep_for(std::chrono::milliseconds(50))) most = std::max(most, running(mark));
  });
  const ConfinedEnd end = run("cp /bin/sleep ./" + mark + "; while :; do ./" + mark + " 60 & done 2>/dev/null", 3);
  over = true;
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
  // A home folder is no installation.
  const char* before = std::getenv("HOME");
  const std::string home = before ? before : "";
  setenv("HOME", own.c_str(), 1);
  const std::string part = (own / "lib/part").string();
  const std::string beside = "test -e " + part + " || echo alone; ls " + (own / "bin").string() + " " + own.string();
  const std::string shown = own.string() + ":\nbin\n\n" + (own / "bin").string() + ":\nprogram\n";
  CHECK(run_confined({.words = {(own / "bin/program").string(), "-c", beside}, .variables = {{"PATH", "/usr/bin"}}})
            .said == "alone\n" + shown);
  // Of ~/.local it is the program and what in lib has its name.
  const fs::path local = own / ".local";
  for (const char* name : {"bin", "lib/program1.2", "lib/other", "share"}) fs::create_directories(local / name);
  fs::copy_file("/bin/bash", local / "bin/program1.2");
  fs::create_symlink("program1.2", local / "bin/program");
  for (const char* name :
       {"bin/other", "lib/program1.2/module", "lib/libprogram1.2.so.1", "lib/other/module", "share/secret"})
    std::ofstream(local / name) << "text";
  fs::permissions(own, fs::perms::all);
  const std::string tree = "cd " + local.string() + "; find * -type f -o -type l | sort";
  for (const char* name : {"program", "program1.2"}) {
    CAPTURE(name);
    const bool link = name == std::string("program");
    CHECK(
        run_confined({.words = {(local / "bin" / name).string(), "-c", tree}, .variables = {{"PATH", "/usr/bin:/bin"}}})
            .said ==
        std::string(link ? "bin/program\n" : "") + "bin/program1.2\nlib/libprogram1.2.so.1\nlib/program1.2/module\n");
  }
  before ? setenv("HOME", home.c_str(), 1) : unsetenv("HOME");
  const int held = fcntl(STDIN_FILENO, F_DUPFD, 20);  // not closed by exec
  CHECK_THAT(run("true <&" + std::to_string(held)).said, Catch::Contains("Bad file descriptor"));
  CHECK(run_program({"/bin/bash", "-c", "true <&" + std::to_string(held)}).good());
  close(held);
}

namespace {

struct Call {
  const char* name;
  std::string arguments;  // the first is its number
};

// What Python gets of each call: "name error", line by line.
std::vector<std::string> python_that_calls(const std::vector<Call>& calls) {
  std::string text = "import ctypes, errno, os\nlibc = ctypes.CDLL(None, use_errno=True)\n";
  text += "def call(name, *arguments):\n";
  text += "    got = libc.syscall(*[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments])\n";
  text += "    if name.startswith('clone') and got == 0: os._exit(0)\n";
  text += "    print(name, 'done' if got >= 0 else errno.errorcode[ctypes.get_errno()])\n";
  for (const Call& c : calls) text += "call('" + std::string(c.name) + "', " + c.arguments + ")\n";
  return {"/usr/bin/python3", "-I", "-c", text};
}

std::string arguments(long number, const std::string& others) { return std::to_string(number) + ", " + others; }

}  // namespace

TEST_CASE("confined: a program gets neither other namespaces nor memory that nothing counts") {
  if (!confines()) return;
  // Those without an error in their arguments do no harm by themselves. The others' errors come before any refusal.
  const std::vector<Call> calls{
      {"clone-fs", arguments(SYS_clone, std::to_string(CLONE_NEWUSER | CLONE_FS | SIGCHLD) + ", 0, 0, 0, 0")},
      {"clone-mounts", arguments(SYS_clone, std::to_string(CLONE_NEWNS | CLONE_FS | SIGCHLD) + ", 0, 0, 0, 0")},
      {"open_tree", arguments(SYS_open_tree, "-100, b'/tmp', 0")},
      {"mount_setattr", arguments(SYS_mount_setattr, "-1, b'', 0, None, 0")},
      {"fsconfig", arguments(SYS_fsconfig, "-1, 0, None, None, 0")},
      {"memfd_create", arguments(SYS_memfd_create, "b'x', 0")},
      {"shmget", arguments(SYS_shmget, "0, 0, 0o600")},
      {"semget", arguments(SYS_semget, "0, 0, 0o600")},
      {"msgget", arguments(SYS_msgget, "0x6b766c61, 0")},
      {"mq_open", arguments(SYS_mq_open, "None, 0, 0, None")},
  };
  std::string refused;
  for (const Call& c : calls) refused += std::string(c.name) + " EPERM\n";
  const ProgramEnd free = run_program(python_that_calls(calls));
  CAPTURE(free.said);
  CHECK((free.good() && free.said.find("EPERM") == std::string::npos));
  CHECK(run_confined({.words = python_that_calls(calls)}).said == refused);
  const std::vector<Call> others{
      {"clone-user", arguments(SYS_clone, std::to_string(CLONE_NEWUSER | SIGCHLD) + ", 0, 0, 0, 0")},
      {"clone3", arguments(SYS_clone3, "None, 0")},
      {"fsopen", arguments(SYS_fsopen, "b'tmpfs', 0")},
      {"fsmount", arguments(SYS_fsmount, "-1, 0, 0")},
      {"fspick", arguments(SYS_fspick, "-100, b'/tmp', 0")},
      {"move_mount", arguments(SYS_move_mount, "-100, b'/tmp', -100, b'/tmp', 0")}};
  CHECK(run_confined({.words = python_that_calls(others)}).said ==
        "clone-user EPERM\nclone3 ENOSYS\nfsopen EPERM\nfsmount EPERM\nfspick EPERM\nmove_mount EPERM\n");
}

TEST_CASE("confined: a program starts threads and programs") {
  if (!confines()) return;
  const std::string text = R"(
import subprocess, threading
def work(): print(subprocess.run(["echo", "a program"], capture_output=True, text=True).stdout, end="")
thread = threading.Thread(target=work)
thread.start()
thread.join()
print("a thread")
)";
  CHECK(run_confined({.words = {"/usr/bin/python3", "-I", "-c", text}, .variables = {{"PATH", "/usr/bin"}}}).said ==
        "a program\na thread\n");
}

TEST_CASE("confined: a program ends with kvlab") {
  if (!confines()) return;
  const std::string mark = "ke" + std::to_string(getpid());
  const pid_t kvlab = fork();
  if (kvlab == 0) {
    run("cp /bin/sleep ./" + mark + "; ./" + mark + " 60", 60);
    _exit(0);
  }
  const auto wait_for_count = [&](int count) {
    for (int i = 0; i < 200 && running(mark) != count; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    return running(mark);
  };
  CHECK(wait_for_count(1) == 1);
  kill(kvlab, SIGKILL);
  waitpid(kvlab, nullptr, 0);
  CHECK(wait_for_count(0) == 0);
}

TEST_CASE("confined: the first process ends where kvlab ended before it asked for the signal") {
  int report[2];
  REQUIRE(pipe(report) == 0);
  close(report[0]);  // as kvlab's end does
  const pid_t first = fork();
  if (first == 0) {
    confine::Plan plan;  // without root's rights; the next step fails outside of a namespace
    plan.input = plan.output = STDERR_FILENO;
    plan.report = report[1];
    confine::run(plan);
  }
  close(report[1]);
  int status = 0;
  waitpid(first, &status, 0);
  CHECK((WIFEXITED(status) && WEXITSTATUS(status) == 126));  // a step that fails sends a report, which SIGPIPE ends
}
