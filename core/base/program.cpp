#include "base/program.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>
#include <kvlab/error.hpp>

#include <cerrno>
#include <cstdio>
#include <cstring>

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

std::vector<char*> pointers(std::vector<std::string>& words) {
  std::vector<char*> all;
  for (std::string& word : words) all.push_back(word.data());
  all.push_back(nullptr);
  return all;
}

ProgramEnd end_of(int status) {
  return {WIFEXITED(status) ? WEXITSTATUS(status) : 0, WIFSIGNALED(status) ? WTERMSIG(status) : 0, ""};
}

}  // namespace

pid_t start_program(std::vector<std::string> words, const ProgramStart& how) {
  std::vector<std::string> variables = environment_with(how.set);
  const std::string file = how.file.empty() ? words.front() : how.file;
  std::fflush(stdout);
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

ProgramEnd run_program(const std::vector<std::string>& words) {
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
  char bytes[4096];
  for (ssize_t n = 0; (n = read(from, bytes, sizeof bytes)) > 0 || (n < 0 && errno == EINTR);)
    if (n > 0) said.append(bytes, static_cast<std::size_t>(n));
  ProgramEnd end = wait_for(child);
  end.said = std::move(said);
  return end;
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
