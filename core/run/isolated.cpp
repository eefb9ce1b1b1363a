#include "run/isolated.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>
#include <kvlab/error.hpp>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <fstream>
#include <optional>

#include "base/descriptor.hpp"
#include "base/program.hpp"
#include "base/stop.hpp"
#include "base/text.hpp"
#include "plugin/callback.hpp"
#include "run/cannot_go_on.hpp"

namespace kvlab {
namespace {

// The first character of a line is its kind.
constexpr char is_progress = 'p', is_no_memory = 'm', is_failure = '!', is_stop = 's', is_begun = 'b', is_written = 'w';

void tell(char kind, const std::string& text) {
  const std::string line = kind + text + "\n";
  if (write(telling::descriptor, line.data(), line.size()) < 0) return;  // nobody listens any more
}

// The number of processes that the kernel killed for memory since it started; nothing where it does not say.
std::optional<long> killed_for_memory() {
  std::ifstream in("/proc/vmstat");
  std::string key;
  for (long count = 0; in >> key >> count;)
    if (key == "oom_kill") return count;
  return std::nullopt;
}

pid_t start(const std::vector<std::string>& command, int told) {
  try {
    return start_program(command,
                         {.file = "/proc/self/exe", .reads = true, .descriptors = {{told, telling::descriptor}}});
  } catch (const Error& error) {
    throw CannotGoOn(Errc::io, fmt::format("{}, as a process for a cell", error.what()));
  }
}

// Reads the lines that a cell's process writes.
class Told {
 public:
  explicit Told(const ShowProgress& progress) : progress_(progress) {}
  // Returns false at the end of the pipe.
  bool read(int fd) {
    char bytes[4096];
    const ssize_t n = ::read(fd, bytes, sizeof bytes);
    if (n == 0 || (n < 0 && errno != EINTR && errno != EAGAIN)) return false;
    if (n > 0) rest_.append(bytes, static_cast<std::size_t>(n));
    for (std::size_t at = rest_.find('\n'); at != rest_.npos; at = rest_.find('\n')) {
      line(rest_.substr(0, at));
      rest_.erase(0, at + 1);
    }
    return n > 0;
  }
  std::optional<CellEnd> end;
  std::optional<std::string> stop;  // why no cell can be run
  bool begun = false, written = false;

 private:
  void line(const std::string& text) {
    if (text.empty()) return;
    const std::string what = text.substr(1);
    if (text[0] == is_no_memory) end = CellEnd{false, "oom", one_line(what)};
    if (text[0] == is_failure) end = CellEnd{false, "failed", one_line(what)};
    if (text[0] == is_stop) stop = one_line(what);
    if (text[0] == is_begun) begun = true;
    if (text[0] == is_written) written = true;
    int done = 0, total = 0, name = 0;
    if (text[0] == is_progress && std::sscanf(what.c_str(), "%d %d %n", &done, &total, &name) == 2 && progress_)
      progress_(one_line(what.substr(static_cast<std::size_t>(name))), done, total);
  }

  const ShowProgress& progress_;
  std::string rest_;
};

CellEnd end_of(int status, const std::optional<CellEnd>& told, bool memory_kill) {
  if (told) return *told;
  if (!WIFSIGNALED(status))
    return {false, "failed",
            fmt::format("got exit code {} of the cell's process, wanted a result", WEXITSTATUS(status))};
  if (WTERMSIG(status) == SIGKILL && memory_kill)
    return {false, "oom",
            "got signal 9 for the cell's process, wanted memory for it: the system killed it for what it took"};
  return {false, "failed",
          fmt::format("got signal {} ({}) for the cell's process, wanted a result", WTERMSIG(status),
                      strsignal(WTERMSIG(status)))};
}

}  // namespace

CellEnd run_cell_process(const std::vector<std::string>& command, const ShowProgress& progress) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0)
    throw CannotGoOn(Errc::io, fmt::format("got '{}', wanted a pipe to a cell's process", std::strerror(errno)));
  const Descriptor from(ends[0]);
  const auto kills = killed_for_memory();
  std::optional<Descriptor> to(std::in_place, ends[1]);
  const pid_t child = start(command, *to);
  to.reset();
  fcntl(from, F_SETFL, O_NONBLOCK);

  Told told(progress);
  int status = 0, handed_on = 0;
  for (bool open = true, runs = true; runs;) {
    pollfd wait{from, POLLIN, 0};
    if (open)
      poll(&wait, 1, 50);
    else
      usleep(5000);
    runs = waitpid(child, &status, WNOHANG) == 0;
    while (open && poll(&wait, 1, 0) > 0 && (open = told.read(from))) {
    }
    if (const int signal = stop::requested(); signal && !handed_on && runs) kill(child, handed_on = signal);
  }
  if (told.written) return {true, "", ""};
  stop::check();
  if (told.stop) throw CannotGoOn(Errc::io, *told.stop);
  if (!told.begun && !told.end && WIFEXITED(status))
    throw CannotGoOn(Errc::io, fmt::format("got exit code {} of the cell's process, wanted it to come to its cell",
                                           WEXITSTATUS(status)));
  const auto after = killed_for_memory();
  return end_of(status, told.end, !kills || !after || *after > *kills);
}

namespace telling {

void begin() {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  pollfd reader{descriptor, POLLOUT, 0};
  if (poll(&reader, 1, 0) > 0 && (reader.revents & POLLERR)) _exit(1);  // the other process has ended before
  signal(SIGPIPE, SIG_IGN);
  fcntl(descriptor, F_SETFD, FD_CLOEXEC);
  name_callback_at_end(descriptor);
}

void progress(const std::string& pass, int done, int total) {
  tell(is_progress, fmt::format("{} {} {}", done, total, pass));
}
void no_memory(const std::string& what) { tell(is_no_memory, one_line(what)); }
void cannot_go_on(const std::string& what) { tell(is_stop, one_line(what)); }
void begun() { tell(is_begun, ""); }
void written() { tell(is_written, ""); }

}  // namespace telling
}  // namespace kvlab
