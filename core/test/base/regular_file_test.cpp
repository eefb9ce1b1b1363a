#include "base/regular_file.hpp"

#include <sys/stat.h>

#include <catch2/catch.hpp>

#include "test/model/tiny_files.hpp"

using namespace kvlab;
using namespace kvlab::test;

TEST_CASE("a regular file is read, whole or its beginning") {
  const TempDir dir;
  const std::string text = std::string(100000, 'a') + std::string("\0b", 2);
  const auto path = write_file(dir / "f", text);
  CHECK(read_file(path) == text);
  CHECK(read_file(path, "a file", 5) == "aaaaa");
  CHECK(read_file(write_file(dir / "empty", "")).empty());
  CHECK(read_file("/proc/self/stat").size() > 10);  // stat() gives 0 bytes
  char end[8];
  CHECK(RegularFile(path).read(text.size() - 2, end, sizeof end) == 2);
  CHECK(end[1] == 'b');
}

TEST_CASE("a FIFO, a device, a folder and nothing are refused by name, at once") {
  const TempDir dir;
  REQUIRE(::mkfifo((dir / "fifo").c_str(), 0600) == 0);  // nobody writes: opening it would wait for ever
  std::filesystem::create_symlink(dir / "fifo", dir / "link");
  const auto refused = [](const std::filesystem::path& path) {
    return message_of([&] { read_file(path, "a text file"); });
  };
  CHECK(refused(dir / "fifo") == (dir / "fifo").string() + ": got a FIFO, wanted a text file");
  CHECK(refused(dir / "link") == (dir / "link").string() + ": got a FIFO, wanted a text file");
  CHECK(refused("/dev/zero") == "/dev/zero: got a device, wanted a text file");
  CHECK(refused(dir.path()) == dir.path().string() + ": got a folder, wanted a text file");
  CHECK(refused(dir / "none").find("got 'No such file or directory' when opening") != std::string::npos);
}
