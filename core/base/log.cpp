#include "base/log.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <spdlog/logger.h>
#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/base_sink.h>
#include <spdlog/sinks/basic_file_sink.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <kvlab/error.hpp>
#include <memory>
#include <mutex>
#include <set>
#include <utility>

#include "base/terminal.hpp"
#include "base/text.hpp"
#include "base/utf8.hpp"

namespace kvlab::log {
namespace {

thread_local int muted = 0;  // Muted that live

constexpr std::string_view file_head = "# kvlab log: UTC, level, message\n";
constexpr std::pair<const char*, Level> level_words[] = {{"debug", Level::debug},
                                                         {"info", Level::info},
                                                         {"warning", Level::warning},
                                                         {"error", Level::error},
                                                         {"off", Level::off}};

spdlog::level::level_enum spd(Level level) {
  switch (level) {
    case Level::debug: return spdlog::level::debug;
    case Level::info: return spdlog::level::info;
    case Level::warning: return spdlog::level::warn;
    case Level::error: return spdlog::level::err;
    case Level::off: break;
  }
  return spdlog::level::off;
}

// Indents every line after the first, so that none can be taken for another message.
std::string indented(std::string_view text) {
  while (!text.empty() && text.back() == '\n') text.remove_suffix(1);
  std::string out;
  for (const char c : printable(text)) {
    out += c;
    if (c == '\n') out += "  ";
  }
  return out;
}

// The first `most` characters, or all if there are fewer.
std::string_view beginning(std::string_view text, std::size_t most) {
  std::size_t at = 0;
  for (std::size_t n = 0; n < most && at < text.size(); ++n) at += std::max<std::size_t>(1, utf8_length(text, at));
  return text.substr(0, at);
}

class Stderr final : public spdlog::sinks::base_sink<std::mutex> {
 public:
  Stderr() {
    terminal_ = is_terminal(STDERR_FILENO);
    colour_ = takes_colour(STDERR_FILENO);
  }
  void status(std::string_view line) {
    if (!terminal_ || !should_log(spdlog::level::info)) return;
    const std::lock_guard lock(mutex_);
    if (line.empty() && status_.empty()) return;
    winsize size{};
    const bool known = ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 1;
    // A line that wraps could not be erased.
    status_ = beginning(line, known ? size.ws_col - 1u : 79u);
    write("\r\x1b[K" + status_);
  }

 protected:
  void sink_it_(const spdlog::details::log_msg& m) override {
    std::string text = status_.empty() ? "" : "\r\x1b[K";
    text += prefix(m.level);
    text.append(m.payload.data(), m.payload.size());
    write(text + "\n" + status_);
  }
  void flush_() override {}

 private:
  std::string prefix(spdlog::level::level_enum level) const {
    const auto coloured = [&](const char* word, const char* colour) {
      return colour_ ? std::string("\x1b[") + colour + "m" + word + "\x1b[0m " : std::string(word) + " ";
    };
    if (level == spdlog::level::err) return coloured("error:", "1;31");
    if (level == spdlog::level::warn) return coloured("warning:", "1;33");
    if (level == spdlog::level::debug) return coloured("debug:", "2");
    return "";
  }
  static void write(const std::string& text) {
    std::fwrite(text.data(), 1, text.size(), stderr);
    std::fflush(stderr);
  }

  bool terminal_ = false, colour_ = false;
  std::string status_;
};

// One writer on stderr and perhaps one on a file.
struct Outputs {
  std::shared_ptr<Stderr> console = std::make_shared<Stderr>();
  std::shared_ptr<spdlog::logger> logger = std::make_shared<spdlog::logger>("kvlab", console);
  bool file_failed = false;

  explicit Outputs(const Settings& s) {
    console->set_level(spd(s.level));
    logger->set_level(spdlog::level::debug);
    logger->flush_on(spdlog::level::debug);
    if (!s.file.empty()) add_file(s.file);
    logger->set_error_handler([this](const std::string& what) {
      if (std::exchange(file_failed, true)) return;
      const std::string text = "the log file is not complete: " + indented(what);
      console->log({"kvlab", spdlog::level::warn, text});
    });
  }

