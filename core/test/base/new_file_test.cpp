#include "base/new_file.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <filesystem>
#include <fstream>
#include <kvlab/error.hpp>
#include <sstream>

#include "support/full_disk.hpp"
#include "support/temporary_folder.hpp"

using namespace kvlab;
namespace fs = std::filesystem;

namespace {

std::string bytes_of(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream out;
  out << in.rdbuf();
  return out.str();
}

void put(const std::string& path, const std::string& bytes) {
  NewFile file(path, bytes.size());
  file.write(bytes.data(), bytes.size());
  file.take_name();
}

std::size_t entries(const std::string& folder) {
  return static_cast<std::size_t>(std::distance(fs::directory_iterator(folder), fs::directory_iterator()));
}

// The number of a process that has ended.
pid_t ended_process() {
  const pid_t child = fork();
  if (child == 0) _exit(0);
  waitpid(child, nullptr, 0);
  return child;
}

}  // namespace

TEST_CASE("at every limit of bytes a file is whole or as it was") {
  const test::TemporaryFolder dir;
  const std::string path = dir / "a", before = "before", after(3000, 'x');
  for (std::size_t limit = 0; limit <= after.size(); ++limit) {
    CAPTURE(limit);
    std::ofstream(path) << before;
    std::string message;
    {
      const test::FileSizeLimit held(limit);
      try {
        put(path, after);
      } catch (const Error& e) {
        message = e.what();
        REQUIRE(e.code() == Errc::io);
      }
    }
    REQUIRE(message.empty() == (limit == after.size()));
    if (!message.empty())
      REQUIRE_THAT(message, Catch::Contains("after " + std::to_string(limit) + " of 3000 bytes") &&
                                Catch::Contains("bytes)") && Catch::Contains(path));
    REQUIRE(bytes_of(path) == (message.empty() ? after : before));
    REQUIRE(entries(dir / "") == 1);
  }
}

TEST_CASE("a file that is given up leaves nothing") {
  const test::TemporaryFolder dir;
  { NewFile(dir / "a", 4).write("half", 4); }
  CHECK(entries(dir / "") == 0);
  CHECK_THROWS_AS(NewFile(dir / "no/folder/a", 4), Error);
  fs::create_directory(dir / "folder");
  CHECK_THROWS_AS(put(dir / "folder", "x"), Error);
  CHECK(entries(dir / "") == 1);
  CHECK(fs::is_directory(dir / "folder"));
}

TEST_CASE("a symbolic link stays and the file that it leads to is written") {
  const test::TemporaryFolder dir;
  fs::create_directory(dir / "far");
  std::ofstream(dir / "far/target") << "before";
  fs::create_symlink("far/target", dir / "near");      // relative to the link's folder
  fs::create_symlink(dir / "near", dir / "absolute");  // a link to a link
  put(dir / "absolute", "after");
  CHECK(bytes_of(dir / "far/target") == "after");
  CHECK(fs::is_symlink(dir / "near"));
  CHECK(fs::is_symlink(dir / "absolute"));
  CHECK(entries(dir / "far") == 1);

  fs::create_symlink("far/new", dir / "dangling");
  put(dir / "dangling", "made");
  CHECK(bytes_of(dir / "far/new") == "made");
  CHECK(fs::is_symlink(dir / "dangling"));

  fs::create_symlink("round", dir / "round");
  CHECK_THROWS_WITH(put(dir / "round", "x"), Catch::Contains("circle"));
}

TEST_CASE("temporary files of ended processes go, and no others") {
  const test::TemporaryFolder dir;
  const std::string host = host_name(), ended = std::to_string(ended_process());
  const std::string gone = "a.h5." + host + "." + ended + ".tmp", other = "b.h5." + host + "." + ended + ".tmp";
  const std::string kept[] = {
      "a.h5." + host + "." + std::to_string(getppid()) + ".tmp",  // its process runs
      "a.h5.elsewhere." + ended + ".tmp",                         // another host's
      "a.h5." + host + "." + ended + ".tmp.h5",
      "a.h5." + host + ".x.tmp",
      "notes.tmp",
  };
  for (const std::string& name : {gone, other}) std::ofstream(dir / name) << "x";
  for (const std::string& name : kept) std::ofstream(dir / name) << "x";
  remove_abandoned(dir / "", dir / "a.h5");
  CHECK_FALSE(fs::exists(dir / gone));
  CHECK(fs::exists(dir / other));  // of another file
  remove_abandoned(dir / "");
  CHECK_FALSE(fs::exists(dir / other));
  for (const std::string& name : kept) CHECK(fs::exists(dir / name));
}
