#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include <kvlab/confined.hpp>
#include <kvlab/error.hpp>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "base/confine.hpp"
#include "base/descriptor.hpp"
#include "base/log.hpp"
#include "base/program.hpp"
#include "base/stop.hpp"

namespace fs = std::filesystem;

namespace kvlab {
namespace {

using confine::Plan;
using confine::Report;

constexpr std::size_t most_said = 1 << 16;

[[noreturn]] void refuse(const std::string& what, int error) {
  throw Error(Errc::unsupported,
              fmt::format("got '{}' for {}, wanted a machine that can confine a program: Linux 5.12 or later that "
                          "gives namespaces to this user (many containers do not)",
                          std::strerror(error), what));
}

// A copy of a new descriptor, above those that the child uses.
int high(int descriptor, const char* what) {
  const Descriptor low(descriptor);
  const int copy = low < 0 ? -1 : fcntl(low, F_DUPFD_CLOEXEC, 10);
  if (copy < 0) throw Error(Errc::io, fmt::format("got '{}', wanted {}", std::strerror(errno), what));
  return copy;
}

class Pipe {
 public:
  Pipe() : Pipe(made()) {}
  ~Pipe() { close_to(); }
  Pipe(const Pipe&) = delete;
  void close_to() {
    if (to_ >= 0) close(std::exchange(to_, -1));
  }
  int to() const { return to_; }
  const Descriptor from;

 private:
  static std::array<int, 2> made() {
    std::array<int, 2> ends{-1, -1};
    if (pipe2(ends.data(), O_CLOEXEC) != 0)
      throw Error(Errc::io, fmt::format("got '{}', wanted a pipe", std::strerror(errno)));
    return ends;
  }
  explicit Pipe(std::array<int, 2> ends) : from(high(ends[0], "a pipe")), to_(high(ends[1], "a pipe")) {}

  int to_;
};

// A file in memory that has the text.
int file_of(const std::string& text) {
  const int file = high(memfd_create("kvlab-input", MFD_CLOEXEC), "a file in memory");
  for (std::size_t at = 0; at < text.size();) {
    const ssize_t n = write(file, text.data() + at, text.size() - at);
    if (n > 0)
      at += static_cast<std::size_t>(n);
    else if (errno != EINTR)
      throw Error(Errc::io, fmt::format("got '{}', wanted a file in memory", std::strerror(errno)));
  }
  lseek(file, 0, SEEK_SET);
  return file;
}

// The program's path, in a folder without symbolic links.
fs::path found(const std::string& name) {
  const fs::path place = path_of_program(name);
  if (place.empty()) throw Error(Errc::io, fmt::format("got no program '{}', wanted one of PATH, or a path", name));
  return fs::canonical(place.parent_path().empty() ? "." : place.parent_path()) / place.filename();
}

// Whether all below the folder belongs to a user, or to the whole system: no installation of one program.
bool is_home(const fs::path& folder) {
  const char* home = std::getenv("HOME");
  std::error_code none;
  return folder == folder.root_path() || folder == "/root" || folder.parent_path() == "/home" ||
         (home && *home && fs::equivalent(folder, home, none));
}

// Whether a user's programs share the folder (~/.local), with settings and secrets beside them.
bool is_shared(const fs::path& folder) { return folder.filename() == ".local" && is_home(folder.parent_path()); }

// Of a folder that programs share, what has the program's name: an interpreter's modules and library.
std::vector<fs::path> own_libraries(const fs::path& shared, const std::string& program) {
  std::vector<fs::path> all;
  std::error_code none;
  for (const char* lib : {"lib", "lib64"})
    for (const auto& entry : fs::directory_iterator(shared / lib, none)) {
      const std::string name = entry.path().filename().string();
      if (name == program || name.starts_with("lib" + program + ".")) all.push_back(entry.path());
    }
  return all;
}

// Places that a program needs, each with the text of its link, or none: the folder above the `bin` of its path, else
// the file alone. So it is of a `bin` in a home folder. Of a folder that a user's programs share, it is the file and
// what in `lib` has its name. A file that is a link needs the places of what it names, too.
std::map<fs::path, std::string> installation(fs::path program) {
  std::map<fs::path, std::string> all;
  for (int links = 0; links < 40; ++links) {
    const fs::path folder = program.parent_path(), above = folder.parent_path();
    const bool in_bin = folder.filename() == "bin", shared = in_bin && is_shared(above);
    const bool whole = in_bin && !shared && !is_home(above), is_link = fs::is_symlink(program);
    if (shared)
      for (const fs::path& own : own_libraries(above, program.filename().string())) all[own] = "";
    fs::path next = is_link ? folder / fs::read_symlink(program) : fs::path();
    if (is_link) next = fs::canonical(next.parent_path()) / next.filename();
    all[whole ? above : program] = whole ? "" : next.string();
    if (!is_link) break;
    program = next;
  }
  return all;
}

bool inside(const fs::path& path, const fs::path& folder) {
  return std::mismatch(folder.begin(), folder.end(), path.begin(), path.end()).first == folder.end();
}

void show(Plan& plan, const fs::path& path, const std::string& link = "") {
  if (!fs::exists(path)) return;
  std::vector<std::string> above;
  for (fs::path folder = path.parent_path(); folder != folder.root_path(); folder = folder.parent_path())
    above.push_back(folder.string());
  plan.folders.insert(plan.folders.end(), above.rbegin(), above.rend());
  if (link.empty())
    plan.shown.push_back({confine::old_root + path.string(), path.string(), fs::is_directory(path)});
  else
    plan.links.emplace_back(path.string(), link);
}

// What a program of this system reads to start: no user's files, no devices but these.
void show_system(Plan& plan, const fs::path& program) {
  std::set<fs::path> shown;
  for (const char* name : {"/usr", "/bin", "/lib", "/lib64"}) {
    show(plan, name, fs::is_symlink(name) ? fs::read_symlink(name).string() : "");
    shown.insert(name);
  }
  for (const char* name : {"/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d",
                           "/etc/localtime", "/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"})
    show(plan, name);
  for (const auto& own : installation(program))
    if (std::none_of(shown.begin(), shown.end(), [&](const fs::path& s) { return inside(own.first, s); })) {
      show(plan, own.first, own.second);
      shown.insert(own.first);
    }
}

// The first process of the namespaces. All of them end with it.
class FirstProcess {
 public:
  explicit FirstProcess(const Plan& plan) {
    constexpr unsigned long own =
        CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP;
    process_ = static_cast<pid_t>(
        syscall(SYS_clone, own | (plan.root ? 0UL : static_cast<unsigned long>(CLONE_NEWUSER)) | SIGCHLD, 0, 0, 0, 0));
    if (process_ == 0) confine::run(plan);
    if (process_ < 0) refuse("namespaces", errno);
  }
  ~FirstProcess() { end(); }
  FirstProcess(const FirstProcess&) = delete;