 private:
  void add_file(const std::string& path) {
    auto file = std::make_shared<spdlog::sinks::basic_file_sink_mt>(path);
    file->set_formatter(
        std::make_unique<spdlog::pattern_formatter>("%Y-%m-%dT%H:%M:%S.%eZ %l %v", spdlog::pattern_time_type::utc));
    logger->sinks().push_back(std::move(file));
  }
};

struct Door {
  std::mutex guard;
  std::shared_ptr<Outputs> outputs = std::make_shared<Outputs>(Settings{});
  std::set<std::string, std::less<>> warned;
  std::vector<Collected*> collecting;
};

Door& door() {
  static auto& once = *new Door;  // never destroyed: threads may log until the process ends
  return once;
}

std::shared_ptr<Outputs> outputs() {
  const std::lock_guard lock(door().guard);
  return door().outputs;
}

void say(Level level, std::string_view text) { outputs()->logger->log(spd(level), indented(text)); }

[[noreturn]] void refuse(const std::string& file, const std::string& got, const char* wanted) {
  throw Error(Errc::io, "got " + got + ", wanted " + wanted, "log file " + file);
}

// An older log of kvlab is appended to. Any other file is refused and stays unchanged.
void check_file(const std::string& path) {
  constexpr const char* wanted = "a new file or a log of kvlab";
  struct stat s {};
  if (stat(path.c_str(), &s) == 0 && !S_ISREG(s.st_mode)) refuse(path, "something that is no regular file", wanted);
  const int fd = ::open(path.c_str(), O_RDWR | O_APPEND | O_CREAT | O_NONBLOCK | O_CLOEXEC, 0666);
  if (fd < 0) refuse(path, std::string("'") + std::strerror(errno) + "'", "a file that can be written");
  char head[file_head.size()];
  const ssize_t there = ::pread(fd, head, sizeof head, 0);
  const bool ours = there == 0 || (there > 0 && std::string_view(head, static_cast<std::size_t>(there)) == file_head);
  const bool writable = there != 0 || ::write(fd, file_head.data(), file_head.size()) == ssize_t{file_head.size()};
  const int reason = errno;
  ::close(fd);
  if (!ours) refuse(path, "a file that is no log", wanted);
  if (!writable) refuse(path, std::string("'") + std::strerror(reason) + "'", "a file that can be written");
}

}  // namespace

Level level_of_environment() {
  const char* given = std::getenv("KVLAB_LOG");
  if (!given || !*given) return Level::info;
  for (const auto& [word, level] : level_words)
    if (std::strcmp(word, given) == 0) return level;
  throw Error(Errc::config, std::string("got the level '") + given + "', wanted debug, info, warning, error or off",
              "KVLAB_LOG");
}

void start(const Settings& settings) {
  if (!settings.file.empty()) check_file(settings.file);
  auto fresh = std::make_shared<Outputs>(settings);
  const std::lock_guard lock(door().guard);
  door().outputs = std::move(fresh);
  door().warned.clear();
}

void debug(std::string_view text) { say(Level::debug, text); }
void info(std::string_view text) { say(Level::info, text); }
void error(std::string_view text) { say(Level::error, text); }

void warn(std::string_view text) {
  if (muted > 0) return;
  {
    const std::lock_guard lock(door().guard);
    for (Collected* c : door().collecting)
      if (std::find(c->warnings_.begin(), c->warnings_.end(), text) == c->warnings_.end())
        c->warnings_.emplace_back(text);
    if (!door().warned.emplace(text).second) return;
  }
  say(Level::warning, text);
}

void status(std::string_view line) { outputs()->console->status(indented(line)); }

Timed::~Timed() {
  const std::chrono::duration<double, std::milli> ms = std::chrono::steady_clock::now() - start_;
  debug(fmt::format("{}: {:.1f} ms", what_, ms.count()));
}

Muted::Muted() { ++muted; }
Muted::~Muted() { --muted; }

Collected::Collected() {
  const std::lock_guard lock(door().guard);
  door().collecting.push_back(this);
}

Collected::~Collected() {
  const std::lock_guard lock(door().guard);
  auto& all = door().collecting;
  all.erase(std::find(all.begin(), all.end(), this));
}

std::vector<std::string> Collected::warnings() const {
  const std::lock_guard lock(door().guard);
  return warnings_;
}

}  // namespace kvlab::log
