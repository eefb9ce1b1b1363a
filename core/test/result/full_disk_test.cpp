#include <algorithm>
#include <catch2/catch.hpp>
#include <filesystem>
#include <fstream>
#include <kvlab/error.hpp>
#include <set>
#include <sstream>

#include "result/profile_file.hpp"
#include "result/results_sample.hpp"
#include "support/full_disk.hpp"
#include "support/skipped.hpp"

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

// The limits at every block's boundary and beside it, and some between.
std::set<std::uint64_t> limits_to(std::uint64_t size) {
  std::set<std::uint64_t> limits;
  for (std::uint64_t at = 0; at <= size + 4096; at += at < 4096 ? 512 : 4096)
    for (const std::uint64_t limit : {at - 1, at, at + 1})
      if (limit <= size + 4096) limits.insert(limit);
  for (std::uint64_t limit = 1; limit < size; limit += 4799) limits.insert(limit);
  for (std::uint64_t limit = size - 3; limit < size + 3; ++limit) limits.insert(limit);
  return limits;
}

std::set<std::string> names_in(const std::string& folder) {
  std::set<std::string> names;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) names.insert(entry.path().filename());
  return names;
}

CellResult cell(const std::string& id, int n) {
  CellResult c = sample_cell(id, n);
  c.step_ms.resize(1);
  c.step_device_ms.resize(1);
  c.step_parts.resize(2);
  return c;
}

RunInfo info() {
  RunInfo i = sample_info();
  i.experiment_yaml.resize(2000);
  return i;
}

// Tries every limit. Either `write` replaces `path`, and `tell` reads the new file, or it throws and changes nothing.
// It never leaves another file.
void sweep(const std::string& folder, const std::string& path, const std::function<void(int)>& write,
           const std::function<std::string()>& tell) {
  write(1);
  const std::string old_told = tell();
  write(2);
  const std::string new_told = tell();
  const std::uint64_t size = fs::file_size(path);
  const std::set<std::string> names = names_in(folder);
  for (const std::uint64_t limit : limits_to(size)) {
    CAPTURE(limit, size);
    write(1);
    const std::string old = bytes_of(path);
    REQUIRE(tell() == old_told);
    std::string message;
    {
      const test::FileSizeLimit held(limit);
      try {
        write(2);
      } catch (const Error& e) {
        REQUIRE(e.code() == Errc::io);
        message = e.what();
      }
    }
    REQUIRE(message.empty() == (limit >= size));
    if (!message.empty()) {
      REQUIRE_THAT(message, Catch::Contains("of " + std::to_string(size) + " bytes") && Catch::Contains(path));
      REQUIRE((bytes_of(path) == old));
    }
    REQUIRE(tell() == (message.empty() ? new_told : old_told));
    REQUIRE(names_in(folder) == names);
  }
}

}  // namespace

TEST_CASE("a part is whole or not there at every limit of bytes") {
  const TemporaryFolder dir;
  const std::string out = dir / "o.h5", path = part_path(out, "a");
  sweep(
      dir / "", path, [&](int n) { write_part(out, cell("a", n), info()); },
      [&] { return std::to_string(read_cell(path, "a").summary.repeat); });
}

TEST_CASE("OUT is whole or as it was at every limit of bytes, and its parts stay") {
  const TemporaryFolder dir;
  const std::string out = dir / "o.h5";
  const std::vector<std::string> ids{"a", "b"};
  for (const std::string& id : ids) write_part(out, cell(id, 1), info());
  sweep(
      dir / "", out,
      [&](int n) {
        rebuild(out, info(), {ids.begin(), ids.begin() + n});
      },
      [&] {
        std::string told;
        for (const std::string& id : ids) try {
            told += read_cell(out, id).id;
          } catch (const Error& e) {
            told += e.code() == Errc::result_file ? "-" : "?";
          }
        return told;
      });
  CHECK(finished(out).cells.size() == 2);
  CHECK(finished(out).warnings.empty());
}

TEST_CASE("a profile is whole or as it was at every limit of bytes") {
  const TemporaryFolder dir;
  const std::string path = dir / "p.h5";
  const auto write = [&](int value) {
    ProfileFile profile{"bundled/recall", "0123456789abcdef", {}, {}};
    ProfileArray array;
    array.values.assign(3000, static_cast<float>(value));
    array.extent = {3000};
    array.unit = "share";
    profile.profilers.push_back({"head_stats", "{}", {{"overlap_1", array}}});
    write_profile(path, info(), profile);
  };
  sweep(dir / "", path, write,
        [&] { return std::to_string(read_profile(path).profilers[0].profile.at("overlap_1").values.at(2999)); });
}

TEST_CASE("cells that need parts again are not lost when there is no room for them") {
  const TemporaryFolder dir;
  const std::string out = dir / "o.h5";
  for (const char* id : {"a", "b"}) write_part(out, cell(id, 1), info());
  rebuild(out, info(), {"a", "b"});
  const std::string whole = bytes_of(out);
  fs::remove_all(parts_folder(out));
  {
    const test::FileSizeLimit held(4096);
    CHECK_THROWS_AS(finished(out), Error);
  }
  CHECK((bytes_of(out) == whole));
  CHECK(finished(out).cells.size() == 2);
}

TEST_CASE("a full file system neither crashes nor loses what is finished") {
  const TemporaryFolder dir;
  if (!test::can_mount_disk(dir / "")) {
    test::say_skipped("no file system can be mounted here");
    return;
  }
  const std::uint64_t page = 4096;
  for (std::uint64_t pages = 1; pages < 60; ++pages) {
    CAPTURE(pages);
    const std::string wrong = test::in_child([&]() -> std::string {
      if (!test::mount_disk(dir / "", pages * page)) return "no disk";
      const std::string out = dir / "o.h5";
      std::set<std::string> written;
      std::vector<std::string> ids;
      bool built = false, refused = false;
      const auto attempt = [&](const auto& action) {
        try {
          action();
          return true;
        } catch (const Error& e) {
          if (e.code() != Errc::io) throw;
          refused = true;
          return false;
        }
      };
      const auto step = [&] {
        ids.clear();
        for (int n = 0; n < 4; ++n) {
          ids.push_back("c" + std::to_string(n));
          if (attempt([&] { write_part(out, cell(ids.back(), n), info()); })) written.insert(ids.back());
          built |= attempt([&] { rebuild(out, info(), ids); });
        }
      };
      const auto holds = [&] {
        const Finished found = finished(out);
        for (const std::string& id : written)
          if (found.cells.count(id) == 0) return false;
        for (const std::string& name : names_in(dir / ""))
          if (name.ends_with(".tmp")) return false;
        if (!written.empty() && read_summary(out).rows.empty()) return false;
        return found.warnings.empty() && found.cells.size() == written.size();
      };
      step();
      if (!holds()) return "lost or left something";
      if (built && !read_summary(out).warnings.empty()) return "damaged OUT";
      if (pages < 4 && !refused) return "fits where nothing can";
      if (!test::resize_disk(dir / "", 64 << 20)) return "no more room";
      step();
      if (written.size() != 4 || !holds() || read_summary(out).rows.size() != 4) return "does not go on";
      return "";
    });
    REQUIRE(wrong == "");
  }
}