  // Ends it and waits. Returns the signal that had ended it before; 0 = none.
  int end() {
    if (process_ < 0) return 0;
    kill(process_, SIGKILL);
    int status = 0;
    while (waitpid(process_, &status, 0) < 0 && errno == EINTR) {
    }
    process_ = -1;
    return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
  }

 private:
  pid_t process_ = -1;
};

// Reads what there is. Returns false at the end.
bool read_some(int from, std::string& said) {
  char bytes[8192];
  const ssize_t n = read(from, bytes, sizeof bytes);
  if (n > 0) said.append(bytes, static_cast<std::size_t>(n));
  if (said.size() > 2 * most_said) said.erase(0, said.size() - most_said);
  return n > 0 || (n < 0 && errno == EINTR);
}

// Waits for the report. Nothing: the time is over, or the process ended without one.
std::optional<Report> report_of(const Pipe& report, const Pipe& output, double seconds, ConfinedEnd& end) {
  using Clock = std::chrono::steady_clock;
  const auto last = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  pollfd both[] = {{report.from, POLLIN, 0}, {output.from, POLLIN, 0}};
  for (;;) {
    stop::check();
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(last - Clock::now()).count();
    if (left < 0) {
      end.late = true;
      return std::nullopt;
    }
    if (poll(both, 2, static_cast<int>(std::min<long long>(left + 1, 100))) <= 0) continue;
    if (both[1].revents && !read_some(output.from, end.said)) both[1].fd = -1;
    if (!both[0].revents) continue;
    Report out;
    const ssize_t n = read(report.from, &out, sizeof out);
    if (n < 0 && errno == EINTR) continue;
    return n == sizeof out ? std::optional(out) : std::nullopt;
  }
}

Plan plan_of(const ConfinedProgram& program) {
  const auto positive = [](auto number) { return static_cast<unsigned long>(std::max<decltype(number)>(number, 1)); };
  Plan plan;
  plan.root = geteuid() == 0;
  plan.program = found(program.words.at(0)).string();
  plan.user_map = fmt::format("{} {} 1", confine::nobody, geteuid());
  plan.group_map = fmt::format("{} {} 1", confine::nobody, getegid());
  plan.memory = positive(program.memory);
  plan.storage = positive(program.storage);
  plan.processes = positive(program.processes);
  plan.seconds = positive(std::ceil(std::min(program.seconds, 1e6)) + 1);
  plan.room = fmt::format("mode=1777,size={},nr_inodes=4096", plan.storage);
  show_system(plan, plan.program);
  return plan;
}

}  // namespace

ConfinedEnd run_confined(const ConfinedProgram& program) {
  Plan plan = plan_of(program);
  std::vector<std::string> words = program.words, variables;
  for (const auto& [name, value] : program.variables) variables.push_back(name + "=" + value);
  plan.words = pointers(words);
  plan.variables = pointers(variables);
  const Descriptor input(file_of(program.input));
  ConfinedEnd end;
  Pipe report, output;
  plan.input = input, plan.output = output.to(), plan.report = report.to();
  std::optional<Report> told;
  {
    FirstProcess first(plan);
    report.close_to(), output.close_to();
    told = report_of(report, output, program.seconds, end);
    if (const int signal = first.end(); !told && !end.late) end.signal = signal ? signal : SIGKILL;
  }
  while (read_some(output.from, end.said)) {
  }
  if (end.said.size() > most_said) end.said.erase(0, end.said.size() - most_said);
  if (end.late)
    log::warn(
        fmt::format("a confined program, {}, was ended after its {} s: what it runs takes longer, or does not end",
                    plan.program, program.seconds));
  if (!told) return end;
  if (told->step == confine::start)
    throw Error(Errc::io, fmt::format("got '{}', wanted to start it", std::strerror(told->value)), plan.program);
  if (told->step != confine::nothing) refuse(confine::name_of(told->step), told->value);
  end.code = WIFEXITED(told->value) ? WEXITSTATUS(told->value) : 0;
  end.signal = WIFSIGNALED(told->value) ? WTERMSIG(told->value) : 0;
  return end;
}

}  // namespace kvlab
