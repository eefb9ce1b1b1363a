#include "base/log.hpp"

#include <fcntl.h>
#include <poll.h>
#include <pty.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <kvlab/error.hpp>
#include <regex>
#include <sstream>
#include <thread>

#include "base/text.hpp"

using namespace kvlab;
using Catch::Matchers::Contains;

namespace {

struct Folder {
  Folder() {
    char name[] = "/tmp/kvlab-log-XXXXXX";
    path = mkdtemp(name);
  }
  ~Folder() {
    log::start({});
    std::filesystem::remove_all(path);
  }
  std::string operator/(const char* name) const { return (path / name).string(); }
  std::filesystem::path path;
};

std::string text_of(const std::string& file) {
  std::ifstream in(file, std::ios::binary);
  std::stringstream all;
  all << in.rdbuf();
  return all.str();
}

// The text that body() writes to stderr.
template <class Body>
std::string said(const Folder& folder, Body body) {
  const std::string file = folder / "stderr";
  std::fflush(stderr);
  const int before = dup(STDERR_FILENO), fd = open(file.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  dup2(fd, STDERR_FILENO);
  body();
  std::fflush(stderr);
  dup2(before, STDERR_FILENO);
  close(before), close(fd);
  return text_of(file);
}

void say_all() {
  log::debug("d");
  log::info("i");
  log::warn("w");
  log::error("e");
}

struct Variable {
  Variable(const char* name_, const char* value) : name(name_) { setenv(name, value, 1); }
  ~Variable() { unsetenv(name); }
  const char* name;
};

// The text that body() writes to stderr if that is a terminal of 20 columns.
template <class Body>
std::string said_to_terminal(Body body) {
  const winsize size{24, 20, 0, 0};
  int master = -1, slave = -1;
  REQUIRE(openpty(&master, &slave, nullptr, nullptr, &size) == 0);
  std::fflush(stderr);
  const int before = dup(STDERR_FILENO);
  dup2(slave, STDERR_FILENO);
  body();
  std::fflush(stderr);
  dup2(before, STDERR_FILENO);
  close(before);
  const std::string end = "that is all";  // a terminal delivers text late and in pieces
  REQUIRE(write(slave, end.data(), end.size()) == static_cast<ssize_t>(end.size()));
  std::string text;
  pollfd ready{master, POLLIN, 0};
  for (char piece[4096]; !text.ends_with(end) && poll(&ready, 1, 10'000) > 0;)
    text.append(piece, static_cast<std::size_t>(std::max<ssize_t>(0, read(master, piece, sizeof piece))));
  close(master), close(slave);
  REQUIRE(text.ends_with(end));
  return text.substr(0, text.size() - end.size());
}

}  // namespace

TEST_CASE("log: stderr shows a level and those above it, without colour in a pipe", "[log]") {
  const Folder folder;
  const auto at = [&](log::Level level) {
    return said(folder, [&] {
      log::start({level, ""});
      say_all();
    });
  };
  CHECK(at(log::Level::debug) == "debug: d\ni\nwarning: w\nerror: e\n");
  CHECK(at(log::Level::info) == "i\nwarning: w\nerror: e\n");
  CHECK(at(log::Level::warning) == "warning: w\nerror: e\n");
  CHECK(at(log::Level::error) == "error: e\n");
  CHECK(at(log::Level::off).empty());
  CHECK(said(folder, [] { log::status("nobody rewrites a pipe"); }).empty());
}

TEST_CASE("log: a terminal has colours, unless NO_COLOR forbids them, and none where it is dumb", "[log]") {
  const Folder folder;
  const auto shown = [&] {
    return said_to_terminal([&] {
      log::start({log::Level::debug, folder / "run.log"});
      say_all();
    });
  };
  const Variable term("TERM", "xterm");
  unsetenv("NO_COLOR");
  CHECK(shown() == "\x1b[2mdebug:\x1b[0m d\r\ni\r\n\x1b[1;33mwarning:\x1b[0m w\r\n\x1b[1;31merror:\x1b[0m e\r\n");
  const std::string plain = "debug: d\r\ni\r\nwarning: w\r\nerror: e\r\n";
  {
    const Variable forbidden("NO_COLOR", "1");
    CHECK(shown() == plain);
  }
  const Variable dumb("TERM", "dumb");
  CHECK(shown() == plain);
  CHECK(text_of(folder / "run.log").find('\x1b') == std::string::npos);
}

TEST_CASE("log: on a terminal messages appear above the line that is rewritten", "[log]") {
  const Folder folder;
  const Variable term("TERM", "xterm");
  const std::string erase = "\r\x1b[K";
  CHECK(said_to_terminal([] {
          log::start({});
          log::status("");
          log::status("working");
          log::info("a note");
          log::status("a line that would wrap");
          log::status("");
          log::info("done");
        }) == erase + "working" + erase + "a note\r\nworking" + erase + "a line that would w" + erase + "done\r\n");
  CHECK(said_to_terminal([] {
          log::start({log::Level::warning, ""});
          log::status("hidden, as notes are");
        }).empty());
}

TEST_CASE("log: KVLAB_LOG names a level", "[log]") {
  CHECK(log::level_of_environment() == log::Level::info);
  for (const auto& [word, level] : {std::pair{"debug", log::Level::debug},
                                    {"info", log::Level::info},
                                    {"warning", log::Level::warning},
                                    {"error", log::Level::error},
                                    {"off", log::Level::off},
                                    {"", log::Level::info}}) {
    const Variable set("KVLAB_LOG", word);
    CHECK(log::level_of_environment() == level);
  }
  const Variable set("KVLAB_LOG", "loud");
  CHECK_THROWS_WITH(log::level_of_environment(),
                    "KVLAB_LOG: got the level 'loud', wanted debug, info, warning, error or off");
}

TEST_CASE("log: a file has times and levels, goes on, and takes what stderr hides", "[log]") {
  const Folder folder;
  const std::string file = folder / "run.log";
  const std::string shown = said(folder, [&] {
    log::start({log::Level::warning, file});
    say_all();
    log::start({log::Level::debug, file});
    say_all();
  });
  CHECK(shown == "warning: w\nerror: e\ndebug: d\ni\nwarning: w\nerror: e\n");
  const std::string time = "[0-9]{4}-[01][0-9]-[0-3][0-9]T[0-2][0-9]:[0-5][0-9]:[0-6][0-9]\\.[0-9]{3}Z ";
  const std::string all = time + "debug d\n" + time + "info i\n" + time + "warning w\n" + time + "error e\n";
  CHECK(std::regex_match(text_of(file), std::regex("# kvlab log[^\n]*\n" + all + all)));
}

TEST_CASE("log: what is no log of kvlab is refused and left alone", "[log]") {
  const Folder folder;
  const auto refused = [](const std::string& file) {
    CHECK_THROWS_WITH(log::start({log::Level::info, file}), Contains("wanted") && Contains(file));
  };
  const std::string notes = folder / "notes.txt", fifo = folder / "fifo", shorter = folder / "short";
  std::ofstream(notes) << "two lines that are somebody's own,\nand long enough\n";
  std::ofstream(shorter) << "# kvlab";
  mkfifo(fifo.c_str(), 0600);
  refused(notes);
  refused(shorter);
  refused(fifo);  // does not wait for a reader
  refused(folder.path.string());
  refused(folder / "no/such/folder.log");
  refused("/dev/null");
  refused("/proc/version");
  CHECK(text_of(notes) == "two lines that are somebody's own,\nand long enough\n");
  CHECK(text_of(shorter) == "# kvlab");
}

TEST_CASE("log: a full disk is said once and ends nothing", "[log]") {
  const Folder folder;
  const std::string file = folder / "run.log";
  const std::string shown = said(folder, [&] {
    log::start({log::Level::warning, file});
    log::info(std::string(4096, 'x'));  // so the limit leaves room for stderr's file
    rlimit before{};
    getrlimit(RLIMIT_FSIZE, &before);
    const auto handler = std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{std::filesystem::file_size(file), before.rlim_max};
    setrlimit(RLIMIT_FSIZE, &limit);
    log::warn("one");
    log::warn("two");
    setrlimit(RLIMIT_FSIZE, &before);
    std::signal(SIGXFSZ, handler);
  });
  CHECK_THAT(shown, Contains("warning: one\n") && Contains("warning: two\n"));
  CHECK_THAT(shown, Contains("warning: the log file is not complete"));
  CHECK(shown.find("not complete") == shown.rfind("not complete"));
}

TEST_CASE("log: a message has no power over a terminal and no line that looks like another message", "[log]") {
  const Folder folder;
  const std::string file = folder / "run.log";
  const std::string shown = said(folder, [&] {
    log::start({log::Level::info, file});
    log::warn(
        "\x1b[2J\r\a\x7f\xc2\x9b"
        "31m \xe2\x80\xae \xff Grüße\nerror: forged\n");
  });
  const std::string wanted = "\\x1b[2J\\x0d\\x07\\x7f\\x9b31m \\u202e \xef\xbf\xbd Grüße\n  error: forged\n";
  CHECK(shown == "warning: " + wanted);
  CHECK_THAT(text_of(file), Catch::Matchers::EndsWith("Z warning " + wanted));
}

TEST_CASE("log: warnings are collected from any thread, shown or not, and shown once", "[log]") {
  const Folder folder;
  const std::string shown = said(folder, [] {
    log::start({log::Level::error, ""});
    log::warn("before");

    {
      const log::Collected outer;
      log::info("no warning");
      log::warn("a");
      {
        const log::Collected inner;
        std::vector<std::thread> threads;
        for (int t = 0; t < 4; ++t)
          threads.emplace_back([] {
            for (int i = 0; i < 100; ++i) log::warn("b");
          });
        for (auto& t : threads) t.join();
        log::warn("a");
        CHECK(inner.warnings() == std::vector<std::string>{"b", "a"});
      }
      CHECK(outer.warnings() == std::vector<std::string>{"a", "b"});
    }
    log::start({});
    for (int i = 0; i < 3; ++i) {
      const log::Collected cell;
      log::warn("every cell");
      CHECK(cell.warnings() == std::vector<std::string>{"every cell"});
    }
  });
  CHECK(shown == "warning: every cell\n");
}

TEST_CASE("log: a muted thread's warnings are neither shown nor gathered, another's are", "[log]") {
  const Folder folder;
  const std::string shown = said(folder, [] {
    log::start({});
    const log::Collected all;
    {
      const log::Muted trial;
      const log::Muted within;
      log::warn("of a trial");
      std::thread([] { log::warn("of another thread"); }).join();
    }
    log::warn("of the run");
    CHECK(all.warnings() == std::vector<std::string>{"of another thread", "of the run"});
  });
  CHECK(shown == "warning: of another thread\nwarning: of the run\n");
}

TEST_CASE("log: threads' lines do not mix", "[log]") {
  const Folder folder;
  const std::string file = folder / "run.log";
  const std::string shown = said(folder, [&] {
    log::start({log::Level::info, file});
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t)
      threads.emplace_back([t] {
        for (int i = 0; i < 50; ++i) log::info(std::string(200, static_cast<char>('a' + t)));
      });
    for (auto& t : threads) t.join();
  });
  std::istringstream lines(shown);
  int whole = 0;
  for (std::string line; std::getline(lines, line);)
    whole += line.size() == 200 && line.find_first_not_of(line[0]) == std::string::npos;
  CHECK(whole == 200);
  CHECK(shown.size() == 200 * 201);
}
