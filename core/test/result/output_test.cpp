#include "result/output.hpp"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <filesystem>
#include <fstream>
#include <kvlab/error.hpp>
#include <sstream>

#include "base/new_file.hpp"
#include "result/profile_file.hpp"
#include "result/results_sample.hpp"
#include "result/sealed.hpp"
#include "support/full_disk.hpp"

using namespace kvlab;
using namespace kvlab::results;
namespace fs = std::filesystem;

namespace {

std::string bytes_of(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream out;
  out << in.rdbuf();
  return out.str();
}

ProfileFile sample_profile() {
  ProfileFile profile{"bundled/recall", "0123456789abcdef", {}, {}};
  ProfileArray array;
  array.values = {1, 2, 3};
  array.extent = {3};
  array.unit = "share";
  profile.profilers.push_back({"head_stats", "{}", {{"overlap_1", array}}});
  return profile;
}

void make_result(const std::string& out) {
  write_part(out, sample_cell("a"), sample_info());
  rebuild(out, sample_info(), {"a"});
}

std::size_t entries(const std::string& folder) {
  return static_cast<std::size_t>(std::distance(fs::directory_iterator(folder), fs::directory_iterator()));
}

// A run and a profile must refuse to begin with this output, and writers must not replace it.
void check_refused(const std::string& out) {
  for (const OutputKind kind : {OutputKind::results, OutputKind::profile}) {
    CHECK_THROWS_AS(check_output(out, kind), Error);
    CHECK_THROWS_AS(open_output(out, "test", kind), Error);
  }
  CHECK_THROWS_AS(write_profile(out, sample_info(), sample_profile()), Error);
  CHECK_THROWS_AS(rebuild(out, sample_info(), {}), Error);
}

}  // namespace

TEST_CASE("an output that cannot be written in the end is refused") {
  const TemporaryFolder dir;
  CHECK_NOTHROW(check_output(dir / "new/folder/o.h5"));
  CHECK_FALSE(fs::exists(dir / "new"));
  CHECK_THROWS_WITH(check_output(dir / ""), Catch::Contains("got a folder"));
  std::ofstream(dir / "notes.txt") << "mine";
  CHECK_THROWS_WITH(check_output(dir / "notes.txt"), Catch::Contains("no result of this kvlab"));
  CHECK_THROWS_WITH(check_output(dir / "notes.txt/o.h5"), Catch::Contains("no folder"));
  rebuild(dir / "o.h5", {}, {});
  CHECK_NOTHROW(check_output(dir / "o.h5"));
  // No file can be made in /proc, whatever the permissions.
  CHECK_THROWS_WITH(check_output("/proc/o.h5"), Catch::Contains("no file can be written"));
  CHECK_THROWS_AS(open_output("/proc/o.h5", "test"), Error);
  CHECK_THROWS_AS(check_output(dir / std::string(250, 'x')), Error);  // the temporary file's name would be too long

  { const auto held = open_output(dir / "new/folder/o.h5", "test"); }
  CHECK(fs::is_directory(parts_folder(dir / "new/folder/o.h5")));
  CHECK(fs::is_empty(parts_folder(dir / "new/folder/o.h5")));
  CHECK(entries(dir / "new/folder") == 1);
}

TEST_CASE("what kvlab did not write is never an output") {
  const TemporaryFolder dir;
  const std::string out = dir / "o.h5";
  const bool parts = GENERATE(false, true);
  if (parts) write_part(out, sample_cell("a"), sample_info());
  SECTION("text") { std::ofstream(out) << "mine"; }
  SECTION("zeros") { std::ofstream(out) << std::string(10000, '\0'); }
  SECTION("HDF5 of others") { std::ofstream(out) << "\x89HDF\r\n\x1a\n" << std::string(2000, 'x'); }
  SECTION("almost a seal") { std::ofstream(out) << "kvlab sealed 2\nbytes 0\n"; }
  const std::string before = bytes_of(out);
  check_refused(out);
  CHECK(bytes_of(out) == before);
  if (parts) {
    CHECK(read_cell(part_path(out, "a"), "a").id == "a");
    CHECK_THROWS_AS(rebuild(out, sample_info(), {"a"}), Error);
    CHECK(bytes_of(out) == before);
  }
}

