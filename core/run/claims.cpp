#include "run/claims.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string_view>
#include <utility>

#include "base/new_file.hpp"

namespace kvlab {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view head = "kvlab claim\n", ending = ".claim";

[[noreturn]] void refuse(const std::string& what, const std::string& path) { throw Error(Errc::io, what, path); }

std::string claim_path(const std::string& folder, const std::string& id) {
  return folder + "/" + id + std::string(ending);
}

std::string first_line(const std::string& path) {
  std::ifstream in(path);
  std::string line;
  std::getline(in, line);
  return line;
}

// Field 22 of /proc/PID/stat. The name before it is in brackets and may hold anything.
long long start_ticks(long process) {
  const std::string stat = first_line(fmt::format("/proc/{}/stat", process));
  const std::size_t name_end = stat.rfind(')');
  if (name_end == stat.npos) return 0;
  std::istringstream fields(stat.substr(name_end + 1));
  std::string field;
  for (int i = 3; i <= 22; ++i) fields >> field;
  return fields ? std::atoll(field.c_str()) : 0;
}

std::string job_of_this_process() {
  for (const char* name : {"SLURM_JOB_ID", "PMIX_NAMESPACE"})
    if (const char* job = std::getenv(name); job && *job) return job;
  return "-";
}

std::string text_of(int fd) {
  char bytes[2048];
  const ssize_t got = ::pread(fd, bytes, sizeof bytes, 0);
  if (got < 0) return "";
  return {bytes, static_cast<std::size_t>(got)};
}

// Whether the bytes are a claim's, or the begin of one whose owner ended while it wrote.
bool is_claim(const std::string& text) {
  const std::size_t size = std::min(text.size(), head.size());
  return std::string_view(text).substr(0, size) == head.substr(0, size);
}

ClaimSeen parse(const std::string& text) {
  ClaimSeen seen;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const std::size_t space = line.find(' ');
    if (space == line.npos) continue;
    const std::string key = line.substr(0, space), value = line.substr(space + 1);
    if (key == "host") seen.owner.host = value;
    if (key == "boot") seen.owner.boot = value;
    if (key == "process") seen.owner.process = std::atol(value.c_str());
    if (key == "started") seen.owner.started = std::atoll(value.c_str());
    if (key == "job") seen.job = value;
    if (key == "ended") seen.ended = std::atoi(value.c_str());
  }
  return seen;
}

enum class Lock { taken, held, gone };

// Locks the open file and looks whether it still has its name: its owner removes it while it is locked.
Lock lock_file(int fd, const std::string& path) {
  int done = 0;
  do done = ::flock(fd, LOCK_EX | LOCK_NB);
  while (done != 0 && errno == EINTR);
  if (done != 0 && errno == EWOULDBLOCK) return Lock::held;
  if (done != 0)
    throw NoLocks(
        Errc::io,
        fmt::format("got '{}', wanted to lock it: workers need a file system with locks", std::strerror(errno)), path);
  struct stat opened {
  }, named{};
  const bool same = ::fstat(fd, &opened) == 0 && ::stat(path.c_str(), &named) == 0 && named.st_ino == opened.st_ino &&
                    named.st_dev == opened.st_dev;
  return same ? Lock::taken : Lock::gone;
}

// remove: without locks the file would stand for a claim that nobody holds.
Lock lock_or_remove(int fd, const std::string& path, bool remove) {
  try {
    return lock_file(fd, path);
  } catch (const NoLocks&) {
    if (remove) ::unlink(path.c_str());
    throw;
  }
}

std::vector<std::string> claim_files(const std::string& folder) {
  std::vector<std::string> files;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder, ignored))
    if (entry.path().extension() == ending) files.push_back(entry.path().string());
  std::sort(files.begin(), files.end());
  return files;
}

