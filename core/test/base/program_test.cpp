// Programs that this process starts.
#include "base/program.hpp"

#include <catch2/catch.hpp>
#include <csignal>
#include <cstdlib>
#include <filesystem>

#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "support/child.hpp"

using namespace kvlab;
using Clock = std::chrono::steady_clock;

TEST_CASE("a program that runs longer than its limit is ended, and what it said stays") {
  const auto begin = Clock::now();
  const ProgramEnd late = run_program({"sh", "-c", "echo first; exec sleep 100"}, std::chrono::seconds(3));
  CHECK(Clock::now() - begin < std::chrono::seconds(50));
  CHECK_FALSE(late.in_time);
  CHECK_FALSE(late.good());
  CHECK(late.signal == SIGKILL);
  CHECK(late.said == "first\n");

  const ProgramEnd silent =
      run_program({"sh", "-c", "echo first; exec sleep 100 >/dev/null 2>&1"}, std::chrono::seconds(3));
  CHECK(Clock::now() - begin < std::chrono::seconds(50));
  CHECK_FALSE(silent.in_time);
  CHECK(silent.signal == SIGKILL);
  CHECK(silent.said == "first\n");

  const ProgramEnd soon = run_program({"sh", "-c", "echo out; echo err >&2; exit 3"}, std::chrono::seconds(100));
  CHECK(soon.in_time);
  CHECK(soon.code == 3);
  CHECK(soon.said == "out\nerr\n");
  const ProgramEnd quiet =
      run_program({"sh", "-c", "echo out; exec sh -c 'sleep 0.2; exit 4' >/dev/null 2>&1"}, std::chrono::seconds(100));
  CHECK(quiet.in_time);
  CHECK(quiet.code == 4);
}

TEST_CASE("a program is there where a folder of PATH has it") {
  const test::Folder folder;
  const std::string before = std::getenv("PATH");
  const std::string file = folder.write("mine", "#!/bin/sh\n");
  setenv("PATH", ("/nowhere:" + (folder / ".")).c_str(), 1);
  CHECK(path_of_program("mine").empty());  // it may not be run
  CHECK(path_of_program(file).empty());
  chmod(file.c_str(), 0755);
  CHECK(path_of_program("mine") == folder / "./mine");
  CHECK(path_of_program(file) == file);
  CHECK(path_of_program("other").empty());
  mkdir((folder / "other").c_str(), 0755);
  CHECK(path_of_program("other").empty());  // a folder is no program
  setenv("PATH", before.c_str(), 1);
}

TEST_CASE("a program that was started for it gets its signal when this process is killed") {
  int told[2], alive[2];
  REQUIRE((pipe(told) == 0 && pipe(alive) == 0));
  const pid_t process = fork();
  if (process == 0) {
    // It holds `alive` open and has no other end than the signal.
    const pid_t program = start_program({"sleep", "100"}, {.at_our_end = SIGTERM});
    if (write(told[1], &program, sizeof program) != sizeof program) _exit(1);
    pause();
  }
  close(alive[1]);
  pid_t program = 0;
  REQUIRE(read(told[0], &program, sizeof program) == sizeof program);
  CHECK(kill(program, 0) == 0);
  kill(process, SIGKILL);
  waitpid(process, nullptr, 0);
  char byte = 0;
  const auto begin = Clock::now();
  CHECK(read(alive[0], &byte, 1) == 0);  // at the end of all that hold it
  CHECK(Clock::now() - begin < std::chrono::seconds(50));
  close(told[0]), close(told[1]), close(alive[0]);
}