TEST_CASE("folders, devices, FIFOs and sockets are no outputs, nor are links to them") {
  const TemporaryFolder dir;
  fs::create_directory(dir / "folder");
  REQUIRE(mkfifo((dir / "fifo").c_str(), 0600) == 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string socket_path = dir / "socket";
  REQUIRE(socket_path.size() < sizeof address.sun_path);
  socket_path.copy(address.sun_path, socket_path.size());
  const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
  REQUIRE(bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0);
  const std::string name = GENERATE("folder", "fifo", "socket", "/dev/null", "/dev/full", "/proc/self/status");
  CAPTURE(name);
  const std::string path = name[0] == '/' ? name : dir / name;
  check_refused(path);
  fs::create_symlink(path, dir / "link");
  check_refused(dir / "link");
  CHECK(fs::is_symlink(dir / "link"));
  CHECK(fs::exists(path));
  CHECK_FALSE(fs::exists(path + ".lock"));
  close(fd);
}

TEST_CASE("a damaged file of ours is built again from its parts, and refused without them") {
  const TemporaryFolder dir;
  const std::string out = dir / "o.h5";
  make_result(out);
  const std::uintmax_t size = fs::file_size(out);
  const std::uintmax_t length = GENERATE(as<std::uintmax_t>{}, 0, 1, 14, 15, 511, 512, 5000);
  CAPTURE(length);
  fs::resize_file(out, length);
  {
    const auto held = open_output(out, "test");
    CHECK(rebuild(out, sample_info(), {"a"}).empty());
  }
  CHECK(read_cell(out, "a").id == "a");
  CHECK(fs::file_size(out) == size);
  fs::resize_file(out, length);
  fs::remove_all(parts_folder(out));
  CHECK_THROWS_WITH(check_output(out), Catch::Contains("would be overwritten"));
  CHECK(fs::file_size(out) == length);
}

TEST_CASE("a run does not replace a profile, nor a profile a result") {
  const TemporaryFolder dir;
  const std::string result = dir / "r.h5", profile = dir / "p.h5";
  make_result(result);
  write_profile(profile, sample_info(), sample_profile());
  CHECK_NOTHROW(check_output(result));
  CHECK_NOTHROW(check_output(profile, OutputKind::profile));
  CHECK_THROWS_WITH(check_output(profile), Catch::Contains("got a profile file"));
  CHECK_THROWS_WITH(check_output(result, OutputKind::profile), Catch::Contains("got a result file"));
  fs::create_directory(parts_folder(profile));
  fs::copy_file(part_path(result, "a"), part_path(profile, "a"));
  CHECK_THROWS_WITH(check_output(profile), Catch::Contains("got a profile file"));
  CHECK_THROWS_WITH(check_output(part_path(result, "a")), Catch::Contains("finished cell"));
  // Parts of a run without OUT.
  fs::remove(result);
  CHECK_THROWS_WITH(check_output(result, OutputKind::profile), Catch::Contains("whose parts"));
}

TEST_CASE("an output that is a symbolic link is written where it leads") {
  const TemporaryFolder dir;
  fs::create_directory(dir / "far");
  const std::string link = dir / "link.h5", target = dir / "far/target.h5";
  fs::create_symlink("far/target.h5", link);
  if (GENERATE(false, true)) make_result(target);  // false: the link's target does not exist
  {
    const auto held = open_output(link, "test");
    CHECK(fs::exists(target + ".lock"));
    write_part(link, sample_cell("b"), sample_info());
    rebuild(link, sample_info(), {"b"});
    CHECK(finished(target).cells.count("b") == 1);
  }
  CHECK(fs::is_symlink(link));
  CHECK(fs::is_regular_file(fs::symlink_status(target)));
  CHECK(read_cell(target, "b").id == "b");
  CHECK(read_summary(link).rows.size() == 1);
  CHECK(parts_folder(link) == parts_folder(target));
  CHECK(entries(dir / "") == 2);
  CHECK(entries(dir / "far") == 2);
}

TEST_CASE("among the parts, what kvlab did not write is neither renamed, removed nor replaced") {
  const TemporaryFolder dir;
  const std::string out = dir / "o.h5";
  make_result(out);
  std::ofstream(parts_folder(out) + "/notes.h5") << "mine";
  std::ofstream(parts_folder(out) + "/c.h5") << "mine too";
  std::ofstream(part_path(out, "d") + ".damaged") << "an earlier one";
  write_part(out, sample_cell("d"), sample_info());
  fs::resize_file(part_path(out, "d"), 600);

  CHECK_THROWS_WITH(open_output(out, "test", OutputKind::results, {"a", "c"}), Catch::Contains("did not write"));
  CHECK_THROWS_AS(write_part(out, sample_cell("c"), sample_info()), Error);
  const Finished found = finished(out);
  CHECK(found.cells.size() == 1);
  CHECK(found.warnings.size() == 3);
  CHECK(bytes_of(parts_folder(out) + "/notes.h5") == "mine");
  CHECK(bytes_of(part_path(out, "c")) == "mine too");
  CHECK(bytes_of(part_path(out, "d") + ".damaged") == "an earlier one");
  CHECK(fs::file_size(part_path(out, "d") + ".damaged.2") == 600);
}

TEST_CASE("OUT.parts may be a link to a folder and nothing else") {
  const TemporaryFolder dir;
  const std::string out = dir / "o.h5";
  fs::create_directory(dir / "big");
  fs::create_symlink("big", parts_folder(out));
  {
    const auto held = open_output(out, "test");
    make_result(out);
  }
  CHECK(fs::exists(dir / "big/a.h5"));
  std::ofstream(dir / "x.h5.parts") << "mine";
  CHECK_THROWS_AS(open_output(dir / "x.h5", "test"), Error);
  CHECK(bytes_of(dir / "x.h5.parts") == "mine");
  fs::create_symlink("nowhere", dir / "y.h5.parts");
  CHECK_THROWS_AS(open_output(dir / "y.h5", "test"), Error);
  CHECK_FALSE(fs::exists(dir / "nowhere"));
}

TEST_CASE("a file that the run reads is not its output") {
  const TemporaryFolder dir;
  make_result(dir / "a.h5");
  make_result(dir / "b.h5");
  fs::create_symlink("a.h5", dir / "link.h5");
  CHECK_NOTHROW(check_apart(dir / "a.h5", {dir / "b.h5", dir / "none.h5"}));
  CHECK_NOTHROW(check_apart(dir / "none.h5", {dir / "b.h5"}));
  CHECK_THROWS_WITH(check_apart(dir / "a.h5", {dir / "b.h5", dir / "link.h5"}), Catch::Contains("the run reads"));
  CHECK_THROWS_AS(check_apart(dir / "link.h5", {dir / "./a.h5"}), Error);
}

TEST_CASE("a second writer of an output is refused with the first one's host and process") {
  const TemporaryFolder dir;
  const std::string out = dir / "o.h5";
  auto first = open_output(out, "kvlab run one.yaml");
  const std::string process = std::to_string(getpid());
  const auto second = [&] {
    return test::in_child([&]() -> std::string {
      try {
        const auto held = open_output(out, "kvlab run two.yaml");
        return "";
      } catch (const Error& e) {
        return e.what();
      }
    });
  };
  CHECK_THAT(second(), Catch::Contains("process " + process) && Catch::Contains("host " + host_name()) &&
                           Catch::Contains("kvlab run one.yaml"));
  // A child that inherited the lock ends without releasing it.
  CHECK(test::in_child([&] {
          first.reset();
          return "";
        }).empty());
  CHECK_THAT(second(), Catch::Contains("process " + process));
  make_result(out);
  CHECK(read_summary(out).rows.size() == 1);  // readers need no lock
  first.reset();
  CHECK(second() == "");
  CHECK_FALSE(fs::exists(out + ".lock"));
}

TEST_CASE("a killed holder blocks nobody, and a foreign file of the lock's name stays") {
  const TemporaryFolder dir;
  const std::string out = dir / "o.h5";
  CHECK_THAT(test::in_child([&]() -> std::string {
               const auto held = open_output(out, "test");
               kill(getpid(), SIGKILL);
               return "";
             }),
             Catch::Contains("signal 9"));
  CHECK(fs::exists(out + ".lock"));
  { const auto held = open_output(out, "test"); }
  CHECK_FALSE(fs::exists(out + ".lock"));
  std::ofstream(out + ".lock") << "mine";
  CHECK_THROWS_WITH(open_output(out, "test"), Catch::Contains("did not write"));
  CHECK(bytes_of(out + ".lock") == "mine");
}
