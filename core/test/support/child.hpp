// Child processes for tests: kvlab's command line as users start it, with its output, its exit and its limits.
#pragma once
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <functional>
#include <iterator>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "support/places.hpp"

namespace kvlab::test {

// The end of a process and its output, stdout and stderr together.
struct Ended {
  int code = -1;  // exit code; -1 = a signal ended it
  int signal = 0;
  std::string said;
};

// A busy machine may let a child go too far before the test acts. The test then starts afresh, so many times in all.
constexpr int attempts = 5;

class Child {
 public:
  // setup: runs in the child before the program starts (limits, signals).
  explicit Child(std::vector<std::string> arguments, const std::function<void()>& setup = {}) {
    char name[] = "/tmp/kvlab-child-XXXXXX";
    const int log = mkstemp(name);
    log_ = name;
    std::vector<char*> argv;
    for (std::string& a : arguments) argv.push_back(a.data());
    argv.push_back(nullptr);
    pid_ = fork();
    if (pid_ < 0 || log < 0) throw std::runtime_error("no child process");
    if (pid_ == 0) {
      setpgid(0, 0);
      dup2(log, 1), dup2(log, 2);
      if (setup) setup();
      execv(argv[0], argv.data());
      _exit(126);
    }
    setpgid(pid_, pid_);
    close(log);
  }
  ~Child() {
    if (pid_ > 0) {
      ::kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
    }
    unlink(log_.c_str());
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  void kill(int signal) const { ::kill(pid_, signal); }
  pid_t pid() const { return pid_; }

  std::string said() const {
    std::ifstream in(log_, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }

  // True once `there()` holds; false if the process ends first or `seconds` pass.
  bool reaches(const std::function<bool()>& there, int seconds = 120) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
    while (std::chrono::steady_clock::now() < end) {
      if (there()) return true;
      siginfo_t info{};
      if (waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid != 0)
        return there();
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return false;
  }

  Ended wait() {
    int status = 0;
    waitpid(pid_, &status, 0);
    pid_ = -1;
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, WIFSIGNALED(status) ? WTERMSIG(status) : 0, said()};
  }

 private:
  pid_t pid_ = -1;
  std::string log_;
};

inline std::vector<std::string> kvlab_command(const std::vector<std::string>& words) {
  std::vector<std::string> all{(build_root() / "bin" / "kvlab").string()};
  all.insert(all.end(), words.begin(), words.end());
  return all;
}

inline Ended run_kvlab(const std::vector<std::string>& words, const std::function<void()>& setup = {}) {
  return Child(kvlab_command(words), setup).wait();
}

// A folder of this test's own, deleted at the end.
class Folder {
 public:
  Folder() {
    char name[] = "/tmp/kvlab-test-XXXXXX";
    if (!mkdtemp(name)) throw std::runtime_error("no folder");
    path_ = name;
  }
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  std::string operator/(const std::string& name) const { return (path_ / name).string(); }
  std::string write(const std::string& name, const std::string& text) const {
    std::ofstream(path_ / name, std::ios::binary) << text;
    return *this / name;
  }
  std::size_t files(const std::string& folder, const std::string& ending) const {
    std::error_code none;
    std::size_t n = 0;
    for (const auto& entry : std::filesystem::directory_iterator(path_ / folder, none))
      n += entry.path().string().ends_with(ending);
    return n;
  }

 private:
  std::filesystem::path path_;
};

}  // namespace kvlab::test
