// Disks that take only so many bytes, for tests of file writers.
#pragma once
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <optional>
#include <string>

namespace kvlab::test {

// While it lives, no file of this process grows beyond `bytes`: write(2) is short, then fails with EFBIG.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(std::uint64_t bytes) : handler_(signal(SIGXFSZ, SIG_IGN)) {
    getrlimit(RLIMIT_FSIZE, &before_);
    rlimit limit = before_;
    limit.rlim_cur = bytes;
    setrlimit(RLIMIT_FSIZE, &limit);
  }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;
  ~FileSizeLimit() {
    setrlimit(RLIMIT_FSIZE, &before_);
    signal(SIGXFSZ, handler_);
  }

 private:
  rlimit before_{};
  void (*handler_)(int);
};

// Runs body() in a child process and returns its error, "" = none. A signal that ends the child is an error.
inline std::string in_child(const std::function<std::string()>& body) {
  int pipe_ends[2];
  if (pipe(pipe_ends) != 0) return "pipe";
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    std::string wrong;
    try {
      wrong = body();
    } catch (const std::exception& e) {
      wrong = std::string("threw ") + e.what();
    }
    const bool told = write(pipe_ends[1], wrong.data(), wrong.size()) == static_cast<ssize_t>(wrong.size());
    _exit(told ? 0 : 1);
  }
  close(pipe_ends[1]);
  std::string wrong;
  char buffer[4096];
  for (ssize_t n; (n = read(pipe_ends[0], buffer, sizeof buffer)) > 0;)
    wrong.append(buffer, static_cast<std::size_t>(n));
  close(pipe_ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  if (WIFSIGNALED(status)) wrong += " ended by signal " + std::to_string(WTERMSIG(status));
  return wrong;
}

// Mounts an empty file system of `bytes` in memory on `folder`. Only the calling process sees it; call it in a child.
inline bool mount_disk(const std::string& folder, std::uint64_t bytes) {
  const std::string size = "size=" + std::to_string(bytes);
  return unshare(CLONE_NEWNS) == 0 && mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
         mount("kvlab_test", folder.c_str(), "tmpfs", 0, size.c_str()) == 0;
}

inline bool resize_disk(const std::string& folder, std::uint64_t bytes) {
  const std::string size = "size=" + std::to_string(bytes);
  return mount("kvlab_test", folder.c_str(), "tmpfs", MS_REMOUNT, size.c_str()) == 0;
}

// True if mount_disk works here: it needs privileges that a CI runner may lack.
inline bool can_mount_disk(const std::string& folder) {
  return in_child([&] { return mount_disk(folder, 1 << 20) ? "" : "no"; }).empty();
}

}  // namespace kvlab::test