// The lock of a claim file as another process leaves it; it is locked while `opened` lives.
Lock try_lock(const std::string& path, std::optional<Descriptor>& opened) {
  opened.emplace(::open(path.c_str(), O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  if (*opened < 0 || !is_claim(text_of(*opened))) return Lock::gone;
  try {
    return lock_file(*opened, path);
  } catch (const NoLocks&) {
    return Lock::gone;  // no claim holds anybody off
  }
}

}  // namespace

ProcessName process_name(long process) {
  return {host_name(), first_line("/proc/sys/kernel/random/boot_id"), process, start_ticks(process)};
}

bool lives(const ProcessName& name) { return name.started != 0 && name == process_name(name.process); }

std::optional<Claim> Claim::take(const std::string& folder, const std::string& id) {
  const std::string path = claim_path(folder, id);
  std::error_code error;
  for (;;) {
    fs::create_directories(folder, error);  // each time: a run that has finished all cells removes empty folders
    int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
    const bool made = fd >= 0;
    if (fd < 0 && errno == EEXIST) fd = ::open(path.c_str(), O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0 && errno == ENOENT && fs::is_directory(folder, error)) continue;  // it was removed meanwhile
    if (fd < 0) refuse(fmt::format("got '{}', wanted to make a claim", std::strerror(errno)), path);
    auto opened = std::make_unique<Descriptor>(fd);
    if (!is_claim(text_of(fd)))
      refuse("got a file that kvlab did not write, wanted to make a claim of this name: move it away", path);
    const Lock got = lock_or_remove(fd, path, made);
    if (got == Lock::held) return std::nullopt;
    if (got == Lock::gone) continue;
    Claim claim(std::move(opened), path);
    claim.read();
    claim.sign();
    return claim;
  }
}

Claim::~Claim() {
  if (file_) ::unlink(path_.c_str());  // while it is locked: later the file could be another process's claim
}

// The file of an owner that has ended still has its text.
void Claim::read() {
  const ClaimSeen before = parse(text_of(*file_));
  if (before.owner.process == 0) return;
  ended_ = before.ended + 1;
  last_ = fmt::format("process {} of {}", before.owner.process, before.owner.host);
}

void Claim::sign() const {
  const ProcessName own = process_name(::getpid());
  const std::string text = fmt::format("{}host {}\nboot {}\nprocess {}\nstarted {}\njob {}\nended {}\n", head, own.host,
                                       own.boot, own.process, own.started, job_of_this_process(), ended_);
  if (::ftruncate(*file_, 0) != 0 || ::pwrite(*file_, text.data(), text.size(), 0) != static_cast<ssize_t>(text.size()))
    refuse(fmt::format("got '{}', wanted to write the claim", std::strerror(errno ? errno : ENOSPC)), path_);
}

std::vector<ClaimSeen> claims_in(const std::string& folder) {
  std::vector<ClaimSeen> all;
  for (const std::string& path : claim_files(folder)) {
    const Descriptor fd(::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
    if (fd < 0) continue;
    const std::string text = text_of(fd);
    if (!is_claim(text)) continue;
    all.push_back(parse(text));
    all.back().id = fs::path(path).stem().string();
  }
  return all;
}

int forget_ended(const std::string& folder) {
  int count = 0;
  for (const std::string& path : claim_files(folder)) {
    std::optional<Descriptor> locked;
    if (try_lock(path, locked) != Lock::taken) continue;
    ::unlink(path.c_str());
    ++count;
  }
  return count;
}

bool any_held(const std::string& folder) {
  const auto files = claim_files(folder);
  return std::any_of(files.begin(), files.end(), [](const std::string& path) {
    std::optional<Descriptor> locked;
    return try_lock(path, locked) == Lock::held;
  });
}

bool runs_beside(const std::vector<std::string>& folders, const std::string& id) {
  for (const std::string& folder : folders)
    for (const ClaimSeen& c : claims_in(folder))
      if ((c.id != id || folder != folders.front()) && lives(c.owner)) return true;
  return false;
}

Neighbours::Neighbours(std::vector<std::string> folders, std::string id)
    : folders_(std::move(folders)), id_(std::move(id)), events_(::inotify_init1(IN_NONBLOCK | IN_CLOEXEC)) {
  for (const std::string& folder : folders_) {
    if (events_ < 0) break;
    const int watch = ::inotify_add_watch(events_, folder.c_str(), IN_CREATE | IN_MODIFY);
    if (&folder == &folders_.front()) first_ = watch;
  }
  seen_ = runs_beside(folders_, id_);
}

bool Neighbours::any() { return seen_ = seen_ || claimed_meanwhile() || runs_beside(folders_, id_); }

bool Neighbours::claimed_meanwhile() const {
  alignas(inotify_event) char bytes[16 * 1024];
  for (ssize_t got = 0; events_ >= 0 && (got = ::read(events_, bytes, sizeof bytes)) > 0;) {
    for (const char* at = bytes; at < bytes + got;) {
      const auto* event = reinterpret_cast<const inotify_event*>(at);
      if (event->mask & IN_Q_OVERFLOW) return true;  // so many files were not written by this process
      const fs::path name = event->len ? event->name : "";
      if (name.extension() == ending && (name.stem() != id_ || event->wd != first_)) return true;
      at += sizeof *event + event->len;
    }
  }
  return false;
}

}  // namespace kvlab
