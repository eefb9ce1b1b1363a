#include "base/content_hash.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <chrono>
#include <csignal>
#include <set>
#include <thread>

#include "base/sha256.hpp"
#include "base/stop.hpp"
#include "base/xxh64.hpp"
#include "test/model/tiny_files.hpp"

using namespace kvlab;
using namespace kvlab::test;
namespace fs = std::filesystem;

namespace {

constexpr std::size_t large = ContentHashes::remembered_from + 12345;

std::string pattern(std::size_t bytes) {
  std::string text(bytes, '\0');
  for (std::size_t i = 0; i < bytes; ++i) text[i] = static_cast<char>(i * 2654435761u >> 13);
  return text;
}

// Writes one byte in place and restores the modification time, as somebody who hides the change would.
void alter(const fs::path& path, std::size_t at) {
  struct stat before {};
  REQUIRE(::stat(path.c_str(), &before) == 0);
  const int fd = ::open(path.c_str(), O_RDWR);
  char byte = 0;
  REQUIRE(::pread(fd, &byte, 1, static_cast<off_t>(at)) == 1);
  byte = static_cast<char>(byte ^ 1);
  REQUIRE(::pwrite(fd, &byte, 1, static_cast<off_t>(at)) == 1);
  const timespec times[2] = {before.st_atim, before.st_mtim};
  REQUIRE(::futimens(fd, times) == 0);
  ::close(fd);
}

void let_times_settle() { std::this_thread::sleep_for(std::chrono::milliseconds(2100)); }

}  // namespace

TEST_CASE("XXH64 agrees with values published for it") {
  CHECK(xxh64("") == 0xef46db3751d8e999ull);
  CHECK(xxh64("a") == 0xd24ec4f1a98c6e5bull);
  CHECK(xxh64("as") == 0x1c330fb2d66be179ull);
  CHECK(xxh64("asd") == 0x631c37ce72a97393ull);
  CHECK(xxh64("asdf") == 0x415872f599cea71eull);
  CHECK(xxh64("Call me Ishmael. Some years ago--never mind how long precisely-") == 0x02a2e85470d6fd96ull);
}

TEST_CASE("a content hash follows every byte and the length, and nothing else") {
  const TempDir dir;
  ContentHashes hashes(dir / "hashes");
  std::set<std::string> seen;
  const std::string text = pattern(large);
  const fs::path file = write_file(dir / "a", text);
  const std::string whole = hashes.of(file);
  CHECK(whole.size() == 16);
  seen.insert(whole);
  for (const std::size_t at : {std::size_t{0}, large / 2, std::size_t{4 << 20} - 1, std::size_t{4 << 20}, large - 1}) {
    std::string other = text;
    other[at] = static_cast<char>(other[at] ^ 1);
    seen.insert(hashes.of(write_file(dir / "b", other)));
  }
  seen.insert(hashes.of(write_file(dir / "b", text.substr(0, large - 1))));
  seen.insert(hashes.of(write_file(dir / "b", text + '\0')));
  seen.insert(hashes.of(write_file(dir / "b", "")));
  CHECK(seen.size() == 9);
  fs::create_directory(dir / "elsewhere");
  CHECK(hashes.of(write_file(dir / "elsewhere/c", text)) == whole);
  CHECK(hashes.sha256_of(file) == sha256_hex(text));
}

TEST_CASE("a large file is hashed once, until it changes, whatever its modification time says") {
  const TempDir dir;
  const fs::path file = write_file(dir / "weights", pattern(large));
  const std::uint64_t size = large;
  {  // The file is just written, so its times may not show a second write.
    ContentHashes hashes(dir / "hashes");
    hashes.of(file);
    hashes.of(file);
    CHECK(hashes.bytes_hashed() == 2 * size);
  }
  let_times_settle();
  std::string first;
  {
    ContentHashes hashes(dir / "hashes");
    first = hashes.of(file);
    CHECK(hashes.of(file) == first);
    CHECK(hashes.bytes_hashed() == size);
  }
  {
    ContentHashes next_run(dir / "hashes");
    CHECK(next_run.of(file) == first);
    CHECK(next_run.bytes_hashed() == 0);
    alter(file, large / 2);
    CHECK(next_run.of(file) != first);
    CHECK(next_run.bytes_hashed() == size);
    alter(file, large / 2);  // as it was
  }
  let_times_settle();
  {
    ContentHashes hashes(dir / "hashes");
    CHECK(hashes.of(file) == first);
    CHECK(hashes.bytes_hashed() == size);
  }
  // Damaged records, also ones with another hash, are replaced after the file is hashed again.
  fs::path record;
  for (const auto& entry : fs::directory_iterator(dir / "hashes")) record = entry.path();
  const std::string good = [&] {
    std::ifstream in(record);
    return std::string(std::istreambuf_iterator<char>(in), {});
  }();
  REQUIRE(good.find(first) != std::string::npos);
  std::string forged = good;
  forged[good.find(first)] = first[0] == '0' ? '1' : '0';
  for (const std::string& damaged :
       {forged, good.substr(0, good.size() / 2), std::string(), std::string(5000, '\xff')}) {
    write_file(record, damaged);
    ContentHashes hashes(dir / "hashes");
    CHECK(hashes.of(file) == first);
    CHECK(hashes.bytes_hashed() == size);
    ContentHashes mended(dir / "hashes");
    CHECK(mended.of(file) == first);
    CHECK(mended.bytes_hashed() == 0);
  }
  // Without a folder for records each process hashes the file once.
  write_file(dir / "no_folder", "");
  ContentHashes nowhere(dir / "no_folder");
  CHECK(nowhere.of(file) == first);
  CHECK(nowhere.of(file) == first);
  CHECK(nowhere.bytes_hashed() == size);
}

TEST_CASE("what cannot be hashed is an error") {
  const TempDir dir;
  ContentHashes hashes(dir / "hashes");
  CHECK(message_of([&] { hashes.of(dir / "none"); }).find("No such file") != std::string::npos);
  CHECK(message_of([&] { hashes.of("/dev/zero"); }).find("got a device") != std::string::npos);
}

TEST_CASE("a signal ends hashing, which takes seconds for a large model") {
  const TempDir dir;
  const fs::path file = write_file(dir / "a", pattern(large));
  ContentHashes hashes(dir / "hashes");
  stop::detail::signal = SIGTERM;
  CHECK_THROWS_AS(hashes.of(file), stop::Interrupted);
  CHECK_THROWS_AS(hashes.sha256_of(file), stop::Interrupted);
  stop::detail::signal = 0;
  CHECK(hashes.of(file).size() == 16);
}
