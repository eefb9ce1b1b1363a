#include "base/program.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <kvlab/error.hpp>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <sstream>

#include "base/descriptor.hpp"

namespace kvlab {
namespace {

std::vector<std::string> environment_with(const Environment& set) {
  std::vector<std::string> all;
  for (char** entry = environ; *entry; ++entry) {
    const std::string text = *entry;
    if (!set.count(text.substr(0, text.find('=')))) all.push_back(text);
  }
  for (const auto& [name, value] : set) all.push_back(name + "=" + value);
  return all;
}

ProgramEnd end_of(int status) {
  return {WIFEXITED(status) ? WEXITSTATUS(status) : 0, WIFSIGNALED(status) ? WTERMSIG(status) : 0, ""};
}

// posix_spawn cannot ask for a signal at this process's end. Between fork and exec there are only calls that other
// threads' locks cannot stop.
pid_t fork_program(const char* file, char* const* words, char* const* variables, const ProgramStart& how) {
  const pid_t parent = getpid(), child = fork();
  if (child != 0) return child;
  prctl(PR_SET_PDEATHSIG, how.at_our_end);
  if (getppid() != parent) _exit(127);
  if (!how.reads) dup2(open("/dev/null", O_RDONLY | O_CLOEXEC), STDIN_FILENO);
  for (const auto& [own, its] : how.descriptors) dup2(own, its);
  execvpe(file, words, variables);
  _exit(127);
}

using Clock = std::chrono::steady_clock;

// Adds what the pipe gives until its end or `end`. Returns whether its end came.
bool read_until(int from, Clock::time_point end, std::string& said) {
  char bytes[4096];
  for (;;) {
    pollfd wait{from, POLLIN, 0};
    const long left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now()).count();
    if (left <= 0) return false;
    const int ready = poll(&wait, 1, static_cast<int>(std::min(left, 1'000'000L)));
    if (ready < 0 && errno != EINTR) return true;
    if (ready <= 0) continue;
    const ssize_t n = read(from, bytes, sizeof bytes);
    if (n > 0)
      said.append(bytes, static_cast<std::size_t>(n));
    else if (n == 0 || errno != EINTR)
      return true;
  }
}

// Waits for a program's end until `end`. Nothing: it goes on.
std::optional<ProgramEnd> end_until(pid_t program, Clock::time_point end) {
  ProgramEnd out;
  for (long wait = 1'000; !has_ended(program, out); wait = std::min(2 * wait, 50'000L)) {
    if (Clock::now() >= end) return std::nullopt;
    usleep(static_cast<useconds_t>(wait));
  }
  return out;
}

}  // namespace

std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> all;
  for (std::string& text : texts) all.push_back(text.data());
  all.push_back(nullptr);
  return all;
}

pid_t start_program(std::vector<std::string> words, const ProgramStart& how) {
  std::vector<std::string> variables = environment_with(how.set);
  const std::string file = how.file.empty() ? words.front() : how.file;
  std::fflush(stdout);
  if (how.at_our_end) {
    const pid_t child = fork_program(file.c_str(), pointers(words).data(), pointers(variables).data(), how);
    if (child < 0) throw Error(Errc::io, fmt::format("got '{}', wanted to start it", std::strerror(errno)), file);
    return child;
  }
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  if (!how.reads) posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  for (const auto& [own, its] : how.descriptors) posix_spawn_file_actions_adddup2(&actions, own, its);
  pid_t child = -1;
  const int error =
      posix_spawnp(&child, file.c_str(), &actions, nullptr, pointers(words).data(), pointers(variables).data());
  posix_spawn_file_actions_destroy(&actions);
  if (error) throw Error(Errc::io, fmt::format("got '{}', wanted to start it", std::strerror(error)), file);
  return child;
}

ProgramEnd wait_for(pid_t program) {
  int status = 0;
  while (waitpid(program, &status, 0) < 0)
    if (errno != EINTR) return {1, 0, ""};
  return end_of(status);
}

ProgramEnd run_program(const std::vector<std::string>& words, std::chrono::seconds limit) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0)
    throw Error(Errc::io, fmt::format("got '{}', wanted a pipe", std::strerror(errno)), words.front());
  const Descriptor from(ends[0]);
  pid_t child = -1;
  {
    const Descriptor to(ends[1]);
    child = start_program(words, {.descriptors = {{to, STDOUT_FILENO}, {to, STDERR_FILENO}}});
  }
  std::string said;
  const auto last = limit.count() ? Clock::now() + limit : Clock::time_point::max();
  std::optional<ProgramEnd> ended;  // a program may close its outputs and go on
  if (read_until(from, last, said)) ended = limit.count() ? end_until(child, last) : wait_for(child);
  if (!ended) kill(child, SIGKILL);
  ProgramEnd end = ended ? *ended : wait_for(child);
  end.said = std::move(said);
  end.in_time = ended.has_value();
  return end;
}

std::string path_of_program(const std::string& name) {
  const auto runs = [](const std::string& path) {
    struct stat file {};
    return stat(path.c_str(), &file) == 0 && S_ISREG(file.st_mode) && access(path.c_str(), X_OK) == 0;
  };
  if (name.find('/') != name.npos) return runs(name) ? name : "";
  const char* path = std::getenv("PATH");
  std::istringstream folders(path ? path : "/bin:/usr/bin");
  for (std::string folder; std::getline(folders, folder, ':');)
    if (const std::string file = (folder.empty() ? "." : folder) + "/" + name; runs(file)) return file;
  return "";
}

bool has_ended(pid_t process, ProgramEnd& end) {
  int status = 0;
  if (waitpid(process, &status, WNOHANG) != process) return false;
  end = end_of(status);
  return true;
}

std::string shell_quoted(const std::string& word) {
  std::string text = "'";
  for (const char c : word) text += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return text + "'";
}

std::string shell_quoted(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : " ") + shell_quoted(word);
  return text;
}

}  // namespace kvlab
